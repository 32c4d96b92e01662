"""GET and DELETE /v1/sessions/{id}, POST /v1/sessions/{id}/fork, GET /v1/kv/explain/{request_id}.

A session that was opened under a `cache_salt` is found under the same: `?cache_salt=`. Every replica is asked, as any
may hold the session: one that does not answer makes a 503, never a 404.
"""

from __future__ import annotations

import contextlib
import secrets

from starlette.requests import Request

from mneme.cluster.http.api_state import ApiState
from mneme.cluster.serve.engine_client import ask_tier, look_up_session
from mneme.cluster.tenancy import RESPONSE_PREFIX, kv_salt, named_session_key, session_key
from mneme.cluster.wire.answers import Deleted, ExplainedChoice, Explanation, Session
from mneme.cluster.wire.openai import ForkRequest
from mneme.errors import ExplanationNotFound, InvalidRequest, Overloaded, ReplicaUnavailable, SessionNotFound
from mneme.replicas import queries
from mneme.replicas.queries import KnownSession, SessionFigures
from mneme.replicas.request import SessionKey

_MAX_REQUEST_ID_CHARS = 128
_MAX_MOVES = 8  # of a session to another replica while it is being forked


async def get_session(api: ApiState, request: Request) -> Session:
    """Return what is kept of a conversation, and where."""
    key = _key(request)
    return session_object(session_name(key[1]), *await _find(api, key))


async def delete_session(api: ApiState, request: Request) -> Deleted:
    """Forget a conversation, and KV that is its alone; a turn that is answering goes on, and is not kept."""
    key = _key(request)
    if not await forget_session(api, key):
        raise SessionNotFound("session_id", session_name(key[1]))
    return {"id": session_name(key[1]), "object": "session.deleted", "deleted": True}


async def forget_session(api: ApiState, key: SessionKey) -> bool:
    """Delete a session everywhere, with KV that is its alone; whether there was one."""
    answers = await api.client.query(queries.DeleteSession(key))
    await api.client.query(queries.FlushSaves())
    await ask_tier(api.client, queries.DeleteKv(key[0], (), key))
    return any(answers.values())


async def fork_session(api: ApiState, request: Request, body: ForkRequest) -> Session:
    """A new session with the same past, on the same replica."""
    key = _key(request)
    given = secrets.token_hex(16) if body.session_id is None else body.session_id
    new_key = (key[0], named_session_key(request.state.tenant, given))
    if await look_up_session(api.client, new_key) is not None:
        raise InvalidRequest("session_id", session_name(new_key[1]), "a session of this name exists")
    replica_id, forked = await fork_where_it_is(api, key, new_key[1])
    if forked is None:
        raise Overloaded("there is no room for another session")
    return session_object(session_name(new_key[1]), replica_id, forked)


async def explain(api: ApiState, request: Request) -> Explanation:
    """Return where each range of a recent request's prompts came from, and how its replica was chosen.

    `request_id` may be the id of its completion. An ingress explains the choices that it made itself, and finds what
    ended there without its `cache_salt`.
    """
    given: str = request.path_params["request_id"]
    if not 1 <= len(given) <= _MAX_REQUEST_ID_CHARS or not given.isprintable():
        raise InvalidRequest("request_id", given, f"must have from 1 to {_MAX_REQUEST_ID_CHARS} printable characters")
    http_id = given.removeprefix("chatcmpl-").removeprefix("cmpl-").removeprefix("msg_").removeprefix(RESPONSE_PREFIX)
    ended = api.requests.find(request.state.tenant, http_id)
    salt = _salt(request) if ended is None or "cache_salt" in request.query_params else ended.salt
    answers = await api.client.query(queries.ExplainPrompt(salt, http_id))
    choices: list[ExplainedChoice] = [
        {"replica": replica_id, **entry} for replica_id, entries in answers.items() for entry in entries
    ]
    if not choices:
        raise ExplanationNotFound("request_id", given, "no request of this id is remembered")
    choices.sort(key=lambda choice: choice["request_id"])
    routes = api.client.routes(salt, http_id)
    return {
        "id": given,
        "object": "kv.explanation",
        "trace_id": None if ended is None else ended.shown["trace_id"],
        "times": None if ended is None else ended.times,
        "choices": choices,
        "routes": routes,
    }


async def fork_where_it_is(api: ApiState, key: SessionKey, new_id: str) -> tuple[str, KnownSession | None]:
    """Fork a session on the replica that has it, where its next turn belongs.

    One that a turn moves elsewhere meanwhile is looked for again. Returns the replica, and what it knows of the fork;
    None: it was made, and dropped at once. Raises `SessionNotFound`.
    """
    for _ in range(_MAX_MOVES):
        replica_id, _known = await _find(api, key)
        with contextlib.suppress(SessionNotFound):
            forked = await api.client.query(queries.ForkSession(key, new_id), replica_id=replica_id)
            api.client.place_fork((key[0], new_id), replica_id)
            return replica_id, forked[replica_id]
    raise ReplicaUnavailable("the session moves from replica to replica")


async def _find(api: ApiState, key: SessionKey) -> tuple[str, KnownSession]:
    found = await look_up_session(api.client, key)
    if found is None:
        raise SessionNotFound("session_id", session_name(key[1]))
    return found


def session_object(name: str, replica_id: str, known: SessionFigures) -> Session:
    return {
        "id": name,
        "object": "session",
        "replica": replica_id,
        "tokens": known["tokens"],
        "truncated": known["truncated"],
        "turns": known["turns"],
        "answering": known["answering"],
        "queued": known["queued"],
        "idle_s": known["idle_s"],
        "expires_in_s": known["expires_in_s"],
        "kv": known["kv"],
        "hit_history": known["hit_history"],
        "forked_from": None if known["forked_from"] is None else session_name(known["forked_from"]),
    }


def _key(request: Request) -> SessionKey:
    return _salt(request), session_key(request.state.tenant, request.path_params["session_id"])


def _salt(request: Request) -> str:
    return kv_salt(request.state.tenant, request.query_params.get("cache_salt"))


def session_name(session_id: str) -> str:
    """The name that its client gave it: without the tenant."""
    return session_id.partition(":")[2]
