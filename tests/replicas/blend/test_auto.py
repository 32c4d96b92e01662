"""The loading controller chooses what is soonest of what the report allows, and raises the ratio under a load."""

from __future__ import annotations

import pytest

from mneme.cachetier.policy.cost_model import Calibration, CostModel
from mneme.replicas.blend.auto import Controller, Decision, Work
from mneme.replicas.blend.gate import NO_REPORT, Gate
from mneme.replicas.documents import BlendOptions

GATE = Gate({"query": 0.2, "hkvd": 0.1, "first-k": 0.5, "all": 1.0}, "", (0.0, 0.1, 0.2, 0.3, 0.5))
ROW_S = 1e-3
WORK = Work(num_exact=100, num_reused=3000, num_text=100, num_layers=24)


def costs(step_s: float = 0.0, disk_token_s: float = 0.0) -> CostModel:
    """Rows cost `ROW_S` wherever they stand; tokens that come from the disk `disk_token_s`."""
    calibration = Calibration(
        prefill=(step_s, ROW_S, 0.0),
        decode=(0.0, 0.0, 0.0),
        edges={"disk": (0.0, 0.0, disk_token_s / 1000)},
        step_rows=10_000,
        kv_bytes_per_token=1000,
    )
    return CostModel(calibration, lambda: 0.0)


def test_without_costs_the_smallest_ratio_is_taken() -> None:
    chosen, why, _ = Controller(GATE).decide(BlendOptions(min_tokens=5), WORK)
    assert chosen == BlendOptions(mode="selective", selector="hkvd", ratio=0.1, min_tokens=5)
    assert why == "the quality report allows it"
    alike = Gate({"hkvd": 0.2, "query": 0.2, "random": 0.3})
    assert Controller(alike).decide(BlendOptions(), WORK)[0] == BlendOptions(
        mode="selective", selector="query", ratio=0.2
    )


def test_what_the_request_names_is_used_if_it_is_allowed() -> None:
    for model in (None, costs()):
        controller = Controller(GATE, model)
        chosen = controller.decide(BlendOptions(ratio=0.25, selector="query"), WORK)[0]
        assert chosen == BlendOptions(mode="selective", selector="query", ratio=0.25)
        assert controller.decide(BlendOptions(selector="first-k"), WORK)[0] == BlendOptions(
            mode="selective", selector="first-k", ratio=0.5
        )
        for options in (
            BlendOptions(ratio=0.05),
            BlendOptions(selector="random"),
            BlendOptions(selector="first-k", ratio=0.4),
            BlendOptions(selector="all"),
        ):
            assert controller.decide(options, WORK) == ("not_allowed", "the quality report does not allow it")
        assert Controller(NO_REPORT, model).decide(BlendOptions(), WORK) == ("not_allowed", NO_REPORT.why)


def test_the_soonest_is_taken() -> None:
    # hkvd: 400 rows, 1,200 more in one of 24 layers, 3,000 in 1.2 of them. query: 700 and 100. In full: 3,100.
    controller = Controller(GATE, costs())
    chosen, why, _ = controller.decide(BlendOptions(), WORK)
    assert isinstance(chosen, BlendOptions)
    assert (chosen.selector, chosen.ratio) == ("hkvd", 0.1)
    assert why == "the quality report allows it; predicted: 0.6 s, 3.1 s in full"
    # With few layers its pass over the documents costs more than asking.
    chosen, *_ = controller.decide(BlendOptions(), WORK._replace(num_layers=4))
    assert isinstance(chosen, BlendOptions)
    assert (chosen.selector, chosen.ratio) == ("query", 0.2)


def test_what_is_sooner_in_full_is_computed_in_full() -> None:
    work = WORK._replace(num_reused=40)
    controller = Controller(GATE, costs(step_s=10.0))
    found = controller.decide(BlendOptions(selector="query"), work)
    assert found == ("sooner_in_full", "predicted to be sooner: 10.1 s, 20.2 s with reuse")
    assert isinstance(controller.decide(BlendOptions(), work._replace(num_reused=0)), Decision)


def test_where_blends_took_longer_than_their_rows_it_is_computed_in_full_and_tried_again() -> None:
    controller, half = Controller(GATE, costs()), BlendOptions(ratio=0.5)
    decided = controller.decide(half, WORK)
    assert isinstance(decided, Decision)
    assert decided.predicted_s is not None
    controller.learn(decided.predicted_s, 12 * decided.predicted_s)
    found = [controller.decide(half, WORK)[0] for _ in range(60)]
    assert found[:5] == ["sooner_in_full"] * 5
    assert found[-1] != "sooner_in_full"
    controller.learn(decided.predicted_s, decided.predicted_s)
    assert isinstance(controller.decide(half, WORK), Decision)


def test_one_step_that_hung_says_nothing_of_blends_that_gain_much() -> None:
    controller = Controller(GATE, costs())
    decided = controller.decide(BlendOptions(), WORK)  # 0.6 s of 3.1 s
    assert isinstance(decided, Decision)
    assert decided.predicted_s is not None
    controller.learn(decided.predicted_s, 100 * decided.predicted_s)
    assert isinstance(controller.decide(BlendOptions(), WORK), Decision)


def test_rows_cost_more_behind_a_longer_context() -> None:
    calibration = Calibration(prefill=(0.0, 0.0, 1e-6), decode=(0.0, 0.0, 0.0), step_rows=10_000, kv_bytes_per_token=1)
    controller = Controller(GATE, CostModel(calibration, lambda: 0.0))
    # 1,600 rows, which see the 100 before, half of the 1,500 between them, and half of themselves.
    assert controller.predicted_s("first-k", 0.5, WORK) == pytest.approx(1600 * (850 + 800) * 1e-6)


def test_the_ratio_is_raised_as_far_as_it_hides_under_a_load() -> None:
    query = BlendOptions(mode="selective", selector="query", ratio=0.2)
    for token_s, ratio in ((0.0, 0.2), (0.9 * ROW_S, 0.2), (1.2 * ROW_S, 0.3), (100 * ROW_S, 0.5)):
        controller = Controller(GATE, costs(disk_token_s=token_s))
        assert controller.raised(WORK, query, {"disk": 1000, "recomputed": 10**6}).ratio == ratio
    assert Controller(GATE).raised(WORK, query, {"disk": 10**6}) == query
    assert Controller(GATE, costs(disk_token_s=1.0)).raised(WORK, query, {"device": 3000}) == query
