"""The compiled CPU backend: `cpp/attention.cpp` over the plan's work list.

Shared segments are read once for all their rows, queries are rotated, pages are read where they lie, and partial
results merge by log-sum-exp. Products are summed in float32. Of bfloat16 keys the CPU's own dot product is used where
it has one (AVX512_BF16) and many rows meet: the rotated, scaled query is then rounded once to bfloat16. Few rows, and
CPUs without it, widen keys and values instead, with the query in float32.
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

from mneme.kernels.arguments import AttendArgs
from mneme.kernels.native.library import (
    DTYPE_NUMBERS,
    KV_DTYPE_NUMBERS,
    NUMBER,
    POINTER,
    REAL,
    native_function,
    num_threads,
)
from mneme.kernels.page_bounds import page_bounds, version_of
from mneme.kernels.page_table import FREE_SLOT_POSITION
from mneme.kernels.plan import Plan

_LOG2_E = math.log2(math.e)
_WORK_ARRAYS = (
    "row_begin", "row", "run_begin", "page_begin", "page_end", "page_id",
    "delta_begin", "delta", "mask_number", "mask_begin", "mask_stride", "mask",
)  # fmt: skip
_INTEGERS = (
    "num_shared", "num_pieces", "num_rows", "num_loose_rows", "num_q_heads", "num_kv_heads", "head_dim", "page_size",
    "window", "dtype", "rotary_half", "num_positions", "kv_dtype", "kv_stride",
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


def attend_native(args: AttendArgs) -> tuple[Tensor, Tensor]:
    """See `mneme.kernels.attention.attend`.

    Scratch: 4 bytes per element of q if there are shared segments, and per thread about 0.3 MB.
    """
    q, plan, prepared = args.q, args.plan, prepare(args)
    if q.stride(2) != 1 or q.stride(1) != plan.head_dim:
        q = q.contiguous()
    out, lse = torch.empty(q.shape, dtype=q.dtype), torch.empty(q.shape[:2])
    # Each call's own: several threads may attend by one plan.
    total = torch.empty(prepared.num_totals) if prepared.num_totals else None
    native_function("mneme_attend")(
        prepared.address,
        q.data_ptr(),
        q.stride(0),
        args.k_pages.data_ptr(),
        args.v_pages.data_ptr(),
        args.k_pages.shape[1] * plan.page_size,
        out.data_ptr(),
        lse.data_ptr(),
        None if total is None else total.data_ptr(),
        num_threads(),
    )
    return out, lse


def prepare(args: AttendArgs) -> _Prepared:
    """Return what the first layer of a step derived, or derive it if `slot_position` has changed since."""
    options = (id(args.rope), args.softmax_scale, args.window, args.soft_cap, args.q.dtype, args.k_pages.dtype)
    key = ("native", args.slot_position.data_ptr(), *options)
    version = version_of(args.slot_position)
    found: _Prepared | None = args.plan.prepared.get(key)
    if found is None or found.version != version:
        found = args.plan.prepared[key] = _make(args, version)
    return found


def _make(args: AttendArgs, version: int | None) -> _Prepared:
    args.check_reach()
    plan, work, rope, soft_cap = args.plan, args.plan.work, args.rope, args.soft_cap
    position, loose = plan.position.astype(np.int32), _loose_rows(plan)
    bounds = page_bounds(args.slot_position, plan.page_size)
    step = _Step(
        num_shared=work.num_shared,
        num_pieces=work.num_pieces,
        num_rows=plan.num_rows,
        num_loose_rows=len(loose),
        num_q_heads=plan.num_q_heads,
        num_kv_heads=plan.num_kv_heads,
        head_dim=plan.head_dim,
        page_size=plan.page_size,
        window=FREE_SLOT_POSITION if args.window is None else min(args.window, FREE_SLOT_POSITION),
        dtype=DTYPE_NUMBERS[args.q.dtype],
        rotary_half=0 if rope is None else rope.rotary_dim // 2,
        num_positions=0 if rope is None else rope.num_positions,
        score_scale=args.softmax_scale * _LOG2_E if soft_cap is None else args.softmax_scale / soft_cap,
        kv_dtype=KV_DTYPE_NUMBERS[args.k_pages.dtype],
        kv_stride=args.k_pages.shape[3],
        soft_cap=0.0 if soft_cap is None else soft_cap * _LOG2_E,
        position=_address(position),
        slot_position=args.slot_position.data_ptr(),
        loose_row=_address(loose),
        rope=None if rope is None else rope.table.data_ptr(),
        page_first=_address(bounds.first),
        page_last=_address(bounds.last),
        **{name: _address(getattr(work, name)) for name in _WORK_ARRAYS},
    )
    num_totals = plan.num_rows * plan.num_q_heads * plan.head_dim if work.num_shared else 0
    alive = (work, position, loose, bounds, args.slot_position, rope)
    return _Prepared(step, ctypes.addressof(step), version, alive, num_totals)


def _loose_rows(plan: Plan) -> npt.NDArray[np.int32]:
    """Return the rows that are in no private piece."""
    is_loose = np.ones(plan.num_rows, bool)
    is_loose[plan.work.row[plan.work.row_begin[plan.work.num_shared] :]] = False
    return np.flatnonzero(is_loose).astype(np.int32)


def _address(array: npt.NDArray[Any]) -> int:
    return array.ctypes.data
