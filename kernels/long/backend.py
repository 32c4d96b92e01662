"""Long prompts by a library's attention, by way of torch, merged by log-sum-exp with what is not its kind.

It knows no deltas, masks or positions, so it gets what needs none: rows that follow each other, over the last pages of
their own table that are whole, unmoved, and read by no other sequence of the step. The keys before the rows come
without a mask; the rows' own come as one causal square. Pages are taken as they lie where their ids follow each other,
else gathered.

*cuDNN.* On an H100 it multiplies at 680 TFLOP/s where `wide_kernel` reaches 490. Keys come in pieces of few sizes,
because each size costs 40 to 70 ms when it is first met, and a new kind of call 0.7 to 1.4 s; the rest of them is in
the square. Not run on a GPU as a whole yet, only its calls: it is asked with MNEME_CUDNN=1 in the environment alone.

*torch on a CPU* multiplies by oneDNN, with AMX where there is AMX. An engine asks it where it was measured to be faster
(`native/choice.py`). On Zen 4 it is not: 51 GF/s a core in bfloat16, where the compiled kernels do 125.

Whether these pages hold the tokens that their places say is known on the device alone, and nobody waits for it. Where
they do, they are hidden from the other attention; where not, what the library gave weighs nothing and the other
attention sees all. A number that is not finite in a row's value may reach rows before it of the same prompt: on a CPU
the other attention then does all of the layer.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from mneme.kernels.arguments import AttendArgs, dequantized
from mneme.kernels.kv_write import write_kv
from mneme.kernels.page_bounds import version_of
from mneme.kernels.page_table import FREE_SLOT_POSITION, IntArray, full_mask
from mneme.kernels.plan import Plan
from mneme.kernels.upload import upload

logger = logging.getLogger(__name__)

_MIN_CAPABILITY = (9, 0)
# The lse of rows that see nothing, while parts are merged: finite, so that no NaN arises, and of no weight.
_UNSEEN = -1e30
_given_up: set[str] = set()
is_on = os.environ.get("MNEME_CUDNN") == "1"


class Sdpa(Protocol):
    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """Attend [1, heads, length, head_dim], k and v with fewer heads; out and its log-sum-exp [1, heads, rows]."""


class Library(NamedTuple):
    """Says who attends, and to what it pays for rotated queries, gathered keys and merges in a pass of its own."""

    name: str
    sdpa: Sdpa
    least_rows: int
    least_keys: int
    # Sizes, so that few occur: rows are padded up to a multiple, pieces of past keys are this times a power of two.
    row_step: int = 1
    key_step: int | None = None  # None: all past keys are one piece
    is_checked: bool = False  # whether somebody waits for what it gives, to see that it is finite


class _Long(NamedTuple):
    """Rows of one sequence, and the pages whose keys the library reads for them."""

    first_row: int
    num_rows: int
    page_ids: IntArray
    start: int  # position of the first key
    past: int  # keys before the first row


class _Staged(NamedTuple):
    """What the layers of a step share."""

    longs: tuple[_Long, ...]
    page_ids: tuple[Tensor, ...]  # theirs, on the device
    hidden: Tensor  # slot_position without the pages that the library reads
    is_exact: Tensor  # bool [len(longs)] whether the pages hold what their places say
    slot_position: Tensor
    version: int | None


def _cudnn_sdpa(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, is_causal, False, scale=scale
    )
    return out, lse.squeeze(-1)


def _torch_sdpa(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal, scale=scale)
    return out, lse


CUDNN = Library("cuDNN", _cudnn_sdpa, least_rows=1024, least_keys=16384, row_step=512, key_step=2048)


def torch_on_cpu(least_rows: int) -> Library:
    """Return torch's own attention, for prompts of which a step has so many rows."""
    return Library("torch", _torch_sdpa, least_rows, least_keys=least_rows, is_checked=True)


def has_long(library: Library, device: torch.device, dtype: torch.dtype, plan: Plan) -> bool:
    """Tell whether a library may do a part of a plan."""
    if plan.num_rows < library.least_rows or library.name in _given_up:
        return False
    if device.type == "cuda":
        is_its_kind = is_on and plan.head_dim in (64, 128) and dtype.itemsize == 2
        is_able = is_its_kind and torch.cuda.get_device_capability(device) >= _MIN_CAPABILITY
        if not is_able or torch.cuda.is_current_stream_capturing():
            return False
    return bool(_longs(plan, library))


