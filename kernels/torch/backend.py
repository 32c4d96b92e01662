"""The attention of a CPU without a compiler, or of CUDA without triton; and a second opinion on the other backends.

Each sequence alone, by its page table: what its rows see is gathered, queries are rotated once for each delta, and one
softmax goes over all. Nothing is rounded before the result. Pages that several sequences share are read by each.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

import torch
from mneme.kernels.arguments import AttendArgs, dequantized
from mneme.kernels.plan import Plan
from torch import Tensor

_MOST_SCORES = 1 << 22  # of the rows that are computed together, unless one row has more


class _Sequence(NamedTuple):
    """A sequence's query rows, and the slots that its masks show in the order of their deltas."""

    first_row: int
    position: Tensor  # int64 [R]
    slots: Tensor  # int64 [L]
    delta: Tensor  # int64 [L]


def attend_torch(args: AttendArgs) -> tuple[Tensor, Tensor]:
    """See `mneme.kernels.attention.attend`.

    Scratch: the keys and values that a block of rows sees, in float32, and three times up to 16 MiB of scores.
    """
    args.check_reach()
    q = args.q
    out, lse = torch.zeros_like(q, memory_format=torch.contiguous_format), q.new_empty(q.shape[:2], dtype=torch.float32)
    lse.fill_(-torch.inf)
    for sequence in _sequences(args.plan, q.device):
        count = max(1, _MOST_SCORES // (q.shape[1] * max(1, len(sequence.slots))))
        row = sequence.first_row
        for position in torch.split(sequence.position, count):
            rows = slice(row, row + len(position))
            _attend_rows(args, sequence, position, q[rows], out[rows], lse[rows])
            row = rows.stop
    return out, lse


def _sequences(plan: Plan, device: torch.device) -> list[_Sequence]:
    """Return the sequences that have rows; once per step."""
    found: list[_Sequence] | None = plan.prepared.get(("torch", device))
    if found is None:
        found = plan.prepared["torch", device] = []
        tables, rows = plan.page_tables, np.unique(plan.sequence, return_index=True, return_counts=True)
        for sequence, first, count in zip(*rows, strict=True):
            table = tables[sequence]
            page, offset = np.nonzero((table.masks[:, None] >> np.arange(plan.page_size)) & 1)
            order = np.argsort(table.deltas[page], kind="stable")
            slots = table.page_ids.astype(np.int64)[page] * plan.page_size + offset
            arrays = (plan.position[first : first + count], slots[order], table.deltas.astype(np.int64)[page][order])
            found.append(_Sequence(int(first), *(torch.from_numpy(array).to(device) for array in arrays)))
    return found


def _attend_rows(args: AttendArgs, sequence: _Sequence, position: Tensor, q: Tensor, out: Tensor, lse: Tensor) -> None:
    """Attend some rows of a sequence: q [R, Hq, D] at `position` [R]; out and lse are written where they see a key."""
    num_kv_heads, head_dim = args.plan.num_kv_heads, args.plan.head_dim
    key_position = args.slot_position.index_select(0, sequence.slots) + sequence.delta  # in the sequence
    visible = key_position <= position[:, None]
    if args.window is not None:
        visible &= key_position > position[:, None] - args.window
    columns = visible.any(0).nonzero()[:, 0]
    if not len(columns):
        return
    slots, visible = sequence.slots[columns], visible[:, columns]
    pools = (pages.flatten(1, 2) for pages in (args.k_pages, args.v_pages))
    keys, values = (dequantized(pool.index_select(1, slots)).float() for pool in pools)  # [Hkv, L, D]

    deltas, counts = torch.unique_consecutive(sequence.delta[columns], return_counts=True)
    parts = []
    for delta, part in zip(deltas, torch.split(keys, counts.tolist(), 1), strict=True):
        rotated = q.float()
        if args.rope is not None:  # rows that see nothing under this delta are clamped
            rotated = args.rope.rotate(rotated, (position - delta).clamp(0, args.rope.num_positions - 1))
        by_kv_head = rotated.view(len(q), num_kv_heads, -1, head_dim).transpose(0, 1)  # [Hkv, R, G, D]
        parts.append(by_kv_head.flatten(1, 2) @ part.mT)
    scores = (parts[0] if len(parts) == 1 else torch.cat(parts, -1)) * args.softmax_scale
    if args.soft_cap is not None:
        scores = (scores / args.soft_cap).tanh() * args.soft_cap
    scores = scores.view(num_kv_heads, len(q), -1, len(slots))
    is_clear = bool(visible.all())
    if not is_clear:
        scores.masked_fill_(~visible[:, None], -torch.inf)
    logsum = scores.logsumexp(-1)  # [Hkv, R, G]
    weights = (scores - logsum.clamp(min=-1e30)[..., None]).exp()  # 0 for a row that sees nothing

    broken = None if is_clear or values.sum().isfinite() else ~values.isfinite().all(-1)  # [Hkv, L]
    values = values if broken is None else values.masked_fill(broken[..., None], 0.0)
    weighed = (weights.flatten(1, 2) @ values).view(num_kv_heads, len(q), -1, head_dim)
    if broken is not None:  # 0 x NaN is NaN: it is for the rows that see it alone
        weighed[(visible & broken[:, None]).any(-1)] = torch.nan
    out.copy_(weighed.transpose(0, 1).flatten(1, 2))
    lse.copy_(logsum.transpose(0, 1).flatten(1, 2))
