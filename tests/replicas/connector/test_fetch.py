"""Fetches of an engine without their threads: how they end, what they read ahead, how long a step waits for them."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from mneme.cachetier.names import Edge
from mneme.cachetier.policy.load_controller import LoadController, LoadPlan
from mneme.cachetier.store import ChainQuery
from mneme.primitives import Task
from mneme.replicas.connector import fetch as fetch_module
from mneme.replicas.connector.fetch import Fetch, Fetches, LoadClock, ReadBudget
from mneme.replicas.connector.load import ChunkLoad
from mneme.replicas.forest.moves import Graft, GraftPiece
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

    def note_lookup(self, seconds: float) -> None:
        pass

    def note_edge(self, edge: Any, num_bytes: int, num_chunks: float, seconds: float) -> None:
        self.told.append((edge, num_bytes, num_chunks, seconds))
        self.meanwhile()


def make_fetches(store: FakeStore, costs: Costs, clock: PlayedClock, make: Any = Inline) -> Fetches:
    """The store has all of `IDS`."""
    store.chunks = {chunk.header.key: chunk for chunk in chain_of(IDS)}
    controller = LoadController(costs, num_layers=NUM_LAYERS)
    return Fetches(store, controller, costs, read_buffer_bytes=1 << 20, clock=clock, make_workers=make)


def begin(fetches: Fetches) -> Fetch:
    return fetches.begin(ChainQuery.of(LINEAGE, FINGERPRINT.digest, IDS, CHUNK_TOKENS, request_id="r"), 0)


def test_a_read_that_ends_after_its_fetch_does_not_disturb_what_is_told_of_it() -> None:
    """A load thread may still read from memory, of an edge that was not used before."""
    store, costs = FakeStore(edge="disk"), Costs()
    fetches = make_fetches(store, costs, PlayedClock())
    fetch = begin(fetches)

    def read_late() -> None:
        store.edge = "host"
        fetch.take(0, 0)

    costs.meanwhile = read_late
    fetch.close()
    assert [edge for edge, *_ in costs.told] == ["disk"]
    assert (fetches.num_open, store.num_open, store.waiting) == (0, 0, set())


def test_what_was_brought_while_an_earlier_request_ran_is_in_time() -> None:
    store, clock = FakeStore(edge="disk"), PlayedClock()
    fetch = begin(make_fetches(store, Costs(), clock))
    clock.now_s += 100.0
    assert fetch.is_ready(is_alone=False)
    fetch.begin_load()
    assert min(fetch.left_s(layer) for layer in range(NUM_LAYERS)) > 0


def test_beside_others_no_more_is_waited_for_than_the_read_buffer() -> None:
    """Computing takes longer than loading here: all but the first layer comes meanwhile."""
    store, seen = FakeStore(edge="disk"), list[bool]()
    fetches = make_fetches(store, Costs(), PlayedClock())
    store.before_read = lambda _layer: seen.extend(fetch.is_settled for fetch in fetches._open)
    fetch = fetches.begin(ChainQuery.of(LINEAGE, FINGERPRINT.digest, [*IDS, 1], CHUNK_TOKENS), 0, is_alone=False)
    assert seen == [False] * 3 + [True] * 3 * (NUM_LAYERS - 1)
    fetch.close()


@pytest.mark.parametrize(
    ("edge", "num_reads", "num_resident", "num_more", "is_outdated"),
    [
        ("host", 0, 0, 0, [False, False]),
        ("host", 0, 0, CHUNK_TOKENS, [False, True]),  # a chunk may have come
        ("disk", 0, 0, CHUNK_TOKENS, [False, False]),  # its place among those who read would be lost
        ("disk", 1, 0, CHUNK_TOKENS, [False, False]),  # what was read would be read again
        ("disk", 1, -1, 0, [True, True]),  # it hangs behind what the engine has no more
    ],
)
def test_asking_again_costs_nothing_that_was_read(
    edge: Any, num_reads: int, num_resident: int, num_more: int, is_outdated: list[bool]
) -> None:
    """The engine had the first chunk; `num_resident`: what came to that, or went. `is_outdated`: at once, and later."""
    clock = PlayedClock()
    workers: dict[str, PlayedWorkers] = {}
    make = lambda name, _: workers.setdefault(name, PlayedWorkers())  # noqa: E731
    fetches = make_fetches(FakeStore(edge=edge), Costs(), clock, make)
    ids = [*IDS, *range(num_more)]
    fetch = fetches.begin(ChainQuery.of(LINEAGE, FINGERPRINT.digest, ids, CHUNK_TOKENS, first=1), CHUNK_TOKENS)
    assert not fetch.is_outdated(0, len(ids))  # it looks
    workers["kv-look"].play()
    workers["kv-read"].play(num_reads)
    at_once = fetch.is_outdated(CHUNK_TOKENS + num_resident, len(ids))
    clock.now_s += 1.0
    assert [at_once, fetch.is_outdated(CHUNK_TOKENS + num_resident, len(ids))] == is_outdated
    fetches.abandon()


def test_who_waits_for_a_thread_that_reads_gives_up_and_the_edge_is_not_to_blame() -> None:
    """Both threads are at the chunks of others."""
    store, costs, clock = FakeStore(edge="disk"), Costs(), PlayedClock()
    workers: dict[str, PlayedWorkers] = {}
    fetches = make_fetches(store, costs, clock, lambda name, _: workers.setdefault(name, PlayedWorkers()))
    fetch = begin(fetches)
    workers["kv-look"].play()
    clock.now_s += 100.0  # it is not its turn
    assert not fetch.is_ready(is_alone=False)
    assert not fetch.is_outdated(0, 2 * len(fetch.query.token_ids))  # it would wait at the end, and from now on
    assert fetch.plan is not None
    clock.now_s += fetch.plan.slack_s * 1.01
    assert fetch.is_ready(is_alone=False)
    workers["kv-read"].play()
    assert costs.told == []
    assert fetches.num_given_up == {"waiting": 1}


@pytest.mark.parametrize("slowness", [1.0, 4.0])
def test_what_came_of_a_load_that_was_given_up_says_how_fast_its_edge_is(slowness: float) -> None:
    """The first layer of each of three chunks had come, and one more."""
    store, costs, clock = FakeStore(edge="disk"), Costs(), PlayedClock()
    size = chain_of(IDS)[0].header.layer_bytes
    layer_s = costs.edge_s("disk", 2 * size, 2 / NUM_LAYERS) - costs.edge_s("disk", size, 1 / NUM_LAYERS)

    def read(layer: int) -> None:
        clock.now_s += layer_s * slowness
        if layer == 1:
            fetch_by_name["fetch"].give_up("waiting")
            fetch_by_name["fetch"].abandon()

    workers: dict[str, PlayedWorkers] = {}
    fetches = make_fetches(store, costs, clock, lambda name, _: workers.setdefault(name, PlayedWorkers()))
    store.before_read = read
    fetch_by_name = {"fetch": begin(fetches)}
    for name in ("kv-look", "kv-read"):
        workers[name].play()
    assert costs.told == [("disk", 4 * size, 4 / NUM_LAYERS, pytest.approx(4 * layer_s * slowness))]


def test_a_read_that_hangs_when_its_load_is_given_up_counts_with_the_time_it_took() -> None:
    """From memory; it ends after its fetch."""
    store, costs, clock = FakeStore(edge="host"), Costs(), PlayedClock()
    fetch = begin(make_fetches(store, costs, clock))
    fetch.take(0, 0)

    def hang(layer: int) -> None:
        clock.now_s += 100.0
        fetch.give_up("loading")
        fetch.close()

    store.before_read = hang
    fetch.take(0, 1)
    ((edge, num_bytes, _, seconds),) = costs.told
    assert (edge, num_bytes) == ("host", 2 * fetch.sources[0].header.layer_bytes)
    assert seconds >= 100.0


@pytest.mark.parametrize(("is_over", "is_taken"), [(False, True), (True, False)])
def test_who_waits_for_the_budget_hears_of_urgency(is_over: bool, is_taken: bool) -> None:
    budget, asked, urgent = ReadBudget(0), threading.Event(), threading.Event()

    def is_urgent() -> bool:
        asked.set()
        return urgent.is_set()

    with ThreadPoolExecutor(1) as threads:
        taken = threads.submit(budget.take, 100, is_urgent, lambda: is_over and urgent.is_set())
        assert asked.wait(TIMEOUT_S)
        urgent.set()
        budget.wake()
        assert taken.result(TIMEOUT_S) is is_taken
    assert budget.num_used == (100 if is_taken else 0)


def test_an_answer_of_the_store_is_seen_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that saw the clock of nothing, and not that there is nothing, gave up a chunk that is none."""
    is_timed, may_go_on, seen = threading.Event(), threading.Event(), []

    class SlowClock(LoadClock):
        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, value)
            if name == "num_brought":  # the last that is set before the answer is told
                is_timed.set()
                assert may_go_on.wait(TIMEOUT_S)

    monkeypatch.setattr(fetch_module, "LoadClock", SlowClock)
    query = ChainQuery.of(LINEAGE, FINGERPRINT.digest, IDS, CHUNK_TOKENS, request_id="r")
    fetch = Fetch(query, 0, 5.0, ReadBudget(1 << 20), lambda: 1.0)
    nothing = LoadPlan(**dict.fromkeys(LoadPlan.__dataclass_fields__, 0))
    store = threading.Thread(target=fetch.found, args=([], nothing))
    engine = threading.Thread(target=lambda: seen.append(fetch.is_ready(is_alone=False)))
    store.start()
    assert is_timed.wait(TIMEOUT_S)
    engine.start()
    engine.join(0.2)
    may_go_on.set()
    store.join(TIMEOUT_S)
    engine.join(TIMEOUT_S)
    assert (seen, fetch.is_given_up, fetch.is_settled) == ([True], False, True)


