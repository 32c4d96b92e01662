"""What both completion APIs answer, and what they ask of the engine."""

from __future__ import annotations

import re
from typing import Any

import pytest

from mneme.cluster.http.completion_answers import usage_object
from mneme.replicas.choices import Choice
from mneme.replicas.request import GenerationRequest, Grammar, PromptUsage, SamplingParams, TokenEvent
from tests.cluster.api_fixtures import CHAT, COMPLETION, RENDERED, TOKENIZER, chat, post
from tests.cluster.fake_engine_client import SENTENCE, FakeEngineClient


def test_a_chat_answer() -> None:
    answer = chat().json()
    assert answer["object"] == "chat.completion"
    message = {"role": "assistant", "content": SENTENCE, "refusal": None}
    assert answer["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}]
    num_prompt = len(TOKENIZER.encode_rendered(RENDERED))
    num_output, computed = len(TOKENIZER.encode(SENTENCE, add_special_tokens=False)), {"recomputed": num_prompt}
    assert answer["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": 0, "cache_write_tokens": num_prompt},
        "kv_details": {**dict.fromkeys(("device", "host", "disk", "peer", "dropped", "truncated"), 0), **computed},
    }


def test_what_the_engine_is_asked_for(engine: FakeEngineClient) -> None:
    body = {**CHAT, "n": 2, "seed": 5, "max_completion_tokens": 9, "max_tokens": 7, "top_k": 3, "stop": "x"}
    post("/v1/chat/completions", body, engine=engine, headers={"X-Session-ID": "s"})
    first, second = engine.requests
    assert first.prompt_text == RENDERED
    assert first.prompt_token_ids == tuple(TOKENIZER.encode_rendered(RENDERED))
    assert (first.sampling.seed, first.sampling.max_tokens, first.sampling.top_k) == (5, 9, 3)
    assert first.sampling.stop == ("x",)
    assert (first.session_id, second.session_id) == ("public:s", "public:s")
    assert (first.choice_index, second.choice_index) == (0, 1)
    assert first.request_id != second.request_id
    assert first.salt == ""


@pytest.mark.parametrize("begun", ["the", "the ", " the fox: the"])
def test_an_answer_goes_on_with_the_last_message(begun: str, engine: FakeEngineClient) -> None:
    messages = [*CHAT["messages"], {"role": "assistant", "content": begun}]
    how = {"continue_final_message": True, "add_generation_prompt": False}
    assert post("/v1/chat/completions", {**CHAT, "messages": messages, **how}, engine=engine).status_code == 200
    assert engine.requests[0].prompt_text == RENDERED + begun


def test_a_seed_is_drawn_where_none_is_given(engine: FakeEngineClient) -> None:
    post("/v1/chat/completions", CHAT, engine=engine)
    post("/v1/chat/completions", CHAT, engine=engine)
    seeds = [request.sampling.seed for request in engine.requests]
    assert None not in seeds
    assert seeds[0] != seeds[1]


@pytest.mark.parametrize(
    ("headers", "body", "session"),
    [
        ({}, {}, None),
        ({"X-Session-ID": "h"}, {"session_id": "b", "prompt_cache_key": "c"}, "public:h"),
        ({}, {"session": {"id": "o"}, "session_id": "b"}, "public:o"),
        ({}, {"session_id": "b", "prompt_cache_key": "c"}, "public:b"),
        ({"session-id": "h"}, {"prompt_cache_key": "c"}, None),
        ({"X-Session-ID": "../../etc/passwd"}, {}, "public:../../etc/passwd"),  # a name, never a path
    ],
)
def test_where_the_session_comes_from(headers: Any, body: Any, session: str | None, engine: FakeEngineClient) -> None:
    post("/v1/chat/completions", {**CHAT, **body}, engine=engine, headers=headers)
    assert engine.requests[0].session_id == session


def test_a_stop_string_ends_the_text_before_it() -> None:
    for shows, num_more in ((False, 0), (True, len("dog"))):
        choice = chat(stop=["STOP", "dog"], include_stop_str_in_output=shows).json()["choices"][0]
        assert choice["message"]["content"] == SENTENCE[: SENTENCE.index("dog") + num_more]
        assert choice["finish_reason"] == "stop"


