"""Seconds as a sum of terms with coefficients that are never negative, and a scale that follows what is measured.

The shape is fitted once, to a few measured points; from then on only the scale moves. One number per kind of work is
soon right again after a change, which three coefficients, learned from whatever work comes, would not be.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

Terms = tuple[float, float, float]

# Coefficients that a fit tries, fewest first: of supports that fit alike, the first is taken. The middle term is what
# grows with the work (rows, sequences, chunks), so one point alone says something of it.
_SUPPORTS = tuple(support for size in (1, 2, 3) for support in itertools.combinations((1, 2, 0), size))
_ALIKE = 1e-12  # of the sum of squared relative errors
_SMALLEST_S = 1e-9
_CLIP = math.log(16)  # of one measurement to its prediction; beyond that it says no more
_FAR = math.log(3)  # off; twice in a row, and it is the new truth
_MAX_SCALE = 1e4
_MISS_RATIO = 2.0  # at least, of what was given up
_DISTRUST_S, _NUM_MISSES = 60.0, 2  # after so many works in a row were given up: one may be a hiccup of the machine


class Point(NamedTuple):
    """What was measured."""

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
    """Of one kind of work. Not thread-safe.

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
        is_guess: bool = False,
    ) -> None:
        """`weight` of each new measurement; `half_life_s`: of what was learned, without a new one; None: it stays.

        `is_guess`: nothing was measured yet, and the first measurement replaces the scale.
        """
        self.coefficients = coefficients
        self._is_guess, self._missed_s, self._num_missed = is_guess, -math.inf, 0
        self._left = 0.0  # of the last measurement, that the scale did not follow; log
        self._clock, self._weight, self._half_life_s = clock, weight, half_life_s
        self._log_scale, self._noted_s = math.log(scale), clock()

    @property
    def scale(self) -> float:
        """Actual to calibrated seconds, now."""
        return math.exp(self._drifted())

    def calibrated_s(self, terms: Terms) -> float:
        """As it was at the calibration."""
        return max(sum(c * t for c, t in zip(self.coefficients, terms, strict=True)), _SMALLEST_S)

    def seconds(self, terms: Terms) -> float:
        return self.calibrated_s(terms) * self.scale

    @property
    def is_measured(self) -> bool:
        return not self._is_guess

    @property
    def is_trusted(self) -> bool:
        """Whether the last works were not given up one after the other, or long ago."""
        return self._num_missed < _NUM_MISSES or self._clock() - self._missed_s >= _DISTRUST_S

    def note(self, ratio: float, share: float = 1.0) -> None:
        """Work took `ratio` times what was predicted; `share`: how much of it was of this kind."""
        far = share * math.log(min(max(ratio, 1 / _MAX_SCALE), _MAX_SCALE))
        step = self._weight * min(max(far, -_CLIP), _CLIP)
        if self._is_guess:
            step = far
        elif min(abs(far), abs(self._left)) > _FAR and far * self._left > 0:  # again: that is no outlier
            step = math.copysign(min(abs(far), abs(self._left)), far)
        self._move(step)
        self._left = far - step
        self._is_guess, self._missed_s, self._num_missed = False, -math.inf, 0

    def note_missed(self, ratio: float) -> None:
        """Work was given up after `ratio` times what was predicted: it is at least that slow, and at least twice.

        That is a guess, which the next measurement replaces.
        """
        self._move(math.log(min(max(ratio, _MISS_RATIO), _MAX_SCALE)))
        self._is_guess, self._missed_s, self._left = True, self._clock(), 0.0
        self._num_missed += 1

    def _move(self, step: float) -> None:
        bound = math.log(_MAX_SCALE)
        self._log_scale = min(max(self._drifted() + step, -bound), bound)
        self._noted_s = self._clock()

    def _drifted(self) -> float:
        if self._half_life_s is None:
            return self._log_scale
        return self._log_scale * math.exp2(-max(self._clock() - self._noted_s, 0.0) / self._half_life_s)
