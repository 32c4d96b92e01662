"""Draws that are more than the best token, over a runner without a model: the sampler itself makes them."""

from __future__ import annotations

from typing import Any

import pytest

from mneme.replicas.config import EngineConfig
from mneme.replicas.engine.engine import Engine
from mneme.replicas.request import SamplingParams
from tests.replicas.fake_runner import FakeRunner, continuation
from tests.replicas.schedule.test_engine_policy import make_engine, make_request, run, tokens_of

pytestmark = pytest.mark.engine


def test_end_of_text_ends_unless_it_is_ignored_or_barred() -> None:
    greedy = continuation([1, 2], 12, 5)
    eos = greedy[2]
    first = greedy.index(eos)

    def output(**options: Any) -> tuple[list[int], str | None]:
        config = EngineConfig()
        engine = Engine(FakeRunner(64, 4), None, config, eos_token_ids=(eos, 99))  # type: ignore[arg-type]
        engine.submit(make_request("a", [1, 2], SamplingParams(temperature=0, max_tokens=12, **options)))
        events = run(engine)
        return tokens_of(events, "a"), events[-1].finish_reason

    assert output() == (greedy[: first + 1], "stop")
    assert output(ignore_eos=True) == (greedy, "length")
    barred, _ = output(min_tokens=8)
    assert eos not in barred[:8]
    assert len(barred) >= 8


def test_penalties_count_the_output_also_of_a_resumed_request() -> None:
    def output(prompt: list[int], offset: int = 0, **options: Any) -> list[int]:
        engine = make_engine()
        params = SamplingParams(temperature=0, max_tokens=4 - offset, **options)
        engine.submit(make_request("a", prompt, params, output_offset=offset))
        return tokens_of(run(engine), "a")

    for options in ({"frequency_penalty": 2.0}, {"presence_penalty": 2.0}, {"repetition_penalty": 10.0}):
        # Logits are 10 for the prediction and 0 for the others: a bias of 9.5 makes one token a close second.
        biased = {"logit_bias": {0: 9.5}, **options}
        whole = output([1, 2], **biased)
        assert whole[:2] + output([1, 2, *whole[:2]], offset=2, **biased) == whole
    assert output([1, 2], logit_bias={0: 20.0}) == [0] * 4
    assert output([1, 2], logit_bias={0: 20.0}, repetition_penalty=10.0) != [0] * 4  # its second time costs its lead


def test_a_resumed_draw_is_the_draw_it_would_have_been() -> None:
    def output(prompt: list[int], offset: int = 0) -> list[int]:
        engine = make_engine()
        params = SamplingParams(temperature=2.0, max_tokens=8 - offset, seed=3, logit_bias=dict.fromkeys(range(5), 0.0))
        engine.runner.flat = True  # type: ignore[attr-defined]
        engine.submit(make_request("a", prompt, params, output_offset=offset))
        return tokens_of(run(engine), "a")

    whole = output([1, 2])
    assert len(set(whole)) > 1
    assert whole[:3] + output([1, 2, *whole[:3]], offset=3) == whole
