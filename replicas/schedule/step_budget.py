"""Shares the rows of one step among prompts that are being prefilled. Policy only: no tensors.

Oldest first, each takes at most half of what is left while others want rows too, and at least a page: a short prompt
behind huge ones has its rows at once, the oldest keeps half of the step or more, and prompts of one length still end
in their order of arrival (equal shares would end them all together, as late as the last). What is left over goes to
those that were cut, so a step is as full as its prompts can make it.

A prompt that goes on where another was cut, with the same token, follows: it takes no rows, as it would compute what
the other one does, or loads, next.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from mneme.replicas.forest.pages import Page, Path
from mneme.replicas.sequence import Sequence, StepRows


class _Cut(NamedTuple):
    sequence: Sequence
    end: int  # of what it has
    num_pages: int  # that the rest of its prompt will take


class StepBudget:
    """Rows that are left for prompts, chunks that are loaded, and the prompts that were cut in this step."""

    def __init__(self, num_rows: int, page_size: int) -> None:
        self.num_left = max(num_rows, 0)
        self.num_loaded = 0  # the cache tier's chunks
        self._page_size = page_size
        self._cuts: dict[tuple[Page, int], _Cut] = {}  # by the last page and the token that comes next

    def limit(self, *, has_others: bool) -> int:
        """Return the rows that the next prompt may have."""
        if not has_others:
            return self.num_left
        return min(self.num_left, max(self.num_left // 2, self._page_size))

    def take(self, part: StepRows, num_new_pages: Callable[[Sequence], int]) -> None:
        """Give these rows; `num_new_pages`: what the rest of a sequence's prompt will take."""
        self.num_left -= part.num_rows
        if not part.is_last:
            self.cut(part.sequence, part.end, num_new_pages(part.sequence))

    def cut(self, sequence: Sequence, end: int, num_pages: int) -> None:
        """Note that a sequence goes on from there in later steps, and will take so many pages."""
        path = sequence.path
        assert path is not None
        self._cuts = {place: cut for place, cut in self._cuts.items() if cut.sequence is not sequence}
        self._cuts[path.tail, sequence.context[end]] = _Cut(sequence, end, num_pages)

    def follows(self, path: Path, ids: list[int]) -> bool:
        """Return whether another prompt was cut where this one is, and goes on alike."""
        return self._leader(path, ids) is not None

    def num_promised(self, path: Path, ids: list[int]) -> int:
        """Count the pages that prompts which were cut will take, but for what this path would share."""
        leader = self._leader(path, ids)
        return sum(cut.num_pages for cut in self._cuts.values() if cut is not leader)

    def _leader(self, path: Path, ids: list[int]) -> _Cut | None:
        position = path.num_tokens
        cut = self._cuts.get((path.tail, ids[position])) if position < len(ids) else None
        return cut if cut is not None and cut.end == position else None
