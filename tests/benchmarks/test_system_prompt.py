"""The system prompt benchmark's own parts: its clock, its search for a rate, what it allows and what it counts."""

from __future__ import annotations

from pathlib import Path

import pytest
from system_prompt import plots
from system_prompt.bench import Shape, pool_pages, requests
from system_prompt.capacity import NEW, RATIOS, TOKENS, shared_shape
from system_prompt.interactive import Trial, highest_met, next_trial, poisson_arrivals
from system_prompt.serving import Served, TooSlow, figures, serve
from system_prompt.together import allowed_pages, checks

from mneme.replicas.request import GenerationRequest, TokenEvent

STEP_S = 0.5


class FakeEngine:
    """One token for each request that runs, in steps of half a second on a clock of its own."""

    def __init__(self, *, failing: str | None = None) -> None:
        self.now = 100.0
        self.num_steps = 0
        self._left: dict[str, int] = {}
        self._failing = failing

    @property
    def has_work(self) -> bool:
        return bool(self._left)

    def submit(self, request: GenerationRequest) -> None:
        self._left[request.request_id] = request.sampling.max_tokens or 1

    def step(self) -> list[TokenEvent]:
        self.now += STEP_S
        self.num_steps += 1
        if self._failing in self._left:
            return [TokenEvent(self._failing, (), "error", None, None, "no")]
        events = [TokenEvent(name, (1,), None, None, None) for name in self._left]
        self._left = {name: left - 1 for name, left in self._left.items() if left > 1}
        return events


def served_by(
    engine: FakeEngine,
    num_new: int,
    arrivals_s: list[float],
    limit_s: float | None = None,
    *,
    until_first: bool = False,
) -> list[Served]:
    made = requests([[16, 17] for _ in arrivals_s], num_new)
    return serve(engine, made, arrivals_s, now_s=lambda: engine.now, limit_s=limit_s, until_first=until_first)


def test_time_is_that_of_steps_and_idle_time_is_passed_over() -> None:
    engine = FakeEngine()
    first, second = served_by(engine, 2, [0.0, 50.0])
    assert first == Served(0.0, [0.5, 1.0])
    assert second == Served(50.0, [50.5, 51.0])
    assert engine.num_steps == 4


def test_an_arrival_during_a_step_joins_the_next_one() -> None:
    first, second = served_by(FakeEngine(), 2, [0.0, 0.1])
    assert first.token_s == [0.5, 1.0]
    assert second.token_s == [1.0, 1.5]
    assert (second.ttft_s, second.normalized_s) == pytest.approx((0.9, 0.7))


def test_until_first_stops_when_the_last_request_has_a_token() -> None:
    engine = FakeEngine()
    first, second = served_by(engine, 10, [0.0, 0.6], until_first=True)
    assert (len(first.token_s), len(second.token_s)) == (3, 1)
    assert engine.num_steps == 3


def test_a_limit_ends_the_run_as_soon_as_it_must_be_passed() -> None:
    engine = FakeEngine()
    assert served_by(engine, 4, [0.0, 0.0], STEP_S)[0].normalized_s == STEP_S
    engine = FakeEngine()
    with pytest.raises(TooSlow):
        served_by(engine, 100, [0.0, 0.0], 0.02)  # passed after 2 s of 50
    assert engine.num_steps == 5


def test_a_request_that_fails_ends_the_benchmark() -> None:
    with pytest.raises(RuntimeError, match="request 1 failed: no"):
        served_by(FakeEngine(failing="1"), 2, [0.0, 0.0])


def test_figures_of_a_batch() -> None:
    found = figures([Served(0.0, [1.0, 2.0, 3.0, 4.0]), Served(0.0, [2.0, 3.0, 4.0, 5.0])])
    assert found.tokens_per_s == 8 / 5
    assert found.requests_per_s == 2 / 5
    assert found.normalized_ms == pytest.approx((1000 + 1250) / 2)
    assert found.ttft_ms == 1500
    assert found.decode_per_s == pytest.approx(5 / 3)  # behind the second's first token
    assert figures([Served(0.0, [1.0])]).decode_per_s is None


