"""Any traffic over engines that share a cache tier, and any fault of it: each request computes what it would alone."""

from __future__ import annotations

import contextlib
import itertools
import random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mneme.cachetier.chunk.header import ChunkHeader
from mneme.cachetier.names import Miss
from mneme.errors import PinRefused
from mneme.replicas.engine.engine import Engine
from mneme.replicas.forest.paths import Path
from mneme.replicas.request import GenerationRequest, SamplingParams, TokenEvent
from mneme.replicas.truncation import Truncation
from tests.budget import examples
from tests.replicas.chunk_stores import FakeStore
from tests.replicas.connector.played_chunks import PlayedCache, make_played_engine
from tests.replicas.fake_runner import FakeRunner, continuation, lose
from tests.replicas.schedule.test_engine_policy import make_engine

NUM_STEPS = 40  # in which requests arrive
TRUNCATIONS = [None, None, None, Truncation(), Truncation(strategy="recompute")]


# One request, of one or more choices.
arrivals = st.builds(
    SimpleNamespace,
    step=st.integers(0, NUM_STEPS),
    engine=st.integers(0, 1),
    ids=st.builds(  # the beginning of one of a few texts, and then its own
        lambda history, length, own: [(7 * i + i // (2 + history)) % 5 for i in range(length)] + own or [0],
        st.integers(0, 1), st.integers(0, 40), st.lists(st.integers(0, 1), max_size=6),
    ),
    max_tokens=st.integers(1, 12),
    salt=st.sampled_from(["", "", "tenant"]),
    session=st.sampled_from([None, None, "s", "t"]),
    num_choices=st.integers(1, 3),
    abort_after=st.one_of(st.none(), st.none(), st.integers(0, 8)),  # steps
    truncation=st.sampled_from(TRUNCATIONS),
)  # fmt: skip


# An engine's pool, and how its cache tier behaves.
pools = st.builds(
    SimpleNamespace,
    num_pages=st.integers(18, 40),
    page_size=st.sampled_from([4, 8]),
    num_host_pages=st.sampled_from([0, 0, 6, 40]),
    window=st.sampled_from([None, None, None, 5, 11]),
    max_context=st.sampled_from([48, 10_000]),
    sharing=st.sampled_from([True, True, True, False]),
    max_batch_tokens=st.integers(16, 64),
    max_running=st.just(8),
    eviction=st.just("lru"),
    edge=st.sampled_from(["host", "disk", "peer_host"]),
    read_buffer_bytes=st.sampled_from([0, 300, 1 << 20]),
    step_chunks=st.sampled_from([None, 1, 2]),  # that one step loads beside others
    runs_ahead=st.booleans(),
    seed=st.integers(0, 2**16),
    # of reads that are misses, of loads that are late, of steps in which something else fails
    fault_share=st.sampled_from([0.0, 0.05, 0.3]),
)


@pytest.mark.at_length
@settings(max_examples=examples(100, at_length=300))
@given(st.lists(arrivals, min_size=1, max_size=10), pools)
def test_any_traffic_over_a_cache_tier(traffic: list[Any], pool: Any) -> None:
    Play(traffic, pool).run()


class Play:
    """Two engines of one tenant pool over one store, or, where the pool has no `edge`, without any."""

    def __init__(self, traffic: list[Any], pool: Any) -> None:
        self.traffic, self.pool, self.chance = traffic, pool, random.Random(pool.seed)
        self.store = FakeStore(edge=pool.edge, fault=self._fault)  # type: ignore[arg-type]
        buffer = {"read_buffer_bytes": pool.read_buffer_bytes, "step_chunks": pool.step_chunks}
        self.caches = [PlayedCache(self.store, pool.page_size, **buffer) for _ in range(2 if pool.edge else 0)]
        for cache in self.caches:
            cache.loader.is_late = lambda: self._fails()
        self.engines = [self._engine(index) for index in range(2)]
        self.events: list[TokenEvent] = []
        self.expected: dict[str, Any] = {}
        self.num_failed_steps, self.least_capacity = 0, pool.max_context
        self.pins: list[tuple[Engine, Path]] = []

    def run(self) -> None:
        for step in itertools.count():
            for number, arrival in enumerate(self.traffic):
                self._arrive(f"r{number}", arrival, step)
            for index, engine in enumerate(self.engines):
                for cache in self.caches[index : index + 1]:
                    cache.now_s += self.chance.choice([0.1, 1, 1, 20])
                    cache.play(self.chance.choice([0, 1, None]), self.chance.choice([0, 0, 1, None]))
                self._disturb(engine)
                self._step(engine)
                engine.forest.check()
            if step > NUM_STEPS + 8 and not any(engine.has_work for engine in self.engines):
                break
            if step > NUM_STEPS:  # a pin may be all that keeps a prompt from its pages
                self._unpin()
            assert step < 4_000, "some request never ends"
        self._unpin()
        self._check_answers()
        for cache in self.caches:
            cache.play()
            assert (cache.num_open, cache.cache.stats()["read_buffer_bytes"]) == (0, 0)
        for engine in self.engines:
            assert (engine.forest.device.num_in_use, engine.in_flight) == (0, {})
            engine.close()
        assert self.store.num_open == 0
        assert not self.store.waiting

    def _arrive(self, name: str, arrival: Any, step: int) -> None:
        engine = self.engines[arrival.engine]
        names = [f"{name}.{choice}" for choice in range(arrival.num_choices)]
        if arrival.step == step:
            for choice, each in enumerate(names):
                with contextlib.suppress(Exception) if self._is_too_long(engine, arrival) else contextlib.nullcontext():
                    engine.submit(self._request(each, choice, arrival))
                    self.expected[each] = arrival
        if arrival.abort_after is not None and arrival.step + arrival.abort_after == step:
            engine.abort(names[0])

    def _request(self, name: str, choice: int, arrival: Any) -> GenerationRequest:
        return GenerationRequest(
            request_id=name,
            prompt_token_ids=tuple(arrival.ids),
            sampling=SamplingParams(temperature=0, max_tokens=arrival.max_tokens),
            salt=arrival.salt,
            session_id=arrival.session,
            choice_index=choice,
            truncation=self._truncation(arrival),
        )

    def _truncation(self, arrival: Any) -> Truncation | None:
        if self.pool.window is not None or (arrival.session is None and arrival.truncation == Truncation()):
            return None
        return arrival.truncation

    def _is_too_long(self, engine: Engine, arrival: Any) -> bool:
        return len(arrival.ids) + arrival.max_tokens > engine.capacity

    def _step(self, engine: Engine) -> None:
        self.least_capacity = min(self.least_capacity, engine.capacity)
        try:
            self.events += engine.step()
        except RuntimeError:
            self.num_failed_steps += 1
            self.events += engine.fail_all("the step failed")

    def _disturb(self, engine: Engine) -> None:
        """What else may happen between two steps."""
        if self.pool.sharing and self.chance.random() < self.pool.fault_share / 2:
            lose(engine, self.chance.randrange(100))
        if self.chance.random() < self.pool.fault_share / 4:
            engine.runner.num_failing_transfers = 1
        if self.chance.random() < self.pool.fault_share / 20:
            engine.runner.fail_next = True
        if self.pool.sharing and self.chance.random() < 0.05:
            with contextlib.suppress(PinRefused):
                self.pins.append((engine, engine.pins.pin_prefix("", self.chance.choice(self.traffic).ids)))
        if self.pins and self.chance.random() < 0.3:
            self._unpin()

    def _unpin(self) -> None:
        for engine, pin in self.pins:
            engine.scheduler.unpin(pin)
        self.pins.clear()

    def _check_answers(self) -> None:
        for name, arrival in self.expected.items():
            events = [event for event in self.events if event.request_id == name]
            got = [token for event in events for token in event.token_ids]
            ends = [event.finish_reason for event in events if event.finish_reason is not None]
            assert len(ends) == 1, name
            if ends == ["error"]:
                is_refused = self._is_too_long(self.engines[arrival.engine], arrival)  # when its session's turn came
                assert self.num_failed_steps or self.pool.fault_share or is_refused, name
            if not self._is_truncated(arrival):
                assert got == continuation(arrival.ids, arrival.max_tokens, 5)[: len(got)]
            is_whole = self._truncation(arrival) is None  # then it has what its prompt leaves of the window
            left = self.pool.max_context - len(arrival.ids) if is_whole else arrival.max_tokens
            assert len(got) == min(arrival.max_tokens, left) or ends[0] in ("abort", "error")

    def _is_truncated(self, arrival: Any) -> bool:
        """Or may have been: a pin leaves less room as long as it lasts."""
        num_tokens = len(arrival.ids) + arrival.max_tokens
        return self._truncation(arrival) is not None and num_tokens > self.least_capacity

    def _fault(self, header: ChunkHeader, layer: int) -> Miss | None:
        return self.chance.choice([Miss.BAD_CHECKSUM, Miss.SHORT, Miss.ABSENT]) if self._fails() else None

    def _fails(self) -> bool:
        return self.chance.random() < self.pool.fault_share

    def _engine(self, index: int) -> Engine:
        pool, clock = self.pool, itertools.count().__next__
        kind = {"num_host_pages": pool.num_host_pages, "window": pool.window, "runs_ahead": pool.runs_ahead}
        runner = FakeRunner(pool.num_pages, pool.page_size, max_context=pool.max_context, **kind)
        options = {name: getattr(pool, name) for name in ("max_batch_tokens", "max_running", "eviction")}
        options["prefix_sharing"] = pool.sharing
        if not self.caches:
            return make_engine(runner=runner, clock=clock, **options)
        return make_played_engine(runner, self.caches[index], clock, **options)
