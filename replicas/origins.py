"""Where the KV of a prompt came from, range by range. Policy only: no tensors."""

from __future__ import annotations

from typing import Literal, NamedTuple

Source = Literal["device", "host", "disk", "peer", "recomputed", "dropped"]


class Origin(NamedTuple):
    """Positions [start, end). "recomputed" by this request; "dropped": that too, but it had been there before."""

    start: int
    end: int
    source: Source


class Origins:
    """Of one sequence. What nobody noted, up to the last row, was on the device or, under a window, no row sees it."""

    __slots__ = ("_noted",)

    def __init__(self) -> None:
        self._noted: list[Origin] = []  # in order, apart

    def note(self, start: int, end: int, source: Source) -> None:
        """The latest note counts: a suspended request may find less than it had."""
        if start >= end:
            return
        before = [_cut(each, 0, start) for each in self._noted if each.start < start]
        after = [_cut(each, end, each.end) for each in self._noted if each.end > end]
        new = Origin(start, end, source)
        if before and before[-1].end == start and before[-1].source == source:
            new = new._replace(start=before.pop().start)
        if after and after[0].start == end and after[0].source == source:
            new = new._replace(end=after.pop(0).end)
        self._noted = [*before, new, *after]

    def ranges(self, num_prompt: int) -> list[Origin]:
        """The whole prompt, in order; what was not begun counts as computed."""
        ranges: list[Origin] = []
        position = 0
        for each in self._noted:
            if each.start >= num_prompt:
                break
            if position < each.start:
                ranges.append(Origin(position, each.start, "device"))
            ranges.append(_cut(each, 0, num_prompt))
            position = ranges[-1].end
        if position < num_prompt:
            ranges.append(Origin(position, num_prompt, "recomputed"))
        return ranges

    def num_tokens(self, num_prompt: int, source: Source) -> int:
        return sum(each.end - each.start for each in self.ranges(num_prompt) if each.source == source)


def _cut(origin: Origin, low: int, high: int) -> Origin:
    return origin._replace(start=max(origin.start, low), end=min(origin.end, high))
