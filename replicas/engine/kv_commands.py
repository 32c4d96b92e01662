"""What may be asked of an engine about KV that is kept: in its own pages, and in the cache tier behind it.

Commands as in `engine/commands.py`. Those about pages run between two steps; those about the tier, which may take
milliseconds, on the thread that asks, and answer None where there is no tier. Of several replicas one is asked for the
tier's, as they share it. A deletion asks all for their pages first (`drop_pages`, `drop_tenant_pages`, `settle_saves`),
then one for the tier's chunks: nothing that a request saves meanwhile comes into the tier behind it.

Policy only: no tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mneme.cachetier.admin import (
    Administered,
    Amount,
    CacheAdmin,
    FoundChunk,
    PinName,
    PinnedPrefix,
    leading,
    num_leading_tokens,
)
from mneme.cachetier.chunk.fingerprint import ModelFingerprint
from mneme.cachetier.chunk.keys import Lineage, document_lineage, owner_of, prefix_lineage, tenant_of
from mneme.cachetier.store import ChainQuery
from mneme.errors import KvNotFound, NoCacheTier, ReplicaUnavailable
from mneme.replicas.engine.commands import AskedEngine, Command
from mneme.replicas.sequence import Sequence as RunningSequence
from mneme.replicas.sessions.session_pages import delete_pages
from mneme.replicas.sessions.sessions import SessionKey, session_key

if TYPE_CHECKING:
    from mneme.replicas.connector.connector import KvConnector
    from mneme.replicas.engine.engine import Engine

_SETTLE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class KvTier:
    """The cache tier of an engine's chunks."""

    admin: CacheAdmin
    fingerprint: ModelFingerprint
    tenant_bytes: int | None = None  # each tenant's quota in each tier of a node
    settle_saves: Callable[[float], bool] = lambda _timeout_s: True

    def chain(self, salt: str, ids: Sequence[int], lineage: Lineage | None = None) -> ChainQuery:
        """The chunks of these tokens under a tenant's salt, as a prompt begins unless another lineage is given."""
        lineage = lineage or prefix_lineage(self.fingerprint, salt)
        return ChainQuery.of(lineage, self.fingerprint.digest, ids, self.fingerprint.layout.chunk_tokens)


def kv_tier_of(chunks: KvConnector | None) -> KvTier | None:
    """The tier of an engine, if its store can be managed."""
    if chunks is None or not isinstance(chunks.store, Administered):
        return None
    return KvTier(
        admin=chunks.store.admin,
        fingerprint=chunks.fingerprint,
        tenant_bytes=chunks.config.tenant_bytes,
        settle_saves=chunks.saver.settle,
    )


@Command
def look_up_pages(asked: AskedEngine, salt: str, token_ids: tuple[int, ...]) -> Any:
    """Tokens of a sequence that the engine's device and host have; changes nothing."""
    return asked.between_steps(lambda engine: engine.forest.resident(salt, token_ids)._asdict())


@Command
def look_up_kv(asked: AskedEngine, salt: str, token_ids: tuple[int, ...]) -> Any:
    """What the tier has of a sequence, and where; changes nothing."""
    if asked.kv_tier is None:
        return None
    chain = asked.kv_tier.chain(salt, token_ids)
    return _shown_lookup(asked.kv_tier.admin.lookup(chain), chain)


@Command
def pin_kv(asked: AskedEngine, salt: str, pin_id: str, token_ids: tuple[int, ...], ttl_s: float | None) -> Any:
    """Keep what the tier has of a sequence; raises `KvNotFound`, `CachePinRefused` or `NoCacheTier`."""
    if asked.kv_tier is None:
        raise NoCacheTier
    pin = asked.kv_tier.admin.pin(PinName(owner_of(salt), pin_id), asked.kv_tier.chain(salt, token_ids), ttl_s)
    if pin is None:
        raise KvNotFound("prompt", len(token_ids), "the cache tier has nothing of it; compute it first")
    return _shown_pin(pin)


@Command
def unpin_kv(asked: AskedEngine, salt: str, pin_id: str) -> Any:
    """Whether there was such a pin."""
    return None if asked.kv_tier is None else asked.kv_tier.admin.unpin(PinName(owner_of(salt), pin_id))


@Command
def list_kv_pins(asked: AskedEngine, salt: str) -> Any:
    """A tenant's pins in the tier."""
    return None if asked.kv_tier is None else [_shown_pin(pin) for pin in asked.kv_tier.admin.pins(owner_of(salt))]


@Command
def drop_pages(asked: AskedEngine, salt: str, token_ids: tuple[int, ...], session: SessionKey | None = None) -> Any:
    """Forget a prompt's pages with all that begins with it, or what is a session's own; what is being saved settles."""

    def drop(engine: Engine) -> None:
        if session is None:
            _save_no_more(engine, lambda s: s.request.salt == salt and tuple(s.context[: len(token_ids)]) == token_ids)
            engine.forest.drop_prefix(salt, token_ids)
            return
        _save_no_more(engine, lambda sequence: session_key(sequence.request) == session)
        log = engine.sessions.get(session)
        if log is not None:
            delete_pages(engine.forest, log)

    dropped = asked.between_steps(lambda engine: _dropped_pages(engine, drop))
    _settle(asked)
    return dropped


@Command
def drop_tenant_pages(asked: AskedEngine, salt: str) -> Any:
    """Forget all pages and sessions of a tenant; a session that answers is forgotten when it has."""
    tenant = tenant_of(salt)

    def drop(engine: Engine) -> None:
        _save_no_more(engine, lambda sequence: tenant_of(sequence.request.salt) == tenant)
        engine.sessions.delete_salts(lambda other: tenant_of(other) == tenant)
        engine.forest.drop_salts(lambda other: tenant_of(other) == tenant)

    dropped = asked.between_steps(lambda engine: _dropped_pages(engine, drop))
    _settle(asked)
    return dropped


