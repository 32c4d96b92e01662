"""An engine's sessions in their durable logs: what is written of them, and what is read before a turn begins.

Nothing here runs on the engine's thread but what `SessionLogWriter` leaves there. A turn's session is looked up before
the engine takes the turn; a log that cannot be read in time is not waited for (Pensieve 4.3).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, TypeVar

from mneme.cachetier.config import CacheConfig
from mneme.cachetier.names import Appended, tenant_id
from mneme.cachetier.session_log.log_store import LogKey, SessionLogStore, log_key
from mneme.cachetier.session_log.rows import SessionState, next_version, rows_of, taken_over
from mneme.primitives import Workers
from mneme.replicas.config import EngineConfig
from mneme.replicas.request import GenerationRequest, SessionKey
from mneme.replicas.sessions.token_log import RecalledSession, RunningTurn, TokenLog, is_usable, root_turn

logger = logging.getLogger(__name__)

READ_S = 0.2  # how long a turn waits for its session's log, at most
DELETE_S = 5.0
_NUM_READERS = 4
_BURST_S = 0.005  # of several turns at once: so much longer for each

MAX_UNWRITTEN = 4096  # sessions that wait to be written; of more the oldest are lost, but no deletions
RETRY_S = 1.0  # pause after what failed
_STOP_S = 5.0

_T = TypeVar("_T")
OpenSessionLogs = Callable[[CacheConfig, float], SessionLogStore | None]  # the second: sessions' time to live, seconds


def open_durable_sessions(
    config: EngineConfig, cache: CacheConfig, weights: str, vocab_size: int, open_logs: OpenSessionLogs
) -> DurableSessions | None:
    """Open the durable logs; None where there are none. `weights`: a digest; their ids are taken for no other's."""
    store = open_logs(cache, config.session_ttl_s) if config.max_sessions else None
    return None if store is None else DurableSessions(store, weights.encode(), vocab_size)


class DurableSessions:
    """Keeps sessions in durable logs; thread-safe. `model` says whose token ids they are (`log_key`)."""

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

    def recall(
        self, keys: Iterable[SessionKey | None], version_of: Callable[[SessionKey], int]
    ) -> list[RecalledSession]:
        """The sessions whose logs are newer than the versions that are known, and those whose logs cannot be read.

        None is a request's that has no session.
        """
        versions = {key: version_of(key) for key in keys if key is not None}
        ends_s = time.monotonic() + self._read_s + _BURST_S * (len(versions) - 1)
        reads = [(key, self._readers.begin(partial(self._read, key, version))) for key, version in versions.items()]
        return [recalled for key, read in reads if (recalled := self._finish_read(key, read, ends_s))]

    def delete(self, key: SessionKey) -> bool:
        """Return whether there was a durable log; there is none now, nor what was still to be written of it.

        Raises OSError if that is not sure.
        """
        if not self.writer.flush_for(lambda each: each == key, DELETE_S):
            raise TimeoutError("session logs are not written in time")
        return self._store.delete(log_key(self._model, *key))

    def delete_tenant(self, tenant: bytes) -> int:
        """Delete all that a tenant has, see `SessionLogStore.delete_tenant`. Raises OSError if that is not sure."""
        if not self.writer.flush_for(lambda each: tenant_id(each[0]) == tenant, DELETE_S):
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

    def _finish_read(
        self, key: SessionKey, read: Future[SessionState | None] | None, ends_s: float
    ) -> RecalledSession | None:
        try:
            if read is None:
                raise TimeoutError
            state = self._readers.result(read, ends_s)
        except (OSError, CancelledError):  # a timeout too
            return self._failed(key)
        except Exception:  # the store's edge: whatever it is, the turn goes on without
            logger.exception("a session's log could not be read")
            return self._failed(key)
        return None if state is None else RecalledSession(key, state, taken_over(state.version, self._wall_clock()))

    def _failed(self, key: SessionKey) -> RecalledSession:
        with self._lock:
            self._counters["failed"] += 1
        return RecalledSession(key, None)

    def _read(self, key: SessionKey, version: int) -> SessionState | None:
        rows = self._store.read(log_key(self._model, *key), version)
        if rows is None:
            return None
        state = rows.state()
        is_sound = is_usable(state, self._vocab_size)
        with self._lock:
            self._counters["restored" if is_sound else "unusable"] += 1
        return state if is_sound else SessionState(version=state.version)  # as if it were deleted


@dataclass(slots=True)
class _Unwritten:
    """Holds what is still to be written of a session: its deletion, and then what it is now."""

    number: int  # of the first change since it was written
    deletion: int | None  # the version that deletes
    before: SessionState | None  # what the log has, as far as is known; None: all of `state` is written anew
    state: SessionState | None


