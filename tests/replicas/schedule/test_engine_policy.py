"""The engine's policies against a runner that checks every row's context; no tensors, milliseconds."""

from __future__ import annotations

import gc
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest

from mneme.errors import ContextLengthExceeded, InvalidRequest
from mneme.primitives import LazyHeap
from mneme.replicas.config import EngineConfig
from mneme.replicas.engine.engine import Engine
from mneme.replicas.request import GenerationRequest, SamplingParams, TokenEvent
from mneme.replicas.sequence import Sequence
from mneme.replicas.sessions.durable import DurableSessions
from tests.replicas.fake_runner import FakeRunner, continuation

POLICIES = ["lru", "pensieve", "lookahead", "density"]
GREEDY = SamplingParams(temperature=0, max_tokens=4)


def make_engine(
    num_pages: int = 64,
    page_size: int = 4,
    *,
    tokenizer: Any = None,
    runner: FakeRunner | None = None,
    durable: DurableSessions | None = None,
    clock: Callable[[], float] | None = None,
    max_new_tokens: int | None = None,
    **options: Any,
) -> Engine:
    config = EngineConfig(**{"max_batch_tokens": 16, "max_running": 8, **options})
    runner = runner or FakeRunner(num_pages, page_size)
    clock = clock or itertools.count().__next__
    more = {"durable": durable, "max_new_tokens": max_new_tokens}
    return Engine(runner, tokenizer, config, clock=clock, **more)  # type: ignore[arg-type]


def make_request(request_id: str, ids: list[int], params: SamplingParams = GREEDY, **more: Any) -> GenerationRequest:
    return GenerationRequest(request_id=request_id, prompt_token_ids=tuple(ids), sampling=params, **more)


def run(engine: Engine, max_steps: int = 10_000) -> list[TokenEvent]:
    events: list[TokenEvent] = []
    for _ in range(max_steps):
        if not engine.has_work:
            return events
        events += engine.step()
        engine.forest.check()
    raise AssertionError("the engine does not come to an end")


def tokens_of(events: list[TokenEvent], request_id: str) -> list[int]:
    return [token for event in events if event.request_id == request_id for token in event.token_ids]


def usage_of(events: list[TokenEvent], request_id: str) -> tuple[int, int]:
    return next(e.usage[:2] for e in events if e.request_id == request_id and e.usage)


def test_two_prompts_share_to_the_token() -> None:
    engine = make_engine(page_size=32, num_pages=200, max_batch_tokens=4096)
    shared = [(7 * i) % 5 for i in range(1037)]
    for name, tail in (("a", [1, 2, 3]), ("b", [4, 2, 3])):
        engine.submit(make_request(name, shared + tail))
    events = run(engine)
    assert usage_of(events, "a") == (1040, 0)
    assert usage_of(events, "b") == (1040, 1037)
    assert tokens_of(events, "a") == continuation([*shared, 1, 2, 3], 4, 5)
    assert tokens_of(events, "b") == continuation([*shared, 4, 2, 3], 4, 5)


def test_a_limit_of_the_models_holds_for_requests_without_one_as_far_as_there_is_room() -> None:
    engine = make_engine(num_pages=16, page_size=4, max_new_tokens=6)
    room = engine.capacity - 4
    cases: dict[str, tuple[int, int | None, dict[str, Any], int]] = {
        "plain": (5, None, {}, 6),
        "own": (5, 9, {}, 9),
        "resumed": (5, None, {"output_offset": 2}, 4),
        "at its end": (12, None, {"output_offset": 6}, 1),
        "full": (room, None, {}, 4),
    }
    for name, (num_prompt, max_tokens, more, expected) in cases.items():
        params = SamplingParams(temperature=0, max_tokens=max_tokens)
        engine.submit(make_request(name, [1] * num_prompt, params, **more))
        assert len(tokens_of(run(engine), name)) == expected, name


def test_a_prompt_that_is_being_prefilled_is_computed_once() -> None:
    engine = make_engine(max_batch_tokens=16)
    prompt = [i % 5 for i in range(90)]
    for index in range(4):
        engine.submit(make_request(f"r{index}", prompt))
    events = run(engine)
    answer = continuation(prompt, 4, 5)
    assert all(tokens_of(events, f"r{index}") == answer for index in range(4))
    runner: FakeRunner = engine.runner  # type: ignore[assignment]
    # The prompt once, one row for the logits of each follower, one row for each later token of each.
    assert runner.num_rows == 90 + 3 + 4 * 3
    assert usage_of(events, "r0") == (90, 0)
    assert all(usage_of(events, f"r{index}") == (90, 89) for index in (1, 2, 3))


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_identical_decodes_share_their_pages(runs_ahead: bool) -> None:
    """A step ahead they begin pages with placeholders that differ, and go on together once the tokens are known."""
    engine = make_engine(runner=FakeRunner(64, 4, runs_ahead=runs_ahead))
    for name in "abc":
        engine.submit(make_request(name, [1, 2, 3, 1, 2], SamplingParams(temperature=0, max_tokens=20)))
    peak, events = 0, list[TokenEvent]()
    while engine.has_work:
        events += engine.step()
        engine.forest.check()
        peak = max(peak, engine.forest.device.num_in_use)
    assert peak <= 6 + 1 + 2 * runs_ahead  # 24 positions with KV, however many sequences follow them
    answer = continuation([1, 2, 3, 1, 2], 20, 5)
    assert all(tokens_of(events, name) == answer for name in "abc")


