"""/v1/kv as an HTTP client meets it: two engines with pages of their own, and one cache tier that both share."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from starlette.testclient import TestClient

from mneme.cachetier.names import tenant_id
from mneme.cachetier.node.node_admin import NodeAdmin
from mneme.cluster.config import HttpConfig
from mneme.cluster.tenancy import kv_salt
from mneme.replicas.queries import GetSession, Query
from tests.cluster.api_fixtures import TOKENIZER, api, body_of
from tests.cluster.real_engines import KEYS, ONE, TWO, TwoEngines, over

IDS = list(range(5, 37))  # four chunks


@pytest.fixture
def client(engines: TwoEngines) -> TestClient:
    return api(engines)


def call(
    client: TestClient, what: str, status: int = 200, headers: Any = None, method: str = "POST", **body: Any
) -> Any:
    return body_of(client.request(method, f"/v1/kv{what}", json=body or None, headers=headers), status)


def drop(client: TestClient, status: int = 200, headers: Any = None, **body: Any) -> Any:
    return call(client, "", status, headers, "DELETE", **body)


def on_replicas(answer: Any) -> list[tuple[int, int]]:
    return [(each["device"], each["host"]) for each in answer["replicas"]]


def test_a_lookup_says_what_is_where_and_changes_nothing(client: TestClient, engines: TwoEngines) -> None:
    engines.save([*IDS, 9, 9, 9])
    engines.compute("b", IDS[:20])
    before = engines.cache.stats(), [loop.stats()["pages"] for loop in engines.loops.values()]
    found = call(client, "/lookup", token_ids=[*IDS, 9, 9, 8])
    assert (found["object"], found["num_tokens"]) == ("kv.lookup", 35)
    assert [each["replica"] for each in found["replicas"]] == ["a", "b"]
    assert on_replicas(found) == [(0, 0), (20, 0)]
    node = {"node": "node-1", "host": 34, "disk": 0}
    assert found["tier"] == {"tokens": 34, "host": 34, "disk": 0, "peer": 0, "nodes": [node]}
    listed = call(client, "/lookup", prompt_token_ids=[*IDS, 9, 9, 8], chunks=True)["tier"]["chunks"]
    assert [(each["start"], each["tokens"]) for each in listed] == [(0, 8), (8, 8), (16, 8), (24, 8), (32, 2)]
    assert {(each["tier"], each["node"]) for each in listed} == {("host", "node-1")}
    assert (engines.cache.stats(), [loop.stats()["pages"] for loop in engines.loops.values()]) == before


def test_text_and_messages_are_looked_up_as_requests_would_have_them(client: TestClient, engines: TwoEngines) -> None:
    text = TOKENIZER.encode("the quick brown fox", add_special_tokens=True)
    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "世界"}]
    ids = TOKENIZER.encode_rendered(TOKENIZER.render_chat(chat))
    engines.save(text)
    engines.save(ids)
    found = call(client, "/lookup", prompt="the quick brown fox")
    assert found["tier"]["tokens"] == found["num_tokens"] == len(text)
    found = call(client, "/lookup", messages=chat[:1])
    assert found["tier"]["tokens"] == found["num_tokens"] > 5


def test_a_session_is_looked_up_and_deleted_by_its_name(client: TestClient, engines: TwoEngines) -> None:
    engines.compute("b", IDS, session_id="public:mine")
    engines.save(IDS)
    engines.save([*IDS[:16], 7, 7])
    found = call(client, "/lookup", session_id="mine")
    assert found["num_tokens"] == len(IDS) + 1
    assert on_replicas(found) == [(0, 0), (32, 0)]
    assert found["tier"]["tokens"] == 32
    pinned = call(client, "/pin", session_id="mine")
    engines.compute("b", [*IDS, 3, 3, 3], session_id="public:mine")
    assert call(client, "/unpin", session_id="mine")["id"] == pinned["id"]
    gone = drop(client, session_id="mine")
    assert gone["tier"]["chunks"] == 2  # the first two are another's too
    assert [each["device_pages"] for each in gone["replicas"]] == [0, 3]
    found = call(client, "/lookup", session_id="mine")
    assert (on_replicas(found), found["tier"]["tokens"]) == ([(0, 0), (0, 0)], 16)
    assert client.get("/v1/sessions/mine").status_code == 200  # what was said is kept
    for body in ({"session_id": "other"}, {"session_id": "mine", "cache_salt": "x"}):
        assert call(client, "/lookup", 404, **body)["error"]["code"] == "session_not_found"
        assert drop(client, 404, **body)["error"]["param"] == "session_id"


@pytest.mark.parametrize("what", ["/lookup", "/pin", "/unpin", ""])
def test_a_session_that_only_its_log_knows_is_found(client: TestClient, engines: TwoEngines, what: str) -> None:
    engines.compute("a", IDS, session_id="public:mine")
    engines.save(IDS)
    if what == "/unpin":
        call(client, "/pin", session_id="mine")
    plain, is_restored = engines.query, False

    async def query(query: Query[Any], *, replica_id: str | None = None) -> dict[str, Any]:
        """As after a restart: no replica has the session before one has read its log."""
        nonlocal is_restored
        if isinstance(query, GetSession):
            is_restored = is_restored or query.restores
            if not is_restored:
                return dict.fromkeys(engines.loops)
        return await plain(query, replica_id=replica_id)

    engines.query = query  # type: ignore[method-assign]
    call(client, what, method="POST" if what else "DELETE", session_id="mine")
    assert is_restored


def test_a_prefix_is_deleted_with_what_begins_with_it(client: TestClient, engines: TwoEngines) -> None:
    longer, other = [*IDS, *range(50, 60)], [*IDS[:16], *range(70, 80)]
    for ids in (IDS, longer, other):
        engines.save(ids)
        engines.compute("a", ids)
    gone = drop(client, prompt_token_ids=IDS)
    assert (gone["object"], gone["by"]) == ("kv.deleted", "prompt_token_ids")
    assert gone["tier"]["chunks"] == 4
    assert gone["tier"]["bytes"] > 0
    found = call(client, "/lookup", token_ids=longer)
    assert (on_replicas(found), found["tier"]["tokens"]) == ([(16, 0), (0, 0)], 16)
    found = call(client, "/lookup", token_ids=other)
    assert (on_replicas(found), found["tier"]["tokens"]) == ([(26, 0), (0, 0)], 26)


def test_a_document_is_deleted_and_no_prompt_that_only_has_its_tokens(client: TestClient, engines: TwoEngines) -> None:
    ids = TOKENIZER.encode_continuation("the quick brown fox jumps")
    for text_or_ids in ("the quick brown fox jumps", ids):
        for saved in ([*TOKENIZER.sink_ids, *ids], ids):
            engines.save(saved)
            engines.compute("a", saved)
        num_tokens = len(TOKENIZER.sink_ids) + len(ids)
        assert on_replicas(call(client, "/lookup", document=text_or_ids)) == [(num_tokens, 0), (0, 0)]
        gone = drop(client, document=text_or_ids)
        assert gone["by"] == "document"
        assert gone["tier"]["chunks"] > 0
        found = call(client, "/lookup", document=text_or_ids)
        assert (on_replicas(found), found["tier"]["tokens"]) == ([(0, 0), (0, 0)], 0)
        found = call(client, "/lookup", token_ids=ids)
        assert (on_replicas(found), found["tier"]["tokens"]) == ([(len(ids), 0), (0, 0)], len(ids))


def in_prefix(client: TestClient, headers: Any = None, **body: Any) -> tuple[int, int]:
    """Tokens of `IDS` that the first replica and the tier have."""
    found = call(client, "/lookup", headers=headers, token_ids=IDS, **body)
    return on_replicas(found)[0][0], found["tier"]["tokens"]


def salts(key: int) -> tuple[str, str]:
    """A key's own, and one that its client chose."""
    name = HttpConfig(**KEYS).keyring().tenants[key]
    return kv_salt(name, None), kv_salt(name, "mine")