class NoPages:
    """Nothing is copied."""

    num_readers = 1

    def issued(self) -> None:
        return None


def graft_of(fetch: Fetch, num_chunks: int) -> Graft:
    pieces = [GraftPiece(index, *fetch.spans[index], [], ()) for index in range(num_chunks)]
    return Graft(fetch, pieces, is_last=False)


def begin_load(*grafts: Graft) -> None:
    pages: Any = NoPages()
    ChunkLoad(grafts, NUM_LAYERS, pages)


def test_a_small_load_may_take_as_long_as_a_large_one_beside_it() -> None:
    fetches = make_fetches(FakeStore(), Costs(), PlayedClock())
    small, large = begin(fetches), begin(fetches)
    begin_load(graft_of(small, 1))
    alone_s = [small.left_s(layer) for layer in range(NUM_LAYERS)]
    begin_load(graft_of(large, 2), graft_of(small, 1))
    assert large.plan is not None
    large_s = large.plan.predicted_load_s * 2 / large.plan.num_chunks  # as much of it as comes with the step
    assert large_s > 0
    beside_s = [small.left_s(layer) - alone_s[layer] for layer in range(NUM_LAYERS)]
    assert beside_s == pytest.approx([large_s * (layer + 1) / NUM_LAYERS for layer in range(NUM_LAYERS)])
    fetches.abandon()
