"""Servers as their users meet them: `openai` clients against `mneme serve --replicas 2` and `mneme serve --local`."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
import torch
import transformers
from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletionMessageParam

from mneme import LLM, SamplingParams
from mneme.replicas.model.directory import model_directory
from tests.budget import rarer
from tests.e2e.metrics import await_idle, await_metric, read_metrics
from tests.e2e.replica_processes import cpu_seconds, replica_pids
from tests.e2e.server_process import SERVE, ServerProcess, free_port

pytestmark = pytest.mark.e2e

MODEL = "mneme-tiny"
LONG = 1800  # tokens; seconds of work
FREED_LIMIT_S = 180.0
METRICS_AGE_S = 1.0
PROXY_RESTART_LIMIT_S = 180.0
PROMPT = "Once upon a time there was a small library in which every book could remember its reader."


@pytest.fixture(scope="module")
def client(server: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0, _strict_response_validation=True) as client:
        yield client


@pytest.fixture(scope="module")
def each_client(each_server: str) -> Iterator[OpenAI]:
    with OpenAI(
        base_url=f"{each_server}/v1", api_key="none", max_retries=0, _strict_response_validation=True
    ) as client:
        yield client


def ask(text: str) -> list[ChatCompletionMessageParam]:
    return [{"role": "user", "content": text}]


def greedy(client: OpenAI, prompt: str, num: int) -> str:
    answer = client.chat.completions.create(
        model=MODEL, messages=ask(prompt), max_tokens=num, temperature=0, extra_body={"min_tokens": num}
    )
    return answer.choices[0].message.content or ""


def test_streamed_chat(each_client: OpenAI) -> None:
    with each_client.chat.completions.create(
        model=MODEL,
        messages=ask("Hello, who are you?"),
        max_tokens=24,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    ) as stream:
        chunks = list(stream)
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens <= 24
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] in ("stop", "length")


@pytest.mark.parametrize("more", [{}, {"ignore_eos": True, "logit_bias": {"3": 8}}], ids=["ended", "went on"])
def test_second_turn_of_a_session_reuses_all_of_the_first(each_client: OpenAI, more: dict[str, Any]) -> None:
    headers = {"X-Session-ID": f"turns-{time.monotonic_ns()}"}
    messages = ask(PROMPT)
    first = each_client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=32, temperature=0, extra_headers=headers, extra_body=more
    )
    answer = first.choices[0].message.content or ""
    messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "And then?"}]
    second = each_client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=8, temperature=0, extra_headers=headers
    )
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert cached is not None
    assert cached >= first.usage.prompt_tokens + first.usage.completion_tokens - 1


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

    def ask(order: Sequence[str], blend: dict[str, Any], salt: str) -> dict[str, Any]:
        parts = [{"type": "document", "text": text} for text in order]
        body = {"model": MODEL, "messages": [{"role": "user", "content": [*parts, question]}], "max_tokens": 8}
        body |= {"blend": {"min_tokens": 1, **blend}, "cache_salt": salt, "temperature": 0, "session": {"id": salt}}
        answer = httpx.post(f"{each_server}/v1/chat/completions", json=body, timeout=240).raise_for_status()
        usage = answer.json()["usage"]
        return {"prompt": usage["prompt_tokens"], **usage["kv_details"]}

    exact = [ask(order, {"mode": "off", "order": "any"}, "exact") for order in (texts, texts[::-1])]
    assert exact[1]["device"] >= 0.8 * exact[1]["prompt"]
    assert not exact[1]["blend"].get("reused")
    blended = [ask(order, {"mode": "selective"}, "blended") for order in (texts, texts[::-1])]
    assert blended[1]["blend"]["reused"] > blended[1]["blend"]["recomputed"] > 0


def test_equal_requests_over_documents_find_as_much_as_without_reuse(each_server: str) -> None:
    cached: dict[str, list[int]] = {}
    for mode in ("auto", "off"):
        parts = [{"type": "document", "text": f"A {what} stood on the hill. " * 20} for what in ("tree", "dog")]
        content = [*parts, {"type": "text", "text": "What stood on the hill?"}]
        body = {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 4, "temperature": 0}
        body |= {"blend": {"mode": mode}, "cache_salt": mode}
        for _ in range(4):
            answer = httpx.post(f"{each_server}/v1/chat/completions", json=body, timeout=240).raise_for_status()
            usage = answer.json()["usage"]
            cached.setdefault(mode, []).append(usage["prompt_tokens_details"]["cached_tokens"])
    assert cached["auto"][2:] == cached["off"][2:] == [usage["prompt_tokens"] - 1] * 2


def test_a_history_that_is_sent_again_under_a_hint_finds_its_kv(each_client: OpenAI) -> None:
    messages, hint = ask(f"{PROMPT} {time.monotonic_ns()}"), {"prompt_cache_key": f"hint-{time.monotonic_ns()}"}
    known = 0
    for question in ("And then?", "And after that?", "And in the end?"):
        answer = each_client.chat.completions.create(
            model=MODEL, messages=messages, max_tokens=32, temperature=0, extra_body=hint
        )
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        assert (answer.usage.prompt_tokens_details.cached_tokens or 0) >= known - 1
        known = answer.usage.prompt_tokens
        messages += [
            {"role": "assistant", "content": answer.choices[0].message.content or ""},
            {"role": "user", "content": question},
        ]


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


def test_one_prompt_that_many_ask_at_once_is_computed_once_by_a_replica_at_most(client: OpenAI) -> None:
    """Before any answer: whoever comes later goes to the replica that computes it, and waits there, or has its own."""
    prompt = "".join(f"{number}. {PROMPT} " for number in range(40, 70))
    begun = threading.Barrier(8)

    def complete(_: int) -> tuple[int, int]:
        begun.wait(60)
        usage = client.completions.create(model=MODEL, prompt=prompt, max_tokens=1, temperature=0).usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        return usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens or 0

    with ThreadPoolExecutor(8) as pool:
        usages = list(pool.map(complete, range(8)))
    num_tokens = usages[0][0]
    assert num_tokens > 600
    assert sum(total - cached for total, cached in usages) < 2.2 * num_tokens, usages


def test_sixteen_streams_at_once_use_both_replicas(server: str, server_process: ServerProcess) -> None:
    finished = 'mneme_finished_requests_total{reason="length"}'
    time.sleep(METRICS_AGE_S)  # an older page would not count what ended just now
    before, busy_before = await_idle(server), cpu_seconds(server_process)
    assert all(num_chunks > 1 for num_chunks in sixteen_streams(server))
    await_metric(server, finished, before[finished] + 16)
    busy_after = cpu_seconds(server_process)
    assert len(busy_after) == 2
    assert all(busy_after[pid] - busy_before[pid] > 0.1 for pid in busy_after)


def test_a_client_that_leaves_frees_its_request(each_server: str) -> None:
    leave_at_first_token(each_server, 5)
    metrics = await_idle(each_server)
    pages = {state: metrics[f'mneme_pages{{state="{state}"}}'] for state in ("free", "cached", "in_use", "total")}
    assert pages["free"] + pages["cached"] + pages["in_use"] == pages["total"]


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


def test_long_headers_get_an_answer_of_ours(each_server: str) -> None:
    for num_bytes, status in ((20_000, 200), (40_000, 413)):
        answer = httpx.get(f"{each_server}/v1/models", headers={"x-long": "x" * num_bytes})
        assert answer.status_code == status
        assert ("error" in answer.json()) == (status != 200)


@pytest.mark.slow
def test_half_a_header_does_not_hold_its_connection(each_server: str) -> None:
    with connect(each_server) as connection:
        connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: mne")
        connection.settimeout(15)
        assert b" 408 " in connection.recv(1024)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_connecting_and_leaving_leaks_nothing(server: str, server_process: ServerProcess) -> None:
    num_cycles = 400
    sixteen_streams(server)
    # What is allocated once, the page pool too, is allocated now. On a busy machine engines grow by 60 MiB over the
    # first 5,000 cycles, less each time, and then no more.
    leave_at_first_token(server, num_cycles)
    await_idle(server)
    before = footprint(server_process)
    leave_at_first_token(server, num_cycles)
    await_idle(server)
    after = footprint(server_process)
    for pid, (descriptors, rss_mb) in after.items():
        descriptors_before, rss_before_mb = before[pid]
        assert descriptors <= descriptors_before + 8, server_process.processes()[pid]
        assert rss_mb <= rss_before_mb + 32, server_process.processes()[pid]


@pytest.mark.slow
def test_a_killed_replica_is_a_pause_for_its_streams(
    server: str, server_process: ServerProcess, client: OpenAI
) -> None:
    prompts = [f"{i}. {PROMPT}" for i in range(6)]
    expected = [greedy(client, prompt, 300) for prompt in prompts]

    def pieces(i: int) -> Iterator[str]:
        with client.chat.completions.create(
            model=MODEL,
            messages=ask(prompts[i]),
            max_tokens=300,
            temperature=0,
            stream=True,
            extra_body={"min_tokens": 300},
        ) as chunks:
            for chunk in chunks:
                yield (chunk.choices[0].delta.content or "") if chunk.choices else ""

    assert said_over_a_kill(server, server_process, pieces, len(prompts), kill_at=5) == expected


def said_over_a_kill(
    server: str, server_process: ServerProcess, pieces: Callable[[int], Iterator[str]], count: int, *, kill_at: int
) -> list[str]:
    """What so many streams say, one of whose replicas is killed when each has had `kill_at` pieces."""
    victim = min(cpu_seconds(server_process))
    said = [""] * count
    has_begun = threading.Barrier(count + 1, timeout=240)

    def read(i: int) -> None:
        for n, piece in enumerate(pieces(i)):
            if n == kill_at:
                has_begun.wait()
            said[i] += piece

    threads = [threading.Thread(target=read, args=(i,), daemon=True) for i in range(count)]
    for thread in threads:
        thread.start()
    has_begun.wait()
    os.kill(victim, signal.SIGKILL)
    for thread in threads:
        thread.join(240)
        assert not thread.is_alive()
    await_metric(server, 'mneme_replicas{state="ready"}', 2, limit_s=300)
    return said


@pytest.mark.slow
def test_a_forced_call_goes_on_where_its_killed_replica_left_it(
    server: str, server_process: ServerProcess, client: OpenAI
) -> None:
    """The grammar's state is made anew from the tokens that the client has."""
    await_metric(server, 'mneme_replicas{state="ready"}', 2, limit_s=300)
    note = {"type": "string", "minLength": 300, "maxLength": 400}
    schema = {
        "type": "object",
        "properties": {"note": note, "days": {"type": "integer"}},
        "required": ["note", "days"],
        "additionalProperties": False,
    }
    body: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": 900,
        "temperature": 0,
        "tools": [{"type": "function", "function": {"name": "write", "parameters": schema}}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    }
    prompts = [f"{i}. {PROMPT}" for i in range(6)]
    expected = []
    for prompt in prompts:
        (call,) = client.chat.completions.create(messages=ask(prompt), **body).choices[0].message.tool_calls
        jsonschema.validate(json.loads(call.function.arguments), schema)
        expected.append(call.function.arguments)

    def pieces(i: int) -> Iterator[str]:
        with client.chat.completions.create(messages=ask(prompts[i]), stream=True, **body) as chunks:
            for chunk in chunks:
                calls = (chunk.choices[0].delta.tool_calls or []) if chunk.choices else []
                yield "".join((call.function and call.function.arguments) or "" for call in calls)

    assert said_over_a_kill(server, server_process, pieces, len(prompts), kill_at=20) == expected


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
    body = json.dumps(
        {
            "model": MODEL,
            "messages": ask(PROMPT),
            "max_tokens": LONG,
            "min_tokens": LONG,
            "ignore_eos": True,
            "stream": is_stream,
        }
    ).encode()
    headers = f"Host: mneme\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    connection = connect(server)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(f"POST /v1/chat/completions HTTP/1.1\r\n{headers}\r\n\r\n".encode())
    time.sleep(0.002)
    connection.sendall(body)
    return connection


