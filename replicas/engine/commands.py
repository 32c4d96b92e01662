"""What may be asked of an engine about its sessions and prompts, as one table of functions (`COMMANDS`).

A command is a function of an engine and its own arguments that runs on the thread that asks. It says itself what of it
runs on the engine's thread (`AskedEngine.between_steps`), and gives plain values. A call makes the `Query` that goes
over the wire: `await client.query(get_session(key))`. `engine/kv_commands.py` has those about KV that is kept.

Policy only: no tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Concatenate, Generic, NamedTuple, ParamSpec, Protocol, TypeVar

from mneme.errors import ReplicaUnavailable
from mneme.replicas.engine.pins import PinKey
from mneme.replicas.sessions.session_pages import resident_of
from mneme.replicas.sessions.sessions import SessionKey

if TYPE_CHECKING:
    from mneme.replicas.engine.engine import Engine
    from mneme.replicas.engine.kv_commands import KvTier
    from mneme.replicas.sessions.journal import DurableSessions

P = ParamSpec("P")
T = TypeVar("T")


class AskedEngine(Protocol):
    """An engine as commands see it: `EngineLoop`."""

    durable: DurableSessions | None
    kv_tier: KvTier | None

    def between_steps(self, question: Callable[[Engine], T], recalled: Iterable[SessionKey] = ()) -> T:
        """What the question gives on the engine's thread; raises what it raises, or `ReplicaUnavailable`.

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

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Query:
        return Query(self.name, args, kwargs)


@Command
def get_session(asked: AskedEngine, key: SessionKey, restores: bool = False) -> Any:
    """What is known of a session, or None; `restores`: from its durable log, where nothing newer is known of it."""
    return asked.between_steps(lambda engine: _describe(engine, key), (key,) if restores else ())


@Command
def delete_session(asked: AskedEngine, key: SessionKey) -> Any:
    """Whether there was one, here or in a durable log; raises `ReplicaUnavailable` if the log takes too long."""
    found = asked.between_steps(lambda engine: engine.sessions.delete(key))
    try:
        return (asked.durable is not None and asked.durable.delete(key)) or found
    except OSError as error:
        raise ReplicaUnavailable("the session's log could not be deleted in time") from error


@Command
def leave_session(asked: AskedEngine, key: SessionKey) -> Any:
    """Whether there was one; it goes on on another replica, with its durable log."""
    return asked.between_steps(lambda engine: engine.sessions.delete(key, is_elsewhere=True))


@Command
def fork_session(asked: AskedEngine, key: SessionKey, new_id: str) -> Any:
    """What is known of the new session; `new_id` is namespaced, like all session ids here. Raises `SessionNotFound`."""
    new_key = (key[0], new_id)

    def fork(engine: Engine) -> Any:
        engine.fork(key, new_key)
        return _describe(engine, new_key)

    return asked.between_steps(fork, (key, new_key))


@Command
def session_tokens(asked: AskedEngine, key: SessionKey, *, visible: bool) -> Any:
    """Token ids of a session, or None: `visible` what its next turn would look for, else all that was said."""

    def tokens(engine: Engine) -> Any:
        log = engine.sessions.get(key)
        if log is None:
            return None
        return tuple(log.seen.ids if visible and log.seen is not None else log.ids)

    return asked.between_steps(tokens)


@Command
def explain_prompt(asked: AskedEngine, salt: str, http_id: str) -> Any:
    """A list of explanations, empty if the request is not remembered."""
    return asked.between_steps(lambda engine: engine.explanations.of(salt, http_id))


@Command
def warm_prompt(
    asked: AskedEngine, key: PinKey, salt: str, token_ids: tuple[int, ...], *, ttl_s: float | None, pin: bool
) -> Any:
    """Begin to compute a prompt, to be pinned then (`pin`); answers as `get_pin` does."""

    def warm(engine: Engine) -> Any:
        engine.pins.warm(key, salt, token_ids, ttl_s=ttl_s, keeps=pin)
        return engine.pins.describe(key)

    return asked.between_steps(warm)


@Command
def get_pin(asked: AskedEngine, key: PinKey) -> Any:
    """How far a prompt is that is warmed or pinned, or None."""
    return asked.between_steps(lambda engine: engine.pins.describe(key))


@Command
def list_pins(asked: AskedEngine, tenant: str) -> Any:
    """What a tenant has pinned, or is about to have."""
    return asked.between_steps(lambda engine: engine.pins.of_tenant(tenant))


@Command
def drop_pin(asked: AskedEngine, key: PinKey) -> Any:
    """Whether there was one."""
    return asked.between_steps(lambda engine: engine.pins.drop(key))


COMMANDS: dict[str, Command[Any]] = {
    command.name: command
    for command in (
        get_session,
        delete_session,
        leave_session,
        fork_session,
        session_tokens,
        explain_prompt,
        warm_prompt,
        get_pin,
        list_pins,
        drop_pin,
    )
}


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