def test_chat_logprobs() -> None:
    content = chat(logprobs=True, top_logprobs=4).json()["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == SENTENCE
    assert [entry["logprob"] for entry in content[0]["top_logprobs"]] == [0.0, -1.0, -2.0, -9999.0]
    plain = chat(logprobs=True).json()["choices"][0]["logprobs"]["content"]
    assert all(entry["top_logprobs"] == [] for entry in plain)


def test_completions_of_several_prompts(engine: FakeEngineClient) -> None:
    body = {**COMPLETION, "prompt": ["the fox", "a dog"], "n": 2, "max_tokens": 4}
    answer = post("/v1/completions", body, engine=engine).json()
    assert answer["object"] == "text_completion"
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [request.choice_index for request in engine.requests] == [0, 1, 0, 1]
    assert {request.num_choices for request in engine.requests} == {4}
    assert answer["usage"]["completion_tokens"] == 16
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
    lengths = [len(TOKENIZER.encode(text, add_special_tokens=True)) for text in body["prompt"]]
    assert answer["usage"]["prompt_tokens"] == sum(lengths)


def test_completion_prompts_of_ids_are_taken_as_they_are(engine: FakeEngineClient) -> None:
    post("/v1/completions", {**COMPLETION, "prompt": [5, 6, 7]}, engine=engine)
    assert engine.requests[0].prompt_token_ids == (5, 6, 7)
    assert engine.requests[0].prompt_text is None


def test_completion_defaults_to_sixteen_tokens_and_echoes() -> None:
    body = {"model": "tiny", "prompt": "the fox", "echo": True}
    answer = post("/v1/completions", body).json()
    assert answer["usage"]["completion_tokens"] == 16
    assert answer["choices"][0]["text"].startswith("the fox" + SENTENCE[:5])


def test_a_part_is_text_by_each_name_that_openai_s_apis_have_for_it(engine: FakeEngineClient) -> None:
    kinds = ("text", "input_text", "output_text")
    parts = ["a", *({"type": kind, "text": kind} for kind in kinds), {"type": "refusal", "refusal": "no"}]
    messages = [{"role": "developer", "content": "c"}, {"role": "user", "content": parts}]
    answer = post("/v1/chat/completions", {**CHAT, "messages": messages}, engine=engine)
    assert answer.status_code == 200
    assert "x-mneme-ignored-fields" not in answer.headers
    post("/v1/completions", {**COMPLETION, "prompt": parts[::-1]}, engine=engine)
    texts, system = ["a", *kinds, "no"], "<|im_start|>system\nc<|im_end|>\n"
    assert engine.requests[0].prompt_text == system + RENDERED.replace("the fox", "\n".join(texts))
    assert engine.requests[1].prompt_text == "\n".join(texts[::-1])


@pytest.mark.parametrize(
    ("path", "fields", "limit"),
    [
        ("chat/completions", {**CHAT, "priority": -3.0, "truncation": {"keep_first": 0.0}}, "max_tokens"),
        ("completions", {**COMPLETION, "truncate_prompt_tokens": 2.0}, "max_tokens"),
        ("messages", CHAT, "max_tokens"),
        ("responses", {"model": "tiny", "input": "the fox"}, "max_output_tokens"),
    ],
)
def test_a_whole_float_is_an_integer(path: str, fields: dict[str, Any], limit: str, engine: FakeEngineClient) -> None:
    answer = post(f"/v1/{path}", {**fields, limit: 8.0, "top_k": 5.0, "seed": -1e3}, engine=engine)
    assert answer.status_code == 200, answer.text
    sampling = engine.requests[0].sampling
    assert repr((sampling.max_tokens, sampling.top_k, sampling.seed)) == "(8, 5, -1000)"
    for value in (8.5, True):
        assert post(f"/v1/{path}", {**fields, limit: value}).status_code == 400


@pytest.mark.parametrize(
    "harmless",
    [
        {"user": "u", "store": True, "metadata": {"a": "b"}, "service_tier": "auto", "unheard_of": [1]},
        {"response_format": {"type": "text"}, "tools": [], "tool_choice": "none", "logit_bias": {"5": -1}},
        {"suffix": "", "modalities": ["text"], "top_logprobs": 0, "logprobs": False},
        {"stop": [], "n": None, "temperature": 0, "seed": 2**64 - 1, "max_tokens": None, "modalities": []},
        {"stop": list("0123456789"), "n": 100, "chat_template_kwargs": {"a": {"b": [1]}}, "cache_salt": "\n" * 1000},
    ],
)
def test_harmless_fields_are_accepted(harmless: dict[str, Any]) -> None:
    assert chat(**harmless).status_code == 200


_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({"response_format": {"type": "json_object"}}, Grammar("json_object")),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": _SCHEMA}}},
            Grammar("json_schema", _SCHEMA),
        ),
        ({"structured_outputs": {"json": _SCHEMA, "regex": None}}, Grammar("json_schema", _SCHEMA)),
        ({"structured_outputs": {"json_object": True}}, Grammar("json_object")),
        ({"structured_outputs": {"regex": "a+", "disable_fallback": True}}, Grammar("regex", "a+")),
        ({"guided_json": '{"type": "null"}'}, Grammar("json_schema", '{"type": "null"}')),
        ({"guided_regex": "(a+)+$"}, Grammar("regex", "(a+)+$")),
        ({"guided_choice": ["a"]}, Grammar("choice", ["a"])),
        ({"guided_grammar": 'start: "a"', "response_format": {"type": "text"}}, Grammar("grammar", 'start: "a"')),
        ({"structured_outputs": {}, "guided_json": None}, None),
    ],
)
def test_what_an_answer_must_match_reaches_the_engine(fields: dict[str, Any], grammar: Grammar | None) -> None:
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)):
        engine = FakeEngineClient(TOKENIZER)
        assert post(path, {**body, **fields}, engine=engine).status_code == 200
        assert engine.requests[0].sampling.grammar == grammar


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": 5}, "model: input should be a valid string (got 5)"),
        ({"messages": [{"content": "a"}]}, "messages[0].role: field required"),
        ({"messages": ["a"]}, "messages[0]: must be an object (got 'a')"),
        (
            {"messages": [{"role": "user", "content": [5]}]},
            "messages[0].content[0]: input should be a valid string, or must be an object (got 5)",
        ),
        ({"guided_choice": ["a"] * 1025}, "guided_choice: must have at most 1024 items (got 'list of 1025')"),
    ],
)
def test_an_error_says_what_was_given_where_that_tells_something(changes: dict[str, Any], message: str) -> None:
    assert chat(**changes).json()["error"]["message"] == message