def leave_at_first_token(server: str, num_cycles: int) -> None:
    with httpx.Client(base_url=server, timeout=240) as client:
        for _ in range(num_cycles):
            body = {
                "model": MODEL,
                "prompt": PROMPT,
                "max_tokens": 1000,
                "stream": True,
                "min_tokens": 1000,
            }
            with client.stream("POST", "/v1/completions", json=body) as response:
                assert response.status_code == 200
                next(response.iter_lines())


def footprint(process: ServerProcess) -> dict[int, tuple[int, float]]:
    """(open descriptors, resident MiB) of each Serve replica's process."""
    result = {}
    for pid in replica_pids(process, "ray::ServeReplica"):
        with open(f"/proc/{pid}/statm", encoding="ascii") as statm:
            rss_mb = int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
        result[pid] = (len(os.listdir(f"/proc/{pid}/fd")), rss_mb)
    return result


def test_an_echo_has_the_log_probabilities_of_its_prompt(each_client: OpenAI) -> None:
    """As evaluations ask; those of a longer prompt begin alike, though the shorter one was computed before."""
    told = []
    for text in (PROMPT, f"{PROMPT} And then"):
        body = {"model": MODEL, "prompt": text, "max_tokens": 0, "logprobs": 1, "echo": True}
        answer = httpx.post(f"{each_client.base_url}completions", json=body, timeout=240).json()
        (choice,) = answer["choices"]
        assert (choice["text"], choice["finish_reason"]) == (text, "length")
        assert answer["usage"]["completion_tokens"] == answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        told.append(choice["logprobs"]["token_logprobs"])
        assert len(told[-1]) == answer["usage"]["prompt_tokens"]
    num_common = len(told[0]) - 1  # the last token may be another one in the longer text
    assert told[1][1:num_common] == pytest.approx(told[0][1:num_common], abs=1e-3)


