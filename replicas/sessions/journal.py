"""An engine's sessions in their durable logs: what is written of them, and what is read before a turn begins.

Nothing here runs on the engine's thread but what `SessionLogWriter` leaves there. A turn's session is looked up before
the engine takes the turn; a log that cannot be read in time is not waited for.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import Any, NamedTuple, TypeVar

from mneme.cachetier.chunk.keys import owner_of
from mneme.cachetier.config import CacheConfig
from mneme.cachetier.sessions.record import SessionState, replayed, taken_over
from mneme.cachetier.sessions.store import SessionLogStore, log_key
from mneme.replicas.config import EngineConfig
from mneme.replicas.request import GenerationRequest
from mneme.replicas.sessions.log_writer import SessionLogWriter
from mneme.replicas.sessions.sessions import SessionKey, Sessions, session_key
from mneme.replicas.sessions.token_log import is_usable
from mneme.replicas.workers import Workers

logger = logging.getLogger(__name__)

READ_S = 0.2  # how long a turn waits for its session's log, at most
DELETE_S = 5.0
_NUM_READERS = 4
_BURST_S = 0.005  # of several turns at once: so much longer for each

_T = TypeVar("_T")
OpenSessionLogs = Callable[[CacheConfig, float], SessionLogStore | None]  # the second: sessions' time to live, seconds


def open_durable_sessions(
    config: EngineConfig, cache: CacheConfig, weights: str, vocab_size: int, open_logs: OpenSessionLogs
) -> DurableSessions | None:
    """None where sessions have no durable logs. `weights`: a digest of them; their ids are taken for no other's."""
    store = open_logs(cache, config.session_ttl_s) if config.max_sessions else None
    return None if store is None else DurableSessions(store, weights.encode(), vocab_size)


class Recalled(NamedTuple):
    """What the durable log of a session says."""

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

    def delete_owned(self, owner: bytes) -> int:
        """Likewise all that a tenant has, see `SessionLogStore.delete_owned`; raises likewise."""
        if not self.writer.settle(lambda each: owner_of(each[0]) == owner, DELETE_S):
            raise TimeoutError("session logs are not written in time")
        return self._store.delete_owned(owner)

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
        """What is not begun is cancelled; what runs is not waited for."""
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
        """It is never begun; or it hangs."""
        with self._lock:
            if not begun.cancel() and not begun.done():
                self._late.add(begun)
