"""KV and sessions outlive their replica and their cluster: another replica goes on, and so does the next cluster."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.replica_processes import cpu_seconds
from tests.e2e.server_process import SERVE, ServerProcess, free_port

pytestmark = pytest.mark.e2e

MODEL = "mneme-tiny"
STORY = "Once upon a time there was a small library in which every book could remember its reader. " * 30
NUM_OUTPUT = 16
SAVE_LIMIT_S = 180.0  # on a machine that is busy with other things


@contextmanager
def served(folder: Path) -> Iterator[tuple[ServerProcess, httpx.Client]]:
    settings = (
        *("--set", "engine.dtype=float32"),
        *("--set", "cache.load=always"),  # whatever this machine takes for it: so tiny a model is computed sooner
        *("--set", f"cache.disk.folder={folder}"),
        *("--set", f"cache.disk.capacity_bytes={64 * 2**20}"),
    )
    process = ServerProcess([*SERVE, MODEL, "--replicas", "2", "--port", str(free_port()), *settings])
    try:
        with httpx.Client(base_url=process.await_ready(), timeout=120) as http:
            yield process, http
    finally:
        process.discard()


def say(http: httpx.Client, text: str, session: str, **options: Any) -> dict[str, Any]:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": NUM_OUTPUT,
        "min_tokens": NUM_OUTPUT,
        "temperature": 0,
        "session": {"id": session, "append": True} if options.pop("append", False) else {"id": session},
    }
    found: dict[str, Any] = http.post("/v1/chat/completions", json={**body, **options}).raise_for_status().json()
    return found


def answer(found: dict[str, Any]) -> str:
    text: str = found["choices"][0]["message"]["content"]
    return text


def await_saved(http: httpx.Client, num_history: int, **session: str) -> None:
    """Saving is nobody's wait: what is killed right after an answer takes along what was on its way."""
    deadline = time.monotonic() + SAVE_LIMIT_S
    while True:
        tier = http.post("/v1/kv/lookup", json=session).raise_for_status().json()["tier"]
        if tier["tokens"] >= num_history - 1:
            return
        assert time.monotonic() < deadline, tier
        time.sleep(0.1)


def check_goes_on(found: dict[str, Any], num_history: int, *sources: str) -> None:
    """At least 99% of what was said before came from these tiers."""
    details = found["usage"]["kv_details"]
    assert sum(details[source] for source in sources) >= 0.99 * (num_history - 1), details


@pytest.mark.slow
def test_sessions_outlive_their_replica_and_their_cluster(tmp_path: Path) -> None:
    """The answers are those of a session that stayed where it was (float32)."""
    with served(tmp_path) as (process, http):
        first = say(http, STORY, "stays")
        stayed = [answer(first), answer(say(http, "And then?", "stays", append=True))]
        busy_before = cpu_seconds(process)
        told = say(http, STORY, "moves", cache_salt="other")
        busy = cpu_seconds(process)
        assert answer(told) == stayed[0]
        num_history = told["usage"]["total_tokens"]
        await_saved(http, num_history, session_id="moves", cache_salt="other")
        os.kill(max(busy, key=lambda pid: busy[pid] - busy_before[pid]), signal.SIGKILL)
        moved = say(http, "And then?", "moves", append=True, cache_salt="other")
        assert answer(moved) == stayed[1]
        check_goes_on(moved, num_history, "host", "disk")
        say(http, STORY, "waits", cache_salt="third")
        process.stop()
        assert process.process.returncode == 0, process.lines
        assert process.left_behind() == []
    with served(tmp_path) as (process, http):
        waited = say(http, "And then?", "waits", append=True, cache_salt="third")
        assert answer(waited) == stayed[1]
        check_goes_on(waited, num_history, "disk")
        gone_on = say(http, "And then?", "moves", append=True, cache_salt="other")
        check_goes_on(gone_on, moved["usage"]["total_tokens"], "disk")
        process.process.kill()  # nobody can clean up after that but who was left for it
        process.process.wait(10)
        process.await_nothing_left()
