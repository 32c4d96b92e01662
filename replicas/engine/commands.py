"""Answers what may be asked of an engine (`replicas/queries.py`), by one function for each question.

It runs on the thread that asks. It says itself what of it runs on the engine's thread (`AskedEngine.between_steps`).

Of several replicas one is asked for the cache tier's, because they share it. A deletion asks all for their pages first
(`DeleteSequencePages`, `DeleteTenantPages`, `FlushSaves`), then one for the tier's chunks: nothing that a request
saves meanwhile comes into the tier behind it.

Policy only: no tensors.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from mneme.cachetier.admin import (
    Administered,
    Amount,
    CacheAdmin,
    PinnedPrefix,
    leading,
    num_leading_tokens,
)
from mneme.cachetier.admin import FoundChunk as ChunkPlace
from mneme.cachetier.chunk.fingerprint import ModelFingerprint
from mneme.cachetier.chunk.keys import prefix_lineage, session_lineage
from mneme.cachetier.names import tenant_id, tenant_of
from mneme.cachetier.store import ChainQuery
from mneme.errors import KvNotFound, NoCacheTier, ReplicaUnavailable
from mneme.replicas.connector.connector import KvConnector
from mneme.replicas.engine.engine import Engine
from mneme.replicas.engine.overview import TreeWalk
from mneme.replicas.engine.reporter import Reporter
from mneme.replicas.queries import (
    ComputePrompt,
    DeleteKv,
    DeletePin,
    DeleteSequencePages,
    DeleteSession,
    DeleteTenantKv,
    DeleteTenantPages,
    DroppedChunks,
    DroppedPages,
    ExplainedPrompt,
    ExplainPrompt,
    FlushSaves,
    ForkSession,
    FoundChunk,
    FoundInTier,
    FoundPages,
    GetKvStats,
    GetNote,
    GetPin,
    GetReport,
    GetSession,
    GetTokens,
    GetTree,
    Hits,
    KnownPin,
    KnownSession,
    KvFigures,
    LeaveSession,
    ListedSession,
    ListKvPins,
    ListPins,
    ListSessions,
    LookUpKv,
    LookUpPages,
    PinKv,
    PinnedChunks,
    Query,
    SessionTokens,
    SetNote,
    TenantKv,
    Tree,
    UnpinKv,
)
from mneme.replicas.report import ReplicaReport
from mneme.replicas.request import SessionKey, session_key
from mneme.replicas.sessions.durable import DurableSessions
from mneme.replicas.sessions.session_pages import resident_of

T = TypeVar("T")

_FLUSH_S = 5.0
_LIST_S = 0.01  # of an engine at once, for a list


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagedChunks:
    """The cache tier of an engine's chunks."""

    admin: CacheAdmin
    fingerprint: ModelFingerprint
    tenant_bytes: int | None = None  # each tenant's quota in each tier of a node
    flush_saves: Callable[[float], bool] = lambda _timeout_s: True

    def chain(self, salt: str, ids: Sequence[int], session: SessionKey | None = None, event: bytes = b"") -> ChainQuery:
        """The chunks of these tokens under a tenant's salt, as a prompt begins, or a session's alone since an event."""
        lineage = prefix_lineage(self.fingerprint, salt)
        if event and session is not None:
            lineage = session_lineage(self.fingerprint, *session, event)
        return ChainQuery.of(lineage, self.fingerprint.digest, ids, self.fingerprint.layout.chunk_tokens)

    def of_session(self, key: SessionKey) -> ChainQuery:
        """What all begins with that is a session's alone."""
        lineage = session_lineage(self.fingerprint, *key)
        return ChainQuery.of(lineage, self.fingerprint.digest, (), self.fingerprint.layout.chunk_tokens)


