"""One device, its ceilings, and how arms over a scene are timed on it: each is checked first, all take turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from attention.arms import check, reference_rows
from attention.machine import Ceilings
from attention.scenes import Heads, Scene
from attention.timing import Arm, Timings, interleaved


class NotRun(Exception):
    """A point that this device is not asked to run; the message says why."""


@dataclass(kw_only=True)
class Bench:
    """One device in bfloat16."""

    device: torch.device
    quick: bool
    ceilings: Ceilings
    point_s: float  # time for the rounds of one point
    now_s: Callable[[], float] = time.perf_counter  # what a CPU's arms are timed with
    seed: int = 0
    notes: list[str] = field(default_factory=list)  # what was left out, and why

    def options(self, heads: Heads, **more: Any) -> dict[str, Any]:
        """What all scenes of this run have in common."""
        return {
            "heads": heads, "dtype": torch.bfloat16, "device": self.device, "page_size": 32,
            "cache_bytes": self.ceilings.cache_bytes, "seed": self.seed, **more,
        }  # fmt: skip

    def may_read(self, num_bytes: float) -> bool:
        """Whether an arm that reads so much in a call is worth its time here; never more than memory holds."""
        return num_bytes <= self._most(40 << 30, 2 << 30)

    def may_copy(self, num_bytes: float) -> bool:
        """Whether baselines that need KV of their own, so many bytes, are built here."""
        return num_bytes <= self._most(20 << 30, 1 << 30)

    def _most(self, cuda: int, cpu: int) -> int:
        return 320 << 20 if self.quick else cuda if self.device.type == "cuda" else cpu

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
