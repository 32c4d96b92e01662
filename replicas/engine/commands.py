"""What may be asked of an engine about sessions, prompts and KV that is kept, as one table of functions (`COMMANDS`).

A command is a function of an engine and its own arguments that runs on the thread that asks. It says itself what of it
runs on the engine's thread (`AskedEngine.between_steps`), and gives plain values. A call makes the `Query` that goes
over the wire: `await client.query(get_session(key))`.

Commands about the cache tier may take milliseconds, and answer None where there is no tier. Of several replicas one is
asked for the tier's, as they share it. A deletion asks all for their pages first (`delete_sequence_pages`,
`delete_tenant_pages`, `settle_saves`), then one for the tier's chunks: nothing that a request saves meanwhile comes
into the tier behind it.

Policy only: no tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Concatenate, Generic, NamedTuple, ParamSpec, Protocol, TypeVar

from mneme.cachetier.admin import (
    Administered,
    Amount,
    CacheAdmin,
    FoundChunk,
    PinnedPrefix,
    leading,
    num_leading_tokens,
)
from mneme.cachetier.chunk.fingerprint import ModelFingerprint
from mneme.cachetier.chunk.keys import prefix_lineage, session_lineage, tenant_id, tenant_of
from mneme.cachetier.pins import PinName
from mneme.cachetier.store import ChainQuery
from mneme.errors import KvNotFound, NoCacheTier, ReplicaUnavailable
from mneme.replicas.sequence import Sequence as RunningSequence
from mneme.replicas.sessions.session_pages import delete_pages, resident_of
from mneme.replicas.sessions.sessions import SessionKey, session_key

if TYPE_CHECKING:
    from mneme.replicas.connector.connector import KvConnector
    from mneme.replicas.engine.engine import Engine
    from mneme.replicas.engine.reporter import Reporter
    from mneme.replicas.sessions.journal import DurableSessions

P = ParamSpec("P")
T = TypeVar("T")

_SETTLE_S = 5.0
COMMANDS: dict[str, Command[Any]] = {}  # by name


@dataclass(frozen=True, slots=True, kw_only=True)
class KvTier:
    """The cache tier of an engine's chunks."""

    admin: CacheAdmin
    fingerprint: ModelFingerprint
    tenant_bytes: int | None = None  # each tenant's quota in each tier of a node
    settle_saves: Callable[[float], bool] = lambda _timeout_s: True

    def chain(self, salt: str, ids: Sequence[int]) -> ChainQuery:
        """The chunks of these tokens under a tenant's salt, as a prompt begins."""
        lineage = prefix_lineage(self.fingerprint, salt)
        return ChainQuery.of(lineage, self.fingerprint.digest, ids, self.fingerprint.layout.chunk_tokens)

    def of_session(self, key: SessionKey) -> ChainQuery:
        """What all begins with that is a session's alone."""
        lineage = session_lineage(self.fingerprint, *key)
        return ChainQuery.of(lineage, self.fingerprint.digest, (), self.fingerprint.layout.chunk_tokens)


def kv_tier_of(chunks: KvConnector | None) -> KvTier | None:
    """Return the tier of an engine, if its store can be managed."""
    if chunks is None or not isinstance(chunks.store, Administered):
        return None
    return KvTier(
        admin=chunks.store.admin,
        fingerprint=chunks.fingerprint,
        tenant_bytes=chunks.config.tenant_bytes,
        settle_saves=chunks.saver.settle,
    )


class AskedEngine(Protocol):
    """An engine as commands see it: `EngineLoop`."""

    durable: DurableSessions | None
    kv_tier: KvTier | None
    reporter: Reporter

    def between_steps(self, question: Callable[[Engine], T], recalled: Iterable[SessionKey] = ()) -> T:
        """Return what the question gives on the engine's thread; raises what it raises, or `ReplicaUnavailable`.

        recalled  sessions that are looked up in their durable logs before, where nothing newer is known of them
        """
        ...


