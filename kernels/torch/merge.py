"""Merging partial attention by log-sum-exp: relay fusion (RelayAttention 3.3) for any number of parts.

A part is `(out, lse)`: the softmax-weighted values over some keys and the natural logarithm of the sum of their
exponentiated scores. A part that saw no key has lse -inf (in a backend: UNSEEN_SCORE or thereabouts) and weighs
nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Scores of invisible pairs inside a backend. Finite, so that a row that sees nothing in one part makes no NaN; so low
# that adding any real score leaves it unchanged in float32 and its weight against any real part is exactly 0.
UNSEEN_SCORE = -1e30


def merge_parts(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Merge P parts of the same rows, shifted by their maximum; rows that no part saw give out 0 and lse
    -inf.

    outs    float32 [P, ..., head_dim]
    lses    float32 [P, ...]
    """
    top = lses.amax(0)
    shift = torch.where(torch.isneginf(top), torch.zeros_like(top), top)
    weights = (lses - shift).exp()
    total = weights.sum(0)
    # Where no part saw a key the outs are zeros already, so any divisor will do; 1 keeps 0 / 0 away.
    divisor = torch.where(total > 0, total, torch.ones_like(total))
    out = (outs * (weights / divisor).unsqueeze(-1)).sum(0)
    return out, total.log() + shift


def merge_into(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """Merge one more part into `out` and `lse` in place; every lse is finite (unseen: UNSEEN_SCORE).

    out, part_out   float32 [..., head_dim]
    lse, part_lse   float32 [...]
    """
    weight = torch.sigmoid(part_lse - lse)
    out.lerp_(part_out, weight.unsqueeze(-1))
    torch.logaddexp(lse, part_lse, out=lse)
