"""Decides what becomes of a session's pages when the session goes. Policy only: no tensors."""

from __future__ import annotations

import collections.abc

from mneme.replicas.forest.forest import PrefixForest
from mneme.replicas.forest.tree import Resident, Root
from mneme.replicas.sequence import Sequence
from mneme.replicas.sessions.token_log import TokenLog, VisibleTokens


def abandon_roots(
    forest: PrefixForest, before: Root | None, sequence: Sequence, others: collections.abc.Container[Root | None]
) -> None:
    """Abandon the roots `before` and after a turn's choice that its session does not go on from.

    others  roots on which other sequences go on: whoever of these ends last abandons them
    """
    now = sequence.owner.root if isinstance(sequence.owner, TokenLog) else None
    for root in {before, sequence.root}:
        if root is not None and root is not now and root not in others:
            forest.abandon(root, now)


def resident_of(
    forest: PrefixForest, salt: str, ids: collections.abc.Sequence[int], seen: VisibleTokens | None
) -> Resident:
    """Count what the tiers have of what a session sees of `ids`."""
    if seen is None:
        return forest.resident(salt, ids)
    return forest.resident(salt, seen.ids, seen.root)
