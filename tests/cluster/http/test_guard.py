"""Keys, tenants, failures, ids, logs, the bounds on what one request may hold, and the corpus of bad requests."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from mneme.cluster.api_keys import ApiKey, sha256_of
from mneme.cluster.config import HttpConfig
from mneme.cluster.http import body as body_module
from mneme.cluster.http import guard as guard_module
from mneme.cluster.http.api import build_api
from mneme.cluster.http.api_state import MAX_COMPILING, Backend
from mneme.cluster.http.body import BodyReader, HeldBody
from mneme.cluster.http.guard import OPEN_PATHS, Guard
from mneme.errors import InvalidRequest, Overloaded, ReplicaUnavailable
from mneme.replicas.request import Grammar
from mneme.replicas.text.grammar import GrammarChecker
from tests.cluster.api_fixtures import CHAT, COMPLETION, MODEL, TOKENIZER, Server, chat, get, keys_file, post, serving
from tests.cluster.bad_request_checks import BadRequestChecker
from tests.cluster.bad_requests import BAD_REQUESTS, RAW_REQUESTS, BadRequest, RawRequest
from tests.cluster.fake_engine_client import FakeEngineClient
from tests.replicas.tiny_tokenizer import tiny_tokenizer

KEYS = {"api_keys": ("secret-a", "secret-b")}
POST = "POST /tokenize HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"


@pytest.fixture(scope="module")
def keyed() -> Iterator[Server]:
    """A server that asks for a key, and waits long for a body."""
    with serving(config=HttpConfig(api_keys=("secret-a",))) as server:
        yield server


def status_of(server: Server, sent: bytes) -> int:
    """The status of the first answer, which does not wait for what is not sent."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=50) as connection:
        connection.sendall(sent)
        return int(connection.recv(65536).split(b" ", 2)[1])


@pytest.mark.parametrize("method", ["POST", "DELETE"])
@pytest.mark.parametrize("path", sorted(OPEN_PATHS))
def test_what_needs_no_key_reads_no_body(keyed: Server, path: str, method: str) -> None:
    assert status_of(keyed, f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n".encode()) == 405


@pytest.mark.parametrize("host", ["x/health?", "x/health#", "x/docs\\", "127.0.0.1:80@x/health?", "/health", ""])
@pytest.mark.parametrize("path", ["/tokenize", "http://x/health?/../tokenize"])
def test_no_host_makes_a_path_open(keyed: Server, host: str, path: str) -> None:
    """Whether a key is needed is the path's matter, not that of a URL made with what the client says its host is."""
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\nContent-Length: 14\r\n\r\n"
    assert status_of(keyed, head.encode() + b'{"prompt":"a"}') in (400, 401, 404, 405)


@pytest.mark.parametrize("twice", [None, "Authorization", "X-API-Key", "Content-Type", "X-Session-ID"])
def test_what_a_proxy_may_have_judged_is_given_once(keyed: Server, twice: str | None) -> None:
    """Of a request that is right but for that."""
    fields = {"Authorization": "Bearer secret-a", "X-API-Key": "secret-a"}
    fields |= {"Content-Type": "application/json", "X-Session-ID": "s", "Content-Length": "14", "Connection": "close"}
    lines = [f"{name}: {value}" for name, value in fields.items() for _ in range(1 + (name == twice))]
    request = "\r\n".join(["POST /tokenize HTTP/1.1", "Host: x", *lines, "", '{"prompt":"a"}'])
    assert status_of(keyed, request.encode()) == (200 if twice is None else 400)


def test_a_session_in_a_header_may_be_any_text() -> None:
    """Headers are Latin-1 to servers; clients send UTF-8, and name the session so in a path, too."""
    with serving() as server:
        headers = {"X-Session-ID": "gr\u00fc\u00df".encode()}
        assert httpx.post(f"{server.url}/v1/chat/completions", json=CHAT, headers=headers).status_code == 200
        assert httpx.get(f"{server.url}/v1/sessions/gr%C3%BC%C3%9F").json()["id"] == "gr\u00fc\u00df"


def test_a_trailer_is_no_key(keyed: Server) -> None:
    for before, behind, status in (("", "secret-a", 401), ("Authorization: Bearer secret-a\r\n", "x", 200)):
        body = f'e\r\n{{"prompt":"a"}}\r\n0\r\nAuthorization: Bearer {behind}\r\n\r\n'
        assert status_of(keyed, f"{POST}{before}Transfer-Encoding: chunked\r\n\r\n{body}".encode()) == status


@pytest.mark.parametrize(("key", "first"), [("secret-a", 100), ("wrong", 401)])
def test_only_who_may_call_is_asked_for_a_body(keyed: Server, key: str, first: int) -> None:
    head = f"{POST}Authorization: Bearer {key}\r\nExpect: 100-continue\r\nContent-Length: 9\r\n\r\n"
    assert status_of(keyed, head.encode()) == first


@pytest.mark.parametrize("authorization", [None, "Bearer wrong"])
def test_without_a_key_nothing_is_read(authorization: str | None) -> None:
    headers = {"Authorization": authorization} if authorization else {}
    response = post("/v1/chat/completions", "not even an object", headers=headers, **KEYS)
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    assert response.json()["error"]["code"] == "invalid_api_key"
    assert get("/health", headers=headers, **KEYS).status_code == 200


def test_tenants_are_apart(engine: FakeEngineClient) -> None:
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


def test_every_answer_has_an_id_but_where_a_proxy_gave_one(engine: FakeEngineClient) -> None:
    responses = [chat(), chat(n=0), get("/nowhere"), get("/health")]
    assert len({response.headers["x-request-id"] for response in responses}) == 4
    for _ in range(2):
        response = post("/v1/chat/completions", CHAT, engine=engine, headers={"X-Request-ID": "twice"})
        assert "x-request-id" not in response.headers
    assert len({request.request_id for request in engine.requests}) == 2


def test_prompts_are_text_or_ids() -> None:
    tensor = post("/v1/completions", {**COMPLETION, "prompt_embeds": "gASVAAAA"})
    assert (tensor.status_code, tensor.json()["error"]["param"]) == (400, "prompt_embeds")
    for kind in ("image_url", "input_audio", "video_url", "file"):
        part = {"type": kind, kind: {"url": "data:image/png;base64,AAAA"}}
        refused = chat(messages=[{"role": "user", "content": [part]}])
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages[0].content[0].type")


def test_each_request_has_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "mneme.requests")
    key = {"keys_file": keys_file(tmp_path, ApiKey(name="team-a", sha256=sha256_of("secret")))}
    headers = {"Authorization": "Bearer secret", "X-Request-ID": "mine", "traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"}
    answered = post("/v1/chat/completions", CHAT, headers=headers, **key)
    post("/v1/chat/completions", {**CHAT, "n": 0}, headers=headers, **key)
    post("/v1/chat/completions", CHAT, **key)
    get("/health", **key)
    first, refused, unknown = (record.request for record in caplog.records)
    usage = answered.json()["usage"]
    assert (first["tenant"], first["given_id"], first["status"], first["outcome"]) == ("team-a", "mine", 200, "stop")
    assert (first["prompt_tokens"], first["completion_tokens"]) == (usage["prompt_tokens"], usage["completion_tokens"])
    assert first["trace_id"] == "ab" * 16
    assert first["kv_details"]["recomputed"] > 0
    assert first["first_token_ms"] <= first["total_ms"]
    assert (refused["tenant"], refused["status"], refused["outcome"]) == ("team-a", 400, "invalid_value")
    assert (unknown["tenant"], unknown["status"], unknown["outcome"]) == (None, 401, "invalid_api_key")


