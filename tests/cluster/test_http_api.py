"""What both completion APIs answer, and what they ask of the engine."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cluster.api_fixtures import CHAT, COMPLETION, RENDERED, TOKENIZER, chat, post
from tests.cluster.fake_engine_client import SENTENCE, FakeEngineClient


def test_a_chat_answer() -> None:
    answer = chat().json()
    assert answer["object"] == "chat.completion"
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": SENTENCE, "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    num_prompt = len(TOKENIZER.encode_rendered(RENDERED))
    num_output = len(TOKENIZER.encode(SENTENCE, add_special_tokens=False))
    assert answer["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_what_the_engine_is_asked_for() -> None:
    engine = FakeEngineClient(TOKENIZER)
    body = {**CHAT, "n": 2, "seed": 5, "max_completion_tokens": 9, "max_tokens": 7, "top_k": 3, "stop": "x"}
    post("/v1/chat/completions", body, engine=engine, headers={"X-Session-ID": "s"})
    first, second = engine.requests
    assert first.prompt_text == RENDERED
    assert first.prompt_token_ids == tuple(TOKENIZER.encode_rendered(RENDERED))
    assert (first.sampling.seed, first.sampling.max_tokens, first.sampling.top_k) == (5, 9, 3)
    assert first.sampling.stop == ("x",)
    assert (first.session_id, second.session_id) == ("public:s", None)
    assert (first.choice_index, second.choice_index) == (0, 1)
    assert first.request_id != second.request_id
    assert first.salt == ""


def test_a_seed_is_drawn_where_none_is_given() -> None:
    engine = FakeEngineClient(TOKENIZER)
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
        ({}, {"session_id": "b", "prompt_cache_key": "c"}, "public:b"),
        ({}, {"prompt_cache_key": "c"}, "public:c"),
        ({"X-Session-ID": "../../etc/passwd"}, {}, "public:../../etc/passwd"),  # a name, never a path
    ],
)
def test_where_the_session_comes_from(headers: Any, body: Any, session: str | None) -> None:
    engine = FakeEngineClient(TOKENIZER)
    post("/v1/chat/completions", {**CHAT, **body}, engine=engine, headers=headers)
    assert engine.requests[0].session_id == session


def test_a_stop_string_ends_the_text_before_it() -> None:
    choice = chat(stop=["STOP"]).json()["choices"][0]
    assert choice["message"]["content"] == SENTENCE.partition("STOP")[0]
    assert choice["finish_reason"] == "stop"


def test_length_is_the_reason_when_tokens_run_out() -> None:
    answer = chat(max_tokens=3).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 3


def test_cached_tokens_are_reported() -> None:
    engine = FakeEngineClient(TOKENIZER)
    first = post("/v1/chat/completions", CHAT, engine=engine).json()["usage"]
    again = post("/v1/chat/completions", CHAT, engine=engine).json()["usage"]
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert again["prompt_tokens_details"]["cached_tokens"] == again["prompt_tokens"] - 1


def test_chat_logprobs() -> None:
    content = chat(logprobs=True, top_logprobs=4).json()["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == SENTENCE
    assert [entry["logprob"] for entry in content[0]["top_logprobs"]] == [0.0, -1.0, -2.0, -9999.0]
    plain = chat(logprobs=True).json()["choices"][0]["logprobs"]["content"]
    assert all(entry["top_logprobs"] == [] for entry in plain)


def test_completions_of_several_prompts() -> None:
    body = {**COMPLETION, "prompt": ["the fox", "a dog"], "n": 2, "max_tokens": 4}
    engine = FakeEngineClient(TOKENIZER)
    answer = post("/v1/completions", body, engine=engine).json()
    assert answer["object"] == "text_completion"
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [request.choice_index for request in engine.requests] == [0, 1, 0, 1]
    assert answer["usage"]["completion_tokens"] == 16
    lengths = [len(TOKENIZER.encode(text, add_special_tokens=True)) for text in body["prompt"]]
    assert answer["usage"]["prompt_tokens"] == sum(lengths)


def test_completion_prompts_of_ids_are_taken_as_they_are() -> None:
    engine = FakeEngineClient(TOKENIZER)
    post("/v1/completions", {**COMPLETION, "prompt": [5, 6, 7]}, engine=engine)
    assert engine.requests[0].prompt_token_ids == (5, 6, 7)
    assert engine.requests[0].prompt_text is None


def test_completion_defaults_to_sixteen_tokens_and_echoes() -> None:
    body = {"model": "tiny", "prompt": "the fox", "echo": True}
    answer = post("/v1/completions", body).json()
    assert answer["usage"]["completion_tokens"] == 16
    assert answer["choices"][0]["text"].startswith("the fox" + SENTENCE[:5])


def test_completion_logprobs() -> None:
    logprobs = post("/v1/completions", {**COMPLETION, "logprobs": 2}).json()["choices"][0]["logprobs"]
    assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == len(logprobs["text_offset"])
    assert logprobs["text_offset"][:2] == [0, len(logprobs["tokens"][0])]
    assert all(len(top) <= 3 for top in logprobs["top_logprobs"])


def test_content_parts_become_text_and_developer_is_system() -> None:
    engine = FakeEngineClient(TOKENIZER)
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "c"}, {"role": "user", "content": parts}]
    post("/v1/chat/completions", {**CHAT, "messages": messages}, engine=engine)
    assert (engine.requests[0].prompt_text or "").startswith(
        "<|im_start|>system\nc<|im_end|>\n<|im_start|>user\na\nb<|im_end|>"
    )


@pytest.mark.parametrize(
    "harmless",
    [
        {"user": "u", "store": True, "metadata": {"a": "b"}, "service_tier": "auto", "unheard_of": [1]},
        {"response_format": {"type": "text"}, "tools": [], "tool_choice": "none", "logit_bias": {"5": -1}},
        {"tools": [{"type": "function"}], "tool_choice": "none", "suffix": "", "modalities": ["text"]},
        {"stop": [], "n": None, "temperature": 0, "seed": 2**64 - 1, "max_tokens": None},
    ],
)
def test_harmless_fields_are_accepted(harmless: dict[str, Any]) -> None:
    assert chat(**harmless).status_code == 200
