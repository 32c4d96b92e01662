"""Decides what becomes of a session's pages when the session goes. Policy only: no tensors."""

from __future__ import annotations

import collections.abc

from mneme.replicas.forest.forest import PrefixForest
from mneme.replicas.forest.pages import Path, Resident, Root
from mneme.replicas.sequence import Sequence
from mneme.replicas.sessions.token_log import Seen, TokenLog


def expire_pages(forest: PrefixForest, log: TokenLog) -> None:
    """Let what only an expired session owned stay cached until room is needed, but for what nobody else could find."""
    forest.disown(log)
    if log.root is not None:
        forest.abandon(log.root)


def delete_pages(forest: PrefixForest, log: TokenLog) -> None:
    """Delete the pages of a session: what only its last path is on is gone, and what that came from by truncation."""
    forest.drop_owned(log)
    if log.root is not None:
        forest.drop_kept(log.root)


def share_pages(forest: PrefixForest, log: TokenLog | None, fork: TokenLog | None, path: Path | None) -> None:
    """Let a fork own what its original's last path is on, or the running turn's; of a truncated one it has ids only."""
    tail = path.tail if path is not None and path.pages else None
    if tail is None and log is not None:
        tail = forest.owners.tail_of(log)
    if fork is not None and fork.seen is None and tail is not None and tail.parent is not None:
        forest.claim(fork, tail)


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


def resident_of(forest: PrefixForest, salt: str, ids: collections.abc.Sequence[int], seen: Seen | None) -> Resident:
    """Count what the tiers have of what a session sees of `ids`."""
    if seen is None:
        return forest.resident(salt, ids)
    return forest.resident(salt, seen.ids) if seen.root is None else forest.resident_behind(seen.root, seen.ids)