def test_a_request_that_is_cancelled_has_its_line(caplog: pytest.LogCaptureFixture) -> None:
    """As Serve does it where the client is gone."""
    caplog.set_level("INFO", "mneme.requests")
    told: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        scope["state"]["shown"] = {"completion_tokens": 3}
        await asyncio.Event().wait()

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send(message: Any) -> None:
        raise AssertionError(message)

    async def run() -> None:
        guard = Guard(app, HttpConfig(), told.append, clock=time.monotonic)
        scope = {"type": "http", "method": "POST", "path": "/tokenize", "query_string": b"", "headers": []}
        task = asyncio.create_task(guard(scope, receive, send))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    (record,) = caplog.records
    assert [record.request] == told
    assert (told[0]["outcome"], told[0]["completion_tokens"]) == ("client_gone", 3)


def test_figures_of_a_key(tmp_path: Path) -> None:
    keys = [ApiKey(name=f"team-{name}", sha256=sha256_of(name)) for name in "ab"]
    config = HttpConfig(api_keys=("admin",), keys_file=keys_file(tmp_path, *keys))
    with TestClient(build_api([Backend(FakeEngineClient(TOKENIZER), MODEL, TOKENIZER)], config)) as client:
        for name in "aab":
            client.post("/v1/chat/completions", json=CHAT, headers={"Authorization": f"Bearer {name}"})
        for nobody in ({}, {"Authorization": "Bearer a"}, {"Authorization": "Bearer wrong"}):
            assert "team-" not in client.get("/metrics", headers=nobody).raise_for_status().text
        text = client.get("/metrics", headers={"Authorization": "Bearer admin"}).text
    assert 'mneme_tenant_requests_total{ingress="local",outcome="stop",tenant="team-a"} 2.0' in text
    computed = 'mneme_tenant_prompt_tokens_total{ingress="local",source="recomputed",tenant="team-%s"} '
    of_a, of_b = (float(text.partition(computed % name)[2].split()[0]) for name in "ab")
    assert of_a > of_b > 0


