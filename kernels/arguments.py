"""What the backends are given: arguments of `attend`, and of `write_kv` and `kv_deviation`; rows of int8 pools."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mneme.kernels.page_bounds import version_of
from mneme.kernels.page_table import KV_SCALE_BYTES, is_integer
from mneme.kernels.plan import Plan
from mneme.kernels.rope import RopeTable

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LEAST_MAGNITUDE = 2.0**-100  # of a row that int8 does not round to 0
_MAX_SLOTS = 2**31 - 1  # compiled code counts slots in 32 bits


def row_size(head_dim: int, dtype: torch.dtype) -> int:
    """Count the elements of one token's keys or values of one head in a pool: an int8 row ends with its scale."""
    return head_dim + KV_SCALE_BYTES if dtype == torch.int8 else head_dim


def quantized(x: Tensor) -> Tensor:
    """Round rows [..., head_dim] to int8 [..., head_dim + 4]: numbers from -127 to 127, and the bytes of their scale.

    The scale is float32, the row's greatest magnitude / 127. A row that holds a NaN or an infinity has the scale NaN;
    one under 2**-100 is 0. The compiled code (native/cpp/kv.cpp) and Triton's (triton/kv.py) give the same bits.
    """
    x = x.float()
    magnitude = x.abs().amax(-1, keepdim=True)  # NaN where there is one
    is_broken, is_zero = ~magnitude.isfinite(), magnitude < LEAST_MAGNITUDE
    scale = (magnitude / 127).masked_fill(is_broken, torch.nan).masked_fill(is_zero, 0.0)
    steps = torch.full_like(magnitude, 127) / magnitude  # `127 / magnitude` is a reciprocal's product, rounded twice
    steps = steps.masked_fill(is_broken | is_zero, 0.0)
    numbers = (x * steps).masked_fill(is_broken, 0.0).round().to(torch.int8)
    return torch.cat([numbers, scale.view(torch.int8)], -1)


def dequantized(rows: Tensor) -> Tensor:
    """Return what rows of a pool stand for: float32 [..., head_dim] of int8 [..., head_dim + 4], others as they are."""
    if rows.dtype != torch.int8:
        return rows
    numbers, scale = rows[..., :-KV_SCALE_BYTES], rows[..., -KV_SCALE_BYTES:]
    return numbers.float() * scale.contiguous().view(torch.float32)