def chunk_tier_of(chunks: KvConnector | None) -> ManagedChunks | None:
    """Return the tier of an engine, if its store can be managed."""
    if chunks is None or not isinstance(chunks.store, Administered):
        return None
    return ManagedChunks(
        admin=chunks.store.admin,
        fingerprint=chunks.fingerprint,
        tenant_bytes=chunks.config.tenant_bytes,
        flush_saves=chunks.saver.flush,
    )


class AskedEngine(Protocol):
    """An engine as commands see it: `EngineLoop`."""

    durable: DurableSessions | None
    chunk_tier: ManagedChunks | None
    reporter: Reporter

    def between_steps(self, question: Callable[[Engine], T], recalled: Iterable[SessionKey] = ()) -> T:
        """Return what the question gives on the engine's thread; raises what it raises, or `ReplicaUnavailable`.

        recalled  sessions that are looked up in their durable logs before, where nothing newer is known of them
        """
        ...


_ANSWERS: dict[type[Query[Any]], Callable[[AskedEngine, Any], Any]] = {}


def answer(asked: AskedEngine, query: Query[T]) -> T:
    """Answer a question, on the thread that asks; raises what its class says."""
    found: T = _ANSWERS[type(query)](asked, query)
    return found


def _answers(
    kind: type[Query[T]],
) -> Callable[[Callable[[AskedEngine, Any], T]], Callable[[AskedEngine, Any], T]]:
    def keep(function: Callable[[AskedEngine, Any], T]) -> Callable[[AskedEngine, Any], T]:
        _ANSWERS[kind] = function
        return function

    return keep


@_answers(GetSession)
def get_session(asked: AskedEngine, query: GetSession) -> KnownSession | None:
    return asked.between_steps(lambda engine: _describe(engine, query.key), (query.key,) if query.restores else ())


@_answers(ListSessions)
def list_sessions(asked: AskedEngine, query: ListSessions) -> list[ListedSession]:
    tenant = tenant_of(query.salt)

    def recent(engine: Engine) -> Iterable[SessionKey]:
        return engine.sessions.recent(lambda key: tenant_of(key[0]) == tenant, query.limit)

    keys = deque(asked.between_steps(recent))
    found: list[ListedSession] = []

    def describe_some(engine: Engine) -> None:
        """A session of 32,000 tokens takes 30 ms: the engine steps between."""
        end_s = time.perf_counter() + _LIST_S
        while keys and time.perf_counter() < end_s:
            key = keys.popleft()
            known = _describe(engine, key)
            if known is not None:
                found.append({"key": key, **known})

    while keys:
        asked.between_steps(describe_some)
    return found


@_answers(DeleteSession)
def delete_session(asked: AskedEngine, query: DeleteSession) -> bool:
    found = asked.between_steps(lambda engine: engine.sessions.delete(query.key))
    try:
        return (asked.durable is not None and asked.durable.delete(query.key)) or found
    except OSError as error:
        raise ReplicaUnavailable("the session's log could not be deleted in time") from error


@_answers(LeaveSession)
def leave_session(asked: AskedEngine, query: LeaveSession) -> bool:
    return asked.between_steps(lambda engine: engine.sessions.delete(query.key, is_elsewhere=True))


@_answers(ForkSession)
def fork_session(asked: AskedEngine, query: ForkSession) -> KnownSession | None:
    new_key = (query.key[0], query.new_id)

    def fork(engine: Engine) -> KnownSession | None:
        engine.fork(query.key, new_key)
        return _describe(engine, new_key)

    return asked.between_steps(fork, (query.key, new_key))


@_answers(SetNote)
def set_note(asked: AskedEngine, query: SetNote) -> bool:
    noted = asked.between_steps(lambda engine: engine.sessions.set_note(query.key, query.note))
    if noted and asked.durable is not None:
        asked.durable.writer.flush(_FLUSH_S)  # what cannot be written is a counter, as with turns
    return noted


@_answers(GetNote)
def session_note(asked: AskedEngine, query: GetNote) -> bytes | None:
    return asked.between_steps(lambda engine: None if (log := engine.sessions.get(query.key)) is None else log.note)


