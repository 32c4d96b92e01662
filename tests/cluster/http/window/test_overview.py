"""What people see of a server: lists of sessions and requests, the forest, tiers, replicas, events, and the page."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from mneme.cluster.api_keys import ApiKey, sha256_of
from mneme.cluster.config import HttpConfig
from mneme.cluster.http.window import overview
from mneme.cluster.http.window import requests as window
from mneme.cluster.tenancy import kv_salt, tenant_of_secret
from mneme.errors import MnemeError, Overloaded, ReplicaUnavailable
from mneme.replicas.request import PromptUsage
from tests.cluster.api_fixtures import CHAT, COMPLETION, TOKENIZER, api, body_of, keys_file, serving
from tests.cluster.fake_engine_client import FakeEngineClient
from tests.cluster.real_engines import over

KEYS = {"api_keys": ("secret-a", "secret-b")}
A, B = ({"Authorization": f"Bearer secret-{name}"} for name in "ab")


def ended(number: int, at_s: float = 0.0, cached_tokens: int = 0) -> window.EndedRequest:
    shown: Any = {"id": str(number), "ended_at": at_s}
    shown["kv_details"] = PromptUsage(cached_tokens + 1, cached_tokens, host_tokens=cached_tokens // 2).kv_details()
    return window.EndedRequest("t", "", shown, {"queued": None, "begun": None, "tokens": [], "ended": 0.0})


def ask(client: Any, path: str, headers: Any = None) -> Any:
    return body_of(client.get(path, headers=headers))


def test_a_tenant_sees_its_own_sessions_the_last_one_first() -> None:
    client = api(FakeEngineClient(TOKENIZER), **KEYS)
    for headers, session in ((A, "first"), (A, "second"), (B, "other")):
        client.post("/v1/chat/completions", json={**CHAT, "session": {"id": session}}, headers=headers)
    client.post("/v1/chat/completions", json={**CHAT, "session": {"id": "salted"}, "cache_salt": "x"}, headers=A)
    assert [each["id"] for each in ask(client, "/v1/sessions", A)["data"]] == ["salted", "second", "first"]
    assert [each["id"] for each in ask(client, "/v1/sessions", B)["data"]] == ["other"]
    assert [each["id"] for each in ask(client, "/v1/sessions?limit=1", A)["data"]] == ["salted"]
    assert client.post("/v1/sessions/first/fork", json={"session_id": "branch"}, headers=A).status_code == 200
    assert ask(client, "/v1/sessions/branch", A)["forked_from"] == "first"
    for refused in (
        client.get("/v1/sessions/branch", headers=B),
        client.post("/v1/sessions/first/fork", json={}, headers=B),
    ):
        assert refused.status_code == 404  # in B's tree there is neither a branch nor what it comes from
        assert "no such session" in refused.json()["error"]["message"]
    (one,) = ask(client, "/v1/sessions", B)["data"]
    known = client.get("/v1/sessions/other", headers=B).json()
    differ = ("idle_s", "expires_in_s", "replica")  # the fake's replicas both list it
    assert {name: one[name] for name in one if name not in differ} == {
        name: known[name] for name in known if name not in differ
    }


def test_a_tenant_sees_its_own_requests_the_last_one_first() -> None:
    client = api(FakeEngineClient(TOKENIZER, timing=(0.5, 0.25)), **KEYS)
    first = client.post("/v1/chat/completions", json=CHAT, headers=A)
    second = client.post("/v1/completions", json={**COMPLETION, "n": 2, "max_tokens": 3}, headers=A)
    client.post("/v1/completions", json={**COMPLETION, "stream": True}, headers=B)
    last, before = ask(client, "/v1/requests", A)["data"]
    assert [last["id"], before["id"]] == [each.headers["x-request-id"] for each in (second, first)]
    assert (last["outcome"], last["choices"], last["completion_tokens"]) == ("length", 2, 6)
    assert last["prompt_tokens"] == second.json()["usage"]["prompt_tokens"]
    assert last["kv_details"] == second.json()["usage"]["kv_details"]
    assert (before["path"], before["outcome"], before["queue_ms"]) == ("/v1/chat/completions", "stop", 500.0)
    assert 0 < before["first_token_ms"] <= before["total_ms"]
    (other,) = ask(client, "/v1/requests?last=5", B)["data"]
    assert (other["path"], other["outcome"]) == ("/v1/completions", "stop")


def test_an_explanation_says_when_tokens_came_of_a_long_answer_fewer_of_them() -> None:
    engine = FakeEngineClient(TOKENIZER, is_endless=True, timing=(0.5, 0.25))
    client = api(engine, **KEYS)
    for count in (3, 900):
        made = client.post("/v1/completions", json={**COMPLETION, "max_tokens": count}, headers=A).json()
        times = ask(client, f"/v1/kv/explain/{made['id']}", A)["times"]
        numbers, at_ms = zip(*times["tokens"], strict=True)
        assert numbers[0] == 1
        assert numbers == tuple(range(1, count + 1)) if count < 128 else 64 < len(numbers) <= 128
        assert count - numbers[-1] < max(count // 64, 1)
        assert list(numbers) == sorted(set(numbers))
        assert list(at_ms) == sorted(at_ms)
        assert 0 <= times["queued"] <= times["begun"] <= at_ms[0] + 0.1
        assert at_ms[-1] <= times["ended"] + 0.1


@pytest.mark.parametrize(
    ("options", "outcome"),
    [
        ({"refusal": Overloaded("too much")}, Overloaded.code),
        ({"fail_after": 1}, MnemeError.code),
        ({"end_after": 1}, "replica_unavailable"),
    ],
)
def test_a_request_that_fails_is_listed_with_its_error(options: dict[str, Any], outcome: str) -> None:
    client = api(FakeEngineClient(TOKENIZER, **options))
    for body in (CHAT, {**CHAT, "stream": True}):
        client.post("/v1/chat/completions", json=body)
    listed = ask(client, "/v1/requests")["data"]
    assert [each["outcome"] for each in listed] == [outcome] * 2
    if "refusal" in options:  # nothing was computed
        assert [sum(each["kv_details"].values()) for each in listed] == [0, 0]


def test_a_request_whose_client_goes_is_listed() -> None:
    with serving(is_endless=True) as server, httpx.Client(base_url=server.url, timeout=30) as client:
        with client.stream("POST", "/v1/completions", json={**COMPLETION, "max_tokens": 900, "stream": True}) as stream:
            next(stream.iter_bytes())
        server.wait_idle()
        while not (listed := ask(client, "/v1/requests")["data"]):
            pass
        assert [each["outcome"] for each in listed] == ["client_gone"]


def test_the_log_is_bounded() -> None:
    log = window.RequestLog(lambda: 0.0)
    for number in range(window.MAX_REQUESTS + 5):
        log.add(ended(number))
    assert len(log) == window.MAX_REQUESTS
    assert [each["id"] for each in log.last("t", 2)] == ["1004", "1003"]


def test_saved_prefill_is_counted_by_the_quarter_of_an_hour_for_a_day() -> None:
    now_s = [900.0 * 50]
    log, midnight = window.RequestLog(lambda: now_s[0]), 900.0 * 100
    now_s[0] = midnight + 1_000
    for number, (at_s, cached_tokens) in enumerate(((-1, 100), (0, 20), (899, 3), (900, 4_000))):
        log.add(ended(number, midnight + at_s, cached_tokens))
    assert log.saved(midnight) == {"since": midnight, "tokens": 4_023}
    assert log.saved(0) == {"since": 900.0 * 50, "tokens": 4_123}  # the ingress is no older
    assert log.saved(10**9) == {"since": now_s[0], "tokens": 4_000}
    log.add(ended(9, midnight + 90_000, 1))
    now_s[0] = midnight + 91_000  # what is older than 25 hours is forgotten, and said to be
    assert log.saved(0) == {"since": midnight + 1_000, "tokens": 4_001}
    now_s[0] += 900_000  # nobody asked for days
    assert log.saved(0) == {"since": now_s[0] - 90_000, "tokens": 0}


def test_the_forest_is_shown_to_who_it_belongs_to(tmp_path: Path) -> None:
    salt = kv_salt(tenant_of_secret(hashlib.sha256(KEYS["api_keys"][0].encode()).hexdigest()), None)
    user = {"authorization": "Bearer a-user"}
    file = keys_file(tmp_path, ApiKey(name="user", sha256=sha256_of("a-user")))
    with over(**KEYS, keys_file=file) as (client, engines):
        for more in (" one", " two"):
            prompt = "the quick brown fox jumps over the lazy dog" + more
            engines.compute("a", TOKENIZER.encode(prompt, add_special_tokens=False), salt)
        one, other = ask(client, "/v1/kv/tree", A)["replicas"]
        assert (one["replica"], other["runs"], other["num_tokens"]) == ("a", [], 0)
        first, branch = one["runs"]  # the second prompt parts from the first within its last page
        assert (first["parent"], branch["parent"]) == (-1, 0)
        assert 0 < branch["start"] < first["tokens"]
        assert first["below"] == first["tokens"] + branch["tokens"] == one["num_tokens"]
        assert one["texts"][0].startswith("the quick brown fox")
        assert ask(client, "/v1/kv/tree", B)["replicas"][0]["runs"] == []
        assert client.get("/v1/kv/tree?all=1", headers=user).status_code == 403
        everything = ask(client, "/v1/kv/tree?all=1", B)["replicas"][0]
        assert (everything["num_tokens"], everything["texts"]) == (one["num_tokens"], [])
        assert all(run["first_ids"] == [] for run in everything["runs"])


@pytest.mark.parametrize(
    "path", ["/v1/sessions?limit=0", "/v1/requests?last=x", "/v1/kv/tree?depth=-1", "/v1/kv/tree?max_runs=10001"]
)
def test_numbers_out_of_range_are_named(path: str) -> None:
    response = api().get(path)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == re.search(r"\?(\w+)=", path)[1]  # type: ignore[index]


def test_tiers_and_replicas_have_the_figures_that_replicas_report() -> None:
    client = api()
    tiers = ask(client, "/v1/kv/tiers")
    assert {(each["replica"], each["tier"], each["total"]) for each in tiers["tiers"]} == {
        ("a", "device", 16_000),
        ("b", "device", 16_000),
    }
    assert {each["token_bytes"] for each in tiers["tiers"]} == {0.25}
    moved = api(FakeEngineClient(TOKENIZER, tokens={"host": 40, "disk": 8, "peer": 4}))
    assert ask(moved, "/v1/kv/tiers")["moved_bytes"] == {
        "device_to_host": 0, "host_to_device": 26, "host_to_disk": 0, "disk_to_host": 4, "peers_to_host": 2,
    }  # fmt: skip
    client.post("/v1/chat/completions", json=CHAT)
    client.post("/v1/chat/completions", json=CHAT)
    found = sum(sum(each["kv_details"][name] for name in ("device", "host", "disk", "peer"))
                for each in ask(client, "/v1/requests")["data"])  # fmt: skip
    assert ask(client, "/v1/kv/tiers?since=1")["saved"]["tokens"] == found > 0
    shown = ask(client, "/v1/cluster")
    assert shown["models"] == [{"model": "tiny", "state": "ready", "reason": "", "ready": 2, "wanted": None}]
    assert [(each["replica"], each["prompt_tokens"], each["cached_tokens"]) for each in shown["replicas"]] == [
        ("a", 10, 4),
        ("b", 10, 4),
    ]


def events_of(lines: Any, count: int) -> list[dict[str, Any]]:
    found = []
    for line in lines:
        if line.startswith("data: "):
            found.append(json.loads(line[6:]))
            if len(found) == count:
                break
    return found


def test_events_tell_of_requests_and_of_replicas_that_go(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        serving(config=HttpConfig(api_keys=KEYS["api_keys"])) as server,
        httpx.Client(base_url=server.url, timeout=30) as client,
        client.stream("GET", "/v1/events", headers=A) as stream,
    ):
        lines = stream.iter_lines()
        assert events_of(lines, 1)[0]["data"]["state"] == "ready"
        httpx.post(f"{server.url}/v1/chat/completions", json=CHAT, headers=B)  # another's
        own = httpx.post(f"{server.url}/v1/chat/completions", json=CHAT, headers=A)
        (ended,) = events_of(lines, 1)
        assert (ended["type"], ended["data"]["id"]) == ("request.ended", own.headers["x-request-id"])
        server.call(lambda: setattr(server.engine, "ready", False))
        (gone,) = events_of(lines, 1)
        assert (gone["type"], gone["data"]["state"], gone["data"]["ready"]) == ("replica.state", "loading", 0)


def test_events_tell_of_replicas_that_come_and_go_and_admins_of_faults() -> None:
    ids, store = ["a", "b"], {"actors_lost": 0, "disk_miss_bad_checksum": 0, "disk_miss_absent": 1}

    async def stats() -> dict[str, dict[str, Any]]:
        return {"a": {"tokens": {"device": store["disk_miss_absent"]}, "cache": {"store": store}}}

    with ExitStack() as stack:
        server = stack.enter_context(serving())
        server.engine.replica_ids = lambda: ids  # type: ignore[method-assign]
        server.engine.stats = stats  # type: ignore[method-assign]
        lines = stack.enter_context(httpx.stream("GET", f"{server.url}/v1/events", timeout=30)).iter_lines()
        events_of(lines, 1)
        ids[:] = ["b", "c"]
        left, came = events_of(lines, 2)
        assert (left["type"], left["data"]["replica"]) == ("replica.left", "a")
        assert (came["type"], came["data"]["replica"]) == ("replica.came", "c")
        store |= {"actors_lost": 1, "disk_miss_bad_checksum": 2, "disk_miss_absent": 5}
        moved, fault = events_of(lines, 2)
        assert moved["type"] == "kv.moved"
        assert (fault["type"], fault["data"]) == ("fault", {"actors_lost": 1, "disk bad_checksum": 2})


def test_a_listener_that_is_slow_is_told_what_it_lost_and_too_many_are_refused() -> None:
    async def run() -> None:
        log = window.RequestLog(lambda: 0.0)

        async def poll() -> list[Any]:
            return []

        def end(count: int) -> None:
            for number in range(count):
                log.add(ended(number))

        with log.listening("t") as listener:
            events = log.events(listener, poll, 0.01)
            assert await anext(events) is None
            end(window.MAX_WAITING_EVENTS + 3)
            lost = await anext(events)
            assert lost is not None
            assert (lost["type"], lost["data"]) == ("lost", {"events": 3})
            end(2)  # while the client has not read that yet
            first = await anext(events)
            assert first is not None
            assert first["data"]["id"] == "5"
            assert listener.num_lost == 2  # told with the next
            with ExitStack() as others:
                for tenant in (f"t{number // 16}" for number in range(window.MAX_LISTENERS - 1)):
                    others.enter_context(log.listening(tenant))
                with pytest.raises(Overloaded), log.listening("another"):
                    pass
        with log.listening("another"):
            pass

    asyncio.run(run())


def test_figures_are_looked_at_while_requests_end_all_the_time() -> None:
    async def run() -> None:
        log, looks = window.RequestLog(lambda: 0.0), list[int]()

        async def poll() -> list[Any]:
            looks.append(len(looks))
            return []

        with log.listening("t") as listener:
            events = log.events(listener, poll, 0.02)
            for number in range(30):
                log.add(ended(number))
                await anext(events)
                await asyncio.sleep(0.005)
        assert len(looks) >= 3

    asyncio.run(run())


def test_one_key_leaves_room_for_listeners_of_others() -> None:
    with (
        serving(config=HttpConfig(api_keys=KEYS["api_keys"])) as server,
        httpx.Client(base_url=server.url, timeout=30) as client,
        ExitStack() as open_streams,
    ):
        listen = partial(client.stream, "GET", "/v1/events")
        for _ in range(window.MAX_LISTENERS_PER_TENANT):
            assert open_streams.enter_context(listen(headers=A)).status_code == 200
        with listen(headers=A) as refused:
            assert refused.status_code == 429
        with listen(headers=B) as other:
            assert other.status_code == 200


def test_what_a_replica_counted_while_it_was_silent_is_told_once() -> None:
    class Flaky(FakeEngineClient):
        silent = False

        async def stats(self) -> Any:
            return {name: each for name, each in (await super().stats()).items() if name != "a" or not self.silent}

    async def run() -> None:
        client = Flaky(TOKENIZER, tokens={"recomputed": 1000})
        service = SimpleNamespace(
            apis=[SimpleNamespace(client=client, model=SimpleNamespace(id="tiny"))],
            requests=window.RequestLog(lambda: 0.0),
            stats=client.stats,
        )
        figures = overview.Figures(service, has_sums=True)  # type: ignore[arg-type]
        await figures.changes()
        client.silent = True  # its stream broke
        client.tokens = {"recomputed": 1010}
        (moved,) = await figures.changes()
        assert moved["data"] == {"tokens_recomputed": 10}  # of the other
        client.silent = False
        (moved,) = await figures.changes()
        assert moved["data"] == {"tokens_recomputed": 10}

    asyncio.run(run())


def test_the_page_needs_no_key_loads_nothing_from_elsewhere_and_names_what_there_is() -> None:
    client = api(**KEYS)
    found = {name: client.get(f"/ui{name}") for name in ("", "/app.js", "/app.css")}
    for response in found.values():
        assert response.status_code == 200
        assert "default-src 'self'" in response.headers["content-security-policy"]
        assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", response.text)
    assert set(re.findall(r'(?:src|href)="(/[^"]*)"', found[""].text)) == {
        "/ui/app.js",
        "/ui/app.css",
        "/docs",
        "/metrics",
    }
    described = client.get("/openapi.json").json()["paths"]
    asked = set(re.findall(r'(?:json|ask)\([`"](/v1/[\w/]+?)(?:[`"?]|/\$)', found["/app.js"].text))
    known = {path.partition("/{")[0] for path in described}
    assert asked >= {"/v1/cluster", "/v1/kv/tree", "/v1/kv/explain", "/v1/events", "/v1/chat/completions"}
    assert asked <= known
    assert sum(len(each.content) for each in found.values()) < 200_000
    assert Path(window.__file__).parent.joinpath("assets").is_dir()


def test_a_replica_that_is_late_takes_nothing_from_the_lists_of_others() -> None:
    class Late(FakeEngineClient):
        async def query(self, query: Any, *, replica_id: str | None = None) -> dict[str, Any]:
            if replica_id != "b":
                raise ReplicaUnavailable("a replica did not answer within 15 s")
            return await super().query(query, replica_id=replica_id)

    client = api(Late(TOKENIZER))
    client.post("/v1/chat/completions", json={**CHAT, "session": {"id": "s"}})
    assert [each["id"] for each in ask(client, "/v1/sessions")["data"]] == ["s"]
    assert [each["replica"] for each in ask(client, "/v1/kv/tree")["replicas"]] == ["b"]
    none = api(FakeEngineClient(TOKENIZER, query_failure=ReplicaUnavailable("no replica is ready")))
    assert none.get("/v1/sessions").status_code == 503
