"""Loads that fail at bad moments, step by step; the fake runner checks what every row sees."""

from __future__ import annotations

import itertools
import random
from array import array
from typing import Any

import pytest

from mneme.cachetier.chunk.header import ChunkHeader
from mneme.cachetier.names import Miss
from mneme.cachetier.session_log.rows import SessionState
from mneme.replicas.engine.engine import Engine
from mneme.replicas.request import GenerationRequest, PromptUsage, SamplingParams, TokenEvent
from mneme.replicas.truncation import Truncation
from tests.replicas.chunk_stores import FakeStore
from tests.replicas.connector.played_chunks import CHUNK_TOKENS, PlayedCache, make_played_engine
from tests.replicas.fake_runner import FakeRunner, continuation
from tests.replicas.schedule.test_engine_policy import make_engine, make_request, run, tokens_of

IDS = [(7 * i + i // 5) % 5 for i in range(60)]
WINDOW = 48


class Played:
    """An engine over a store that another one filled."""

    def __init__(self, store: FakeStore, **options: Any) -> None:
        self.store = store
        self.runner = FakeRunner(64, 4, max_context=WINDOW, num_host_pages=options.pop("num_host_pages", 0))
        of_cache = {key: options.pop(key) for key in ("step_chunks", "load", "read_buffer_bytes") if key in options}
        self.cache = PlayedCache(store, 4, **of_cache)
        self.engine: Engine = make_played_engine(
            self.runner, self.cache, itertools.count().__next__, **{"max_batch_tokens": 128, **options}
        )

    def submit(self, name: str, ids: list[int], num_tokens: int = 3, **more: Any) -> None:
        params = SamplingParams(temperature=0, max_tokens=num_tokens)
        self.engine.submit(GenerationRequest(request_id=name, prompt_token_ids=tuple(ids), sampling=params, **more))

    def finish(self, name: str, ids: list[int]) -> PromptUsage:
        """Let all end; the answer is right, and nothing stays open."""
        events = run(self.engine)
        assert tokens_of(events, name) == continuation(ids, 3, 5)
        self.check_rest()
        return next(event.usage for event in events if event.request_id == name and event.usage is not None)

    def check_rest(self) -> None:
        self.cache.play()
        assert (self.engine.forest.device.num_in_use, self.engine.in_flight) == (0, {})
        assert (self.cache.num_open, self.cache.cache.stats()["read_buffer_bytes"]) == (0, 0)
        assert (self.store.num_open, self.store.waiting) == (0, set())


@pytest.fixture
def store() -> FakeStore:
    """It has the first 24 tokens."""
    store = FakeStore()
    filling = Played(store)
    filling.submit("fill", IDS[:25], 1)
    filling.cache.play()
    run(filling.engine)
    filling.check_rest()
    assert len(store.chunks) == 3
    return store


def without_a_tier(ids: list[int], **more: Any) -> list[int]:
    engine = make_engine(runner=FakeRunner(64, 4, max_context=WINDOW))
    engine.submit(make_request("a", ids, SamplingParams(temperature=0, max_tokens=3), **more))
    return tokens_of(run(engine), "a")


def lose_from(chunk: int) -> Any:
    def fault(header: ChunkHeader, layer: int) -> Miss | None:
        return Miss.BAD_CHECKSUM if int(header.slot_position[0]) >= chunk * CHUNK_TOKENS and layer == 1 else None

    return fault


@pytest.mark.parametrize("chunk", [0, 2])
def test_who_keeps_only_what_was_computed_behind_a_lost_chunk_goes_back_too(store: FakeStore, chunk: int) -> None:
    """A session drops the first half of what another request loads and computes in the same step."""
    case = Played(store)
    store.fault = lose_from(chunk)
    case.submit("a", IDS[:44])
    case.submit("b", IDS[:50], session_id="s", truncation=Truncation())
    case.cache.play()
    events = run(case.engine)
    assert tokens_of(events, "a") == continuation(IDS[:44], 3, 5)
    assert tokens_of(events, "b") == without_a_tier(IDS[:50], session_id="s", truncation=Truncation())
    assert case.engine.scheduler.num_retracted == 2
    case.check_rest()


@pytest.mark.parametrize("strategy", ["reuse_kv", "recompute"])
def test_what_was_found_of_a_prompt_is_not_loaded_once_it_was_cut(store: FakeStore, strategy: Any) -> None:
    """Chunks are found by the whole prompt; what stays of it has other tokens at their positions."""
    case = Played(store)
    more = {"session_id": "s", "truncation": Truncation(strategy=strategy)}
    case.submit("a", IDS, **more)
    case.cache.play()
    assert tokens_of(run(case.engine), "a") == without_a_tier(IDS, **more)
    case.check_rest()


LONG_S = 1e6


@pytest.mark.parametrize("is_slow", [False, True])
def test_what_is_found_while_first_rows_are_computed_is_used_behind_them(store: FakeStore, is_slow: bool) -> None:
    """These begin when the answer is overdue, or at once if answers take as long as five rows (`is_slow`)."""
    case = Played(store)
    if is_slow:
        case.cache.cache.costs.learn_lookup(5.5)
    case.submit("a", IDS[:30])
    assert case.engine.is_blocked != is_slow
    case.cache.now_s += 0 if is_slow else LONG_S
    assert not case.engine.is_blocked
    assert case.engine.step() == []
    assert case.runner.num_rows == CHUNK_TOKENS  # no more: what the store says may be of use behind them
    case.cache.play()
    assert case.finish("a", IDS[:30]).host_tokens == 24 - CHUNK_TOKENS
    assert case.cache.cache.stats()["given_up"] == {}


@pytest.mark.parametrize("is_overdue", [False, True])
def test_one_of_the_prompts_that_wait_for_answers_has_rows_until_these_are_overdue(
    store: FakeStore, is_overdue: bool
) -> None:
    """No step of many first chunks stands between an answer and what it finds."""
    case = Played(store)
    for index, name in enumerate("abc"):
        case.submit(name, IDS[index : 30 + index])
    case.cache.now_s += LONG_S if is_overdue else 2 * CHUNK_TOKENS  # a row takes a second; a prompt may be asked for 30
    assert case.engine.step() == []
    assert case.runner.num_rows == (3 if is_overdue else 1) * CHUNK_TOKENS
    case.cache.play()
    assert case.finish("a", IDS[:30]).host_tokens == 24 - CHUNK_TOKENS


def test_a_prompt_that_another_computes_whole_waits_for_no_answer(store: FakeStore) -> None:
    case = Played(store)
    for name in "ab":
        case.submit(name, IDS[:CHUNK_TOKENS], 1)
    case.cache.now_s += 2 * CHUNK_TOKENS  # a row takes a second
    events = case.engine.step()
    assert [tokens_of(events, name) for name in "ab"] == [continuation(IDS[:CHUNK_TOKENS], 1, 5)] * 2
    assert case.runner.num_rows == CHUNK_TOKENS + 1
    case.check_rest()


@pytest.mark.parametrize("answers", [True, False])
def test_a_session_waits_for_its_stored_history_as_long_as_computing_that_would_take(
    store: FakeStore, answers: bool
) -> None:
    """A row takes a second; anybody else would wait for one, or begin at once, as answers take five."""
    case = Played(store)
    case.cache.cache.costs.learn_lookup(5.5)
    case.engine.sessions.restore(("", "s"), SessionState(version=1, ids=array("i", IDS[:25]), num_turns=1), 2)
    case.submit("a", IDS[25:30], session_id="s", append=True)
    case.cache.now_s += 24.0
    assert case.engine.is_blocked
    if answers:
        case.cache.play()
    else:
        case.cache.now_s += 2.0
    assert case.finish("a", IDS[:30]).host_tokens == (24 if answers else 0)


def test_who_always_loads_waits_for_the_store_and_who_never_loads_saves(store: FakeStore) -> None:
    case = Played(store, load="always")
    case.submit("a", IDS[:30])
    case.cache.now_s += 10.0
    assert case.engine.is_blocked
    case.cache.play()
    assert case.finish("a", IDS[:30]).host_tokens == 24
    case = Played(store, load="never")
    case.submit("a", IDS[:40])
    assert case.finish("a", IDS[:40]).cached_tokens == 0
    assert case.cache.cache.counts["lookups"] == 0
    assert len(store.chunks) > 3


def test_what_is_found_after_the_last_row_is_not_used(store: FakeStore) -> None:
    case = Played(store)
    case.submit("a", IDS[:30])
    case.cache.now_s += LONG_S
    case.finish("a", IDS[:30])
    assert case.runner.num_rows == 30 + 2
    assert case.cache.cache.stats()["given_up"] == {"lookup": 1}


def test_what_is_found_late_is_waited_for_beside_others_only(store: FakeStore) -> None:
    store.edge = "disk"
    case = Played(store)
    case.submit("stream", [4] * 5, 20)
    case.cache.play()
    case.engine.step()
    case.submit("a", IDS[:30])
    case.cache.now_s += LONG_S
    case.engine.step()
    case.cache.play(num_reads=0)
    before = case.runner.num_rows
    events = [event for _ in range(5) for event in case.engine.step()]
    assert {event.request_id for event in events} == {"stream"}
    assert case.runner.num_rows == before + 5
    case.cache.play()
    assert case.finish("a", IDS[:30]).disk_tokens == 24 - CHUNK_TOKENS


@pytest.mark.parametrize("other", [None, IDS[1:30]])
def test_before_others_whose_chunks_come_it_is_not_computed_while_its_own_are_read(
    store: FakeStore, other: list[int] | None
) -> None:
    """Alone it is, layer by layer."""
    store.edge = "disk"
    case = Played(store)
    case.submit("a", IDS[:30])
    if other is not None:
        case.submit("b", other)
    case.cache.play(num_reads=0)
    assert case.engine.is_blocked == (other is not None)
    case.cache.play()
    assert case.finish("a", IDS[:30]).disk_tokens == 24
    assert case.cache.cache.stats()["given_up"] == {}


@pytest.mark.parametrize("num_device", [24, 16], ids=["all went", "what was before the rest went"])
def test_who_waits_asks_again_for_what_its_engine_had_and_has_no_more(store: FakeStore, num_device: int) -> None:
    """`num_device`: tokens that the engine has at first."""
    case = Played(store, max_running=1)
    case.submit("first", IDS[: num_device + 1], 1)
    case.cache.play()
    run(case.engine)
    case.submit("other", [4] * 10, 20)
    case.cache.play()
    case.engine.step()
    case.submit("a", IDS[:30])
    case.cache.play()
    case.engine.step()
    found = case.engine.scheduler.waiting.head.load
    assert found.spans == [(8 * i, 8 * i + 8) for i in range(num_device // 8, 3)]
    case.engine.forest.clear()
    num_lookups = case.cache.cache.counts["lookups"]
    run_some(case.engine, 2)
    assert case.cache.cache.counts["lookups"] == num_lookups  # not in every step
    case.cache.now_s += 1.0
    case.engine.step()
    case.cache.play()
    assert store.waiting == {"a"}
    assert case.finish("a", IDS[:30]).host_tokens == 24


def test_who_comes_beside_others_is_not_planned_as_if_alone(store: FakeStore) -> None:
    case = Played(store)
    case.submit("a", IDS[:30])
    case.submit("b", [4] * 30)
    case.submit("c", IDS[1:30])
    loads = [sequence.load for sequence in case.engine.scheduler.waiting]
    assert [load is not None and load.is_alone for load in loads] == [True, False, False]
    case.cache.play()
    case.finish("a", IDS[:30])
    case.submit("d", IDS[2:30])
    assert [sequence.load.is_alone for sequence in case.engine.scheduler.waiting] == [True]


@pytest.mark.parametrize("num_failures", [1, 2, 3])
def test_a_tier_that_fails_with_a_load_is_tried_again_but_not_for_ever(store: FakeStore, num_failures: int) -> None:
    """Nothing of the load stays open, and no request runs for ever."""
    case = Played(store)
    case.submit("a", IDS[:30])
    case.cache.play()
    case.runner.num_failing_transfers = num_failures
    events = run(case.engine)
    if num_failures <= 2:
        assert tokens_of(events, "a") == continuation(IDS[:30], 3, 5)
    else:
        assert [event.finish_reason for event in events] == ["error"]
    case.check_rest()


@pytest.mark.parametrize("plays", [(0, 0), (1, 0), (None, None)])
@pytest.mark.parametrize("how", ["abort", "fail_all", "close"])
def test_a_request_ends_while_its_chunks_are_looked_for_or_brought(
    store: FakeStore, plays: tuple[int | None, int | None], how: str
) -> None:
    store.edge = "disk"
    case = Played(store)
    case.submit("a", IDS[:30])
    case.cache.play(*plays)
    if how == "abort":
        case.engine.abort("a")
    elif how == "fail_all":
        case.engine.fail_all("gone")
    else:
        case.engine.close()
        case.engine.abort("a")
    case.check_rest()


def test_a_chunk_that_cannot_be_brought_costs_only_what_is_behind_it(store: FakeStore) -> None:
    """It is known before pages are taken: nobody goes back."""
    store.edge, store.fault = "disk", lose_from(1)
    case = Played(store)
    case.submit("other", [4] * 10, 20)
    run_some(case.engine, 2)
    case.submit("a", IDS[:30])
    case.cache.play()
    assert case.finish("a", IDS[:30]).disk_tokens == CHUNK_TOKENS
    assert case.engine.scheduler.num_retracted == 0


def run_some(engine: Engine, num_steps: int) -> None:
    for _ in range(num_steps):
        engine.step()


class Parts:
    """A history of three chunks is loaded beside a stream, one chunk in each step; the first step has been."""

    def __init__(self, store: FakeStore, num_choices: int = 1, **options: Any) -> None:
        self.case = Played(store, step_chunks=1, **options)
        self.case.submit("other", [4] * 10, 20)
        self.case.cache.play()
        run_some(self.case.engine, 2)
        for choice in range(num_choices):
            self.case.submit(f"a{choice}", IDS[:30], choice_index=choice)
        self.case.cache.play()
        self.engine = self.case.engine
        self.events: list[TokenEvent] = []
        self.step()

    def step(self) -> int:
        """How many rows it has."""
        before = self.case.runner.num_rows
        self.events += self.engine.step()
        self.engine.forest.check()
        return self.case.runner.num_rows - before

    def finish(self, *names: str) -> None:
        self.events += run(self.engine)
        for name in names:
            assert tokens_of(self.events, name) == continuation(IDS[:30], 3, 5)
        self.case.check_rest()


@pytest.mark.parametrize("edge", ["host", "disk"])
def test_a_long_history_comes_in_parts_beside_a_stream(store: FakeStore, edge: Any) -> None:
    """Who follows it waits with it."""
    store.edge = edge
    parts = Parts(store, num_choices=3)
    assert [parts.step(), parts.step()] == [1, 1 + 6]  # the stream's, then the prompt's last tokens too
    assert parts.step() == 1 + 1 + 2
    assert parts.case.cache.loader.num_lost == 0
    parts.finish("a0", "a1", "a2")
    usage = next(event.usage for event in parts.events if event.request_id == "a0" and event.usage is not None)
    assert usage.cached_tokens == 24


def test_who_was_suspended_before_its_first_rows_is_not_asked_for_again(store: FakeStore) -> None:
    """It is computed behind what came: a tier that hangs would have it wait once more each time."""
    parts = Parts(store)
    forest, cache = parts.engine.forest, parts.case.cache.cache
    num_tokens = 4 * forest.device.num_available
    others = forest.open_path("others")
    others.write([1] * num_tokens, num_tokens)
    while parts.engine.scheduler.num_suspensions == 0:
        parts.step()
    num_lookups = cache.counts["lookups"]
    parts.case.cache.now_s += 10.0
    parts.step()
    assert cache.counts["lookups"] == num_lookups
    forest.release(others)
    parts.finish("a0")


def test_alone_a_history_comes_in_one_step(store: FakeStore) -> None:
    case = Played(store, step_chunks=1)
    case.submit("a", IDS[:30])
    case.cache.play()
    assert tokens_of(case.engine.step(), "a")
    run(case.engine)
    case.check_rest()


def test_parts_may_be_all_that_a_step_has(store: FakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """What follows the stream's end waits for nobody's rows."""
    parts = Parts(store)
    monkeypatch.setattr(type(parts.engine.scheduler), "_has_streams", property(lambda self: True))
    parts.engine.abort("other")
    assert parts.step() == 0
    parts.finish("a0")


class Queue:
    """A stream runs, and a head waits for the disk."""

    def __init__(self, store: FakeStore, **options: Any) -> None:
        store.edge = "disk"
        self.case = Played(store, **options)
        self.case.submit("other", [4] * 10, 20)
        self.case.cache.play()
        run_some(self.case.engine, 2)
        self.case.submit("head", IDS[:30])

    def step(self) -> list[str]:
        """Who runs after it, besides the stream; the store answers before, and reads nothing."""
        self.case.cache.play(None, 0)
        self.case.engine.step()
        self.case.engine.forest.check()
        return [s.request.request_id for s in self.case.engine.scheduler.running[1:]]

    def finish(self) -> None:
        self.case.cache.play()
        self.case.finish("head", IDS[:30])


def test_short_prompts_overtake_a_head_that_waits_for_its_chunks(store: FakeStore) -> None:
    queue = Queue(store)
    for token, name in enumerate(("b", "c")):
        queue.case.submit(name, [3, token] * 4, session_id=name)
    assert queue.step() == ["b", "c"]
    assert queue.case.engine.scheduler.waiting.head.request.request_id == "head"
    queue.finish()


def test_nothing_that_holds_a_head_up_overtakes_it(store: FakeStore) -> None:
    """Its own choices, which follow it; what takes more than a step; what waits for chunks too."""
    queue = Queue(store, max_batch_tokens=32)
    queue.case.submit("choice", IDS[:30], choice_index=1)
    queue.case.submit("long", [3] * 35)
    queue.case.submit("disk", IDS[:28])
    assert queue.step() == []
    queue.finish()


@pytest.mark.parametrize(("options", "who"), [({"max_running": 2}, []), ({"max_running": 3}, ["b"])])
def test_the_head_keeps_its_place_among_the_running(store: FakeStore, options: Any, who: list[str]) -> None:
    queue = Queue(store, **options)
    queue.case.submit("b", [3] * 4, session_id="b")
    queue.case.submit("c", [2] * 4, session_id="c")
    assert queue.step() == who
    queue.finish()


def test_the_head_keeps_the_pages_that_it_needs(store: FakeStore) -> None:
    """The pool has 64 pages of 4 tokens: the stream has 3 or 4, the reserve 7, the head 9: 44 are left.

    Each of the others takes 12: without the head's pages there would be room for a fourth.
    """
    queue = Queue(store, max_batch_tokens=256)
    for index in range(6):
        queue.case.submit(f"b{index}", [index % 5, index // 5, 3] * 15, session_id=str(index))
    assert len(queue.step()) == 3
    left = queue.case.engine.forest.device.num_available
    assert left >= 9 + queue.case.engine.forest.num_reserved
    queue.finish()


class Many:
    """Histories of three chunks each, of as many sessions, come back at once beside a stream."""

    def __init__(self, histories: list[list[int]], edge: Any = "host", **options: Any) -> None:
        """Nothing is read from the disk before a step loads it."""
        store = FakeStore()
        for ids in histories:
            filling = Played(store)
            filling.submit("fill", ids[:25], 1)
            filling.cache.play()
            run(filling.engine)
        store.waiting.clear()
        store.edge = edge
        self.case, self.histories = Played(store, step_chunks=1, **options), histories
        self.case.submit("other", [4] * 10, 30)
        self.case.cache.play()
        run_some(self.case.engine, 2)
        for index, ids in enumerate(histories):
            self.case.submit(f"a{index}", ids, session_id=f"s{index}")
        self.case.cache.play(None, 0)
        self.events: list[TokenEvent] = []
        self.num_loaded = count_loads(self.case)

    def finish(self) -> None:
        while self.case.engine.has_work:
            self.events += self.case.engine.step()
            self.case.engine.forest.check()
        for index, ids in enumerate(self.histories):
            assert tokens_of(self.events, f"a{index}") == continuation(ids, 3, 5)
        self.case.check_rest()


def count_loads(case: Played) -> list[int]:
    """Chunks that each step loads from now on."""
    begin, num_loaded = case.cache.loader.begin, list[int]()

    def counted(grafts: Any, slots: Any) -> Any:
        num_loaded.append(sum(len(graft.pieces) for graft in grafts))
        return begin(grafts, slots)

    case.cache.loader.begin = counted
    return num_loaded


def history(seed: int) -> list[int]:
    return random.Random(seed).choices(range(5), k=30)


@pytest.mark.parametrize(
    ("histories", "num_chunks"),
    [
        ([history(i) for i in range(4)], 12),
        ([history(0)] * 4, 3),
        ([[*history(0)[:8], *history(i)[8:]] for i in range(4)], 1 + 4 * 2),  # they part behind the first chunk
    ],
)
def test_what_a_step_loads_beside_a_stream_is_bounded_for_all_together(
    histories: list[list[int]], num_chunks: int
) -> None:
    many = Many(histories)
    many.finish()
    assert many.num_loaded == [1] * num_chunks
    assert many.case.cache.loader.num_lost == 0


def test_who_overtakes_a_head_takes_no_later_step_to_load(store: FakeStore) -> None:
    """Its chunks would come before the head's."""
    queue = Queue(store, step_chunks=1)
    queue.case.submit("b", IDS[:25], session_id="b")
    queue.case.cache.play(None, 0)
    readers = queue.case.cache.workers["kv-read"]
    readers.tasks.rotate(-1)
    readers.play(1)  # all of its three chunks
    assert queue.step() == []
    queue.finish()


@pytest.mark.parametrize("how", ["finish", "abort"])
def test_of_a_history_larger_than_the_read_buffer_no_stream_waits_for_a_part(store: FakeStore, how: str) -> None:
    """A chunk fits the buffer, and is read when the one before it is in its pages."""
    store.edge = "disk"
    num_bytes = next(iter(store.chunks.values())).header.payload_bytes
    case = Played(store, step_chunks=2, read_buffer_bytes=num_bytes)  # of more than that no step can hide the rest
    case.cache.loader.is_late = lambda: True  # what is not in memory when it is loaded is lost
    case.submit("other", [4] * 10, 20)
    case.cache.play()
    run_some(case.engine, 2)
    case.submit("a", IDS[:30])
    num_loaded, events = count_loads(case), list[TokenEvent]()
    while case.engine.has_work:
        case.cache.play()
        assert case.cache.cache.loads.budget.num_used <= num_bytes
        events += case.engine.step()
        if how == "abort" and len(num_loaded) == 2:
            case.engine.abort("a")
    if how == "finish":
        assert (num_loaded, case.cache.loader.num_lost) == ([1, 1, 1], 0)
        assert tokens_of(events, "a") == continuation(IDS[:30], 3, 5)
    assert len(tokens_of(events, "other")) == 20 - 2
    case.check_rest()


def test_a_head_that_could_not_run_anyway_does_not_give_its_chunks_up(store: FakeStore) -> None:
    """It was asked for once; then others take the places (no public way leads there in a few steps)."""
    queue = Queue(store, max_running=2)
    assert queue.step() == []
    scheduler = queue.case.engine.scheduler
    scheduler.max_running = 1
    queue.step()
    queue.case.cache.now_s += 1000.0
    queue.step()
    scheduler.max_running = 2
    queue.step()
    assert queue.case.cache.cache.stats()["given_up"] == {}
    queue.finish()
    assert queue.case.cache.loader.num_loaded == 1