def test_what_can_never_fit_is_refused_at_submission() -> None:
    engine = make_engine(num_pages=4, page_size=4)
    engine.submit(make_request("fits", [1] * 12))
    with pytest.raises(ContextLengthExceeded, match="16 tokens"):
        engine.submit(make_request("over by one", [1] * 13))
    with pytest.raises(ContextLengthExceeded):
        engine.submit(make_request("prompt alone", [1] * 16, SamplingParams()))
    assert len(tokens_of(run(engine), "fits")) == 4


@pytest.mark.parametrize(
    ("ids", "options", "rule"),
    [
        ([], {}, "at least one"),
        ([1, 5], {}, "from 0 to 4"),
        ([-1], {}, "from 0 to 4"),
        ([1], {"logit_bias": {5: 1.0}}, "from 0 to 4"),
        ([1], {"stop_token_ids": (5,)}, "from 0 to 4"),
    ],
)
def test_ids_beyond_the_vocabulary_are_refused_wherever_they_stand(
    ids: list[int], options: dict[str, Any], rule: str
) -> None:
    engine = make_engine()
    with pytest.raises(InvalidRequest, match=rule):
        engine.submit(make_request("a", ids, SamplingParams(max_tokens=1, **options)))
    assert not engine.has_work


def test_a_failed_step_answers_everyone_and_trusts_nothing() -> None:
    engine = make_engine()
    engine.submit(make_request("a", [1, 2, 3, 4, 0]))
    engine.runner.fail_next = True  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError):
        engine.step()
    events = engine.fail_all("failed")
    assert [(e.request_id, e.finish_reason, e.error) for e in events] == [("a", "error", "failed")]
    assert len(engine.forest.device.free) == engine.forest.device.num_pages
    engine.submit(make_request("b", [1, 2, 3, 4, 0]))
    assert tokens_of(run(engine), "b") == continuation([1, 2, 3, 4, 0], 4, 5)


def test_the_next_turns_all_fail_and_nobody_else_notices() -> None:
    """Queued turns that are too long are judged when their turn comes; the unrelated request must not be touched."""
    engine = make_engine(num_pages=8, page_size=4)
    engine.submit(make_request("one.0", [1, 2], session_id="s"))
    engine.submit(make_request("innocent", [3]))
    too_long = SamplingParams(temperature=0, max_tokens=31)
    for turn in range(20):
        for index in range(2):
            engine.submit(make_request(f"t{turn}.{index}", [1, 2], too_long, session_id="s", choice_index=index))
    engine.submit(make_request("last.0", [1, 2], session_id="s"))
    events = run(engine)
    reasons = {event.request_id: event.finish_reason for event in events if event.finish_reason}
    assert {name for name, reason in reasons.items() if reason == "error"} == {
        f"t{turn}.{index}" for turn in range(20) for index in range(2)
    }
    assert reasons["innocent"] == reasons["one.0"] == reasons["last.0"] == "length"
    assert all("must fit 32 tokens" in (e.error or "") for e in events if e.finish_reason == "error")


def test_an_id_is_taken_while_its_request_is_queued() -> None:
    engine = make_engine()
    engine.submit(make_request("one.0", [1, 2], session_id="s"))
    engine.submit(make_request("two.0", [1, 2], session_id="s"))
    assert engine.in_flight == {"one.0": 0, "two.0": 0}
    with pytest.raises(InvalidRequest, match="already running"):
        engine.submit(make_request("two.0", [1, 2], session_id="other"))
    assert sum(e.finish_reason is not None for e in run(engine)) == 2
    assert engine.in_flight == {}


