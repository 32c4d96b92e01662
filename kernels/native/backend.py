"""The compiled CPU backend: `cpp/attention.cpp` over the plan's work list.

Like the torch backend it reads shared segments once for all their rows, rotates queries and merges by log-sum-exp; it
differs in reading pages where they lie. Products are summed in float32. Of bfloat16 keys the CPU's own dot product is
used where it has one (AVX512_BF16) and many rows meet: the rotated, scaled query is then rounded once to bfloat16. Few
rows, and CPUs without it, widen keys and values instead, with the query in float32.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mneme.kernels.native.library import DTYPE_NUMBERS, NUMBER, POINTER, REAL, native_function, num_threads
from mneme.kernels.page_bounds import page_bounds, version_of
from mneme.kernels.page_table import FREE_SLOT_POSITION
from mneme.kernels.plan import Plan
from mneme.kernels.rope import RopeTable

_LOG2_E = math.log2(math.e)
_WORK_ARRAYS = (
    "row_begin", "row", "run_begin", "page_begin", "page_end", "page_id",
    "delta_begin", "delta", "mask_number", "mask_begin", "mask_stride", "mask",
)  # fmt: skip
_INTEGERS = (
    "num_shared", "num_pieces", "num_rows", "num_loose_rows", "num_q_heads", "num_kv_heads", "head_dim", "page_size",
    "window", "dtype", "rotary_half", "num_positions",
)  # fmt: skip


class _Step(ctypes.Structure):
    """Mirrors cpp/attention.h: Step."""

    _fields_ = (
        *((name, NUMBER) for name in _INTEGERS),
        ("score_scale", REAL),
        ("soft_cap", REAL),
        *((name, POINTER) for name in _WORK_ARRAYS),
        ("position", POINTER),
        ("slot_position", POINTER),
        ("loose_row", POINTER),
        ("rope", POINTER),
        ("alibi_slopes", POINTER),
        ("page_first", POINTER),
        ("page_last", POINTER),
    )


@dataclass(frozen=True, slots=True)
class _Prepared:
    """Holds what all layers of a step with the same options have in common."""

    step: _Step
    address: int  # of `step`
    version: int | None  # of slot_position when this was made
    alive: tuple[Any, ...]  # everything that `step` points into
    num_totals: int  # floats that hold what rows get from shared segments


def supports(dtype: torch.dtype) -> bool:
    """Tell whether the compiled kernels take tensors of this type, of any head_dim, page size and ratio of heads."""
    return dtype in DTYPE_NUMBERS


def attend_native(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    slot_position: Tensor,
    rope: RopeTable | None,
    plan: Plan,
    *,
    softmax_scale: float,
    window: int | None = None,
    alibi_slopes: Tensor | None = None,
    soft_cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """See `mneme.kernels.attention.attend`.

    Scratch: 4 bytes per element of q if there are shared segments, and per thread about 0.3 MB.
    """
    options = (rope, softmax_scale, window, alibi_slopes, soft_cap, q.dtype)
    prepared = prepare(plan, slot_position, options)
    if q.stride(2) != 1 or q.stride(1) != plan.head_dim:
        q = q.contiguous()
    out, lse = torch.empty(q.shape, dtype=q.dtype), torch.empty(q.shape[:2])
    # Each call's own: several threads may attend by one plan.
    total = torch.empty(prepared.num_totals) if prepared.num_totals else None
    native_function("mneme_attend")(
        prepared.address,
        q.data_ptr(),
        q.stride(0),
        k_pages.data_ptr(),
        v_pages.data_ptr(),
        k_pages.shape[1] * plan.page_size,
        out.data_ptr(),
        lse.data_ptr(),
        None if total is None else total.data_ptr(),
        num_threads(),
    )
    return out, lse


def prepare(plan: Plan, slot_position: Tensor, options: tuple[Any, ...]) -> _Prepared:
    """Return what the first layer of a step derived, or derive it if `slot_position` has changed since.

    options   (rope, softmax_scale, window, alibi_slopes, soft_cap, dtype of q)
    """
    rope, softmax_scale, window, alibi_slopes, soft_cap, dtype = options
    slopes = None if alibi_slopes is None else (id(alibi_slopes), version_of(alibi_slopes))
    key = ("native", slot_position.data_ptr(), id(rope), softmax_scale, window, slopes, soft_cap, dtype)
    version = version_of(slot_position)
    found: _Prepared | None = plan.prepared.get(key)
    if found is None or found.version != version:
        found = plan.prepared[key] = _make(plan, slot_position, options, version)
    return found


def _make(plan: Plan, slot_position: Tensor, options: tuple[Any, ...], version: int | None) -> _Prepared:
    rope, softmax_scale, window, alibi_slopes, soft_cap, dtype = options
    work = plan.work
    position = plan.position.astype(np.int32)
    loose = _loose_rows(plan)
    bounds = page_bounds(slot_position, plan.page_size)
    slopes = None if alibi_slopes is None else alibi_slopes.float().mul(_LOG2_E).contiguous()
    table = None if rope is None else rope.table.contiguous()
    step = _Step(
        num_shared=work.num_shared,
        num_pieces=work.num_pieces,
        num_rows=plan.num_rows,
        num_loose_rows=len(loose),
        num_q_heads=plan.num_q_heads,
        num_kv_heads=plan.num_kv_heads,
        head_dim=plan.head_dim,
        page_size=plan.page_size,
        window=FREE_SLOT_POSITION if window is None else min(window, FREE_SLOT_POSITION),
        dtype=DTYPE_NUMBERS[dtype],
        rotary_half=0 if rope is None else rope.rotary_dim // 2,
        num_positions=0 if rope is None else rope.num_positions,
        score_scale=softmax_scale * _LOG2_E if soft_cap is None else softmax_scale / soft_cap,
        soft_cap=0.0 if soft_cap is None else soft_cap * _LOG2_E,
        position=_address(position),
        slot_position=slot_position.data_ptr(),
        loose_row=_address(loose),
        rope=None if table is None else table.data_ptr(),
        alibi_slopes=None if slopes is None else slopes.data_ptr(),
        page_first=_address(bounds.first),
        page_last=_address(bounds.last),
        **{name: _address(getattr(work, name)) for name in _WORK_ARRAYS},
    )
    _refuse_rows_beyond(step)
    num_totals = plan.num_rows * plan.num_q_heads * plan.head_dim if work.num_shared else 0
    alive = (work, position, loose, bounds, slopes, table, slot_position, rope, alibi_slopes)
    return _Prepared(step, ctypes.addressof(step), version, alive, num_totals)


def _refuse_rows_beyond(step: _Step) -> None:
    beyond = native_function("mneme_attend_prepare")(ctypes.addressof(step))
    if beyond >= 0:
        raise ValueError(f"rows: a visible pair is {beyond} apart, the rope table ends at {step.num_positions}")


def _loose_rows(plan: Plan) -> npt.NDArray[np.int32]:
    """Return the rows that are in no private piece."""
    is_loose = np.ones(plan.num_rows, bool)
    is_loose[plan.work.row[plan.work.row_begin[plan.work.num_shared] :]] = False
    return np.flatnonzero(is_loose).astype(np.int32)


def _address(array: npt.NDArray[Any]) -> int:
    return array.ctypes.data
