"""Warm prompts as an HTTP client meets them: two engines on their threads, with a runner that has no model."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from mneme.cluster.api_keys import ApiKey, sha256_of
from mneme.cluster.http import kv
from mneme.replicas.queries import DeletePin, Query
from mneme.replicas.text.document_parts import encode_parts, prompt_parts
from tests.cluster.api_fixtures import TOKENIZER, api, body_of, keys_file
from tests.cluster.real_engines import KEYS, ONE, TWO, TwoEngines, over

SYSTEM = {"role": "system", "content": "be brief, and never name the fox"}


@pytest.fixture
def client(engines: TwoEngines) -> TestClient:
    return api(engines)


def warm(client: TestClient, status: int = 200, headers: Any = None, **body: Any) -> Any:
    return body_of(client.post("/v1/kv/warm", json={"model": "tiny", **body}, headers=headers), status)


def pins(client: TestClient, headers: Any = None) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = client.get("/v1/kv/pins", headers=headers).raise_for_status().json()["data"]
    return found


def test_a_system_prompt_is_warm_on_all_replicas_and_a_chat_shares_it_to_the_token(
    client: TestClient, engines: TwoEngines
) -> None:
    made = warm(client, messages=[SYSTEM])
    assert (made["object"], made["pinned"], made["replicas"]) == ("kv.pin", True, ["a", "b"])
    assert made["configured"] is False
    assert pins(client) == [made]
    chat = TOKENIZER.render_chat([SYSTEM, {"role": "user", "content": "世界"}])
    ids = TOKENIZER.encode_rendered(chat)
    assert [(noted, salt) for *_, noted, salt in engines.noted] == [("a", ""), ("b", "")]
    assert engines.noted[0][0] == tuple(ids[: made["num_tokens"]])
    assert engines.cached("a", ids) == engines.cached("b", ids) == made["num_tokens"]


def test_one_replica_is_the_one_with_the_most_room(client: TestClient, engines: TwoEngines) -> None:
    first = warm(client, prompt_token_ids=[5] * 40, replicas=1)
    engines.loops["a"].check_health()  # its figures are those of the step's end
    second = warm(client, prompt_token_ids=[6] * 40, replicas=1)
    assert (first["replicas"], second["replicas"]) == (["a"], ["b"])
    assert {tuple(pin["replicas"]) for pin in pins(client)} == {("a",), ("b",)}
    both = warm(client, prompt_token_ids=[7], replicas=2)
    assert both["replicas"] == ["a", "b"]
    for wrong in (0, 3, -1):
        assert warm(client, 400, prompt="a", replicas=wrong)["error"]["param"] == "replicas"


def test_a_prompt_may_be_computed_without_a_pin(client: TestClient, engines: TwoEngines) -> None:
    made = warm(client, prompt_token_ids=[5] * 20, pin=False)
    assert made["pinned"] is False
    assert pins(client) == []
    assert engines.num_kept_pins() == 0
    assert engines.cached("a", [5] * 20) == 19


def test_what_one_replica_refuses_is_on_none() -> None:
    with over(num_pages=(64, 8)) as (client, engines):
        answer = warm(client, 400, prompt_token_ids=[5] * 100)
        assert (answer["error"]["code"], answer["error"]["param"]) == ("pin_refused", "pin")
        assert "pinning 7 pages more would leave 1 unpinned; at least 4 must be" in answer["error"]["message"]
        assert pins(client) == []
        assert engines.num_kept_pins() == 0
        too_long = warm(client, 400, prompt_token_ids=[5] * 200, pin=False)["error"]
        assert (too_long["code"], too_long["param"]) == ("context_length_exceeded", "prompt_token_ids")
        assert engines.num_kept_pins() == 0


def test_a_replica_that_does_not_answer_is_a_503_and_leaves_no_pin(client: TestClient, engines: TwoEngines) -> None:
    engines.silent.add("b")
    warm(client, 503, prompt="a")
    assert engines.num_kept_pins() == 0


def test_a_prompt_that_takes_too_long_is_given_up(
    client: TestClient, engines: TwoEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv, "_WARM_TIMEOUT_S", 0.05)
    blocked = asyncio.Event()
    asked = engines.query

    async def query(query: Query[Any], *, replica_id: str | None = None) -> dict[str, Any]:
        if not isinstance(query, DeletePin):
            await blocked.wait()
        return await asked(query, replica_id=replica_id)

    engines.query = query  # type: ignore[method-assign]
    answer = warm(client, 503, prompt="a")
    assert "not computed within 0.05 s" in answer["error"]["message"]


def test_pins_are_the_key_s_own_and_so_many() -> None:
    with over(**KEYS) as (client, engines):
        mine = [warm(client, headers=ONE, prompt="a b", cache_salt=salt) for salt in ("x", "y", None)]
        answer = warm(client, 400, headers=ONE, prompt="c", cache_salt="z")
        assert "may have 3 pins" in answer["error"]["message"]
        assert client.delete(f"/v1/kv/pins/{mine[0]['id']}", headers=TWO).status_code == 404
        warm(client, headers=TWO, prompt="a b")
        assert (len(pins(client, ONE)), len(pins(client, TWO))) == (3, 1)
        assert len({salt for *_, salt in engines.noted}) == 4


def test_what_an_admin_warms_as_public_all_tenants_find(tmp_path: Path) -> None:
    user = {"authorization": "Bearer a-user"}
    file = keys_file(tmp_path, ApiKey(name="user", sha256=sha256_of("a-user")))
    text = "the quick brown fox jumps over the lazy dog. " * 3 + "the"
    with over(**KEYS, keys_file=file) as (client, _):
        assert warm(client, 403, headers=user, prompt=text, public=True)["error"]["code"] == "admin_required"
        assert "public" in warm(client, 400, headers=ONE, prompt=text, public=True, cache_salt="x")["error"]["message"]
        made = warm(client, headers=ONE, prompt=text, public=True)
        assert made["public"]
        assert [pin["id"] for pin in pins(client, user)] == [made["id"]]
        assert client.delete(f"/v1/kv/pins/{made['id']}", headers=user).status_code == 404
        for each in (user, TWO):
            found = client.post("/v1/kv/lookup", json={"prompt": text}, headers=each).json()
            assert [replica["device"] for replica in found["replicas"]] == [made["num_tokens"]] * 2
        mine = warm(client, headers=user, prompt=text + " fox")
        assert mine["num_tokens"] > made["num_tokens"]
        other = client.post("/v1/kv/lookup", json={"prompt": text + " fox"}, headers=TWO).json()
        assert [replica["device"] for replica in other["replicas"]] == [made["num_tokens"]] * 2
        assert client.delete(f"/v1/kv/pins/{made['id']}", headers=TWO).status_code == 200  # an admin too


def test_a_warm_document_is_what_a_text_that_begins_with_it_finds(client: TestClient, engines: TwoEngines) -> None:
    document = "the quick brown fox jumps over the lazy dog. " * 3
    made = warm(client, document=document)
    prompt = encode_parts(TOKENIZER, prompt_parts("who?", [document]), add_special_tokens=True)
    assert made["num_tokens"] == prompt.documents[0].end
    assert engines.cached("a", prompt.token_ids) == prompt.documents[0].end
