"""Fields of vLLM's API beyond OpenAI's, and what is said of fields that nothing here knows."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from tests.cluster.api_fixtures import CHAT, COMPLETION, MODEL, RENDERED, TOKENIZER, Server, post, serving
from tests.cluster.fake_engine_client import FakeEngineClient

IGNORED = "x-mneme-ignored-fields"
IDS = TOKENIZER.encode("the quick brown fox", add_special_tokens=True)


def ask(path: str, engine: FakeEngineClient | None = None, **fields: Any) -> httpx.Response:
    given = {"chat/completions": CHAT, "completions": COMPLETION, "embeddings": {"model": "tiny", "input": IDS}}[path]
    return post(f"/v1/{path}", {**given, **fields}, engine=engine)


def strict_client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", _strict_response_validation=True)


@pytest.mark.parametrize(("path", "prompt"), [("completions", "prompt"), ("embeddings", "input")])
@pytest.mark.parametrize("given", ["the quick brown fox", IDS])
def test_the_last_tokens_of_a_prompt_are_left(path: str, prompt: str, given: Any, engine: FakeEngineClient) -> None:
    for num_tokens in (2, len(IDS), -1):
        answer = ask(path, engine, **{prompt: given}, truncate_prompt_tokens=num_tokens)
        left = IDS if num_tokens == -1 else IDS[-num_tokens:]
        assert list(engine.requests[-1].prompt_token_ids) == left
        assert answer.json()["usage"]["prompt_tokens"] == len(left)


def test_a_prompt_that_was_cut_has_no_text_that_a_session_could_take_for_all_of_it(engine: FakeEngineClient) -> None:
    for session in ({}, {"session_id": "s"}):
        assert ask("chat/completions", engine, truncate_prompt_tokens=3, **session).status_code == 200
        (*_, request) = engine.requests
        assert list(request.prompt_token_ids) == TOKENIZER.encode_rendered(RENDERED)[-3:]
        assert request.prompt_text is None
    ask("chat/completions", engine, truncate_prompt_tokens=500)
    assert engine.requests[-1].prompt_text == RENDERED


def test_what_is_cut_may_be_longer_than_the_window_and_leaves_room_for_the_answer(engine: FakeEngineClient) -> None:
    long = [IDS[1]] * (2 * MODEL.max_context)
    assert ask("completions", engine, prompt=long, truncate_prompt_tokens=-1, max_tokens=5).status_code == 200
    assert len(engine.requests[-1].prompt_token_ids) == MODEL.max_context - 5
    assert ask("completions", prompt=long).json()["error"]["code"] == "context_length_exceeded"
    longer = [IDS[1]] * (16 * MODEL.max_context)
    refused = ask("completions", prompt=longer, truncate_prompt_tokens=-1)
    assert refused.json()["error"]["code"] == "context_length_exceeded"


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


def test_unknown_fields_within_others_are_named_with_what_holds_them() -> None:
    part = {"type": "text", "text": "the fox", "prompt_cache_breakpoint": {"mode": "explicit"}}
    said = {"role": "user", "content": [part, part], "weight": 1}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "of_its_own": 1}}}
    answer = ask("chat/completions", messages=[said, said], tools=[tool], tool_choice="none", stream_options={"a": 1})
    assert answer.headers[IGNORED] == "messages.content.prompt_cache_breakpoint, messages.weight, stream_options.a"


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
        *(({"service_tier": tier}, 0, "default") for tier in ("auto", "default", "scale", "fast")),
        ({"service_tier": "flex", "priority": 1}, 31, "flex"),
        ({"service_tier": "priority"}, -30, "priority"),
    ],
)
def test_priorities_reach_the_engine_and_answers_name_the_tier(
    fields: dict[str, Any], priority: int, tier: str | None, engine: FakeEngineClient
) -> None:
    for path in ("chat/completions", "completions"):
        answer = ask(path, engine, **fields)
        assert engine.requests[-1].priority == priority
        assert answer.json().get("service_tier") == tier
        assert IGNORED not in answer.headers
    if "priority" not in fields:  # responses have tiers alone
        response = post("/v1/responses", {"model": "tiny", "input": "the fox", **fields}, engine=engine)
        assert engine.requests[-1].priority == priority
        assert response.json()["service_tier"] == (tier or "default")
    with serving() as server, strict_client(server) as client:
        stream: Any = client.chat.completions.create(**CHAT, stream=True, extra_body=fields)
        assert {chunk.service_tier for chunk in stream} == {tier}


def test_an_echo_tells_the_prompt_s_tokens_before_the_answer_s(engine: FakeEngineClient) -> None:
    """As `lm_eval` reads them; a prompt whose log-probabilities are wanted shares no KV."""
    answer = ask("completions", engine, prompt=[IDS, IDS[:3]], max_tokens=1, logprobs=2, echo=True).json()
    assert len({request.kv_salt for request in engine.requests}) == 2
    assert {(request.salt, request.sampling.prompt_logprobs) for request in engine.requests} == {("", 2)}
    choice, _ = answer["choices"]
    told, texts = choice["logprobs"], list(map(TOKENIZER.token_text, IDS))
    assert told["tokens"][: len(IDS)] == texts
    assert told["token_logprobs"] == [None, *(-float(i) for i in range(1, len(IDS))), -0.5]
    assert told["top_logprobs"][0] is None
    likeliest = {TOKENIZER.token_text(3): -0.25, TOKENIZER.token_text(4): -1.25}
    assert told["top_logprobs"][1] == likeliest | {texts[1]: -1.0}
    assert len(told["top_logprobs"]) == len(told["text_offset"]) == len(told["tokens"]) == len(IDS) + 1
    (hidden, *shown), (_, *offsets) = told["tokens"], told["text_offset"]
    assert hidden not in choice["text"]  # a special one
    assert all(choice["text"].startswith(text, offset) for text, offset in zip(shown, offsets, strict=True))
    assert told["text_offset"][:2] == [0, 0]
    assert "prompt_logprobs" not in choice
    assert answer["usage"]["completion_tokens"] == 2


def test_an_echo_without_an_answer() -> None:
    (told,) = (answer := ask("completions", prompt=IDS, max_tokens=0, logprobs=0, echo=True).json())["choices"]
    assert told["text"] == TOKENIZER.decode(IDS, skip_special_tokens=True)
    assert told["finish_reason"] == "length"
    assert told["logprobs"]["tokens"] == list(map(TOKENIZER.token_text, IDS))
    assert answer["usage"]["completion_tokens"] == 0
    (bare,) = ask("completions", prompt=IDS, max_tokens=0, echo=True).json()["choices"]
    assert (bare["text"], bare["logprobs"]) == (told["text"], None)


@pytest.mark.parametrize("prompt", [[IDS, IDS[:1], IDS[1:]], ["the fox", "a", "<|im_end|>"]])
@pytest.mark.parametrize("max_tokens", [0, 5])
def test_a_streamed_echo_adds_up_to_the_whole_one(max_tokens: int, prompt: Any) -> None:
    body: dict[str, Any] = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "n": 2}
    body |= {"logprobs": 1, "echo": True}
    # Not strict: the client's types have no null for the first token, which OpenAI's own echoes have.
    with serving() as server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        whole = client.completions.create(**body)
        stream: Any = client.completions.create(**body, stream=True, stream_options={"include_usage": True})
        *chunks, last = stream
    assert last.usage.completion_tokens == whole.usage.completion_tokens == 6 * max_tokens
    for choice in whole.choices:
        pieces = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == choice.index]
        assert "".join(piece.text for piece in pieces) == choice.text
        assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            told = [item for piece in pieces if piece.logprobs for item in getattr(piece.logprobs, name)]
            assert told == getattr(choice.logprobs, name)


@pytest.mark.parametrize("num_top", [0, 2])
def test_logprobs_of_the_prompt_as_vllm_has_them(num_top: int) -> None:
    with serving() as server, strict_client(server) as client:
        extra = {"prompt_logprobs": num_top}
        completion: Any = client.completions.create(**{**COMPLETION, "prompt": [IDS, IDS[:1]]}, extra_body=extra)
        chat: Any = client.chat.completions.create(**CHAT, n=2, extra_body=extra)
    told, none = (choice.prompt_logprobs for choice in completion.choices)
    assert none == told[:1] == [None]
    likeliest = {"3": -0.25, "4": -1.25} if num_top else {}
    for place, token_id in enumerate(IDS[1:], 1):
        found = {key: each["logprob"] for key, each in told[place].items()}
        assert found == {str(token_id): -float(place)} | likeliest
        own = {"logprob": -float(place), "rank": 9, "decoded_token": TOKENIZER.token_text(token_id)}
        assert told[place][str(token_id)] == own
        assert [each["rank"] for key, each in told[place].items() if key != str(token_id)] == [1, 2][:num_top]
    assert len(chat.prompt_logprobs) == len(TOKENIZER.encode_rendered(RENDERED))
    assert completion.choices[0].logprobs is None
    assert "prompt_logprobs" not in ask("completions").json()["choices"][0]
