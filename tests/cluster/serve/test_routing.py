"""Requests follow the KV of real engines, whose reports come over the token stream of each of two ingresses."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from mneme.cluster.serve.client import RayEngineClient
from mneme.cluster.serve.replica import ReplicaServer
from mneme.replicas.config import EngineConfig
from mneme.replicas.engine.commands import delete_sequence_pages
from mneme.replicas.engine.engine import Engine
from mneme.replicas.engine.loop import EngineLoop
from mneme.replicas.request import GenerationRequest, SamplingParams
from mneme.router.prefix_index import SENT_S
from mneme.router.score import RouterConfig
from tests.fakes.direct_calls import DirectCalls
from tests.replicas.fake_runner import FakeRunner

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
            self.calls._servers[name] = ReplicaServer(name, loop)  # in the place of the fake one
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
        (route,) = client.routes("", asked.request_id.removesuffix(".0"))
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


def test_prefixes_and_sessions_are_found_again_by_every_ingress() -> None:
    async def scenario(cluster: Cluster) -> None:
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

    run(scenario)


def test_a_replica_counts_what_it_alone_has_of_prompts() -> None:
    """What it saves is lost with it; what another one has too is not."""

    async def scenario(cluster: Cluster) -> None:
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

    run(scenario)


def test_one_prompt_asked_for_many_times_at_once_is_computed_once_in_the_cluster() -> None:
    """Before any answer: the router sends the others after the first, and the engine lets them follow it."""

    async def scenario(cluster: Cluster) -> None:
        prefix = list(range(512))
        answers = await asyncio.gather(*(cluster.ask([*prefix, 600 + number]) for number in range(6)))
        assert len({where for where, *_ in answers}) == 1
        computed = sum(loop.engine.num_tokens["recomputed"] for loop in cluster.loops.values())
        assert computed == 512 + 6

    run(scenario)


def test_evictions_are_known() -> None:
    async def scenario(cluster: Cluster) -> None:
        prefix = list(range(256))
        first, *_ = await cluster.ask(prefix)
        await cluster.until_known([*prefix, 1], 256, first)
        cluster.ingresses[0].set_replicas({first})
        for start in range(1000, 4000, 500):  # more than its pool holds
            await cluster.ask(list(range(start, start + 480)))
        cluster.ingresses[0].set_replicas(cluster.loops)
        await cluster.until_known([*prefix, 1], 0, first)
        cluster.forget_what_was_sent()
        assert (await cluster.ask([*prefix, 1], ingress=1))[1:] == (0, 0)

    run(scenario)


def test_deletions_are_known() -> None:
    async def scenario(cluster: Cluster) -> None:
        prefix = list(range(256))
        first, *_ = await cluster.ask(prefix)
        await cluster.until_known([*prefix, 1], 256, first)
        await cluster.ingresses[0].query(delete_sequence_pages("", prefix, None))
        await cluster.until_known([*prefix, 1], 0, first)

    run(scenario)
