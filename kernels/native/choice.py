"""Chooses who multiplies and attends on a CPU, from what each took there: the compiled kernels, or oneDNN by torch.

Flags of a processor do not tell: oneDNN uses AMX where the compiled kernels do not, and one with AVX512_BF16 may
multiply bfloat16 at half the rate of float32. So `replicas/engine/choice.py` times both, once on each machine, and what
is chosen is a function of the seconds.

Torch has to take a good deal less, because a choice by the number of rows has a price: a row's bits then depend on its
step's size. The compiled kernel gives each row of a product the same bits in every step. In float32 that is kept unless
somebody asks for what is fastest; in bfloat16 answers depend on their batch by rounding anyway
(docs/decisions/reproducibility.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

Work = Literal["product", "attention"]
HalfDtype = Literal["bfloat16", "float32"]
CpuKernelsUse = Literal["auto", "invariant", "fastest"]
_GAIN = 0.85  # torch is chosen where it takes less than this share of the compiled kernels' time


class Timing(NamedTuple):
    """Seconds of one kind of work in one dtype, for so many rows."""

    work: Work
    dtype: HalfDtype
    rows: int
    ours_s: float
    torch_s: float


class CpuKernels(NamedTuple):
    """Who computes what of one engine on a CPU."""

    product_rows: int | None = None  # from so many rows of a step on torch multiplies; None: never
    prompt_rows: int | None = None  # from so many rows of one prompt on torch attends to its plain pages; None: never

    def __str__(self) -> str:
        parts = (("products", self.product_rows), ("prompts", self.prompt_rows))
        said = (f"{name} by {'ours' if rows is None else f'torch from {rows} rows'}" for name, rows in parts)
        return ", ".join(said)


OURS = CpuKernels()


class Choice(NamedTuple):
    """What the timings of one machine say."""

    half_dtype: HalfDtype  # in which a checkpoint of 16 bits is computed
    bfloat16: CpuKernels
    float32: CpuKernels

    def kernels(self, dtype: str) -> CpuKernels:
        """Return who is the fastest in a dtype."""
        return {"bfloat16": self.bfloat16, "float32": self.float32}.get(dtype, OURS)

    def __str__(self) -> str:
        return f"16-bit checkpoints in {self.half_dtype}; bfloat16: {self.bfloat16}; float32: {self.float32}"


def is_invariant(use: CpuKernelsUse, dtype: str) -> bool:
    """Tell whether a row of a product is to have the same bits in every step, which the compiled kernel promises."""
    return use == "invariant" or (use == "auto" and dtype != "bfloat16")


def choose(timings: Sequence[Timing]) -> Choice:
    """Choose the dtype by the mean of products, few rows and many, and torch from where it is faster at all sizes.

    A 16-bit checkpoint is computed in bfloat16 unless float32 is clearly faster: else noise would decide, and replicas
    of one cluster would differ.
    """
    of = {dtype: [each for each in timings if each.dtype == dtype] for dtype in ("bfloat16", "float32")}
    kernels = {
        dtype: CpuKernels(
            product_rows=_torch_from(each for each in found if each.work == "product"),
            prompt_rows=_torch_from(each for each in found if each.work == "attention"),
        )
        for dtype, found in of.items()
    }
    products = [{each.rows: _best_s(each) for each in found if each.work == "product"} for found in of.values()]
    ratios = [math.log(half_s / products[1][rows]) for rows, half_s in products[0].items() if rows in products[1]]
    is_slow = bool(ratios) and sum(ratios) / len(ratios) > -math.log(_GAIN)
    return Choice("float32" if is_slow else "bfloat16", kernels["bfloat16"], kernels["float32"])


def _best_s(timing: Timing) -> float:
    return timing.torch_s if timing.torch_s < _GAIN * timing.ours_s else timing.ours_s


def _torch_from(timings: Iterable[Timing]) -> int | None:
    """Return the fewest rows from which on torch is faster, at that size and at all larger ones."""
    found = None
    for timing in sorted(timings, key=lambda each: -each.rows):
        if timing.torch_s >= _GAIN * timing.ours_s:
            break
        found = timing.rows
    return found
