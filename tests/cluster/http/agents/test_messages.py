"""Anthropic's API: what it makes of a body, what it answers, and its errors."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic_core import from_json

from mneme.cluster.http.messages import MessagesAnswer
from mneme.errors import Overloaded, ReplicaUnavailable
from mneme.replicas.choices import Choice, Delta
from mneme.replicas.request import GenerationRequest, SamplingParams
from mneme.replicas.text.calls.answer_parser import CallPiece
from tests.cluster.api_fixtures import CHAT, RENDERED, TOKENIZER, api, post
from tests.cluster.fake_engine_client import SENTENCE, FakeEngineClient
from tests.cluster.http.agents.test_tools import TEMPLATE
from tests.replicas.tiny_tokenizer import tiny_tokenizer

BODY: dict[str, Any] = {**CHAT, "max_tokens": 100}
RESULT = {"type": "tool_result", "tool_use_id": "c1"}
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


def test_a_call_ends_before_what_the_same_step_says_behind_it() -> None:
    request = GenerationRequest(request_id="r.0", prompt_token_ids=(1,), sampling=SamplingParams())
    begun = Delta(0, "", None, None, (5,), True, calls=(CallPiece(0, "", "c", "f"), CallPiece(0, "{")))
    ended = Delta(0, "so", None, "stop", (6,), False, calls=(CallPiece(0, "}"), CallPiece(1, "{}", "d", "g")))
    answer = MessagesAnswer("r", "tiny", is_silent=False, compare=lambda *_: None)
    told = answer.events([Choice(index=0, request=request, tokenizer=TOKENIZER)], [begun, ended]).decode()
    data = [json.loads(line.removeprefix("data: ")) for line in told.splitlines() if line.startswith("data: ")]
    deltas = [(each["index"], each["delta"]) for each in data if each["type"] == "content_block_delta"]
    json_deltas = [(index, each["partial_json"]) for index, each in deltas if each["type"] == "input_json_delta"]
    assert json_deltas == [(0, "{"), (0, "}"), (2, "{}")]
    assert [(index, each["text"]) for index, each in deltas if each["type"] == "text_delta"] == [(1, "so")]


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
            "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0},
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


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("failure", "status", "kind"),
    [(Overloaded("full"), 429, "rate_limit_error"), (ReplicaUnavailable("none"), 503, "overloaded_error")],
)
def test_errors_have_anthropics_types(failure: Any, status: int, kind: str, stream: bool) -> None:
    response = post("/v1/messages", {**BODY, "stream": stream}, engine=FakeEngineClient(TOKENIZER, refusal=failure))
    assert (response.status_code, response.json()["error"]["type"]) == (status, kind)
    assert response.json()["request_id"] == response.headers["x-request-id"]
    assert response.headers["retry-after"]


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


TOOLS = [{"name": "weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}]
CALL = '{"name": "weather", "arguments": {"city": "Köln"}}'
ANSWER = f"<think>\nHm.\n</think>\n\nLet me see.\n<tool_call>\n{CALL}\n</tool_call>"


def thinking(sentence: str = ANSWER) -> FakeEngineClient:
    return FakeEngineClient(tiny_tokenizer("{% set t = '<think>' %}" + TEMPLATE), sentence)


def test_tokens_are_counted_without_running() -> None:
    engine = thinking()
    counted = post("/v1/messages/count_tokens", {**CHAT, "tools": TOOLS}, engine=engine).json()["input_tokens"]
    assert not engine.requests
    post("/v1/messages", {**BODY, "tools": TOOLS}, engine=engine)
    assert counted == len(engine.requests[0].prompt_token_ids) > NUM_PROMPT


def test_thought_text_and_calls_are_blocks() -> None:
    answer = post("/v1/messages", {**BODY, "max_tokens": 200, "tools": TOOLS}, engine=thinking()).json()
    thought, text, call = answer["content"]
    assert thought == {"type": "thinking", "thinking": "Hm.", "signature": ""}
    assert text == {"type": "text", "text": "Let me see."}
    assert call == {"type": "tool_use", "id": call["id"], "name": "weather", "input": {"city": "Köln"}}
    assert answer["stop_reason"] == "tool_use"


def test_a_stream_tells_the_blocks_one_after_the_other() -> None:
    told = events(thinking(), tools=TOOLS, max_tokens=200)
    starts = [each for each in told if each["type"] == "content_block_start"]
    assert [(each["index"], each["content_block"]["type"]) for each in starts] == [
        (0, "thinking"),
        (1, "text"),
        (2, "tool_use"),
    ]
    assert starts[2]["content_block"]["input"] == {}
    said: dict[str, str] = {}
    for each in told:
        if each["type"] == "content_block_delta":
            kind = each["delta"].pop("type")
            said[kind] = said.get(kind, "") + "".join(each["delta"].values())
    assert said == {
        "thinking_delta": "Hm.",
        "signature_delta": "",
        "text_delta": "Let me see.",
        "input_json_delta": '{"city": "Köln"}',
    }
    assert [each["index"] for each in told if each["type"] == "content_block_stop"] == [0, 1, 2]
    assert told[-2]["delta"]["stop_reason"] == "tool_use"


def test_what_is_sent_back_is_the_history() -> None:
    result = {**RESULT, "content": [{"type": "text", "text": "rain"}]}
    thought = {"type": "thinking", "thinking": "Hm.", "signature": ""}
    use = {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Köln"}}
    history = [
        *CHAT["messages"],
        {"role": "assistant", "content": [thought, use]},
        {"role": "user", "content": [result, {"type": "text", "text": "and now?"}]},
    ]
    engine = thinking()
    post("/v1/messages", {**BODY, "messages": history, "tools": TOOLS}, engine=engine)
    text = engine.requests[0].prompt_text
    assert text is not None
    assert f"assistant\n<tool_call>\n{CALL}\n</tool_call><|im_end|>\n<|im_start|>tool\nrain<|im_end|>\n" in text
    assert text.endswith("<|im_start|>user\nand now?<|im_end|>\n<|im_start|>assistant\n")
    assert '"parameters": {"type": "object"' in text


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ([{"type": "text", "text": "no such"}, {"type": "text", "text": "city"}], "Error: no such\ncity"),
        ("ERROR: no such city", "ERROR: no such city"),
        (None, "Error: "),
    ],
)
def test_a_result_that_is_an_error_is_told_as_one(content: Any, told: str) -> None:
    call = {"type": "tool_use", "id": "c1", "name": "weather", "input": {}}
    for is_error in (True, False):
        result = {**RESULT, "content": content, "is_error": is_error}
        said = [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
        text = asked(messages=[*BODY["messages"], *said]).prompt_text or ""
        shown = told if is_error or content == told else told.removeprefix("Error: ")
        assert f"<|im_start|>tool\n{shown}<|im_end|>" in text


@pytest.mark.parametrize(
    ("choice", "is_forced", "is_one"),
    [
        ({"type": "any"}, True, False),
        ({"type": "any", "disable_parallel_tool_use": True}, True, True),
        ({"type": "tool", "name": "weather"}, True, True),
        ({"type": "auto"}, False, False),
    ],
)
def test_a_choice_of_tools_is_kept_to(choice: Any, is_forced: bool, is_one: bool) -> None:
    engine = thinking()
    post("/v1/messages", {**BODY, "tools": TOOLS, "tool_choice": choice}, engine=engine)
    grammar = engine.requests[0].sampling.grammar
    assert (grammar is not None) == is_forced
    assert grammar is None or ("call (" not in grammar.text) == is_one


def test_lines_of_the_client_at_the_head_of_a_system_prompt_are_left_out(engine: FakeEngineClient) -> None:
    line = "x-anthropic-billing-header: cc_version=1; cch=4711"
    plain = asked(system="be brief").prompt_token_ids
    assert asked(system=f"{line}\n{line}\nbe brief").prompt_token_ids == plain
    blocks = [{"type": "text", "text": line}, {"type": "text", "text": "be brief"}]
    assert asked(system=blocks).prompt_token_ids == plain
    assert asked(system=f"be brief\n{line}").prompt_token_ids != plain


def test_no_tokens_are_a_prompt_that_is_only_computed() -> None:
    answer = post("/v1/messages", {**BODY, "max_tokens": 0}).json()
    assert (answer["content"], answer["stop_reason"], answer["usage"]["output_tokens"]) == ([], "max_tokens", 0)
    told = events(max_tokens=0)
    assert [each["type"] for each in told] == ["message_start", "message_delta", "message_stop"]
    assert told[1]["usage"]["output_tokens"] == 0


FIVE, HOUR = {"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}


def _said(text: str, mark: Any = None) -> dict[str, Any]:
    return {"type": "text", "text": text} | ({"cache_control": mark} if mark else {})


@pytest.mark.parametrize(
    ("changes", "ends"),
    [
        ({"system": [_said("be brief"), _said("be kind", HOUR)]}, [("be kind<|im_end|>\n<|im_start|>user\n", 3600)]),
        ({"system": [_said("be brief", HOUR), _said("be kind")]}, [("be brief", 3600)]),
        (
            {
                "system": [_said("be brief", HOUR)],
                "messages": [{"role": "user", "content": [_said("the fox", FIVE), _said("and the dog")]}],
            },
            [("be brief<|im_end|>\n<|im_start|>user\n", 3600), ("the fox", 300)],
        ),
        ({"messages": [{"role": "user", "content": [_said("the fox", FIVE)]}]}, [("assistant\n", 300)]),
        ({"cache_control": HOUR}, [("assistant\n", 3600)]),
        ({"messages": [{"role": "user", "content": [_said(w, FIVE)]} for w in ("a", "b")]}, [("assistant\n", 300)]),
        ({"tools": [{**TOOLS[0], "cache_control": HOUR}]}, [("<|im_start|>user\n", 3600)]),
    ],
)
def test_a_mark_keeps_the_prompt_up_to_it_and_changes_no_token(changes: Any, ends: list[tuple[str, float]]) -> None:
    engine = FakeEngineClient(tiny_tokenizer(TEMPLATE))
    answer = post("/v1/messages", {**BODY, **changes}, engine=engine).json()
    request = engine.requests[0]
    assert [ttl_s for _, ttl_s in request.pinned] == [ttl_s for _, ttl_s in ends]
    for (num_tokens, _), (end, _) in zip(request.pinned, ends, strict=True):
        kept = engine.tokenizer.decode(request.prompt_token_ids[:num_tokens])
        assert kept.endswith(end) or kept.removesuffix("\n").endswith(end)
    usage = answer["usage"]
    assert usage["cache_creation_input_tokens"] == max(num_tokens for num_tokens, _ in request.pinned)
    assert usage["cache_creation_input_tokens"] == sum(usage["cache_creation"].values())
    plain = json.dumps({**BODY, **changes})
    for mark in (FIVE, HOUR):
        plain = plain.replace(f', "cache_control": {json.dumps(mark)}', "")
    post("/v1/messages", json.loads(plain), engine=engine)
    assert engine.requests[1].prompt_token_ids == request.prompt_token_ids


def _result(*content: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    """A conversation that ends with a tool's result of these blocks."""
    call = {"type": "tool_use", "id": "c1", "name": "weather", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": list(content), **more}
    said = [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result, _said("and now?")]}]
    return [*BODY["messages"], *said]


