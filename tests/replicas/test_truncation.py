"""Which tokens stay when a session outgrows its window; no tensors, milliseconds."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mneme.config import parse
from mneme.errors import ConfigError, ContextLengthExceeded, InvalidRequest
from mneme.replicas.config import EngineConfig
from mneme.replicas.request import SamplingParams
from mneme.replicas.truncation import MAX_RUNS, MIN_RUN_TOKENS, Truncation, plan_truncation, resolved
from tests.budget import examples
from tests.replicas.schedule.test_engine_policy import make_engine, make_request, run, tokens_of


def plan(num_tokens: int, window: int, num_new: int = 1, **options: Any) -> list[tuple[int, int]]:
    more = {name: options.pop(name) for name in ("num_system", "important") if name in options}
    return plan_truncation(num_tokens, window, num_new, Truncation(**{"keep_first": 0} | options), **more)


def test_the_oldest_half_of_the_window_goes() -> None:
    """AttentionStore's example, figure 10: a window of 4K, a ratio of one half."""
    assert plan(4096, 4096) == [(2048, 4096)]
    assert plan(4096, 4096, 100) == [(2048, 4096)]
    assert plan(4096, 4096, 3000) == [(3000, 4096)]
    assert plan(4000, 4096, 96) == [(0, 4000)]
    assert plan(0, 4096, 96) == []


def test_sinks_and_the_system_prompt_stay() -> None:
    assert plan(100, 100, keep_first=None) == [(0, 4), (54, 100)]
    assert plan(100, 100, keep_first=None, strategy="recompute") == [(50, 100)]
    assert plan(100, 100, keep_first=4) == [(0, 4), (54, 100)]
    assert plan(100, 100, keep="system", num_system=20) == [(0, 20), (70, 100)]
    assert plan(100, 100, keep="system", num_system=20, keep_first=30) == [(0, 30), (80, 100)]
    assert plan(100, 100, num_system=20) == [(50, 100)]
    assert plan(100, 100, keep="system", num_system=70) == [(0, 70)]  # it goes for the overflow only
    assert plan(100, 100, 60, keep="system", num_system=70) == [(0, 40)]


def test_what_attention_looked_at_stays_beside_the_recent_half() -> None:
    masses = [0.0] * 256
    masses[70] = masses[71] = 1.0
    masses[20] = 3.0
    kept = plan(256, 256, ratio=0.75, keep="important", important=masses)  # 64 stay: 32 recent, two runs of 16
    assert kept == [(16, 32), (64, 80), (224, 256)]
    assert plan(256, 256, ratio=0.75, keep="important") == [(192, 256)]  # nobody knows what matters
    assert plan(40, 40, ratio=0.5, keep="important", important=[1.0] * 40) == [(20, 40)]  # too little for a run
    assert plan(256, 256, ratio=0.75, keep="important", important=[math.nan] * 256) == [(192, 256)]
    with pytest.raises(ValueError, match="3 attention masses for 10 tokens"):
        plan(10, 10, keep="important", important=[1.0] * 3)


def test_what_is_new_must_fit_alone() -> None:
    assert plan(10, 10, 10) == []
    with pytest.raises(ContextLengthExceeded, match="window of 10 tokens alone"):
        plan(10, 10, 11)


