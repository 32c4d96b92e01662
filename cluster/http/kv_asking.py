"""Questions to the cache tier: through one replica, as all of them share it."""

from __future__ import annotations

from typing import Any

from mneme.cluster.serve.engine_client import EngineClient
from mneme.errors import ReplicaUnavailable
from mneme.replicas.engine.kv_commands import KvAnswer, KvQuery


async def ask_tier(client: EngineClient, query: KvQuery) -> Any:
    """What the tier answers through the first replica that can ask it; None: there is no tier."""
    refusal = ReplicaUnavailable("no replica is ready")
    for replica_id in client.replica_ids():
        try:
            answers = await client.query(query._replace(in_tier=True), replica_id=replica_id)
        except ReplicaUnavailable as error:
            refusal = error
        else:
            answer: KvAnswer = answers[replica_id]
            return answer.tier
    raise refusal