def test_a_tenant_reaches_its_own_and_nothing_else() -> None:
    with over(**KEYS) as (client, engines):
        for salt in (*salts(0), *salts(1)):
            engines.save(IDS, salt)
            engines.compute("a", IDS, salt)
        for headers in (ONE, TWO):
            call(client, "/pin", headers=headers, token_ids=IDS, pin_id="mine")
        drop(client, headers=ONE, token_ids=IDS, cache_salt="mine")
        assert in_prefix(client, ONE, cache_salt="mine") == (0, 0)
        assert in_prefix(client, ONE) == (32, 32)
        assert drop(client, headers=ONE, tenant=True)["tier"]["chunks"] == 4
        assert in_prefix(client, ONE) == (0, 0)
        assert in_prefix(client, TWO) == in_prefix(client, TWO, cache_salt="mine") == (32, 32)
        assert engines.kept() == 8
        assert call(client, "/pins", headers=ONE, method="GET")["data"] == []
        assert [pin["id"] for pin in call(client, "/pins", headers=TWO, method="GET")["data"]] == ["mine"]
        call(client, "/unpin", 404, headers=ONE, pin_id="mine")
        call(client, "/lookup", 401, token_ids=IDS)


def test_a_deletion_that_what_is_being_saved_would_outlive_is_refused(client: TestClient, engines: TwoEngines) -> None:
    engines.save(IDS)
    engines.compute("a", IDS, session_id="public:mine")
    engines.loops["b"].chunk_tier = replace(engines.tier, flush_saves=lambda _timeout_s: False)
    for body in ({"token_ids": IDS}, {"session_id": "mine"}, {"tenant": True}):
        answer = drop(client, 503, **body)
        assert "being saved" in answer["error"]["message"]
    assert engines.kept() == 4
    engines.loops["b"].chunk_tier = engines.tier
    assert drop(client, token_ids=IDS)["tier"]["chunks"] == 4


