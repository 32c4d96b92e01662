"""A real engine process that hangs: nobody asks it, and it is replaced. Other silences: tests/cluster/serve."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.e2e.replica_processes import replica_pids
from tests.e2e.server_process import free_port, running
from tests.fakes.serve_faulty import fault_file

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

STALLED_S = 40.0  # it is 8 s where steps are as short as predicted, and in proportion longer on a busy machine
RESTART_S = 240.0  # until it counts as hung, its health checks, and a start, on a machine that is busy


def within(limit_s: float, condition: Callable[[], bool]) -> None:
    begun_s = time.monotonic()
    while not condition():
        assert time.monotonic() - begun_s < limit_s
        time.sleep(0.1)


def test_a_replica_that_hangs_is_not_ready_and_is_replaced(tmp_path: Path) -> None:
    command = (sys.executable, "-m", "tests.fakes.serve_faulty", "replicas=2", f"port={free_port()}")
    with (
        running(*command, MNEME_FAULTS=str(tmp_path)) as process,
        httpx.Client(base_url=process.await_ready(), timeout=60) as http,
    ):

        def num_ready() -> int:
            return int(http.get("/ready").json()["replicas"])

        def say() -> list[str]:
            bodies = [
                {"model": "mneme-tiny", "prompt": f"{n} " * 20, "max_tokens": 8, "temperature": 0} for n in range(4)
            ]
            answers = [http.post("/v1/completions", json=body).raise_for_status().json() for body in bodies]
            return [each["choices"][0]["text"] for each in answers]

        answers = say()
        hung, other = replica_pids(process)
        fault_file(tmp_path, hung).write_text("hang")
        within(STALLED_S, lambda: num_ready() == 1)
        assert hung in replica_pids(process)  # nobody asks it before it is ended
        assert say() == answers
        within(RESTART_S, lambda: num_ready() == 2)
        assert other in replica_pids(process)
        assert say() == answers
        within(RESTART_S, lambda: hung not in replica_pids(process))
