"""Pages of a sequence that come from the cache tier's chunks. Policy only: no tensors.

Beside others that already have tokens to give, a step loads no more than in the time that a full step computes, of all
sequences together: a long history comes in parts, and its sequence has rows from the last of them on. The oldest loads
first. Whoever has the same prompt follows it. What is still read comes at once, though: all chunks are read layer by
layer, and would pile up in the read buffer while a first part waits for its last layer.
"""

from __future__ import annotations

from mneme.replicas.forest.forest import PrefixForest
from mneme.replicas.schedule.step_budget import StepBudget
from mneme.replicas.sequence import Sequence


class Grafting:
    """Of the sequences of one scheduler."""

    def __init__(self, forest: PrefixForest) -> None:
        self._forest = forest

    def graft(self, sequence: Sequence, budget: StepBudget, *, has_others: bool) -> None:
        """Pages for what the cache tier has of the sequence, and the forest has not.

        `found` stays if more is to come.
        """
        found, path = sequence.found, sequence.path
        if found is None or found.is_looking:
            return
        assert path is not None
        needed = self._forest.num_new_pages(path, sequence.context, len(sequence.context))
        has_room = needed < self._forest.num_available  # pages of their own may be one more than counted
        can_graft = has_room and sequence.root is None
        limit = _limit(sequence, budget, has_others=has_others)
        if can_graft and limit == 0 and self.num_to_come(sequence):
            return  # others load in this step
        graft = self._forest.graft(path, sequence.context, found, limit) if can_graft else None
        for piece in () if graft is None else graft.pieces:
            sequence.note_origin(piece.start, piece.end, found.source_of(piece.chunk))
        if graft is None:
            found.close()
        else:
            budget.num_loaded += len(graft.pieces)
        if graft is None or graft.is_last:
            sequence.found = None

    def comes_whole(self, sequence: Sequence, budget: StepBudget, *, has_others: bool) -> bool:
        """Whether one that does not run yet would wait neither for its chunks nor for a later step to load them."""
        found, limit = sequence.found, _limit(sequence, budget, has_others=has_others)
        return found is None or (found.is_settled and (limit is None or len(found.spans) <= limit))

    def num_to_come(self, sequence: Sequence) -> int:
        """Tokens that later steps load."""
        found, path = sequence.found, sequence.path
        return 0 if found is None or path is None else max(found.end - path.num_tokens, 0)

    def pause(self, sequence: Sequence | None) -> None:
        """What the cache tier has of one that waits costs nothing while that is not what it waits for."""
        if sequence is not None and sequence.found is not None:
            sequence.found.pause()

    def forget(self, sequence: Sequence) -> None:
        """What did not come is computed."""
        if sequence.found is not None:
            sequence.found.close()
            sequence.found = None


def _limit(sequence: Sequence, budget: StepBudget, *, has_others: bool) -> int | None:
    """How many chunks the step may still load; None: all."""
    found = sequence.found
    if found is None or found.plan is None or not has_others:
        return None
    limit = max(found.plan.step_chunks - budget.num_loaded, 0)
    return limit if found.is_in_memory or limit == 0 else None
