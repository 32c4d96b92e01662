"""Chooses the block sizes of a Triton attention launch, by a table and a rule, so that serving never tunes.

Registers and shared memory decide. A stage of the pipeline holds one block of keys and one of values, 2 * block_n *
head_dim elements. Where all tiles are narrow, bound by memory and by the loads that a program begins with, a
multiprocessor of sm_90 holds four programs of two warps, with 16 KB per stage; where some are wide, which want
registers for their sums, two of four warps, with 32 KB. Both were the fastest on an H100, or within 2% of it
(benchmarks/results/2026-11-26-h100.md). Where products are not wgmma's or tcgen05's (sm_80, 89, 120) they multiply out
of registers, and get half the keys; sm_89 and sm_120 have 100 KB of shared memory, of which two programs fit.

What ran on a device, an H100, are the rules for sm_90. Those for the others only compile (`make kernels-compile`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

Kind = Literal["narrow", "mixed"]  # whether a step has wide tiles, too

HEAD_DIMS = (64, 80, 96, 128, 256)
# Query heads per KV head that one tile can hold.
MAX_GROUPS = 128
MIN_CAPABILITY = (8, 0)  # of the GPUs that Triton compiles for

# Keys of a block times head dimensions from which registers spill in the loop over keys, on sm_90.
_MOST_BLOCK_ELEMENTS = 8192


class Config(NamedTuple):
    """Block sizes of one launch."""

    narrow_m: int  # rows of tiles with few rows; 16 is the least that tensor cores take
    wide_m: int  # of the others; from 64 on sm_90 uses wgmma; 0 where there are none
    block_n: int  # keys
    num_warps: int
    num_stages: int


class WideConfig(NamedTuple):
    """Sizes of one launch of `wide_kernel`, whose blocks of keys are pages."""

    block_m: int  # rows
    num_warps: int
    num_stages: int
    max_registers: int | None  # of a thread, so that two programs share a multiprocessor


# On an H100, 2,048 rows of 8,192 keys: 494 TFLOP/s with 2 stages, 471 with 3, 349 with 64 rows; 345 in one launch.
WIDE = WideConfig(128, 8, 2, 128)
WIDE_CANDIDATES = (WIDE, WideConfig(128, 8, 3, 128), WideConfig(64, 4, 3, None))


def next_power_of_2(number: int) -> int:
    """Return the least power of two that is not below a positive number."""
    return 1 << (number - 1).bit_length()


def has_warpgroups(architecture: int) -> bool:
    """Tell whether several warps multiply together out of shared memory (wgmma, tcgen05). sm_120's do not."""
    return 90 <= architecture < 120


def has_tcgen05(architecture: int) -> bool:
    """Tell whether many rows are multiplied by tcgen05 instructions."""
    return 100 <= architecture < 120


def shared_bytes(architecture: int) -> int:
    """Return the shared memory of a multiprocessor; one program may have 1 KB less."""
    if architecture in (80, 87):
        return 164 * 1024
    return 228 * 1024 if has_warpgroups(architecture) else 100 * 1024


def programs_per_processor(config: Config, *, head_dim: int, element_bytes: int, architecture: int) -> int:
    """Count the programs that one multiprocessor holds, by registers (up to 255 for each thread) and shared memory."""
    num_buffers = config.num_stages if has_warpgroups(architecture) else config.num_stages - 1  # as compiled
    used = 2 * config.block_n * num_buffers * max(32, next_power_of_2(head_dim)) * element_bytes + 2048
    return max(1, min(8 // config.num_warps, shared_bytes(architecture) // used))


def wide_config_of(
    *, head_dim: int, element_bytes: int, num_groups: int, page_size: int, architecture: int
) -> WideConfig | None:
    """Return how wide tiles are launched by themselves; None where they share the launch of the others.

    On sm_90 alone, as it was not tried on any later one, and for pages that are a block of keys.
    """
    is_tried = architecture // 10 == 9 and element_bytes == 2 and head_dim in (64, 128) and page_size == 64
    return WIDE if is_tried and num_groups <= WIDE.block_m // 2 else None


def config_of(*, head_dim: int, element_bytes: int, num_groups: int, kind: Kind, architecture: int = 90) -> Config:
    """Return the configuration of a launch; `architecture` is 10 * major + minor."""
    if not 1 <= num_groups <= MAX_GROUPS:
        raise ValueError(f"num_q_heads: at most {MAX_GROUPS} per KV head (got {num_groups})")
    dim = max(32, next_power_of_2(head_dim))
    rows = next_power_of_2(num_groups)
    narrow_m, is_mixed = max(16, rows), kind == "mixed"
    if element_bytes == 4:  # exact products of float32 have no tensor cores and need registers
        wide_m = max(32 if dim <= 128 else 16, rows)
        return Config(narrow_m, wide_m if is_mixed else 0, 32 if dim <= 128 else 16, 8, 2)
    if dim == 256:
        wide_m = max(64 if has_warpgroups(architecture) else 32, rows)
        return Config(narrow_m, wide_m if is_mixed else 0, 32, 8, 3 if has_warpgroups(architecture) else 2)
    block_n = (64 if has_warpgroups(architecture) else 32) * 128 // max(64, dim)
    if is_mixed or narrow_m > 16:
        return Config(narrow_m, max(64, rows) if is_mixed else 0, block_n, 4, 3)
    return Config(16, 0, block_n // 2, 2, 3)


def candidates(
    *, head_dim: int, element_bytes: int, num_groups: int, kind: Kind, architecture: int = 90
) -> Iterator[Config]:
    """Every configuration worth a measurement on a GPU, that of the rule first."""
    rule = config_of(
        head_dim=head_dim, element_bytes=element_bytes, num_groups=num_groups, kind=kind, architecture=architecture
    )
    others = []
    if element_bytes == 2 and head_dim <= 128:
        shapes = ((64, 4), (128, 8)) if kind == "mixed" else ((0, 2), (0, 4))
        others = [
            Config(rule.narrow_m, max(wide_m, rule.wide_m), block_n, num_warps, num_stages)
            for wide_m, num_warps in shapes
            for block_n in (32, 64, 128)
            for num_stages in (2, 3, 4)
            if block_n * max(32, next_power_of_2(head_dim)) <= _MOST_BLOCK_ELEMENTS
        ]
    yield from dict.fromkeys([rule, *others])
