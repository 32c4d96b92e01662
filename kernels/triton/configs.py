"""Chooses the block sizes of a Triton attention launch, by a table and a rule, so that serving never tunes.

Registers and shared memory decide. A stage of the pipeline holds one block of keys and one of values, 2 * block_n *
head_dim elements; a decode wants about 32 KB per stage and three stages, so that two programs share a multiprocessor
of sm_90 (228 KB) and some 100 KB of loads are under way in it, which is what 4 TB/s times a microsecond asks for.
sm_80 multiplies out of registers, and gets half the keys. The sums of a wide tile, wide_m * head_dim / (32 *
num_warps) registers, stay at 64 per thread, so that nothing spills in the loop over keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple, get_args

Phase = Literal["decode", "prefill"]

HEAD_DIMS = (64, 80, 96, 128, 256)
# Query heads per KV head that one tile can hold.
MAX_GROUPS = 128
MIN_CAPABILITY = (8, 0)  # of the GPUs that Triton compiles for

# Keys of a block times head dimensions from which registers spill in the loop over keys.
_MOST_BLOCK_ELEMENTS_SM_80 = 4096
_MOST_BLOCK_ELEMENTS_SM_90 = 8192


class Config(NamedTuple):
    """Block sizes of one launch."""

    narrow_m: int  # rows of tiles with few rows; 16 is the least that tensor cores take
    wide_m: int  # of the others; from 64 on sm_90 uses wgmma
    block_n: int  # keys
    num_warps: int
    num_stages: int

    @property
    def programs_per_processor(self) -> int:
        """Count the programs that one multiprocessor holds, by registers (up to 255 for each thread)."""
        return max(1, 8 // self.num_warps)


def next_power_of_2(number: int) -> int:
    """Return the least power of two that is not below a positive number."""
    return 1 << (number - 1).bit_length()


def config_of(*, head_dim: int, element_bytes: int, num_groups: int, phase: Phase, architecture: int = 90) -> Config:
    """Return the configuration of a launch; `architecture` is 10 * major + minor."""
    if not 1 <= num_groups <= MAX_GROUPS:
        raise ValueError(f"num_q_heads: at most {MAX_GROUPS} per KV head (got {num_groups})")
    dim = max(32, next_power_of_2(head_dim))
    rows = next_power_of_2(num_groups)
    narrow_m = max(16, rows)
    if element_bytes == 4:  # exact products of float32 have no tensor cores and need registers
        return Config(narrow_m, max(32 if dim <= 128 else 16, rows), 32 if dim <= 128 else 16, 8, 2)
    if dim == 256:
        return Config(narrow_m, max(64 if architecture >= 90 else 32, rows), 32, 8, 3 if architecture >= 90 else 2)
    block_n = (64 if architecture >= 90 else 32) * 128 // max(64, dim)
    if phase == "prefill":
        return Config(narrow_m, 128, min(block_n, 64), 8, 3)
    return Config(narrow_m, max(64, rows), block_n, 4, 3)


def candidates(*, head_dim: int, element_bytes: int, num_groups: int, architecture: int = 90) -> Iterator[Config]:
    """Every configuration worth a measurement on a GPU, those of the rule among them."""
    rows = next_power_of_2(num_groups)
    chosen = [
        config_of(
            head_dim=head_dim,
            element_bytes=element_bytes,
            num_groups=num_groups,
            phase=phase,
            architecture=architecture,
        )
        for phase in get_args(Phase)
    ]
    others = []
    if element_bytes == 2 and head_dim <= 128:
        most = _MOST_BLOCK_ELEMENTS_SM_90 if architecture >= 90 else _MOST_BLOCK_ELEMENTS_SM_80
        others = [
            Config(max(16, rows), max(wide_m, rows), block_n, num_warps, num_stages)
            for wide_m, num_warps in ((64, 4), (128, 8))
            for block_n in (32, 64, 128)
            for num_stages in (2, 3, 4)
            if block_n * max(32, next_power_of_2(head_dim)) <= most
        ]
    yield from dict.fromkeys([*chosen, *others])
