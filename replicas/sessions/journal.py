"""An engine's sessions in their durable logs: what is written of them, and what is read before a turn begins.

Nothing here runs on the engine's thread but what `SessionLogWriter` leaves there. A turn's session is looked up before
the engine takes the turn; a log that cannot be read in time is not waited for (Pensieve 4.3).
"""

from __future__ import annotations

import logging
import threading
import time
from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import Any, NamedTuple, TypeVar

from mneme.cachetier.chunk.keys import tenant_id
from mneme.cachetier.config import CacheConfig
from mneme.cachetier.sessions.record import (
    RecordKind,
    SessionState,
    began,
    common_prefix,
    ended,
    next_version,
    replayed,
    taken_over,
    whole,
)
from mneme.cachetier.sessions.store import Appended, SessionLogStore, log_key
from mneme.primitives import Workers
from mneme.replicas.config import EngineConfig
from mneme.replicas.request import GenerationRequest
from mneme.replicas.sessions.sessions import Ids, SessionKey, Sessions, session_key
from mneme.replicas.sessions.token_log import FinishedTurn, RunningTurn, TokenLog, is_usable, root_turn

logger = logging.getLogger(__name__)

READ_S = 0.2  # how long a turn waits for its session's log, at most
DELETE_S = 5.0
_NUM_READERS = 4
_BURST_S = 0.005  # of several turns at once: so much longer for each

MAX_CHANGES = 4096  # that wait to be written; of more the oldest are dropped, but no deletions
MAX_LATER = 1024  # sessions whose last change could not be written; of more the oldest are lost, but no deletions
RETRY_S, _MAX_RETRY_S = 1.0, 16.0  # pause after what failed, doubled while everything does
_STOP_S = 5.0

_T = TypeVar("_T")
OpenSessionLogs = Callable[[CacheConfig, float], SessionLogStore | None]  # the second: sessions' time to live, seconds


def open_durable_sessions(
    config: EngineConfig, cache: CacheConfig, weights: str, vocab_size: int, open_logs: OpenSessionLogs
) -> DurableSessions | None:
    """Open the durable logs; None where there are none. `weights`: a digest; their ids are taken for no other's."""
    store = open_logs(cache, config.session_ttl_s) if config.max_sessions else None
    return None if store is None else DurableSessions(store, weights.encode(), vocab_size)


class Recalled(NamedTuple):
    """Says what the durable log of a session has."""

    key: SessionKey
    state: SessionState | None  # as it was written; None: it could not be read in time
    version: int = 0  # with which the session goes on here


def take_over(sessions: Sessions, recalled: Iterable[Recalled]) -> frozenset[SessionKey]:
    """Called on the engine's thread; returns sessions of which nothing is known, and whose logs could not be read."""
    unread: list[SessionKey] = []
    for key, state, version in recalled:
        if state is not None:
            sessions.restore(key, state, version)
        elif sessions.get(key) is None:
            unread.append(key)
    return frozenset(unread)


