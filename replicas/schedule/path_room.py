"""Paths for sequences that begin to run, where there is room for all of their tokens. Policy only: no tensors."""

from __future__ import annotations

from mneme.replicas.forest.forest import PrefixForest
from mneme.replicas.forest.nodes import Path
from mneme.replicas.schedule.step_budget import StepBudget
from mneme.replicas.schedule.truncating import PathOpener
from mneme.replicas.sequence import Sequence


class PathRoom:
    """Over one forest."""

    def __init__(self, forest: PrefixForest, opener: PathOpener) -> None:
        self._forest, self._opener = forest, opener

    def open(self, sequence: Sequence, num_running: int, budget: StepBudget, *, num_kept: int = 0) -> bool:
        """Give the sequence a path with what is resident, if the rest of its tokens fits too, beside so many pages.

        Alone, it has one.
        """
        path = self._opener.open(sequence)
        if not self._fits(path, sequence, num_running, budget, num_kept):
            self._forest.release(path)
            if num_running:
                return False
            path = self._open_alone(sequence, budget)
        sequence.path, sequence.was_admitted = path, True
        return True

    def _open_alone(self, sequence: Sequence, budget: StepBudget) -> Path:
        """Alone and still short: what it has is scattered over parts of pages. Start clean, at others' cost at last."""
        if sequence.root is not None:
            sequence.root = None  # what it sees is computed anew
            path = self._opener.open(sequence)
            if self._fits(path, sequence, 0, budget):
                return path
            self._forest.release(path)
        self._forest.clear()
        return self._opener.open(sequence)

    def num_pages(self, sequence: Sequence) -> int:
        """That it may need, whatever is resident."""
        return -(-len(sequence.context) // self._forest.page_size) + 1

    def _fits(self, path: Path, sequence: Sequence, num_running: int, budget: StepBudget, num_kept: int = 0) -> bool:
        """Whether all known tokens fit beside the reserve, at least one page more for each running sequence.

        Prompts that were cut in this step count as if they were whole.
        """
        needed = self._forest.num_new_pages(path, sequence.context, len(sequence.context))
        kept = num_kept + (max(self._forest.num_reserved, num_running) if num_running else 0)
        kept += budget.num_promised(path, sequence.context)
        return needed + kept <= self._forest.num_available
