"""Requests follow the KV of real engines, whose reports come over the token stream of each of two ingresses."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from mneme.cluster.serve import link, replica
from mneme.cluster.serve.autoscaling import LoadMeter
from mneme.cluster.serve.ray_client import RayEngineClient
from mneme.cluster.serve.replica import ReplicaServer
from mneme.replicas.config import EngineConfig
from mneme.replicas.engine import loop as loop_module
from mneme.replicas.engine import reporter
from mneme.replicas.engine.engine import Engine
from mneme.replicas.engine.loop import EngineLoop
from mneme.replicas.queries import DeleteSequencePages, GetSession
from mneme.replicas.request import GenerationRequest, SamplingParams
from mneme.router.chooser import SILENT_S
from mneme.router.prefix_index import SENT_S
from mneme.router.score import RouterConfig
from tests.cluster.serve.scenarios import over
from tests.fakes.direct_calls import DirectCalls
from tests.replicas.fake_runner import FakeRunner

pytestmark = pytest.mark.engine

NUM_PAGES, PAGE_SIZE, VOCAB = 64, 16, 4096
Scenario = Callable[["Cluster"], Awaitable[None]]


class Cluster:
    """Two engines, and two ingresses whose clock can be put forward."""

    def __init__(self) -> None:
        self.later_s = 0.0
        self.calls = DirectCalls()
        self.loops: dict[str, EngineLoop] = {}
        for name in "ab":
            self.calls.add(name).stop()
            runner = FakeRunner(NUM_PAGES, PAGE_SIZE, vocab_size=VOCAB)
            loop = EngineLoop(Engine(runner, None, EngineConfig()))  # type: ignore[arg-type]
            loop.start()
            self.loops[name] = loop
            self.calls.servers[name] = ReplicaServer(name, loop)  # in the place of the fake one
        self.ingresses = [RayEngineClient(self.calls, name=each, router=RouterConfig()) for each in ("one", "two")]
        for ingress in self.ingresses:
            ingress.chooser.clock = lambda: time.monotonic() + self.later_s
            ingress.set_replicas(self.loops)

    async def ask(self, ids: list[int], *, ingress: int = 0, session_id: str | None = None) -> tuple[str, int, int]:
        """Return who computed a prompt, and how much of it was thought and found to be there."""
        asked = GenerationRequest(
            request_id=f"{time.monotonic_ns()}.0",
            prompt_token_ids=tuple(ids),
            sampling=SamplingParams(temperature=0, max_tokens=2, seed=0),
            session_id=session_id,
        )
        client = self.ingresses[ingress]
        usages = [event.usage async for event in client.generate([asked])]
        *_, route = client.routes("", asked.request_id.removesuffix(".0"))
        chosen = next(each for each in route["candidates"] if each["replica"] == route["replica"])
        assert usages[0] is not None
        return route["replica"], chosen["tokens"]["matched"], usages[0].cached_tokens

    def forget_what_was_sent(self) -> None:
        self.later_s += 3 * SENT_S

    async def until_known(self, ids: list[int], num_tokens: int, where: str) -> None:
        """Wait until both ingresses have heard that a replica has so much of a prompt."""
        for ingress in self.ingresses:
            others = [name for name in self.loops if name != where]
            while True:
                reservation = ingress.chooser.select_and_reserve(ids, exclude=others)
                if reservation is not None:
                    reservation.release()
                    if reservation.matched_tokens == num_tokens:
                        break
                self.forget_what_was_sent()
                await asyncio.sleep(0.005)


def run(scenario: Scenario) -> None:
    async def main() -> None:
        cluster = Cluster()
        try:
            async with asyncio.timeout(60):
                await scenario(cluster)
        finally:
            await asyncio.gather(*(ingress.close() for ingress in cluster.ingresses))
            for loop in cluster.loops.values():
                loop.stop()

    asyncio.run(main())


@over(run)
async def test_prefixes_and_sessions_are_found_again_by_every_ingress(cluster: Cluster) -> None:
    prefix = list(range(256))
    first, matched, _ = await cluster.ask([*prefix, 1, 2, 3])
    assert matched == 0
    await cluster.until_known(prefix, 256, first)
    for ingress in (0, 1):
        cluster.forget_what_was_sent()
        where, matched, found = await cluster.ask([*prefix, 7 + ingress, 8], ingress=ingress)
        assert (where, matched) == (first, 256)
        assert found >= 256
    turn = list(range(1000, 1200))
    home, *_ = await cluster.ask(turn, session_id="s")
    await cluster.until_known(turn, 192, home)
    where, matched, _ = await cluster.ask([*turn, 5, 6], ingress=1, session_id="s")
    assert (where, matched) == (home, 192)


@over(run)
async def test_turns_of_a_session_over_two_ingresses_are_one_after_the_other(
    cluster: Cluster,
) -> None:
    """The replica that has the session is the owner of its turns: whichever ingress takes one in asks who that is."""

    def turn(number: int, *, append: bool = True) -> GenerationRequest:
        return GenerationRequest(
            request_id=f"turn-{number}",
            prompt_token_ids=(1000 + number,) * 40,
            sampling=SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, seed=0),
            session_id="s",
            append=append,
        )

    async def ask(number: int, *, append: bool = True) -> int:
        client = cluster.ingresses[number % 2]
        usages = [event.usage async for event in client.generate([turn(number, append=append)])]
        return usages[0].prompt_tokens  # type: ignore[union-attr]

    await ask(0, append=False)
    for others in (list(range(2000, 2400)), list(range(3000, 3400))):  # the home is the busier one
        await cluster.ask(others, ingress=1)
    seen = await asyncio.gather(*(ask(number) for number in range(1, 9)))
    assert sorted(seen) == [48 * number + 40 for number in range(1, 9)]  # each one saw all that came before it
    known = await cluster.ingresses[1].query(GetSession(("", "s")))
    (session,) = (each for each in known.values() if each is not None)
    assert (session["turns"], session["tokens"]) == (9, 9 * 48)


@over(run)
async def test_a_replica_counts_what_it_alone_has_of_prompts(cluster: Cluster) -> None:
    """What it saves is lost with it; what another one has too is not."""
    prefix = list(range(256))
    first, *_ = await cluster.ask([*prefix, 1, 2, 3])
    (other,) = cluster.loops.keys() - {first}

    def counted(name: str) -> int:
        return sum(loop.engine.num_tokens[name] for loop in cluster.loops.values())

    await cluster.until_known(prefix, 256, first)
    await cluster.ask([*prefix, 4])
    assert (counted("device"), counted("alone")) == (256, 256)
    cluster.ingresses[0].set_replicas({other})
    await cluster.ask([*prefix, 5])
    cluster.ingresses[0].set_replicas(cluster.loops)
    for name in cluster.loops:
        await cluster.until_known([*prefix, 6], 256, name)
    for number in range(2):
        await cluster.ask([*prefix, 7 + number])
    assert (counted("device"), counted("alone")) == (3 * 256, 256)


@over(run)
async def test_one_prompt_asked_for_many_times_at_once_is_computed_once_in_the_cluster(cluster: Cluster) -> None:
    """Before any answer: the router sends the others after the first, and the engine lets them follow it."""
    prefix = list(range(512))
    answers = await asyncio.gather(*(cluster.ask([*prefix, 600 + number]) for number in range(6)))
    assert len({where for where, *_ in answers}) == 1
    computed = sum(loop.engine.num_tokens["recomputed"] for loop in cluster.loops.values())
    assert computed == 512 + 6


@over(run)
async def test_evictions_and_deletions_are_known(cluster: Cluster) -> None:
    prefix = list(range(256))
    first, *_ = await cluster.ask(prefix)
    await cluster.until_known([*prefix, 1], 256, first)
    cluster.ingresses[0].set_replicas({first})
    for start in range(1000, 4000, 500):  # more than its pool holds
        await cluster.ask(list(range(start, start + 480)))
    cluster.ingresses[0].set_replicas(cluster.loops)
    await cluster.until_known([*prefix, 1], 0, first)
    cluster.forget_what_was_sent()
    home, *found = await cluster.ask([*prefix, 1], ingress=1)
    assert found == [0, 0]
    await cluster.until_known([*prefix, 2], 256, home)
    await cluster.ingresses[0].query(DeleteSequencePages("", prefix, None))
    await cluster.until_known([*prefix, 2], 0, home)


@contextlib.asynccontextmanager
async def hanging(loop: EngineLoop) -> AsyncIterator[None]:
    """Stop the engine's thread meanwhile."""
    begun, may_end = threading.Event(), threading.Event()

    def hang(_: Engine) -> None:
        begun.set()
        may_end.wait(60)

    asked = asyncio.create_task(asyncio.to_thread(loop.between_steps, hang))
    await asyncio.to_thread(begun.wait)
    try:
        yield
    finally:
        may_end.set()
        await asked


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