class DurableSessions:
    """Thread-safe. `model` says whose token ids they are (`log_key`)."""

    def __init__(
        self,
        store: SessionLogStore,
        model: bytes,
        vocab_size: int,
        *,
        read_s: float = READ_S,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._store, self._model, self._vocab_size = store, model, vocab_size
        self._read_s, self._wall_clock = read_s, wall_clock
        self.writer = SessionLogWriter(store, model, wall_clock=wall_clock)
        self._readers = _LogReaders()
        self._counters: Counter[str] = Counter()
        self._lock = threading.Lock()

    def recall(self, keys: Iterable[SessionKey], version_of: Callable[[SessionKey], int]) -> list[Recalled]:
        """The sessions whose logs are newer than the versions that are known, and those whose logs cannot be read."""
        versions = {key: version_of(key) for key in keys}
        ends_s = time.monotonic() + self._read_s + _BURST_S * (len(versions) - 1)
        reads = [(key, self._readers.begin(partial(self._read, key, version))) for key, version in versions.items()]
        return [recalled for key, read in reads if (recalled := self._finish_read(key, read, ends_s))]

    def restore(self, sessions: Sessions, requests: Iterable[GenerationRequest]) -> None:
        """For who calls an engine from one thread: its requests' sessions, before it takes the requests."""
        keys = [key for request in requests if (key := session_key(request)) is not None]
        take_over(sessions, self.recall(keys, sessions.version_of))

    def delete(self, key: SessionKey) -> bool:
        """Whether there was a durable log; there is none now, nor what was still to be written of it.

        Raises OSError if that is not sure.
        """
        if not self.writer.settle(lambda each: each == key, DELETE_S):
            raise TimeoutError("session logs are not written in time")
        return self._store.delete(log_key(self._model, *key))

    def delete_tenant(self, tenant: bytes) -> int:
        """Delete all that a tenant has, see `SessionLogStore.delete_tenant`. Raises OSError if that is not sure."""
        if not self.writer.settle(lambda each: tenant_id(each[0]) == tenant, DELETE_S):
            raise TimeoutError("session logs are not written in time")
        return self._store.delete_tenant(tenant)

    def stats(self) -> dict[str, Any]:
        with self._lock:
            counters = dict(self._counters)
        return {"write": self.writer.stats(), "read": counters}

    def close(self) -> None:
        """Write what is left, within a bounded time, and close the store."""
        self.writer.close()
        self._readers.close()
        self._store.close()

    def _finish_read(self, key: SessionKey, read: Future[SessionState | None] | None, ends_s: float) -> Recalled | None:
        try:
            if read is None:
                raise TimeoutError
            state = self._readers.result(read, ends_s)
        except (OSError, CancelledError):  # a timeout too
            return self._failed(key)
        except Exception:  # the store's edge: whatever it is, the turn goes on without
            logger.exception("a session's log could not be read")
            return self._failed(key)
        return None if state is None else Recalled(key, state, taken_over(state.version, self._wall_clock()))

    def _failed(self, key: SessionKey) -> Recalled:
        with self._lock:
            self._counters["failed"] += 1
        return Recalled(key, None)

    def _read(self, key: SessionKey, version: int) -> SessionState | None:
        replay = replayed(self._store.read(log_key(self._model, *key), version) or ())
        if replay is None:
            return None
        state = replay.state()
        is_sound = is_usable(state, self._vocab_size)
        with self._lock:
            self._counters["restored" if is_sound else "unusable"] += 1
        return state if is_sound else SessionState(version=state.version)  # as if it were deleted


class _Change(NamedTuple):
    kind: RecordKind
    key: SessionKey
    state: SessionState  # behind it
    before: SessionState
    prompt: list[int] | None = None  # BEGAN; it may have grown since
    num_prompt: int | None = None  # of `prompt`; or, ENDED: of the ids that the record before this one was about


class SessionLogWriter:
    """Hears of all that happens to sessions, in order, but not of what is forgotten for want of room or time.

    The engine's thread leaves references and goes on: it is neither blocked nor raised to; ids are compared, packed and
    written by the writer's. A turn's prompt is written when it begins and the rest when it ends; whoever tells a client
    that it has ended asks `after` first. What cannot be written now is tried again while nothing else is to be written,
    until something newer of its session is: what does not fit the log then is written anew as a whole.

    `model` says whose token ids they are (`log_key`).
    """

    def __init__(self, store: SessionLogStore, model: bytes, *, wall_clock: Callable[[], float] = time.time) -> None:
        self._store, self._model, self._wall_clock = store, model, wall_clock
        self._condition = threading.Condition()
        self._num_left = 0
        self._changes: deque[tuple[int, _Change]] = deque()  # numbered as they were left; 0: tried before
        self._writing: int | None = None  # the number of what the thread writes
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()  # called once all up to this number are done
        self._later: OrderedDict[SessionKey, _Change] = OrderedDict()  # what failed, the last of each session
        self._retry_at_s, self._pause_s = 0.0, RETRY_S
        self._counters: Counter[str] = Counter()
        self._is_stopping, self._is_idle = False, False
        self._thread = threading.Thread(target=self._run, name="session-logs", daemon=True)
        self._thread.start()

    def began(self, key: SessionKey, log: TokenLog, running: RunningTurn, request: GenerationRequest, ids: Ids) -> None:
        """Note that a request's turn runs these ids; the list may grow from now on.

        The record stands behind what is known of the log only: what others wrote since then stays.
        """
        before, now_s = log.state(), self._wall_clock()
        running.least_version = 0 if request.append else taken_over(log.version, now_s)
        log.version = running.prompt_version = next_version(log.version, now_s)
        state = before._replace(version=log.version, num_base=running.num_base, last_turn=root_turn(request))
        self._leave(_Change(RecordKind.BEGAN, key, state, before, ids, len(ids)))

    def ended(self, key: SessionKey, log: TokenLog, before: SessionState, turn: FinishedTurn) -> None:
        """Note that a turn is part of the log, which was `before` until now.

        What brought all that was said stands also where the log could not be read.
        """
        running = log.running
        assert running is not None, "a turn ends while it runs"
        num_prompt = turn.num_prompt if running.prompt_version == log.version else None
        log.version = next_version(max(log.version, running.least_version), self._wall_clock())
        self._leave(_Change(RecordKind.ENDED, key, log.state(), before, None, num_prompt))

    def deleted(self, key: SessionKey, log: TokenLog) -> None:
        """Keep nothing of the session anywhere."""
        log.version = taken_over(log.version, self._wall_clock())
        state = SessionState(version=log.version)
        self._leave(_Change(RecordKind.DELETED, key, state, state))

    def forked(self, key: SessionKey, log: TokenLog) -> None:
        """Note a session that is there at once, with a past."""
        log.version = taken_over(log.version, self._wall_clock())
        state = log.state()
        self._leave(_Change(RecordKind.WHOLE, key, state, state))

    def after(self, call: Callable[[], None]) -> bool:
        """Whether all that happened until now is written, or failed; if not, another thread calls `call` then."""
        with self._condition:
            if self._is_done(self._num_left) or self._is_stopping:
                return True
            self._waiting.append((self._num_left, call))
            return False

    def flush(self, timeout_s: float) -> bool:
        """Wait until all that happened until now is written, or has failed; False if that takes longer."""
        done = threading.Event()
        return self.after(done.set) or done.wait(timeout_s)

    def settle(self, is_meant: Callable[[SessionKey], bool], timeout_s: float) -> bool:
        """`flush`, and what failed of these sessions is not tried again, but for deletions."""
        self._forget(is_meant)
        if not self.flush(timeout_s):
            return False
        self._forget(is_meant)  # what failed meanwhile
        return True

    def stats(self) -> dict[str, Any]:
        with self._condition:
            num_waiting = len(self._changes) + (self._writing is not None)
            return {"waiting": num_waiting, "later": len(self._later), **self._counters}

    def close(self) -> None:
        """Write what is left, and what failed, within a bounded time."""
        with self._condition:
            self._changes.extendleft((0, change) for change in reversed(self._later.values()))
            self._later.clear()
            self._condition.notify()
        self.flush(_STOP_S)
        with self._condition:
            self._is_stopping = True
            self._condition.notify()
        self._thread.join(_STOP_S)
        self._call_waiting(everything=True)

    def _leave(self, change: _Change) -> None:
        with self._condition:
            self._num_left += 1
            self._changes.append((self._num_left, change))
            if len(self._changes) > MAX_CHANGES:
                self._drop_one()
            if self._is_idle:
                self._condition.notify()

    def _drop_one(self) -> None:
        """Drop the oldest that is no deletion: without those, sessions come back. Small as they are, all may wait."""
        index = next((i for i, (_, each) in enumerate(self._changes) if each.kind is not RecordKind.DELETED), None)
        if index is None:
            return
        self._try_later(self._changes[index][1])
        del self._changes[index]
        self._counters["dropped"] += 1

    def _try_later(self, change: _Change) -> None:
        if self._forget_older(change):
            self._later[change.key] = change
        self._retry_at_s = time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, _MAX_RETRY_S)
        if len(self._later) > MAX_LATER:
            lost = next((key for key, each in self._later.items() if each.kind is not RecordKind.DELETED), None)
            if lost is not None:
                del self._later[lost]
                self._counters["lost"] += 1

    def _forget_older(self, change: _Change) -> bool:
        """False: what is to be tried again of its session is newer."""
        later = self._later.get(change.key)
        if later is not None and later.state.version > change.state.version:
            return False
        self._later.pop(change.key, None)
        return True

    def _forget(self, is_meant: Callable[[SessionKey], bool]) -> None:
        with self._condition:
            for key in [key for key, change in self._later.items() if is_meant(key)]:
                if self._later[key].kind is not RecordKind.DELETED:
                    del self._later[key]

    def _run(self) -> None:
        while (change := self._next()) is not None:
            outcome = self._outcome(change)
            with self._condition:
                self._counters[outcome] += 1
                self._writing = None
                if outcome == Appended.FAILED.value:
                    self._try_later(change)
                else:
                    self._forget_older(change)
                    self._pause_s = RETRY_S
            self._call_waiting()

    def _next(self) -> _Change | None:
        with self._condition:
            while not self._changes and not self._is_stopping:
                pause_s = self._retry_at_s - time.monotonic() if self._later else None
                if pause_s is not None and pause_s <= 0:
                    self._writing = 0
                    return self._later.popitem(last=False)[1]
                self._is_idle = True
                self._condition.wait(pause_s)
                self._is_idle = False
            if not self._changes:
                return None
            self._writing, change = self._changes.popleft()
            return change

    def _is_done(self, number: int) -> bool:
        """Whether all that was left until then is written; called with the lock held."""
        is_written = self._writing is None or self._writing > number
        return is_written and (not self._changes or self._changes[0][0] > number)

    def _call_waiting(self, *, everything: bool = False) -> None:
        with self._condition:
            due = []
            while self._waiting and (everything or self._is_done(self._waiting[0][0])):
                due.append(self._waiting.popleft()[1])
        for call in due:
            try:
                call()
            except Exception:  # who waits must not harm those who wait behind
                logger.exception("who waited for a session's log failed")

    def _outcome(self, change: _Change) -> str:
        try:
            return self._write(change)
        except OSError as error:
            logger.warning("a session's log could not be written: %s", type(error).__name__)
        except Exception:  # the thread must outlive any record; it would raise again
            logger.exception("a session's log could not be written")
            return "raised"
        return Appended.FAILED.value

    def _write(self, change: _Change) -> str:
        """Write a change; returns what became of it, as a counter's name."""
        key = log_key(self._model, *change.key)
        if change.kind is RecordKind.DELETED:
            self._store.delete(key, change.state.version)
            return "deleted"
        outcome = Appended.NEEDS_WHOLE
        if change.kind is not RecordKind.WHOLE:
            outcome = self._store.append(key, [_record(change)])
        if outcome is Appended.NEEDS_WHOLE:
            outcome = self._store.append(key, _all_records(change))
        return outcome.value


