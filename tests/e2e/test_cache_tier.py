"""KV and sessions outlive their replica and their cluster: another replica goes on, and so does the next cluster."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from tests.e2e.replica_processes import busiest, cpu_seconds
from tests.e2e.server_process import tiered

pytestmark = pytest.mark.e2e

MODEL = "mneme-tiny"
STORY = "Once upon a time there was a small library in which every book could remember its reader. " * 30
NUM_OUTPUT = 16
SAVE_LIMIT_S = 180.0  # on a machine that is busy with other things
NUM_TRIES = 20  # with pauses of seconds: until Ray has seen that a replica is gone, its responses are a 503


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


def respond(http: httpx.Client, text: str, before: Any = None) -> Any:
    with OpenAI(
        base_url=f"{http.base_url}/v1", api_key="none", max_retries=NUM_TRIES, _strict_response_validation=True
    ) as client:
        previous = {} if before is None else {"previous_response_id": before.id}
        return client.responses.create(model=MODEL, input=text, max_output_tokens=24, temperature=0, **previous)


@pytest.mark.slow
def test_a_session_outlives_its_replica_and_with_responses_its_cluster(tmp_path: Path) -> None:
    """The answers are those of a session that stayed where it was (float32)."""
    with tiered(tmp_path) as (process, http):
        first = say(http, STORY, "stays")
        stayed = [answer(first), answer(say(http, "And then?", "stays", append=True))]
        busy_before = cpu_seconds(process)
        told = say(http, STORY, "moves", cache_salt="other")
        assert answer(told) == stayed[0]
        num_history = told["usage"]["total_tokens"]
        await_saved(http, num_history, session_id="moves", cache_salt="other")
        home = busiest(process, busy_before)  # before others are asked, wherever they go
        responded = respond(http, "And who read it?", respond(http, STORY))
        os.kill(home, signal.SIGKILL)
        moved = say(http, "And then?", "moves", append=True, cache_salt="other")
        assert answer(moved) == stayed[1]
        check_goes_on(moved, num_history, "host", "disk")
        again = respond(http, "Why?", responded)
        assert again.usage.input_tokens > responded.usage.total_tokens
        say(http, STORY, "waits", cache_salt="third")
        process.stop()
        assert process.process.returncode == 0, process.lines
        assert process.left_behind() == []
    with tiered(tmp_path) as (process, http):
        waited = say(http, "And then?", "waits", append=True, cache_salt="third")
        assert answer(waited) == stayed[1]
        check_goes_on(waited, num_history, "disk")
        gone_on = say(http, "And then?", "moves", append=True, cache_salt="other")
        check_goes_on(gone_on, moved["usage"]["total_tokens"], "disk")
        path = f"/v1/responses/{again.id}"
        assert http.get(path).json()["output"][0]["content"][0]["text"] == again.output_text
        assert len(http.get(f"{path}/input_items").json()["data"]) == 5
        after = respond(http, "And then?", again)
        assert after.usage.input_tokens_details.cached_tokens >= 0.95 * again.usage.input_tokens
        process.process.kill()  # nobody can clean up after that but who was left for it
        process.process.wait(10)
        process.await_nothing_left()
