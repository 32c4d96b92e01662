"""Replicas that come and go under load: nobody's request fails, and what they knew stays."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import ray
from ray import serve
from ray.util import list_named_actors

from mneme.cluster.app import build
from mneme.cluster.run.local_cluster import APPLICATION
from tests.e2e.metrics import read_metrics
from tests.e2e.nodes.cache_cluster import MARKS, CacheCluster, eventually
from tests.e2e.server_process import free_port
from tests.e2e.test_cache_tier import await_saved
from tests.e2e.test_documents import TEXTS, ask, check_documents

pytestmark = MARKS

MODEL = "mneme-tiny"
PROMPT = "Once upon a time there was a small library in which every book could remember its reader."
PROMPTS = [f"{number}. {PROMPT}" for number in (0, 1, 2, 4, 5, 6, 7, 8)]  # no near tie: test_near_ties.py
LONG, SHORT = 800, 8  # tokens; seconds of work for so many streams
WORTH_ASKING = 80  # tokens of a stream: fewer than `MIN_LOAD_TOKENS` are computed without asking the tier
ENGINE = {"dtype": "float32", "num_pages": 512, "page_size": 32}  # the same tokens in any batch, but for near ties
FROM_TIER = f'vllm:external_prefix_cache_hits_total{{model_name="{MODEL}"}}'
ANSWER_LIMIT_S = 240.0
MAX_IN_FLIGHT = 16  # of a load: where the machine is too slow for its rate no queue grows


class Served:
    """The whole application on a test's nodes; `deploy` again with other settings is a rolling update."""

    def __init__(self, **settings: Any) -> None:
        port = free_port()
        self.url, self._settings = f"http://127.0.0.1:{port}", settings
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})

    def deploy(self, **settings: Any) -> None:
        """Returns when all replicas have these settings, and what they replace has gone."""
        self._settings |= settings
        serve.run(build({"model": MODEL, **self._settings}), name=APPLICATION, route_prefix="/")

    def states(self) -> dict[Any, int]:
        """Replicas by Serve's state."""
        return dict(serve.status().applications[APPLICATION].deployments["engine"].replica_states)

    def from_tier(self) -> float:
        """How many prompt tokens the replicas of now had from the tier; none may answer for itself at the moment."""
        return read_metrics(self.url).values.get(FROM_TIER, 0.0)

    def stream(self, prompt: str, num: int, on_chunk: Callable[[int], object] = lambda _: None) -> str:
        """The text of a stream that ends as it should; `on_chunk` hears of each chunk by its number."""
        body = {"prompt": prompt, "max_tokens": num, "min_tokens": num, "ignore_eos": True, "temperature": 0}
        body |= {"model": MODEL, "stream": True}
        text, line, num_chunks = "", "", 0
        with httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=ANSWER_LIMIT_S) as answer:
            answer.raise_for_status()
            for line in filter(None, answer.iter_lines()):
                if line.startswith("data: {"):
                    chunk = json.loads(line.removeprefix("data: "))
                    assert "error" not in chunk, chunk
                    text += chunk["choices"][0]["text"] if chunk["choices"] else ""
                    num_chunks += 1
                    on_chunk(num_chunks)
        assert line == "data: [DONE]"
        return text