def test_an_over_long_prompt_is_refused_with_its_name_and_its_size() -> None:
    text = "the fox " * 1024
    prompts = ["a", text, "b"]
    answer = post("/v1/completions", {**COMPLETION, "prompt": prompts, "max_tokens": 5, "n": 2})
    error = answer.json()["error"]
    size = len(TOKENIZER.encode(text, add_special_tokens=True))
    assert (answer.status_code, error["param"], error["code"]) == (400, "prompt[1]", "context_length_exceeded")
    assert error["message"].startswith("prompt[1]: ")
    assert error["message"].endswith(f"this asks for {size} prompt tokens and 5 more")
    error = chat(messages=[{"role": "user", "content": text}], max_tokens=5).json()["error"]
    assert error["param"] == "messages"
    assert re.search(r"this asks for \d+ prompt tokens and 5 more$", error["message"])


def test_a_limit_beyond_what_the_prompt_leaves_is_what_it_leaves() -> None:
    """As vLLM: a client with a fixed limit may use all of the window."""
    for max_tokens in (5, 1024):
        body = {**COMPLETION, "prompt": [5] * 1020, "max_tokens": max_tokens, "ignore_eos": True}
        found = post("/v1/completions", body, engine=FakeEngineClient(TOKENIZER)).json()
        assert found["choices"][0]["finish_reason"] == "length"
        assert found["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize(("prompt", "num_turns"), [("the fox", 1), (["the fox", "a dog", "the fox"], 3)])
def test_engine_ids_are_a_turn_and_a_choice_index(prompt: Any, num_turns: int, engine: FakeEngineClient) -> None:
    post("/v1/completions", {**COMPLETION, "prompt": prompt, "n": 2}, engine=engine)
    turns = [request.request_id.rpartition(".")[0] for request in engine.requests]
    assert [r.request_id for r in engine.requests] == [
        f"{turn}.{r.choice_index}" for turn, r in zip(turns, engine.requests, strict=True)
    ]
    assert turns[::2] == turns[1::2]
    assert len(set(turns)) == num_turns


def test_prompt_tokens_that_one_choice_computed_are_not_cached() -> None:
    def choice(index: int, cached: int) -> Choice:
        request = GenerationRequest(request_id=f"r.{index}", prompt_token_ids=(1, 2, 3), sampling=SamplingParams())
        made = Choice(index=index, prompt_index=index // 2, request=request, tokenizer=TOKENIZER)
        made.add(TokenEvent(request.request_id, (5,), None, None, PromptUsage(3, cached)))
        assert [delta.num_tokens for delta in made.pop_deltas()] == [1]
        return made

    for first, second in ((2, 0), (0, 2)):
        choices = [choice(0, first), choice(1, second), choice(2, 2), choice(3, 1)]
        assert usage_object(choices) == {
            "prompt_tokens": 6,
            "completion_tokens": 4,
            "total_tokens": 10,
            "prompt_tokens_details": {"cached_tokens": 1, "cache_write_tokens": 5},
            "kv_details": {"device": 1, "host": 0, "disk": 0, "peer": 0, "recomputed": 5, "dropped": 0, "truncated": 0},
        }
