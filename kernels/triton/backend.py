"""`attend` on CUDA: one launch for all of a layer's attention, or one for its wide tiles and one beside it for the
others; and one to merge rows that have several parts.

Once per step the work is cut into tiles and what changed is uploaded; every layer of the step then launches with the
same buffers, which keep their addresses from step to step unless they must grow.
"""

from __future__ import annotations

import logging
import threading
from functools import cache
from typing import Any, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

import triton
from mneme.kernels.arguments import AttendArgs
from mneme.kernels.plan import Plan
from mneme.kernels.triton.attention import attention_kernel, merge_kernel
from mneme.kernels.triton.configs import (
    MAX_GROUPS,
    Config,
    Kind,
    WideConfig,
    config_of,
    has_tcgen05,
    next_power_of_2,
    programs_per_processor,
    wide_config_of,
)
from mneme.kernels.triton.modules import triton_trouble
from mneme.kernels.triton.step import DeviceStep, step_of
from mneme.kernels.triton.tiles import Grid
from mneme.kernels.triton.wide import wide_kernel
from triton.tools.tensor_descriptor import TensorDescriptor

logger = logging.getLogger(__name__)

MAX_HEAD_DIM = 256
# Cutting long pieces apart stops at this many bytes of partial results.
_SPLIT_SCRATCH_BYTES = 64 << 20
_LOG2_E = 1.4426950408889634
MERGE_WARPS = 2  # few threads with few registers each, so that a multiprocessor holds many rows and heads
_MERGES_PER_PROCESSOR = 16
_SATURATING = 2  # programs of a multiprocessor that use up its bandwidth; more of them hide what one begins with
# Under the interpreter: few programs, but more than one per piece.
_INTERPRETED_PROGRAMS = 8


def attend_triton(args: AttendArgs) -> tuple[Tensor, Tensor]:
    """See `mneme.kernels.attention.attend`; on CPU tensors under the interpreter (TRITON_INTERPRET=1) only.

    Scratch on the device: partial results, float32, of 64 MiB or of the rows that two or more pieces read if that is
    more; 4 bytes per token of the plan's pages; and the plan itself.
    """
    q, k_pages, v_pages, plan = args.q, args.k_pages, args.v_pages, args.plan
    if reason := reason_against(q.device, plan):
        raise ValueError(f"backend: 'triton' {reason}")
    out, lse = torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(q.shape[:2], dtype=torch.float32)
    if not plan.num_rows:
        return out, lse
    args.check_reach()
    choice = _choice(q.device, q.dtype, plan, k_pages.dtype)
    step = _prepared_step(plan, args.slot_position, choice.grid)
    is_staged = step.staged is plan
    launch: Launch = step.launch if is_staged else _launch(choice, step)
    if step.has_empty_rows and not is_staged:  # in a step that was staged they are padding, which nobody reads
        out.zero_()
        lse.fill_(-torch.inf)
    if q.stride()[1:] != (plan.head_dim, 1):  # queries that are columns of one product are read where they lie
        q = q.contiguous()
    table, num_positions, rotary_dim = lse, 1, 0  # any pointer where none is read
    if args.rope is not None:
        table, num_positions, rotary_dim = args.rope.table, args.rope.num_positions, args.rope.rotary_dim
    switches = {"HAS_WINDOW": args.window is not None, "HAS_CAP": args.soft_cap is not None}
    arguments = (
        step.key_position, table, out, lse, *step.partials, step.words, k_pages.shape[1], q.stride(0),
        num_positions, min(args.window or 0, 2**30), *_scales(args.softmax_scale, args.soft_cap),
    )  # fmt: skip
    with step.active():
        side = _SIDE.stream(q.device) if launch.wide is not None and q.is_cuda else None
        if side is not None:  # what is bound by memory runs beside what is bound by products
            side.wait_stream(torch.cuda.current_stream())
        if launch.wide is not None:
            # What may be replayed must not depend on the work; else the device deals out programs, and does it well.
            programs = step.num_apart * plan.num_kv_heads
            if is_staged or not q.is_cuda:
                programs = _num_programs(q.device, _SATURATING)
            try:
                wide_kernel[(programs,)](
                    q, *_descriptors(k_pages, v_pages), *arguments,
                    **_constants(plan, launch.wide, rotary_dim, q.dtype), **switches,
                )  # fmt: skip
            except Exception as error:  # Triton's are no RuntimeErrors
                if is_staged or (trouble := triton_trouble(error, "wide_kernel")) is None:
                    raise
                give_up_wide(trouble)
                return attend_triton(args)
        with torch.cuda.stream(side):
            attention_kernel[(_num_programs(q.device, _per_processor(q.device, q.dtype, plan, launch.config)),)](
                q, k_pages, v_pages, *arguments, **_constants(plan, launch.config, rotary_dim, q.dtype), **switches,
                HAS_TCGEN05=has_tcgen05(_architecture(q.device)),
            )  # fmt: skip
        if side is not None:
            torch.cuda.current_stream().wait_stream(side)
        if launch.merges:
            _merge(out, lse, step, plan)
    return out, lse