@pytest.mark.parametrize(
    ("content", "end"), [([_said("rain", FIVE), _said("sun")], "rain"), ([_said("rain"), _said("sun", FIVE)], "sun")]
)
def test_a_mark_within_a_tools_result_keeps_the_prompt_up_to_it(content: Any, end: str) -> None:
    engine = FakeEngineClient(tiny_tokenizer(TEMPLATE))
    post("/v1/messages", {**BODY, "messages": _result(*content)}, engine=engine)
    ((num_tokens, ttl_s),) = engine.requests[0].pinned
    kept = engine.tokenizer.decode(engine.requests[0].prompt_token_ids[:num_tokens])
    assert ttl_s == 300
    assert end in kept
    assert "and now?" not in kept
    assert ("sun" in kept) == (end == "sun")


def test_five_marks_are_one_too_many_wherever_they_are() -> None:
    response = post("/v1/messages", {**BODY, "messages": _result(*[_said("rain", FIVE)] * 4, cache_control=FIVE)})
    assert response.status_code == 400
    assert "cache_control" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("cut", "given", "ending"),
    [
        ({"stop_sequences": ["half"]}, {"a": "x"}, ("stop_sequence", "half")),
        ({"stop_sequences": ["</tool_call>"]}, {"a": "x", "b": "half a word"}, ("tool_use", None)),
        ({"max_tokens": 64}, {"a": "x"}, ("max_tokens", None)),
    ],
)
def test_of_a_call_that_was_cut_off_what_is_whole_is_told(cut: Any, given: Any, ending: tuple[str, str | None]) -> None:
    """As Anthropic's SDK makes it of a stream, and nothing is made up."""
    call = '{"name": "weather", "arguments": {"a": "x", "b": "half a word"}}'
    engine = FakeEngineClient(tiny_tokenizer(TEMPLATE), f"<tool_call>\n{call}\n</tool_call>")
    asks = {**BODY, "max_tokens": 200, "tools": TOOLS, "tool_choice": {"type": "any"}, **cut}
    answer = post("/v1/messages", asks, engine=engine).json()
    assert [each["input"] for each in answer["content"]] == [given]
    told = events(engine, **asks)
    pieces = [each["delta"]["partial_json"] for each in told if each["type"] == "content_block_delta"]
    assert from_json("".join(pieces), allow_partial=True) == given
    for last in (answer, told[-2]["delta"]):
        assert (last["stop_reason"], last["stop_sequence"]) == ending


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"more": "and then?"}, None),
        ({"system": "be kind"}, "system_changed"),
        ({"tools": [{**TOOLS[0], "name": "other"}]}, "tools_changed"),
        ({"messages": [{"role": "user", "content": "the dog"}]}, "messages_changed"),
    ],
)
def test_a_miss_is_diagnosed_against_an_earlier_message(changes: dict[str, Any], reason: str | None) -> None:
    client = api(FakeEngineClient(tiny_tokenizer(TEMPLATE)))
    body = {**BODY, "system": "be brief. " * 40, "tools": TOOLS, "diagnostics": {"previous_message_id": None}}
    first = client.post("/v1/messages", json=body).json()
    assert first.get("diagnostics") is None
    if "more" in changes:
        said = [{"role": "assistant", "content": SENTENCE}, {"role": "user", "content": changes["more"]}]
        changes = {"messages": [*BODY["messages"], *said]}
    again = {**body, **changes, "diagnostics": {"previous_message_id": first["id"]}}
    told = client.post("/v1/messages", json=again).json().get("diagnostics")
    if reason is None:
        assert told is None
    else:
        assert told["cache_miss_reason"]["type"] == reason
        assert 0 <= told["cache_miss_reason"]["cache_missed_input_tokens"] <= first["usage"]["input_tokens"]
    unknown = {**body, "diagnostics": {"previous_message_id": "msg_none"}}
    told = client.post("/v1/messages", json=unknown).json()["diagnostics"]
    assert told == {"cache_miss_reason": {"type": "previous_message_not_found"}}


def test_a_thread_is_not_held_so_that_clients_send_all_of_it() -> None:
    assert asked(thread={"type": "create"}).prompt_token_ids == asked().prompt_token_ids
    thread = {"type": "continue", "previous_message_id": "msg_a"}
    response = post("/v1/messages", {**BODY, "thread": thread, "stream": True})
    assert response.status_code == 404
    error = response.json()["error"]
    assert error["type"] == "not_found_error"
    assert error["details"] == {"error_code": "thread_not_found"}  # which the SDK looks for