def test_one_request_that_breaks_does_not_fail_its_batch(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        stopped = False

        def push(self, ids: list[int]) -> str:
            raise ValueError("broken")

    engine = make_engine()
    for name in ("a", "b"):
        engine.submit(make_request(name, [1, 2]))
    next(iter(engine.scheduler.waiting)).drawing.stop_text = Broken()  # type: ignore[assignment]
    events = run(engine)
    assert [e.finish_reason for e in events if e.request_id == "a"] == ["error"]
    assert tokens_of(events, "b") == continuation([1, 2], 4, 5)
    assert "commit failed" in caplog.text


def test_the_batch_keeps_its_bounds_and_the_order_of_arrival() -> None:
    engine = make_engine(num_pages=200, max_batch_tokens=16, max_running=3)
    for index in range(8):
        ids = [index % 5, index // 5] + [i % 3 for i in range(30)]
        engine.submit(make_request(f"r{index}", ids, SamplingParams(temperature=0, max_tokens=6)))
    runner: FakeRunner = engine.runner  # type: ignore[assignment]
    finished: list[str] = []
    while engine.has_work:
        before = runner.num_rows
        finished += [event.request_id for event in engine.step() if event.finish_reason]
        assert runner.num_rows - before <= 16
        assert len(engine.scheduler.running) <= 3
        arrivals = [sequence.arrival for sequence in engine.scheduler.running]
        assert arrivals == sorted(arrivals)
    assert finished == sorted(finished)


@pytest.mark.parametrize("eviction", POLICIES)
def test_nothing_grows_with_the_number_of_requests(eviction: str) -> None:
    engine = make_engine(num_pages=8, eviction=eviction, max_sessions=20)
    heaps: list[LazyHeap[Any]] = []
    for index in range(500):
        session = {"salt": f"tenant {index % 50}", "session_id": f"s{index}"}
        engine.submit(make_request(f"r{index}", [1, 2, 3, 4, 1], **session))
        run(engine)
        policy: Any = engine.forest.device.policy
        heaps = [policy._heap] if hasattr(policy, "_heap") else list(policy._heap_by_size.values())
        assert sum(heap.num_entries for heap in heaps) <= 3 * (8 + 64)
    assert any(map(len, heaps))
    assert len(engine.forest.roots) <= 8
    assert len(engine.forest.owners) == len(engine.sessions) <= 21  # the next turn forgets one


def test_what_ended_is_freed_without_the_collector_of_garbage() -> None:
    """It would come late: while serving it is asked for seldom, and a prompt may be long."""
    engine = make_engine()
    gc.collect()
    before = {id(each) for each in gc.get_objects() if type(each) is Sequence}  # of other tests
    gc.disable()
    try:
        for index in range(20):
            draw = random.Random(index)
            engine.submit(make_request(f"r{index}", [draw.randrange(5) for _ in range(20)]))
            while engine.has_work:
                engine.step()
        left = [each for each in gc.get_objects() if type(each) is Sequence and id(each) not in before]
        assert len(left) <= 1  # the last batch's
    finally:
        gc.enable()


def test_admission_leaves_a_tenth_of_the_pages_and_decodes_use_it() -> None:
    engine = make_engine(num_pages=40, page_size=4, max_batch_tokens=512)
    engine.submit(make_request("runs", [1] * 100, SamplingParams(temperature=0, max_tokens=50)))  # 38 pages at last
    engine.step()
    assert engine.forest.device.num_in_use == 25
    engine.submit(make_request("eleven pages", [2] * 44))
    engine.step()
    assert len(engine.scheduler.running) == 1  # 26 and 11 leave three
    engine.abort("eleven pages")
    engine.submit(make_request("ten pages", [2] * 40, SamplingParams(temperature=0, max_tokens=1)))
    engine.step()
    assert engine.num_finished == {"abort": 1, "length": 1}
    peak = 0
    while engine.has_work:
        engine.step()
        peak = max(peak, engine.forest.device.num_in_use)
    assert peak > 40 - engine.forest.num_reserved
    assert engine.scheduler.num_suspensions == 0


def test_a_request_larger_than_what_admission_leaves_runs_alone() -> None:
    engine = make_engine(num_pages=40, page_size=4, max_batch_tokens=512)
    engine.submit(make_request("small", [1] * 8))
    engine.submit(make_request("all", [2] * 156))
    events = run(engine)
    assert tokens_of(events, "all") == continuation([2] * 156, 4, 5)
    assert tokens_of(events, "small") == continuation([1] * 8, 4, 5)


def test_who_is_suspended_is_the_latest_arrival() -> None:
    """One arrives every few steps, more than the pool holds: each ends, in the order in which they came."""
    engine, ended = make_engine(num_pages=12, page_size=4, max_batch_tokens=32), list[str]()
    for step in range(1_000):
        if step % 5 == 0 and step < 60:
            ids = [step // 5 % 5, step // 25, *[3] * 4]
            engine.submit(make_request(f"r{step // 5}", ids, SamplingParams(temperature=0, max_tokens=20)))
        ended += [event.request_id for event in engine.step() if event.finish_reason]
    assert engine.scheduler.num_suspensions
    assert ended == [f"r{index}" for index in range(12)]


@pytest.mark.parametrize("eviction", POLICIES)
def test_traffic_over_the_pool_starves_nobody(eviction: str) -> None:
    """Turns of twenty sessions and strangers that all want more than there is: each ends, in about its turn."""
    engine = make_engine(num_pages=20, page_size=4, eviction=eviction, max_batch_tokens=32)
    history = {session: [session % 5, session // 5] for session in range(20)}
    ended: list[str] = []
    for turn in range(4):
        for session, ids in history.items():
            engine.submit(make_request(f"{turn}.{session}", ids, session_id=f"s{session}"))
        long = SamplingParams(temperature=0, max_tokens=40)
        engine.submit(make_request(f"{turn}.stranger", [turn, 3, 3], long))
        events = run(engine)
        ended += [event.request_id for event in events if event.finish_reason == "length"]
        for session, ids in history.items():
            answer = tokens_of(events, f"{turn}.{session}")
            assert answer == continuation(ids, 4, 5)
            history[session] = [*ids, *answer, turn]
    assert len(ended) == 4 * 21
