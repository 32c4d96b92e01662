"""Steps whose rows are chosen by time, and prompts in the order of when they are due: no tensors, played costs."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mneme.cachetier.policy.cost_model import Calibration, CostModel
from mneme.replicas.request import SamplingParams
from mneme.replicas.schedule.scheduler import Scheduler
from mneme.replicas.sequence import Sequence, StepRows
from tests.budget import examples
from tests.replicas.fake_runner import FakeRunner
from tests.replicas.schedule.test_engine_policy import make_engine, make_request

PAGE = 4
ROW_S, DECODE_S = 0.001, 0.002


def costs_of(row_s: float = ROW_S, key_s: float = 0.0, decode_s: float = DECODE_S) -> CostModel:
    return CostModel(
        Calibration(prefill=(0.0, row_s, key_s), decode=(0.0, decode_s, 0.0), step_rows=4096, kv_bytes_per_token=1),
        lambda: 0.0,
    )


class Played:
    """A scheduler whose steps take what the costs predict."""

    def __init__(self, *, max_step_s: float | None = 0.03, costs: CostModel | None = None, **options: Any) -> None:
        self.costs = costs or costs_of()
        self.runner = FakeRunner(options.pop("num_pages", 4000), PAGE)
        engine = make_engine(runner=self.runner)
        settings_ = {"max_batch_tokens": 1024, "max_running": 64, **options}
        self.scheduler = Scheduler(engine.forest, costs=self.costs, max_step_s=max_step_s, **settings_)
        self.now_s, self._serials = 0.0, itertools.count()
        self.steps: list[tuple[float, list[StepRows]]] = []
        self.first_s: dict[str, float] = {}

    def submit(
        self, name: str, num_tokens: int, *, max_tokens: int = 1, session: str | None = None, num_shared: int = 0
    ) -> Sequence:
        """`num_shared`: first tokens that all have in common; the others are the prompt's own."""
        number = next(self._serials)
        own = [number % 251, *[(number * 7 + i) % 5 for i in range(num_tokens - 1)]]
        ids = [i % 4 for i in range(num_shared)] + own
        request = make_request(name, ids, SamplingParams(max_tokens=max_tokens), session_id=session)
        request = replace(request, taken_s=self.now_s)
        sequence = Sequence(request=request, ids=ids, num_prompt=len(ids), max_tokens=max_tokens, arrival=number)
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> list[StepRows]:
        batch = self.scheduler.schedule()
        assert all(part.sequence.path is not None for part in batch), "one who has rows was suspended for another's"
        took_s = self.costs.step_s([(part.num_rows, part.end - part.num_rows) for part in batch])
        self.steps.append((took_s, batch))
        self.now_s += took_s
        for part in batch:
            if part.samples:
                sequence = part.sequence
                sequence.append(0)
                self.first_s.setdefault(sequence.request.request_id, self.now_s)
                if sequence.num_output == sequence.max_tokens:
                    self.scheduler.remove(sequence)
        return batch

    def run(self) -> None:
        while self.scheduler.has_work:
            assert self.step(), "nobody has rows"


def rows_of(batch: list[StepRows]) -> dict[str, int]:
    return {part.sequence.request.request_id: part.num_rows for part in batch}


def test_beside_streams_a_step_takes_as_many_rows_as_fit() -> None:
    played = Played(max_step_s=0.03)
    played.submit("stream", 4, max_tokens=100)
    played.step()
    played.submit("long", 400)
    assert rows_of(played.step()) == {"stream": 1, "long": 28}  # 2 ms of decode, 28 rows of 1 ms
    played.run()
    beside = [took_s for took_s, batch in played.steps if len(batch) > 1]
    assert max(beside) <= 0.03 + 1e-9


def test_alone_a_prompt_takes_large_steps() -> None:
    played = Played(max_step_s=0.03)
    played.submit("long", 3000)
    played.run()
    assert [rows_of(batch)["long"] for _, batch in played.steps] == [1024, 1024, 952]


@pytest.mark.parametrize(
    ("max_step_s", "num_rows"),
    [(0.03, 32), (0.0, 900), (None, 700)],  # a quarter of the step; no limit; seven times the decodes
)
def test_where_decodes_take_all_of_the_time_prompts_have_a_share(max_step_s: float | None, num_rows: int) -> None:
    played = Played(max_step_s=max_step_s)
    for number in range(50):  # 100 ms
        played.submit(f"s{number}", 4, max_tokens=1000)
    while len(played.first_s) < 50:
        played.step()
    played.submit("long", 900)
    assert rows_of(played.step())["long"] == num_rows


