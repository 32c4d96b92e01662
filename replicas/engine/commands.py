"""Questions about sessions and prompts that an engine answers between two steps: plain values, as requests are.

    GetSession      -> what is known of it, or None
    DeleteSession   -> whether there was one
    LeaveSession    -> whether there was one; it goes on on another replica
    ForkSession     -> what is known of the new one
    ExplainPrompt   -> a list of explanations, empty if the request is not remembered
    WarmPrompt      -> what `GetPin` answers; the prompt is being computed
    GetPin          -> how far it is, or None
    ListPins        -> a tenant's
    DropPin         -> whether there was one

`engine/kv_commands.py` has those about KV that is kept.
Policy only: no tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from mneme.errors import MnemeError, ReplicaUnavailable
from mneme.replicas.engine.kv_commands import KvQuery
from mneme.replicas.engine.pins import PinKey
from mneme.replicas.forest.nodes import Resident
from mneme.replicas.sessions.journal import DurableSessions
from mneme.replicas.sessions.session_pages import resident_of
from mneme.replicas.sessions.sessions import SessionKey
from mneme.replicas.sessions.token_log import TokenLog

if TYPE_CHECKING:
    from mneme.replicas.engine.engine import Engine


class GetSession(NamedTuple):
    key: SessionKey
    restores: bool = False  # from its durable log, where nothing newer is known of it


class LeaveSession(NamedTuple):
    key: SessionKey


class DeleteSession(NamedTuple):
    key: SessionKey


class ForkSession(NamedTuple):
    key: SessionKey
    new_id: str  # namespaced, like all session ids here


class ExplainPrompt(NamedTuple):
    salt: str
    http_id: str


class WarmPrompt(NamedTuple):
    key: PinKey
    salt: str
    token_ids: tuple[int, ...]
    ttl_s: float | None
    pin: bool  # False: computed only


class GetPin(NamedTuple):
    key: PinKey


class ListPins(NamedTuple):
    tenant: str


class DropPin(NamedTuple):
    key: PinKey


EngineQuery = (
    GetSession | DeleteSession | LeaveSession | ForkSession | ExplainPrompt | WarmPrompt | GetPin | ListPins | DropPin
)
Query = EngineQuery | KvQuery


def sessions_to_restore(query: EngineQuery) -> tuple[SessionKey, ...]:
    """Whose durable logs are to be looked at before the query is answered."""
    match query:
        case GetSession(key, True):
            return (key,)
        case ForkSession(key, new_id):
            return (key, (key[0], new_id))
        case _:
            return ()


def was_there(query: EngineQuery, found: Any, durable: DurableSessions | None) -> Any:
    """What is answered, once durable logs have heard of it too; raises `ReplicaUnavailable` if that takes too long."""
    if not isinstance(query, DeleteSession) or durable is None or isinstance(found, MnemeError):
        return found
    try:
        return durable.delete(query.key) or found
    except OSError as error:
        raise ReplicaUnavailable("the session's log could not be deleted in time") from error


def answer(engine: Engine, query: EngineQuery) -> Any:
    """Called on the engine's thread; raises `SessionNotFound`, `InvalidRequest`, or a `TryAgainLater`."""
    match query:
        case GetSession(key):
            return _describe(engine, key)
        case DeleteSession(key):
            return engine.sessions.delete(key)
        case LeaveSession(key):
            return engine.sessions.delete(key, is_elsewhere=True)
        case ForkSession(key, new_id):
            new_key = (key[0], new_id)
            engine.fork(key, new_key)
            return _describe(engine, new_key)
        case ExplainPrompt(salt, http_id):
            return engine.explanations.of(salt, http_id)
        case WarmPrompt(key=pin_key, salt=salt):
            engine.pins.warm(pin_key, salt, query.token_ids, ttl_s=query.ttl_s, keeps=query.pin)
            return engine.pins.describe(pin_key)
        case GetPin(pin_key):
            return engine.pins.describe(pin_key)
        case ListPins(tenant):
            return engine.pins.of_tenant(tenant)
        case DropPin(pin_key):
            return engine.pins.drop(pin_key)


def _describe(engine: Engine, key: SessionKey) -> dict[str, Any] | None:
    sessions = engine.sessions
    log = sessions.get(key)
    if log is None:
        return None
    running = engine.turn_so_far(key)
    ids, seen = (log.ids, log.seen) if running is None else (running[0].ids, running[0].seen)
    num_seen = len(ids) if seen is None else len(seen.ids)
    return {
        "version": log.version,
        "tokens": len(ids),
        "truncated": len(ids) - num_seen,
        "turns": log.num_turns,
        "answering": log.running is not None,
        "queued": 0 if log.running is None else len(log.running.queue),
        "idle_s": sessions.idle_s(log),
        "expires_in_s": sessions.expires_in_s(log),
        "kv": _in_memory(resident_of(engine.forest, key[0], ids, seen), num_seen),
        "hit_history": _hits(log),
    }


def _in_memory(resident: Resident, num_tokens: int) -> dict[str, int]:
    """Of this replica; what is absent there the cache tier may have, which `LookUpKv` asks."""
    return {"device": resident.device, "host": resident.host, "absent": num_tokens - resident.device - resident.host}


def _hits(log: TokenLog) -> list[dict[str, int]]:
    return [{"prompt_tokens": prompt, "cached_tokens": cached} for prompt, cached in log.hit_history()]
