"""One ingress's view of its replicas: selects a replica and reserves its load in one step.

Selecting first and reserving later herds: every request that arrives in between sees the same idle replica.
Nothing here awaits, so on an event loop a choice is atomic.

A session that is answering keeps its replica, whatever the score says: only there do its turns wait for each
other. Every ingress knows its own turns alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from mneme.router.prefix_index import PrefixIndex
from mneme.router.score import Candidate, RouterConfig, cheapest, rendezvous_order
from mneme.router.token_hashes import block_hashes

_Session = tuple[str, str]  # (salt, session id)


@dataclass(slots=True)
class _Load:
    running: int = 0
    queued_tokens: int = 0


@dataclass(slots=True, eq=False)
class Reservation:
    """Load that a chosen replica carries until its release; `started` and `release` may be called twice."""

    replica_id: str
    matched_tokens: int
    _load: _Load
    _running: int
    _queued_tokens: int
    _on_release: Callable[[Reservation], None] | None = None  # of a session's turn

    def started(self) -> None:
        """The first output came back: the prompt is no longer queued."""
        self._load.queued_tokens -= self._queued_tokens
        self._queued_tokens = 0

    def release(self) -> None:
        """The request has finished, was refused or was aborted."""
        self.started()
        self._load.running -= self._running
        self._running = 0
        if self._on_release is not None:
            self._on_release(self)
            self._on_release = None


@dataclass(slots=True)
class ReplicaChooser:
    """Candidates, their load as reserved here, and the prefixes they were sent."""

    config: RouterConfig
    _index: PrefixIndex = field(init=False)
    _loads: dict[str, _Load] = field(init=False, default_factory=dict)
    _turns: dict[_Session, list[Reservation]] = field(init=False, default_factory=dict)  # in flight, in order
    _unique: itertools.count[int] = field(init=False, default_factory=itertools.count)

    def __post_init__(self) -> None:
        self._index = PrefixIndex(self.config.index_blocks)

    def set_replicas(self, replica_ids: Collection[str]) -> None:
        """Replicas that may be chosen from now on; those that are gone leave no trace."""
        gone = self._loads.keys() - set(replica_ids)
        self._loads = {r: self._loads.get(r) or _Load() for r in replica_ids}
        if gone:
            self._index.retain(self._loads)

    def forget_prefixes(self, replica_id: str) -> None:
        """The replica restarted: it is a candidate, and holds nothing."""
        self._index.forget(replica_id)

    def running(self, replica_id: str) -> int:
        """Requests reserved on this replica."""
        load = self._loads.get(replica_id)
        return load.running if load else 0

    def is_answering(self, session_id: str | None, *, salt: str = "") -> bool:
        """Return whether a turn of this session is in flight on a replica that is there."""
        return session_id is not None and self._answering((salt, session_id)) is not None

    def select_and_reserve(
        self,
        token_ids: Sequence[int],
        *,
        salt: str = "",
        session_id: str | None = None,
        affinity: str | None = None,
        num_choices: int = 1,
        exclude: Collection[str] = (),
    ) -> Reservation | None:
        """Choose the session's replica, else the cheapest, and reserve it; None when there is no candidate.

        affinity  without a session: requests with the same go to one replica, unless load or KV says otherwise.
                  Nothing is remembered of it: a hash says which, in every ingress the same
        """
        hashes = self._hashes(token_ids, salt)
        session = None if session_id is None else (salt, session_id)
        replica_ids = [r for r in self._loads if r not in exclude]
        if not replica_ids:
            return None
        shared = f"s{session[1]}" if session else f"a{affinity}" if affinity else None
        order = rendezvous_order(shared or f"r{next(self._unique)}", replica_ids)
        matched = self._index.matched_blocks(hashes)
        candidates = [
            Candidate(
                replica_id=r,
                running=self._loads[r].running,
                queued_tokens=self._loads[r].queued_tokens,
                uncached_tokens=max(len(token_ids) - matched.get(r, 0) * self.config.block_tokens, 0),
                is_away=shared is not None and r != order[0],
            )
            for r in order
        ]
        answering = self._answering(session)
        chosen = next((c for c in candidates if c.replica_id == answering), None) or cheapest(candidates, self.config)
        load, uncached = self._loads[chosen.replica_id], chosen.uncached_tokens
        load.running += num_choices
        load.queued_tokens += uncached
        self._index.record(hashes, chosen.replica_id)
        reservation = Reservation(chosen.replica_id, len(token_ids) - uncached, load, num_choices, uncached)
        if session is not None:
            self._note_turn(session, reservation)
        return reservation

    def record(self, token_ids: Sequence[int], replica_id: str, *, salt: str = "") -> None:
        """`replica_id` holds the KV of these tokens now."""
        if replica_id in self._loads:
            self._index.record(self._hashes(token_ids, salt), replica_id)

    def _answering(self, session: _Session | None) -> str | None:
        """The replica where the session's latest turn is in flight; a replica that came back is another one."""
        turns = self._turns.get(session, ()) if session else ()
        alive = (t.replica_id for t in reversed(turns) if self._loads.get(t.replica_id) is t._load)
        return next(alive, None)

    def _note_turn(self, session: _Session, reservation: Reservation) -> None:
        def forget(released: Reservation) -> None:
            turns = self._turns[session]
            turns.remove(released)
            if not turns:
                del self._turns[session]

        reservation._on_release = forget
        self._turns.setdefault(session, []).append(reservation)

    def _hashes(self, token_ids: Sequence[int], salt: str) -> list[int]:
        return block_hashes(token_ids, salt=salt, block_tokens=self.config.block_tokens)