@pytest.fixture(scope="module")
def served(cluster: CacheCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    disk = {"folder": f"{tmp_path_factory.mktemp('kv')}/%n", "capacity_bytes": 1 << 30}
    made = Served(engine=ENGINE, cache={"load": "always", "disk": disk}, replicas=2, drain_grace_s=0.2)
    try:
        made.deploy()
        yield made
    finally:
        serve.shutdown()


@pytest.mark.slow
def test_scale_down_and_redeploys_fail_no_request(served: Served) -> None:
    """Dynamo's issue 13559: 8 requests a second, then one, while replicas go; and streams longer than the grace.

    What is handed over is not computed again: the replica that goes on finds it in the tier. That is seen while it
    runs, as each is replaced in turn and takes its counters along.
    """
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        expected = dict(zip(PROMPTS, pool.map(lambda prompt: served.stream(prompt, LONG), PROMPTS), strict=True))
    short = served.stream(PROMPT, SHORT)
    num_from_tier = change_under_load(served, expected, short, replicas=1)
    served.deploy(replicas=2)
    num_from_tier += change_under_load(served, expected, short, engine=ENGINE | {"num_pages": 384})
    assert num_from_tier > 0


def change_under_load(served: Served, expected: dict[str, str], short: str, **change: object) -> float:
    """Return how many more prompt tokens replicas of one moment had from the tier than those of the first.

    Each of `expected` is asked for until the change is done: a replica that goes has streams, however fast they are.
    """
    begun, has_changed = threading.Barrier(len(expected) + 1, timeout=ANSWER_LIMIT_S), threading.Event()
    seen, asked = [served.from_tier()], list[Future[str]]()
    with ThreadPoolExecutor(len(expected) + MAX_IN_FLIGHT + 1) as pool:

        def stream(prompt: str) -> set[str]:
            texts = {served.stream(prompt, LONG, lambda number: number == WORTH_ASKING and begun.wait())}
            while not has_changed.is_set():
                texts.add(served.stream(prompt, LONG))
            return texts

        streams = {prompt: pool.submit(stream, prompt) for prompt in expected}
        begun.wait()
        deploying = pool.submit(served.deploy, **change)
        deploying.add_done_callback(lambda _: has_changed.set())
        while not deploying.done() or len(asked) < 16:
            if sum(not each.done() for each in asked) < MAX_IN_FLIGHT:
                asked.append(pool.submit(served.stream, PROMPT, SHORT))
            time.sleep(1 / 8)
            seen.append(served.from_tier())
        deploying.result()
        time.sleep(5)  # then one: none of those that went was the last to be asked
        asked.append(pool.submit(served.stream, PROMPT, SHORT))
        assert {prompt: each.result() for prompt, each in streams.items()} == {
            prompt: {text} for prompt, text in expected.items()
        }
        assert {each.result() for each in asked} == {short}
    return max(seen) - seen[0]


@pytest.mark.slow
def test_documents_are_read_from_the_node_that_computed_them(served: Served) -> None:
    """In another order, by the replica of the other node, as theirs is gone."""
    served.deploy(replicas=2, cpus_per_replica=0.6)  # a node has room for one
    with httpx.Client(base_url=served.url, timeout=ANSWER_LIMIT_S) as http:
        first = ask(http, [0, 1], "first")
        check_documents(first, "computed")
        told = dict(zip(TEXTS, first["usage"]["kv_details"]["blend"]["documents"], strict=True))
        for text, document in told.items():
            await_saved(http, document["tokens"], model=MODEL, document=text)
        (choice,) = http.get(f"/v1/kv/explain/{first['id']}").raise_for_status().json()["choices"]
        actors = list_named_actors(all_namespaces=True)
        (home,) = (each for each in actors if each["name"].endswith(choice["replica"]))
        ray.kill(ray.get_actor(home["name"], home["namespace"]))
        for text, document in told.items():  # now it is the other node that says so, once Ray has seen who is gone
            asked = {"model": MODEL, "document": text}
            eventually(lambda asked=asked: http.post("/v1/kv/lookup", json=asked).is_success)  # type: ignore[misc]
            await_saved(http, document["tokens"], model=MODEL, document=text)
        check_documents(ask(http, [1, 0], "elsewhere"), "peer")
    eventually(lambda: served.states() == {"RUNNING": 2})


def test_the_first_request_brings_back_a_replica_where_there_is_none(served: Served) -> None:
    served.deploy(replicas=None, engine=ENGINE, autoscale={"min": 0, "max": 1, "downscale_delay_s": 1.0})
    expected = served.stream(PROMPT, SHORT)
    eventually(lambda: not any(served.states().values()))
    eventually(lambda: httpx.get(f"{served.url}/ready", timeout=ANSWER_LIMIT_S).json()["replicas"] == 0)
    assert served.stream(PROMPT, SHORT) == expected