@over(run)
async def test_a_replica_whose_thread_hangs_gets_no_requests_and_loses_what_it_had_to_others(
    cluster: Cluster, *, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_module, "STALLED_S", 1.0)
    monkeypatch.setattr(replica, "ALIVE_S", 0.02)
    ingress = cluster.ingresses[0]
    home, *_ = await cluster.ask([1, 2, 3], session_id="s")
    (other,) = cluster.loops.keys() - {home}
    await until(lambda: ingress.num_ready() == 2)
    async with hanging(cluster.loops[home]):
        begun = asyncio.create_task(cluster.ask([1, 2, 3, 4], session_id="s"))
        await until(lambda: ingress.num_ready() == 1)
        assert {(await cluster.ask([number]))[0] for number in range(4)} == {other}
        assert (await begun)[0] == other
        assert cluster.loops[home].stats()["requests"]["running"] == 0  # so old figures look like an idle replica's
    await until(lambda: ingress.num_ready() == 2)


@over(run)
async def test_a_replica_whose_reports_are_lost_is_not_taken_for_idle(
    cluster: Cluster, *, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "REPORTS_LOST_S", 1.0)
    monkeypatch.setattr(replica, "ALIVE_S", 0.02)
    for module in (loop_module, reporter):  # so that the other, idle too, is always heard of
        monkeypatch.setattr(module, "IDLE_REPORT_S", 0.05)
    await cluster.ask([1, 2, 3])
    monkeypatch.setattr(cluster.loops["a"], "_report", lambda: None)
    ingress, heard = cluster.ingresses[0], asyncio.Event()
    note = ingress.chooser.mark_silent

    def note_and_tell(_: object, name: str) -> None:
        note(name)
        if name == "a":
            heard.set()

    monkeypatch.setattr(type(ingress.chooser), "mark_silent", note_and_tell)
    async with asyncio.timeout(30):
        await heard.wait()
    cluster.later_s += 2 * SILENT_S
    assert ingress.num_ready() == 2
    assert {(await cluster.ask([number] * 70))[0] for number in range(10, 20)} == {"b"}