class Query(NamedTuple):
    """A command and its arguments, as plain values."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Command(Generic[P]):
    """Makes a function a command: `answer` runs it, a call gives its query."""

    def __init__(self, answer: Callable[Concatenate[AskedEngine, P], Any]) -> None:
        self.answer, self.name, self.__doc__ = answer, answer.__name__, answer.__doc__
        COMMANDS[self.name] = self

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Query:
        return Query(self.name, args, kwargs)


class KvCommand(Command[P]):
    """A command about KV: it may take milliseconds, so no other may have to wait for it."""


@Command
def get_session(asked: AskedEngine, key: SessionKey, restores: bool = False) -> Any:
    """Describe a session, or None; `restores`: from its durable log, where nothing newer is known of it."""
    return asked.between_steps(lambda engine: _describe(engine, key), (key,) if restores else ())


@Command
def delete_session(asked: AskedEngine, key: SessionKey) -> Any:
    """Delete a session and its log; whether there was one. Raises `ReplicaUnavailable` if the log takes too long."""
    found = asked.between_steps(lambda engine: engine.sessions.delete(key))
    try:
        return (asked.durable is not None and asked.durable.delete(key)) or found
    except OSError as error:
        raise ReplicaUnavailable("the session's log could not be deleted in time") from error


@Command
def leave_session(asked: AskedEngine, key: SessionKey) -> Any:
    """Forget a session that goes on on another replica, with its durable log; whether there was one."""
    return asked.between_steps(lambda engine: engine.sessions.delete(key, is_elsewhere=True))


@Command
def fork_session(asked: AskedEngine, key: SessionKey, new_id: str) -> Any:
    """Fork a session and describe the new one, whose id is namespaced as all are here. Raises `SessionNotFound`."""
    new_key = (key[0], new_id)

    def fork(engine: Engine) -> Any:
        engine.fork(key, new_key)
        return _describe(engine, new_key)

    return asked.between_steps(fork, (key, new_key))


@Command
def note_session(asked: AskedEngine, key: SessionKey, note: bytes) -> Any:
    """Keep an API's bytes with an idle session, and wait until its log has them; whether there is such a session."""
    noted = asked.between_steps(lambda engine: engine.sessions.note(key, note))
    if noted and asked.durable is not None:
        asked.durable.writer.flush(_SETTLE_S)  # what cannot be written is a counter, as with turns
    return noted


@Command
def session_note(asked: AskedEngine, key: SessionKey) -> Any:
    """Return what an API keeps with a session, empty if nothing; None: there is no such session."""
    return asked.between_steps(lambda engine: None if (log := engine.sessions.get(key)) is None else log.note)


@Command
def session_tokens(asked: AskedEngine, key: SessionKey, *, visible: bool) -> Any:
    """List a session's token ids, or None: `visible` those that its next turn would look for, else all."""

    def tokens(engine: Engine) -> Any:
        log = engine.sessions.get(key)
        if log is None:
            return None
        return tuple(log.seen.ids if visible and log.seen is not None else log.ids)

    return asked.between_steps(tokens)


@Command
def report_all(asked: AskedEngine) -> Any:
    """Return a `ReplicaReport` of all that is there, for who has missed some."""
    return asked.between_steps(lambda _: asked.reporter.snapshot())


@Command
def explain_prompt(asked: AskedEngine, salt: str, http_id: str) -> Any:
    """Say where a request's KV came from, for each choice; an empty list if it is not remembered."""
    return asked.between_steps(lambda engine: engine.explanations.of(salt, http_id))


@Command
def warm_prompt(
    asked: AskedEngine, name: PinName, salt: str, token_ids: tuple[int, ...], *, ttl_s: float | None, pin: bool
) -> Any:
    """Begin to compute a prompt, to be pinned then (`pin`); answers as `get_pin` does."""

    def warm(engine: Engine) -> Any:
        engine.pins.warm(name, salt, token_ids, ttl_s=ttl_s, keeps=pin)
        return engine.pins.describe(name)

    return asked.between_steps(warm)


@Command
def get_pin(asked: AskedEngine, name: PinName) -> Any:
    """Say how far a prompt is that is warmed or pinned, or None."""
    return asked.between_steps(lambda engine: engine.pins.describe(name))


