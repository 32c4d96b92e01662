"""`LocalEngineClient`: the interface over one engine of this process, which is a fake one here."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from mneme.cluster.serve import local_client
from mneme.cluster.serve.engine_client import Condition
from mneme.cluster.serve.local_client import NAME, LocalEngineClient
from mneme.errors import InvalidRequest, MnemeError, Overloaded, ReplicaUnavailable
from mneme.replicas.queries import GetSession
from mneme.replicas.request import GenerationRequest, SamplingParams, TokenEvent
from tests.cluster.serve.scenarios import over
from tests.fakes.fake_engine import FakeEngineLoop, expected_tokens

LONG = 100_000


class Engine(FakeEngineLoop):
    """One whose submits wait for leave, and which notes what was submitted at once, and whether its thread lives."""

    def __init__(self, **options: Any) -> None:
        super().__init__(step_s=0.001, **options)
        self.may_submit = threading.Event()
        self.may_submit.set()
        self.submits: list[int] = []
        self.is_dead = False

    def submit_many(self, requests: Sequence[GenerationRequest]) -> list[MnemeError | None]:
        self.submits.append(len(requests))
        assert self.may_submit.wait(30)
        return super().submit_many(requests)

    def check_health(self) -> None:
        if self.is_dead:
            raise ReplicaUnavailable("this replica is stopping")


def asked(name: str, num: int = 8, prompt: Sequence[int] = (1, 2, 3)) -> GenerationRequest:
    return GenerationRequest(
        request_id=name, prompt_token_ids=tuple(prompt), sampling=SamplingParams(max_tokens=num, temperature=0, seed=0)
    )


async def events_of(client: LocalEngineClient, *requests: GenerationRequest) -> list[TokenEvent]:
    return [event async for event in client.generate(requests)]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)


def run(scenario: Callable[[Engine, LocalEngineClient], Awaitable[None]], **options: Any) -> list[str]:
    """Run it over an open client, which is stopped behind it; returns the failures that were reported."""
    engine, failures = Engine(**options), list[str]()
    engine.start()

    async def main() -> None:
        client = LocalEngineClient(engine, on_failure=failures.append)  # type: ignore[arg-type]
        assert client.num_ready() == 0
        await client.open()
        await scenario(engine, client)
        await client.stop(0)
        assert client.num_ready() == 0

    try:
        asyncio.run(main())
    finally:
        engine.stop()
    return failures


def test_choices_come_token_by_token_until_each_has_ended() -> None:
    async def scenario(engine: Engine, client: LocalEngineClient) -> None:
        events = await events_of(client, asked("a.0", 3), asked("a.1", 5))
        for name, num in (("a.0", 3), ("a.1", 5)):
            own = [event for event in events if event.request_id == name]
            assert [token for event in own for token in event.token_ids] == expected_tokens((1, 2, 3), num)
            assert [event.finish_reason for event in own] == [None] * (num - 1) + ["length"]
        assert (client.replica_ids(), client.num_ready(), client.num_wanted()) == ([NAME], 1, 1)
        assert (await client.stats())[NAME]["finished"] == 2

    assert run(scenario) == []


@over(run)
async def test_requests_that_come_while_the_engine_is_busy_are_submitted_at_once(
    engine: Engine, client: LocalEngineClient
) -> None:
    engine.may_submit.clear()
    tasks = [asyncio.create_task(events_of(client, asked("0")))]
    await until(lambda: engine.submits == [1])
    tasks += [asyncio.create_task(events_of(client, asked(str(i)))) for i in range(1, 40)]
    await asyncio.sleep(0)  # they have begun
    engine.may_submit.set()
    await asyncio.gather(*tasks)
    assert engine.submits == [1, 39]


@over(run, max_running=1)
async def test_a_refused_choice_refuses_all_and_says_which(engine: Engine, client: LocalEngineClient) -> None:
    with pytest.raises(InvalidRequest) as refused:
        await events_of(client, asked("a.0", LONG), asked("a.1", prompt=()))
    assert refused.value.request_id == "a.1"
    await until(lambda: not engine.stats()["in_flight"])
    with pytest.raises(Overloaded):
        await events_of(client, asked("b.0", LONG), asked("b.1", LONG))
    await until(lambda: not engine.stats()["in_flight"])


@over(run)
async def test_who_leaves_aborts_what_runs(engine: Engine, client: LocalEngineClient) -> None:
    events = client.generate([asked("a", LONG)])
    await anext(events)
    await events.aclose()
    await until(lambda: not engine.stats()["in_flight"])


@over(run)
async def test_who_leaves_before_the_engine_has_answered_aborts_it_too(
    engine: Engine, client: LocalEngineClient
) -> None:
    engine.may_submit.clear()
    task = asyncio.create_task(events_of(client, asked("a", LONG)))
    await until(lambda: engine.submits == [1])
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    engine.may_submit.set()
    await until(lambda: len(engine.admitted) == 1)
    await until(lambda: not engine.stats()["in_flight"])


@over(run)
async def test_a_stop_lets_answers_end_and_then_ends_them_with_an_error(
    engine: Engine, client: LocalEngineClient
) -> None:
    tasks = [asyncio.create_task(events_of(client, asked(name, num))) for name, num in (("a", 50), ("b", LONG))]
    await until(lambda: len(engine.admitted) == 2)
    stopping = asyncio.create_task(client.stop(5.0))
    short = await tasks[0]
    assert short[-1].finish_reason == "length"
    with pytest.raises(ReplicaUnavailable, match="the server is stopping"):
        await events_of(client, asked("c"))
    engine.hand_over()  # the rest of the grace is not waited for
    long = await tasks[1]
    assert (long[-1].finish_reason, long[-1].error) == ("error", "the server is stopping")
    await stopping


def test_an_engine_that_has_ended_ends_its_answers_and_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_client, "HEALTH_S", 0.001)

    async def scenario(engine: Engine, client: LocalEngineClient) -> None:
        task = asyncio.create_task(events_of(client, asked("a", LONG)))
        await until(lambda: len(engine.admitted) == 1)
        engine.is_dead = True
        assert (await task)[-1].finish_reason == "error"
        with pytest.raises(ReplicaUnavailable):
            await events_of(client, asked("b"))

    assert run(scenario) == ["this replica is stopping"]


@over(run)
async def test_questions_are_the_engines_and_their_errors_are_raised(engine: Engine, client: LocalEngineClient) -> None:
    engine.sessions["", "s"] = 1.0
    assert await client.query(GetSession(("", "s"))) == {NAME: {"version": 0, "idle_s": 1.0}}
    engine.refusals.append(Overloaded("later"))
    with pytest.raises(Overloaded):
        await client.query(GetSession(("", "s")), replica_id=NAME)
    with pytest.raises(ReplicaUnavailable):
        await client.query(GetSession(("", "s")), replica_id="another")


def test_while_the_engine_is_stalled_it_is_not_ready_and_requests_wait() -> None:
    async def scenario(engine: Engine, client: LocalEngineClient) -> None:
        assert await client.condition() == Condition("ready")
        engine.is_stalled = True
        assert (client.num_ready(), (await client.condition()).state) == (0, "stalled")
        engine.may_submit.clear()
        begun = asyncio.create_task(events_of(client, asked("a", 3)))
        await until(lambda: engine.submits == [1])
        engine.is_stalled = False
        engine.may_submit.set()
        assert (await begun)[-1].finish_reason == "length"
        assert client.num_ready() == 1
        await client.stop(0)
        assert (await client.condition()).state == "failed"

    assert run(scenario) == []
