"""Loads of an engine without their threads: how they end, what they read ahead, how long a step waits for them."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from mneme.cachetier.names import Edge
from mneme.cachetier.policy.load_controller import LoadController, LoadPlan
from mneme.cachetier.store import ChainQuery
from mneme.primitives import Task
from mneme.replicas.connector.loads import Loads
from mneme.replicas.connector.step_load import StepLoad
from mneme.replicas.forest.moves import Graft, GraftPiece
from mneme.replicas.load import Load, LoadState, ReadBudget
from tests.cachetier.chunks import CHUNK_TOKENS, FINGERPRINT, LINEAGE, chain_of
from tests.cachetier.cost_cases import PlayedClock
from tests.replicas.chunk_stores import FakeStore, SlowRows
from tests.replicas.connector.played_chunks import PlayedWorkers

IDS = list(range(3 * CHUNK_TOKENS))
NUM_LAYERS = FINGERPRINT.layout.num_layers
TIMEOUT_S = 30.0


class Inline:
    """`Workers` without threads."""

    def __init__(self, name: str, num_threads: int) -> None:
        pass

    def run(self, task: Task) -> None:
        task()

    def close(self, timeout_s: float) -> None:
        pass


class Costs(SlowRows):
    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[Edge, int, float, float]] = []
        self.meanwhile: Any = lambda: None

    def learn_lookup(self, seconds: float) -> None:
        pass

    def learn_edge(self, edge: Any, num_bytes: int, num_chunks: float, seconds: float) -> None:
        self.told.append((edge, num_bytes, num_chunks, seconds))
        self.meanwhile()


def make_loads(store: FakeStore, costs: Costs, clock: PlayedClock, make: Any = Inline) -> Loads:
    """The store has all of `IDS`."""
    store.chunks = {chunk.header.key: chunk for chunk in chain_of(IDS)}
    controller = LoadController(costs, num_layers=NUM_LAYERS)
    return Loads(store, controller, costs, clock=clock, make_workers=make)


def make_played(store: FakeStore, costs: Costs, clock: PlayedClock, workers: dict[str, PlayedWorkers]) -> Loads:
    """Threads run when the test says so."""
    return make_loads(store, costs, clock, lambda name, _: workers.setdefault(name, PlayedWorkers()))


def begin(loads: Loads) -> Load:
    return loads.begin(ChainQuery.of(LINEAGE, FINGERPRINT.digest, IDS, CHUNK_TOKENS, request_id="r"), 0)


def test_a_read_that_ends_after_its_load_does_not_disturb_what_is_told_of_it() -> None:
    """A load thread may still read from memory, of an edge that was not used before."""
    store, costs = FakeStore(edge="disk"), Costs()
    loads = make_loads(store, costs, PlayedClock())
    load = begin(loads)

    def read_late() -> None:
        store.edge = "host"
        load.read(0, 0)

    costs.meanwhile = read_late
    load.close()
    assert [edge for edge, *_ in costs.told] == ["disk"]
    assert (loads.num_open, store.num_open, store.waiting) == (0, 0, set())


def test_what_was_brought_while_an_earlier_request_ran_is_in_time() -> None:
    store, clock = FakeStore(edge="disk"), PlayedClock()
    load = begin(make_loads(store, Costs(), clock))
    clock.now_s += 100.0
    assert load.is_ready(is_alone=False)
    load.begin(3)
    assert load.left_s() > 0


def test_beside_others_no_more_is_waited_for_than_the_read_buffer() -> None:
    """Computing takes longer than loading here: all but the first layer comes meanwhile."""
    store, seen = FakeStore(edge="disk"), list[bool]()
    workers: dict[str, PlayedWorkers] = {}
    loads = make_played(store, Costs(), PlayedClock(), workers)
    load = loads.begin(ChainQuery.of(LINEAGE, FINGERPRINT.digest, [*IDS, 1], CHUNK_TOKENS), 0, is_alone=False)
    store.before_read = lambda _layer: seen.append(load.is_decided)
    workers["kv-look"].play()
    workers["kv-read"].play()
    assert seen == [False] * 3 + [True] * 3 * (NUM_LAYERS - 1)
    load.close()


@pytest.mark.parametrize(("num_found", "num_resident", "is_outdated"), [(2, 0, False), (2, -1, True), (0, -1, True)])
def test_what_hangs_behind_what_the_engine_has_no_more_is_outdated(
    num_found: int, num_resident: int, is_outdated: bool
) -> None:
    """The engine had the first chunk; `num_resident`: what went of that."""
    workers: dict[str, PlayedWorkers] = {}
    loads = make_played(FakeStore(), Costs(), PlayedClock(), workers)
    ids = IDS[: (1 + num_found) * CHUNK_TOKENS]
    load = loads.begin(ChainQuery.of(LINEAGE, FINGERPRINT.digest, ids, CHUNK_TOKENS, first=1), CHUNK_TOKENS)
    assert not load.is_outdated(0)  # it asks
    workers["kv-look"].play()
    assert len(load.spans) == num_found
    assert load.is_outdated(CHUNK_TOKENS + num_resident) == is_outdated
    loads.abandon()


def test_who_waits_for_a_thread_that_reads_gives_up_and_the_edge_is_not_to_blame() -> None:
    """Both threads are at the chunks of others."""
    store, costs, clock = FakeStore(edge="disk"), Costs(), PlayedClock()
    workers: dict[str, PlayedWorkers] = {}
    loads = make_played(store, costs, clock, workers)
    load = begin(loads)
    workers["kv-look"].play()
    clock.now_s += 100.0  # it is not its turn
    assert not load.is_ready(is_alone=False)
    clock.now_s += load.plan.may_wait_s * 1.01
    assert load.is_ready(is_alone=False)
    workers["kv-read"].play()
    assert costs.told == []
    assert loads.num_given_up == {"waiting": 1}


def test_a_read_that_hangs_when_its_load_is_given_up_counts_with_the_time_it_took() -> None:
    """From memory; it ends after its load."""
    store, costs, clock = FakeStore(edge="host"), Costs(), PlayedClock()
    load = begin(make_loads(store, costs, clock))
    load.read(0, 0)

    def hang(layer: int) -> None:
        clock.now_s += 100.0
        load.give_up("loading")
        load.close()

    store.before_read = hang
    load.read(0, 1)
    ((edge, num_bytes, _, seconds),) = costs.told
    assert (edge, num_bytes) == ("host", 2 * load.sources[0].header.layer_bytes)
    assert seconds >= 100.0


def test_a_disk_that_hangs_is_known_before_its_read_ends() -> None:
    """The load was given up; who comes meanwhile would wait as long."""
    store, costs, clock = FakeStore(edge="disk"), Costs(), PlayedClock()
    workers: dict[str, PlayedWorkers] = {}
    load, seen = begin(make_played(store, costs, clock, workers)), list[Any]()
    workers["kv-look"].play()

    def hang(layer: int) -> None:
        clock.now_s += 100.0
        load.give_up("waiting")
        load.close()
        seen.extend(costs.told)

    store.before_read = hang
    workers["kv-read"].play()
    ((edge, _, _, seconds),) = seen
    assert (edge, seconds >= 100.0, costs.told) == ("disk", True, seen)


@pytest.mark.parametrize(("is_over", "is_taken"), [(False, True), (True, False)])
def test_who_waits_for_the_budget_hears_of_urgency(is_over: bool, is_taken: bool) -> None:
    budget, asked, urgent = ReadBudget(0), threading.Event(), threading.Event()

    def is_urgent() -> bool:
        asked.set()
        return urgent.is_set()

    with ThreadPoolExecutor(1) as threads:
        taken = threads.submit(budget.reserve, 100, is_urgent, lambda: is_over and urgent.is_set())
        assert asked.wait(TIMEOUT_S)
        urgent.set()
        budget.wake()
        assert taken.result(TIMEOUT_S) is is_taken
    assert budget.num_used == (100 if is_taken else 0)


def test_an_answer_of_the_store_is_seen_whole() -> None:
    """An engine that saw half of it gave up a chunk that is none."""
    is_half_seen, may_go_on, seen = threading.Event(), threading.Event(), []

    class SlowLoad(Load):
        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, value)
            if name == "plan" and value is not None:
                is_half_seen.set()
                assert may_go_on.wait(TIMEOUT_S)

    query = ChainQuery.of(LINEAGE, FINGERPRINT.digest, IDS, CHUNK_TOKENS, request_id="r")
    load = SlowLoad(query, 0, ReadBudget(1 << 20), lambda: 1.0, wait_s=0.0, timeout_s=5.0)
    nothing = LoadPlan(num_chunks=0, may_wait_s=0.0, predicted_ttft_s=1.0, step_chunks=1)
    store = threading.Thread(target=load.found, args=([], nothing, [range(0)]))
    engine = threading.Thread(target=lambda: seen.append(load.is_ready(is_alone=False)))
    store.start()
    assert is_half_seen.wait(TIMEOUT_S)
    engine.start()
    engine.join(0.2)
    may_go_on.set()
    store.join(TIMEOUT_S)
    engine.join(TIMEOUT_S)
    assert (seen, load.state) == ([True], LoadState.READY)


def test_a_further_part_is_not_ready_before_it_is_in_memory() -> None:
    """Its read waits for the room of the part before, which a step still loads."""
    asked = threading.Event()

    class SeenBudget(ReadBudget):
        def reserve(self, *args: Any) -> bool:
            asked.set()
            return super().reserve(*args)

    store, parts = FakeStore(edge="disk"), [range(1), range(1, 3)]
    store.chunks = {chunk.header.key: chunk for chunk in chain_of(IDS)}
    query = ChainQuery.of(LINEAGE, FINGERPRINT.digest, IDS, CHUNK_TOKENS, request_id="r")
    budget = SeenBudget(2 * chain_of(IDS)[0].header.payload_bytes)
    budget.num_used = chain_of(IDS)[0].header.payload_bytes  # by others
    with ThreadPoolExecutor(1) as threads:
        load = Load(
            query, 0, budget, lambda: 1.0, wait_s=0.0, timeout_s=5.0,
            on_part=lambda load: reading.append(threads.submit(load.read_ahead)),
        )  # fmt: skip
        reading: list[Any] = []
        load.found(
            store.locate(query, 1.0), LoadPlan(num_chunks=3, may_wait_s=9.0, predicted_ttft_s=1.0, step_chunks=1), parts
        )
        load.read_ahead()
        assert (load.state, load.num_at_once(5)) == (LoadState.READY, 1)
        load.begin(1)
        asked.clear()
        assert not load.is_ready(is_alone=False)
        assert asked.wait(TIMEOUT_S)
        assert not load.is_ready(is_alone=False)
        budget.release(chain_of(IDS)[0].header.payload_bytes)
        for layer in range(NUM_LAYERS):
            load.read(0, layer)
        reading[0].result(TIMEOUT_S)
        assert (load.is_ready(is_alone=False), load.num_at_once(5), len(reading)) == (True, 2, 1)
        load.close()
    assert (budget.num_used, store.num_open) == (0, 0)


class NoPages:
    """Nothing is copied."""

    num_readers = 1

    def issued(self) -> None:
        return None

    def wait(self, event: None) -> None:
        pass


def load_of(clock: PlayedClock, *, edge: Any = "disk", is_read: bool = True) -> tuple[Load, StepLoad]:
    """A step begins to load what takes half a second to wait for."""
    store = FakeStore(edge=edge)
    store.chunks = {chunk.header.key: chunk for chunk in chain_of(IDS)}
    query = ChainQuery.of(LINEAGE, FINGERPRINT.digest, IDS, CHUNK_TOKENS, request_id="r")
    load = Load(query, 0, ReadBudget(1 << 20), clock, wait_s=0.0, timeout_s=5.0)
    plan = LoadPlan(num_chunks=3, may_wait_s=0.5, predicted_ttft_s=1.0, step_chunks=3)
    load.found(store.locate(query, 1.0), plan, [range(3)])
    clock.now_s += 100.0  # others run
    assert load.left_s() == pytest.approx(0.5)
    clock.now_s += 0.3
    load.pause()
    clock.now_s += 100.0  # it waits for pages
    if is_read:
        load.read_ahead()
    pages: Any = NoPages()
    pieces = [GraftPiece(index, *load.spans[index], [], ()) for index in range(3)]
    return load, StepLoad([Graft(load, pieces, is_last=False)], NUM_LAYERS, pages)


@pytest.mark.parametrize(("is_read", "left_s"), [(False, 0.2), (True, 0.5)])
def test_a_load_costs_the_time_in_which_its_sequence_waits_for_it(is_read: bool, left_s: float) -> None:
    """What was read ahead is not late any more: a copy is left, and has all the time."""
    clock = PlayedClock()
    load, _ = load_of(clock, is_read=is_read)
    clock.now_s += 100.0  # the step computes
    assert load.left_s() == pytest.approx(left_s)
    load.close()


def test_a_step_gives_up_what_it_waited_for_too_long_and_goes_on() -> None:
    clock = PlayedClock()
    load, step = load_of(clock, is_read=False)
    assert load.left_s() > 0
    clock.now_s += 0.2
    step.wait_layer(0)
    assert load.state is LoadState.LOST
    step.wait_layer(1)
    assert load.spans == []
    load.close()
