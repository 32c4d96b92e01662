from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from mneme.errors import InvalidRequest, Overloaded, ReplicaUnavailable
from tests.cluster.api_fixtures import CHAT, COMPLETION, TOKENIZER, api_client
from tests.cluster.fake_engine_client import SENTENCE, FakeEngineClient
from tests.replicas.tiny_tokenizer import tiny_tokenizer

RENDERED = "<|im_start|>user\nthe fox<|im_end|>\n<|im_start|>assistant\n"


def post(
    path: str, body: Any, *, engine: FakeEngineClient | None = None, headers: Any = None, **config: Any
) -> httpx.Response:
    async def run() -> httpx.Response:
        async with api_client(engine or FakeEngineClient(TOKENIZER), **config) as client:
            return await client.post(path, json=body, headers=headers)

    return asyncio.run(run())


def get(path: str, *, engine: FakeEngineClient | None = None, headers: Any = None, **config: Any) -> httpx.Response:
    async def run() -> httpx.Response:
        async with api_client(engine or FakeEngineClient(TOKENIZER), **config) as client:
            return await client.get(path, headers=headers)

    return asyncio.run(run())


def chat(**changes: Any) -> httpx.Response:
    return post("/v1/chat/completions", {**CHAT, **changes})


def test_a_chat_answer() -> None:
    answer = chat().json()
    assert answer["object"] == "chat.completion"
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": SENTENCE, "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    num_prompt = len(TOKENIZER.encode_rendered(RENDERED))
    num_output = len(TOKENIZER.encode(SENTENCE, add_special_tokens=False))
    assert answer["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_what_the_engine_is_asked_for() -> None:
    engine = FakeEngineClient(TOKENIZER)
    body = {**CHAT, "n": 2, "seed": 5, "max_completion_tokens": 9, "max_tokens": 7, "top_k": 3, "stop": "x"}
    post("/v1/chat/completions", body, engine=engine, headers={"X-Session-ID": "s"})
    first, second = engine.requests
    assert first.prompt_text == RENDERED
    assert first.prompt_token_ids == tuple(TOKENIZER.encode_rendered(RENDERED))
    assert (first.sampling.seed, first.sampling.max_tokens, first.sampling.top_k) == (5, 9, 3)
    assert first.sampling.stop == ("x",)
    assert (first.session_id, second.session_id) == ("public:s", None)
    assert (first.choice_index, second.choice_index) == (0, 1)
    assert first.request_id != second.request_id
    assert first.salt == ""


def test_a_seed_is_drawn_where_none_is_given() -> None:
    engine = FakeEngineClient(TOKENIZER)
    post("/v1/chat/completions", CHAT, engine=engine)
    post("/v1/chat/completions", CHAT, engine=engine)
    seeds = [request.sampling.seed for request in engine.requests]
    assert None not in seeds
    assert seeds[0] != seeds[1]


@pytest.mark.parametrize(
    ("headers", "body", "session"),
    [
        ({}, {}, None),
        ({"X-Session-ID": "h"}, {"session_id": "b", "prompt_cache_key": "c"}, "public:h"),
        ({}, {"session_id": "b", "prompt_cache_key": "c"}, "public:b"),
        ({}, {"prompt_cache_key": "c"}, "public:c"),
        ({"X-Session-ID": "../../etc/passwd"}, {}, "public:../../etc/passwd"),  # a name, never a path
    ],
)
def test_where_the_session_comes_from(headers: Any, body: Any, session: str | None) -> None:
    engine = FakeEngineClient(TOKENIZER)
    post("/v1/chat/completions", {**CHAT, **body}, engine=engine, headers=headers)
    assert engine.requests[0].session_id == session


def test_a_stop_string_ends_the_text_before_it() -> None:
    choice = chat(stop=["STOP"]).json()["choices"][0]
    assert choice["message"]["content"] == SENTENCE.partition("STOP")[0]
    assert choice["finish_reason"] == "stop"


def test_length_is_the_reason_when_tokens_run_out() -> None:
    answer = chat(max_tokens=3).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 3


def test_cached_tokens_are_reported() -> None:
    engine = FakeEngineClient(TOKENIZER)
    first = post("/v1/chat/completions", CHAT, engine=engine).json()["usage"]
    again = post("/v1/chat/completions", CHAT, engine=engine).json()["usage"]
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert again["prompt_tokens_details"]["cached_tokens"] == again["prompt_tokens"] - 1


def test_chat_logprobs() -> None:
    content = chat(logprobs=True, top_logprobs=4).json()["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == SENTENCE
    assert [entry["logprob"] for entry in content[0]["top_logprobs"]] == [0.0, -1.0, -2.0, -9999.0]
    plain = chat(logprobs=True).json()["choices"][0]["logprobs"]["content"]
    assert all(entry["top_logprobs"] == [] for entry in plain)


def test_completions_of_several_prompts() -> None:
    body = {**COMPLETION, "prompt": ["the fox", "a dog"], "n": 2, "max_tokens": 4}
    engine = FakeEngineClient(TOKENIZER)
    answer = post("/v1/completions", body, engine=engine).json()
    assert answer["object"] == "text_completion"
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [request.choice_index for request in engine.requests] == [0, 1, 0, 1]
    assert answer["usage"]["completion_tokens"] == 16
    lengths = [len(TOKENIZER.encode(text, add_special_tokens=True)) for text in body["prompt"]]
    assert answer["usage"]["prompt_tokens"] == sum(lengths)


def test_completion_prompts_of_ids_are_taken_as_they_are() -> None:
    engine = FakeEngineClient(TOKENIZER)
    post("/v1/completions", {**COMPLETION, "prompt": [5, 6, 7]}, engine=engine)
    assert engine.requests[0].prompt_token_ids == (5, 6, 7)
    assert engine.requests[0].prompt_text is None


def test_completion_defaults_to_sixteen_tokens_and_echoes() -> None:
    body = {"model": "tiny", "prompt": "the fox", "echo": True}
    answer = post("/v1/completions", body).json()
    assert answer["usage"]["completion_tokens"] == 16
    assert answer["choices"][0]["text"].startswith("the fox" + SENTENCE[:5])


def test_completion_logprobs() -> None:
    logprobs = post("/v1/completions", {**COMPLETION, "logprobs": 2}).json()["choices"][0]["logprobs"]
    assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == len(logprobs["text_offset"])
    assert logprobs["text_offset"][:2] == [0, len(logprobs["tokens"][0])]
    assert all(len(top) <= 3 for top in logprobs["top_logprobs"])


def test_content_parts_become_text_and_developer_is_system() -> None:
    engine = FakeEngineClient(TOKENIZER)
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "c"}, {"role": "user", "content": parts}]
    post("/v1/chat/completions", {**CHAT, "messages": messages}, engine=engine)
    assert (engine.requests[0].prompt_text or "").startswith(
        "<|im_start|>system\nc<|im_end|>\n<|im_start|>user\na\nb<|im_end|>"
    )


