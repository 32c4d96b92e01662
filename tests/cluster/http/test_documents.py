"""What a request says about documents, and what reaches the engine and its client of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from starlette.testclient import TestClient

from mneme.cluster.http.api import build_api
from mneme.cluster.http.api_state import Backend
from mneme.replicas.documents import BlendOptions
from mneme.replicas.request import GenerationRequest
from tests.cluster.api_fixtures import CHAT, COMPLETION, MODEL, TOKENIZER, post
from tests.cluster.fake_engine_client import FakeEngineClient

DOCUMENT = {"type": "document", "text": "a red fox", "id": "red"}
QUESTION = {"type": "text", "text": "who?"}


def asked(path: str, body: dict[str, Any]) -> GenerationRequest:
    """What the engine was asked."""
    engine = FakeEngineClient(TOKENIZER)
    response = post(path, body, engine=engine)
    assert response.status_code == 200, response.text
    return engine.requests[0]


def chat(**changes: Any) -> GenerationRequest:
    return asked("/v1/chat/completions", {**CHAT, "max_tokens": 4, **changes})


def completion(**changes: Any) -> GenerationRequest:
    return asked("/v1/completions", {**COMPLETION, "max_tokens": 4, **changes})


def said(request: GenerationRequest) -> list[tuple[str, str, list[int]]]:
    """Name, text and tokens of its documents."""
    assert request.prompt_text is not None
    return [
        (each.name, request.prompt_text[each.char_start : each.char_end],
         list(request.prompt_token_ids[each.start : each.end]))
        for each in request.documents
    ]  # fmt: skip


RED = ("red", "a red fox", TOKENIZER.encode_continuation("a red fox"))


def test_documents_among_the_parts_of_a_message() -> None:
    request = chat(messages=[{"role": "user", "content": [DOCUMENT, QUESTION]}])
    assert request.prompt_text == "<|im_start|>user\na red foxwho?<|im_end|>\n<|im_start|>assistant\n"
    assert said(request) == [RED]


def test_documents_beside_the_messages() -> None:
    request = chat(documents=["a dog", {"text": "a red fox", "id": "red"}])
    assert request.prompt_text is not None
    assert request.prompt_text.startswith("<|im_start|>user\na dog\n\na red fox\n\nthe fox<|im_end|>")
    assert said(request) == [("document-0", "a dog", TOKENIZER.encode_continuation("a dog")), RED]


def test_the_text_of_a_document_may_be_called_its_contents() -> None:
    named, other = ({"title": "Foxes", key: "a red fox"} for key in ("contents", "text"))
    request = chat(documents=[named])
    assert request.prompt_token_ids == chat(documents=[other]).prompt_token_ids
    assert [text for _, text, _ in said(request)] == ["Foxes\na red fox"]
    asked = {**CHAT, "documents": [named]}
    assert "x-mneme-ignored-fields" not in post("/v1/chat/completions", asked).headers


@pytest.mark.parametrize("changes", [{"documents": [{"text": "a red fox", "id": "red"}]}, {"prompt": [DOCUMENT]}])
def test_documents_of_a_text(changes: dict[str, Any]) -> None:
    request = completion(**changes)
    assert said(request) == [RED]
    bos = TOKENIZER.encode("", add_special_tokens=True)
    assert request.prompt_token_ids[: len(bos) + len(RED[2])] == (*bos, *RED[2])


def test_documents_of_what_is_appended_to_a_session(engine: FakeEngineClient) -> None:
    session = {"session_id": "s"}
    body = {**CHAT, **session, "max_tokens": 4}
    assert post("/v1/chat/completions", body, engine=engine).status_code == 200
    body |= {"messages": [{"role": "user", "content": [DOCUMENT, QUESTION]}], "session": {"append": True}}
    assert post("/v1/chat/completions", body, engine=engine).status_code == 200
    assert said(engine.requests[1]) == [RED]


def test_options_of_blending_reach_the_engine() -> None:
    blend = {"mode": "off", "selector": "random", "ratio": 0.5, "min_tokens": 0, "order": "any"}
    assert chat(documents=["a"], blend=blend).blend == BlendOptions(**blend)  # type: ignore[arg-type]
    assert chat(documents=["a"]).blend == BlendOptions()
    assert completion(documents=["a"], blend={"order": "any"}).blend.order == "any"


def test_options_that_a_request_does_not_give_are_those_of_the_engine(engine: FakeEngineClient) -> None:
    default = BlendOptions(mode="selective", ratio=0.3)
    app = build_api([Backend(engine, MODEL, TOKENIZER, blend=default)])
    with TestClient(app) as client:
        for blend in ({}, {"blend": {"ratio": None, "order": "any"}}):
            response = client.post("/v1/chat/completions", json={**CHAT, "max_tokens": 4, "documents": ["a"], **blend})
            assert response.status_code == 200, response.text
    assert [request.blend for request in engine.requests] == [default, replace(default, ratio=None, order="any")]


def test_a_truncation_keeps_a_system_prompt_with_documents() -> None:
    system = {"role": "system", "content": [{"type": "text", "text": "be brief"}, DOCUMENT]}
    session = {"session_id": "s", "truncation": {"keep": "system"}}
    request = chat(messages=[system, *CHAT["messages"]], **session)
    (span,) = request.documents
    assert request.num_system > span.end


def test_a_conversation_with_documents_is_tokenized_as_it_is_completed() -> None:
    messages = [{"role": "user", "content": [DOCUMENT, QUESTION]}]
    tokens = post("/tokenize", {"messages": messages}).json()["tokens"]
    assert tuple(tokens) == chat(messages=messages).prompt_token_ids
