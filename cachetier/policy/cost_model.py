"""What things cost: prefill, decode steps and bytes over every edge of a tier, in predicted seconds.

Shapes come from a calibration, scales from what happens since (`linear_cost.py`). With r rows behind c tokens:

    prefill   constant per step, r, r * (c + r / 2)         (attention reads half of its own rows on average)
    decode    constant, sequences, tokens that they see
    an edge   constant, chunks, bytes

An edge is a way into the tier (`save`) or out of it. Pages of an engine's own host tier always come back from there, so
nothing is decided by what that costs.

A step of both is the prefill with the decode's rows on top, without a second constant. What an edge was learned to cost
goes back to its calibration with a half-life of a minute without a measurement, so that no edge is shunned for good.
All calls may come from any thread.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from mneme.cachetier.policy.linear_cost import LearnedCost, Point, Terms, fit
from mneme.cachetier.store import EDGES, Edge
from mneme.errors import ConfigError, shown

CostEdge = Edge | Literal["save"]
COST_EDGES: tuple[CostEdge, ...] = (*EDGES, "save")

# Until something is measured: a server's memory, an NVMe disk, a 10 Gbit/s network.
_DEFAULT_EDGES: dict[CostEdge, Terms] = {
    "host": (1e-4, 5e-5, 1 / 3e9),
    "disk": (2e-4, 2e-4, 1 / 1e9),
    "peer_host": (2e-3, 1e-3, 1 / 8e8),
    "peer_disk": (3e-3, 2e-3, 1 / 6e8),
    "save": (1e-4, 2e-4, 1 / 1e9),
}
_STEP_WEIGHT = 0.2  # steps are many
_EDGE_WEIGHT = 0.35  # loads are few
_HALF_LIFE_S = 60.0
_MAX_ERROR = 10.0  # that one measurement adds to a sum of relative errors
_LARGEST = 1e6  # seconds of one row, sequence, chunk or byte


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Measured shapes, of one model on one machine."""

    prefill: Terms
    decode: Terms
    edges: Mapping[CostEdge, Terms] = field(default_factory=dict)  # those that were measured
    step_rows: int  # that one step computes at most
    kv_bytes_per_token: int

    def __post_init__(self) -> None:
        for name, terms in [("prefill", self.prefill), ("decode", self.decode), *self.edges.items()]:
            if not all(math.isfinite(term) and 0 <= term <= _LARGEST for term in terms):
                raise ConfigError(f"{name}: must be seconds from 0 to {_LARGEST:g} (got {shown(terms)})")
        if self.step_rows < 1 or self.kv_bytes_per_token < 1:
            raise ConfigError(f"step_rows, kv_bytes_per_token: must be positive (got {shown(self)})")


class _Accuracy:
    """Predicted against actual."""

    __slots__ = ("actual_s", "count", "error", "predicted_s")

    def __init__(self) -> None:
        self.count, self.error, self.predicted_s, self.actual_s = 0, 0.0, 0.0, 0.0

    def note(self, predicted_s: float, actual_s: float) -> None:
        self.count += 1
        self.error += min(abs(predicted_s - actual_s) / actual_s, _MAX_ERROR)
        self.predicted_s += predicted_s
        self.actual_s += actual_s