@pytest.mark.parametrize(
    "harmless",
    [
        {"user": "u", "store": True, "metadata": {"a": "b"}, "service_tier": "auto", "unheard_of": [1]},
        {"response_format": {"type": "text"}, "tools": [], "tool_choice": "none", "logit_bias": {"5": -1}},
        {"tools": [{"type": "function"}], "tool_choice": "none", "suffix": "", "modalities": ["text"]},
        {"stop": [], "n": None, "temperature": 0, "seed": 2**64 - 1, "max_tokens": None},
    ],
)
def test_harmless_fields_are_accepted(harmless: dict[str, Any]) -> None:
    assert chat(**harmless).status_code == 200


def test_models() -> None:
    listed = get("/v1/models").json()
    assert [model["id"] for model in listed["data"]] == ["tiny"]
    assert get("/v1/models/tiny").json() == listed["data"][0]
    assert get("/v1/models/other").json()["error"]["code"] == "model_not_found"


def test_tokenize_and_back() -> None:
    answer = post("/tokenize", {"prompt": "the fox", "return_token_strs": True}).json()
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == 1024
    text = post("/detokenize", {"model": "tiny", "tokens": answer["tokens"]}).json()["prompt"]
    assert text == "<|bos|>the fox"
    chat_ids = post("/tokenize", {"messages": CHAT["messages"]}).json()["tokens"]
    assert chat_ids == TOKENIZER.encode_rendered(RENDERED)


