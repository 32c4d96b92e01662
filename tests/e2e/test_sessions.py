"""Sessions through the `openai` client, on two replicas and on one: appended turns, forks, deletion, whence KV came."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from openai import NotFoundError, OpenAI

from tests.e2e.metrics import await_idle

pytestmark = pytest.mark.e2e

MODEL = "mneme-tiny"
STORY = "Once upon a time there was a small library in which every book could remember its reader. " * 4


@pytest.fixture(scope="module")
def client(each_server: str) -> Iterator[OpenAI]:
    with OpenAI(
        base_url=f"{each_server}/v1", api_key="none", max_retries=0, _strict_response_validation=True
    ) as client:
        yield client


@pytest.fixture
def http(each_server: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=each_server, timeout=240) as http:
        yield http


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    return f"{request.node.name}/{time.monotonic_ns()}"


def say(client: OpenAI, text: str, session: dict[str, Any], **options: Any) -> Any:
    return client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": text}],
        max_tokens=24,
        temperature=0,
        extra_body={"session": session},
        **options,
    )


def details(answer: Any) -> dict[str, int]:
    found: dict[str, int] = answer.usage.model_extra["kv_details"]
    assert sum(found.values()) - found["truncated"] == answer.usage.prompt_tokens
    num_cached = sum(found[source] for source in ("device", "host", "disk", "peer"))
    assert num_cached == answer.usage.prompt_tokens_details.cached_tokens
    return found


def test_appended_turns_of_many_sessions_find_theirs_on_every_replica(
    client: OpenAI, http: httpx.Client, name: str
) -> None:
    replicas, sessions = set(), [{"id": f"{name}/{index}"} for index in range(8)]
    with ThreadPoolExecutor(len(sessions)) as pool:  # at once: one replica alone would take them longer
        firsts = list(pool.map(lambda session: say(client, f"{session['id'][-1]}. {STORY}", session), sessions))
    for index, (session, first) in enumerate(zip(sessions, firsts, strict=True)):
        second = say(client, "And then?", {**session, "append": True})
        assert details(second)["device"] >= first.usage.total_tokens - 1
        found = http.get(f"/v1/sessions/{name}/{index}").raise_for_status().json()
        assert (found["turns"], found["tokens"]) == (2, second.usage.total_tokens)
        assert found["kv"]["device"] >= found["tokens"] - 1
        assert found["hit_history"][-1]["cached_tokens"] == details(second)["device"]
        replicas.add(found["replica"])
    assert len(replicas) == http.get("/ready").json()["replicas"]


def test_a_session_deleted_and_forked_while_it_streams(
    client: OpenAI, http: httpx.Client, each_server: str, name: str
) -> None:
    stream = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": STORY}],
        max_tokens=300,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"session_id": name, "min_tokens": 300},
    )
    chunks = [next(stream) for _ in range(5)]
    found = http.get(f"/v1/sessions/{name}").raise_for_status().json()
    assert (found["answering"], found["turns"]) == (True, 0)
    forked = http.post(f"/v1/sessions/{name}/fork", json={}).raise_for_status().json()
    assert forked["tokens"] >= found["tokens"]
    assert http.delete(f"/v1/sessions/{name}").status_code == 200
    assert http.get(f"/v1/sessions/{name}").status_code == 404
    chunks += list(stream)
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.completion_tokens == 300
    assert details(chunks[-1])["recomputed"] >= 1
    with pytest.raises(NotFoundError):
        say(client, "And then?", {"id": name, "append": True})
    after = say(client, "And then?", {"id": forked["id"], "append": True})
    assert details(after)["device"] >= forked["tokens"] - 1
    assert http.delete(f"/v1/sessions/{forked['id']}").status_code == 200
    await_idle(each_server)