def test_prompts_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", "mneme")
    chat(messages=[{"role": "user", "content": "xyzzy"}])
    chat(messages=[{"role": "user", "content": "xyzzy"}], n=0)
    chat(messages=[{"role": "user", "content": ["xyzzy"]}])
    assert "xyzzy" not in caplog.text


def concurrently(engine: FakeEngineClient, **config: Any) -> httpx.AsyncClient:
    app = build_api([Backend(engine, MODEL, engine.tokenizer)], HttpConfig(**config))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://api")


def test_a_template_that_never_ends_is_one_refused_request() -> None:
    template = (
        "{% if messages[0].content == 'hang' %}{% for a in range(99999) %}{% for b in range(99999) %}"
        "{% endfor %}{% endfor %}{% endif %}{{ messages[0].content }}"
    )
    tokenizer = tiny_tokenizer(template, max_render_s=2.0)

    async def run() -> list[httpx.Response]:
        async with concurrently(FakeEngineClient(tokenizer)) as client:
            bodies = [{**CHAT, "messages": [{"role": "user", "content": c}]} for c in ("hang", "a", "hang", "b")]
            calls = [client.post("/v1/chat/completions", json=body) for body in bodies]
            return await asyncio.gather(*calls)

    responses = asyncio.run(run())
    tokenizer.close()
    assert [response.status_code for response in responses] == [400, 200, 400, 200]
    assert responses[0].json()["error"]["param"] == "messages"


def test_new_grammars_wait_for_each_other_and_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    check, go_on, running = GrammarChecker.check, threading.Event(), threading.Semaphore(1)

    def checked(grammars: GrammarChecker, grammar: Grammar) -> None:
        assert running.acquire(blocking=False)
        assert go_on.wait(30)
        running.release()
        check(grammars, grammar)

    monkeypatch.setattr(GrammarChecker, "check", checked)  # so that one takes long, whatever the compiler can

    async def run() -> list[int]:
        async with concurrently(FakeEngineClient(TOKENIZER)) as client:
            bodies = [{**CHAT, "guided_regex": f"[a-z]{{{i + 1}}}"} for i in range(MAX_COMPILING + 1)]
            calls = [asyncio.create_task(client.post("/v1/chat/completions", json=body)) for body in bodies]
            done, _ = await asyncio.wait(calls, timeout=30, return_when=asyncio.FIRST_COMPLETED)
            go_on.set()
            assert [call.result().status_code for call in done] == [429]
            return [response.status_code for response in await asyncio.gather(*calls)]

    assert sorted(asyncio.run(run())) == [200] * MAX_COMPILING + [429]


def test_bodies_that_are_being_read_share_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in ("MAX_BODY_BYTES", "MAX_HELD_BYTES"):
        monkeypatch.setattr(guard_module, limit, 1024)

    async def run() -> list[int]:
        release = asyncio.Event()

        async def slow() -> Any:
            yield b" " * 900
            await release.wait()
            yield b"{}"

        async with concurrently(FakeEngineClient(TOKENIZER)) as client:
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


def test_a_tenant_leaves_room_for_the_bodies_of_others() -> None:
    """The first may have half, and the next half of what is left; each may have one."""
    reader = BodyReader(1024, max_held_bytes=8 * 1024)

    def filled(tenant: str) -> list[HeldBody]:
        bodies = []
        for _ in range(8):
            bodies.append(HeldBody(reader))
            bodies[-1].tenant = tenant
            try:
                bodies[-1].add(b" " * 1024)
            except Overloaded:
                break
        return [body for body in bodies if len(body)]

    held = [filled(tenant) for tenant in "abcd"]
    assert [len(bodies) for bodies in held] == [4, 2, 1, 1]
    for body in held[0]:
        body.pop()
    assert len(filled("b")) == 1  # it has three then, and there are three left


@pytest.fixture(scope="module")
def checker() -> Iterator[BadRequestChecker]:
    with pytest.MonkeyPatch.context() as patched, serving() as server:
        patched.setattr(body_module, "BODY_IDLE_S", 2.0)
        checker = BadRequestChecker(server.url)
        yield checker
        checker.close()


@pytest.mark.parametrize("case", BAD_REQUESTS, ids=lambda case: case.name)
def test_a_bad_request_is_refused_and_harms_nobody(checker: BadRequestChecker, case: BadRequest) -> None:
    checker.check(case)


@pytest.mark.parametrize("case", RAW_REQUESTS, ids=lambda case: case.name)
def test_bad_bytes_harm_nobody(checker: BadRequestChecker, case: RawRequest) -> None:
    checker.check_raw(case)
