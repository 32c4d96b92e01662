"""The oracle against formulas written down independently: dense attention over contiguous keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mneme.kernels.attention import PageTable, QueryRows, RopeTable, attend, build_plan, new_slot_position, write_kv

NUM_TOKENS = 21
PAGE_SIZE = 4
PAGES = [5, 2, 7, 1, 3, 0]
ROPE = RopeTable.from_theta(100.0, 8, 64)
SCALE = 0.4


def attention_over_pages(q: Tensor, k: Tensor, v: Tensor, backend: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """One sequence, causal, through pages in a scrambled order."""
    k_pages, v_pages = torch.full((2, k.shape[1], 8, PAGE_SIZE, 8), torch.nan)
    slots = (torch.tensor(PAGES)[:, None] * PAGE_SIZE + torch.arange(PAGE_SIZE)).flatten()[:NUM_TOKENS]
    positions = torch.arange(NUM_TOKENS)
    slot_position = new_slot_position(8 * PAGE_SIZE)
    slot_position[slots] = positions.int()
    write_kv(k, v, slots, positions, k_pages, v_pages, ROPE)
    plan = build_plan(
        [PageTable.own(PAGES)],
        QueryRows(torch.zeros(NUM_TOKENS, dtype=torch.int64), positions),
        page_size=PAGE_SIZE,
        num_q_heads=q.shape[1],
        num_kv_heads=k.shape[1],
        head_dim=8,
    )
    return attend(q, k_pages, v_pages, slot_position, ROPE, plan, softmax_scale=SCALE, backend=backend, **options)


def dense_scores(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Scaled scores [H, T, T] of rotated queries and keys, and which pairs causality hides."""
    positions = torch.arange(NUM_TOKENS)
    queries, keys = ROPE.rotate(q, positions), ROPE.rotate(k, positions).repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = torch.einsum("qhd,khd->hqk", queries.double(), keys.double()) * SCALE
    return scores, positions[:, None] < positions


def dense_result(scores: Tensor, hidden: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    scores = scores.masked_fill(hidden, -torch.inf)
    values = v.double().repeat_interleave(len(scores) // v.shape[1], 1)
    out = torch.einsum("hqk,khd->qhd", torch.softmax(scores, -1), values)
    return out.float(), torch.logsumexp(scores, -1).T.float()


@pytest.mark.parametrize("options", [{}, {"window": 1}, {"window": 6}, {"soft_cap": 1.5}])
def test_the_oracle_is_dense_causal_attention_of_grouped_heads(options: dict[str, Any]) -> None:
    """A window counts the row itself, and the cap applies to scaled scores."""
    torch.manual_seed(0)
    q, k, v = torch.randn(NUM_TOKENS, 4, 8), torch.randn(NUM_TOKENS, 2, 8), torch.randn(NUM_TOKENS, 2, 8)
    scores, hidden = dense_scores(q, k)
    positions = torch.arange(NUM_TOKENS)
    hidden = hidden | (positions <= positions[:, None] - options.get("window", NUM_TOKENS))
    if cap := options.get("soft_cap"):
        scores = cap * torch.tanh(scores / cap)
    got = attention_over_pages(q, k, v, "reference", **options)
    torch.testing.assert_close(got, dense_result(scores, hidden, v), atol=2e-6, rtol=1e-5)