def test_probes_and_metrics() -> None:
    engine = FakeEngineClient(TOKENIZER)
    assert get("/health").status_code == 200
    assert get("/ready", engine=engine).status_code == 200
    engine.ready = False
    unready = get("/ready", engine=engine)
    assert (unready.status_code, unready.headers["retry-after"]) == (503, "1")
    page = get("/metrics", engine=engine)
    assert page.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = page.text.splitlines()
    for line in (
        'mneme_pages{state="free"} 2000',
        'mneme_pages{state="in_use"} 0',
        'mneme_requests{state="running"} 0',
        "mneme_prompt_tokens_total 20",
        'mneme_finished_requests_total{reason="length"} 4',
        "mneme_shared_segments 10",
        'mneme_resident_memory_bytes{replica="a"} 1048576',
        "# TYPE mneme_time_to_first_token_seconds histogram",
        "# TYPE mneme_generated_tokens_total counter",
    ):
        assert line in lines


def test_every_sample_has_a_type_and_only_counters_are_totals() -> None:
    async def run() -> str:
        async with api_client(FakeEngineClient(TOKENIZER)) as client:
            await client.post("/v1/chat/completions", json={**CHAT, "n": 2})
            return (await client.get("/metrics")).text

    types = {}
    for line in asyncio.run(run()).splitlines():
        if line.startswith("# TYPE "):
            name, kind = line.split()[2:]
            types[name] = kind
            assert (kind == "counter") == name.endswith("_total")
        elif not line.startswith("#"):
            name = line.partition("{")[0].partition(" ")[0]
            base = name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count")
            assert name in types or types[base] == "histogram"
            float(line.rpartition(" ")[2])
    assert "mneme_time_to_first_token_seconds" in types


KEYS = {"api_keys": ("secret-a", "secret-b")}


@pytest.mark.parametrize("authorization", [None, "Bearer wrong", "Bearer ", "Basic secret-a", "secret-a"])
def test_without_a_key_nothing_is_read(authorization: str | None) -> None:
    headers = {"Authorization": authorization} if authorization else {}
    response = post("/v1/chat/completions", "not even an object", headers=headers, **KEYS)
    assert response.status_code == 401
    assert response.json()["error"]["code"] == "invalid_api_key"
    assert get("/health", headers=headers, **KEYS).status_code == 200


def test_tenants_are_apart() -> None:
    engine = FakeEngineClient(TOKENIZER)
    for key in ("secret-a", "secret-b"):
        for salt in (None, "x"):
            headers = {"Authorization": f"Bearer {key}"}
            body = {**CHAT, "session_id": "s", "cache_salt": salt}
            assert post("/v1/chat/completions", body, engine=engine, headers=headers, **KEYS).status_code == 200
    assert len({request.salt for request in engine.requests}) == 4
    assert len({request.session_id for request in engine.requests}) == 2
    assert not any("secret" in f"{request.salt}{request.session_id}" for request in engine.requests)


