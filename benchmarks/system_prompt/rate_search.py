"""Search for the highest rate that still meets a limit. Pure."""

from __future__ import annotations

import math


class RateSearch:
    """Steps from a first guess until one rate is met and one missed, then halves what lies between (in logarithms)."""

    def __init__(self, start: float, *, step: float = 1.5, tolerance: float = 1.06, lowest: float = 0.01) -> None:
        """Ends when the lowest missed rate is at most `tolerance` times the highest met one, or below `lowest`."""
        self.best: float | None = None  # the highest rate that was met; None if none was
        self.rate = start  # to be tried next
        self.tried: list[tuple[float, bool]] = []
        self._missed: float | None = None
        self._step = step
        self._tolerance = tolerance
        self._lowest = lowest

    @property
    def is_done(self) -> bool:
        if self.best is None or self._missed is None:
            return self.rate < self._lowest
        return self._missed / self.best <= self._tolerance

    def note(self, is_met: bool) -> None:
        """Whether `rate` was met; chooses the next."""
        self.tried.append((self.rate, is_met))
        if is_met:
            self.best = self.rate
        else:
            self._missed = self.rate
        if self.best is None:
            self.rate /= self._step
        elif self._missed is None:
            self.rate *= self._step
        else:
            self.rate = math.sqrt(self.best * self._missed)
