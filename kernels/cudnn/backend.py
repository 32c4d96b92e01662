"""Long prompts over many keys by cuDNN's attention, by way of torch, merged by log-sum-exp with what is not its kind.

On an H100 it multiplies at 680 TFLOP/s where `wide_kernel` reaches 490, and takes a pool's pages as they lie where
their ids follow each other. It knows no deltas, masks or positions, so it gets what needs none: rows that follow each
other, over the last pages of their own table that are whole, unmoved, and read by no other sequence of the step. The
keys before the rows come without a mask, in pieces of few sizes, because each size costs 40 to 70 ms when it is first
met, and a new kind of call 0.7 to 1.4 s; the rest of them and the rows' own come as one causal square.

Not run on a GPU as a whole yet, only its calls: it is asked with MNEME_CUDNN=1 in the environment alone.

Whether these pages hold the tokens that their places say is known on the device alone, and nobody waits for it. Where
they do, they are hidden from the other attention; where not, what cuDNN gave weighs nothing and the other attention
sees all. A number that is not finite in a row's value may reach rows before it of the same prompt.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mneme.kernels.arguments import AttendArgs
from mneme.kernels.kv_write import write_kv
from mneme.kernels.page_bounds import version_of
from mneme.kernels.page_table import FREE_SLOT_POSITION, IntArray, full_mask
from mneme.kernels.plan import Plan
from mneme.kernels.upload import upload

logger = logging.getLogger(__name__)

# From where it pays for rotated queries, gathered keys and merges in a pass of its own.
LEAST_ROWS = 1024
LEAST_KEYS = 16384
# Sizes, so that few occur: rows are padded up to a multiple, pieces of past keys are this times a power of two.
ROW_STEP = 512
KEY_STEP = 2048

_MIN_CAPABILITY = (9, 0)
# The lse of rows that see nothing, while parts are merged: finite, so that no NaN arises, and of no weight.
_UNSEEN = -1e30
_given_up: list[str] = []
is_on = os.environ.get("MNEME_CUDNN") == "1"


class _Long(NamedTuple):
    """Rows of one sequence, and the pages whose keys cuDNN reads for them."""

    first_row: int
    num_rows: int
    page_ids: IntArray
    start: int  # position of the first key
    past: int  # keys before the first row


class _Staged(NamedTuple):
    """What the layers of a step share."""

    longs: tuple[_Long, ...]
    page_ids: tuple[Tensor, ...]  # theirs, on the device
    hidden: Tensor  # slot_position without the pages that cuDNN reads
    is_exact: Tensor  # bool [len(longs)] whether the pages hold what their places say
    slot_position: Tensor
    version: int | None


def sdpa(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of [1, heads, length, head_dim], k and v with fewer heads; out and its log-sum-exp [1, heads, rows]."""
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, is_causal, False, scale=scale
    )
    return out, lse.squeeze(-1)


def has_long(device: torch.device, dtype: torch.dtype, plan: Plan) -> bool:
    """Tell whether cuDNN may do a part of a plan."""
    if not is_on or plan.num_rows < LEAST_ROWS or _given_up or plan.head_dim not in (64, 128) or dtype.itemsize != 2:
        return False
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < _MIN_CAPABILITY:
        return False
    return not torch.cuda.is_current_stream_capturing() and bool(_longs(plan))


