"""Anthropic's API: what it makes of a body, what it answers, and its errors."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mneme.errors import Overloaded, ReplicaUnavailable
from tests.cluster.api_fixtures import CHAT, RENDERED, TOKENIZER, api, post
from tests.cluster.fake_engine_client import SENTENCE, FakeEngineClient

BODY: dict[str, Any] = {**CHAT, "max_tokens": 100}
NUM_PROMPT = len(TOKENIZER.encode_rendered(RENDERED))
NUM_OUTPUT = len(TOKENIZER.encode(SENTENCE, add_special_tokens=False))


def asked(**changes: Any) -> Any:
    """What the engine was asked."""
    engine = FakeEngineClient(TOKENIZER)
    response = post("/v1/messages", {**BODY, **changes}, engine=engine)
    assert response.status_code == 200, response.text
    return engine.requests[0]


def events(engine: FakeEngineClient | None = None, **changes: Any) -> list[dict[str, Any]]:
    """A stream's events; each is named as its data says."""
    found = []
    for block in post("/v1/messages", {**BODY, "stream": True, **changes}, engine=engine).text.strip().split("\n\n"):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def test_a_whole_message() -> None:
    answer = post("/v1/messages", BODY).json()
    assert answer.pop("id").startswith("msg_")
    assert answer == {
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        "content": [{"type": "text", "text": SENTENCE}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": NUM_PROMPT,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": NUM_OUTPUT,
        },
    }


def test_a_stream_says_the_same() -> None:
    first, start, *deltas, stop, last, end = events()
    assert first["type"] == "message_start"
    assert first["message"]["content"] == []
    assert first["message"]["stop_reason"] is None
    assert first["message"]["usage"]["input_tokens"] == NUM_PROMPT
    assert start == {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    assert {delta["type"] for delta in deltas} == {"content_block_delta"}
    assert "".join(delta["delta"]["text"] for delta in deltas) == SENTENCE
    assert stop == {"type": "content_block_stop", "index": 0}
    assert last["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert last["usage"]["output_tokens"] == NUM_OUTPUT
    assert end == {"type": "message_stop"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("changes", "reason", "sequence", "text"),
    [
        ({"max_tokens": 3}, "max_tokens", None, None),
        ({"stop_sequences": ["lazy", "quick "]}, "stop_sequence", "quick ", SENTENCE.partition("quick ")[0]),
    ],
)
def test_why_it_ended(stream: bool, changes: Any, reason: str, sequence: str | None, text: str | None) -> None:
    if stream:
        told = events(**changes)
        said = "".join(each["delta"]["text"] for each in told if each["type"] == "content_block_delta")
        ending = told[-2]["delta"]
    else:
        ending = post("/v1/messages", {**BODY, **changes}).json()
        said = ending["content"][0]["text"]
    assert (ending["stop_reason"], ending["stop_sequence"]) == (reason, sequence)
    assert text is None or said == text


def test_what_the_engine_is_asked_for() -> None:
    system = [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral", "ttl": "1h"}}]
    request = asked(system=system, temperature=0.5, top_p=0.9, top_k=3, stop_sequences=["x"], metadata={"user_id": "u"})
    assert request.prompt_text == f"<|im_start|>system\nbe brief<|im_end|>\n{RENDERED}"
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (0.5, 0.9, 3, 100)
    assert sampling.stop == ("x",)
    assert asked(system=system).prompt_token_ids == asked(system="be brief").prompt_token_ids


def test_documents_are_documents() -> None:
    source = {"type": "text", "media_type": "text/plain", "data": "a red fox"}
    document = {"type": "document", "source": source, "title": "Foxes"}
    request = asked(messages=[{"role": "user", "content": [document, {"type": "text", "text": "who?"}]}])
    (span,) = request.documents
    assert request.prompt_text[span.char_start : span.char_end] == "Foxes\na red fox"


def test_a_session_goes_on() -> None:
    engine = FakeEngineClient(TOKENIZER)
    post("/v1/messages", BODY, engine=engine, headers={"X-Session-ID": "s"})
    assert engine.requests[0].session_id == "public:s"


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages[0].content[0].source"),
        ({"messages": [*CHAT["messages"], {"role": "assistant", "content": "so"}]}, "the last one"),
        ({"tools": [{"name": "f", "input_schema": {}}]}, "tools"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        ({"temperature": -1.0}, "temperature"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"model": None}, "model"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_body_is_refused_in_anthropics_words(changes: Any, names: str, stream: bool) -> None:
    body = {key: value for key, value in {**BODY, **changes, "stream": stream}.items() if value is not None}
    response = post("/v1/messages", body)
    assert response.status_code == 400
    answer = response.json()
    assert answer["type"] == "error"
    assert answer["error"]["type"] == "invalid_request_error"
    assert names in answer["error"]["message"]
    assert answer["request_id"] == response.headers["x-request-id"]


@pytest.mark.parametrize(
    ("failure", "status", "kind"),
    [(Overloaded("full"), 429, "rate_limit_error"), (ReplicaUnavailable("none"), 503, "overloaded_error")],
)
def test_errors_have_anthropics_types(failure: Any, status: int, kind: str) -> None:
    response = post("/v1/messages", BODY, engine=FakeEngineClient(TOKENIZER, refusal=failure))
    assert response.status_code == status
    assert response.json()["error"]["type"] == kind
    assert response.headers["retry-after"]
    assert post("/v1/messages", {**BODY, "model": "other"}).json()["error"]["type"] == "not_found_error"
    assert api().get("/v1/messages").json()["error"]["type"] == "invalid_request_error"


def test_a_stream_that_breaks_ends_in_an_error() -> None:
    told = events(engine=FakeEngineClient(TOKENIZER, fail_after=2))
    assert told[0]["type"] == "message_start"
    assert told[-1]["type"] == "error"
    assert told[-1]["error"]["type"] == "api_error"
    assert "message_stop" not in {each["type"] for each in told}


def test_a_key_in_anthropics_header() -> None:
    keys = {"api_keys": ("one", "two")}
    assert post("/v1/messages", BODY, headers={"x-api-key": "one"}, **keys).status_code == 200
    refused = post("/v1/messages", BODY, headers={"x-api-key": "three"}, **keys)
    assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
    both = {"x-api-key": "one", "Authorization": "Bearer two"}
    assert post("/v1/messages", BODY, headers=both, **keys).status_code == 400
    both["Authorization"] = "Bearer one"
    assert post("/v1/messages", BODY, headers=both, **keys).status_code == 200


def test_tokens_are_counted_without_running() -> None:
    engine = FakeEngineClient(TOKENIZER)
    assert post("/v1/messages/count_tokens", CHAT, engine=engine).json() == {"input_tokens": NUM_PROMPT}
    assert not engine.requests
