"""A session wherever it is: on a replica, or in its durable log, from which one that is asked to takes it."""

from __future__ import annotations

from typing import Any

from mneme.cluster.serve.engine_client import EngineClient
from mneme.cluster.serve.session_homes import newest
from mneme.replicas.engine.commands import GetSession
from mneme.replicas.sessions.sessions import SessionKey


async def look_up_session(client: EngineClient, key: SessionKey) -> tuple[str, dict[str, Any]] | None:
    """The replica that has it, and what that knows of it; None: there is no such session."""
    answers = await client.query(GetSession(key))
    found = newest(answers)
    if found is None and answers:
        replica_id = next(iter(answers))
        found = newest(await client.query(GetSession(key, restores=True), replica_id=replica_id))
    return found
