"""Attention over segments with deltas and masks: the public face of `mneme.kernels`.

A key that was rotated once at position p serves a sequence that wants it at p + delta, because the query is rotated
by `m - delta` instead of m. So keys are never rotated twice, never copied to be moved and never stored un-rotated,
and pages at different positions of different sequences are read once for all of them. Rotating queries was published
by LazyAttention (arXiv 2606.04302) and Hogwild! inference (arXiv 2504.06261); reading shared pages once, chunk-first,
with a delta per query row, is this project's.

    mark_written(slot_position, slots, positions)                                   # once per step, for all layers
    plan = build_plan(tables, QueryRows(sequence, position), page_size=32, ...)
    for layer in layers:
        write_kv(k, v, slots, positions, k_pages[layer], v_pages[layer], rope)
        out, lse = attend(q, k_pages[layer], v_pages[layer], slot_position, rope, plan, softmax_scale=scale)
    plan = plan.with_rows(next_rows)                                                # the next decode step
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor

from mneme.kernels.cudnn import backend as cudnn
from mneme.kernels.kv_write import mark_free, mark_written, new_slot_position, write_kv
from mneme.kernels.native import backend as native_backend
from mneme.kernels.native import library as native_library
from mneme.kernels.page_table import ALL_VISIBLE, FREE_SLOT_POSITION, PageRef, PageTable, QueryRows, is_integer
from mneme.kernels.plan import Plan, build_plan
from mneme.kernels.reference import attend_reference
from mneme.kernels.rope import RopeTable
from mneme.kernels.share_cost import COMPILED_BFLOAT16, COMPILED_FLOAT32, TORCH, TRITON, ShareCost
from mneme.kernels.torch.backend import attend_torch
from mneme.kernels.triton.modules import triton_module

__all__ = [
    "ALL_VISIBLE",
    "FREE_SLOT_POSITION",
    "PageRef",
    "PageTable",
    "Plan",
    "QueryRows",
    "RopeTable",
    "attend",
    "build_plan",
    "mark_free",
    "mark_written",
    "new_slot_position",
    "share_cost_of",
    "write_kv",
]

Backend = Literal["auto", "reference", "torch", "native", "triton"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MAX_SLOTS = 2**31 - 1  # compiled code counts slots in 32 bits
_Attention = Callable[..., tuple[Tensor, Tensor]]  # of the arguments of `attend` but the backend


def attend(
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
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """Attention of every query row of `plan` over what its sequence's page table shows it.

    The key in slot s, under a reference with delta d, is visible to a row at position m iff its mask bit is set,
    `slot_position[s] + d <= m` and, with a window, `slot_position[s] + d > m - window`.

    q              [T, num_q_heads, head_dim]  un-rotated, in the order of the plan's rows; any strides, copied where a
                   row's heads do not follow each other
    k_pages        [num_kv_heads, num_pages, page_size, head_dim]  keys rotated at `slot_position`; contiguous
    v_pages        like k_pages
    slot_position  int32 [num_pages * page_size]  FREE_SLOT_POSITION where a slot holds no key; contiguous
    rope           None for a model without rotary embedding
    softmax_scale  factor of q . k, before the cap
    window         positions a row sees, its own included
    alibi_slopes   [num_q_heads]  slope * (key position - row position) is added to a score
    soft_cap       scores become soft_cap * tanh(score / soft_cap)

    Returns out, like q, and lse, float32 [T, num_q_heads], the natural logarithm. A row that sees nothing gives 0 and
    -inf. Raises ValueError, naming the argument, for shapes that do not fit the plan and for a visible pair that is
    farther apart than the rope table reaches.
    """
    _check_tensors(q, k_pages, v_pages, slot_position, plan)
    _check_options(q.device, rope, plan, softmax_scale, window, alibi_slopes, soft_cap)
    chosen = choose(backend, q.device, q.dtype, plan)
    return chosen(
        q, k_pages, v_pages, slot_position, rope, plan,
        softmax_scale=softmax_scale, window=window, alibi_slopes=alibi_slopes, soft_cap=soft_cap,
    )  # fmt: skip


def choose(backend: Backend, device: torch.device, dtype: torch.dtype, plan: Plan) -> _Attention:
    """Choose, here alone, who attends. `auto`: compiled code where it can be had, else torch."""
    if backend == "reference":
        return attend_reference
    if backend == "torch":
        return attend_torch
    if backend not in get_args(Backend):
        raise ValueError(f"backend: must be one of {', '.join(get_args(Backend))} (got {backend!r})")
    if backend == "triton" or (backend == "auto" and device.type == "cuda"):
        triton_backend = triton_module("backend")
        obstacle = "is not installed" if triton_backend is None else triton_backend.reason_against(device, plan)
        if triton_backend is not None and obstacle is None:
            attend_triton: _Attention = triton_backend.attend_triton
            if backend == "auto" and cudnn.has_long(device, dtype, plan):
                return partial(cudnn.attend_long, rest=attend_triton)
            return attend_triton
        if backend == "triton":
            raise ValueError(f"backend: 'triton' {obstacle}")
        return attend_torch
    obstacle = _native_obstacle(device, dtype)
    if obstacle is None:
        return native_backend.attend_native
    if backend == "native":
        raise ValueError(f"backend: {obstacle} (got {backend!r})")
    return attend_torch


def share_cost_of(device: torch.device, dtype: torch.dtype) -> ShareCost:
    """Return what `build_plan` should go by for `attend` on this device, with backend "auto"."""
    if device.type == "cuda":
        return TORCH if triton_module("backend") is None else TRITON
    if _native_obstacle(device, dtype) is not None:
        return TORCH
    return COMPILED_FLOAT32 if dtype == torch.float32 else COMPILED_BFLOAT16


def _native_obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why the compiled CPU kernels cannot be used, if they cannot."""
    if device.type != "cpu":
        return f"runs on the CPU, q is on {device}"
    if not native_backend.supports(dtype):
        return f"takes float32 and bfloat16, q is {dtype}"
    if native_library.library() is None:
        return "the compiled kernels are switched off or could not be built (see the log)"
    return None