@over(run)
async def test_a_stream_of_which_nothing_comes_is_lost_and_opened_again(
    cluster: Cluster, *, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a process that was stopped, or a host that cannot be reached."""
    monkeypatch.setattr(link, "HEARD_S", 0.2)
    monkeypatch.setattr(replica, "ALIVE_S", 0.02)
    ingress = cluster.ingresses[0]
    await until(lambda: ingress.num_ready() == 2)
    cluster.calls.frozen.add("a")
    await until(lambda: ingress.num_ready() == 1)
    assert {(await cluster.ask([number]))[0] for number in range(4)} == {"b"}
    cluster.calls.frozen.clear()
    await until(lambda: ingress.num_ready() == 2)
    opened = cluster.calls.num_opened
    await asyncio.sleep(0.5)  # more than `HEARD_S` without any request
    assert (cluster.calls.num_opened, ingress.num_ready()) == (opened, 2)


@over(run)
async def test_an_answer_whose_only_message_is_lost_is_missed_at_the_next_report(cluster: Cluster) -> None:
    """Which every replica makes, an idle one too; they are numbered with the answers."""
    client = cluster.ingresses[0]
    client.set_replicas({"a"})
    await cluster.ask([1, 2, 3])
    asked = GenerationRequest(
        request_id="lost.0",
        prompt_token_ids=(4, 5, 6),
        sampling=SamplingParams(temperature=0, max_tokens=1, seed=0),
    )
    cluster.calls.drop_next_message("a")
    opened = cluster.calls.num_opened
    events = [event async for event in client.generate([asked])]
    assert [event.finish_reason for event in events] == ["length"]
    assert cluster.calls.num_opened > opened


@over(run)
async def test_an_engine_that_is_stalled_reports_no_load_to_the_autoscaler(
    cluster: Cluster, *, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = replica.EngineReplica.__new__(replica.EngineReplica)
    server._engine, server._meter = cluster.loops["a"], LoadMeter()
    assert server.record_autoscaling_stats()["num_requests"] == 0
    async with hanging(cluster.loops["a"]):
        monkeypatch.setattr(loop_module, "STALLED_S", 0.0)
        assert server.record_autoscaling_stats() == {}