@_answers(GetTokens)
def session_tokens(asked: AskedEngine, query: GetTokens) -> SessionTokens | None:
    def tokens(engine: Engine) -> SessionTokens | None:
        log = engine.sessions.get(query.key)
        if log is None:
            return None
        if query.visible and log.seen is not None:
            return SessionTokens(tuple(log.seen.ids), log.seen.event)
        return SessionTokens(tuple(log.ids), b"")

    return asked.between_steps(tokens)


@_answers(GetReport)
def report_all(asked: AskedEngine, query: GetReport) -> ReplicaReport:
    return asked.between_steps(lambda _: asked.reporter.snapshot())


@_answers(ExplainPrompt)
def explain_prompt(asked: AskedEngine, query: ExplainPrompt) -> list[ExplainedPrompt]:
    return asked.between_steps(lambda engine: engine.explanations.of(query.salt, query.http_id))


@_answers(ComputePrompt)
def compute_prompt(asked: AskedEngine, query: ComputePrompt) -> KnownPin | None:
    def warm(engine: Engine) -> KnownPin | None:
        engine.pins.warm(query.name, query.salt, query.token_ids, ttl_s=query.ttl_s, keeps=query.pin)
        return engine.pins.describe(query.name)

    return asked.between_steps(warm)


@_answers(GetPin)
def get_pin(asked: AskedEngine, query: GetPin) -> KnownPin | None:
    return asked.between_steps(lambda engine: engine.pins.describe(query.name))


@_answers(ListPins)
def list_pins(asked: AskedEngine, query: ListPins) -> list[KnownPin]:
    return asked.between_steps(lambda engine: engine.pins.of_tenant(query.tenant))


@_answers(DeletePin)
def delete_pin(asked: AskedEngine, query: DeletePin) -> bool:
    return asked.between_steps(lambda engine: engine.pins.unpin(query.name))


@_answers(GetTree)
def get_tree(asked: AskedEngine, query: GetTree) -> Tree:
    walk = TreeWalk(query)
    while asked.between_steps(walk.go_on):
        pass
    return walk.tree()


@_answers(LookUpPages)
def look_up_pages(asked: AskedEngine, query: LookUpPages) -> FoundPages:
    return asked.between_steps(lambda engine: _shown_resident(engine, query))


@_answers(LookUpKv)
def look_up_kv(asked: AskedEngine, query: LookUpKv) -> FoundInTier | None:
    if asked.chunk_tier is None:
        return None
    chain = asked.chunk_tier.chain(query.salt, query.token_ids, query.session, query.event)
    return _shown_lookup(asked.chunk_tier.admin.lookup(chain), chain)


@_answers(PinKv)
def pin_kv(asked: AskedEngine, query: PinKv) -> PinnedChunks:
    if asked.chunk_tier is None:
        raise NoCacheTier
    chain = asked.chunk_tier.chain(query.salt, query.token_ids, query.session, query.event)
    pin = asked.chunk_tier.admin.pin(query.name, chain, query.ttl_s)
    if pin is None:
        raise KvNotFound("prompt", len(query.token_ids), "the cache tier has nothing of it; compute it first")
    return _shown_pin(pin)


@_answers(UnpinKv)
def unpin_kv(asked: AskedEngine, query: UnpinKv) -> bool | None:
    return None if asked.chunk_tier is None else asked.chunk_tier.admin.unpin(query.name)


@_answers(ListKvPins)
def list_kv_pins(asked: AskedEngine, query: ListKvPins) -> list[PinnedChunks] | None:
    return None if asked.chunk_tier is None else [_shown_pin(pin) for pin in asked.chunk_tier.admin.pins(query.tenant)]