def _record(change: _Change) -> bytes:
    """Make the record that leads from the state before."""
    if change.prompt is None:
        return ended(change.before, change.state, change.num_prompt)
    prompt = array("i", change.prompt[: change.num_prompt])
    start = common_prefix(change.state.ids, prompt)
    return began(change.state, change.before.version, start, prompt[start:])


def _all_records(change: _Change) -> list[bytes]:
    """Make records that lead from nothing."""
    if change.prompt is None:
        return [whole(change.state)]
    before = change.before._replace(version=change.state.version - 1)
    return [whole(before), _record(change._replace(before=before))]


class _LogReaders:
    """Reads a few logs at a time, none for longer than somebody waits for it. Thread-safe.

    A read that hangs keeps its thread, not the process.
    """

    def __init__(self) -> None:
        self._workers = Workers("session-log-reader", _NUM_READERS)
        self._late: set[Future[Any]] = set()  # that run though nobody waits any more
        self._is_closed = False
        self._lock = threading.Lock()

    def begin(self, read: Callable[[], _T]) -> Future[_T] | None:
        """None: it would not be read, as each thread hangs in another read, or all is closed."""
        with self._lock:
            if self._is_closed or len(self._late) >= _NUM_READERS:
                return None
        begun: Future[_T] = Future()
        self._workers.run(lambda: self._run(begun, read))
        return begun

    def result(self, begun: Future[_T], until_s: float) -> _T:
        """By that time of `time.monotonic`; raises what the read did, `TimeoutError` or `CancelledError`."""
        try:
            return begun.result(max(until_s - time.monotonic(), 0.0))
        except TimeoutError:
            self._give_up(begun)
            raise

    def close(self) -> None:
        """Cancel what is not begun; what runs is not waited for."""
        with self._lock:
            self._is_closed = True
        self._workers.close(0.0)

    def _run(self, begun: Future[_T], read: Callable[[], _T]) -> None:
        if self._is_closed:
            begun.cancel()
        if not begun.set_running_or_notify_cancel():
            return
        try:
            begun.set_result(read())
        except BaseException as error:  # whoever waits has it
            begun.set_exception(error)
        with self._lock:
            self._late.discard(begun)

    def _give_up(self, begun: Future[_T]) -> None:
        """Give up a read that is never begun, or hangs."""
        with self._lock:
            if not begun.cancel() and not begun.done():
                self._late.add(begun)
