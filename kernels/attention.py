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

from collections.abc import Callable
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor

from mneme.kernels.arguments import AttendArgs
from mneme.kernels.kv_write import mark_free, mark_written, new_slot_position, write_kv
from mneme.kernels.long import backend as long
from mneme.kernels.native import backend as native_backend
from mneme.kernels.native import library as native_library
from mneme.kernels.page_table import ALL_VISIBLE, FREE_SLOT_POSITION, PageRef, PageTable, QueryRows
from mneme.kernels.plan import Plan, build_plan
from mneme.kernels.reference import attend_reference
from mneme.kernels.rope import RopeTable
from mneme.kernels.share_cost import COMPILED_BFLOAT16, COMPILED_FLOAT32, TRITON, ShareCost
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
_Attention = Callable[[AttendArgs], tuple[Tensor, Tensor]]


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
    soft_cap: float | None = None,
    backend: Backend = "auto",
    prompt_rows: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of every query row of `plan` over what its sequence's page table shows it.

    The key in slot s, under a reference with delta d, is visible to a row at position m iff its mask bit is set,
    `slot_position[s] + d <= m` and, with a window, `slot_position[s] + d > m - window`.

    q              [T, num_q_heads, head_dim]  un-rotated, in the order of the plan's rows; any strides, copied where a
                   row's heads do not follow each other
    k_pages        [num_kv_heads, num_pages, page_size, head_dim]  keys rotated at `slot_position`; contiguous. Or
                   int8 [..., head_dim + 4]: numbers, and the bytes of the float32 that they are multiplied with
    v_pages        like k_pages
    slot_position  int32 [num_pages * page_size]  FREE_SLOT_POSITION where a slot holds no key; contiguous
    rope           None for a model without rotary embedding
    softmax_scale  factor of q . k, before the cap
    window         positions a row sees, its own included
    soft_cap       scores become soft_cap * tanh(score / soft_cap)
    prompt_rows    on a CPU torch attends to what is plain of prompts that have so many rows; None: never

    Returns out, like q, and lse, float32 [T, num_q_heads], the natural logarithm. A row that sees nothing gives 0 and
    -inf. Raises ValueError, naming the argument, for shapes that do not fit the plan and for a visible pair that is
    farther apart than the rope table reaches.
    """
    arguments = AttendArgs(q, k_pages, v_pages, slot_position, rope, plan, softmax_scale, window, soft_cap)
    arguments.check()
    return choose(backend, q.device, q.dtype, plan, prompt_rows)(arguments)


def choose(
    backend: Backend, device: torch.device, dtype: torch.dtype, plan: Plan, prompt_rows: int | None = None
) -> _Attention:
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
            if backend == "auto" and long.has_long(long.CUDNN, device, dtype, plan):
                return partial(long.attend_long, library=long.CUDNN, rest=attend_triton)
            return attend_triton
        if backend == "triton":
            raise ValueError(f"backend: 'triton' {obstacle}")
        return attend_torch
    obstacle = _native_obstacle(device, dtype)
    if obstacle is None:
        by_torch = None if prompt_rows is None else long.torch_on_cpu(prompt_rows)
        if by_torch is not None and long.has_long(by_torch, device, dtype, plan):
            return partial(long.attend_long, library=by_torch, rest=native_backend.attend_native)
        return native_backend.attend_native
    if backend == "native":
        raise ValueError(f"backend: {obstacle} (got {backend!r})")
    return attend_torch


def share_cost_of(device: torch.device, dtype: torch.dtype) -> ShareCost:
    """Return what `build_plan` should go by for `attend` on this device, with backend "auto"."""
    if device.type == "cuda":
        return TRITON
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
