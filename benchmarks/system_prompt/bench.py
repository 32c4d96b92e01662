"""What every part of the benchmark is given."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from random_models import SHAPES
from system_prompt.arms import ARMS, NONE, Arm, Limits, Replica, Shape, requests
from system_prompt.serving import Figures, figures, serve
from workloads import Workload, make_prompts

MAIN_MODEL = "llama-31m"


@dataclass(kw_only=True)
class Bench:
    """One run of the benchmark; the main model and its pool are made when first asked for."""

    quick: bool
    dtype: torch.dtype
    seed: int
    num_pages: int  # of the main model's pool
    batch_limit: int  # sequences that run at once, in every arm
    rounds: int | None = None  # None: what each part takes
    now_s: Callable[[], float] = time.perf_counter
    _main: list[Replica] = field(default_factory=list)

    @property
    def replica(self) -> Replica:
        """The main model."""
        if not self._main:
            self._main.append(self.make_replica(SHAPES[MAIN_MODEL], self.num_pages))
            self.warm_up(self._main[0])
        return self._main[0]

    def make_replica(self, shape: dict[str, Any], num_pages: int) -> Replica:
        return Replica(shape, num_pages, self.dtype, self.seed)

    def warm_up(self, replica: Replica) -> None:
        """Compiles what is compiled on first use, and meets the page pool."""
        for arm in ARMS:
            self.closed_batch(replica, arm, Shape(96, 16, 4), 4, seed=self.seed)

    def pick(self, *, full: Any, quick: Any) -> Any:
        return quick if self.quick else full

    def seeds(self, rounds: int) -> Iterator[int]:
        """One per round; `--rounds` goes before what the part asks for."""
        yield from range(self.seed + 1, self.seed + 1 + (self.rounds or rounds))

    def closed_batch(
        self, replica: Replica, arm: Arm, shape: Shape, num_requests: int, *, seed: int, max_running: int | None = None
    ) -> Figures:
        """All requests at once, from an empty cache; checks that the arm did what its name says."""
        prompts = make_prompts(Workload(num_requests, shape.system, shape.user, shape.new), seed)
        engine = replica.engine(arm, Limits(max_running=max_running or self.batch_limit))
        served = serve(engine, requests(prompts, shape.new), now_s=self.now_s)
        least_found = 0 if arm is NONE else (num_requests - 1) * shape.system
        assert engine.num_tokens["generated"] == num_requests * shape.new
        assert engine.num_tokens["cached"] >= least_found
        assert arm is not NONE or engine.num_tokens["cached"] == 0
        return figures(served)

    def closed_batches(
        self, replica: Replica, shape: Shape, num_requests: int, rounds: int, *, max_running: int | None = None
    ) -> ArmFigures:
        """Every arm has a turn in each round, forwards and backwards in alternation."""
        found = ArmFigures()
        for seed in self.seeds(rounds):
            for arm in ARMS if seed % 2 else reversed(ARMS):
                batch = self.closed_batch(replica, arm, shape, num_requests, seed=seed, max_running=max_running)
                found.add(arm, batch)
        return found


class ArmFigures:
    """Figures of the arms; index i of all was taken in round i."""

    def __init__(self) -> None:
        self._by_arm: dict[str, list[Figures]] = {arm.name: [] for arm in ARMS}

    def add(self, arm: Arm, found: Figures) -> None:
        self._by_arm[arm.name].append(found)

    def median(self, arm: Arm, name: str) -> float | None:
        """Of one figure over the rounds."""
        values: Sequence[float | None] = [getattr(found, name) for found in self._by_arm[arm.name]]
        known = [value for value in values if value is not None]
        return statistics.median(known) if known else None

    def speed_up(self, arm: Arm, over: Arm) -> float:
        """Median of the rounds' ratios of throughput."""
        pairs = zip(self._by_arm[arm.name], self._by_arm[over.name], strict=True)
        return statistics.median(a.tokens_per_s / b.tokens_per_s for a, b in pairs)

    def columns(self, **unit_by_figure: str) -> dict[str, float | None]:
        """`<arm> <unit>` -> median, for the figures that are named."""
        return {f"{arm.name} {unit}": self.median(arm, name) for name, unit in unit_by_figure.items() for arm in ARMS}
