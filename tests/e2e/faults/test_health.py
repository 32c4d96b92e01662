"""Real engine processes that are paused, hang, or are not heard of: nobody asks them, and who hangs is replaced.

One server for all, in this order: the last test leaves a replica that reports nothing any more.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.cluster.metric_samples import samples_of
from tests.e2e.replica_processes import replica_pids
from tests.e2e.server_process import ServerProcess, free_port
from tests.fakes.serve_faulty import fault_file

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SERVE_FAULTY = (sys.executable, "-m", "tests.fakes.serve_faulty")
ENGINES = "ray::ServeReplica:mneme:engine"
RESTART_S = 240.0  # until it counts as hung, its health checks, and a start, on a machine that is busy


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def process(faults: Path) -> Iterator[ServerProcess]:
    process = ServerProcess((*SERVE_FAULTY, "replicas=2", f"port={free_port()}"), MNEME_FAULTS=str(faults))
    try:
        process.await_ready()
        yield process
    finally:
        process.discard()


@pytest.fixture(scope="module")
def http(process: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=process.await_ready(), timeout=60) as http:
        yield http


def within(limit_s: float, condition: Callable[[], bool]) -> float:
    """Wait for it; returns how long that took."""
    begun_s = time.monotonic()
    while not condition():
        assert time.monotonic() - begun_s < limit_s
        time.sleep(0.1)
    return time.monotonic() - begun_s


def num_ready(http: httpx.Client) -> int:
    return int(http.get("/ready").json()["replicas"])


def say(http: httpx.Client, number: int) -> str:
    body = {"model": "mneme-tiny", "prompt": f"{number} " * 20, "max_tokens": 8, "temperature": 0}
    text: str = http.post("/v1/completions", json=body).raise_for_status().json()["choices"][0]["text"]
    return text


def test_a_paused_replica_lowers_no_counter_and_is_asked_for_nothing(
    process: ServerProcess, http: httpx.Client
) -> None:
    def counters() -> dict[str, float]:
        found = samples_of(http.get("/metrics").raise_for_status().text)
        return {name: value for name, value in found.items() if name.partition("{")[0].endswith("_total")}

    for number in range(4):
        say(http, number)
    time.sleep(1.0)  # figures are so old at most
    pages = [counters()]
    paused, _ = replica_pids(process, ENGINES)
    os.kill(paused, signal.SIGSTOP)
    try:
        time.sleep(1.2)
        pages.append(counters())
        about = http.get("/").json()
        assert (about["replicas"], about["device"]) == (2, "cpu")
        within(10.0, lambda: num_ready(http) == 1)
        say(http, 5)
        pages.append(counters())
    finally:
        os.kill(paused, signal.SIGCONT)
    within(60.0, lambda: num_ready(http) == 2)
    say(http, 6)
    time.sleep(1.0)
    pages.append(counters())
    highest: dict[str, float] = {}
    for page in pages:
        fallen = {name: (highest[name], value) for name, value in page.items() if value < highest.get(name, 0)}
        assert fallen == {}
        highest |= page
    assert pages[-1].keys() >= pages[0].keys()


def test_a_replica_that_hangs_is_not_ready_within_10_s_and_is_replaced(
    process: ServerProcess, http: httpx.Client, faults: Path
) -> None:
    answers = [say(http, number) for number in range(4)]
    hung, other = replica_pids(process, ENGINES)
    fault_file(faults, hung).write_text("hang")
    within(10.0, lambda: num_ready(http) == 1)
    assert [say(http, number) for number in range(4)] == answers
    within(RESTART_S, lambda: num_ready(http) == 2)
    assert other in replica_pids(process, ENGINES)
    assert [say(http, number) for number in range(4)] == answers
    within(RESTART_S, lambda: hung not in replica_pids(process, ENGINES))


def test_a_replica_that_is_not_heard_of_is_not_taken_for_idle(
    process: ServerProcess, http: httpx.Client, faults: Path
) -> None:
    def asked() -> dict[str, float]:
        found = samples_of(http.get("/metrics").text)
        name = "mneme_finished_requests_total"
        return {key: value for key, value in found.items() if key.startswith(name) and "length" in key}

    silent, _ = replica_pids(process, ENGINES)
    fault_file(faults, silent).write_text("no reports")
    time.sleep(12.0)  # `REPORTS_LOST_S`, and as long again: it seems to have as much to do
    before = asked()
    for number in range(10, 22):
        say(http, number)
    time.sleep(1.2)
    more = sorted(value - before.get(key, 0) for key, value in asked().items())
    assert more == [0, 12]
    assert num_ready(http) == 2