@_answers(DeleteSequencePages)
def delete_sequence_pages(asked: AskedEngine, query: DeleteSequencePages) -> DroppedPages:
    def delete(engine: Engine) -> None:
        if query.session is None:
            engine.keep_nothing(
                lambda s: s.request.salt == query.salt and tuple(s.context[: len(query.token_ids)]) == query.token_ids
            )
            engine.forest.drop_prefix(query.salt, query.token_ids)
            return
        asker = engine.scheduler.gathering.asker
        engine.keep_nothing(lambda sequence: session_key(asker(sequence).request) == query.session)
        log = engine.sessions.get(query.session)
        if log is not None:
            engine.delete_kv(query.session, log)

    deleted = asked.between_steps(lambda engine: _deleted_pages(engine, delete))
    _flush(asked)
    return deleted


@_answers(DeleteTenantPages)
def delete_tenant_pages(asked: AskedEngine, query: DeleteTenantPages) -> DroppedPages:
    tenant = tenant_of(query.salt)

    def delete(engine: Engine) -> None:
        engine.keep_nothing(lambda sequence: tenant_of(sequence.request.salt) == tenant)
        engine.sessions.delete_salts(lambda other: tenant_of(other) == tenant)
        engine.forest.drop_salts(lambda other: tenant_of(other) == tenant)

    deleted = asked.between_steps(lambda engine: _deleted_pages(engine, delete))
    _flush(asked)
    return deleted


@_answers(FlushSaves)
def flush_saves(asked: AskedEngine, query: FlushSaves) -> None:
    _flush(asked)


@_answers(DeleteKv)
def delete_kv(asked: AskedEngine, query: DeleteKv) -> DroppedChunks | None:
    tier = asked.chunk_tier
    if tier is None:
        return None
    removed = tier.admin.delete(tier.chain(query.salt, query.token_ids), spares_longer=query.session is not None)
    if query.session is not None:
        removed = removed.plus(tier.admin.delete(tier.of_session(query.session), spares_longer=False))
    return _shown_amount(removed)


@_answers(DeleteTenantKv)
def delete_tenant_kv(asked: AskedEngine, query: DeleteTenantKv) -> DroppedChunks | None:
    if asked.chunk_tier is None:
        return None
    try:
        num_logs = 0 if asked.durable is None else asked.durable.delete_tenant(tenant_id(query.salt))
    except OSError as error:
        raise ReplicaUnavailable("the tenant's session logs could not be deleted in time") from error
    return {**_shown_amount(asked.chunk_tier.admin.delete_tenant(tenant_id(query.salt))), "session_logs": num_logs}


@_answers(GetKvStats)
def kv_stats(asked: AskedEngine, query: GetKvStats) -> KvFigures | None:
    if asked.chunk_tier is None:
        return None
    tenant = None if query.salt is None else tenant_id(query.salt)
    nodes, own = [], Counter[str]()
    for node in asked.chunk_tier.admin.stats():
        tenants = node.pop("owners", {})
        own.update({} if tenant is None else tenants.get(tenant.hex(), {}))
        nodes.append(node)
    return {"nodes": nodes, "tenant": None if tenant is None else _tenant(asked.chunk_tier, tenant, own)}


def _shown_resident(engine: Engine, query: LookUpPages) -> FoundPages:
    log = None if query.session is None else engine.sessions.get(query.session)
    ids, seen = (query.token_ids, None) if log is None else (log.ids, log.seen)
    resident = resident_of(engine.forest, query.salt, ids, seen)
    return {"device": resident.device, "host": resident.host}


