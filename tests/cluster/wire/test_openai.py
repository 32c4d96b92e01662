"""Bodies to values: what is accepted is shown here, what is refused in `bad_requests.py`."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mneme.cluster.http.body import MAX_DEPTH, parse_json_object
from mneme.cluster.tenancy import PUBLIC, kv_salt, session_key, tenant_of_secret
from mneme.cluster.wire.openai import (
    ChatRequest,
    CompletionRequest,
    TokenizeRequest,
    conversation,
    template_variables,
    validate,
)
from mneme.errors import InvalidRequest
from mneme.replicas.text.document_parts import StandIns
from tests.budget import examples

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
CHAT_FIELDS = st.sampled_from([*ChatRequest.model_fields, *CompletionRequest.model_fields, "tools", "response_format"])
BASE = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "prompt": "Hi"}


GOES_ON = {"continue_final_message": True, "add_generation_prompt": False}


def refusal_of(call: Callable[[], object]) -> InvalidRequest | None:
    try:
        call()
    except InvalidRequest as error:
        return error
    return None


def read_whole(body: ChatRequest | CompletionRequest) -> None:
    body.sampling_params(1)
    body.check_stream_options()
    if isinstance(body, CompletionRequest):
        body.prompts()
    else:
        conversation(body.messages, StandIns(body.documents_beside))
        template_variables(body.chat_template_kwargs)


@settings(max_examples=examples(500))
@given(st.dictionaries(CHAT_FIELDS, JSON, max_size=4))
def test_any_values_are_taken_or_refused_with_a_field(changes: dict[str, Any]) -> None:
    for model in (ChatRequest, CompletionRequest):
        refusal = refusal_of(lambda model=model: read_whole(validate(model, {**BASE, **changes})))
        assert refusal is None or (refusal.field and len(str(refusal)) < 1000)


@settings(max_examples=examples(500))
@given(st.binary(max_size=60) | JSON.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_are_an_object_or_refused(body: bytes) -> None:
    refusal = refusal_of(lambda: parse_json_object(body))
    assert refusal is None or str(refusal).encode()


def test_text_may_begin_with_a_byte_order_mark() -> None:
    assert parse_json_object('\ufeff{"a": ["世界🙂", {"é": "\\u2028"}]}'.encode()) == {"a": ["世界🙂", {"é": "\u2028"}]}


def test_nesting_has_an_exact_limit() -> None:
    inner = "[" * (MAX_DEPTH - 1) + "]" * (MAX_DEPTH - 1)
    parse_json_object(f'{{"a": {inner}}}'.encode())
    with pytest.raises(InvalidRequest, match="nested"):
        parse_json_object(f'{{"a": [{inner}]}}'.encode())


def test_limits_are_inclusive() -> None:
    body = {
        **BASE,
        "n": 8,
        "stop": ["x" * 256] * 4,
        "logprobs": True,
        "top_logprobs": 20,
        "logit_bias": {str(i): 1 for i in range(1024)},
        "temperature": 2,
        "seed": -(2**63),
    }
    params = validate(ChatRequest, body).sampling_params(1)
    assert (params.n, params.logprobs, params.seed) == (8, 20, -(2**63))
    assert params.logit_bias == dict.fromkeys(range(1024), 1)


def test_an_assistant_may_have_said_nothing() -> None:
    messages = [*BASE["messages"], {"role": "assistant"}, {"role": "user", "content": "a", "name": "Bo"}]
    body = validate(TokenizeRequest, {"messages": messages})
    assert conversation(body.messages or [], StandIns())[1:] == [
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "a", "name": "Bo"},
    ]


@pytest.mark.parametrize("nothing", [{}, {"content": None}, {"content": []}])
def test_an_assistant_s_refusal_is_what_it_said(nothing: dict[str, Any]) -> None:
    messages = [*BASE["messages"], {"role": "assistant", "refusal": "no", **nothing}]
    body = validate(ChatRequest, {**BASE, "messages": messages, **GOES_ON})
    body.check_continuation()
    assert conversation(body.messages, StandIns())[1] == {"role": "assistant", "content": "no"}
    messages[1] = {"role": "assistant", "refusal": "no", "content": "yes"}
    body = validate(ChatRequest, {**BASE, "messages": messages})
    assert conversation(body.messages, StandIns())[1]["content"] == "yes"


def test_functions_as_they_were_before_tools_are_tools() -> None:
    call = {"name": "f", "arguments": '{"a": 1}'}
    messages = [
        {"role": "assistant", "content": None, "function_call": call},
        {"role": "function", "name": "f", "content": "5"},
        {"role": "assistant", "content": "ok", "function_call": None},
        {"role": "function", "name": "g", "content": None},
    ]
    called, result, said, nothing = conversation(
        validate(TokenizeRequest, {"messages": messages}).messages or [], StandIns()
    )
    (made,) = called["tool_calls"]
    assert made["function"] == {"name": "f", "arguments": {"a": 1}}
    assert len(made["id"]) == 9
    assert result == {"role": "tool", "content": "5", "name": "f", "tool_call_id": made["id"]}
    assert said == {"role": "assistant", "content": "ok"}
    assert (nothing["role"], nothing["content"]) == ("tool", "")
    users = validate(TokenizeRequest, {"messages": [{"role": "user", "content": "a", "function_call": call}]})
    refusal = refusal_of(lambda: conversation(users.messages or [], StandIns()))
    assert refusal is not None
    assert refusal.field == "messages[0].tool_calls"


def test_template_variables_cannot_replace_the_conversation() -> None:
    body = validate(ChatRequest, {**BASE, "chat_template_kwargs": {"messages": "x", "enable_thinking": False}})
    assert template_variables(body.chat_template_kwargs) == {"enable_thinking": False}


def test_tenants_sessions_and_salts() -> None:
    tenant = tenant_of_secret("0" * 64)
    assert tenant != tenant_of_secret("1" * 64)
    assert kv_salt(PUBLIC, None) == ""
    assert len({kv_salt(t, s) for t in (PUBLIC, tenant) for s in (None, "a", "b")}) == 6
    assert kv_salt(PUBLIC, tenant) != kv_salt(tenant, None)  # no tenant can write itself into another's forest
    assert session_key(tenant, "s") == f"{tenant}:s"
