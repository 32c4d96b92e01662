"""What a model's card says holds where a request says nothing: sampling, effort, and the names that it goes by."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from mneme.cluster.http.api import build_api
from mneme.cluster.http.api_state import Backend
from mneme.replicas.request import Weighing
from mneme.replicas.text.tokenizer import Tokenizer
from tests.cluster.api_fixtures import CHAT, COMPLETION, MODEL, TOKENIZER
from tests.cluster.fake_engine_client import FakeEngineClient
from tests.replicas.tiny_tokenizer import CHATML, tiny_tokenizer

IGNORED = "x-mneme-ignored-fields"
SAYS = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.05, "max_tokens": 7}
CARD = replace(MODEL, aliases=("claude-haiku", "org/Tiny"), sampling_defaults=SAYS)
HELD = Weighing(temperature=0.6, top_p=0.9, top_k=20, repetition_penalty=1.05)
INPUT = {"model": "tiny", "input": "the fox"}
MESSAGES = {**CHAT, "max_tokens": 5}
SWITCH = CHATML + "{{ '<think></think>' if enable_thinking is defined and not enable_thinking else '<think>' }}"
LEVEL = CHATML + "{{ 'Reasoning: ' + reasoning_effort if reasoning_effort is defined }}"
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}


def over(engine: FakeEngineClient, tokenizer: Tokenizer = TOKENIZER) -> TestClient:
    return TestClient(build_api([Backend(engine, CARD, tokenizer)], ingress="x1"))


def ask(engine: FakeEngineClient, path: str, body: dict[str, Any], tokenizer: Tokenizer = TOKENIZER) -> httpx.Response:
    answer = over(engine, tokenizer).post(f"/v1/{path}", json=body)
    assert answer.status_code == 200, answer.text
    return answer


@pytest.mark.parametrize(
    ("path", "body"),
    [("chat/completions", CHAT), ("completions", COMPLETION), ("messages", MESSAGES), ("responses", INPUT)],
)
def test_the_models_values_hold_where_a_request_names_none(
    path: str, body: dict[str, Any], engine: FakeEngineClient
) -> None:
    ask(engine, path, body)
    assert engine.requests[-1].sampling.weighing == HELD
    ask(engine, path, {**body, "temperature": 0, "top_p": 0.5})
    assert engine.requests[-1].sampling.weighing == HELD._replace(temperature=0, top_p=0.5)


def test_a_value_that_is_neutral_counts_as_given(engine: FakeEngineClient) -> None:
    ask(engine, "chat/completions", {**CHAT, "temperature": 1.0, "top_k": 0, "top_p": 1, "repetition_penalty": 1})
    assert engine.requests[-1].sampling.weighing == Weighing()
    assert engine.requests[-1].sampling.max_tokens is None  # the model's limit is the engine's, which knows the room


def test_what_holds_is_told(engine: FakeEngineClient) -> None:
    client = over(engine)
    assert client.get("/v1/models").json()["data"][0]["sampling_defaults"] == SAYS
    done = client.post("/v1/responses", json={**INPUT, "top_p": 0.25}).json()
    assert (done["temperature"], done["top_p"]) == (0.6, 0.25)
    done = client.post("/v1/chat/completions", json={**CHAT, "min_p": 0.125, "max_tokens": 3}).json()
    (choice,) = client.get(f"/v1/kv/explain/{done['id']}").json()["choices"]
    assert choice["sampling"] == {**HELD._replace(min_p=0.125)._asdict(), "max_tokens": 3}


def test_a_model_may_go_by_several_names_of_which_the_first_is_told(engine: FakeEngineClient) -> None:
    client = over(engine)
    listed = client.get("/v1/models").json()["data"]
    assert [each["id"] for each in listed] == ["tiny", "claude-haiku", "org/Tiny"]
    for name in ("tiny", "claude-haiku", "org/Tiny"):
        assert client.get(f"/v1/models/{name}").json()["id"] == name
        for path, body in (("chat/completions", CHAT), ("messages", MESSAGES), ("responses", INPUT)):
            assert client.post(f"/v1/{path}", json={**body, "model": name}).json()["model"] == "tiny"
    refused = client.post("/v1/chat/completions", json={**CHAT, "model": "haiku"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
    metrics = client.get("/metrics").text
    assert 'model_name="tiny"' in metrics
    assert "haiku" not in metrics


@pytest.mark.parametrize(("effort", "switched"), [("none", "<think></think>"), ("max", "<think>")])
def test_an_effort_switches_thinking_where_the_template_can(effort: str, switched: str) -> None:
    tokenizer = tiny_tokenizer(SWITCH)
    engine = FakeEngineClient(tokenizer)
    for path, body in (
        ("chat/completions", {**CHAT, "reasoning_effort": effort}),
        ("responses", {**INPUT, "reasoning": {"effort": effort}}),
    ):
        answer = ask(engine, path, body, tokenizer)
        assert str(engine.requests[-1].prompt_text).endswith(f"assistant\n{switched}")
        assert IGNORED not in answer.headers
    own = {"chat_template_kwargs": {"enable_thinking": effort == "none"}}
    ask(engine, "chat/completions", {**CHAT, "reasoning_effort": effort, **own}, tokenizer)
    other = "<think>" if effort == "none" else "<think></think>"
    assert str(engine.requests[-1].prompt_text).endswith(f"assistant\n{other}")
    tokenizer.close()


def test_an_effort_is_a_variable_of_the_template() -> None:
    tokenizer = tiny_tokenizer(LEVEL)
    engine = FakeEngineClient(tokenizer)
    answer = ask(engine, "chat/completions", {**CHAT, "reasoning_effort": "low"}, tokenizer)
    assert str(engine.requests[-1].prompt_text).endswith("Reasoning: low")
    assert IGNORED not in answer.headers
    own = {"chat_template_kwargs": {"reasoning_effort": "deep"}}
    ask(engine, "chat/completions", {**CHAT, "reasoning_effort": "low", **own}, tokenizer)
    assert str(engine.requests[-1].prompt_text).endswith("Reasoning: deep")
    ask(engine, "chat/completions", CHAT, tokenizer)
    assert "Reasoning" not in str(engine.requests[-1].prompt_text)
    tokenizer.close()


def test_an_effort_that_the_template_does_not_know_is_named_as_ignored(engine: FakeEngineClient) -> None:
    answer = ask(engine, "chat/completions", {**CHAT, "reasoning_effort": "none", "zzz": 1})
    assert answer.headers[IGNORED] == "zzz, reasoning_effort"
    answer = ask(engine, "responses", {**INPUT, "reasoning": {"effort": "high"}})
    assert answer.headers[IGNORED] == "reasoning.effort"
    assert IGNORED not in ask(engine, "chat/completions", {**CHAT, "reasoning_effort": None}).headers
    assert IGNORED not in ask(engine, "responses", {**INPUT, "reasoning": {"effort": None}}).headers


def test_the_template_that_is_used_decides_whether_an_effort_is_heeded() -> None:
    tokenizer = tiny_tokenizer(CHATML, tool_template="{{ tools | length }}" + SWITCH)
    engine = FakeEngineClient(tokenizer)
    asked = {**CHAT, "reasoning_effort": "none"}
    assert ask(engine, "chat/completions", asked, tokenizer).headers[IGNORED] == "reasoning_effort"
    answer = ask(engine, "chat/completions", {**asked, "tools": [TOOL], "tool_choice": "none"}, tokenizer)
    assert IGNORED not in answer.headers
    assert str(engine.requests[-1].prompt_text).startswith("1<|im_start|>")
    assert str(engine.requests[-1].prompt_text).endswith("<think></think>")
    tokenizer.close()