def _check_tensors(q: Tensor, k_pages: Tensor, v_pages: Tensor, slot_position: Tensor, plan: Plan) -> None:
    wanted = (plan.num_rows, plan.num_q_heads, plan.head_dim)
    if q.shape != wanted:
        raise ValueError(f"q: must have shape {wanted}, as the plan says (got {tuple(q.shape)})")
    heads, page_size, head_dim = plan.pool_shape
    if k_pages.ndim != 4 or k_pages.shape != (heads, k_pages.shape[1], page_size, head_dim):
        raise ValueError(
            f"k_pages: must have shape ({heads}, num_pages, {page_size}, {head_dim}), as the plan says "
            f"(got {tuple(k_pages.shape)})"
        )
    if v_pages.shape != k_pages.shape:
        raise ValueError(f"v_pages: must be shaped like k_pages (got {tuple(v_pages.shape)}, {tuple(k_pages.shape)})")
    if not (k_pages.is_contiguous() and v_pages.is_contiguous()):
        raise ValueError("k_pages, v_pages: must be contiguous")
    num_pages = k_pages.shape[1]
    num_slots = num_pages * page_size
    if num_slots > _MAX_SLOTS:
        raise ValueError(f"k_pages: a pool has at most {_MAX_SLOTS} slots (got {num_pages} pages of {page_size})")
    if slot_position.dtype != torch.int32 or slot_position.shape != (num_slots,) or not slot_position.is_contiguous():
        raise ValueError(
            f"slot_position: must be int32 of shape ({num_slots},), contiguous "
            f"(got {slot_position.dtype}, {tuple(slot_position.shape)}, strides {slot_position.stride()})"
        )
    if plan.num_pages > num_pages:
        raise ValueError(f"plan: uses page {plan.num_pages - 1}, k_pages has {num_pages} pages")
    if not q.dtype == k_pages.dtype == v_pages.dtype or q.dtype not in _DTYPES:
        types = (q.dtype, k_pages.dtype, v_pages.dtype)
        raise ValueError(f"q, k_pages, v_pages: must have one 16- or 32-bit floating type (got {types})")
    if not q.device == k_pages.device == v_pages.device == slot_position.device:
        raise ValueError("q, k_pages, v_pages, slot_position: must be on one device")


def _check_options(
    device: torch.device,
    rope: RopeTable | None,
    plan: Plan,
    softmax_scale: float,
    window: int | None,
    alibi_slopes: Tensor | None,
    soft_cap: float | None,
) -> None:
    if rope is not None and rope.rotary_dim > plan.head_dim:
        raise ValueError(f"rope: rotates {rope.rotary_dim} dimensions, head_dim is {plan.head_dim}")
    if rope is not None and rope.table.device != device:
        raise ValueError(f"rope: must be on the device of q, {device} (got {rope.table.device})")
    if not math.isfinite(softmax_scale):
        raise ValueError(f"softmax_scale: must be finite (got {softmax_scale})")
    if window is not None and not (is_integer(window) and window >= 1):
        raise ValueError(f"window: must be an integer and at least 1 (got {window})")
    if soft_cap is not None and not 0 < soft_cap < math.inf:
        raise ValueError(f"soft_cap: must be positive and finite (got {soft_cap})")
    if alibi_slopes is None:
        return
    if alibi_slopes.shape != (plan.num_q_heads,):
        raise ValueError(f"alibi_slopes: must have shape ({plan.num_q_heads},) (got {tuple(alibi_slopes.shape)})")
    if alibi_slopes.device != device:
        raise ValueError(f"alibi_slopes: must be on the device of q, {device} (got {alibi_slopes.device})")