@Command
def list_pins(asked: AskedEngine, tenant: bytes) -> Any:
    """List what a tenant has pinned, or is about to have."""
    return asked.between_steps(lambda engine: engine.pins.of_tenant(tenant))


@Command
def delete_pin(asked: AskedEngine, name: PinName) -> Any:
    """Unpin; whether there was such a pin."""
    return asked.between_steps(lambda engine: engine.pins.unpin(name))


@KvCommand
def look_up_pages(asked: AskedEngine, salt: str, token_ids: tuple[int, ...]) -> Any:
    """Count the tokens of a sequence that the engine's device and host have; changes nothing."""
    return asked.between_steps(lambda engine: engine.forest.resident(salt, token_ids)._asdict())


@KvCommand
def look_up_kv(asked: AskedEngine, salt: str, token_ids: tuple[int, ...]) -> Any:
    """Say what the tier has of a sequence, and where; changes nothing."""
    if asked.kv_tier is None:
        return None
    chain = asked.kv_tier.chain(salt, token_ids)
    return _shown_lookup(asked.kv_tier.admin.lookup(chain), chain)


@KvCommand
def pin_kv(asked: AskedEngine, name: PinName, salt: str, token_ids: tuple[int, ...], ttl_s: float | None) -> Any:
    """Keep what the tier has of a sequence; raises `KvNotFound`, `CachePinRefused` or `NoCacheTier`."""
    if asked.kv_tier is None:
        raise NoCacheTier
    pin = asked.kv_tier.admin.pin(name, asked.kv_tier.chain(salt, token_ids), ttl_s)
    if pin is None:
        raise KvNotFound("prompt", len(token_ids), "the cache tier has nothing of it; compute it first")
    return _shown_pin(pin)


@KvCommand
def unpin_kv(asked: AskedEngine, name: PinName) -> Any:
    """Unpin in the tier; whether there was such a pin."""
    return None if asked.kv_tier is None else asked.kv_tier.admin.unpin(name)


@KvCommand
def list_kv_pins(asked: AskedEngine, tenant: bytes) -> Any:
    """List a tenant's pins in the tier."""
    return None if asked.kv_tier is None else [_shown_pin(pin) for pin in asked.kv_tier.admin.pins(tenant)]


@KvCommand
def delete_sequence_pages(
    asked: AskedEngine, salt: str, token_ids: tuple[int, ...], session: SessionKey | None = None
) -> Any:
    """Delete a prompt's pages with all that begins with it, or what is a session's own; what is being saved settles."""

    def delete(engine: Engine) -> None:
        if session is None:
            _save_no_more(engine, lambda s: s.request.salt == salt and tuple(s.context[: len(token_ids)]) == token_ids)
            engine.forest.drop_prefix(salt, token_ids)
            return
        _save_no_more(engine, lambda sequence: session_key(sequence.request) == session)
        log = engine.sessions.get(session)
        if log is not None:
            delete_pages(engine.forest, log)

    deleted = asked.between_steps(lambda engine: _deleted_pages(engine, delete))
    _settle(asked)
    return deleted


@KvCommand
def delete_tenant_pages(asked: AskedEngine, salt: str) -> Any:
    """Delete all pages and sessions of a tenant; a session that answers is deleted when it has."""
    tenant = tenant_of(salt)

    def delete(engine: Engine) -> None:
        _save_no_more(engine, lambda sequence: tenant_of(sequence.request.salt) == tenant)
        engine.sessions.delete_salts(lambda other: tenant_of(other) == tenant)
        engine.forest.drop_salts(lambda other: tenant_of(other) == tenant)

    deleted = asked.between_steps(lambda engine: _deleted_pages(engine, delete))
    _settle(asked)
    return deleted


@KvCommand
def settle_saves(asked: AskedEngine) -> Any:
    """Wait until what is being saved is in the tier."""
    _settle(asked)


@KvCommand
def delete_kv(
    asked: AskedEngine,
    salt: str,
    token_ids: tuple[int, ...],
    session: SessionKey | None = None,
) -> Any:
    """Delete the tier's chunks of a sequence, with all that begins with it; of a session, what is its alone."""
    tier = asked.kv_tier
    if tier is None:
        return None
    removed = tier.admin.delete(tier.chain(salt, token_ids), spares_longer=session is not None)
    if session is not None:
        removed = removed.plus(tier.admin.delete(tier.of_session(session), spares_longer=False))
    return _shown_amount(removed)


