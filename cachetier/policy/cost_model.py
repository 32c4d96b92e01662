"""What things cost: prefill, decode steps and bytes over every edge of a tier, in predicted seconds.

Seconds are a sum of terms with coefficients that are never negative. The coefficients (the shape) are fitted once, to a
calibration's few measured points; from then on only a scale per kind of work moves, which is soon right again after a
change, as three coefficients learned from whatever work comes would not be. With r rows behind c tokens:

    prefill   constant per step, r, r * (c + r / 2)         (attention reads half of its own rows on average)
    decode    constant, sequences, tokens that they see
    an edge   constant, chunks, bytes

An edge is a way into the tier (`save`) or out of it, or the answer to what it has (`lookup`: a constant). Pages of an
engine's own host tier always come back from there, so nothing is decided by what that costs.

A step of both is the prefill with the decode's rows on top, without a second constant. What an edge was learned to cost
goes back to its calibration with a half-life of a minute without a measurement, so that no edge is shunned for good.
All calls may come from any thread. A model is kept from one start to the next (`CostFile`). The router has the formulas
once more, over arrays of replicas (`router/score.py`); `tests/router/test_score_costs.py` holds the two together.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mneme.cachetier.chunk.syscalls import read_private, write_private
from mneme.cachetier.names import COST_EDGES, CostEdge, Edge
from mneme.errors import ConfigError, shown

logger = logging.getLogger(__name__)

Terms = tuple[float, float, float]

# Until something is measured: a server's memory, an NVMe disk, a 10 Gbit/s network.
_DEFAULT_EDGES: dict[CostEdge, Terms] = {
    "host": (1e-4, 5e-5, 1 / 3e9),
    "disk": (2e-4, 2e-4, 1 / 1e9),
    "peer_host": (2e-3, 1e-3, 1 / 8e8),
    "peer_disk": (3e-3, 2e-3, 1 / 6e8),
    "save": (1e-4, 2e-4, 1 / 1e9),
    "lookup": (1e-3, 0.0, 0.0),
}
_DISKS: tuple[tuple[Edge, Edge], ...] = (("host", "disk"), ("peer_host", "peer_disk"))  # behind each memory
_STEP_WEIGHT = 0.2  # steps are many
_FOUND_WEIGHT = 0.1  # of one prompt's chunks, in the share of disks
_EDGE_WEIGHT = 0.35  # loads are few
_HALF_LIFE_S = 60.0
_FORGOTTEN_S = 5 * _HALF_LIFE_S
_MAX_ERROR = 10.0  # that one measurement adds to a sum of relative errors
# Coefficients that a fit tries, fewest first: of supports that fit alike, the first is taken. The middle term is what
# grows with the work (rows, sequences, chunks), so one point alone says something of it.
_SUPPORTS = tuple(support for size in (1, 2, 3) for support in itertools.combinations((1, 2, 0), size))
_ALIKE = 1e-12  # of the sum of squared relative errors
_SMALLEST_S = 1e-9
_CLIP = math.log(16)  # of one measurement to its prediction; beyond that it says no more
_FAR = math.log(3)  # off; twice in a row, and it is the new truth
_MAX_SCALE = 1e4
_LARGEST = 1e6  # seconds of one row, sequence, chunk or byte
_MAX_FILES = 64  # in a folder: of models, and of settings that costs depend on
_VERSION = 1  # of the file; raised when the numbers of older files mean something else
_FORMAT = "mneme cost model"
SHARE_CONSTANTS = ("key_many", "head_many", "piece", "merge")  # of kernels for a GPU


class Point(NamedTuple):
    """Holds one measurement."""

    terms: Terms
    seconds: float


def fit(points: Sequence[Point]) -> Terms:
    """The coefficients, none negative, with the least sum of squared relative errors.

    The best is among the plain least squares over each subset of terms, so all seven are tried. Raises ValueError
    without a point, or for one that took no time.
    """
    if not points or any(point.seconds <= 0 for point in points):
        raise ValueError("points: there must be at least one, and each must have taken time")
    terms = np.array([point.terms for point in points], np.float64) / np.array([[p.seconds] for p in points])
    size = np.abs(terms).max(axis=0)
    best, least = np.zeros(3), math.inf
    for support in _SUPPORTS:
        if len(support) > len(points) or not size[list(support)].all():
            continue
        columns = terms[:, support] / size[list(support)]
        solved = np.linalg.lstsq(columns, np.ones(len(points)), rcond=None)[0]
        error = float(((columns @ solved - 1) ** 2).sum())
        if (solved >= 0).all() and error < least - _ALIKE:
            best, least = np.zeros(3), error
            best[list(support)] = solved / size[list(support)]
    return float(best[0]), float(best[1]), float(best[2])


class LearnedCost:
    """Learns what one kind of work costs. Not thread-safe.

    The scale is an EWMA of log(actual / predicted): a ratio of 10 and one of a tenth weigh alike. One measurement that
    is far off is clipped and moves it by little; a second one alike moves it all the way.
    """

    def __init__(
        self,
        coefficients: Terms,
        clock: Callable[[], float],
        *,
        weight: float,
        half_life_s: float | None = None,
        scale: float = 1.0,
        is_calibrated: bool = True,
    ) -> None:
        """`weight` of each new measurement; `half_life_s`: of what was learned, without a new one; None: it stays.

        `is_calibrated`: else the coefficients are a guess, and the first measurement replaces the scale, if it is 1.
        """
        self.coefficients = coefficients
        self._is_calibrated, self._is_guess = is_calibrated, not is_calibrated and scale == 1.0
        self._left = 0.0  # of the last measurement, that the scale did not follow; log
        self._clock, self._weight, self._half_life_s = clock, weight, half_life_s
        self._log_scale, self._noted_s = math.log(scale), clock()

    @property
    def scale(self) -> float:
        """Actual to calibrated seconds, now."""
        return math.exp(self._drifted())

    def calibrated_s(self, terms: Terms) -> float:
        """Predict a step's time as at the calibration."""
        (constant, middle, last), (times, middles, lasts) = self.coefficients, terms  # written out: it is asked often
        return max(constant * times + middle * middles + last * lasts, _SMALLEST_S)

    def seconds(self, terms: Terms) -> float:
        return self.calibrated_s(terms) * self.scale

    @property
    def is_measured(self) -> bool:
        """False if it is a guess: nothing was measured yet, or so long ago that it is forgotten, and nothing before."""
        is_forgotten = not self._is_calibrated and self._clock() - self._noted_s > _FORGOTTEN_S
        return not (self._is_guess or is_forgotten)

    def learn(self, ratio: float, share: float = 1.0) -> None:
        """Work took `ratio` times what was predicted; `share`: how much of it was of this kind."""
        far = share * math.log(min(max(ratio, 1 / _MAX_SCALE), _MAX_SCALE))
        step = self._weight * min(max(far, -_CLIP), _CLIP)
        if self._is_guess:
            step = far
        elif min(abs(far), abs(self._left)) > _FAR and far * self._left > 0:  # again: that is no outlier
            step = math.copysign(min(abs(far), abs(self._left)), far)
        self._move(step)
        self._left = far - step
        self._is_guess = False

    def _move(self, step: float) -> None:
        bound = math.log(_MAX_SCALE)
        self._log_scale = min(max(self._drifted() + step, -bound), bound)
        self._noted_s = self._clock()

    def _drifted(self) -> float:
        if self._half_life_s is None:
            return self._log_scale
        return self._log_scale * math.exp2(-max(self._clock() - self._noted_s, 0.0) / self._half_life_s)


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
    """Compares what was predicted with what was measured."""

    __slots__ = ("actual_s", "count", "error", "predicted_s")

    def __init__(self) -> None:
        self.count, self.error, self.predicted_s, self.actual_s = 0, 0.0, 0.0, 0.0

    def add(self, predicted_s: float, actual_s: float) -> None:
        self.count += 1
        self.error += min(abs(predicted_s - actual_s) / actual_s, _MAX_ERROR)
        self.predicted_s += predicted_s
        self.actual_s += actual_s


