"""What becomes of a session's pages when the session goes. Policy only: no tensors."""

from __future__ import annotations

from collections.abc import Sequence

from mneme.replicas.forest import PrefixForest
from mneme.replicas.forest_nodes import Resident
from mneme.replicas.token_log import Seen, TokenLog


def let_go(forest: PrefixForest, log: TokenLog) -> None:
    """It expired: what only it owned stays cached until room is needed, but for what nobody else could find."""
    forest.disown(log)
    if log.seen is not None and log.seen.root is not None:
        forest.abandon(log.seen.root)


def delete_pages(forest: PrefixForest, log: TokenLog) -> None:
    """It is deleted: what only it owned is gone."""
    if log.seen is not None and log.seen.root is not None:
        forest.abandon(log.seen.root)
    forest.drop_owned(log)


def resident_of(forest: PrefixForest, salt: str, ids: Sequence[int], seen: Seen | None) -> Resident:
    """What the tiers have of what a session sees of `ids`."""
    if seen is None:
        return forest.resident(salt, ids)
    return forest.resident(salt, seen.ids) if seen.root is None else forest.resident_behind(seen.root, seen.ids)