class _Side(threading.local):
    """Each thread its own streams: what one captures must not hold what another launches."""

    def __init__(self) -> None:
        self._by_device: dict[torch.device, torch.cuda.Stream] = {}

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        """Return the stream beside that of the caller."""
        if device not in self._by_device:
            self._by_device[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._by_device[device]


_SIDE = _Side()
_given_up: list[str] = []  # why wide tiles get no launch of their own any more


def give_up_wide(reason: str) -> None:
    """Let wide tiles share the launch of the others from now on, on all devices."""
    logger.warning("wide tiles share the launch of the others from now on: %s", reason)
    _given_up.append(reason)


def _prepared_step(plan: Plan, slot_position: Tensor, grid: Grid) -> DeviceStep:
    """Return the buffers that hold a plan which the kernels can do."""
    step = step_of(slot_position.device)
    if slot_position.is_cuda:
        step.check_capture(plan)
    return step.holding(plan, slot_position, grid)


def _scales(softmax_scale: float, soft_cap: float | None) -> tuple[float, float]:
    """`q_scale` and `cap` of the kernel."""
    if soft_cap is None:
        return softmax_scale * _LOG2_E, 1.0
    return softmax_scale * (1.0 / float(soft_cap)), float(soft_cap)


def _constants(plan: Plan, sizes: Config | WideConfig, rotary_dim: int, dtype: torch.dtype) -> dict[str, Any]:
    options = {"num_warps": sizes.num_warps, "num_stages": sizes.num_stages}
    if isinstance(sizes, WideConfig) and sizes.max_registers is not None:
        options["maxnreg"] = sizes.max_registers
    return {
        "NUM_KV_HEADS": plan.num_kv_heads,
        "GROUPS": plan.num_q_heads // plan.num_kv_heads,
        "INTERPRET": is_interpreted(),
        **options,
        **launch_constants(sizes, plan.head_dim, rotary_dim, plan.page_size, dtype),
    }


def _descriptors(k_pages: Tensor, v_pages: Tensor) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Keys in pages of half a head, as rotation pairs them, and values in pages."""
    _, _, page_size, head_dim = k_pages.shape
    shape = [k_pages.numel() // head_dim, head_dim]
    return (
        TensorDescriptor(k_pages, shape, [head_dim, 1], [page_size, head_dim // 2]),
        TensorDescriptor(v_pages, shape, [head_dim, 1], [page_size, head_dim]),
    )


class Launch(NamedTuple):
    """Holds what launches depend on beside the shapes of their tensors; the numbers of programs follow from it."""

    config: Config
    merges: bool  # whether rows may have several parts
    wide: WideConfig | None = None  # of tiles that get a launch of their own


def reserve(plan: Plan, slot_position: Tensor, dtype: torch.dtype, kv_dtype: torch.dtype | None = None) -> None:
    """Let the buffers of this thread's step have room for a plan, the largest, and stay where they are from then on.

    dtype, kv_dtype  of queries, and of keys and values, None: the same; here and below
    """
    device = slot_position.device
    if reason_against(device, plan) is None and plan.num_rows:
        step_of(device).reserve(plan, slot_position, _choice(device, dtype, plan, kv_dtype).grid)


def launches_of(
    plan: Plan, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype | None = None
) -> list[Launch]:
    """List how steps of as many rows as a plan has may be launched; each way does what those before it do, too."""
    if reason_against(device, plan):
        return []
    narrow, mixed = (_config(device, dtype, plan, kind) for kind in get_args(Kind))
    found = [Launch(narrow, merges=False), Launch(narrow, merges=True)]
    if plan.num_rows * (plan.num_q_heads // plan.num_kv_heads) <= narrow.narrow_m:
        return found
    wide = _wide_config(device, dtype, plan, kv_dtype)
    return [*found, Launch(narrow if wide else mixed, merges=True, wide=wide)]


def stage(
    plan: Plan,
    slot_position: Tensor,
    dtype: torch.dtype,
    num_rope_positions: int | None,
    launch: Launch | None = None,
    kv_dtype: torch.dtype | None = None,
) -> Launch | None:
    """Bring a plan to its device ahead of `attend_triton`, whose launches may then be captured and replayed.

    Returns how it is launched: a replay is right for every plan that is staged with an equal value, while the buffers
    stay where they are (`reserve`). None if attention has to look at the device, is not done here, or needs more room
    than was reserved. What it writes for rows without keys is undefined then.

    launch  to be launched like this, for a capture: one of `launches_of`
    """
    device = slot_position.device
    if reason_against(device, plan) or not plan.num_rows:
        return None
    deltas = plan.work.delta
    if num_rope_positions is not None and len(deltas) and plan.position.max() - deltas.min() >= num_rope_positions:
        return None  # `AttendArgs.check_reach` would read positions back
    choice, step = _choice(device, dtype, plan, kv_dtype), step_of(device)
    if step.holding(plan, slot_position, choice.grid) is not step:
        return None
    launch = launch or _launch(choice, step)
    step.staged, step.launch = plan, launch
    return launch


def is_interpreted() -> bool:
    """Tell whether kernels run in Python, on CPU tensors."""
    return not isinstance(attention_kernel, triton.runtime.JITFunction)


def reason_against(device: torch.device, plan: Plan) -> str | None:
    """Return why this backend cannot do a plan, or None."""
    if device.type != "cuda" and not is_interpreted():
        return f"needs CUDA tensors, or TRITON_INTERPRET=1 in the environment (got {device})"
    if plan.head_dim > MAX_HEAD_DIM:
        return f"holds heads of up to {MAX_HEAD_DIM} dimensions (got {plan.head_dim})"
    num_groups = plan.num_q_heads // plan.num_kv_heads
    if num_groups > MAX_GROUPS:
        return f"holds up to {MAX_GROUPS} query heads per KV head (got {num_groups})"
    if len(plan.work.page_id) * plan.page_size >= 2**31:
        return f"counts keys in 31 bits (got {len(plan.work.page_id)} pages of {plan.page_size})"
    return None


def launch_constants(
    sizes: Config | WideConfig, head_dim: int, rotary_dim: int, page_size: int, dtype: torch.dtype
) -> dict[str, Any]:
    """Return the constants of `attention_kernel` or `wide_kernel` that follow from a configuration and a model."""
    common = {
        "HEAD_DIM": head_dim,
        "ROTARY_DIM": rotary_dim,
        "PAGE_SIZE": page_size,
        "STAGES": sizes.num_stages,
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",  # 16-bit products have one precision
    }
    if isinstance(sizes, WideConfig):
        return common | {"BLOCK_M": sizes.block_m}
    return common | {
        "BLOCK_HALF": max(16, next_power_of_2((head_dim + 1) // 2)),
        "NARROW_M": sizes.narrow_m,
        "WIDE_M": sizes.wide_m if sizes.wide_m > sizes.narrow_m else 0,  # else no tile has more rows
        "BLOCK_N": sizes.block_n,
    }


class _Choice(NamedTuple):
    config: Config
    grid: Grid
    wide: WideConfig | None  # of tiles that get a launch of their own


def _choice(device: torch.device, dtype: torch.dtype, plan: Plan, kv_dtype: torch.dtype | None = None) -> _Choice:
    """Choose how a plan's work is launched; done once per work."""
    key = ("triton", "choice", device, dtype, kv_dtype or dtype, not _given_up)
    choice: _Choice | None = plan.work.derived.get(key)
    if choice is None:
        config = _config(device, dtype, plan, "narrow")
        num_groups = plan.num_q_heads // plan.num_kv_heads
        wide = None
        if np.diff(plan.work.row_begin).max(initial=0) * num_groups > config.narrow_m:
            wide = _wide_config(device, dtype, plan, kv_dtype)
            config = config if wide else _config(device, dtype, plan, "mixed")
        at_once = _num_programs(device, min(_per_processor(device, dtype, plan, config), _SATURATING))
        choice = plan.work.derived[key] = _Choice(config, _grid(plan, config, wide, at_once), wide)
    return choice


def _launch(choice: _Choice, step: DeviceStep) -> Launch:
    """Return how a plan that is prepared is launched; one with wide tiles seldom has nothing to merge."""
    has_wide = choice.config.wide_m > 0 or choice.wide is not None
    return Launch(choice.config, has_wide or step.num_merged > 0, choice.wide)


def _config(device: torch.device, dtype: torch.dtype, plan: Plan, kind: Kind) -> Config:
    return config_of(
        head_dim=plan.head_dim,
        element_bytes=dtype.itemsize,
        num_groups=plan.num_q_heads // plan.num_kv_heads,
        kind=kind,
        architecture=_architecture(device),
    )


def _wide_config(
    device: torch.device, dtype: torch.dtype, plan: Plan, kv_dtype: torch.dtype | None
) -> WideConfig | None:
    """Return how wide tiles get a launch of their own; descriptors cannot tell where int8 rows begin."""
    if _given_up or kv_dtype not in (None, dtype):
        return None
    return wide_config_of(
        head_dim=plan.head_dim,
        element_bytes=dtype.itemsize,
        num_groups=plan.num_q_heads // plan.num_kv_heads,
        page_size=plan.page_size,
        architecture=_architecture(device),
    )


def _per_processor(device: torch.device, dtype: torch.dtype, plan: Plan, config: Config) -> int:
    architecture = _architecture(device)
    return programs_per_processor(
        config, head_dim=plan.head_dim, element_bytes=dtype.itemsize, architecture=architecture
    )


@cache
def _num_programs(device: torch.device, per_processor: int) -> int:
    """Count the programs of a launch: as many as a device holds, whatever there is to do."""
    if device.type != "cuda":
        return _INTERPRETED_PROGRAMS
    return int(torch.cuda.get_device_properties(device).multi_processor_count) * per_processor


@cache
def _architecture(device: torch.device) -> int:
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def _grid(plan: Plan, config: Config, wide: WideConfig | None, at_once: int) -> Grid:
    slot_bytes = 4 * plan.num_q_heads * (plan.head_dim + 1)
    return Grid(
        page_size=plan.page_size,
        num_groups=plan.num_q_heads // plan.num_kv_heads,
        num_kv_heads=plan.num_kv_heads,
        narrow_m=config.narrow_m,
        wide_m=config.wide_m if wide is None else wide.block_m,
        num_at_once=at_once,
        max_split_slots=_SPLIT_SCRATCH_BYTES // slot_bytes,
        is_apart=wide is not None,
    )


def _merge(out: Tensor, lse: Tensor, step: DeviceStep, plan: Plan) -> None:
    merge_kernel[(_num_programs(out.device, _MERGES_PER_PROCESSOR),)](
        out, lse, *step.partials, step.words, **merge_constants(plan.num_q_heads, plan.head_dim),
        num_warps=MERGE_WARPS,
    )  # fmt: skip


def merge_constants(num_q_heads: int, head_dim: int) -> dict[str, int]:
    """Return the merge kernel's constants."""
    return {
        "NUM_Q_HEADS": num_q_heads,
        "HEAD_DIM": head_dim,
        "BLOCK_PARTS": 8,
        "BLOCK_DIM": next_power_of_2(head_dim),
    }
