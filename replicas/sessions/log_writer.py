"""Writes what happens to sessions to their durable logs, from a thread of its own (Pensieve 4.3).

The engine's thread leaves references and goes on: ids are compared, packed and written by the writer's. A turn's prompt
is written when it begins and the rest when it ends; whoever tells a client that it has ended asks `after` first. What
cannot be written now is tried again while nothing else is to be written, until something newer of its session is: what
does not fit the log then is written anew as a whole.
"""

from __future__ import annotations

import logging
import threading
import time
from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from typing import Any, NamedTuple

from mneme.cachetier.sessions.record import (
    RecordKind,
    SessionState,
    began,
    common_prefix,
    ended,
    next_version,
    taken_over,
    whole,
)
from mneme.cachetier.sessions.store import Appended, SessionLogStore, log_key
from mneme.replicas.request import GenerationRequest
from mneme.replicas.sessions.sessions import Ids, SessionKey
from mneme.replicas.sessions.token_log import FinishedTurn, RunningTurn, TokenLog, root_turn

log = logging.getLogger(__name__)

MAX_CHANGES = 4096  # that wait to be written; of more the oldest are dropped, but no deletions
MAX_LATER = 1024  # sessions whose last change could not be written; of more the oldest are lost, but no deletions
RETRY_S, _MAX_RETRY_S = 1.0, 16.0  # pause after what failed, doubled while everything does
_STOP_S = 5.0


class _Change(NamedTuple):
    kind: RecordKind
    key: SessionKey
    state: SessionState  # behind it
    before: SessionState
    prompt: list[int] | None = None  # BEGAN; it may have grown since
    num_prompt: int | None = None  # of `prompt`; or, ENDED: of the ids that the record before this one was about


class SessionLogWriter:
    """A `SessionJournal`. `model` says whose token ids they are (`log_key`)."""

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
        """See `SessionJournal`. Stands behind what is known of the log only: what others wrote since then stays."""
        before, now_s = log.state(), self._wall_clock()
        running.least_version = 0 if request.append else taken_over(log.version, now_s)
        log.version = running.prompt_version = next_version(log.version, now_s)
        state = before._replace(version=log.version, num_base=running.num_base, last_turn=root_turn(request))
        self._leave(_Change(RecordKind.BEGAN, key, state, before, ids, len(ids)))

    def ended(self, key: SessionKey, log: TokenLog, before: SessionState, turn: FinishedTurn) -> None:
        """See `SessionJournal`. What brought all that was said stands also where the log could not be read."""
        running = log.running
        assert running is not None, "a turn ends while it runs"
        num_prompt = turn.num_prompt if running.prompt_version == log.version else None
        log.version = next_version(max(log.version, running.least_version), self._wall_clock())
        self._leave(_Change(RecordKind.ENDED, key, log.state(), before, None, num_prompt))

    def deleted(self, key: SessionKey, log: TokenLog) -> None:
        """See `SessionJournal`."""
        log.version = taken_over(log.version, self._wall_clock())
        state = SessionState(version=log.version)
        self._leave(_Change(RecordKind.DELETED, key, state, state))

    def forked(self, key: SessionKey, log: TokenLog) -> None:
        """See `SessionJournal`."""
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
        """The oldest that is no deletion: without those, sessions would come back. They are small, so all may wait."""
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
        """Nothing that was left until then is still to be written; called with the lock held."""
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
                log.exception("who waited for a session's log failed")

    def _outcome(self, change: _Change) -> str:
        try:
            return self._write(change)
        except OSError as error:
            log.warning("a session's log could not be written: %s", type(error).__name__)
        except Exception:  # the thread must outlive any record; it would raise again
            log.exception("a session's log could not be written")
            return "raised"
        return Appended.FAILED.value

    def _write(self, change: _Change) -> str:
        """What became of it, as a counter's name."""
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
    """From the state before."""
    if change.prompt is None:
        return ended(change.before, change.state, change.num_prompt)
    prompt = array("i", change.prompt[: change.num_prompt])
    start = common_prefix(change.state.ids, prompt)
    return began(change.state, change.before.version, start, prompt[start:])


def _all_records(change: _Change) -> list[bytes]:
    """From nothing."""
    if change.prompt is None:
        return [whole(change.state)]
    before = change.before._replace(version=change.state.version - 1)
    return [whole(before), _record(change._replace(before=before))]
