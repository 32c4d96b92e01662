"""What waits for the disk: the folder too before a record is said to be there, and no session for another's."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from mneme.cachetier.chunk.syscalls import FileOperations
from mneme.cachetier.sessions.index import BLOCK_BYTES, SessionLogConfig
from mneme.cachetier.sessions.logs import SessionLogs
from mneme.cachetier.sessions.record import SessionState, whole
from mneme.cachetier.sessions.store import Appended, LogKey, parse_log
from tests.cachetier.chunks import FailingFiles
from tests.cachetier.session_records import KEY, conversation, ids_of, key_number

LIMIT_S = 20.0
STEPS = conversation(3)


class PowerlessFiles(FileOperations):
    """Knows what a power failure would leave of a folder: names as they were when it was synced last."""

    def __init__(self) -> None:
        self.renamed: set[str] = set()  # not there then

    def rename(self, source: str, target: str) -> None:
        super().rename(source, target)
        self.renamed.add(target)

    def sync_folder(self, path: str) -> None:
        super().sync_folder(path)
        self.renamed = {target for target in self.renamed if os.path.dirname(target) != path}


class SlowFiles(FileOperations):
    """Calls of these names stand still until `go` is set, if they are made while `holds`."""

    def __init__(self, *names: str) -> None:
        self.holds, self.entered, self.go = False, threading.Event(), threading.Event()
        for name in names:
            setattr(self, name, self._held(getattr(self, name)))

    def _held(self, call: Callable[..., object]) -> Callable[..., object]:
        def held(*args: object) -> object:
            if self.holds:
                self.holds = False
                self.entered.set()
                assert self.go.wait(LIMIT_S)
            return call(*args)

        return held


def logs_in(folder: Path, files: FileOperations, *, sync: bool = True, capacity_bytes: int = 1 << 30) -> SessionLogs:
    return SessionLogs(SessionLogConfig(folder=str(folder), capacity_bytes=capacity_bytes, sync=sync), files=files)


def write(logs: SessionLogs, key: LogKey, version: int, num_ids: int = 3) -> Appended:
    return logs.append(key, [whole(SessionState(version=version, ids=ids_of(version, num_ids)))])


def version_in(logs: SessionLogs, key: LogKey) -> int | None:
    parsed = None if (content := logs.read(key)) is None else parse_log(content, key)
    return None if parsed is None else parsed.replay.version


@pytest.mark.parametrize("sync", [True, False])
def test_a_log_that_is_new_or_replaced_survives_a_power_failure(tmp_path: Path, sync: bool) -> None:
    files = PowerlessFiles()
    logs = logs_in(tmp_path, files, sync=sync)
    assert write(logs, KEY, 1) is Appended.WRITTEN
    assert bool(files.renamed) is not sync
    assert write(logs, KEY, 2) is Appended.WRITTEN
    assert bool(files.renamed) is not sync
    logs.close()


@pytest.mark.parametrize("operation", ["sync", "sync_folder"])
def test_what_did_not_reach_the_disk_can_be_written_again(tmp_path: Path, operation: str) -> None:
    files = FailingFiles(lambda _operation, _number: None)
    logs = logs_in(tmp_path, files)
    for record, state in STEPS:
        files.fails = lambda name, _number: errno.EIO if name == operation else None
        outcome = logs.append(KEY, [record])
        version_in(logs, KEY)  # what is in memory of it
        files.fails = lambda _operation, _number: None
        if outcome is not Appended.WRITTEN:
            assert outcome in (Appended.FAILED, Appended.NEEDS_WHOLE)
            assert logs.append(KEY, [whole(state)]) is Appended.WRITTEN
        assert version_in(logs, KEY) == state.version
    assert logs.stats()["counters"]["append_failed"] >= 1
    logs.close()


@pytest.mark.parametrize("operation", ["sync", "write", "read", "sync_folder"])
def test_a_disk_that_stands_still_for_one_session_holds_up_no_other(tmp_path: Path, operation: str) -> None:
    files = SlowFiles(operation)
    logs = logs_in(tmp_path, files)
    write(logs, key_number(1), 1)
    write(logs, key_number(2), 1)
    with ThreadPoolExecutor(4) as pool:
        files.holds = True
        call = logs.read if operation == "read" else lambda key: write(logs, key, 2)
        stuck: Future[object] = pool.submit(call, key_number(1))
        try:
            assert files.entered.wait(LIMIT_S)
            assert pool.submit(version_in, logs, key_number(2)).result(LIMIT_S / 2) == 1
            assert pool.submit(write, logs, key_number(2), 2).result(LIMIT_S / 2) is Appended.WRITTEN
            assert pool.submit(logs.stats).result(LIMIT_S / 2)["sessions"] == 2
        finally:
            files.go.set()
        assert stuck.result(LIMIT_S)
    assert version_in(logs, key_number(1)) == (1 if operation == "read" else 2)
    logs.close()


@pytest.mark.parametrize("operation", ["sync", "write", "sync_folder", "read"])
def test_a_session_that_goes_while_the_disk_stands_still_is_gone(tmp_path: Path, operation: str) -> None:
    """There is room for two: the third takes that of the one that is under way."""
    files = SlowFiles(operation)
    logs = logs_in(tmp_path, files, capacity_bytes=4 * BLOCK_BYTES)
    for number in (1, 2):
        write(logs, key_number(number), 1)
    with ThreadPoolExecutor(2) as pool:
        files.holds = True
        call = logs.read if operation == "read" else lambda key: write(logs, key, 2)
        stuck: Future[object] = pool.submit(call, key_number(1))
        try:
            assert files.entered.wait(LIMIT_S)
            outcome = pool.submit(write, logs, key_number(3), 1, 3 * BLOCK_BYTES // 4 - 100).result(LIMIT_S / 2)
        finally:
            files.go.set()
        found = stuck.result(LIMIT_S)
    on_disk = sum(-(-path.stat().st_size // BLOCK_BYTES) for path in tmp_path.rglob("*.log")) * BLOCK_BYTES
    assert on_disk == logs.stats()["used_bytes"] <= 4 * BLOCK_BYTES
    assert outcome is Appended.WRITTEN
    assert found in (None, Appended.FAILED) or version_in(logs, key_number(1)) is not None
    logs.close()


def test_calls_from_many_threads_leave_what_each_was_told(tmp_path: Path) -> None:
    logs = logs_in(tmp_path, FileOperations(), capacity_bytes=40 * BLOCK_BYTES)

    def converse(number: int) -> int:
        """Two threads to a session; versions of one are odd. The last that was written."""
        key, last = key_number(number // 2), 0
        for turn in range(60):
            version = 2 * turn + number % 2 + 1
            if write(logs, key, version, 100 * (turn % 30)) is Appended.WRITTEN:
                last = version
            content = logs.read(key)
            assert content is None or parse_log(content, key) is not None
            if turn % 20 == 19 and number % 2:
                logs.delete(key_number(number // 2 + 50))
        return last

    with ThreadPoolExecutor(8) as pool:
        lasts = list(pool.map(converse, range(8)))
    for session in range(4):
        assert version_in(logs, key_number(session)) in (None, max(lasts[2 * session : 2 * session + 2]))
    on_disk = sum(-(-path.stat().st_size // BLOCK_BYTES) for path in tmp_path.rglob("*.log")) * BLOCK_BYTES
    assert on_disk == logs.stats()["used_bytes"] <= 40 * BLOCK_BYTES
    assert "damaged" not in logs.stats()["counters"]
    logs.close()
