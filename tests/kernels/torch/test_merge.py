"""Merging parts equals attending to all keys at once."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mneme.kernels.torch.merge import UNSEEN_SCORE, merge_into, merge_parts


@given(sizes=st.lists(st.integers(0, 5), min_size=1, max_size=5), scale=st.sampled_from([1.0, 40.0, 400.0]))
@settings(deadline=None, max_examples=60)
def test_parts_of_any_size_merge_to_the_whole(sizes: list[int], scale: float) -> None:
    """Scores up to a thousand would overflow without the shift; empty parts have lse -inf."""
    torch.manual_seed(sum(sizes))
    scores = torch.randn(3, sum(sizes), dtype=torch.float64) * scale
    values = torch.randn(sum(sizes), 4, dtype=torch.float64)
    outs, lses = [], []
    for part_scores, part_values in zip(scores.split(sizes, 1), values.split(sizes, 0), strict=True):
        outs.append(torch.softmax(part_scores, 1) @ part_values)
        lses.append(torch.logsumexp(part_scores, 1))
    out, lse = merge_parts(torch.stack(outs).float(), torch.stack(lses).float())
    torch.testing.assert_close(lse, torch.logsumexp(scores, 1).float(), atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(out, (torch.softmax(scores, 1) @ values).float(), atol=1e-3, rtol=1e-3)


def test_rows_that_no_part_saw_give_zero_and_minus_infinity() -> None:
    out, lse = merge_parts(torch.zeros(3, 2, 4), torch.full((3, 2), -torch.inf))
    assert torch.equal(out, torch.zeros(2, 4))
    assert torch.equal(lse, torch.full((2,), -torch.inf))


def test_merging_in_place_equals_merging_at_once() -> None:
    outs, lses = torch.randn(3, 5, 4), torch.randn(3, 5) * 10
    lses[1, 2] = UNSEEN_SCORE
    out, lse = outs[0].clone(), lses[0].clone()
    for part in (1, 2):
        merge_into(out, lse, outs[part], lses[part])
    wanted = merge_parts(outs, lses)
    torch.testing.assert_close(out, wanted[0], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(lse, wanted[1])


def test_an_unseen_part_changes_nothing_at_all() -> None:
    out, lse = torch.randn(5, 4), torch.randn(5)
    merged_out, merged_lse = out.clone(), lse.clone()
    merge_into(merged_out, merged_lse, torch.randn(5, 4), torch.full((5,), UNSEEN_SCORE))
    assert torch.equal(merged_out, out)
    assert torch.equal(merged_lse, lse)
