"""Streams over a real server: their form as OpenAI's client sees it, and what happens when clients leave."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from mneme.cluster.http import stream
from mneme.errors import Overloaded
from tests.cluster.api_fixtures import CHAT, Server, serving
from tests.cluster.fake_engine_client import SENTENCE

MESSAGES: Any = CHAT["messages"]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with _openai(server) as running:
        yield running


def _openai(server: Server, *, max_retries: int = 0) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="any", max_retries=max_retries, _strict_response_validation=True
    )


def events(server: Server, **changes: Any) -> list[Any]:
    """The payloads of a whole stream, as they are on the wire."""
    response = httpx.post(f"{server.url}/v1/chat/completions", json={**CHAT, "stream": True, **changes}, timeout=60)
    assert response.headers["content-type"].startswith("text/event-stream")
    *parts, rest = response.text.split("\n\n")
    assert rest == ""
    assert all(part.startswith("data: ") for part in parts)
    return [part[6:] if part == "data: [DONE]" else json.loads(part[6:]) for part in parts]


def test_a_streamed_chat(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    *told, last = chunks
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    assert [chunk.choices[0].delta.role for chunk in told] == ["assistant"] + [None] * (len(told) - 1)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in told) == SENTENCE
    assert [chunk.choices[0].finish_reason for chunk in told] == [None] * (len(told) - 1) + ["stop"]
    assert all(chunk.usage is None for chunk in told)
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.prompt_tokens_details is not None
    assert isinstance(last.usage.prompt_tokens_details.cached_tokens, int)
    assert not any("\ufffd" in (chunk.choices[0].delta.content or "") for chunk in told)


def test_choices_are_interleaved_by_index(client: openai.OpenAI) -> None:
    text = {0: "", 1: "", 2: ""}
    order = []
    for chunk in client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True, n=3):
        choice = chunk.choices[0]
        text[choice.index] += choice.delta.content or ""
        order.append(choice.index)
    assert set(text.values()) == {SENTENCE}
    assert list(dict.fromkeys(order)) == [0, 1, 2]


def test_whole_answers_pass_strict_validation(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(model="tiny", messages=MESSAGES, n=2, logprobs=True, top_logprobs=3)
    assert [choice.message.content for choice in chat.choices] == [SENTENCE] * 2
    completion = client.completions.create(model="tiny", prompt=["a", "b"], max_tokens=100, logprobs=2, echo=False)
    assert [choice.text for choice in completion.choices] == [SENTENCE] * 2
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "mneme"


def test_streamed_logprobs_cover_every_token(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True, logprobs=True, top_logprobs=1)
    told = b""
    for chunk in stream:
        logprobs = chunk.choices[0].logprobs
        told += b"".join(bytes(entry.bytes or []) for entry in (logprobs and logprobs.content) or [])
    assert told.decode() == SENTENCE


def test_an_answer_without_text_still_has_a_role(server: Server) -> None:
    chunks = events(server, stop=SENTENCE[:2])[:-1]
    told = [chunk["choices"][0] for chunk in chunks]
    assert [choice["delta"] for choice in told] == [{"role": "assistant", "content": ""}, {"content": ""}]
    assert [choice["finish_reason"] for choice in told] == [None, "stop"]


def test_a_failure_in_mid_stream_is_an_error_not_an_end() -> None:
    with serving(fail_after=5) as server, _openai(server) as client:
        stream = client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
        with pytest.raises(openai.APIError, match="failed on purpose"):
            list(stream)
        last = events(server)[-1]
        assert last["error"]["type"] == "server_error"
        server.wait_idle()


def test_only_what_may_go_well_later_is_tried_again() -> None:
    with serving(refusal=Overloaded("full", retry_after_s=0.1)) as server, _openai(server, max_retries=1) as client:
        with pytest.raises(openai.RateLimitError):
            client.chat.completions.create(model="tiny", messages=MESSAGES)
        assert len(server.engine.requests) == 2
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(model="tiny", messages=MESSAGES, n=0)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("num_steps", [0, 5])
def test_a_client_that_leaves_frees_its_request(stream: bool, num_steps: int) -> None:
    with serving(gate=asyncio.Semaphore(0), is_endless=True) as server:
        with _request(server, {**CHAT, "stream": stream, "n": 2}) as connection:
            server.wait_busy()
            server.allow_steps(num_steps)
            if stream and num_steps:
                assert connection.recv(100).startswith(b"HTTP/1.1 200")
        server.wait_idle()
        assert server.engine.num_aborted == 2
        assert server.call(lambda: len(server.engine.running)) == 0


def test_many_clients_that_leave_leave_nothing_behind() -> None:
    with serving(gate=asyncio.Semaphore(0), is_endless=True) as server:
        num_before = server.call(lambda: len(asyncio.all_tasks()))
        for _ in range(20):
            with _request(server, {**CHAT, "stream": True}):
                server.wait_busy()
            server.wait_idle()
        assert server.engine.num_aborted == 20
        _eventually(lambda: server.call(lambda: len(asyncio.all_tasks())) <= num_before)


def test_a_client_that_never_reads_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "CLIENT_STALL_S", 0.2)
    with serving(is_endless=True, max_context=10**6) as server:
        body = {**CHAT, "stream": True, "logprobs": True, "top_logprobs": 20, "max_tokens": 500_000}
        with _request(server, body, receive_buffer=4096):
            server.wait_busy()
            server.wait_idle()
        assert server.engine.num_aborted == 1


def _request(server: Server, body: dict[str, Any], *, receive_buffer: int | None = None) -> socket.socket:
    connection = socket.socket()
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.settimeout(30)
    connection.connect(("127.0.0.1", server.port))
    payload = json.dumps(body).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(payload)}\r\n\r\n".encode() + payload)
    return connection


def _eventually(condition: Any) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