@settings(max_examples=examples(500))
@given(st.data())
def test_any_plan_keeps_what_it_should_and_fits(data: st.DataObject) -> None:
    window = data.draw(st.integers(1, 3000))
    num_tokens = data.draw(st.integers(0, 2 * window))
    num_new = data.draw(st.integers(1, window))
    keep = data.draw(st.sampled_from([None, "system", "important"]))
    num_system = data.draw(st.integers(0, num_tokens))
    truncation = Truncation(
        ratio=data.draw(st.floats(0.01, 0.99)), keep_first=data.draw(st.integers(0, window)), keep=keep
    )
    masses = None
    if data.draw(st.booleans()):
        seed = data.draw(st.integers(1, 1000))
        masses = [((index * 7919 + seed) % 101) / 101 for index in range(num_tokens)]
    kept = plan_truncation(num_tokens, window, num_new, truncation, num_system, masses)

    tokens = [token for start, end in kept for token in range(start, end)]
    assert tokens == sorted(set(tokens))
    assert all(start < end for start, end in kept)
    assert all(end < start for (_, end), (start, _) in itertools.pairwise(kept)), "ranges that touch are one"
    assert set(tokens) <= set(range(num_tokens))
    overflow = num_tokens + num_new - window
    if overflow <= 0:
        assert len(tokens) == num_tokens
        return
    head = max(truncation.keep_first, num_system if keep == "system" else 0)
    num_dropped = num_tokens - len(tokens)
    wanted = max(overflow, min(math.ceil(truncation.ratio * window), max(num_tokens - head, 0)))
    most = max(wanted, num_tokens - max(int((1 - truncation.ratio) * window), head))
    assert wanted <= num_dropped <= most
    assert num_dropped == (most if num_tokens > window else wanted)
    assert tokens[:head] == list(range(min(head, len(tokens))))
    behind = [token for token in tokens if token >= head]
    if keep != "important" or masses is None:
        assert behind == list(range(num_tokens - len(behind), num_tokens))
        return
    assert len(kept) <= 2 + MAX_RUNS
    assert behind[len(behind) // 2 :] == list(range(num_tokens - (len(behind) - len(behind) // 2), num_tokens))
    middle = [run for run in kept if run[0] >= head and run[1] < num_tokens]
    assert all(end - start >= MIN_RUN_TOKENS for start, end in middle if start > head)


@settings(max_examples=examples(100))
@given(st.integers(100, 600), st.integers(1, 1000))
def test_no_run_that_went_has_more_mass_than_one_that_stays(window: int, seed: int) -> None:
    masses = [((index * 7919 + seed) % 101) / 101 for index in range(window)]
    kept = plan(window, window, keep="important", important=masses)
    room = sum(end - start for start, end in kept)
    recent = window - (room - room // 2 // MIN_RUN_TOKENS * MIN_RUN_TOKENS)
    stays = {token for start, end in kept for token in range(start, end)}
    runs = [range(start, start + MIN_RUN_TOKENS) for start in range(recent - MIN_RUN_TOKENS, -1, -MIN_RUN_TOKENS)]
    mass_by_fate: dict[bool, list[float]] = {True: [], False: []}
    for each in runs:
        assert stays.issuperset(each) or stays.isdisjoint(each)
        mass_by_fate[each[0] in stays].append(sum(masses[token] for token in each))
    assert len(mass_by_fate[True]) == room // 2 // MIN_RUN_TOKENS
    assert min(mass_by_fate[True]) >= max(mass_by_fate[False]) - 1e-9


@pytest.mark.parametrize(
    ("given", "field"),
    [
        *(({"ratio": each}, "ratio") for each in (0, 1, math.nan, True, "0.5", -0.5)),
        *(({"keep_first": each}, "keep_first") for each in (-1, 1.0, True)),
        ({"keep": "oldest"}, "keep"),
        ({"strategy": "auto"}, "strategy"),
    ],
)
def test_a_value_that_breaks_a_rule_is_named(given: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        resolved(given, Truncation(), has_session=True)
    assert refusal.value.field == f"truncation.{field}"
    if field != "ratio" or not isinstance(given["ratio"], bool | str):
        with pytest.raises(ConfigError, match=rf"engine\.truncation\.{field}: must be"):
            parse(EngineConfig, {"truncation": given}, "engine")


def test_a_request_says_what_differs_from_the_configuration() -> None:
    default = Truncation(ratio=0.25, keep_first=4)
    assert resolved(None, default, has_session=True) == default
    assert resolved({"ratio": 0.5}, default, has_session=True) == Truncation(ratio=0.5, keep_first=4)
    assert resolved({"strategy": "error"}, default, has_session=True) is None
    assert resolved({"keep_first": None}, default, has_session=True) == default
    assert resolved(None, Truncation(strategy="error"), has_session=True) is None
    assert resolved(None, default, has_session=False) is None
    assert resolved({"strategy": "recompute"}, default, has_session=False) == Truncation(
        strategy="recompute", ratio=0.25, keep_first=4
    )
    with pytest.raises(InvalidRequest, match="needs a session"):
        resolved({"strategy": "reuse_kv"}, default, has_session=False)


def test_an_engine_refuses_what_could_not_work_in_its_window() -> None:
    engine = make_engine(max_context=40)
    one = SamplingParams(temperature=0, max_tokens=1)
    fits = Truncation(keep_first=20)
    engine.submit(make_request("fits", [1], one, session_id="s", truncation=fits))
    with pytest.raises(InvalidRequest, match=r"truncation\.keep_first: at most 20 tokens"):
        engine.submit(make_request("over", [1], one, session_id="s", truncation=Truncation(keep_first=21)))
    with pytest.raises(InvalidRequest, match=r"truncation\.strategy: needs a session"):
        engine.submit(make_request("alone", [1], one, truncation=Truncation()))
    assert len(tokens_of(run(engine), "fits")) == 1