class OwnedLogs:
    """Has what a tenant's deletion asks of a `DurableSessions`."""

    def __init__(self) -> None:
        self.owners: list[bytes] = []
        self.is_slow = False

    def recall(self, keys: object, version_of: object) -> list[Any]:
        return []

    def delete_tenant(self, owner: bytes) -> int:
        if self.is_slow:
            raise TimeoutError
        self.owners.append(owner)
        return 3


def test_a_tenant_s_sessions_go_with_its_kv() -> None:
    with over(**KEYS) as (client, engines):
        logs: Any = OwnedLogs()
        for loop in engines.loops.values():
            loop.durable = logs
        for name in "ab":
            engines.compute(name, IDS, salts(0)[name == "b"], session_id=f"s-{name}")
            engines.compute(name, IDS, salts(1)[0], session_id="other")
        engines.save(IDS, salts(0)[0])
        logs.is_slow = True
        drop(client, 503, headers=ONE, tenant=True)
        logs.is_slow = False
        gone = drop(client, headers=ONE, tenant=True)
        assert (gone["tier"]["chunks"], gone["tier"]["session_logs"]) == (4, 3)
        assert logs.owners == [tenant_id(salts(0)[0])]  # one replica is asked for all nodes
        for loop in engines.loops.values():
            left = loop.query(GetSession((salts(1)[0], "other")))
            assert left is not None
            assert len(loop.engine.sessions) == 1


def test_figures_are_the_caller_s_own_and_sums() -> None:
    with over(**KEYS) as (client, engines):
        engines.save(IDS, salts(0)[0])
        engines.save(IDS, salts(0)[1])
        engines.save(IDS[:8], salts(1)[0])
        call(client, "/pin", headers=ONE, token_ids=IDS[:8], pin_id="mine")
        figures = call(client, "/stats", headers=ONE, method="GET")
        own, owners = figures["tenant"], [tenant_id(salts(key)[0]).hex() for key in (0, 1)]
        assert (own["owner"], own["quota_bytes"], own["disk_bytes"]) == (owners[0], 1 << 19, 0)
        assert own["host_bytes"] == 8 * 4096
        assert [pin["id"] for pin in own["pins"]] == ["mine"]
        (node,) = figures["tier"]["nodes"]
        assert (node["node"], node["host"]["chunks"], node["host"]["bytes"]) == ("node-1", 9, 9 * 4096)
        assert {each["replica"] for each in figures["replicas"]} == {"a", "b"}
        assert figures["replicas"][0]["pages"]["total"] == 64
        assert owners[1] not in str(figures)
        other = call(client, "/stats", headers=TWO, method="GET")["tenant"]
        assert (other["host_bytes"], other["pins"]) == (4096, [])


def test_pins_of_the_tier_and_of_devices_are_one_family(client: TestClient, engines: TwoEngines) -> None:
    engines.save(IDS)
    warm = call(client, "/warm", model="tiny", prompt_token_ids=IDS)
    pinned = call(client, "/pin", prompt_token_ids=IDS, ttl_s=60)
    assert (pinned["object"], pinned["where"], pinned["num_tokens"], pinned["num_chunks"]) == ("kv.pin", "tier", 32, 4)
    assert 59 < pinned["expires_in_s"] <= 60
    listed = call(client, "/pins", method="GET")["data"]
    assert [(pin["id"], pin["where"]) for pin in listed] == [(warm["id"], "device"), (pinned["id"], "tier")]
    again = call(client, "/pin", prompt_token_ids=IDS)
    assert (again["id"], again["expires_in_s"]) == (pinned["id"], None)
    assert call(client, "/unpin", token_ids=IDS)["id"] == pinned["id"]
    call(client, "/unpin", 404, token_ids=IDS)
    assert call(client, "/unpin", pin_id=warm["id"])["deleted"] is True
    named = call(client, "/pin", prompt_token_ids=IDS, pin_id="my.prompt-1")
    assert client.delete(f"/v1/kv/pins/{named['id']}").status_code == 200
    assert call(client, "/pins", method="GET")["data"] == []
    assert engines.cache.stats()["pins"]["keys"] == 0
    missing = call(client, "/pin", 404, token_ids=[7] * 9)
    assert (missing["error"]["code"], missing["error"]["param"]) == ("kv_not_found", "prompt")


