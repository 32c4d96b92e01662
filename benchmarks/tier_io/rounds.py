"""Arms that move the same chunks in turns: seconds of every chunk, and ratios of rounds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple


def nothing() -> None:
    """Before or after an arm that needs no preparation."""


class Arm(NamedTuple):
    """One way to move chunks across an edge. `before` and `after` a round's chunks are not timed."""

    edge: str
    name: str
    call: Callable[[int], Any]  # index of a chunk
    base: str | None = None  # the arm that it is held against
    before: Callable[[], None] = nothing
    after: Callable[[], None] = nothing


class Samples(NamedTuple):
    """Of one arm: seconds by round and chunk."""

    arm: Arm
    rounds: list[list[float]]

    def total_s(self) -> list[float]:
        """Of each round's chunks together."""
        return [sum(chunks) for chunks in self.rounds]

    def per_chunk_s(self) -> list[float]:
        return sorted(second for chunks in self.rounds for second in chunks)


def take_turns(arms: Sequence[Arm], num_chunks: int, num_rounds: int) -> dict[str, Samples]:
    """By the arm's name. A first round warms up; then arms go forwards and backwards in alternation."""
    found = {arm.name: Samples(arm, []) for arm in arms}
    for number in range(num_rounds + 1):
        for arm in arms if number % 2 else arms[::-1]:
            seconds = _one_round(arm, num_chunks)
            if number:
                found[arm.name].rounds.append(seconds)
    return found


def _one_round(arm: Arm, num_chunks: int) -> list[float]:
    arm.before()
    seconds = []
    for index in range(num_chunks):
        started = time.perf_counter()
        arm.call(index)
        seconds.append(time.perf_counter() - started)
    arm.after()
    return seconds


def share_of(samples: Samples, base: Samples) -> float:
    """The arm's rate as a share of the base's: the median of the rounds' ratios."""
    return median_share(samples.total_s(), base.total_s())


def median_share(seconds: Sequence[float], base_s: Sequence[float]) -> float:
    return statistics.median(b / a for a, b in zip(seconds, base_s, strict=True))


def table(found: dict[str, Samples], shape: str, chunk_bytes: int) -> list[dict[str, Any]]:
    """A row for each arm, in order."""
    rows = []
    for samples in found.values():
        arm, per_chunk = samples.arm, samples.per_chunk_s()
        num_chunks = len(samples.rounds[0])
        rows.append({
            "shape": shape, "edge": arm.edge, "arm": arm.name, "rounds": len(samples.rounds),
            "GB/s": num_chunks * chunk_bytes / statistics.median(samples.total_s()) / 1e9,
            "chunk ms": statistics.median(per_chunk) * 1e3,
            "p99 ms": per_chunk[min(len(per_chunk) - 1, len(per_chunk) * 99 // 100)] * 1e3,
            "of": arm.base,
            "share": share_of(samples, found[arm.base]) if arm.base else None,
        })  # fmt: skip
    return rows
