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


def test_an_appended_turn_answers_like_the_whole_history(client: OpenAI, name: str) -> None:
    first = say(client, STORY, {"id": name})
    history = [
        {"role": "user", "content": STORY},
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "And then?"},
    ]
    appended = say(client, "And then?", {"id": name, "append": True})
    whole = client.chat.completions.create(model=MODEL, messages=history, max_tokens=24, temperature=0)  # type: ignore[arg-type]
    if first.choices[0].finish_reason == "stop":  # else nothing closed the answer, as the template does
        assert appended.usage.prompt_tokens == whole.usage.prompt_tokens  # type: ignore[union-attr]
    assert appended.choices[0].message.content == whole.choices[0].message.content


def test_a_fork_shares_to_the_token_and_goes_its_own_way(client: OpenAI, http: httpx.Client, name: str) -> None:
    first = say(client, STORY, {"id": name})
    forked = http.post(f"/v1/sessions/{name}/fork", json={}).raise_for_status().json()
    assert forked["tokens"] == first.usage.total_tokens
    left = say(client, "And the reader?", {"id": name, "append": True})
    right = say(client, "And the book?", {"id": forked["id"], "append": True})
    for answer in (left, right):
        assert details(answer)["device"] >= first.usage.total_tokens - 1
    for session, answer in ((name, left), (forked["id"], right)):
        assert http.get(f"/v1/sessions/{session}").json()["tokens"] == answer.usage.total_tokens


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


def test_a_prompt_is_explained_range_by_range(client: OpenAI, http: httpx.Client, name: str) -> None:
    say(client, STORY, {"id": name})
    answer = say(client, "And then?", {"id": name, "append": True})
    (choice,) = http.get(f"/v1/kv/explain/{answer.id}").raise_for_status().json()["choices"]
    cached, total = details(answer)["device"], answer.usage.prompt_tokens
    assert choice["kv_details"] == details(answer)
    assert choice["ranges"] == [
        {"start": 0, "end": cached, "source": "device"},
        {"start": cached, "end": total, "source": "recomputed"},
    ]


def test_an_edited_history_is_no_error_and_keeps_what_it_can(client: OpenAI, name: str) -> None:
    first = say(client, STORY, {"id": name})
    history = [
        {"role": "user", "content": STORY},
        {"role": "assistant", "content": "  something else entirely"},
        {"role": "user", "content": "And then?"},
    ]
    edited = client.chat.completions.create(
        model=MODEL,
        messages=history,
        max_tokens=8,
        temperature=0,
        extra_body={"session_id": name},  # type: ignore[arg-type]
    )
    stateless = client.chat.completions.create(model=MODEL, messages=history, max_tokens=8, temperature=0)  # type: ignore[arg-type]
    assert details(edited)["device"] >= first.usage.prompt_tokens - 1
    assert edited.choices[0].message.content == stateless.choices[0].message.content
    assert edited.usage is not None
    assert stateless.usage is not None
    assert edited.usage.prompt_tokens == stateless.usage.prompt_tokens


@pytest.mark.parametrize("each_server", ["server_process"], ids=["cluster"], indirect=True)
def test_routes_follow_prefixes_and_what_was_deleted(client: OpenAI, http: httpx.Client, name: str) -> None:
    prompt = f"{name}: {STORY}{STORY}"

    def routed(suffix: str) -> tuple[str, dict[str, Any]]:
        """Return the replica of a prompt, and what that was thought to have of it."""
        answer = client.completions.create(model=MODEL, prompt=prompt + suffix, max_tokens=1)
        (route,) = http.get(f"/v1/kv/explain/{answer.id}").raise_for_status().json()["routes"]
        (chosen,) = [each for each in route["candidates"] if each["replica"] == route["replica"]]
        assert {each["replica"] for each in route["candidates"]} >= {route["replica"]}
        assert chosen["ms"]["total"] >= chosen["ms"]["ttft"] - chosen["ms"]["overhead"] > 0
        return route["replica"], chosen["tokens"]

    first, tokens = routed("")
    assert tokens["matched"] == 0
    again, tokens = routed(" And then?")
    assert again == first
    assert tokens["matched"] > 0
    deadline_s = time.monotonic() + 60
    while tokens["matched"]:  # from 50 ms after it, an ingress knows of a deletion on devices
        assert time.monotonic() < deadline_s
        time.sleep(0.2)  # what comes and goes between two reports is in neither
        assert http.request("DELETE", "/v1/kv", json={"prompt": prompt}).is_success
        time.sleep(0.2)
        _, tokens = routed(" And then?")