class CostModel:
    """Predicts what an engine's work and the edges of its tiers cost, and learns from what they took."""

    def __init__(
        self,
        calibration: Calibration,
        clock: Callable[[], float] = time.monotonic,
        *,
        scales: Mapping[str, float] | None = None,
        disk_shares: Mapping[str, float] | None = None,
    ) -> None:
        """`scales`: what another process has learned, by kind; `disk_shares`, by the memory before each disk, too."""
        known = scales or {}
        self._disk_shares = {memory: (disk_shares or {}).get(memory, 0.0) for memory, _ in _DISKS}
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
                is_calibrated=edge in calibration.edges,
            )
        self._accuracy = {kind: _Accuracy() for kind in ("prefill", "decode", "mixed", *COST_EDGES)}

    @property
    def step_rows(self) -> int:
        return self.calibration.step_rows

    @property
    def step_scales(self) -> tuple[float, float]:
        """Return what prefill and decode take, in times of their calibration."""
        with self._lock:
            return self._costs["prefill"].scale, self._costs["decode"].scale

    def terms_of(self, kind: str) -> Terms:
        """Return what each term of "prefill", "decode" or an edge costs now, in seconds."""
        with self._lock:
            cost = self._costs[kind]
            scale = cost.scale
            constant, middle, last = cost.coefficients
            return constant * scale, middle * scale, last * scale

    def found_terms(self, memory: Edge) -> Terms:
        """Return them for "host" or "peer_host" and the disk behind it, in the mean of what was found lately."""
        disk, share = dict(_DISKS)[memory], self._disk_shares[memory]
        near, far = self.terms_of(memory), self.terms_of(disk)
        constant, middle, last = (n + share * (f - n) for n, f in zip(near, far, strict=True))
        return constant, middle, last

    def figures(self) -> tuple[float, ...]:
        """Return what a router prices with: `router/score.py` names the columns.

        Prefill and decode are as calibrated, and stand beside what they take in times of that; then what is brought
        from the engine's host tier, the node's cache and other nodes'.
        """
        calibration = self.calibration
        edges = (*self.terms_of("host"), *self.found_terms("host"), *self.found_terms("peer_host"))
        sizes = (calibration.step_rows, calibration.kv_bytes_per_token)
        return (*calibration.prefill, *calibration.decode, *edges, *sizes, *self.step_scales)

    def prefill_s(self, num_new: int, context: int) -> float:
        """Predict the seconds to compute `num_new` rows behind `context` tokens, in as many steps as they take."""
        if num_new <= 0:
            return 0.0
        num_steps = -(-num_new // self.step_rows)
        return self._seconds("prefill", (num_steps, num_new, num_new * (context + num_new / 2)))

    def decode_s(self, batch: int, context_tokens: int) -> float:
        """One step of so many sequences, which see so many tokens together: for whoever weighs a replica's load."""
        return self._seconds("decode", (1, batch, context_tokens)) if batch > 0 else 0.0

    def step_s(self, sequences: Sequence[tuple[int, int]]) -> float:
        """Predict a step that computes these (rows, context) of each sequence; one row is a decode."""
        return sum(self._seconds(kind, terms) for kind, terms in _parts(sequences).items())

    def rows_s(self, num_rows: int, context: int) -> float:
        """Predict what rows of a prompt behind `context` tokens add to a step that computes other rows."""
        return self._seconds("prefill", (0, num_rows, num_rows * (context + num_rows / 2))) if num_rows > 0 else 0.0

    def rows_within(self, seconds: float, context: int) -> float:
        """Return how many rows behind `context` tokens add no more than so many seconds: the inverse of `rows_s`."""
        with self._lock:
            cost = self._costs["prefill"]
            scale, (_, per_row, per_key) = cost.scale, cost.coefficients
        per_row, per_key = per_row * scale, per_key * scale
        linear = per_row + per_key * context
        root = linear + math.sqrt(linear * linear + 2 * per_key * max(seconds, 0.0))
        return 2 * max(seconds, 0.0) / root if root > 0 and seconds < math.inf else math.inf

    def edge_s(self, edge: CostEdge, num_bytes: int, num_chunks: float = 1) -> float:
        """Predict the seconds to bring the bytes of so many chunks over an edge, with nothing else under way."""
        return self._seconds(edge, (1, num_chunks, num_bytes)) if num_chunks > 0 else 0.0

    def is_measured(self, edge: CostEdge) -> bool:
        """False if what the edge takes is a guess."""
        with self._lock:
            return self._costs[edge].is_measured

    def learn_step(self, sequences: Sequence[tuple[int, int]], seconds: float) -> None:
        """A step has computed these (rows, context) of each sequence in so many seconds, the device's work included.

        One row is a decode. In a step of both, each kind learns as much as its part of the prediction.
        """
        parts = _parts(sequences)
        if not parts or seconds <= 0:
            return
        with self._lock:
            predicted = {kind: self._costs[kind].seconds(terms) for kind, terms in parts.items()}
            total_s = sum(predicted.values())
            self._accuracy["mixed" if len(parts) > 1 else next(iter(parts))].add(total_s, seconds)
            for kind, part_s in predicted.items():
                self._costs[kind].learn(seconds / total_s, part_s / total_s)

    def learn_edge(self, edge: CostEdge, num_bytes: int, num_chunks: float, seconds: float) -> None:
        """So much came over an edge, alone or as part of a load, in so many seconds.

        Of a load that was given up what had come by then, and the read that was under way: it is at least that slow.
        """
        if num_chunks <= 0 or seconds <= 0:
            return
        with self._lock:
            cost = self._costs[edge]
            predicted_s = cost.seconds((1, num_chunks, num_bytes))
            self._accuracy[edge].add(predicted_s, seconds)
            cost.learn(seconds / predicted_s)

    def learn_found(self, edges: Sequence[Edge]) -> None:
        """A tier had chunks of one prompt, each over one of these edges."""
        with self._lock:
            for memory, disk in _DISKS:
                num_on_disk = edges.count(disk)
                if num_found := edges.count(memory) + num_on_disk:
                    self._disk_shares[memory] += _FOUND_WEIGHT * (num_on_disk / num_found - self._disk_shares[memory])

    def learn_save(self, num_bytes: int, seconds: float) -> None:
        """A chunk was copied out of the pool and put into the tier."""
        self.learn_edge("save", num_bytes, 1, seconds)

    @property
    def lookup_s(self) -> float:
        """Predict the seconds until the tier says what it has of a prompt."""
        return self.edge_s("lookup", 0)

    def learn_lookup(self, seconds: float) -> None:
        """The tier's answer took so long."""
        self.learn_edge("lookup", 0, 1, seconds)

    def accuracy(self) -> dict[str, dict[str, float]]:
        """Say by kind how often it was predicted and measured, with sums of both in seconds and the scale.

        The errors are sums of |predicted - actual| / actual, each at most 10. Only kinds that were measured are there.
        """
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
        """Return it as JSON has it; `from_mapping` reads that."""
        calibration = self.calibration
        with self._lock:
            return {
                "prefill": list(calibration.prefill),
                "decode": list(calibration.decode),
                "edges": {edge: list(terms) for edge, terms in calibration.edges.items()},
                "step_rows": calibration.step_rows,
                "kv_bytes_per_token": calibration.kv_bytes_per_token,
                "scales": {kind: cost.scale for kind, cost in self._costs.items() if cost.is_measured},
                "disk_shares": dict(self._disk_shares),
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
            disk_shares = {str(memory): float(share) for memory, share in mapping.get("disk_shares", {}).items()}
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise ConfigError(f"cost model: {type(error).__name__}: {error}") from error
        if not all(0.9e-4 <= scale <= 1.1e4 for scale in scales.values()):
            raise ConfigError(f"cost model: scales must be from 0.0001 to 10000 (got {shown(scales)})")
        if not all(0 <= share <= 1 for share in disk_shares.values()):
            raise ConfigError(f"cost model: disk_shares must be from 0 to 1 (got {shown(disk_shares)})")
        return CostModel(calibration, clock, scales=scales, disk_shares=disk_shares)

    def _seconds(self, kind: str, terms: Terms) -> float:
        with self._lock:
            return self._costs[kind].seconds(terms)


class CostFile:
    """Keeps a cost model from one start to the next, for each model on each machine.

    machine     all that costs depend on beside the model, such as processors, devices and threads
    share_cost  the measured constants of `ShareCost`, by name; None: there are none
    """

    def __init__(self, folder: Path, fingerprint: bytes, machine: str) -> None:
        self.share_cost: dict[str, Any] | None = None
        self._whose = {"format": _FORMAT, "version": _VERSION, "model": fingerprint.hex(), "machine": machine}
        named = blake2b(fingerprint + machine.encode(), digest_size=12, person=b"mneme costs").hexdigest()
        self.path = folder / f"costs-{named}.json"

    def read(self, clock: Callable[[], float] = time.monotonic) -> CostModel | None:
        """Return what was learned before; None, with a warning, for a file that is broken or foreign."""
        try:
            found = read_private(self.path)
            if found is None:
                return None
            if not isinstance(found, dict) or any(found.get(key) != value for key, value in self._whose.items()):
                raise ValueError("it is of another model, machine or version")
            share_cost = found.get("share_cost")
            if share_cost is not None:
                share_cost = {str(name): float(value) for name, value in dict(share_cost).items()}
                is_sound = all(0 <= value < 1e12 for value in share_cost.values())
                if share_cost.keys() != set(SHARE_CONSTANTS) or not is_sound:
                    raise ValueError(f"share_cost: {share_cost}")
            self.share_cost = share_cost
            return CostModel.from_mapping(found.get("costs"), clock)
        except (OSError, ValueError, TypeError, ConfigError) as error:
            logger.warning("costs are measured anew, %s cannot be used: %s", self.path, error)
            return None

    def write(self, costs: CostModel) -> None:
        """Keep it if that is possible, and the newest of the others: what is not kept is measured again."""
        try:
            write_private(self.path, {**self._whose, "costs": costs.as_mapping(), "share_cost": self.share_cost})
        except OSError as error:
            logger.warning("costs are not kept, %s cannot be written: %s", self.path, error)
        with suppress(OSError):  # another process removes files, too
            kept = sorted(self.path.parent.glob("costs-*.json"), key=lambda path: path.stat().st_mtime)
            for path in kept[:-_MAX_FILES]:
                path.unlink()


def costs_in(content: Any, clock: Callable[[], float] = time.monotonic) -> CostModel | None:
    """The cost model in a file's JSON, of whatever model and machine; None if it is something else.

    Raises `ConfigError` for one of another version, or broken.
    """
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        return None
    if content.get("version") != _VERSION:
        raise ConfigError(f"cost model: version {content.get('version')!r}; this is version {_VERSION}")
    return CostModel.from_mapping(content.get("costs"), clock)


def calibrated(
    steps: Sequence[tuple[Sequence[tuple[int, int]], float]],
    edges: Mapping[CostEdge, Sequence[Point]],
    *,
    step_rows: int,
    kv_bytes_per_token: int,
) -> Calibration:
    """Fit a model to measured steps, as `learn_step` takes them, and edges, whose terms are (1, chunks, bytes).

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
