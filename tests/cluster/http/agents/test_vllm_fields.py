"""Fields of vLLM's API beyond OpenAI's, and what is said of fields that nothing here knows."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from tests.cluster.api_fixtures import CHAT, COMPLETION, MODEL, RENDERED, TOKENIZER, post, serving
from tests.cluster.fake_engine_client import FakeEngineClient

IGNORED = "x-mneme-ignored-fields"
IDS = TOKENIZER.encode("the quick brown fox", add_special_tokens=True)


def ask(path: str, engine: FakeEngineClient | None = None, **fields: Any) -> httpx.Response:
    given = {"chat/completions": CHAT, "completions": COMPLETION, "embeddings": {"model": "tiny", "input": IDS}}[path]
    return post(f"/v1/{path}", {**given, **fields}, engine=engine)


@pytest.mark.parametrize(("path", "prompt"), [("completions", "prompt"), ("embeddings", "input")])
@pytest.mark.parametrize("given", ["the quick brown fox", IDS])
def test_the_last_tokens_of_a_prompt_are_left(path: str, prompt: str, given: Any) -> None:
    engine = FakeEngineClient(TOKENIZER)
    for num_tokens in (2, len(IDS), -1):
        answer = ask(path, engine, **{prompt: given}, truncate_prompt_tokens=num_tokens)
        left = IDS if num_tokens == -1 else IDS[-num_tokens:]
        assert list(engine.requests[-1].prompt_token_ids) == left
        assert answer.json()["usage"]["prompt_tokens"] == len(left)


def test_a_prompt_that_was_cut_has_no_text_that_a_session_could_take_for_all_of_it() -> None:
    engine = FakeEngineClient(TOKENIZER)
    for session in ({}, {"session_id": "s"}):
        assert ask("chat/completions", engine, truncate_prompt_tokens=3, **session).status_code == 200
        (*_, request) = engine.requests
        assert list(request.prompt_token_ids) == TOKENIZER.encode_rendered(RENDERED)[-3:]
        assert request.prompt_text is None
    ask("chat/completions", engine, truncate_prompt_tokens=500)
    assert engine.requests[-1].prompt_text == RENDERED


def test_what_is_cut_may_be_longer_than_the_window_and_leaves_room_for_the_answer() -> None:
    engine = FakeEngineClient(TOKENIZER)
    long = [IDS[1]] * (2 * MODEL.max_context)
    assert ask("completions", engine, prompt=long, truncate_prompt_tokens=-1, max_tokens=5).status_code == 200
    assert len(engine.requests[-1].prompt_token_ids) == MODEL.max_context - 5
    assert ask("completions", prompt=long).json()["error"]["code"] == "context_length_exceeded"
    longer = [IDS[1]] * (16 * MODEL.max_context)
    refused = ask("completions", prompt=longer, truncate_prompt_tokens=-1)
    assert refused.json()["error"]["code"] == "context_length_exceeded"


def test_an_echo_is_of_what_was_left() -> None:
    answer = ask("completions", prompt="the quick brown fox", truncate_prompt_tokens=2, echo=True, max_tokens=1)
    assert answer.json()["choices"][0]["text"].startswith(TOKENIZER.decode(IDS[-2:], skip_special_tokens=True))


@pytest.mark.parametrize("path", ["chat/completions", "completions", "embeddings"])
@pytest.mark.parametrize("value", [0, -2, MODEL.max_context + 1, True, 1.0, "5"])
def test_a_number_of_tokens_that_cannot_be_left_is_refused(path: str, value: Any) -> None:
    answer = ask(path, truncate_prompt_tokens=value)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "truncate_prompt_tokens")


@pytest.mark.parametrize(
    "other",
    [
        {"truncation": {"strategy": "recompute"}},
        {"session": {"id": "s", "append": True}},
        {"documents": ["the quick brown fox jumps over the lazy dog"]},
    ],
)
def test_a_prompt_is_not_shortened_in_two_ways(other: dict[str, Any]) -> None:
    answer = ask("chat/completions", truncate_prompt_tokens=2, **other)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "truncate_prompt_tokens")


def test_fields_that_are_unknown_are_named_on_whole_answers_and_streams() -> None:
    unknown = {"user": "u", "store": None, "guided_jsn": {}, "functions": [], "temperature": 0.5}
    with serving() as server:
        for stream in (False, True):
            body = {**CHAT, **unknown, "stream": stream}
            answer = httpx.post(f"{server.url}/v1/chat/completions", json=body)
            assert (answer.status_code, answer.headers[IGNORED]) == (200, "user, guided_jsn")
        assert IGNORED not in httpx.post(f"{server.url}/v1/chat/completions", json=CHAT).headers


def test_names_of_unknown_fields_are_bounded_and_nothing_but_names() -> None:
    many = {f"field_{i}": 1 for i in range(100)}
    names = ask("completions", **many).headers[IGNORED].split(", ")
    assert names == [*(f"field_{i}" for i in range(16)), "..."]
    odd = ask("embeddings", **{"a\r\nset-cookie: b": 1, "ü" * 100: 1}).headers
    assert odd[IGNORED] == f"a??set-cookie??b, {'?' * 64}"
    assert "set-cookie" not in odd
    assert ask("chat/completions", nothing=1, temperature=9).status_code == 400


def test_fields_of_the_other_apis_are_known_by_their_own_names() -> None:
    said = {"model": "tiny", "max_tokens": 3, "messages": CHAT["messages"], "metadata": {"user_id": "u"}, "n": 2}
    assert post("/v1/messages", said).headers[IGNORED] == "metadata, n"
    asked = {"model": "tiny", "input": "the fox", "metadata": {"a": "b"}, "truncation": "auto", "top_logprobs": 0}
    assert IGNORED not in post("/v1/responses", asked).headers
    answer = ask("completions", structured_outputs={"json": {"type": "object"}}, nonsense=1)
    assert answer.headers[IGNORED] == "nonsense"


@pytest.mark.parametrize(
    ("fields", "priority", "tier"),
    [
        ({}, 0, None),
        ({"priority": -3}, -3, None),
        ({"service_tier": "auto"}, 0, "default"),
        ({"service_tier": "flex", "priority": 1}, 31, "flex"),
        ({"service_tier": "priority"}, -30, "priority"),
    ],
)
def test_priorities_reach_the_engine_and_answers_name_the_tier(
    fields: dict[str, Any], priority: int, tier: str | None
) -> None:
    engine = FakeEngineClient(TOKENIZER)
    for path in ("chat/completions", "completions"):
        answer = ask(path, engine, **fields)
        assert engine.requests[-1].priority == priority
        assert answer.json().get("service_tier") == tier
        assert IGNORED not in answer.headers
    with serving() as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", _strict_response_validation=True)
        stream: Any = client.chat.completions.create(**CHAT, stream=True, extra_body=fields)
        assert {chunk.service_tier for chunk in stream} == {tier}


@pytest.mark.parametrize(
    "fields",
    [{"priority": 1.0}, {"priority": True}, {"priority": 2**31}, {"service_tier": "fast"}, {"service_tier": 1}],
)
def test_priorities_that_are_none_are_refused(fields: dict[str, Any]) -> None:
    answer = ask("completions", **fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, next(iter(fields)))