def attend_long(args: AttendArgs, *, rest: Callable[[AttendArgs], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """See `mneme.kernels.attention.attend`; `rest` attends to what is not long, or to all where cuDNN refuses."""
    if args.window is not None or args.soft_cap is not None:
        return rest(args)
    staged = _staged(args.plan, args.slot_position)
    try:
        found = [_attend(args, *long) for long in zip(staged.longs, staged.page_ids, staged.is_exact, strict=True)]
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        logger.warning("cuDNN attends to no long prompt from now on: %s", error)
        _given_up.append(str(error))
        return rest(args)
    out, lse = rest(args._replace(slot_position=staged.hidden))
    for long, parts in zip(staged.longs, found, strict=True):
        rows = slice(long.first_row, long.first_row + long.num_rows)
        merged, logsum = out[rows].float(), lse[rows].clamp(min=_UNSEEN)
        for part_out, part_lse in parts:
            merged.lerp_(part_out, torch.sigmoid(part_lse - logsum).unsqueeze(-1))
            torch.logaddexp(logsum, part_lse, out=logsum)
        out[rows], lse[rows] = merged, torch.where(logsum <= _UNSEEN, -torch.inf, logsum)
    return out, lse


def _attend(args: AttendArgs, long: _Long, ids: Tensor, is_exact: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Parts of a prompt's rows, float32 [rows, heads, head_dim] and [rows, heads]."""
    q, pools, scale = args.q, (args.k_pages, args.v_pages), args.softmax_scale
    num_heads, head_dim = args.plan.num_q_heads, args.plan.head_dim
    before = long.past % KEY_STEP  # past keys that the square takes: its first rows are nobody's
    num_square = _up(before + long.num_rows, ROW_STEP)
    num_padded = _up(long.num_rows, ROW_STEP)
    rows = slice(long.first_row, long.first_row + long.num_rows)
    queries = q.new_zeros(num_heads, 1, max(num_square, before + num_padded), head_dim)
    slots = torch.arange(before, before + long.num_rows, device=q.device)
    positions = torch.arange(long.num_rows, device=q.device) + (long.start + long.past)
    write_kv(q[rows], q[rows], slots, positions, queries, torch.empty_like(queries), args.rope)  # it rotates
    queries = queries.view(1, num_heads, -1, head_dim)
    square = [pages.new_zeros(1, len(pages), num_square, head_dim) for pages in pools]
    first = long.past - before
    for target, pages in zip(square, pools, strict=True):
        target[:, :, : before + long.num_rows] = _keys(pages, long, ids, first, before + long.num_rows)
    found = [sdpa(queries[:, :, :num_square], *square, is_causal=True, scale=scale)]
    found = [(out[:, :, before:], lse[:, :, before:]) for out, lse in found]
    start = 0
    while start < first:
        length = KEY_STEP << (((first - start) // KEY_STEP).bit_length() - 1)
        keys, values = (_keys(pages, long, ids, start, length) for pages in pools)
        padded = queries[:, :, before : before + num_padded]
        found.append(sdpa(padded, keys, values, is_causal=False, scale=scale))
        start += length
    return [
        (
            torch.where(is_exact, out[0, :, : long.num_rows].transpose(0, 1).float(), 0.0),
            torch.where(is_exact, lse[0, :, : long.num_rows].T, _UNSEEN),
        )
        for out, lse in found
    ]


def _keys(pages: Tensor, long: _Long, page_ids: Tensor, start: int, length: int) -> Tensor:
    """Return [1, heads, length, head_dim] of a prompt's pages: as they lie where their ids follow each other."""
    page_size = pages.shape[2]
    first, end = start // page_size, -(-(start + length) // page_size)
    ids = long.page_ids[first:end]
    if (np.diff(ids) == 1).all():
        found = pages[:, int(ids[0]) : int(ids[-1]) + 1].flatten(1, 2)
    else:
        found = pages.index_select(1, page_ids[first:end]).flatten(1, 2)
    return found[None, :, start - first * page_size :][:, :, :length]


def _up(number: int, step: int) -> int:
    return -(-number // step) * step


def _staged(plan: Plan, slot_position: Tensor) -> _Staged:
    """Hide the pages of long prompts that hold what their places say; once per step."""
    staged: _Staged | None = plan.prepared.get("cudnn")
    version = version_of(slot_position)
    if staged is None or staged.slot_position is not slot_position or staged.version != version:
        longs, by_page = _longs(plan), slot_position.clone().view(-1, plan.page_size)
        page_ids, flags = tuple(upload(long.page_ids, slot_position.device) for long in longs), []
        for long, ids in zip(longs, page_ids, strict=True):
            found, length = by_page[ids], long.past + long.num_rows
            wanted = torch.arange(length, device=slot_position.device, dtype=torch.int32) + long.start
            flags.append((found.flatten()[:length] == wanted).all())
            by_page[ids] = torch.where(flags[-1], FREE_SLOT_POSITION, found)
        staged = _Staged(longs, page_ids, by_page.flatten(), torch.stack(flags), slot_position, version)
        plan.prepared["cudnn"] = staged
    return staged


def _longs(plan: Plan) -> tuple[_Long, ...]:
    """Find what is long in a plan; once per step."""
    longs: tuple[_Long, ...] | None = plan.prepared.get("cudnn, long")
    if longs is None:
        sequences, counts = np.unique(plan.sequence, return_counts=True)
        many = sequences[counts >= LEAST_ROWS].tolist()
        tables = plan.page_tables if many else ()
        found = [_long_of(plan, sequence, [tables[i] for i in sequences.tolist()], tables) for sequence in many]
        longs = plan.prepared["cudnn, long"] = tuple(long for long in found if long is not None)
    return longs


def _long_of(plan: Plan, sequence: int, others: list[Any], tables: tuple[Any, ...]) -> _Long | None:
    table, rows = tables[sequence], np.flatnonzero(plan.sequence == sequence)
    position, page_size = plan.position[rows], plan.page_size
    if (np.diff(position) != 1).any() or len(table) != -(-(int(position[-1]) + 1) // page_size):
        return None
    mask = full_mask(page_size)
    read = [other.page_ids for other in others if other is not table]
    is_own = ~np.isin(table.page_ids, np.concatenate(read)) if read else np.ones(len(table), bool)
    is_whole = (table.deltas == 0) & ((table.masks & mask) == mask) & is_own
    first = int(np.flatnonzero(~is_whole).max(initial=-1)) + 1
    start = first * page_size
    past = int(position[0]) - start
    if past < 0 or past + len(rows) < LEAST_KEYS:
        return None
    return _Long(int(rows[0]), len(rows), table.page_ids[first:].astype(np.int64), start, past)
