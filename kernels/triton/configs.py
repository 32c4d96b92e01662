"""Chooses the block sizes of a Triton attention launch, by a table and a rule, so that serving never tunes.

Registers and shared memory decide. A stage of the pipeline holds one block of keys and one of values, 2 * block_n *
head_dim elements: 32 KB on sm_90, half of it on sm_80, which multiplies out of registers. Narrow tiles, bound by memory
and by the loads that a program begins with, want many programs on a multiprocessor: three of 170 registers per thread,
the most that spill nothing. Wide ones, bound by products, want registers for their sums: two of 255.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

Kind = Literal["narrow", "wide"]  # of tiles

HEAD_DIMS = (64, 80, 96, 128, 256)
# Query heads per KV head that one tile can hold.
MAX_GROUPS = 128
MIN_CAPABILITY = (8, 0)  # of the GPUs that Triton compiles for

_REGISTERS = 1 << 16  # of a multiprocessor
_SHARED_BYTES = 220 << 10  # of one of sm_90, less what programs need beside keys and values


class Config(NamedTuple):
    """Block sizes of one launch."""

    block_m: int  # rows; 16 is the least that tensor cores take, from 64 on sm_90 uses wgmma
    block_n: int  # keys
    num_warps: int
    num_stages: int
    programs: int  # that one multiprocessor holds

    @property
    def max_registers(self) -> int | None:
        """Registers per thread that let a multiprocessor hold them; None: as many as a thread may have."""
        registers = _REGISTERS // (32 * self.num_warps * self.programs)
        return None if registers >= 256 else registers


def next_power_of_2(number: int) -> int:
    """Return the least power of two that is not below a positive number."""
    return 1 << (number - 1).bit_length()


def config_of(*, head_dim: int, element_bytes: int, num_groups: int, kind: Kind, architecture: int = 90) -> Config:
    """Return the configuration of a launch; `architecture` is 10 * major + minor."""
    if not 1 <= num_groups <= MAX_GROUPS:
        raise ValueError(f"num_q_heads: at most {MAX_GROUPS} per KV head (got {num_groups})")
    dim = max(32, next_power_of_2(head_dim))
    rows = next_power_of_2(num_groups)
    narrow_m = max(16, rows)
    if element_bytes == 4:  # exact products of float32 have no tensor cores and need registers
        wide_m = max(32 if dim <= 128 else 16, rows)
        return Config(narrow_m if kind == "narrow" else wide_m, 32 if dim <= 128 else 16, 8, 2, 1)
    if dim == 256:
        wide_m = max(64 if architecture >= 90 else 32, rows)
        return Config(narrow_m if kind == "narrow" else wide_m, 32, 8, 3 if architecture >= 90 else 2, 1)
    block_n = (64 if architecture >= 90 else 32) * 128 // max(64, dim)
    if kind == "wide":
        return Config(max(64, rows), block_n, 4, 3, 2)
    if narrow_m > 16:
        return Config(narrow_m, block_n, 4, 3, 2)
    return Config(16, block_n // 2, 2, 3, 4)


def candidates(*, head_dim: int, element_bytes: int, num_groups: int, kind: Kind) -> Iterator[Config]:
    """Every configuration worth a measurement on an sm_90 GPU, that of the rule first."""
    rule = config_of(head_dim=head_dim, element_bytes=element_bytes, num_groups=num_groups, kind=kind)
    others = []
    if element_bytes == 2 and head_dim <= 128:
        shapes = ((64, 4, 2), (128, 8, 1)) if kind == "wide" else ((16, 4, 2), (16, 4, 3), (16, 2, 4))
        others = [
            Config(max(block_m, rule.block_m), block_n, num_warps, num_stages, programs)
            for block_m, num_warps, programs in shapes
            for block_n in (32, 64, 128)
            for num_stages in (2, 3, 4)
            # Without wgmma the block that is multiplied has left its stage.
            if 4 * block_n * next_power_of_2(head_dim) * (num_stages - (kind == "narrow")) * programs <= _SHARED_BYTES
        ]
    yield from dict.fromkeys([rule, *others])
