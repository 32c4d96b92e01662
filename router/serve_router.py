"""The Ray Serve adapter of the router: sends a call to the replica that it names by `replica_id=`.

An ingress has chosen by then (`ReplicaChooser`), or asks for any replica, as where it wakes one.

Rules of the framework that this class keeps: it is called by keyword; it never raises and never returns an
empty list (either hangs the call for ever), so a call for a replica that is gone goes to any other, and that one
refuses what was not meant for it. FIFOMixin is left out: it would hand the chosen replica to the oldest pending call
instead.
"""

from __future__ import annotations

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from mneme.router import replica_set


class MnemeRequestRouter(RequestRouter):  # type: ignore[misc]  # ray is untyped
    """Follows the name that a call carries; of several replicas Serve takes one with room."""

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
        return [*([r] for r in candidate_replicas if r.replica_id.unique_id == named), candidate_replicas]

    def _replicas_changed(self) -> None:
        replica_set.publish(self._deployment_id.name, frozenset(r.unique_id for r in self._replicas))
