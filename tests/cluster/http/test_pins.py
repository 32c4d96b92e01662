"""Warm prompts as an HTTP client meets them: two engines on their threads, with a runner that has no model."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import httpx
import pytest

from mneme.cluster.config import HttpConfig
from mneme.cluster.http import kv
from mneme.cluster.http.api import build_api
from mneme.cluster.http.api_state import ServedModel
from mneme.errors import MnemeError, ReplicaUnavailable
from mneme.replicas.config import EngineConfig
from mneme.replicas.engine.commands import Query
from mneme.replicas.engine.engine import Engine
from mneme.replicas.engine.loop import EngineLoop
from mneme.replicas.request import GenerationRequest, SamplingParams, TokenEvent
from tests.cluster.api_fixtures import TOKENIZER
from tests.cluster.fake_engine_client import FakeEngineClient
from tests.replicas.fake_runner import FakeRunner

SYSTEM = {"role": "system", "content": "be brief, and never name the fox"}
KEYS = {"api_keys": ("key-one-1234567890", "key-two-1234567890")}
ONE, TWO = ({"authorization": f"Bearer {key}"} for key in KEYS["api_keys"])


class TwoEngines(FakeEngineClient):
    """Replicas "a" and "b"; "b" may have a smaller pool."""

    def __init__(self, num_pages: tuple[int, int] = (64, 64)) -> None:
        super().__init__(TOKENIZER)
        self.loops: dict[str, EngineLoop] = {}
        self.silent: set[str] = set()
        for name, count in zip("ab", num_pages, strict=True):
            runner = FakeRunner(count, 16, vocab_size=TOKENIZER.vocab_size)
            engine = Engine(runner, None, EngineConfig(max_pins=3))  # type: ignore[arg-type]
            self.loops[name] = EngineLoop(engine)
            self.loops[name].start()

    async def query(self, query: Query, *, replica_id: str | None = None) -> dict[str, Any]:
        asked = [name for name in self.loops if replica_id in (None, name)]
        if self.silent & set(asked) and query.name != "drop_pin":
            raise ReplicaUnavailable("a replica did not answer")
        answers = {name: await asyncio.to_thread(self.loops[name].query, query) for name in asked}
        for answer in answers.values():
            if isinstance(answer, MnemeError):
                raise answer
        return answers

    async def stats(self) -> dict[str, dict[str, Any]]:
        return {name: loop.stats() for name, loop in self.loops.items()}

    def cached(self, name: str, ids: Sequence[int], salt: str = "") -> int:
        """Tokens of a prompt that this replica need not compute."""
        params = SamplingParams(temperature=0, max_tokens=1, seed=0)
        request = GenerationRequest(request_id="r", prompt_token_ids=tuple(ids), sampling=params, salt=salt)
        events: list[TokenEvent] = []
        loop = self.loops[name]
        loop.stop()
        loop.engine.submit(request)
        while not any(event.usage for event in events):
            events += loop.engine.step()
        return next(event.usage.cached_tokens for event in events if event.usage)


Scenario = Callable[[httpx.AsyncClient, TwoEngines], Awaitable[None]]


def run(scenario: Scenario, *, num_pages: tuple[int, int] = (64, 64), **config: Any) -> None:
    async def main() -> None:
        engines = TwoEngines(num_pages)
        model = ServedModel(id="tiny", max_context=1024, created=0)
        app = build_api(engines, [model], TOKENIZER, HttpConfig(**config))
        try:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://api") as client:
                await scenario(client, engines)
        finally:
            for loop in engines.loops.values():
                loop.stop()

    asyncio.run(main())


async def warm(client: httpx.AsyncClient, status: int = 200, headers: Any = None, **body: Any) -> Any:
    response = await client.post("/v1/kv/warm", json={"model": "tiny", **body}, headers=headers)
    assert response.status_code == status, response.text
    return response.json()


async def pins(client: httpx.AsyncClient, headers: Any = None) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (await client.get("/v1/kv/pins", headers=headers)).raise_for_status().json()["data"]
    return found


def test_a_system_prompt_is_warm_on_all_replicas_and_a_chat_shares_it_to_the_token() -> None:
    async def scenario(client: httpx.AsyncClient, engines: TwoEngines) -> None:
        made = await warm(client, messages=[SYSTEM])
        assert (made["object"], made["pinned"], made["replicas"]) == ("kv.pin", True, ["a", "b"])
        assert made["configured"] is False
        assert await pins(client) == [made]
        chat = TOKENIZER.render_chat([SYSTEM, {"role": "user", "content": "世界"}])
        ids = TOKENIZER.encode_rendered(chat)
        assert [(noted, salt) for *_, noted, salt in engines.noted] == [("a", ""), ("b", "")]
        assert engines.noted[0][0] == tuple(ids[: made["num_tokens"]])
        assert engines.cached("a", ids) == engines.cached("b", ids) == made["num_tokens"]

    run(scenario)


def test_a_text_and_ids_are_warmed_until_they_are_deleted() -> None:
    async def scenario(client: httpx.AsyncClient, engines: TwoEngines) -> None:
        text = await warm(client, prompt="the quick brown fox", ttl_s=60)
        ids = await warm(client, prompt_token_ids=[5, 6, 7])
        assert text["num_tokens"] == len(TOKENIZER.encode("the quick brown fox", add_special_tokens=True))
        assert (ids["num_tokens"], ids["expires_in_s"]) == (3, None)
        assert 59 < text["expires_in_s"] <= 60
        assert {pin["id"] for pin in await pins(client)} == {text["id"], ids["id"]}
        deleted = await client.delete(f"/v1/kv/pins/{ids['id']}")
        assert deleted.json() == {"id": ids["id"], "object": "kv.pin.deleted", "deleted": True}
        again = await client.delete(f"/v1/kv/pins/{ids['id']}")
        assert (again.status_code, again.json()["error"]["code"]) == (404, "pin_not_found")
        assert [pin["id"] for pin in await pins(client)] == [text["id"]]

    run(scenario)


def test_one_replica_is_the_one_with_the_most_room() -> None:
    async def scenario(client: httpx.AsyncClient, engines: TwoEngines) -> None:
        first = await warm(client, prompt_token_ids=[5] * 40, replicas=1)
        engines.loops["a"].check_health()  # its figures are those of the step's end
        second = await warm(client, prompt_token_ids=[6] * 40, replicas=1)
        assert (first["replicas"], second["replicas"]) == (["a"], ["b"])
        assert {tuple(pin["replicas"]) for pin in await pins(client)} == {("a",), ("b",)}
        both = await warm(client, prompt_token_ids=[7], replicas=2)
        assert both["replicas"] == ["a", "b"]
        for wrong in (0, 3, -1):
            assert (await warm(client, 400, prompt="a", replicas=wrong))["error"]["param"] == "replicas"

    run(scenario)


def test_a_prompt_may_be_computed_without_a_pin() -> None:
    async def scenario(client: httpx.AsyncClient, engines: TwoEngines) -> None:
        made = await warm(client, prompt_token_ids=[5] * 20, pin=False)
        assert made["pinned"] is False
        assert await pins(client) == []
        assert not engines.loops["a"].engine.pins._entries
        assert engines.cached("a", [5] * 20) == 19

    run(scenario)


def test_what_one_replica_refuses_is_on_none() -> None:
    async def scenario(client: httpx.AsyncClient, engines: TwoEngines) -> None:
        answer = await warm(client, 400, prompt_token_ids=[5] * 100)
        assert (answer["error"]["code"], answer["error"]["param"]) == ("pin_refused", "pin")
        assert "pinning 7 pages more would leave 1 unpinned; at least 4 must be" in answer["error"]["message"]
        assert await pins(client) == []
        assert all(not loop.engine.pins._entries for loop in engines.loops.values())
        too_long = await warm(client, 400, prompt_token_ids=[5] * 200, pin=False)
        assert (too_long["error"]["code"], too_long["error"]["param"]) == (
            "context_length_exceeded",
            "prompt_token_ids",
        )
        assert all(not loop.engine.pins._entries for loop in engines.loops.values())

    run(scenario, num_pages=(64, 8))


def test_a_replica_that_does_not_answer_is_a_503_and_leaves_no_pin() -> None:
    async def scenario(client: httpx.AsyncClient, engines: TwoEngines) -> None:
        engines.silent.add("b")
        await warm(client, 503, prompt="a")
        assert all(not loop.engine.pins._entries for loop in engines.loops.values())

    run(scenario)


def test_a_prompt_that_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv, "_WARM_TIMEOUT_S", 0.05)

    async def scenario(client: httpx.AsyncClient, engines: TwoEngines) -> None:
        blocked = asyncio.Event()
        asked = engines.query

        async def query(query: Query, *, replica_id: str | None = None) -> dict[str, Any]:
            if query.name != "drop_pin":
                await blocked.wait()
            return await asked(query, replica_id=replica_id)

        engines.query = query  # type: ignore[method-assign]
        answer = await warm(client, 503, prompt="a")
        assert "not computed within 0.05 s" in answer["error"]["message"]

    run(scenario)


def test_pins_are_the_key_s_own_and_so_many() -> None:
    async def scenario(client: httpx.AsyncClient, engines: TwoEngines) -> None:
        mine = [await warm(client, headers=ONE, prompt="a b", cache_salt=salt) for salt in ("x", "y", None)]
        answer = await warm(client, 400, headers=ONE, prompt="c", cache_salt="z")
        assert "may have 3 pins" in answer["error"]["message"]
        assert len(await pins(client, ONE)) == 3
        assert await pins(client, TWO) == []
        assert (await client.delete(f"/v1/kv/pins/{mine[0]['id']}", headers=TWO)).status_code == 404
        assert (await client.get("/v1/kv/pins")).status_code == 401
        await warm(client, headers=TWO, prompt="a b")
        salts = {salt for *_, salt in engines.noted}
        assert len(salts) == 4
        assert len({pin["id"] for pin in mine}) == 3

    run(scenario, **KEYS)


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 400, "prompt"),
        ({"prompt": "a", "prompt_token_ids": [5]}, 400, "prompt"),
        ({"prompt": ""}, 400, "prompt"),
        ({"prompt_token_ids": []}, 400, "prompt_token_ids"),
        ({"prompt_token_ids": [10**9]}, 400, "prompt_token_ids"),
        ({"prompt_token_ids": [5] * 2000}, 400, "prompt_token_ids"),
        ({"prompt_token_ids": [True]}, 400, "prompt_token_ids[0]"),
        ({"prompt_token_ids": "a"}, 400, "prompt_token_ids"),
        ({"prompt_token_ids": 7}, 400, "prompt_token_ids"),
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "user"}]}, 400, "messages[0].content"),
        ({"prompt": "a", "ttl_s": 0}, 400, "ttl_s"),
        ({"prompt": "a", "ttl_s": 1e12}, 400, "ttl_s"),
        ({"prompt": "a", "pin": "yes"}, 400, "pin"),
        ({"prompt": "a", "replicas": "some"}, 400, "replicas"),
        ({"prompt": "a", "replicas": True}, 400, "replicas"),
        ({"prompt": "a", "cache_salt": ""}, 400, "cache_salt"),
        ({"prompt": "a", "model": "other"}, 404, "model"),
        ({"messages": [SYSTEM], "tools": [{"type": "function"}]}, 400, "tools"),
    ],
)
def test_what_breaks_a_rule_is_named(body: dict[str, Any], status: int, param: str) -> None:
    async def scenario(client: httpx.AsyncClient, engines: TwoEngines) -> None:
        assert (await warm(client, status, **body))["error"]["param"] == param

    run(scenario)