@pytest.mark.parametrize("capacity", [0.3, 4.0, 4.1, 90.0])
def test_the_search_finds_the_highest_rate_within_its_tolerance(capacity: float) -> None:
    trials: list[Trial] = []
    while (rate := next_trial(trials)) is not None:
        trials.append((rate, rate <= capacity))
    best = highest_met(trials)
    assert best is not None
    assert best <= capacity < best * 1.06
    assert len(trials) < 20


def test_a_search_that_meets_nothing_ends() -> None:
    trials: list[Trial] = []
    while (rate := next_trial(trials)) is not None:
        trials.append((rate, False))
    assert highest_met(trials) is None


def test_poisson_arrivals_are_scaled_by_their_rate() -> None:
    slow, fast = poisson_arrivals(2.0, 500.0, seed=3), poisson_arrivals(4.0, 250.0, seed=3)
    assert slow == sorted(slow)
    assert slow[-1] < 500
    assert [at / 2 for at in slow] == pytest.approx(fast)
    assert len(slow) == pytest.approx(1000, rel=0.1)
    assert poisson_arrivals(0.001, 1.0, seed=3) == [0.0]


@pytest.mark.parametrize(
    ("own", "generated", "pages"),
    [
        (0, [1, 1], 64),  # nothing behind the prompt has run
        (1, [1, 1], 66),
        (1, [1, 33], 67),
        (40, [1], 66),
    ],
)
def test_allowed_pages_are_one_copy_and_what_each_has_for_itself(own: int, generated: list[int], pages: int) -> None:
    assert allowed_pages(2048, own, generated) == pages


def test_checks_are_of_the_worst_case_that_is_promised() -> None:
    def row(own: int, arrive: str, time: float, pages: int = 70) -> dict[str, object]:
        return {"own": own, "arrive": arrive, "time": time, "pages": pages, "pages allowed": 70}

    rows = [row(0, "at once", 1.02), row(1, "at once", 1.2), row(0, "staggered", 1.0), row(64, "staggered", 2.3, 77)]
    found = {check.name: (check.value, check.ok) for check in checks(rows)}
    assert found["b_sharing_2048_at_once_over_one_prefill"] == (1.2, False)
    assert found["b_sharing_2048_staggered_over_one_prefill"] == (1.0, True)
    assert found["pages_in_use_over_one_copy_and_private"] == (1.1, False)
    assert [check.ok for check in checks([])] == [None] * 3


@pytest.mark.parametrize("r", RATIOS)
def test_requests_of_the_capacity_part_share_the_stated_part(r: float) -> None:
    shape = shared_shape(r)
    assert sum(shape) == TOKENS
    assert shape.new == NEW
    assert shape.system / TOKENS == pytest.approx(r, abs=1e-4)


def test_a_pool_holds_its_batch_beside_the_reserve() -> None:
    shape = Shape(2048, 64, 128)
    num_pages = pool_pages(shape, 32)
    assert shape.num_pages == 70
    assert 32 * 70 + max(num_pages // 10, 32) <= num_pages


def test_plots_are_drawn_of_what_was_measured(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    points: list[dict[str, object]] = [
        {"r": size / 4, "growth": 1.9, "1/(1-r)": 2.0, "system": 64 * size, "none req/s": None, "relay req/s": 3.0}
        | {"batch": size, "relay decode tok/s": 9.0}
        for size in (1, 2, 3)
    ]
    parts = {name: {"rows": points} for name in ("interactive", "capacity")} | {"batch": {"rows": points[:2]}}
    closing = {"device": "a machine", "quick": True, "load_average": [1.0, 1.0], "results": parts}
    drawn = plots.draw(tmp_path / "out", closing)
    assert [path.name for path in drawn] == ["interactive.png", "capacity.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)