@Command
def settle_saves(asked: AskedEngine) -> Any:
    """Wait until what is being saved is in the tier."""
    _settle(asked)


@Command
def drop_kv(
    asked: AskedEngine,
    salt: str,
    token_ids: tuple[int, ...],
    *,
    spares_longer: bool = False,
    sink_ids: tuple[int, ...] | None = None,
) -> Any:
    """Delete the tier's chunks of a sequence, with all that begins with it unless `spares_longer`.

    sink_ids  the tokens are a document's, encoded behind these
    """
    tier = asked.kv_tier
    if tier is None:
        return None
    lineage = None if sink_ids is None else document_lineage(tier.fingerprint, salt, sink_ids)
    return _shown_amount(tier.admin.delete(tier.chain(salt, token_ids, lineage), spares_longer=spares_longer))


@Command
def drop_tenant_kv(asked: AskedEngine, salt: str) -> Any:
    """Delete all that a tenant has in the tier; its logs first: a session read from one would be saved again."""
    if asked.kv_tier is None:
        return None
    try:
        num_logs = 0 if asked.durable is None else asked.durable.delete_owned(owner_of(salt))
    except OSError as error:
        raise ReplicaUnavailable("the tenant's session logs could not be deleted in time") from error
    return {**_shown_amount(asked.kv_tier.admin.delete_owned(owner_of(salt))), "session_logs": num_logs}


@Command
def kv_stats(asked: AskedEngine, salt: str | None) -> Any:
    """Totals over all tenants, and the caller's own share; None: totals alone."""
    if asked.kv_tier is None:
        return None
    owner = None if salt is None else owner_of(salt)
    nodes, own = [], Counter[str]()
    for node in asked.kv_tier.admin.stats():
        owners = node.pop("owners", {})
        own.update({} if owner is None else owners.get(owner.hex(), {}))
        nodes.append(node)
    return {"nodes": nodes, "tenant": None if owner is None else _tenant(asked.kv_tier, owner, own)}


KV_COMMANDS: dict[str, Command[Any]] = {
    command.name: command
    for command in (
        look_up_pages,
        look_up_kv,
        pin_kv,
        unpin_kv,
        list_kv_pins,
        drop_pages,
        drop_tenant_pages,
        settle_saves,
        drop_kv,
        drop_tenant_kv,
        kv_stats,
    )
}


def _settle(asked: AskedEngine) -> None:
    if asked.kv_tier is not None and not asked.kv_tier.settle_saves(_SETTLE_S):
        raise ReplicaUnavailable("what is being saved takes long, and would come after the deletion; try again")


def _save_no_more(engine: Engine, is_meant: Callable[[RunningSequence], bool]) -> None:
    """What a request computes that runs meanwhile does not come into the tier behind the deletion."""
    for sequence in (*engine.scheduler.running, *engine.scheduler.waiting):
        if is_meant(sequence):
            sequence.chain = None


def _dropped_pages(engine: Engine, drop: Callable[[Engine], None]) -> dict[str, int]:
    """Pages that are free now and were not."""
    device, host = engine.forest.device, engine.forest.host
    before = len(device.free), len(host.free)
    drop(engine)
    return {"device_pages": len(device.free) - before[0], "host_pages": len(host.free) - before[1]}


def _tenant(tier: KvTier, owner: bytes, own: Mapping[str, int]) -> dict[str, Any]:
    return {
        "owner": owner.hex(),
        "host_bytes": own["host"],
        "disk_bytes": own["disk"],
        "quota_bytes": tier.tenant_bytes,  # in each tier of each node
        "pins": [_shown_pin(pin) for pin in tier.admin.pins(owner)],
    }


def _shown_lookup(found: Sequence[FoundChunk], query: ChainQuery) -> dict[str, Any]:
    """Leading tokens by where they are; one that is in several places counts in each."""
    run = leading(found, query.chunk_tokens)
    nodes: dict[str, Counter[str]] = {}
    for each in run:
        nodes.setdefault(each.node, Counter())[each.tier] += each.num_tokens
    return {
        "tokens": num_leading_tokens(run),
        **_by_kind(run),
        "nodes": [{"node": node, "host": sums["host"], "disk": sums["disk"]} for node, sums in sorted(nodes.items())],
        "chunks": [_chunk_shown(each, query) for each in run],
    }


def _by_kind(run: Sequence[FoundChunk]) -> dict[str, int]:
    """Tokens in this node's memory, on its disk, and on other nodes alone."""
    sums: dict[str, int] = {}
    near = {each.place for each in run if each.is_near}
    for tier in ("host", "disk"):
        sums[tier] = sum(each.num_tokens for each in run if each.is_near and each.tier == tier)
    far = {each.place: each.num_tokens for each in run if each.place not in near}
    return sums | {"peer": sum(far.values())}


def _chunk_shown(each: FoundChunk, query: ChainQuery) -> dict[str, Any]:
    start = each.place * query.chunk_tokens
    return {
        "start": start,
        "tokens": each.num_tokens,
        "bytes": each.num_bytes,
        "tier": each.tier,
        "node": each.node,
    }


def _shown_pin(pin: PinnedPrefix) -> dict[str, Any]:
    return {
        "id": pin.pin_id,
        "num_tokens": pin.num_tokens,
        "num_chunks": pin.amount.num_chunks,
        "num_bytes": pin.amount.num_bytes,
        "expires_in_s": pin.expires_in_s,
    }


def _shown_amount(amount: Amount) -> dict[str, int]:
    return {"chunks": amount.num_chunks, "bytes": amount.num_bytes}