def test_without_a_tier_devices_answer_alone() -> None:
    with over(has_tier=False) as (client, engines):
        engines.compute("a", IDS)
        found = call(client, "/lookup", token_ids=IDS, chunks=True)
        assert (on_replicas(found), found["tier"]) == ([(32, 0), (0, 0)], None)
        assert call(client, "/pin", 400, token_ids=IDS)["error"]["code"] == "no_cache_tier"
        assert call(client, "/pins", method="GET")["data"] == []
        call(client, "/unpin", 404, pin_id="x")
        gone = drop(client, token_ids=IDS)
        assert (gone["tier"], [each["device_pages"] for each in gone["replicas"]]) == (None, [2, 0])
        figures = call(client, "/stats", method="GET")
        assert (figures["tier"], figures["tenant"]) == (None, None)


def test_a_replica_that_is_silent_is_a_503_for_deletion_and_not_for_the_tier(
    client: TestClient, engines: TwoEngines
) -> None:
    engines.save(IDS)
    engines.silent.add("a")
    drop(client, 503, token_ids=IDS)
    assert engines.kept() == 4
    assert call(client, "/pin", token_ids=IDS)["num_chunks"] == 4  # through the other
    engines.silent.add("b")
    call(client, "/stats", 503, method="GET")


def test_a_tier_that_fails_is_an_error_and_harms_no_engine(
    client: TestClient, engines: TwoEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> Iterable[Any]:
        raise OSError("the node is gone")

    monkeypatch.setattr(NodeAdmin, "lookup", fail)
    answer = call(client, "/lookup", 500, token_ids=IDS)
    assert answer["error"]["code"] == "internal_error"
    assert "the node is gone" not in str(answer)
    engines.compute("a", IDS)


ANY = ("/lookup", "/pin", "/unpin", "/warm", "")  # "": a deletion
USER = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    ("routes", "param", "bodies"),
    [
        (ANY, "prompt", [{"prompt": "a", "token_ids": [5]}, {"prompt": ""}, {"prompt": 5}, {"prompt": "fox " * 2000}]),
        (ANY, "token_ids", [{"token_ids": []}, {"token_ids": "a"}, {"token_ids": [5] * 2000}]),
        (ANY, "prompt_token_ids", [{"prompt_token_ids": [10**9]}]),
        (ANY, "prompt_token_ids[0]", [{"prompt_token_ids": [True]}]),
        (ANY, "messages", [{"messages": []}, {"messages": [{"role": "user", "content": "fox " * 2000}]}]),
        (ANY, "tools[0].function", [{"messages": [USER], "tools": [{"type": "function"}]}]),
        (ANY, "cache_salt", [{"prompt": "a", "cache_salt": ""}]),
        (("/lookup", "/pin", "/unpin", ""), "prompt", [{"session_id": "s", "prompt": "a"}]),
        (("/lookup", "/pin", "/unpin", ""), "session_id", [{"session_id": ""}, {"session_id": "s" * 300}]),
        (("/lookup", "/pin", "/unpin"), "prompt", [{"cache_salt": "x"}]),
        (("/lookup",), "chunks", [{"prompt": "a", "chunks": 1}]),
        (("/warm", "/pin"), "ttl_s", [{"prompt": "a", "ttl_s": 0}, {"prompt": "a", "ttl_s": 1e12}]),
        (("/warm",), "pin", [{"prompt": "a", "pin": "yes"}]),
        (("/warm",), "replicas", [{"prompt": "a", "replicas": "some"}, {"prompt": "a", "replicas": True}]),
        (("/pin",), "pin_id", [{"prompt": "a", "pin_id": name} for name in ("", "../x", "x" * 65)]),
        (("/unpin",), "prompt", [{"prompt": "a", "pin_id": "x"}]),
        (("",), "tenant", [{"tenant": False}]),
        (("",), "prompt", [{"tenant": True, "prompt": "a"}, {"tenant": True, "document": "a"}]),
        (("",), "document", [{"document": ""}, {"document": [10**9]}]),
        (("",), "document[0]", [{"document": ["a"]}]),
        (("",), "document.text", [{"document": {"title": "a"}}]),
        (("",), "documents", [{"messages": [USER], "documents": ["b"]}]),
    ],
)
def test_what_breaks_a_rule_is_named(routes: tuple[str, ...], param: str, bodies: list[dict[str, Any]]) -> None:
    with over() as (client, engines):
        engines.save(IDS)
        for what in routes:
            for body in bodies:
                model = {"model": "tiny"} if what == "/warm" else {}
                answer = call(client, what, 400, method="POST" if what else "DELETE", **{**model, **body})
                assert answer["error"]["param"] == param, (what, body, answer)
        assert engines.kept() == 4