class SessionLogWriter:
    """Hears of all that happens to sessions, in order, but not of what is forgotten for want of room or time.

    The engine's thread leaves references and goes on: it is neither blocked nor raised to; ids are compared and written
    by the writer's. A session that changes again before it was written is written once, as it is then. Whoever tells a
    client that a turn has ended asks `after` first. What could not be written is tried again while nothing else is to
    be; what does not fit the log any more is written anew as a whole.

    `model` says whose token ids they are (`log_key`).
    """

    def __init__(self, store: SessionLogStore, model: bytes, *, wall_clock: Callable[[], float] = time.time) -> None:
        self._store, self._model, self._wall_clock = store, model, wall_clock
        self._condition = threading.Condition()
        self._num_changes = 0
        self._waiting: dict[SessionKey, _Unwritten] = {}  # in the order of their numbers
        self._failed: dict[SessionKey, _Unwritten] = {}  # of sessions that do not wait
        self._writing: int | None = None  # the number of what the thread writes; 0: it failed before
        self._callers: deque[tuple[int, Callable[[], None]]] = deque()  # called once all up to this number are done
        self._retry_at_s = 0.0
        self._counters: Counter[str] = Counter()
        self._is_stopping, self._is_idle = False, False
        self._thread = threading.Thread(target=self._run, name="session-logs", daemon=True)
        self._thread.start()

    def began(self, key: SessionKey, log: TokenLog, running: RunningTurn, request: GenerationRequest) -> None:
        """Note that a request's turn runs.

        It stands behind what is known of the log only: what others wrote since then stays.
        """
        before, now_s = log.state(), self._wall_clock()
        running.least_version = 0 if request.append else taken_over(log.version, now_s)
        log.version = next_version(log.version, now_s)
        state = before._replace(version=log.version, num_base=running.num_base, last_turn=root_turn(request))
        self._leave(key, state, before)

    def ended(self, key: SessionKey, log: TokenLog, before: SessionState) -> None:
        """Note that a turn is part of the log, which was `before` until now.

        What brought all that was said stands also where the log could not be read.
        """
        assert log.running is not None, "a turn ends while it runs"
        log.version = next_version(max(log.version, log.running.least_version), self._wall_clock())
        self._leave(key, log.state(), before)

    def deleted(self, key: SessionKey, log: TokenLog) -> None:
        """Keep nothing of the session anywhere."""
        log.version = taken_over(log.version, self._wall_clock())
        self._leave(key, None, deletion=log.version)

    def forked(self, key: SessionKey, log: TokenLog) -> None:
        """Note a session that is there at once, with a past."""
        log.version = taken_over(log.version, self._wall_clock())
        self._leave(key, log.state())

    def noted(self, key: SessionKey, log: TokenLog, before: SessionState) -> None:
        """Note what an API keeps with a session, whose log was `before` until now."""
        log.version = next_version(log.version, self._wall_clock())
        self._leave(key, log.state(), before)

    def after(self, call: Callable[[], None]) -> bool:
        """Return whether all that happened until now is written, or failed; else another thread calls `call` then."""
        with self._condition:
            if self._is_done(self._num_changes) or self._is_stopping:
                return True
            self._callers.append((self._num_changes, call))
            return False

    def flush(self, timeout_s: float) -> bool:
        """Wait until all that happened until now is written, or has failed; False if that takes longer."""
        done = threading.Event()
        return self.after(done.set) or done.wait(timeout_s)

    def flush_for(self, is_meant: Callable[[SessionKey], bool], timeout_s: float) -> bool:
        """`flush`, and what failed of these sessions is not tried again, but for deletions."""
        self._forget(is_meant)
        if not self.flush(timeout_s):
            return False
        self._forget(is_meant)  # what failed meanwhile
        return True

    def stats(self) -> dict[str, Any]:
        with self._condition:
            num_waiting = len(self._waiting) + (self._writing is not None)
            return {"waiting": num_waiting, "later": len(self._failed), **self._counters}

    def close(self) -> None:
        """Write what is left, and what failed, within a bounded time."""
        with self._condition:
            self._waiting = self._failed | self._waiting
            self._failed = {}
            self._condition.notify()
        self.flush(_STOP_S)
        with self._condition:
            self._is_stopping = True
            self._condition.notify()
        self._thread.join(_STOP_S)
        self._call_callers(everything=True)

    def _leave(
        self,
        key: SessionKey,
        state: SessionState | None,
        before: SessionState | None = None,
        *,
        deletion: int | None = None,
    ) -> None:
        """Queue it in the place of what waits of the session, but behind its deletion."""
        with self._condition:
            self._num_changes += 1
            waiting, failed = self._waiting.get(key), self._failed.pop(key, None)
            older = waiting or failed
            if older is not None and deletion is None:
                deletion, before = older.deletion, before if older.state is None else older.before
            number = self._num_changes if waiting is None else waiting.number
            self._waiting[key] = _Unwritten(number, deletion, before, state)
            if len(self._waiting) + len(self._failed) > MAX_UNWRITTEN:
                self._lose_one()
            if self._is_idle:
                self._condition.notify()

    def _lose_one(self) -> None:
        """Lose the oldest, but no deletion: without those, sessions come back. Small as they are, all may wait."""
        for unwritten in (self._failed, self._waiting):
            for key, each in unwritten.items():
                if each.state is not None:
                    self._lose(unwritten, key)
                    self._counters["lost"] += 1
                    return

    def _lose(self, unwritten: dict[SessionKey, _Unwritten], key: SessionKey) -> None:
        unwritten[key].state = None
        if unwritten[key].deletion is None:
            del unwritten[key]

    def _forget(self, is_meant: Callable[[SessionKey], bool]) -> None:
        with self._condition:
            for key in filter(is_meant, list(self._failed)):
                self._lose(self._failed, key)

    def _run(self) -> None:
        while (found := self._next()) is not None:
            key, unwritten = found
            outcome = self._outcome(key, unwritten)
            with self._condition:
                self._counters[outcome] += 1
                self._writing = None
                if outcome == Appended.FAILED.value:
                    self._try_later(key, unwritten)
            self._call_callers()

    def _next(self) -> tuple[SessionKey, _Unwritten] | None:
        with self._condition:
            while not self._waiting and not self._is_stopping:
                pause_s = self._retry_at_s - time.monotonic() if self._failed else None
                if pause_s is not None and pause_s <= 0:
                    return self._taken(self._failed)
                self._is_idle = True
                self._condition.wait(pause_s)
                self._is_idle = False
            return self._taken(self._waiting) if self._waiting else None

    def _taken(self, unwritten: dict[SessionKey, _Unwritten]) -> tuple[SessionKey, _Unwritten]:
        key = next(iter(unwritten))
        self._writing = unwritten[key].number
        return key, unwritten.pop(key)

    def _try_later(self, key: SessionKey, failed: _Unwritten) -> None:
        """Unless the session has changed since: then it is written as it is now."""
        newer = self._waiting.get(key)
        if newer is None:
            failed.number = 0
            self._failed[key] = failed
        elif newer.deletion is None:
            newer.deletion = failed.deletion
        self._retry_at_s = time.monotonic() + RETRY_S

    def _is_done(self, number: int) -> bool:
        """Return whether all that was left until then is written; called with the lock held."""
        is_written = self._writing is None or self._writing > number
        return is_written and all(each.number > number for each in islice(self._waiting.values(), 1))

    def _call_callers(self, *, everything: bool = False) -> None:
        with self._condition:
            due = []
            while self._callers and (everything or self._is_done(self._callers[0][0])):
                due.append(self._callers.popleft()[1])
        for call in due:
            try:
                call()
            except Exception:  # who waits must not harm those who wait behind
                logger.exception("who waited for a session's log failed")

    def _outcome(self, key: SessionKey, unwritten: _Unwritten) -> str:
        try:
            return self._write(log_key(self._model, *key), unwritten)
        except OSError as error:
            logger.warning("a session's log could not be written: %s", type(error).__name__)
        except Exception:  # the thread must outlive any session; it would raise again
            logger.exception("a session's log could not be written")
            return "raised"
        return Appended.FAILED.value

    def _write(self, key: LogKey, unwritten: _Unwritten) -> str:
        """Write all of it; returns what became of it, as a counter's name."""
        if unwritten.deletion is not None:
            self._store.delete(key, unwritten.deletion)
            unwritten.deletion = None
        if unwritten.state is None:
            return "deleted"
        outcome = self._store.append(key, rows_of(unwritten.state, unwritten.before))
        if outcome is Appended.NEEDS_WHOLE:
            outcome = self._store.append(key, rows_of(unwritten.state))
        return outcome.value


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
        """Begin to read; None if it would not be read, as each thread hangs in another read, or all is closed."""
        with self._lock:
            if self._is_closed or len(self._late) >= _NUM_READERS:
                return None
        begun: Future[_T] = Future()
        self._workers.run(lambda: self._run(begun, read))
        return begun

    def result(self, begun: Future[_T], until_s: float) -> _T:
        """Wait until a time of `time.monotonic`; raises what the read did, `TimeoutError` or `CancelledError`."""
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
