"""The router's arrays price what the cost model itself prices."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mneme.cachetier.policy.cost_model import CostModel
from mneme.router.score import UNKNOWN, Asked, Loads, alike, figures_of, prices

_terms = st.lists(st.floats(1e-9, 1e-2), min_size=3, max_size=3)
_costs = st.fixed_dictionaries(
    {
        "prefill": _terms,
        "decode": _terms,
        "edges": st.fixed_dictionaries({"host": _terms, "peer_host": _terms}),
        "step_rows": st.integers(64, 4096),
        "kv_bytes_per_token": st.integers(1, 10**6),
        "scales": st.fixed_dictionaries({kind: st.floats(0.1, 10) for kind in ("prefill", "decode")}),
    }
)


@given(_costs, st.integers(2, 20_000), st.integers(0, 20_000), st.integers(1, 64), st.integers(0, 10**6))
def test_a_prompt_beside_streams(costs: dict, num_tokens: int, matched: int, running: int, context: int) -> None:
    model, matched = CostModel.from_mapping(costs), min(matched, num_tokens - 1)
    figures = alike(figures_of(model.figures())[None])
    none, loads = np.zeros(1), np.array([[float(running)], [float(context)]])
    found = prices(
        Loads(figures, figures, none, *loads, none),
        Asked(num_tokens, np.array([float(matched)]), none, none, none, none, np.zeros(1, bool)),
    )
    new = num_tokens - matched
    assert found.compute[0] == pytest.approx(min(model.prefill_s(new, matched), 1e6))
    _, per_sequence, per_token = model.terms_of("decode")
    num_steps = -(-new // model.step_rows)
    assert found.decode[0] == pytest.approx(min(num_steps * (per_sequence * running + per_token * context), 1e6))


@given(_costs, st.sampled_from(["in_host", "in_node", "at_peers"]), st.integers(1, 79))
def test_what_is_brought(costs: dict, place: str, num_chunks: int) -> None:
    model = CostModel.from_mapping(costs)
    figures, none = alike(figures_of(model.figures())[None]), np.zeros(1)
    brought = dict.fromkeys(("in_host", "in_node", "at_peers"), none) | {place: np.array([256.0 * num_chunks])}
    asked = Asked(20_480, none, brought["in_host"], brought["in_node"], brought["at_peers"], none, np.zeros(1, bool))
    found = prices(Loads(figures, figures, none, none, none, none), asked)
    num_bytes = 256 * num_chunks * model.calibration.kv_bytes_per_token
    edge_s = model.edge_s("peer_host" if place == "at_peers" else "host", num_bytes, num_chunks)
    behind_s, all_s = model.prefill_s(20_480 - 256 * num_chunks, 256 * num_chunks), model.prefill_s(20_480, 0)
    expected_s = min(max(edge_s - behind_s, 0.0), max(all_s - behind_s, 0.0))
    assert found.load[0] == pytest.approx(min(expected_s, 1e6), rel=1e-6, abs=1e-9)


def test_until_a_replica_has_said_what_its_work_costs_a_price_is_proportional_to_tokens() -> None:
    figures, none = UNKNOWN[None], np.zeros(1)
    asked = [Asked(num, none, none, none, none, none, np.zeros(1, bool)) for num in (1000, 3000)]
    one, three = (prices(Loads(figures, figures, none, none, none, none), each) for each in asked)
    assert three.compute[0] == pytest.approx(3 * one.compute[0])