def test_equal_prompts_end_one_after_the_other() -> None:
    played = Played()
    played.submit("stream", 4, max_tokens=200)
    played.step()
    for number in range(4):
        played.submit(f"p{number}", 112)
    while len(played.first_s) < 5:
        played.step()
    # 28 rows a step: 4 steps each, of which decodes take some
    firsts = [played.first_s[f"p{number}"] for number in range(4)]
    assert firsts == sorted(firsts)
    assert firsts[0] < 0.2 < firsts[1] + 0.1
    gaps = [b - a for a, b in itertools.pairwise(firsts)]
    assert max(gaps) == pytest.approx(min(gaps), abs=0.04)


def test_a_short_prompt_waits_for_no_huge_one() -> None:
    played = Played()
    played.submit("stream", 4, max_tokens=300)
    played.step()
    for number in range(3):
        played.submit(f"huge{number}", 1000)
    played.step()
    came_s = played.now_s
    played.submit("short", 20)
    while "short" not in played.first_s:
        played.step()
    assert played.first_s["short"] - came_s <= 0.062  # the step after this one


def test_a_huge_prompt_is_not_starved_by_short_ones_that_keep_coming() -> None:
    played = Played()
    played.submit("stream", 4, max_tokens=10_000)
    played.step()
    played.submit("huge", 1000)
    alone_s = 1000 * ROW_S
    for number in itertools.count():
        if "huge" in played.first_s:
            break
        assert number < 1000
        played.submit(f"short{number}", 28)  # each takes a whole step
        played.step()
    # Those that come later than it would take do not go before it; what came before then does, once.
    assert played.first_s["huge"] <= 3 * alone_s * 30 / 28


arrivals = st.lists(
    st.tuples(
        st.integers(0, 30),
        st.integers(1, 300),
        st.integers(1, 20),
        st.sampled_from([None, "a", "b"]),
        st.sampled_from([0, 0, 200]),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=examples(150))
@given(
    arrivals,
    st.sampled_from([None, 0.01, 0.03, 0.1]),
    st.sampled_from([0.0, 1e-6]),
    st.integers(150, 400),
    st.integers(1, 8),
)
def test_any_traffic_ends_and_its_steps_keep_to_their_time(
    requests: list[Any], max_step_s: float | None, key_s: float, num_pages: int, max_running: int
) -> None:
    costs = costs_of(key_s=key_s)
    played = Played(max_step_s=max_step_s, costs=costs, num_pages=num_pages, max_running=max_running)
    for step in itertools.count():
        for index, (at, num_tokens, max_tokens, session, num_shared) in enumerate(requests):
            if at == step:
                more = {"max_tokens": max_tokens, "session": session, "num_shared": num_shared}
                played.submit(f"r{index}", num_tokens, **more)
        if played.scheduler.has_work:
            batch = played.step()
            assert batch
            has_streams = any(part.num_rows == 1 and part.sequence.num_output > 1 for part in batch)
            if has_streams:
                decode_s = costs.decode_s(
                    sum(part.num_rows == 1 for part in batch), sum(part.end for part in batch if part.num_rows == 1)
                )
                bound_s = max(0.05, 8 * decode_s) if max_step_s is None else max(max_step_s, 4 / 3 * decode_s)
                page_s = costs.rows_s(PAGE, 500)
                assert played.steps[-1][0] <= bound_s + page_s + 1e-9
        elif step > 31:
            break
        assert step < 10_000, "some request never ends"
    assert len(played.first_s) == len(requests)


@pytest.mark.at_length
@settings(max_examples=examples(40, at_length=150))
@given(
    num_pages=st.integers(20, 40),
    stream=st.tuples(st.integers(1, 4), st.integers(40, 60)),
    long_share=st.floats(0.5, 0.8),
    short=st.lists(st.tuples(st.integers(1, 4), st.integers(40, 60)), min_size=1, max_size=6),
)
@example(num_pages=38, stream=(1, 55), long_share=0.7287, short=[(1, 44), (3, 50), (3, 55)])
def test_out_of_pages_nobody_is_suspended_in_the_step_in_which_it_has_rows(
    num_pages: int, stream: tuple[int, int], long_share: float, short: list[tuple[int, int]]
) -> None:
    """A long prompt is computed bit by bit beside a stream, and short ones that come later go before it. Their decodes
    have rows when the long one finds no page, though they are the latest arrivals.

    long_share     of the pool
    stream, short  tokens of each prompt and its answer
    """
    played, num_slots = Played(num_pages=num_pages, max_step_s=0.003), num_pages * PAGE
    played.submit("stream", stream[0], max_tokens=stream[1])
    played.step()
    sequences = [played.submit("long", int(long_share * num_slots))]
    sequences += [played.submit(f"r{i}", num, max_tokens=answer) for i, (num, answer) in enumerate(short)]
    for _ in range(3000):
        if played.scheduler.has_work:
            assert played.step()
    assert all(sequence.num_output == sequence.max_tokens for sequence in sequences)
