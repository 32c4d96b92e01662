"""Questions about KV that is kept: in an engine's own pages, and in the cache tier behind it; plain values.

    LookUpKv     -> what is kept of a sequence, and where; changes nothing
    PinKv        -> what the tier keeps of it until the pin is over
    UnpinKv      -> whether there was such a pin
    ListKvPins   -> a tenant's
    DropKv       -> what went: a prompt with all that begins with it, a session's own, or a document
    DropTenantKv -> likewise, all of a tenant, and its sessions with their logs
    KvStats      -> figures of the tier, and the tenant's own

The engine's part is answered between two steps; the tier's, which may take milliseconds, on the thread that asks.
Of several replicas one is asked for the tier's (`in_tier`), as they share it. Policy only: no tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from mneme.cachetier.admin import Administered, CacheAdmin, PinName
from mneme.cachetier.chunk.fingerprint import ModelFingerprint
from mneme.cachetier.chunk.keys import Lineage, document_lineage, owner_of, prefix_lineage, tenant_of
from mneme.cachetier.store import ChainQuery
from mneme.errors import KvNotFound, MnemeError, NoCacheTier, ReplicaUnavailable
from mneme.replicas.engine.kv_shown import shown_amount, shown_lookup, shown_pin
from mneme.replicas.sequence import Sequence as RunningSequence
from mneme.replicas.sessions.session_pages import delete_pages
from mneme.replicas.sessions.sessions import SessionKey, session_key

if TYPE_CHECKING:
    from mneme.replicas.connector.connector import ChunkCache
    from mneme.replicas.engine.engine import Engine
    from mneme.replicas.sessions.journal import DurableSessions


_SETTLE_S = 5.0


class LookUpKv(NamedTuple):
    salt: str
    token_ids: tuple[int, ...]
    in_tier: bool


class PinKv(NamedTuple):
    salt: str
    pin_id: str
    token_ids: tuple[int, ...]
    ttl_s: float | None
    in_tier: bool = True


class UnpinKv(NamedTuple):
    salt: str
    pin_id: str
    in_tier: bool = True


class ListKvPins(NamedTuple):
    salt: str
    in_tier: bool = True


class DropKv(NamedTuple):
    """`session`: only what is its own goes; `sink_ids`: the tokens are a document's, encoded behind these."""

    salt: str
    token_ids: tuple[int, ...]
    in_tier: bool
    session: SessionKey | None = None
    sink_ids: tuple[int, ...] | None = None


class DropTenantKv(NamedTuple):
    salt: str
    in_tier: bool


class KvStats(NamedTuple):
    salt: str | None  # None: figures of the tier alone
    in_tier: bool


class GetTokens(NamedTuple):
    """Of a session, or None: `seen` what its next turn would look for, else all that was said."""

    key: SessionKey
    seen: bool
    in_tier: bool = False


KvQuery = LookUpKv | PinKv | UnpinKv | ListKvPins | DropKv | DropTenantKv | KvStats | GetTokens


@dataclass(frozen=True, slots=True, kw_only=True)
class KvTier:
    """The cache tier of an engine's chunks."""

    admin: CacheAdmin
    fingerprint: ModelFingerprint
    tenant_bytes: int | None = None  # each tenant's quota in each tier of a node
    durable: DurableSessions | None = None
    settle_saves: Callable[[float], bool] = lambda _timeout_s: True


def kv_tier_of(chunks: ChunkCache | None, durable: DurableSessions | None) -> KvTier | None:
    """Of an engine, if its store can be managed."""
    if chunks is None or not isinstance(chunks.store, Administered):
        return None
    return KvTier(
        admin=chunks.store.admin,
        fingerprint=chunks.fingerprint,
        tenant_bytes=chunks.config.tenant_bytes,
        durable=durable,
        settle_saves=chunks.settle_saves,
    )


class KvAnswer(NamedTuple):
    engine: Any  # the engine's own part
    tier: Any  # None: not asked, or there is none


def answer_kv(query: KvQuery, ask_engine: Callable[[KvQuery], Any], tier: KvTier | None) -> KvAnswer | MnemeError:
    """Both parts. Blocks; `ask_engine` gives `engine_part` on the engine's thread, or an error.

    Raises `KvNotFound`, `CachePinRefused`, `NoCacheTier` or `ReplicaUnavailable`.
    """
    own = ask_engine(query)
    if isinstance(own, MnemeError):
        return own
    if tier is None and isinstance(query, PinKv):
        raise NoCacheTier
    if tier is not None and isinstance(query, DropKv | DropTenantKv) and not tier.settle_saves(_SETTLE_S):
        raise ReplicaUnavailable("what is being saved takes long, and would come after the deletion; try again")
    return KvAnswer(own, tier_part(query, tier) if tier is not None and query.in_tier else None)


def engine_part(engine: Engine, query: KvQuery) -> Any:
    """Called on the engine's thread."""
    match query:
        case LookUpKv(salt, ids):
            return engine.forest.resident(salt, ids)._asdict()
        case DropKv(sink_ids=None):
            return _dropped_pages(engine, lambda: _drop(engine, query))
        case DropTenantKv(salt):
            tenant = tenant_of(salt)
            return _dropped_pages(engine, lambda: _drop_salts(engine, lambda other: tenant_of(other) == tenant))
        case GetTokens(key, seen):
            log = engine.sessions.get(key)
            if log is None:
                return None
            return tuple(log.seen.ids if seen and log.seen is not None else log.ids)
    return None