def attend_long(
    args: AttendArgs, library: Library, *, rest: Callable[[AttendArgs], tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    """See `mneme.kernels.attention.attend`; `rest` attends to what is not long, or to all where the library refuses."""
    if args.window is not None or args.soft_cap is not None:
        return rest(args)
    staged = _staged(args.plan, args.slot_position, library)
    try:
        longs = zip(staged.longs, staged.page_ids, staged.is_exact, strict=True)
        found = [_attend(args, library, *long) for long in longs]
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        logger.warning("%s attends to no long prompt from now on: %s", library.name, error)
        _given_up.add(library.name)
        return rest(args)
    if library.is_checked and not all(bool(part_out.isfinite().all()) for parts in found for part_out, _ in parts):
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


def _attend(
    args: AttendArgs, library: Library, long: _Long, ids: Tensor, is_exact: Tensor
) -> list[tuple[Tensor, Tensor]]:
    """Parts of a prompt's rows, float32 [rows, heads, head_dim] and [rows, heads]."""
    q, pools, scale = args.q, (args.k_pages, args.v_pages), args.softmax_scale
    num_heads, head_dim = args.plan.num_q_heads, args.plan.head_dim
    key_step = library.key_step or max(long.past, 1)
    before = long.past % key_step  # past keys that the square takes: its first rows are nobody's
    num_square, num_padded = (_up(extra + long.num_rows, library.row_step) for extra in (before, 0))
    rows = slice(long.first_row, long.first_row + long.num_rows)
    queries = q.new_zeros(num_heads, 1, max(num_square, before + num_padded), head_dim)
    slots = torch.arange(before, before + long.num_rows, device=q.device)
    positions = torch.arange(long.num_rows, device=q.device) + (long.start + long.past)
    write_kv(q[rows], q[rows], slots, positions, queries, torch.empty_like(queries), args.rope)  # it rotates
    queries = queries.view(1, num_heads, -1, head_dim)
    square = [q.new_zeros(1, len(pages), num_square, head_dim) for pages in pools]
    first = long.past - before
    for target, pages in zip(square, pools, strict=True):
        target[:, :, : before + long.num_rows] = _keys(pages, long, ids, first, before + long.num_rows, q.dtype)
    found = [library.sdpa(queries[:, :, :num_square], *square, is_causal=True, scale=scale)]
    found = [(out[:, :, before:], lse[:, :, before:]) for out, lse in found]
    start = 0
    while start < first:
        length = key_step << (((first - start) // key_step).bit_length() - 1)
        keys, values = (_keys(pages, long, ids, start, length, q.dtype) for pages in pools)
        padded = queries[:, :, before : before + num_padded]
        found.append(library.sdpa(padded, keys, values, is_causal=False, scale=scale))
        start += length
    return [
        (
            torch.where(is_exact, out[0, :, : long.num_rows].transpose(0, 1).float(), 0.0),
            torch.where(is_exact, lse[0, :, : long.num_rows].T, _UNSEEN),
        )
        for out, lse in found
    ]


def _keys(pages: Tensor, long: _Long, page_ids: Tensor, start: int, length: int, dtype: torch.dtype) -> Tensor:
    """Return [1, heads, length, head_dim] of a prompt's pages: as they lie where their ids follow each other."""
    page_size = pages.shape[2]
    first, end = start // page_size, -(-(start + length) // page_size)
    ids = long.page_ids[first:end]
    if (np.diff(ids) == 1).all():
        found = pages[:, int(ids[0]) : int(ids[-1]) + 1].flatten(1, 2)
    else:
        found = pages.index_select(1, page_ids[first:end]).flatten(1, 2)
    return dequantized(found[None, :, start - first * page_size :][:, :, :length]).to(dtype)


def _up(number: int, step: int) -> int:
    return -(-number // step) * step


def _staged(plan: Plan, slot_position: Tensor, library: Library) -> _Staged:
    """Hide the pages of long prompts that hold what their places say; once per step."""
    staged: _Staged | None = plan.prepared.get("long")
    version = version_of(slot_position)
    if staged is None or staged.slot_position is not slot_position or staged.version != version:
        longs, by_page = _longs(plan, library), slot_position.clone().view(-1, plan.page_size)
        page_ids, flags = tuple(upload(long.page_ids, slot_position.device) for long in longs), []
        for long, ids in zip(longs, page_ids, strict=True):
            found, length = by_page[ids], long.past + long.num_rows
            wanted = torch.arange(length, device=slot_position.device, dtype=torch.int32) + long.start
            flags.append((found.flatten()[:length] == wanted).all())
            by_page[ids] = torch.where(flags[-1], FREE_SLOT_POSITION, found)
        staged = _Staged(longs, page_ids, by_page.flatten(), torch.stack(flags), slot_position, version)
        plan.prepared["long"] = staged
    return staged


def _longs(plan: Plan, library: Library) -> tuple[_Long, ...]:
    """Find what is long in a plan; once per step."""
    longs: tuple[_Long, ...] | None = plan.prepared.get("longs")
    if longs is None:
        sequences, counts = np.unique(plan.sequence, return_counts=True)
        many = sequences[counts >= library.least_rows].tolist()
        tables = plan.page_tables if many else ()
        found = [
            _long_of(plan, library, sequence, [tables[i] for i in sequences.tolist()], tables) for sequence in many
        ]
        longs = plan.prepared["longs"] = tuple(long for long in found if long is not None)
    return longs


def _long_of(plan: Plan, library: Library, sequence: int, others: list[Any], tables: tuple[Any, ...]) -> _Long | None:
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
    if past < 0 or past + len(rows) < library.least_keys:
        return None
    return _Long(int(rows[0]), len(rows), table.page_ids[first:].astype(np.int64), start, past)
