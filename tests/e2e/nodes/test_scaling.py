"""Replicas that come and go under load: nobody's request fails, and what they knew stays."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from ray import serve

from tests.e2e.nodes.cache_cluster import MARKS, CacheCluster
from tests.e2e.nodes.served import MODEL, Load, Served, running

pytestmark = MARKS

PROMPT = "Once upon a time there was a small library in which every book could remember its reader."
PROMPTS = [f"{number}. {PROMPT}" for number in (0, 1, 2, 4, 5, 6, 7, 8)]  # no near tie: test_near_ties.py
LONG, SHORT = 800, 8  # tokens; seconds of work for so many streams
WORTH_ASKING = 80  # tokens of a stream: fewer than `MIN_LOAD_TOKENS` are computed without asking the tier
ENGINE = {"dtype": "float32", "num_pages": 512, "page_size": 32}  # the same tokens in any batch, but for near ties
FROM_TIER = f'vllm:external_prefix_cache_hits_total{{model_name="{MODEL}"}}'


@pytest.fixture(scope="module")
def served(cluster: CacheCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder: Path = tmp_path_factory.mktemp("kv")
    made = Served(
        engine=ENGINE,
        cache={"load": "always", "disk": {"folder": f"{folder}/%n", "capacity_bytes": 1 << 30}},
        replicas=2,
        drain_grace_s=0.2,
    )
    try:
        made.deploy()
        yield made
    finally:
        serve.shutdown()


@pytest.mark.slow
def test_scale_down_and_redeploys_fail_no_request(served: Served) -> None:
    """Dynamo's issue 13559: 8 requests a second, then 0.2, while replicas go; and streams longer than the grace.

    What is handed over is not computed again: the replica that goes on finds it in the tier. That is seen while it
    runs, as each is replaced in turn and takes its counters along.
    """
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        expected = dict(zip(PROMPTS, pool.map(lambda prompt: served.complete(prompt, LONG), PROMPTS), strict=True))
    short = served.complete(PROMPT, SHORT)
    num_from_tier = change_under_load(served, expected, short, replicas=1)
    served.deploy(replicas=2)
    num_from_tier += change_under_load(served, expected, short, engine=ENGINE | {"num_pages": 384})
    assert num_from_tier > 0


def from_tier(served: Served) -> float:
    """Return how many prompt tokens the replicas of now had from the tier; none may answer for itself at the moment."""
    return served.metrics().get(FROM_TIER, 0.0)


def change_under_load(served: Served, expected: dict[str, str], short: str, **change: object) -> float:
    """Return how many more prompt tokens replicas of one moment had from the tier than those of the first."""
    begun, done = threading.Barrier(len(expected) + 1, timeout=240), threading.Event()
    seen = [from_tier(served)]

    def stream(prompt: str) -> None:
        chunks = iter(range(LONG))
        assert served.stream(prompt, LONG, lambda: next(chunks) == WORTH_ASKING and begun.wait()) == expected[prompt]

    def deploy() -> None:
        try:
            served.deploy(**change)
        finally:
            done.set()

    def ask(_: int) -> None:
        assert served.complete(PROMPT, SHORT) == short

    def watch() -> None:
        while not done.wait(0.2):
            seen.append(from_tier(served))

    load = Load(ask)
    with running([partial(stream, prompt) for prompt in expected]) as failures:
        begun.wait()
        with running([deploy, watch]) as problems:
            load.at_rate(8, lambda: not done.is_set(), 16)
            load.at_rate(0.2, lambda: False, 1)
        load.join()
    assert (problems, load.failures, failures) == ([], [], [])
    return max(seen) - seen[0]


@pytest.mark.slow
def test_replicas_follow_the_load_and_what_sessions_knew_stays(served: Served) -> None:
    """1 -> 3 -> 1: however fast a machine is, what waits behind two that run takes longer than a ms.

    The load asks for the same answers again, and the disks have room for all: else, the longer a machine takes,
    the more of what the sessions knew would new KV have evicted.
    """
    bounds = {"min": 1, "max": 3, "target_ttft_s": 0.001, "upscale_delay_s": 1.0, "downscale_delay_s": 3.0}
    served.deploy(replicas=None, autoscale=bounds, engine=ENGINE | {"max_running": 2})
    served.await_replicas(1)
    sessions = [f"session-{number}" for number in range(9)]
    load, is_enough = Load(lambda number: served.complete(PROMPTS[number % 8], 32)), threading.Event()
    with running([lambda: load.at_rate(8, lambda: not is_enough.is_set(), 1)]) as problems:
        try:
            served.await_replicas(3)
            for session in sessions:
                say(served, session, f"{session}. {PROMPT * 10}")
            before = [say(served, session, "And then?") for _ in range(2) for session in sessions]
        finally:
            is_enough.set()
    load.join()
    is_enough.clear()
    with running([partial(ask_now_and_then, served, is_enough)]) as more_problems:
        try:
            served.await_replicas(1)
            after = [say(served, session, "And in the end?") for _ in range(2) for session in sessions]
        finally:
            is_enough.set()
    assert (problems, load.failures, more_problems) == ([], [], [])
    said = {name: value for name, value in served.metrics().items() if "mneme_cache" in name and value}
    assert hit_rate(after) >= 0.9 * hit_rate(before), (after, said)
    assert [served.metrics()[f'mneme_replicas{{state="{state}"}}'] for state in ("ready", "wanted")] == [1, 1]


def ask_now_and_then(served: Served, is_enough: threading.Event) -> None:
    """Little to do, however slow the machine is: a tenth of the time at most."""
    while not is_enough.is_set():
        began_s = time.monotonic()
        served.complete(PROMPT, SHORT)
        is_enough.wait(max(0.5, 9 * (time.monotonic() - began_s)))


def test_the_first_request_brings_back_a_replica_where_there_is_none(served: Served) -> None:
    served.deploy(replicas=None, engine=ENGINE, autoscale={"min": 0, "max": 1, "downscale_delay_s": 1.0})
    expected = served.complete(PROMPT, SHORT)
    served.await_replicas(0)
    assert served.complete(PROMPT, SHORT) == expected


def say(served: Served, session: str, text: str) -> dict[str, Any]:
    """A turn's usage; what was said before the server adds."""
    body = {"messages": [{"role": "user", "content": text}], "session": {"id": session, "append": True}}
    if "And" not in text:
        body["session"] = {"id": session}
    found = served.post("/v1/chat/completions", {**body, "max_tokens": 16, "min_tokens": 16, "temperature": 0})
    usage: dict[str, Any] = found["usage"]
    return usage


def hit_rate(usages: list[dict[str, Any]]) -> float:
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    return cached / sum(usage["prompt_tokens"] for usage in usages)
