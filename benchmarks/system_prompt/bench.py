"""What is compared, and what every part is given: one model, one pool and one engine, whose sharing is off, in memory
only, or in attention too."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from engines import MAIN_MODEL, PAGE_SIZE, make_decoder, request
from random_models import SHAPES
from system_prompt.serving import Figures, figures, serve
from workloads import Workload, make_prompts

from mneme.kernels.work import Share
from mneme.replicas.config import EngineConfig
from mneme.replicas.engine.engine import Engine
from mneme.replicas.model.runner import Runner
from mneme.replicas.request import GenerationRequest

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class Arm(NamedTuple):
    name: str
    prefix_sharing: bool
    share: Share


NONE = Arm("none", False, "never")  # every request computes, stores and reads its own prompt
PS = Arm("PS", True, "never")  # computed and stored once; attention reads it for each sequence
RELAY = Arm("relay", True, "auto")  # as an engine is by default: read once for all where that pays
ARMS = (NONE, PS, RELAY)


class Shape(NamedTuple):
    """Lengths of each request, tokens."""

    system: int
    user: int
    new: int

    @property
    def num_pages(self) -> int:
        """Pages of one request that shares nothing."""
        return -(-sum(self) // PAGE_SIZE)


class Replica:
    """One model and one page pool, which the arms use in turns; a new engine finds nothing of the last one's."""

    def __init__(self, shape: dict[str, Any], num_pages: int, dtype: torch.dtype, seed: int) -> None:
        """The pool is touched here, so that no arm waits for the system's pages."""
        self._decoder = make_decoder(shape, seed, dtype=dtype)
        self._runner = Runner(self._decoder, num_pages, PAGE_SIZE)
        self.num_pages = num_pages
        for pages in (self._runner.pool.k_pages, self._runner.pool.v_pages):
            pages.fill_(0)

    def engine(self, arm: Arm, *, max_running: int = 128, max_batch_tokens: int = 2048) -> Engine:
        """An empty engine; the last one is of no use any more."""
        self._decoder.share = arm.share
        config = EngineConfig(
            prefix_sharing=arm.prefix_sharing, share=arm.share, max_running=max_running,
            max_batch_tokens=max_batch_tokens, max_waiting=8192, max_waiting_tokens=None,
        )  # fmt: skip
        return Engine(self._runner, None, config)


def pool_pages(shape: Shape, num_running: int) -> int:
    """A pool in which so many requests run even if they share nothing, beside the tenth that admission leaves."""
    return -(-shape.num_pages * num_running * 10 // 9) + num_running


def requests(prompts: list[list[int]], num_new: int) -> list[GenerationRequest]:
    """Greedy, of exactly so many new tokens."""
    return [request(str(index), ids, num_new) for index, ids in enumerate(prompts)]


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
        engine = replica.engine(arm, max_running=max_running or self.batch_limit)
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
        """Take the median of one figure over the rounds."""
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
