"""Gives sequences their paths where there is room, and shortens one that outgrows its window (AttentionStore 3.4).

`reuse_kv` keeps the KV of what stays: references are dropped, deltas lowered, nothing is computed or moved. What is
computed from then on is approximate: it hangs under a root of the session's own. Where some of what was kept is gone
from every tier, and with `recompute` always, what the sequence sees is computed anew, exactly.

Policy only: no tensors.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from mneme.replicas.blend.blend import Blend
from mneme.replicas.documents import EXACT
from mneme.replicas.forest.forest import PrefixForest
from mneme.replicas.forest.paths import Path, Spans
from mneme.replicas.schedule.step_budget import StepBudget
from mneme.replicas.sequence import Sequence
from mneme.replicas.truncation import Truncation

logger = logging.getLogger(__name__)

# Gives the mass of each of a path's tokens, which are the first of these ids; None if some are not computed yet.
AttentionMass = Callable[[Path, list[int]], list[float] | None]


class PathOpener:
    """Opens paths for the scheduler."""

    def __init__(self, forest: PrefixForest, attention_mass: AttentionMass | None = None) -> None:
        self._forest = forest
        self._attention_mass = attention_mass

    def open(self, sequence: Sequence) -> Path:
        """Open a path with what is known of the sequence, which is shortened first if it is too long.

        Not before what a truncated session has in the cache tier has come: of that some stays.
        """
        request = sequence.request  # one that reads its prompt finds nothing, public pages neither
        known = () if request.reads_prompt else sequence.context
        path = self._forest.open_path(request.kv_salt, known, sequence.root)
        sequence.root = path.root if path.root.is_own else None
        path.extend(sequence.context, len(sequence.context))
        view = sequence.view
        if view.is_over(len(sequence.context)) and not (view.event and sequence.load is not None):
            return self.shorten(sequence, path, view.num_history)
        if sequence.is_found_whole and sequence.root is None:
            sequence.blend = Blend(declined=EXACT, is_history_approximate=sequence.blend.is_history_approximate)
        path = sequence.blend.open(path, sequence.context, self._forest)
        sequence.root = path.root if path.root.is_own else None
        return path

    def admit(self, sequence: Sequence, num_running: int, budget: StepBudget, *, num_kept: int = 0) -> bool:
        """Give the sequence a path with what is resident, if the rest of its tokens fits too, beside so many pages.

        With nothing else running, it always gets one.
        """
        path = self.open(sequence)
        if not self._fits(path, sequence, num_running, budget, num_kept):
            self._forest.release(path)
            if num_running:
                return False
            path = self._open_alone(sequence, budget)
        sequence.path = path
        return True

    def _open_alone(self, sequence: Sequence, budget: StepBudget) -> Path:
        """Too few pages with nothing else running: its cached tokens lie in half-used pages.

        It is tried again without them, and finally with an empty cache.
        """
        if sequence.root is not None:
            sequence.root, sequence.blend = None, sequence.blend.without_room(self._forest)  # it is computed anew
            path = self.open(sequence)
            if self._fits(path, sequence, 0, budget):
                return path
            self._forest.release(path)
        self._forest.clear()
        return self.open(sequence)

    def num_pages(self, sequence: Sequence) -> int:
        """Count the pages that the sequence may need, whatever is resident."""
        return -(-len(sequence.context) // self._forest.page_size) + 1

    def _fits(self, path: Path, sequence: Sequence, num_running: int, budget: StepBudget, num_kept: int = 0) -> bool:
        """Return whether all known tokens fit beside the reserve, at least one page more for each running sequence.

        Prompts that were cut in this step count as if they were whole.
        """
        needed = path.num_new_pages(sequence.context, sequence.view.num_fitting(len(sequence.context)))
        return self._forest.has_room(needed + num_kept + budget.num_promised(path, sequence.context), num_running)

    def shorten(self, sequence: Sequence, path: Path, num_history: int) -> Path:
        """Return the path of what stays; of the first `num_history` tokens if possible, and all that follow them."""
        truncation, context = sequence.request.truncation, sequence.context
        assert truncation is not None
        masses = partial(self._masses, truncation, path, context)
        ranges = sequence.view.kept(len(context), num_history, truncation, sequence.request.num_system, masses)
        sequence.see([token_id for start, end in ranges for token_id in context[start:end]])
        kept = _up_to(ranges, path.num_tokens) if truncation.strategy == "reuse_kv" else []
        shorter = self._forest.truncate(path, kept, sequence.owner) if kept else None
        if shorter is None:
            self._forest.release(path)
            shorter = self._forest.open_path(sequence.request.salt, sequence.context)
        heir = shorter.root if shorter.root.is_own else None
        if sequence.root is not None and sequence.root is not heir:
            self._forest.abandon(sequence.root, heir)
        sequence.root = heir
        shorter.extend(sequence.context, len(sequence.context))
        return shorter

    def _masses(self, truncation: Truncation, path: Path, context: list[int], num_history: int) -> list[float] | None:
        """Return attention masses; None where some KV is not on the device before this step: the oldest go then.

        The last token of a turn has none yet, and no mass.
        """
        is_known = path.num_tokens >= num_history - 1 and path.is_on_device() and not path.root.is_blend
        if truncation.keep != "important" or self._attention_mass is None or not is_known:
            return None
        try:
            masses = self._attention_mass(path, context)
        except RuntimeError:  # it is an advice: no memory for it must not fail the batch
            logger.exception("attention mass failed tokens=%s", num_history)
            return None
        return None if masses is None else [*masses, 0.0][:num_history]


def _up_to(ranges: Spans, limit: int) -> Spans:
    return [(start, min(end, limit)) for start, end in ranges if start < limit]