def tier_part(query: KvQuery, tier: KvTier) -> Any:
    """Called on any thread."""
    match query:
        case LookUpKv(salt, ids):
            chain = _chain(tier, prefix_lineage(tier.fingerprint, salt), ids)
            return shown_lookup(tier.admin.lookup(chain), chain)
        case PinKv(salt, pin_id):
            return _pin(tier, query, PinName(owner_of(salt), pin_id))
        case UnpinKv(salt, pin_id):
            return tier.admin.unpin(PinName(owner_of(salt), pin_id))
        case ListKvPins(salt):
            return [shown_pin(pin) for pin in tier.admin.pins(owner_of(salt))]
        case DropKv(salt, ids):
            lineage = _lineage(tier, query)
            dropped = tier.admin.delete(_chain(tier, lineage, ids), spares_longer=query.session is not None)
            return shown_amount(dropped)
        case DropTenantKv(salt):
            return _drop_owned(tier, owner_of(salt))
        case KvStats(salt):
            return _stats(tier, None if salt is None else owner_of(salt))
    return None


def _drop(engine: Engine, query: DropKv) -> None:
    if query.session is None:
        _save_no_more(engine, lambda sequence: _begins_with(sequence, query))
        engine.forest.drop_prefix(query.salt, query.token_ids)
        return
    _save_no_more(engine, lambda sequence: session_key(sequence.request) == query.session)
    log = engine.sessions.get(query.session)
    if log is not None:
        delete_pages(engine.forest, log)


def _drop_salts(engine: Engine, is_meant: Callable[[str], bool]) -> None:
    """A session that answers is forgotten when it has."""
    _save_no_more(engine, lambda sequence: is_meant(sequence.request.salt))
    engine.sessions.delete_salts(is_meant)
    engine.forest.drop_salts(is_meant)


def _begins_with(sequence: RunningSequence, query: DropKv) -> bool:
    ids = query.token_ids
    return sequence.request.salt == query.salt and tuple(sequence.context[: len(ids)]) == ids


def _save_no_more(engine: Engine, is_meant: Callable[[RunningSequence], bool]) -> None:
    """What a request computes that runs meanwhile does not come into the tier behind the deletion."""
    for sequence in (*engine.scheduler.running, *engine.scheduler.waiting):
        if is_meant(sequence):
            sequence.chain = None


def _drop_owned(tier: KvTier, owner: bytes) -> dict[str, int]:
    """Logs first: a session that is read from one would be saved again."""
    try:
        num_logs = 0 if tier.durable is None else tier.durable.delete_owned(owner)
    except OSError as error:
        raise ReplicaUnavailable("the tenant's session logs could not be deleted in time") from error
    return {**shown_amount(tier.admin.delete_owned(owner)), "session_logs": num_logs}


def _dropped_pages(engine: Engine, drop: Callable[[], None]) -> dict[str, int]:
    """Pages that are free now and were not."""
    device, host = engine.forest.device, engine.forest.host
    before = len(device.free), len(host.free)
    drop()
    return {"device_pages": len(device.free) - before[0], "host_pages": len(host.free) - before[1]}


def _lineage(tier: KvTier, query: DropKv) -> Lineage:
    if query.sink_ids is None:
        return prefix_lineage(tier.fingerprint, query.salt)
    return document_lineage(tier.fingerprint, query.salt, query.sink_ids)


def _chain(tier: KvTier, lineage: Lineage, ids: Sequence[int]) -> ChainQuery:
    return ChainQuery.of(lineage, tier.fingerprint.digest, ids, tier.fingerprint.layout.chunk_tokens)


def _pin(tier: KvTier, query: PinKv, name: PinName) -> dict[str, Any]:
    chain = _chain(tier, prefix_lineage(tier.fingerprint, query.salt), query.token_ids)
    pin = tier.admin.pin(name, chain, query.ttl_s)
    if pin is None:
        raise KvNotFound("prompt", len(query.token_ids), "the cache tier has nothing of it; compute it first")
    return shown_pin(pin)


def _stats(tier: KvTier, owner: bytes | None) -> dict[str, Any]:
    """Of all tenants sums alone; what is kept by tenant is the owner's own here."""
    nodes, own = [], Counter[str]()
    for node in tier.admin.stats():
        owners = node.pop("owners", {})
        own.update({} if owner is None else owners.get(owner.hex(), {}))
        nodes.append(node)
    return {"nodes": nodes, "tenant": None if owner is None else _tenant(tier, owner, own)}


def _tenant(tier: KvTier, owner: bytes, own: Mapping[str, int]) -> dict[str, Any]:
    return {
        "owner": owner.hex(),
        "host_bytes": own["host"],
        "disk_bytes": own["disk"],
        "quota_bytes": tier.tenant_bytes,  # in each tier of each node
        "pins": [shown_pin(pin) for pin in tier.admin.pins(owner)],
    }
