"""Servers as their users meet them: `openai` clients against `mneme serve --replicas 2` and `mneme serve --local`."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletionMessageParam

from mneme import LLM, SamplingParams
from tests.budget import rarer
from tests.e2e.agents.test_coding_agents import SHAPE, write_chat_llama
from tests.e2e.conftest import WARM_SYSTEM
from tests.e2e.metrics import await_idle, await_metric, read_metrics
from tests.e2e.replica_processes import cpu_seconds
from tests.e2e.server_process import SERVE, ServerProcess, free_port, serving

pytestmark = pytest.mark.e2e

MODEL = "mneme-tiny"
LONG = 1800  # tokens; seconds of work
FREED_LIMIT_S = 180.0
METRICS_AGE_S = 1.0
PROXY_RESTART_LIMIT_S = 180.0
PROMPT = "Once upon a time there was a small library in which every book could remember its reader."


@pytest.fixture(scope="module")
def each_client(each_server: str) -> Iterator[OpenAI]:
    with OpenAI(
        base_url=f"{each_server}/v1", api_key="none", max_retries=0, _strict_response_validation=True
    ) as client:
        yield client


def ask(text: str) -> list[ChatCompletionMessageParam]:
    return [{"role": "user", "content": text}]


def chat(server: str, messages: Any, **options: Any) -> dict[str, Any]:
    body = {"model": MODEL, "messages": messages, "temperature": 0, **options}
    answer: dict[str, Any] = (
        httpx.post(f"{server}/v1/chat/completions", json=body, timeout=240).raise_for_status().json()
    )
    return answer


def num_cached(answer: dict[str, Any]) -> int:
    cached: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


@pytest.mark.parametrize("more", [{}, {"ignore_eos": True, "logit_bias": {"3": 8}}], ids=["ended", "went on"])
def test_second_turn_of_a_session_reuses_all_of_the_first(each_server: str, more: dict[str, Any]) -> None:
    session = {"session_id": f"turns-{time.monotonic_ns()}"}
    first = chat(each_server, ask(PROMPT), max_tokens=32, **session, **more)
    said = {"role": "assistant", "content": first["choices"][0]["message"]["content"]}
    second = chat(each_server, [*ask(PROMPT), said, *ask("And then?")], max_tokens=8, **session)
    assert num_cached(second) >= first["usage"]["total_tokens"] - 1


def test_warm_prompts_are_cached_on_every_replica_configured_ones_when_it_is_ready(each_server: str) -> None:
    """The server of these tests is configured with one."""
    with httpx.Client(base_url=each_server, timeout=240) as http:
        (configured,) = [each for each in http.get("/v1/kv/pins").json()["data"] if each["configured"]]
        system = f"Number {time.monotonic_ns()}. You answer questions about a library in which books remember. " * 4
        body = {"model": MODEL, "messages": [{"role": "system", "content": system}]}
        warmed = http.post("/v1/kv/warm", json=body).raise_for_status().json()
        for text, pin in ((WARM_SYSTEM, configured), (system, warmed)):
            assert len(pin["replicas"]) == http.get("/ready").json()["replicas"]
            for index in range(6):  # whichever replica answers
                answer = chat(each_server, [{"role": "system", "content": text}, *ask(f"{index}. Who?")], max_tokens=2)
                assert pin["num_tokens"] <= num_cached(answer) < answer["usage"]["prompt_tokens"]
        assert http.delete(f"/v1/kv/pins/{warmed['id']}").status_code == 200
        refused = http.delete(f"/v1/kv/pins/{configured['id']}")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "pin_id")


def test_embeddings_are_the_same_whoever_computes_them(each_client: OpenAI) -> None:
    """Texts of one request run beside each other."""
    texts, mean = [PROMPT, "A fox.", PROMPT], {"pooling": "mean"}
    several = each_client.embeddings.create(model=MODEL, input=texts, encoding_format="float", extra_body=mean)
    assert several.data[0].embedding == pytest.approx(several.data[2].embedding, abs=1e-4)
    assert sum(value**2 for value in several.data[1].embedding) == pytest.approx(1, abs=1e-4)
    (again,) = each_client.embeddings.create(model=MODEL, input="A fox.", encoding_format="float", extra_body=mean).data
    assert again.embedding == pytest.approx(several.data[1].embedding, abs=1e-4)
    assert several.usage.prompt_tokens == several.usage.total_tokens > len(texts)


def test_documents_in_another_order_are_found_or_reused_in_place(each_server: str) -> None:
    """Exactly, where their order is free; else their KV behind other text, of which some tokens are computed anew."""
    texts = [f"{what} stood on the hill, and nobody knew why it was there. " * 12 for what in ("A tree", "A dog")]
    question = {"type": "text", "text": "What stood on the hill?"}

    def asked(order: Sequence[str], blend: dict[str, Any], salt: str) -> dict[str, Any]:
        parts = [*({"type": "document", "text": text} for text in order), question]
        more = {"blend": {"min_tokens": 1, **blend}, "cache_salt": salt, "session": {"id": salt}}
        usage = chat(each_server, [{"role": "user", "content": parts}], max_tokens=8, **more)["usage"]
        return {"prompt": usage["prompt_tokens"], **usage["kv_details"]}

    exact = [asked(order, {"mode": "off", "order": "any"}, "exact") for order in (texts, texts[::-1])]
    assert exact[1]["device"] >= 0.8 * exact[1]["prompt"]
    assert not exact[1]["blend"].get("reused")
    blended = [asked(order, {"mode": "selective"}, "blended") for order in (texts, texts[::-1])]
    assert blended[1]["blend"]["reused"] > blended[1]["blend"]["recomputed"] > 0


def sixteen_streams(server: str) -> list[int]:
    """The number of chunks of each."""

    async def one(client: AsyncOpenAI, i: int) -> int:
        stream = await client.chat.completions.create(
            model=MODEL, messages=ask(f"{i}: {PROMPT}"), max_tokens=48, stream=True, extra_body={"min_tokens": 48}
        )
        num_chunks = 0
        async for chunk in stream:
            num_chunks += bool(chunk.choices and chunk.choices[0].delta.content)
        return num_chunks

    async def all_of_them() -> list[int]:
        async with AsyncOpenAI(base_url=f"{server}/v1", api_key="none", _strict_response_validation=True) as client:
            return await asyncio.gather(*(one(client, i) for i in range(16)))

    return asyncio.run(all_of_them())


def test_sixteen_streams_at_once_use_both_replicas(server: str, server_process: ServerProcess) -> None:
    finished = 'mneme_finished_requests_total{reason="length"}'
    time.sleep(METRICS_AGE_S)  # an older page would not count what ended just now
    before, busy_before = await_idle(server), cpu_seconds(server_process)
    assert all(num_chunks > 1 for num_chunks in sixteen_streams(server))
    await_metric(server, finished, before[finished] + 16)
    busy_after = cpu_seconds(server_process)
    assert len(busy_after) == 2
    assert all(busy_after[pid] - busy_before[pid] > 0.1 for pid in busy_after)


@pytest.mark.parametrize("stays_s", [0.02, *rarer([0.0, 0.1])])
@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
def test_a_client_that_leaves_before_its_answer_frees_its_request(
    each_server: str, is_stream: bool, stays_s: float
) -> None:
    finished = 'mneme_finished_requests_total{reason="length"}'
    time.sleep(METRICS_AGE_S)  # an older page would not count what ended just now
    before = await_idle(each_server)[finished]
    for _ in range(4):  # one after the other: while a second connects, which can take seconds, a first could end
        with send_in_two_pieces(each_server, is_stream):
            time.sleep(stays_s)
    deadline = time.monotonic() + FREED_LIMIT_S
    time.sleep(METRICS_AGE_S)  # an older page would show what was before
    metrics = read_metrics(each_server)
    while metrics.busy:
        assert time.monotonic() < deadline, metrics
        metrics = read_metrics(each_server)
    assert metrics[finished] == before


@pytest.mark.slow
def test_half_a_header_does_not_hold_its_connection(each_server: str) -> None:
    with connect(each_server) as connection:
        connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: mne")
        connection.settimeout(15)
        assert b" 408 " in connection.recv(1024)


def test_a_killed_proxy_comes_back(server: str, server_process: ServerProcess) -> None:
    (victim,) = [pid for pid, command in server_process.processes().items() if "/haproxy -db" in command]
    os.kill(victim, signal.SIGKILL)
    deadline = time.monotonic() + PROXY_RESTART_LIMIT_S
    while not is_healthy(server):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def is_healthy(server: str) -> bool:
    try:
        return httpx.get(f"{server}/health", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def connect(server: str) -> socket.socket:
    url = httpx.URL(server)
    return socket.create_connection((url.host, url.port or 80))


def send_in_two_pieces(server: str, is_stream: bool) -> socket.socket:
    """A long request as HTTP clients send it: the headers, and in a packet of its own the body."""
    asked = {"model": MODEL, "messages": ask(PROMPT), "max_tokens": LONG, "min_tokens": LONG, "ignore_eos": True}
    body = json.dumps({**asked, "stream": is_stream}).encode()
    headers = f"Host: mneme\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    connection = connect(server)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(f"POST /v1/chat/completions HTTP/1.1\r\n{headers}\r\n\r\n".encode())
    time.sleep(0.002)
    connection.sendall(body)
    return connection


@pytest.mark.slow
def test_two_models_share_a_server_and_nothing_else(tmp_path: Path) -> None:
    """Both answer as they do alone; a session of one name is another with each, in the logs that they share too."""
    other = write_chat_llama(tmp_path / "other", **SHAPE)
    engine = {"dtype": "float32", "kv_cache_bytes": 4 * 2**20}
    models = [{"model": str(other), "served_name": "other", "replicas": 1, "engine": engine}]
    disk = {"folder": str(tmp_path / "kv"), "capacity_bytes": 2**28}
    settings = {"engine": engine, "models": models, "cache.disk": disk}
    arguments = [part for key, value in settings.items() for part in ("--set", f"{key}={json.dumps(value)}")]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    with (
        serving(*SERVE, MODEL, "--replicas", "1", "--port", str(free_port()), *arguments) as process,
        httpx.Client(base_url=process.await_ready(), timeout=240) as http,
    ):
        texts = {}
        for name, path in ((MODEL, MODEL), ("other", str(other))):
            with LLM(path, dtype="float32") as alone:
                (reference,) = alone.generate(PROMPT, params)
            body = {"model": name, "temperature": 0, "max_tokens": 24, "ignore_eos": True}
            first = http.post("/v1/completions", json={**body, "prompt": PROMPT, "session_id": "s"}).json()
            texts[name] = first["choices"][0]["text"]
            assert texts[name] == reference.outputs[0].text
            append = {"prompt": " And then", "session": {"id": "s", "append": True}}
            more = http.post("/v1/completions", json={**body, **append}).json()["usage"]
            assert more["prompt_tokens_details"]["cached_tokens"] == first["usage"]["prompt_tokens"] + 23
        assert texts[MODEL] != texts["other"]
        assert len({http.get(f"/v1/sessions/s?model={name}").json()["replica"] for name in texts}) == 2
        assert http.get("/ready").json() == {"ready": True, "replicas": 2, "state": "ready"}