def _describe(engine: Engine, key: SessionKey) -> KnownSession | None:
    sessions = engine.sessions
    log = sessions.get(key)
    if log is None:
        return None
    running = engine.turn_so_far(key)
    ids, seen = (log.ids, log.seen) if running is None else (running[0].ids, running[0].seen)
    num_seen = len(ids) if seen is None else len(seen.ids)
    resident = resident_of(engine.forest, key[0], ids, seen)
    absent = num_seen - resident.device - resident.host  # from this replica: `LookUpKv` asks the cache tier
    hits: list[Hits] = [{"prompt_tokens": prompt, "cached_tokens": cached} for prompt, cached in log.hit_history()]
    return {
        "version": log.version,
        "tokens": len(ids),
        "truncated": len(ids) - num_seen,
        "turns": log.num_turns,
        "answering": log.running is not None,
        "queued": 0 if log.running is None else len(log.running.queue),
        "idle_s": sessions.idle_s(log),
        "expires_in_s": sessions.expires_in_s(log),
        "kv": {"device": resident.device, "host": resident.host, "absent": absent},
        "hit_history": hits,
        "forked_from": None if log.forked_from is None else log.forked_from.decode("utf-8", "replace"),
    }


def _flush(asked: AskedEngine) -> None:
    if asked.chunk_tier is not None and not asked.chunk_tier.flush_saves(_FLUSH_S):
        raise ReplicaUnavailable("what is being saved takes long, and would come after the deletion; try again")


def _deleted_pages(engine: Engine, delete: Callable[[Engine], None]) -> DroppedPages:
    """Count the pages that `delete` frees."""
    before = engine.forest.stats()
    delete(engine)
    now = engine.forest.stats()
    return {
        "device_pages": now["pages"]["free"] - before["pages"]["free"],
        "host_pages": now["host_pages"]["free"] - before["host_pages"]["free"],
    }


def _tenant(tier: ManagedChunks, tenant: bytes, own: Mapping[str, int]) -> TenantKv:
    return {
        "owner": tenant.hex(),
        "host_bytes": own["host"],
        "disk_bytes": own["disk"],
        "quota_bytes": tier.tenant_bytes,  # in each tier of each node
        "pins": [_shown_pin(pin) for pin in tier.admin.pins(tenant)],
    }


def _shown_lookup(found: Sequence[ChunkPlace], query: ChainQuery) -> FoundInTier:
    """Count leading tokens by where they are; one that is in several places counts in each."""
    run = leading(found, query.chunk_tokens)
    nodes: dict[str, Counter[str]] = {}
    sums = _by_kind(run)
    for each in run:
        nodes.setdefault(each.node, Counter())[each.tier] += each.num_tokens
    return {
        "tokens": num_leading_tokens(run),
        "host": sums["host"],
        "disk": sums["disk"],
        "peer": sums["peer"],
        "nodes": [{"node": node, "host": held["host"], "disk": held["disk"]} for node, held in sorted(nodes.items())],
        "chunks": [_chunk_shown(each, query) for each in run],
    }


def _by_kind(run: Sequence[ChunkPlace]) -> dict[str, int]:
    """Count tokens in this node's memory, on its disk, and on other nodes alone."""
    sums: dict[str, int] = {}
    near = {each.place for each in run if each.is_near}
    for tier in ("host", "disk"):
        sums[tier] = sum(each.num_tokens for each in run if each.is_near and each.tier == tier)
    far = {each.place: each.num_tokens for each in run if each.place not in near}
    return sums | {"peer": sum(far.values())}


def _chunk_shown(each: ChunkPlace, query: ChainQuery) -> FoundChunk:
    start = each.place * query.chunk_tokens
    return {
        "start": start,
        "tokens": each.num_tokens,
        "bytes": each.num_bytes,
        "tier": each.tier,
        "node": each.node,
    }


def _shown_pin(pin: PinnedPrefix) -> PinnedChunks:
    return {
        "id": pin.pin_id,
        "num_tokens": pin.num_tokens,
        "num_chunks": pin.amount.num_chunks,
        "num_bytes": pin.amount.num_bytes,
        "expires_in_s": pin.expires_in_s,
    }


def _shown_amount(amount: Amount) -> DroppedChunks:
    return {"chunks": amount.num_chunks, "bytes": amount.num_bytes}
