"""Stores of session logs that fail, hang or fall behind: a turn goes on, and what was deleted stays deleted."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest

from mneme.cachetier.names import Appended
from mneme.cachetier.session_log.log_store import LogKey, log_key
from mneme.cachetier.session_log.rows import LogRows
from mneme.replicas.sessions import durable as durable_sessions
from mneme.replicas.sessions.durable import DurableSessions, SessionLogWriter
from mneme.replicas.sessions.token_log import RecalledSession, TokenLog
from tests.replicas.sessions.test_durable_sessions import until

MODEL = b"letters"


class HeldStore:
    """Answers once `go` is set; `read` then gives what `on_read` does."""

    def __init__(self, on_read: Callable[[], LogRows | None] = lambda: None) -> None:
        self.on_read = on_read
        self.entered, self.go = threading.Event(), threading.Event()
        self.deleted: list[LogKey] = []
        self.outcomes: list[Appended] = []  # of the next appends; then all are written
        self.written: dict[LogKey, list[int | str]] = {}  # versions, or "deleted"

    def append(self, key: LogKey, rows: LogRows) -> Appended:
        self.entered.set()
        assert self.go.wait(30)
        outcome = self.outcomes.pop(0) if self.outcomes else Appended.WRITTEN
        if outcome is Appended.WRITTEN:
            self.written.setdefault(key, []).append(rows.session.version)
        return outcome

    def read(self, key: LogKey, newer_than: int = 0) -> LogRows | None:
        self.entered.set()
        assert self.go.wait(30)
        return self.on_read()

    def delete(self, key: LogKey, at_least: int = 0) -> bool:
        self.deleted.append(key)
        self.written.setdefault(key, []).append("deleted")
        return True

    def delete_tenant(self, owner: bytes) -> int:
        return 0

    def close(self) -> None: ...


def keys(num: int) -> list[tuple[str, str]]:
    return [("salt", f"public:{i}") for i in range(num)]


def test_whatever_a_read_raises_the_turn_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> bytes:
        raise ZeroDivisionError

    store = HeldStore(fail)
    store.go.set()
    durable = DurableSessions(store, MODEL, 5, read_s=60)
    (key,) = keys(1)
    with caplog.at_level(logging.ERROR):
        assert durable.recall([key], lambda _key: 0) == [RecalledSession(key, None)]
    assert durable.stats()["read"] == {"failed": 1}
    assert "could not be read" in caplog.text
    durable.close()


def test_reads_that_are_cancelled_fail_and_are_not_under_way_any_more() -> None:
    store = HeldStore()
    durable = DurableSessions(store, MODEL, 5, read_s=60)
    found: list[object] = []
    asking = threading.Thread(target=lambda: found.extend(durable.recall(keys(20), lambda _key: 0)))
    asking.start()
    assert store.entered.wait(60)
    closing = threading.Thread(target=durable.close)  # cancels what no thread has begun
    closing.start()
    closing.join(60)
    store.go.set()
    asking.join(60)
    assert not asking.is_alive()
    assert 1 <= len(found) == durable.stats()["read"]["failed"] <= 20  # the others have found nothing
    assert durable.recall(keys(1), lambda _key: 0) == [RecalledSession(keys(1)[0], None)]  # closed: nothing is read


def test_all_sessions_of_a_burst_are_read() -> None:
    """However many come back at once, as after a restart."""
    store = HeldStore(lambda: time.sleep(0.001))
    store.go.set()
    durable = DurableSessions(store, MODEL, 5)
    assert durable.recall(keys(500), lambda _key: 0) == []
    assert durable.stats()["read"] == {}
    durable.close()


def test_while_all_reads_hang_no_turn_waits_for_another() -> None:
    store = HeldStore()
    durable = DurableSessions(store, MODEL, 5, read_s=0.05)
    asked = keys(20)
    assert durable.recall(asked, lambda _key: 0) == [RecalledSession(key, None) for key in asked]
    durable._read_s = 120.0
    began_s = time.monotonic()
    assert durable.recall(asked[:1], lambda _key: 0) == [RecalledSession(asked[0], None)]
    assert time.monotonic() - began_s < 100.0  # it did not wait `read_s`
    store.go.set()
    deadline_s = time.monotonic() + 60.0
    while durable.recall(asked, lambda _key: 0):  # as soon as one of them has come back
        assert time.monotonic() < deadline_s
    durable.close()


def test_a_read_that_hangs_does_not_hold_up_the_exit_of_the_process() -> None:
    script = """
import threading
from mneme.replicas.sessions.durable import DurableSessions

class Store:
    def read(self, key, newer_than=0):
        threading.Event().wait(600)
    def close(self): ...

durable = DurableSessions(Store(), b"letters", 5, read_s=0.05)
durable.recall([("salt", "public:0")], lambda key: 0)
durable.close()
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300)


def test_no_deletion_is_lost_however_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable_sessions, "MAX_UNWRITTEN", 4)
    store = HeldStore()
    writer = SessionLogWriter(store, MODEL)
    writer.forked(("salt", "first"), TokenLog())
    assert store.entered.wait(60)  # the writer hangs in it
    for key in keys(10):
        writer.deleted(key, TokenLog())
    writer.forked(("salt", "last"), TokenLog())
    store.go.set()
    assert writer.flush(10)
    assert store.deleted == [log_key(MODEL, *key) for key in keys(10)]
    assert writer.stats() == {"waiting": 0, "later": 0, "appended": 1, "lost": 1, "deleted": 10}
    writer.close()


@pytest.mark.parametrize("outcome", [Appended.WRITTEN, Appended.FAILED])
@pytest.mark.parametrize("is_deleted", [False, True])
def test_a_session_that_changes_while_it_is_written_is_written_once_more_as_it_is_then(
    monkeypatch: pytest.MonkeyPatch, outcome: Appended, is_deleted: bool
) -> None:
    """Behind its deletion, if it was deleted meanwhile."""
    monkeypatch.setattr(durable_sessions, "RETRY_S", 0.01)
    store, log = HeldStore(), TokenLog()
    store.outcomes = [outcome]
    writer = SessionLogWriter(store, MODEL)
    (key,) = keys(1)
    writer.forked(key, log)
    assert store.entered.wait(60)  # the writer hangs in it
    first = [log.version] if outcome is Appended.WRITTEN else []
    for _ in range(3):
        writer.forked(key, log)
    if is_deleted:
        writer.deleted(key, log)
        writer.forked(key, log)
    store.go.set()
    until(lambda: writer.stats()["later"] + writer.stats()["waiting"] == 0)
    assert store.written[log_key(MODEL, *key)] == [*first, *(["deleted"] if is_deleted else []), log.version]
    writer.close()


def test_who_waits_for_a_record_hears_of_it_only_once_it_is_done_whatever_is_dropped_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As many are dropped as are not done yet."""
    monkeypatch.setattr(durable_sessions, "MAX_UNWRITTEN", 4)
    store, heard = HeldStore(), threading.Event()
    writer = SessionLogWriter(store, MODEL)
    first, second, *others = keys(9)
    writer.forked(first, TokenLog())
    assert store.entered.wait(60)
    writer.deleted(second, TokenLog())  # is never dropped
    assert not writer.after(lambda: heard.set() if store.deleted else None)
    for key in others:
        writer.forked(key, TokenLog())
    store.go.set()
    assert writer.flush(10)
    assert heard.is_set()
    writer.close()
