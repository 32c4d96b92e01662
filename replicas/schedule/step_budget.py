"""Shares the rows of one step among prompts that are being prefilled. Policy only: no tensors.

Where costs are known they share time: beside streams a step has so many seconds for rows of prompts, and each prompt,
in the scheduler's order, takes what it can of what is left. The first always has a page, so that prompts go on however
long decodes take.

Where they are not, rows are shared: oldest first, each takes at most half of what is left while others want rows too,
and at least a page: a short prompt behind huge ones has its rows at once, the oldest keeps half of the step or more,
and prompts of one length still end in their order of arrival.

What is left over goes to those that were cut, so a step is as full as its prompts can make it.

A prompt that goes on where another was cut, with the same token, follows: it takes no rows, as it would compute what
the other one does, or loads, next.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from mneme.cachetier.policy.cost_model import CostModel
from mneme.replicas.forest.paths import Path
from mneme.replicas.forest.tree import Page
from mneme.replicas.sequence import Sequence, StepRows

_STEP_S = 0.05  # beside streams, if decodes take little of it
_PREFILL_OVER_DECODE = 7  # at most, beside streams that take longer: what keeps all busy where everybody is answered
_LEAST_PREFILL = 1 / 3  # of the decodes' time, where `max_step_s` leaves less


def seconds_beside(decode_s: float, max_step_s: float | None) -> float:
    """Return how long rows of prompts may take in a step beside streams, whose decodes take `decode_s` of it.

    max_step_s  of the whole step; 0: without a bound; None: 50 ms, or eight times what its decodes take if that is more
    """
    if max_step_s is None:
        return max(_STEP_S - decode_s, _PREFILL_OVER_DECODE * decode_s)
    return max(max_step_s - decode_s, _LEAST_PREFILL * decode_s) if max_step_s else math.inf


class _Cut(NamedTuple):
    sequence: Sequence
    end: int  # of what it has
    num_pages: int  # that the rest of its prompt will take


class StepBudget:
    """Rows that are left for prompts, chunks that are loaded, and the prompts that were cut in this step."""

    def __init__(
        self, num_rows: int, page_size: int, costs: CostModel | None = None, seconds: float = math.inf
    ) -> None:
        """`seconds`: that rows of prompts may add to the step."""
        self.num_left = max(num_rows, 0)
        self.num_loaded = 0  # the cache tier's chunks
        self.num_taken = 0  # rows of prompts
        self._page_size = page_size
        self._costs, self._seconds_left = costs, seconds
        self._cuts: dict[tuple[Page, int], _Cut] = {}  # by the last page and the token that comes next

    @property
    def has_room(self) -> bool:
        """Return whether some prompt may still have rows."""
        return self.num_left > 0 and self.num_rows(0) > 0

    def num_rows(self, context: int) -> int:
        """Return the rows that there are for a prompt of which `context` tokens are computed."""
        if self._costs is None:
            return self.num_left
        rows = int(min(self._costs.rows_within(self._seconds_left, context) + 1e-6, self.num_left))
        if rows < self.num_left:
            rows -= rows % self._page_size
        return rows if self.num_taken else max(rows, min(self._page_size, self.num_left))

    def limit(self, context: int, *, has_others: bool, num_reserved: int = 0) -> int:
        """Return the rows that the next prompt may have.

        has_others    whether others want rows too; where costs are not known
        num_reserved  rows for somebody who goes before it, and does not run yet; where they are
        """
        rows = self.num_rows(context)
        others = num_reserved if self._costs is not None else rows - rows // 2 if has_others else 0
        return min(rows, max(rows - others, self._page_size))

    def add(self, part: StepRows, num_new_pages: Callable[[Sequence], int]) -> None:
        """Give these rows; `num_new_pages`: what the rest of a sequence's prompt will take."""
        self.spend(part.num_rows, part.end - part.num_rows)
        if not part.is_last:
            self.cut(part.sequence, part.end, num_new_pages(part.sequence))

    def spend(self, num_rows: int, context: int) -> None:
        """Take rows of a prompt off what is left."""
        self.num_left -= num_rows
        self.num_taken += num_rows
        if self._costs is not None and self._seconds_left < math.inf:
            self._seconds_left -= self._costs.rows_s(num_rows, context)

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
