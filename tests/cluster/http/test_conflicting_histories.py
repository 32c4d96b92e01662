"""Clients whose history is not what their session holds: their own text runs, as far as possible from stored ids."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from tests.cluster.api_fixtures import CHAT, TOKENIZER, api_client, serving
from tests.cluster.fake_engine_client import SENTENCE, FakeEngineClient

Messages = list[dict[str, str]]
QUESTIONS = ["the fox", "a dog", "the quick brown fox"]
ONE, TWO = "key-one-1234567890", "key-two-1234567890"


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


async def chat(client: httpx.AsyncClient, messages: Messages, **more: Any) -> str:
    response = await client.post("/v1/chat/completions", json={**CHAT, "messages": messages, **more})
    assert response.status_code == 200, response.text
    said: str = response.json()["choices"][0]["message"]["content"]
    return said


async def conversation(client: httpx.AsyncClient, name: str) -> Messages:
    messages: Messages = []
    for question in QUESTIONS:
        messages.append(user(question))
        messages.append(assistant(await chat(client, messages, session_id=name)))
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
def test_what_the_client_sends_is_what_runs_and_what_is_kept(case: str) -> None:
    async def main() -> None:
        engine = FakeEngineClient(TOKENIZER)
        async with api_client(engine) as client:
            said = await conversation(client, "s")
            sent = [*edits(said)[case], user("and now?")]
            await chat(client, sent, session_id="s")
            assert stored(engine, "s") == TOKENIZER.render_chat(sent) + SENTENCE
            # ... and the client that still has the old history is as welcome
            again = [*said, user("and then?")]
            await chat(client, again, session_id="s")
            assert stored(engine, "s") == TOKENIZER.render_chat(again) + SENTENCE

    asyncio.run(main())


def test_a_deleted_session_leaves_nothing_to_a_client_that_goes_on() -> None:
    async def main() -> None:
        engine = FakeEngineClient(TOKENIZER)
        async with api_client(engine) as client:
            said = await conversation(client, "s")
            assert (await client.delete("/v1/sessions/s")).status_code == 200
            appended = {"session": {"id": "s", "append": True}}
            response = await client.post("/v1/chat/completions", json={**CHAT, **appended})
            assert (response.status_code, response.json()["error"]["code"]) == (404, "session_not_found")
            sent = [*said[:2], user("and now?")]
            await chat(client, sent, session_id="s")
            assert stored(engine, "s") == TOKENIZER.render_chat(sent) + SENTENCE
            assert (await client.get("/v1/sessions/s")).json()["turns"] == 1

    asyncio.run(main())


def test_the_same_name_under_another_key_is_another_conversation() -> None:
    async def main() -> None:
        engine = FakeEngineClient(TOKENIZER)
        async with api_client(engine, api_keys=[ONE, TWO]) as client:
            client.headers["authorization"] = f"Bearer {ONE}"
            said = await conversation(client, "s")
            client.headers["authorization"] = f"Bearer {TWO}"
            await chat(client, [*said, user("and now?")], session_id="s")
            assert (await client.get("/v1/sessions/s")).json()["turns"] == 1
            assert (await client.delete("/v1/sessions/s")).status_code == 200
            client.headers["authorization"] = f"Bearer {ONE}"
            assert (await client.get("/v1/sessions/s")).json()["turns"] == len(QUESTIONS)

    asyncio.run(main())


def test_a_session_deleted_while_it_streams_may_begin_anew() -> None:
    """The answer streams to its end; what comes after it has no history, and what was said is not kept."""
    with serving(gate=asyncio.Semaphore(0)) as server, httpx.Client(base_url=server.url, timeout=30) as http:
        body = {**CHAT, "stream": True, "session_id": "s"}
        server.allow_steps(3)
        with http.stream("POST", "/v1/chat/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            assert httpx.delete(f"{server.url}/v1/sessions/s").status_code == 200
            assert httpx.delete(f"{server.url}/v1/sessions/s").status_code == 404
            assert httpx.post(f"{server.url}/v1/sessions/s/fork", json={}).status_code == 404
            server.allow_steps(500)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        server.wait_idle()
        appended = {"session": {"id": "s", "append": True}}
        assert httpx.post(f"{server.url}/v1/chat/completions", json={**CHAT, **appended}).status_code == 404
        assert httpx.post(f"{server.url}/v1/chat/completions", json={**CHAT, "session_id": "s"}).status_code == 200
        assert httpx.get(f"{server.url}/v1/sessions/s").json()["turns"] == 1