@KvCommand
def delete_tenant_kv(asked: AskedEngine, salt: str) -> Any:
    """Delete all that a tenant has in the tier; its logs first: a session read from one would be saved again."""
    if asked.kv_tier is None:
        return None
    try:
        num_logs = 0 if asked.durable is None else asked.durable.delete_tenant(tenant_id(salt))
    except OSError as error:
        raise ReplicaUnavailable("the tenant's session logs could not be deleted in time") from error
    return {**_shown_amount(asked.kv_tier.admin.delete_tenant(tenant_id(salt))), "session_logs": num_logs}


@KvCommand
def kv_stats(asked: AskedEngine, salt: str | None) -> Any:
    """Sum up all tenants, and the caller's own share; without a salt, totals alone."""
    if asked.kv_tier is None:
        return None
    tenant = None if salt is None else tenant_id(salt)
    nodes, own = [], Counter[str]()
    for node in asked.kv_tier.admin.stats():
        tenants = node.pop("owners", {})
        own.update({} if tenant is None else tenants.get(tenant.hex(), {}))
        nodes.append(node)
    return {"nodes": nodes, "tenant": None if tenant is None else _tenant(asked.kv_tier, tenant, own)}


def _describe(engine: Engine, key: SessionKey) -> dict[str, Any] | None:
    sessions = engine.sessions
    log = sessions.get(key)
    if log is None:
        return None
    running = engine.turn_so_far(key)
    ids, seen = (log.ids, log.seen) if running is None else (running[0].ids, running[0].seen)
    num_seen = len(ids) if seen is None else len(seen.ids)
    resident = resident_of(engine.forest, key[0], ids, seen)
    absent = num_seen - resident.device - resident.host  # from this replica: `look_up_kv` asks the cache tier
    hits = [{"prompt_tokens": prompt, "cached_tokens": cached} for prompt, cached in log.hit_history()]
    return {
        "version": log.version,
        "tokens": len(ids),
        "truncated": len(ids) - num_seen,
        "turns": log.num_turns,
        "answering": log.running is not None,
        "queued": 0 if log.running is None else len(log.running.queue),
        "idle_s": sessions.idle_s(log),
        "expires_in_s": sessions.expires_in_s(log),
        "kv": {**resident._asdict(), "absent": absent},
        "hit_history": hits,
    }


def _settle(asked: AskedEngine) -> None:
    if asked.kv_tier is not None and not asked.kv_tier.settle_saves(_SETTLE_S):
        raise ReplicaUnavailable("what is being saved takes long, and would come after the deletion; try again")


def _save_no_more(engine: Engine, is_meant: Callable[[RunningSequence], bool]) -> None:
    """Keep out of the tier what running requests compute: it would come there after the deletion."""
    for sequence in (*engine.scheduler.running, *engine.scheduler.waiting, *engine.scheduler.gathering):
        if is_meant(sequence):
            sequence.chain = None


def _deleted_pages(engine: Engine, delete: Callable[[Engine], None]) -> dict[str, int]:
    """Count the pages that `delete` frees."""
    device, host = engine.forest.device, engine.forest.host
    before = len(device.free), len(host.free)
    delete(engine)
    return {"device_pages": len(device.free) - before[0], "host_pages": len(host.free) - before[1]}


def _tenant(tier: KvTier, tenant: bytes, own: Mapping[str, int]) -> dict[str, Any]:
    return {
        "owner": tenant.hex(),
        "host_bytes": own["host"],
        "disk_bytes": own["disk"],
        "quota_bytes": tier.tenant_bytes,  # in each tier of each node
        "pins": [_shown_pin(pin) for pin in tier.admin.pins(tenant)],
    }


def _shown_lookup(found: Sequence[FoundChunk], query: ChainQuery) -> dict[str, Any]:
    """Count leading tokens by where they are; one that is in several places counts in each."""
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
    """Count tokens in this node's memory, on its disk, and on other nodes alone."""
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
