"""The Ray Serve adapter of the router: pins calls to a given replica, and scores those that name none.

A handle call may carry `replica_id=` (the call is for this replica), or `prompt_token_ids=` and `salt=`
(score it here; the session is the handle's own `session_id`). With neither, Serve's power of two choices
decides.

Rules of the framework that this class keeps: it is called by keyword; it never raises and never returns an
empty list (either hangs the call for ever), so a call for a replica that is gone goes to any other, and the
engine refuses what was not meant for it. `on_request_completed` fires for rejected attempts too. FIFOMixin is
left out: it would hand the chosen replica to the oldest pending call instead.
"""

from __future__ import annotations

import logging
from typing import Any

from ray.serve._private.request_router.pow_2_router import PowerOfTwoChoicesRequestRouter
from ray.serve.request_router import (
    LocalityMixin,
    MultiplexMixin,
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

from mneme.config import parse
from mneme.router import replica_set
from mneme.router.chooser import ReplicaChooser, Reservation
from mneme.router.score import RouterConfig

logger = logging.getLogger(__name__)


class MnemeRequestRouter(LocalityMixin, MultiplexMixin, RequestRouter):  # type: ignore[misc]  # ray is untyped
    """Pins, scores, or falls back to power of two choices."""

    def initialize_state(self, **router_config: Any) -> None:
        """`router_config`: the keys of `RouterConfig`."""
        self._chooser = ReplicaChooser(parse(RouterConfig, router_config, "router"))
        self._reservations: dict[str, Reservation] = {}

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """The controller's broadcast: replicas came or went."""
        super().update_replicas(replicas)
        self._replicas_changed()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """A call found the replica dead, before the controller said so."""
        super().on_replica_actor_died(replica_id)
        self._replicas_changed()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Ranks of replicas, best first; never empty while there is a candidate."""
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        try:
            ranks = self._preferred(candidate_replicas, pending_request)
            return [
                *ranks,
                *await self._power_of_two(candidate_replicas, pending_request),
                candidate_replicas,
            ]
        except Exception:  # raising here would hang this call for ever
            logger.exception("request_id=%s routing failed", pending_request.metadata.request_id)
            return [candidate_replicas]

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """The call has ended, in whatever way; ids that reserved nothing are ignored."""
        reservation = self._reservations.pop(internal_request_id, None)
        if reservation is not None:
            reservation.release()

    def _preferred(self, candidates: list[RunningReplica], pending: PendingRequest) -> list[list[RunningReplica]]:
        pinned = pending.kwargs.get("replica_id")
        if pinned is not None:
            return [[r] for r in candidates if r.replica_id.unique_id == pinned]
        token_ids = pending.kwargs.get("prompt_token_ids")
        session_id = pending.metadata.session_id or None
        if not token_ids and session_id is None:
            return []
        chosen = self._reserve(pending, token_ids or (), session_id)
        return [[r] for r in candidates if r.replica_id.unique_id == chosen]

    def _reserve(self, pending: PendingRequest, token_ids: Any, session_id: str | None) -> str | None:
        call = pending.metadata.internal_request_id
        earlier = self._reservations.pop(call, None)  # a second attempt, after a rejection
        if earlier is not None:
            earlier.release()
        reservation = self._chooser.select_and_reserve(
            token_ids, salt=pending.kwargs.get("salt", ""), session_id=session_id
        )
        if reservation is None:
            return None
        self._reservations[call] = reservation
        return reservation.replica_id

    async def _power_of_two(
        self, candidates: list[RunningReplica], pending: PendingRequest
    ) -> list[list[RunningReplica]]:
        ranks = await PowerOfTwoChoicesRequestRouter.choose_replicas(
            self, candidate_replicas=candidates, pending_request=pending
        )
        return [rank for rank in ranks if rank]

    def _replicas_changed(self) -> None:
        replica_ids = frozenset(r.unique_id for r in self._replicas)
        self._chooser.set_replicas(replica_ids)
        replica_set.publish(self._deployment_id.name, replica_ids)
