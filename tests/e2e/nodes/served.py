"""The whole application, served on the nodes of a test's Ray cluster, and clients that stream from it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
from ray import serve

from mneme.cluster.app import build
from mneme.cluster.run.local_cluster import APPLICATION
from tests.cluster.metric_samples import totals_of
from tests.e2e.nodes.cache_cluster import eventually
from tests.e2e.server_process import free_port

MODEL = "mneme-tiny"
ANSWER_LIMIT_S = 240.0
MAX_IN_FLIGHT = 16  # of a load


class Served:
    """One application; `deploy` again with other settings is a rolling update."""

    def __init__(self, **settings: Any) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        self._settings = settings
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        serve.start(
            proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": int(self.url.rpartition(":")[2])}
        )

    def deploy(self, **settings: Any) -> None:
        """Returns when all replicas have these settings, and what they replace has gone."""
        self._settings |= settings
        serve.run(build({"model": MODEL, **self._settings}), name=APPLICATION, route_prefix="/")

    def states(self, deployment: str = "engine") -> dict[str, int]:
        """Replicas by Serve's state."""
        found = serve.status().applications[APPLICATION].deployments[deployment].replica_states
        return {str(getattr(state, "value", state)): count for state, count in found.items() if count}

    def metrics(self) -> dict[str, float]:
        return totals_of(httpx.get(f"{self.url}/metrics", timeout=240).raise_for_status().text)

    def await_replicas(self, count: int) -> None:
        """As many are ready, and none is on its way in or out."""
        eventually(lambda: self.states() == ({"RUNNING": count} if count else {}))
        eventually(lambda: httpx.get(f"{self.url}/ready", timeout=240).json()["replicas"] == count)

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = httpx.post(f"{self.url}{path}", json={"model": MODEL, **body}, timeout=ANSWER_LIMIT_S)
        found: dict[str, Any] = answer.raise_for_status().json()
        return found

    def complete(self, prompt: str, num: int, **more: Any) -> str:
        body = {"prompt": prompt, "max_tokens": num, "min_tokens": num, "ignore_eos": True, "temperature": 0, **more}
        text: str = self.post("/v1/completions", body)["choices"][0]["text"]
        return text

    def stream(self, prompt: str, num: int, on_chunk: Callable[[], object] = lambda: None) -> str:
        """The text of a stream that ends as it should."""
        body = {"prompt": prompt, "max_tokens": num, "min_tokens": num, "ignore_eos": True, "temperature": 0}
        body |= {"model": MODEL, "stream": True}
        text, lines = "", []
        with httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=ANSWER_LIMIT_S) as answer:
            answer.raise_for_status()
            for line in answer.iter_lines():
                lines.append(line)
                if line.startswith("data: {"):
                    chunk = httpx.Response(200, content=line.removeprefix("data: ")).json()
                    assert "error" not in chunk, chunk
                    text += chunk["choices"][0]["text"] if chunk["choices"] else ""
                    on_chunk()
        assert "data: [DONE]" in lines, lines[-3:]
        return text


@dataclass
class Load:
    """Requests at a rate, each of its own thread; what failed is kept.

    Only so many at a time: where the machine is too slow for the rate no queue grows.
    """

    send: Callable[[int], object]
    failures: list[BaseException] = field(default_factory=list)
    num_sent: int = 0
    _threads: list[threading.Thread] = field(default_factory=list)
    _places: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(MAX_IN_FLIGHT))

    def at_rate(self, per_s: float, while_: Callable[[], bool], at_least: int) -> None:
        """Send on until there were enough and `while_` is false."""
        due_s, first = time.monotonic(), self.num_sent
        while self.num_sent - first < at_least or while_():
            thread = threading.Thread(target=self._one, args=(self.num_sent,), daemon=True)
            assert self._places.acquire(timeout=ANSWER_LIMIT_S)
            self._threads.append(thread)
            self.num_sent += 1
            thread.start()
            due_s += 1 / per_s
            time.sleep(max(0.0, due_s - time.monotonic()))

    def join(self) -> None:
        for thread in self._threads:
            thread.join(ANSWER_LIMIT_S)
            assert not thread.is_alive()
        self._threads.clear()

    def _one(self, number: int) -> None:
        try:
            self.send(number)
        except BaseException as error:  # the test's thread says so
            self.failures.append(error)
        finally:
            self._places.release()


@contextmanager
def running(tasks: Sequence[Callable[[], object]]) -> Iterator[list[BaseException]]:
    """Run each in a thread meanwhile; what they raised."""
    failures: list[BaseException] = []

    def run(task: Callable[[], object]) -> None:
        try:
            task()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(task,), daemon=True) for task in tasks]
    for thread in threads:
        thread.start()
    yield failures
    for thread in threads:
        thread.join(ANSWER_LIMIT_S)
        assert not thread.is_alive()