def other_model(directory: Path) -> Path:
    """A random checkpoint that writes as the embedded model does."""
    embedded = model_directory(MODEL)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(embedded / name, directory)
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=json.loads((embedded / "config.json").read_bytes())["vocab_size"],
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=512,
        initializer_range=0.15,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(directory)
    return directory


@pytest.mark.slow
def test_two_models_share_a_server_and_nothing_else(tmp_path: Path) -> None:
    """Both answer as they do alone; a session of one name is another with each, in the logs that they share too."""
    other = other_model(tmp_path)
    engine = {"dtype": "float32", "kv_cache_bytes": 4 * 2**20}
    models = [{"model": str(other), "served_name": "other", "replicas": 1, "engine": engine}]
    disk = {"folder": str(tmp_path / "kv"), "capacity_bytes": 2**28}
    settings = {"engine": engine, "models": models, "cache.disk": disk}
    arguments = [part for key, value in settings.items() for part in ("--set", f"{key}={json.dumps(value)}")]
    process = ServerProcess([*SERVE, MODEL, "--replicas", "1", "--port", str(free_port()), *arguments])
    try:
        url = process.await_ready()
        with OpenAI(base_url=f"{url}/v1", api_key="none") as client, httpx.Client(base_url=url) as http:
            assert [model.id for model in client.models.list()] == [MODEL, "other"]
            texts = {}
            for name, path in ((MODEL, MODEL), ("other", str(other))):
                with LLM(path, dtype="float32") as alone:
                    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
                    (reference,) = alone.generate(PROMPT, params)
                answer = client.completions.create(
                    model=name,
                    prompt=PROMPT,
                    max_tokens=24,
                    temperature=0,
                    extra_body={"ignore_eos": True, "session_id": "s"},
                )
                texts[name] = answer.choices[0].text
                assert texts[name] == reference.outputs[0].text
                num_prompt = answer.usage.prompt_tokens if answer.usage else 0
                more = client.completions.create(
                    model=name,
                    prompt=" And then",
                    max_tokens=4,
                    extra_body={"session": {"id": "s", "append": True}},
                )
                details = more.usage.prompt_tokens_details if more.usage else None
                assert details is not None
                assert details.cached_tokens == num_prompt + 23
            assert texts[MODEL] != texts["other"]
            replicas = {http.get(f"/v1/sessions/s?model={name}").json()["replica"] for name in texts}
            assert len(replicas) == 2
            assert http.get("/ready").json() == {"ready": True, "replicas": 2, "state": "ready"}
        process.stop()
        assert process.left_behind() == []
    finally:
        process.discard()