@pytest.mark.parametrize(
    ("refusal", "status", "headers"),
    [
        (Overloaded("queues are full", retry_after_s=1.2), 429, {"retry-after": "2"}),
        (ReplicaUnavailable("no replica"), 503, {"retry-after": "1"}),
        (InvalidRequest("max_tokens", 9, "too many"), 400, {"x-should-retry": "false"}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_refusals_at_admission_have_their_status(refusal: Any, status: int, headers: Any, stream: bool) -> None:
    engine = FakeEngineClient(TOKENIZER, refusal=refusal)
    response = post("/v1/chat/completions", {**CHAT, "stream": stream}, engine=engine)
    assert response.status_code == status
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert headers.items() <= dict(response.headers).items()


def test_a_failing_engine_is_a_server_error() -> None:
    response = post("/v1/chat/completions", CHAT, engine=FakeEngineClient(TOKENIZER, fail_after=3))
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "the engine failed on purpose"
    response = post("/v1/chat/completions", CHAT, engine=FakeEngineClient(TOKENIZER, end_after=3))
    assert response.status_code == 503


def test_an_unexpected_exception_is_a_server_error_without_details(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(FakeEngineClient):
        async def stats(self) -> Any:
            raise ZeroDivisionError("a secret")

    response = get("/metrics", engine=Broken(TOKENIZER))
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "internal error"
    assert "ZeroDivisionError" in caplog.text


def test_every_answer_has_a_request_id() -> None:
    responses = [chat(), chat(n=0), get("/nowhere"), get("/health")]
    assert len({response.headers["x-request-id"] for response in responses}) == 4


def test_the_id_that_a_proxy_gave_is_left_to_the_proxy() -> None:
    engine = FakeEngineClient(TOKENIZER)
    for _ in range(2):
        response = post("/v1/chat/completions", CHAT, engine=engine, headers={"X-Request-ID": "twice"})
        assert "x-request-id" not in response.headers
    assert len({request.request_id for request in engine.requests}) == 2


def test_long_headers_are_refused_before_the_body_is_read() -> None:
    response = post("/v1/chat/completions", CHAT, headers={"X-Padding": "x" * 40_000})
    assert (response.status_code, response.json()["error"]["param"]) == (413, "headers")


def test_prompts_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", "mneme")
    chat(messages=[{"role": "user", "content": "xyzzy"}])
    chat(messages=[{"role": "user", "content": "xyzzy"}], n=0)
    chat(messages=[{"role": "user", "content": ["xyzzy"]}])
    assert "xyzzy" not in caplog.text


def test_a_template_that_never_ends_is_one_refused_request() -> None:
    template = (
        "{% if messages[0].content == 'hang' %}{% for a in range(99999) %}{% for b in range(99999) %}"
        "{% endfor %}{% endfor %}{% endif %}{{ messages[0].content }}"
    )
    tokenizer = tiny_tokenizer(template, max_render_s=0.5)

    async def run() -> list[httpx.Response]:
        async with api_client(FakeEngineClient(tokenizer)) as client:
            bodies = [{**CHAT, "messages": [{"role": "user", "content": c}]} for c in ("hang", "a", "hang", "b")]
            calls = [client.post("/v1/chat/completions", json=body) for body in bodies]
            return await asyncio.gather(*calls)

    responses = asyncio.run(run())
    tokenizer.close()
    assert [response.status_code for response in responses] == [400, 200, 400, 200]
    assert responses[0].json()["error"]["param"] == "messages"


def test_bodies_that_are_being_read_share_a_budget() -> None:
    async def run() -> list[int]:
        release = asyncio.Event()

        async def slow() -> Any:
            yield b" " * 900
            await release.wait()
            yield b"{}"

        async with api_client(FakeEngineClient(TOKENIZER), max_body_bytes=1024, max_held_body_bytes=1024) as client:
            headers = {"content-type": "application/json"}
            first = asyncio.ensure_future(client.post("/tokenize", content=slow(), headers=headers))
            statuses = []
            while 429 not in statuses:  # until the slow body has begun to arrive
                await asyncio.sleep(0)
                statuses.append((await client.post("/tokenize", json={"prompt": "x" * 500})).status_code)
            release.set()
            await first
            statuses.append((await client.post("/tokenize", json={"prompt": "x" * 500})).status_code)
            return statuses

    statuses = asyncio.run(run())
    assert statuses[-2:] == [429, 200]
