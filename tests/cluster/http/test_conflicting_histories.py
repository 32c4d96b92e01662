"""Clients whose history is not what their session holds: their own text runs, as far as possible from stored ids."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.cluster.api_fixtures import CHAT, TOKENIZER
from tests.cluster.fake_engine_client import SENTENCE, FakeEngineClient

Messages = list[dict[str, str]]
QUESTIONS = ["the fox", "a dog", "the quick brown fox"]


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def chat(client: TestClient, messages: Messages, **more: Any) -> str:
    response = client.post("/v1/chat/completions", json={**CHAT, "messages": messages, **more})
    assert response.status_code == 200, response.text
    said: str = response.json()["choices"][0]["message"]["content"]
    return said


def conversation(client: TestClient, name: str) -> Messages:
    messages: Messages = []
    for question in QUESTIONS:
        messages.append(user(question))
        messages.append(assistant(chat(client, messages, session_id=name)))
    return messages


def stored(engine: FakeEngineClient, name: str) -> str:
    log = engine.sessions.get(("", f"public:{name}"))
    assert log is not None
    return TOKENIZER.decode(log.ids.tolist(), skip_special_tokens=False)


def edits(said: Messages) -> dict[str, Messages]:
    """What a client may send instead of what was said, without its next question."""
    return {
        "as it was": said,
        "the first question edited": [user("another fox"), *said[1:]],
        "the last question edited": [*said[:4], user("another fox"), said[5]],
        "an answer edited": [said[0], assistant("never said"), *said[2:]],
        "an answer stripped": [*said[:5], assistant(SENTENCE[:-9])],
        "a turn left out": [*said[:2], *said[4:]],
        "turns in another order": [*said[4:], *said[:4]],
        "the last turn twice": [*said, *said[4:]],
        "only the beginning": said[:2],
        "none of it": [],
        "another conversation": [user("hello"), assistant("hello")],
        "a system prompt put before": [{"role": "system", "content": "the dog"}, *said],
        "a role changed": [*said[:2], assistant("the end"), *said[3:]],
    }


@pytest.mark.parametrize("case", list(edits([user("")] * 6)))
def test_what_the_client_sends_is_what_runs_and_what_is_kept(
    client: TestClient, engine: FakeEngineClient, case: str
) -> None:
    said = conversation(client, "s")
    sent = [*edits(said)[case], user("and now?")]
    chat(client, sent, session_id="s")
    assert stored(engine, "s") == TOKENIZER.render_chat(sent) + SENTENCE
    # ... and the client that still has the old history is as welcome
    again = [*said, user("and then?")]
    chat(client, again, session_id="s")
    assert stored(engine, "s") == TOKENIZER.render_chat(again) + SENTENCE


def test_a_deleted_session_leaves_nothing_to_a_client_that_goes_on(
    client: TestClient, engine: FakeEngineClient
) -> None:
    said = conversation(client, "s")
    assert client.delete("/v1/sessions/s").status_code == 200
    appended = {"session": {"id": "s", "append": True}}
    response = client.post("/v1/chat/completions", json={**CHAT, **appended})
    assert (response.status_code, response.json()["error"]["code"]) == (404, "session_not_found")
    sent = [*said[:2], user("and now?")]
    chat(client, sent, session_id="s")
    assert stored(engine, "s") == TOKENIZER.render_chat(sent) + SENTENCE
    assert client.get("/v1/sessions/s").json()["turns"] == 1
