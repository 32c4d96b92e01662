"""/v1/responses through the `openai` client: a tour of one cluster, another replica after a kill, the next cluster."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from openai import OpenAI

from tests.e2e.replica_processes import cpu_seconds
from tests.e2e.server_process import SERVE, ServerProcess, free_port

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "clients"))
import openai_responses as tour

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

NUM_TRIES = 20  # with pauses of seconds: until Ray has seen that a replica is gone, sessions are a 503


@contextmanager
def served(folder: Path) -> Iterator[tuple[ServerProcess, OpenAI]]:
    process = ServerProcess([*SERVE, tour.MODEL, "--port", str(free_port()), *tour.settings(str(folder))])
    try:
        with tour.strict_client(process.await_ready()) as client:
            yield process, client
    finally:
        process.discard()


def test_responses_outlive_their_replica_and_their_cluster(tmp_path: Path) -> None:
    with served(tmp_path) as (process, client):
        before = cpu_seconds(process)
        kept, last = tour.begin(client)
        assert all(kept.values()), kept
        busy = cpu_seconds(process)
        os.kill(max(busy, key=lambda pid: busy[pid] - before[pid]), signal.SIGKILL)
        moved = tour.say(client.with_options(max_retries=NUM_TRIES), "Why?", previous_response_id=last.id)
        assert moved.usage.input_tokens > last.usage.total_tokens
        process.stop()
    with served(tmp_path) as (_, client):
        kept = tour.go_on(client, last)
        assert all(kept.values()), kept
        assert client.responses.retrieve(moved.id) == moved
