"""What a request says about truncation, and what reaches the engine of it."""

from __future__ import annotations

from typing import Any

from starlette.testclient import TestClient

from mneme.cluster.http.api import build_api
from mneme.cluster.http.api_state import Backend
from mneme.replicas.request import GenerationRequest
from mneme.replicas.truncation import Truncation
from tests.cluster.api_fixtures import CHAT, COMPLETION, MODEL, TOKENIZER
from tests.cluster.fake_engine_client import FakeEngineClient

UNSAID = Truncation()
LONG = [5] * 2000  # MODEL has a context of 1024 tokens
SYSTEM = {"role": "system", "content": "be brief, and never name the fox"}


def requests_of(
    path: str, body: dict[str, Any], status: int = 200, *, default: Truncation = UNSAID
) -> tuple[list[GenerationRequest], Any]:
    """What the engine was asked, and the answer; the engine has room for anything."""

    engine = FakeEngineClient(TOKENIZER, max_context=100_000)
    response = TestClient(build_api([Backend(engine, MODEL, TOKENIZER, truncation=default)])).post(path, json=body)
    assert response.status_code == status, response.text
    return engine.requests, response.json()


def completion(status: int = 200, *, default: Truncation = UNSAID, **changes: Any) -> Any:
    return requests_of("/v1/completions", {**COMPLETION, "max_tokens": 4, **changes}, status, default=default)


def chat(status: int = 200, *, default: Truncation = UNSAID, **changes: Any) -> Any:
    return requests_of("/v1/chat/completions", {**CHAT, "max_tokens": 4, **changes}, status, default=default)


def test_a_session_is_truncated_as_configured_and_nothing_else_is() -> None:
    default = Truncation(ratio=0.25)
    (with_session,), _ = chat(session_id="s", default=default)
    (without,), _ = chat(default=default)
    assert (with_session.truncation, without.truncation) == (default, None)
    (refused,), _ = chat(session_id="s", default=Truncation(strategy="error"))
    assert refused.truncation is None


def test_a_request_says_otherwise() -> None:
    asked = {"strategy": "recompute", "ratio": 0.25, "keep_first": 4, "keep": "important"}
    (request,), _ = chat(truncation=asked)
    assert request.truncation == Truncation(**asked)
    (request,), _ = chat(session_id="s", truncation={"keep": None}, default=Truncation(keep="system", keep_first=2))
    assert request.truncation == Truncation(keep_first=2)
    (request,), _ = chat(session_id="s", truncation={"strategy": "error"})
    assert request.truncation is None


def test_an_overlong_prompt_is_the_engine_s_to_judge_where_it_is_truncated() -> None:
    for body in ({"session_id": "s"}, {"truncation": {"strategy": "recompute"}}):
        (request,), _ = completion(prompt=LONG, **body)
        assert len(request.prompt_token_ids) == 2000
    text = "the fox and the dog. " * 4000
    (request,), _ = completion(prompt=text, session_id="s")
    assert len(request.prompt_token_ids) > MODEL.max_context
    for body in ({}, {"session_id": "s", "truncation": {"strategy": "error"}}):
        _, answer = completion(400, prompt=LONG, **body)
        assert answer["error"]["code"] == "context_length_exceeded"
    _, answer = completion(400, prompt=[5] * (16 * 1024), session_id="s")
    assert "at most 16384 tokens" in answer["error"]["message"]


def test_of_several_prompts_only_the_first_has_a_session_to_reuse() -> None:
    requests, _ = completion(prompt=[[5, 6], [5, 7]], session_id="s")
    assert [request.truncation for request in requests] == [Truncation(), None]
    requests, _ = completion(prompt=[[5, 6], [5, 7]], session_id="s", truncation={"strategy": "recompute"})
    assert [request.truncation for request in requests] == [Truncation(strategy="recompute")] * 2
    _, answer = completion(400, prompt=[[5, 6], LONG], session_id="s")
    assert answer["error"]["param"] == "prompt[1]"


def test_the_length_of_the_system_prompt_goes_along_where_it_is_to_be_kept() -> None:
    messages = [SYSTEM, *CHAT["messages"]]
    keep = {"session_id": "s", "truncation": {"keep": "system"}}
    (request,), _ = chat(messages=messages, **keep)
    kept = TOKENIZER.decode(request.prompt_token_ids[: request.num_system], skip_special_tokens=False)
    system = f"<|im_start|>system\n{SYSTEM['content']}<|im_end|>\n"
    assert kept in (f"{system}<|im_start|>user\n", f"{system}<|im_start|>user")
    (request,), _ = chat(**keep)
    assert request.num_system == 0
    (request,), _ = chat(messages=messages, session_id="s")
    assert request.num_system == 0
