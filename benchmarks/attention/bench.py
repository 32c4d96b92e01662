"""What every part of the benchmark is given, and how it runs through its points within its share of the time."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from attention.arms import check, reference_rows
from attention.machine import Ceilings
from attention.scenes import Scene
from attention.timing import Arm, Timings, interleaved
from harness import NOT_RUN

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}


class NotRun(Exception):
    """A point that this device is not asked to run; the message says why."""


@dataclass(kw_only=True)
class Bench:
    """One run of the benchmark on one device."""

    device: torch.device
    quick: bool
    num_threads: int
    ceilings: Ceilings
    point_s: float  # time for the rounds of one point
    now_s: Callable[[], float] = time.perf_counter  # what a CPU's arms are timed with
    seed: int = 0
    notes: list[str] = field(default_factory=list)  # what was left out, and why
    _ends_s: float = 0.0

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def begin_part(self, budget_s: float) -> None:
        """Points that would start later than this from now are not run."""
        self._ends_s = time.perf_counter() + budget_s

    @property
    def is_late(self) -> bool:
        return time.perf_counter() > self._ends_s

    def pick(self, *, cuda: Any, cpu: Any, quick: Any) -> Any:
        """One of three grids: a quick one (any device), a CPU's or a GPU's."""
        return quick if self.quick else cuda if self.is_cuda else cpu

    def options(self, heads: Any, dtype: torch.dtype, page_size: int = 32) -> dict[str, Any]:
        """What all scenes of this run have in common."""
        return {
            "heads": heads, "dtype": dtype, "device": self.device, "page_size": page_size,
            "cache_bytes": self.ceilings.cache_bytes, "seed": self.seed,
        }  # fmt: skip

    def may_read(self, num_bytes: float) -> bool:
        """Whether an arm that reads so much in a call is worth its time here; never more than memory holds."""
        return num_bytes <= ((40 << 30) if self.is_cuda else (320 << 20) if self.quick else (2 << 30))

    def may_copy(self, num_bytes: float) -> bool:
        """Whether baselines that need KV of their own, so many bytes, are built here."""
        return num_bytes <= ((20 << 30) if self.is_cuda else (320 << 20) if self.quick else (1 << 30))

    def time(
        self,
        scene: Scene,
        arms: Sequence[Arm],
        optional: Iterable[Callable[[], Arm | None]] = (),
        others: Sequence[tuple[Scene, Arm]] = (),
    ) -> Timings:
        """Check every arm against float64, then time them in turns.

        An optional arm that fails is left out, and noted; `others` are arms that compute another scene.
        """
        wanted = reference_rows(scene)
        for arm in arms:
            check(arm, wanted, scene.q.dtype)
        for other, arm in others:
            check(arm, reference_rows(other), other.q.dtype)
        extra = [peer for build in optional if (peer := self._optional(build, wanted, scene)) is not None]
        return interleaved(
            [*arms, *(arm for _, arm in others), *extra], self.device, budget_s=self.point_s, now_s=self.now_s
        )

    def sweep(self, points: Iterable[NamedTuple], measure: Callable[[Any], dict[str, Any]]) -> list[dict[str, Any]]:
        """A row for each point: its coordinates and what was measured, or why it was not."""
        rows = []
        for point in points:
            row = {name: str(value) if isinstance(value, tuple) else value for name, value in point._asdict().items()}
            rows.append(row | self._measured(point, measure))
        return rows

    def _measured(self, point: NamedTuple, measure: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        if self.is_late:
            return {"status": f"{NOT_RUN}: out of time"}
        try:
            return measure(point)
        except NotRun as reason:
            return {"status": f"{NOT_RUN}: {reason}"}
        except torch.OutOfMemoryError:
            return {"status": f"{NOT_RUN}: out of memory"}
        finally:
            if self.is_cuda:
                gc.collect()
                torch.cuda.empty_cache()

    def _optional(self, build: Callable[[], Arm | None], wanted: dict[int, torch.Tensor], scene: Scene) -> Arm | None:
        try:
            arm = build()
            if arm is not None:
                check(arm, wanted, scene.q.dtype)
        except Exception as error:  # a peer library may fail in any way; our figures do not depend on it
            note = f"peer left out: {type(error).__name__}: {str(error)[:200]}"
            if note not in self.notes:
                self.notes.append(note)
            return None
        return arm


def ran(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows that were measured."""
    return [row for row in rows if "status" not in row]


def least(values: Iterable[float | None]) -> float | None:
    """The smallest of those that are there, or None."""
    return min((value for value in values if value is not None), default=None)