class CostModel:
    """Of one engine and the tiers under it."""

    def __init__(
        self,
        calibration: Calibration,
        clock: Callable[[], float] = time.monotonic,
        *,
        scales: Mapping[str, float] | None = None,
    ) -> None:
        """`scales`: what another process has learned, by kind."""
        known = scales or {}
        self.calibration = calibration
        self._lock = threading.Lock()
        steps = {"prefill": calibration.prefill, "decode": calibration.decode}
        self._costs = {
            kind: LearnedCost(terms, clock, weight=_STEP_WEIGHT, scale=known.get(kind, 1.0))
            for kind, terms in steps.items()
        }
        for edge in COST_EDGES:
            self._costs[edge] = LearnedCost(
                calibration.edges.get(edge, _DEFAULT_EDGES[edge]),
                clock,
                weight=_EDGE_WEIGHT,
                half_life_s=_HALF_LIFE_S,
                scale=known.get(edge, 1.0),
                is_guess=edge not in calibration.edges and edge not in known,
            )
        self._accuracy = {kind: _Accuracy() for kind in ("prefill", "decode", "mixed", *COST_EDGES)}

    @property
    def step_rows(self) -> int:
        return self.calibration.step_rows

    @property
    def step_scales(self) -> tuple[float, float]:
        """What prefill and decode take, in times of their calibration."""
        with self._lock:
            return self._costs["prefill"].scale, self._costs["decode"].scale

    def prefill_s(self, num_new: int, context: int) -> float:
        """To compute `num_new` rows behind `context` tokens, in as many steps as they take."""
        if num_new <= 0:
            return 0.0
        num_steps = -(-num_new // self.step_rows)
        return self._seconds("prefill", (num_steps, num_new, num_new * (context + num_new / 2)))

    def decode_s(self, batch: int, context_tokens: int) -> float:
        """One step of so many sequences, which see so many tokens together: for whoever weighs a replica's load."""
        return self._seconds("decode", (1, batch, context_tokens)) if batch > 0 else 0.0

    def edge_s(self, edge: CostEdge, num_bytes: int, num_chunks: float = 1) -> float:
        """To bring the bytes of so many chunks over an edge, with nothing else under way."""
        return self._seconds(edge, (1, num_chunks, num_bytes)) if num_chunks > 0 else 0.0

    def calibrated_edge_s(self, edge: CostEdge, num_bytes: int, num_chunks: int = 1) -> float:
        """As it was at the calibration, whatever was measured since."""
        return self._costs[edge].calibrated_s((1, num_chunks, num_bytes))

    def edge_scale(self, edge: CostEdge) -> float:
        """What the edge takes, in times of its calibration."""
        with self._lock:
            return self._costs[edge].scale

    def is_trusted(self, edge: CostEdge) -> bool:
        """False for a while after loads over the edge were given up, or until one has come."""
        with self._lock:
            return self._costs[edge].is_trusted

    def is_measured(self, edge: CostEdge) -> bool:
        """False if what the edge takes is a guess."""
        with self._lock:
            return self._costs[edge].is_measured

    def note_step(self, sequences: Sequence[tuple[int, int]], seconds: float) -> None:
        """A step has computed these (rows, context) of each sequence in so many seconds, the device's work included.

        One row is a decode. In a step of both, each kind learns as much as its part of the prediction.
        """
        parts = _parts(sequences)
        if not parts or seconds <= 0:
            return
        with self._lock:
            predicted = {kind: self._costs[kind].seconds(terms) for kind, terms in parts.items()}
            total_s = sum(predicted.values())
            self._accuracy["mixed" if len(parts) > 1 else next(iter(parts))].note(total_s, seconds)
            for kind, part_s in predicted.items():
                self._costs[kind].note(seconds / total_s, part_s / total_s)

    def note_edge(
        self, edge: CostEdge, num_bytes: int, num_chunks: float, seconds: float, *, is_complete: bool = True
    ) -> None:
        """So much came over an edge, alone or as part of a load, in so many seconds.

        Not complete: it was given up then. Best told with what had come by then; where that is not known, with all that
        was asked for: the edge is at least that slow, and at least twice as slow as was thought.
        """
        if num_chunks <= 0 or seconds <= 0:
            return
        with self._lock:
            cost = self._costs[edge]
            predicted_s = cost.seconds((1, num_chunks, num_bytes))
            if is_complete:
                self._accuracy[edge].note(predicted_s, seconds)
                cost.note(seconds / predicted_s)
            else:
                cost.note_missed(seconds / predicted_s)

    def note_save(self, num_bytes: int, seconds: float) -> None:
        """A chunk was copied out of the pool and put into the tier."""
        self.note_edge("save", num_bytes, 1, seconds)

    def accuracy(self) -> dict[str, dict[str, float]]:
        """By kind: how often it was predicted and measured, sums of |predicted - actual| / actual (each at most 10) and
        of both in seconds, and the scale. Only kinds that were measured."""
        with self._lock:
            return {
                kind: {
                    "count": each.count,
                    "relative_error_sum": each.error,
                    "predicted_s": each.predicted_s,
                    "actual_s": each.actual_s,
                    "scale": self._costs["prefill" if kind == "mixed" else kind].scale,
                }
                for kind, each in self._accuracy.items()
                if each.count
            }

    def as_mapping(self) -> dict[str, Any]:
        """For JSON; `from_mapping` reads it."""
        calibration = self.calibration
        with self._lock:
            return {
                "prefill": list(calibration.prefill),
                "decode": list(calibration.decode),
                "edges": {edge: list(terms) for edge, terms in calibration.edges.items()},
                "step_rows": calibration.step_rows,
                "kv_bytes_per_token": calibration.kv_bytes_per_token,
                "scales": {kind: cost.scale for kind, cost in self._costs.items() if cost.is_measured},
            }

    @staticmethod
    def from_mapping(mapping: Any, clock: Callable[[], float] = time.monotonic) -> CostModel:
        """Raises `ConfigError` for what no `as_mapping` gave."""
        try:
            calibration = Calibration(
                prefill=_terms(mapping["prefill"]),
                decode=_terms(mapping["decode"]),
                edges={edge: _terms(mapping["edges"][edge]) for edge in COST_EDGES if edge in mapping["edges"]},
                step_rows=int(mapping["step_rows"]),
                kv_bytes_per_token=int(mapping["kv_bytes_per_token"]),
            )
            scales = {str(kind): float(scale) for kind, scale in mapping["scales"].items()}
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise ConfigError(f"cost model: {type(error).__name__}: {error}") from error
        if not all(0.9e-4 <= scale <= 1.1e4 for scale in scales.values()):
            raise ConfigError(f"cost model: scales must be from 0.0001 to 10000 (got {shown(scales)})")
        return CostModel(calibration, clock, scales=scales)

    def _seconds(self, kind: str, terms: Terms) -> float:
        with self._lock:
            return self._costs[kind].seconds(terms)


def calibrated(
    steps: Sequence[tuple[Sequence[tuple[int, int]], float]],
    edges: Mapping[CostEdge, Sequence[Point]],
    *,
    step_rows: int,
    kv_bytes_per_token: int,
) -> Calibration:
    """From measured steps, as `note_step` takes them, and edges, whose terms are (1, chunks, bytes).

    Raises ValueError unless some steps were prefill only and some decode only.
    """
    points: dict[str, list[Point]] = {"prefill": [], "decode": []}
    for sequences, seconds in steps:
        parts = _parts(sequences)
        if len(parts) == 1:
            ((kind, terms),) = parts.items()
            points[kind].append(Point(terms, seconds))
    return Calibration(
        prefill=fit(points["prefill"]),
        decode=fit(points["decode"]),
        edges={edge: fit(measured) for edge, measured in edges.items() if measured},
        step_rows=step_rows,
        kv_bytes_per_token=kv_bytes_per_token,
    )


def _parts(sequences: Sequence[tuple[int, int]]) -> dict[str, Terms]:
    """Terms of what is computed, by kind."""
    prefill = [each for each in sequences if each[0] > 1]
    contexts = [context for num_rows, context in sequences if num_rows == 1]
    parts: dict[str, Terms] = {}
    if prefill:
        num_rows = sum(rows for rows, _ in prefill)
        parts["prefill"] = (1, num_rows, sum(rows * (context + rows / 2) for rows, context in prefill))
    if contexts:
        parts["decode"] = (0 if prefill else 1, len(contexts), sum(contexts) + len(contexts))
    return parts


def _terms(values: Any) -> Terms:
    constant, middle, last = values
    return float(constant), float(middle), float(last)
