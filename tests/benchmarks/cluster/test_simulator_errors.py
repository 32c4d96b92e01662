"""What the simulator's benchmark reads from its grid."""

from __future__ import annotations

from typing import Any

import pytest
from bench_simulator import errors, make_turns, same_order


def row(share: float, real_s: float, simulated_s: float) -> dict[str, Any]:
    return {"share": share, "real_ttft_p50_s": real_s, "simulated_ttft_p50_s": simulated_s}


def test_order_counts_pairs_of_one_rate_that_clearly_differ() -> None:
    rows = [row(0.5, 1.0, 1.1), row(0.5, 2.0, 1.0), row(0.5, 2.1, 3.0), row(0.7, 9.0, 9.0)]
    assert same_order(rows) == 1 / 2  # 2.1 over 1.0 is, 2.0 over 1.0 is not; 2.1 and 2.0 are alike
    assert same_order(rows[3:]) is None


def test_errors_are_relative_to_what_was_real() -> None:
    assert errors([row(0.5, 2.0, 1.5), row(0.5, 1.0, 1.1)], "ttft_p50_s") == pytest.approx([0.25, 0.1])


def test_sessions_grow_from_turn_to_turn() -> None:
    turns = make_turns(2.0, 5.0, seed=1)
    assert all(turn.block_ids[: len(before.block_ids)] == before.block_ids for turn in turns for before in turn.after)
    assert {len(turn.after) for turn in turns} == {0, 1}
