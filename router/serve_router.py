"""The Ray Serve adapter of the router: sends a call to the replica that it names.

An ingress has chosen by then (`ReplicaChooser`), and says so by `replica_id=`. For a call that names none, Serve's
power of two choices decides.

Rules of the framework that this class keeps: it is called by keyword; it never raises and never returns an
empty list (either hangs the call for ever), so a call for a replica that is gone goes to any other, and that one
refuses what was not meant for it. FIFOMixin is left out: it would hand the chosen replica to the oldest pending call
instead.
"""

from __future__ import annotations

import logging

from ray.serve._private.request_router.pow_2_router import PowerOfTwoChoicesRequestRouter
from ray.serve.request_router import (
    LocalityMixin,
    MultiplexMixin,
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

from mneme.router import replica_set

logger = logging.getLogger(__name__)


class MnemeRequestRouter(LocalityMixin, MultiplexMixin, RequestRouter):  # type: ignore[misc]  # ray is untyped
    """Follows the name that a call carries, or falls back to power of two choices."""

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
        named = pending_request.kwargs.get("replica_id")
        try:
            return [
                *([r] for r in candidate_replicas if r.replica_id.unique_id == named),
                *await self._power_of_two(candidate_replicas, pending_request),
                candidate_replicas,
            ]
        except Exception:  # raising here would hang this call for ever
            logger.exception("request_id=%s routing failed", pending_request.metadata.request_id)
            return [candidate_replicas]

    async def _power_of_two(
        self, candidates: list[RunningReplica], pending: PendingRequest
    ) -> list[list[RunningReplica]]:
        ranks = await PowerOfTwoChoicesRequestRouter.choose_replicas(
            self, candidate_replicas=candidates, pending_request=pending
        )
        return [rank for rank in ranks if rank]

    def _replicas_changed(self) -> None:
        replica_set.publish(self._deployment_id.name, frozenset(r.unique_id for r in self._replicas))