class AttendArgs(NamedTuple):
    """Holds the arguments of `mneme.kernels.attention.attend`, which says what they are."""

    q: Tensor
    k_pages: Tensor
    v_pages: Tensor
    slot_position: Tensor
    rope: RopeTable | None
    plan: Plan
    softmax_scale: float
    window: int | None
    soft_cap: float | None

    def check(self) -> None:
        """Raise ValueError, naming the argument, for what does not fit the plan or breaks a rule."""
        q, k_pages, v_pages, slot_position, rope, plan, softmax_scale, window, soft_cap = self
        wanted = (plan.num_rows, plan.num_q_heads, plan.head_dim)
        if q.shape != wanted:
            raise ValueError(f"q: must have shape {wanted}, as the plan says (got {tuple(q.shape)})")
        heads, page_size, head_dim = plan.pool_shape
        size = row_size(head_dim, k_pages.dtype)
        if k_pages.ndim != 4 or k_pages.shape != (heads, k_pages.shape[1], page_size, size):
            raise ValueError(
                f"k_pages: must have shape ({heads}, num_pages, {page_size}, {size}), as the plan says "
                f"(got {tuple(k_pages.shape)})"
            )
        if v_pages.shape != k_pages.shape:
            shapes = f"{tuple(v_pages.shape)}, {tuple(k_pages.shape)}"
            raise ValueError(f"v_pages: must be shaped like k_pages (got {shapes})")
        if not (k_pages.is_contiguous() and v_pages.is_contiguous()):
            raise ValueError("k_pages, v_pages: must be contiguous")
        num_pages = k_pages.shape[1]
        num_slots = num_pages * page_size
        if num_slots > _MAX_SLOTS:
            raise ValueError(f"k_pages: a pool has at most {_MAX_SLOTS} slots (got {num_pages} pages of {page_size})")
        is_vector = slot_position.shape == (num_slots,) and slot_position.is_contiguous()
        if slot_position.dtype != torch.int32 or not is_vector:
            raise ValueError(
                f"slot_position: must be int32 of shape ({num_slots},), contiguous "
                f"(got {slot_position.dtype}, {tuple(slot_position.shape)}, strides {slot_position.stride()})"
            )
        if plan.num_pages > num_pages:
            raise ValueError(f"plan: uses page {plan.num_pages - 1}, k_pages has {num_pages} pages")
        is_pair = k_pages.dtype == v_pages.dtype and k_pages.dtype in (q.dtype, torch.int8)
        if not is_pair or q.dtype not in _DTYPES:
            types, rule = (q.dtype, k_pages.dtype, v_pages.dtype), "one 16- or 32-bit floating type, or int8 pages"
            raise ValueError(f"q, k_pages, v_pages: must have {rule} (got {types})")
        if k_pages.dtype == torch.int8 and not q.is_cpu and head_dim % KV_SCALE_BYTES:
            raise ValueError(f"k_pages: int8 rows on a GPU end where a float32 may be, head_dim is {head_dim}")
        if not q.device == k_pages.device == v_pages.device == slot_position.device:
            raise ValueError("q, k_pages, v_pages, slot_position: must be on one device")
        if rope is not None and rope.rotary_dim > plan.head_dim:
            raise ValueError(f"rope: rotates {rope.rotary_dim} dimensions, head_dim is {plan.head_dim}")
        if rope is not None and rope.table.device != q.device:
            raise ValueError(f"rope: must be on the device of q, {q.device} (got {rope.table.device})")
        if not math.isfinite(softmax_scale):
            raise ValueError(f"softmax_scale: must be finite (got {softmax_scale})")
        if window is not None and not (is_integer(window) and window >= 1):
            raise ValueError(f"window: must be an integer and at least 1 (got {window})")
        if soft_cap is not None and not 0 < soft_cap < math.inf:
            raise ValueError(f"soft_cap: must be positive and finite (got {soft_cap})")

    def check_reach(self) -> None:
        """Raise ValueError for a row that sees a key under a delta which takes it beyond the rope table; once per step.

        Every backend calls it. Positions and deltas alone accept almost every step; only where they do not,
        `slot_position` is read back.
        """
        if self.rope is None:
            return
        plan, num_positions = self.plan, self.rope.num_positions
        key = ("reach", num_positions, self.window)
        version = version_of(self.slot_position)
        checked: tuple[Tensor, int | None] | None = plan.prepared.get(key)
        if checked is not None and checked[0] is self.slot_position and checked[1] == version:
            return
        deltas = plan.work.delta
        if len(deltas) and plan.position.max() - deltas.min() >= num_positions:
            self._refuse_visible_beyond(num_positions)
        plan.prepared[key] = (self.slot_position, version)

    def _refuse_visible_beyond(self, num_positions: int) -> None:
        plan, tables = self.plan, self.plan.page_tables
        position_by_page = self.slot_position.cpu().numpy().reshape(-1, plan.page_size)
        lowest_delta = np.array([table.deltas.min(initial=0) for table in tables])
        for row in np.flatnonzero(plan.position - lowest_delta[plan.sequence] >= num_positions).tolist():
            table = tables[plan.sequence[row]]
            effective, keys = plan.position[row] - table.deltas[:, None], position_by_page[table.page_ids]
            visible = ((table.masks[:, None] >> np.arange(plan.page_size)) & 1 == 1) & (keys <= effective)
            if self.window is not None:
                visible &= keys > effective - self.window
            beyond = effective[visible.any(1) & (effective[:, 0] >= num_positions), 0]
            if len(beyond):
                raise ValueError(f"rows: a visible pair is {beyond[0]} apart, the rope table ends at {num_positions}")


class KvRows(NamedTuple):
    """Holds the arguments of `mneme.kernels.kv_write.write_kv`, which says what they are."""

    k: Tensor
    v: Tensor
    slots: Tensor
    positions: Tensor
    k_pages: Tensor
    v_pages: Tensor
    rope: RopeTable | None

    def check(self) -> None:
        """Raise ValueError where rows of keys and values do not fit a pool, or a rope does not fit a head."""
        k, v, slots, positions, k_pages, _, rope = self
        pool = k_pages.shape
        if k.shape != v.shape or k.ndim != 3 or pool[::3] != (k.shape[1], row_size(k.shape[2], k_pages.dtype)):
            raise ValueError(f"k, v: must fit the pool {tuple(pool)} (got {tuple(k.shape)}, {tuple(v.shape)})")
        if slots.shape != k.shape[:1] or positions.shape != k.shape[:1]:
            raise ValueError(f"slots, positions: one each for {len(k)} rows (got {len(slots)}, {len(positions)})")
        if rope is not None and rope.rotary_dim > k.shape[2]:
            raise ValueError(f"rope: rotates {rope.rotary_dim} dimensions, head_dim is {k.shape[2]}")
