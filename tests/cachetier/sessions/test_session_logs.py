"""Session logs in a folder: bounds, ages, deletions, what a restart finds, and faults of the disk."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from mneme.cachetier.chunk.syscalls import FileOperations
from mneme.cachetier.sessions.folder import SessionLogFolder
from mneme.cachetier.sessions.index import MAX_CLOCK_SKEW_S, SessionLogConfig
from mneme.cachetier.sessions.logs import SessionLogs
from mneme.cachetier.sessions.record import SessionState, deleted, whole
from mneme.cachetier.sessions.store import TOMBSTONE_BYTES, Appended, LogKey, parse_log
from mneme.errors import ConfigError
from tests.cachetier.chunks import FailingFiles, failing_at
from tests.cachetier.session_records import KEY, begin_turn, conversation, end_turn, ids_of, key_number

BLOCK = 4096
STEPS = conversation(5)


class Clocks:
    """A wall clock that starts where files' times do, and one that does not jump."""

    def __init__(self) -> None:
        self.wall_s, self.now_s = time.time(), 500.0

    def wall(self) -> float:
        return self.wall_s

    def now(self) -> float:
        return self.now_s

    def pass_s(self, seconds: float) -> None:
        self.wall_s += seconds
        self.now_s += seconds


def make_logs(
    folder: Path, clocks: Clocks | None = None, files: FileOperations | None = None, **options: Any
) -> SessionLogs:
    clocks = clocks or Clocks()
    config = SessionLogConfig(folder=str(folder), **options)
    return SessionLogs(config, files=files, clock=clocks.now, wall_clock=clocks.wall)


def state_in(logs: SessionLogs, key: LogKey = KEY) -> SessionState | None:
    """As a replica reads it; a tombstone is a state without ids."""
    content = logs.read(key)
    parsed = None if content is None else parse_log(content, key)
    assert content is None or (parsed is not None and parsed.num_bytes == len(content))
    return None if parsed is None else parsed.replay.state()


def write(logs: SessionLogs, state: SessionState, key: LogKey = KEY) -> Appended:
    return logs.append(key, [whole(state)])


def some_state(version: int, num_ids: int = 3) -> SessionState:
    return SessionState(version=version, ids=ids_of(version, num_ids), num_turns=1)


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix in (".log", ".part"))


def folder_bytes(folder: Path) -> int:
    return sum(-(-path.stat().st_size // BLOCK) * BLOCK for path in files_of(folder))


def test_what_is_appended_is_read_after_a_restart(tmp_path: Path) -> None:
    for record, state in STEPS:
        logs = make_logs(tmp_path)
        assert logs.append(KEY, [record]) is Appended.WRITTEN
        assert state_in(logs) == state
        assert logs.read(KEY, state.version) is None
        assert logs.read(KEY, state.version - 1) is not None
        logs.close()
    assert len(files_of(tmp_path)) == 1
    logs = make_logs(tmp_path)
    assert state_in(logs) == STEPS[-1][1]
    logs.close()


def test_names_and_folders_say_nothing(tmp_path: Path) -> None:
    logs = make_logs(tmp_path)
    write(logs, some_state(1))
    (path,) = files_of(tmp_path)
    assert path.name == f"{KEY.name.hex()}-{KEY.owner.hex()}.log"
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    logs.close()


def test_a_second_process_is_refused_and_a_folder_that_cannot_be_used(tmp_path: Path) -> None:
    logs = make_logs(tmp_path)
    with pytest.raises(ConfigError, match="in use by another cluster"):
        make_logs(tmp_path)
    logs.close()
    make_logs(tmp_path).close()
    with pytest.raises(ConfigError, match="cannot be used"):
        make_logs(tmp_path / "none")
    for number in (1, 2):
        with pytest.raises(ConfigError, match="cannot be used"):
            make_logs(tmp_path, files=failing_at(number))


def test_what_does_not_go_on_from_the_log_is_refused(tmp_path: Path) -> None:
    logs = make_logs(tmp_path)
    records = [record for record, _ in STEPS]
    assert logs.append(KEY, records[1:2]) is Appended.NEEDS_WHOLE
    assert logs.append(KEY, records[:2]) is Appended.WRITTEN
    assert logs.append(KEY, records[:1]) is Appended.STALE
    assert logs.append(KEY, records[1:2]) is Appended.STALE
    assert logs.append(KEY, records[3:4]) is Appended.NEEDS_WHOLE
    assert write(logs, STEPS[0][1]) is Appended.STALE
    assert write(logs, STEPS[3][1]) is Appended.WRITTEN
    assert logs.append(KEY, records[4:5]) is Appended.WRITTEN
    assert state_in(logs) == STEPS[4][1]
    with pytest.raises(ValueError, match="records of a session's log"):
        logs.append(KEY, [b"nonsense"])
    logs.close()


def test_a_log_that_is_mostly_obsolete_is_asked_for_as_a_whole(tmp_path: Path) -> None:
    """A session whose turns replace what was said; appended ones never ask."""
    logs, state, num_whole, largest = make_logs(tmp_path), SessionState(), 0, 0
    for number in range(200):
        record, running = begin_turn(state, number, 100)
        outcomes = [logs.append(KEY, [record])]
        record, state = end_turn(running, number, 100, 200 if number else 2000)
        outcomes.append(logs.append(KEY, [record]))
        if Appended.NEEDS_WHOLE in outcomes:
            assert write(logs, state) is Appended.WRITTEN
            num_whole += 1
        largest = max(largest, files_of(tmp_path)[0].stat().st_size)
        assert state_in(logs) == state
        if number % 2:  # an edit: most goes
            state = SessionState(version=state.version + 1, ids=state.ids[:2000])
            if logs.append(KEY, [whole(state)]) is not Appended.WRITTEN:
                raise AssertionError
    assert largest < 64 << 10
    for number in range(200, 400):
        record, running = begin_turn(state, number, 100)
        assert logs.append(KEY, [record]) is Appended.WRITTEN
        record, state = end_turn(running, number, 100, 200)
        assert logs.append(KEY, [record]) is Appended.WRITTEN
    assert files_of(tmp_path)[0].stat().st_size < 2.2 * 4 * len(state.ids)
    logs.close()


def test_sessions_are_bounded_in_bytes_and_number_and_the_oldest_go(tmp_path: Path) -> None:
    for name, options in (("bytes", {"capacity_bytes": 10 * BLOCK}), ("number", {"max_sessions": 10})):
        (tmp_path / name).mkdir()
        logs = make_logs(tmp_path / name, **options)
        for number in range(40):
            assert write(logs, some_state(number + 1), key_number(number)) is Appended.WRITTEN
            assert folder_bytes(tmp_path / name) == logs.stats()["used_bytes"] <= 10 * BLOCK
        kept = [number for number in range(40) if state_in(logs, key_number(number)) is not None]
        assert kept == list(range(40 - len(kept), 40))
        assert len(kept) >= 9
        assert write(logs, some_state(99, 20_000), key_number(99)) is (
            Appended.FAILED if name == "bytes" else Appended.WRITTEN
        )
        logs.close()


def test_a_long_prompt_is_written_once(tmp_path: Path) -> None:
    """Of a session that is new, and of one that is not: its prompt is no more obsolete than its past."""
    logs, state, num_ids = make_logs(tmp_path), SessionState(), 0
    for number, num_prompt in enumerate((40_000, 10, 60_000)):
        record, running = begin_turn(state, number, num_prompt)
        assert logs.append(KEY, [record]) is Appended.WRITTEN
        record, state = end_turn(running, number, num_prompt, 50)
        assert logs.append(KEY, [record]) is Appended.WRITTEN
        num_ids += num_prompt + 50
    assert logs.stats()["counters"]["written_bytes"] < 4 * num_ids + BLOCK
    assert state_in(logs) == state
    logs.close()


def test_who_goes_on_at_the_bound_of_sessions_costs_nobody_their_log(tmp_path: Path) -> None:
    logs = make_logs(tmp_path, max_sessions=3)
    for number in range(3):
        assert logs.append(key_number(number), [STEPS[0][0]]) is Appended.WRITTEN
    assert logs.append(key_number(2), [STEPS[1][0]]) is Appended.WRITTEN
    assert write(logs, STEPS[3][1], key_number(2)) is Appended.WRITTEN
    assert logs.stats()["sessions"] == 3
    assert logs.delete(key_number(2))
    assert (logs.stats()["sessions"], logs.stats()["tombstones"]) == (2, 1)
    logs.close()


def test_tombstones_leave_room_for_sessions(tmp_path: Path) -> None:
    """The latest are kept; there are no fewer than fit."""
    logs = make_logs(tmp_path, capacity_bytes=10 * BLOCK)
    for number in range(30):
        assert write(logs, some_state(1), key_number(number)) is Appended.WRITTEN
        assert logs.delete(key_number(number))
        assert folder_bytes(tmp_path) == logs.stats()["used_bytes"] <= 10 * BLOCK
    assert logs.stats()["tombstones"] == 5
    for number in range(30, 40):
        assert write(logs, some_state(1), key_number(number)) is Appended.WRITTEN
    known = [number for number in range(40) if state_in(logs, key_number(number)) is not None]
    assert known == [*range(25, 30), *range(35, 40)]
    logs.close()


def test_sessions_expire_by_the_time_that_passes_also_while_nothing_runs(tmp_path: Path) -> None:
    clocks = Clocks()
    logs = make_logs(tmp_path, clocks, ttl_s=100.0)
    write(logs, some_state(1), key_number(1))
    own = SessionState(version=2, ids=ids_of(2, 3), ttl_s=30.0)
    write(logs, own, key_number(2))
    clocks.pass_s(31.0)
    assert [state_in(logs, key_number(number)) is not None for number in (1, 2)] == [True, False]
    assert len(files_of(tmp_path)) == 1  # its file too
    logs.close()
    clocks.wall_s += 60.0
    logs = make_logs(tmp_path, clocks, ttl_s=100.0)
    assert state_in(logs, key_number(1)) is not None
    clocks.now_s += 12.0
    assert state_in(logs, key_number(1)) is None
    assert files_of(tmp_path) == []
    logs.close()


def test_clocks_that_jump_while_it_runs_do_nothing(tmp_path: Path) -> None:
    clocks = Clocks()
    logs = make_logs(tmp_path, clocks, ttl_s=100.0)
    write(logs, some_state(1))
    for jump in (1e9, -2e9):
        clocks.wall_s += jump
        assert state_in(logs) is not None
    logs.close()
    logs = make_logs(tmp_path, clocks, ttl_s=100.0)  # files from the future are new
    assert state_in(logs) is not None
    logs.close()


def test_what_was_deleted_does_not_come_back(tmp_path: Path) -> None:
    clocks = Clocks()
    logs = make_logs(tmp_path, clocks, ttl_s=100.0)
    for record, _ in STEPS:
        logs.append(KEY, [record])
    copy = logs.read(KEY)
    assert copy is not None
    assert logs.delete(KEY)
    assert not logs.delete(KEY)
    assert not logs.delete(key_number(5))
    for _ in range(2):
        gone = state_in(logs)
        assert gone is not None
        assert (len(gone.ids), gone.version > STEPS[-1][1].version) == (0, True)
        assert logs.install(KEY, copy) is Appended.STALE  # another node's
        assert logs.append(KEY, [STEPS[-1][0]]) is Appended.STALE
        assert write(logs, STEPS[-1][1]) is Appended.STALE
        assert [path.stat().st_size for path in files_of(tmp_path)] == [TOMBSTONE_BYTES]
        logs.close()
        logs = make_logs(tmp_path, clocks, ttl_s=100.0)
    clocks.pass_s(100.0 + MAX_CLOCK_SKEW_S - 1)
    assert state_in(logs) is not None
    clocks.pass_s(2)
    assert state_in(logs) is None
    logs.close()


def test_a_session_of_the_same_name_begins_behind_the_tombstone(tmp_path: Path) -> None:
    logs = make_logs(tmp_path)
    write(logs, some_state(7))
    logs.delete(KEY)
    gone = state_in(logs)
    assert gone is not None
    record, running = begin_turn(gone, 0, 4)
    assert logs.append(KEY, [record]) is Appended.WRITTEN
    record, state = end_turn(running, 0, 4, 4)
    assert logs.append(KEY, [record]) is Appended.WRITTEN
    logs.close()
    logs = make_logs(tmp_path)
    assert state_in(logs) == state
    assert logs.stats()["tombstones"] == 0
    logs.close()


def test_a_newer_copy_of_another_node_is_taken_and_an_older_one_is_not(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    one, two = make_logs(tmp_path / "a"), make_logs(tmp_path / "b")
    for record, _ in STEPS:
        one.append(KEY, [record])
    content = one.read(KEY)
    assert content is not None
    assert two.install(KEY, content) is Appended.WRITTEN
    assert two.install(KEY, content) is Appended.STALE
    assert two.install(key_number(1), content) is Appended.FAILED
    assert two.install(KEY, content[:-1]) is Appended.FAILED
    assert state_in(two) == STEPS[-1][1]
    one.delete(KEY)
    tombstone = one.read(KEY)
    assert tombstone is not None
    assert two.install(KEY, tombstone) is Appended.WRITTEN
    assert one.install(KEY, content) is Appended.STALE
    one.close()
    two.close()


def test_a_tenant_s_sessions_can_be_deleted_together(tmp_path: Path) -> None:
    logs = make_logs(tmp_path)
    for number in range(3):
        write(logs, some_state(1), key_number(number))
    assert logs.delete_owned(b"x" * 8) == 0
    assert logs.delete_owned(KEY.owner) == 3
    assert logs.stats()["sessions"] == 0
    logs.close()


def test_what_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    logs = make_logs(tmp_path)
    write(logs, some_state(1))
    (path,) = files_of(tmp_path)
    logs.close()
    kept = [path.with_name("notes.txt"), path.with_name(f"{'0' * 32}-{'0' * 16}.log")]
    kept[0].write_text("mine")
    kept[1].symlink_to(path)
    os.mkfifo(path.with_name(f"{'1' * 32}-{'0' * 16}.log"))
    path.with_name(f"{'2' * 32}.7.part").write_bytes(b"of a crash")
    path.with_name(f"{'3' * 32}-{'0' * 16}.log").write_bytes(b"")
    logs = make_logs(tmp_path)
    counters = logs.stats()["counters"]
    assert (counters["scan_unknown"], counters["scan_not_ours"], counters["scan_removed"]) == (1, 2, 1)
    assert all(each.is_symlink() or each.exists() for each in kept)
    assert state_in(logs) is not None
    assert logs.read(LogKey(b"\x33" * 16, bytes(8))) is None
    logs.close()


def test_a_file_that_changes_under_us_is_a_log_that_is_lost_or_shorter(tmp_path: Path) -> None:
    logs = make_logs(tmp_path)
    logs.append(KEY, [record for record, _ in STEPS[:2]])
    (path,) = files_of(tmp_path)
    sound = path.stat().st_size
    logs.append(KEY, [STEPS[2][0]])
    os.truncate(path, sound)
    assert state_in(logs) == STEPS[1][1]
    assert logs.append(KEY, [STEPS[3][0]]) is Appended.NEEDS_WHOLE
    assert write(logs, STEPS[3][1]) is Appended.WRITTEN
    path.unlink()
    assert logs.append(KEY, [STEPS[4][0]]) is Appended.FAILED
    assert logs.append(KEY, [STEPS[5][0]]) is Appended.NEEDS_WHOLE
    assert write(logs, STEPS[5][1]) is Appended.WRITTEN
    path.write_bytes(b"another's")
    assert logs.read(KEY) is None
    path.unlink(missing_ok=True)
    assert write(logs, STEPS[-1][1]) is Appended.WRITTEN
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    assert logs.read(KEY) is None
    logs.close()


def test_a_torn_tail_does_not_stay_on_the_disk_once_it_does_not_count(tmp_path: Path) -> None:
    logs = make_logs(tmp_path)
    logs.append(KEY, [record for record, _ in STEPS[:2]])
    logs.close()
    (path,) = files_of(tmp_path)
    with path.open("ab") as file:
        file.write(bytes(1 << 19))
    written_s = int(time.time()) - 30
    os.utime(path, (written_s, written_s))
    logs = make_logs(tmp_path)
    assert folder_bytes(tmp_path) == logs.stats()["used_bytes"] > 1 << 19
    assert state_in(logs) == STEPS[1][1]
    assert folder_bytes(tmp_path) == logs.stats()["used_bytes"] == BLOCK
    assert path.stat().st_mtime == written_s  # reading it makes it no younger
    logs.close()


def test_what_was_written_in_part_does_not_stay_on_the_disk(tmp_path: Path) -> None:
    files = FailingFiles(lambda _operation, _number: None)
    logs = make_logs(tmp_path, files=files, sync=True)
    logs.append(KEY, [STEPS[0][0]])
    record, _ = begin_turn(STEPS[0][1], 1, 10_000)
    files.fails = lambda name, _number: errno.EIO if name == "sync" else None
    assert logs.append(KEY, [record]) is Appended.FAILED
    assert folder_bytes(tmp_path) == logs.stats()["used_bytes"] == BLOCK
    logs.close()


def play(logs: SessionLogs) -> dict[int, SessionState]:
    """What a replica does with it; the last states of which it was told that they are written."""
    written: dict[int, SessionState] = {}
    for number in range(3):
        key = key_number(number)
        for index, (record, state) in enumerate(conversation(3, number)):
            outcome = logs.append(key, [record])
            if outcome is Appended.NEEDS_WHOLE and index % 2:  # the turn's end
                outcome = write(logs, state, key)
            if outcome is Appended.WRITTEN:
                written[number] = state
            try:
                found = state_in(logs, key)
            except OSError:
                continue
            assert found is None or not len(found.ids) or found in states_of(number)
    logs.delete(key_number(0))
    written.pop(0, None)
    return written


def states_of(number: int) -> list[SessionState]:
    return [state for _, state in conversation(3, number)]


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("sync", [False, True])
def test_any_one_call_may_fail(tmp_path: Path, code: int, sync: bool) -> None:
    """The k-th call to the file system fails, for every k after the start: a log is behind by what failed, or whole."""
    files = FailingFiles(lambda _operation, _number: None)
    (tmp_path / "0").mkdir()
    logs = make_logs(tmp_path / "0", files=files, sync=sync)
    assert len(play(logs)) == 2
    logs.close()
    num_counted = 0
    for number in range(4, files.num_calls + 1):
        folder = tmp_path / str(number)
        folder.mkdir()
        logs = make_logs(folder, files=failing_at(number, code), sync=sync)
        written = play(logs)
        counters = logs.stats()["counters"]
        num_counted += any(counters.get(name) for name in ("append_failed", "read_failed", "tombstone_failed"))
        logs.close()
        logs = make_logs(folder)
        assert not list(folder.rglob("*.part"))
        for session, state in written.items():
            found = state_in(logs, key_number(session))
            if found is None:  # a full disk: the least recently used go
                assert code == errno.ENOSPC
            else:
                assert found in states_of(session)
                assert found.version >= state.version
        gone = state_in(logs, key_number(0))
        assert gone is None or not len(gone.ids)
        assert folder_bytes(folder) == logs.stats()["used_bytes"]
        logs.close()
    assert num_counted > files.num_calls // 2


@pytest.mark.parametrize(
    "operation", ["open_to_write", "open_to_read", "create", "write", "rename", "unlink", "status"]
)
def test_all_calls_of_a_kind_may_fail_for_a_while(tmp_path: Path, operation: str) -> None:
    files = FailingFiles(lambda _operation, _number: None)
    logs = make_logs(tmp_path, files=files)
    play(logs)
    files.fails = lambda name, _number: errno.EROFS if name == operation else None
    play(logs)
    logs.delete(key_number(1))
    files.fails = lambda _operation, _number: None
    gone = state_in(logs, key_number(1))
    assert gone is None or not len(gone.ids)
    assert write(logs, SessionState(version=2**100, ids=ids_of(1, 2)), key_number(2)) is Appended.WRITTEN
    logs.close()
    logs = make_logs(tmp_path)
    gone = state_in(logs, key_number(1))
    assert gone is None or not len(gone.ids)
    logs.close()


def test_a_deletion_on_a_disk_that_is_read_only_for_a_while_is_one(tmp_path: Path) -> None:
    files = FailingFiles(lambda _operation, _number: None)
    logs = make_logs(tmp_path, files=files)
    write(logs, some_state(1))
    files.fails = lambda name, _number: errno.EROFS if name in ("create", "unlink", "open_to_write") else None
    assert logs.delete(KEY)
    gone = state_in(logs)
    assert gone is not None
    assert not len(gone.ids)
    assert logs.stats()["counters"]["tombstone_failed"] > 0
    files.fails = lambda _operation, _number: None
    assert state_in(logs) is not None  # and it is written
    assert [path.stat().st_size for path in files_of(tmp_path)] == [TOMBSTONE_BYTES]
    logs.close()


def deleted_in_vain(folder: Path, num: int, *operations: str) -> tuple[SessionLogs, FailingFiles, list[LogKey]]:
    """Sessions that were written, and deleted while these operations failed, as they still do."""
    files = FailingFiles(lambda _operation, _number: None)
    logs, keys = make_logs(folder, files=files), [key_number(number) for number in range(num)]
    for key in keys:
        write(logs, some_state(1), key)
    files.fails = lambda name, _number: errno.EIO if name in operations else None
    assert all(logs.delete(key) for key in keys)
    return logs, files, keys


def test_deletions_on_a_disk_that_takes_nothing_for_a_while_are_ones_also_after_a_crash(tmp_path: Path) -> None:
    """However many: each removes its own file at least."""
    logs, _, keys = deleted_in_vain(tmp_path, 9, "create")
    logs._folder.close()  # a crash: nothing is written any more
    logs = make_logs(tmp_path)
    assert [state_in(logs, key) for key in keys] == [None] * len(keys)
    logs.close()


def test_tombstones_that_could_not_be_written_are_tried_in_turns_and_all_at_the_end(tmp_path: Path) -> None:
    """The first ones keep failing."""
    logs, files, keys = deleted_in_vain(tmp_path, 12, "create", "unlink")
    num_tries = 0

    def fails(name: str, _number: int) -> int | None:
        nonlocal num_tries
        num_tries += name == "create"
        return errno.EIO if name == "create" and num_tries <= 4 else None

    files.fails = fails
    for _ in range(2):
        logs.read(key_number(99))
    assert sum(path.stat().st_size == TOMBSTONE_BYTES for path in files_of(tmp_path)) == 4
    logs.close()
    assert [path.stat().st_size for path in files_of(tmp_path)] == [TOMBSTONE_BYTES] * len(keys)


def test_a_session_that_began_anew_is_not_replaced_by_its_old_tombstone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It began while the tombstone before its own was written."""
    logs, files, (first, second) = deleted_in_vain(tmp_path, 2, "create")
    files.fails = lambda _name, _number: None
    anew = SessionState(version=1 << 120, ids=ids_of(7, 7), num_turns=1)
    write_new, written = SessionLogFolder.write_new, []

    def write_beside(folder: SessionLogFolder, key: LogKey, content: bytes) -> str:
        if key == first:
            writing = threading.Thread(target=lambda: written.append(write(logs, anew, second)))
            writing.start()
            writing.join(30)
        return write_new(folder, key, content)

    monkeypatch.setattr(SessionLogFolder, "write_new", write_beside)
    logs.read(key_number(99))
    assert written
    assert state_in(logs, second) == anew
    logs.close()


def test_a_log_that_cannot_be_read_now_is_not_an_unknown_one(tmp_path: Path) -> None:
    make = FailingFiles(lambda _operation, _number: None)
    logs = make_logs(tmp_path, files=make)
    write(logs, some_state(1))
    make.fails = lambda name, _number: errno.EMFILE if name == "open_to_read" else None
    with pytest.raises(OSError, match="open files"):
        logs.read(KEY)
    make.fails = lambda _operation, _number: None
    assert state_in(logs) is not None
    logs.close()


class LogsMachine(RuleBasedStateMachine):
    """Turns, deletions and restarts against a dictionary of what was written."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(os.environ["PYTEST_LOGS"]) / str(time.monotonic_ns())
        self.folder.mkdir()
        self.clocks = Clocks()
        self.logs = make_logs(self.folder, self.clocks)
        self.states: dict[int, SessionState] = {}
        self.num_turns = 0

    @rule(number=st.integers(0, 2), num_prompt=st.integers(1, 5), ends=st.booleans())
    def turn(self, number: int, num_prompt: int, ends: bool) -> None:
        state = self.states.get(number) or state_in(self.logs, key_number(number)) or SessionState()
        self.num_turns += 1
        record, state = begin_turn(state, self.num_turns, num_prompt)
        assert self.logs.append(key_number(number), [record]) is Appended.WRITTEN
        if ends:
            record, state = end_turn(state, self.num_turns, num_prompt, 3)
            assert self.logs.append(key_number(number), [record]) is Appended.WRITTEN
        self.states[number] = state

    @rule(number=st.integers(0, 2))
    def rewrite(self, number: int) -> None:
        if number in self.states:
            state = self.states[number]
            state = SessionState(version=state.version + 1, ids=state.ids[:2])
            assert write(self.logs, state, key_number(number)) is Appended.WRITTEN
            self.states[number] = state

    @rule(number=st.integers(0, 2))
    def delete(self, number: int) -> None:
        had = self.states.pop(number, None)
        assert self.logs.delete(key_number(number)) == (had is not None and len(had.ids) > 0)

    @rule()
    def restart(self) -> None:
        self.logs.close()
        self.logs = make_logs(self.folder, self.clocks)

    @rule(number=st.integers(0, 2), cut=st.integers(1, 40))
    def tear(self, number: int, cut: int) -> None:
        """The last record was half written when the machine fell."""
        state = self.states.get(number)
        if state is None:
            return
        self.logs.close()
        path = next(self.folder.rglob(f"{key_number(number).name.hex()}*"))
        with path.open("ab") as file:
            file.write(bytes(range(cut)))
        self.logs = make_logs(self.folder, self.clocks)

    @invariant()
    def logs_are_what_was_written(self) -> None:
        for number in range(3):
            found = state_in(self.logs, key_number(number))
            expected = self.states.get(number)
            assert (found if expected is not None else found is None or not len(found.ids)) == (expected or True)
        assert folder_bytes(self.folder) == self.logs.stats()["used_bytes"]

    def teardown(self) -> None:
        self.logs.close()


def test_logs_against_a_dictionary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_LOGS", str(tmp_path))
    run_state_machine_as_test(LogsMachine, settings=settings(max_examples=60, stateful_step_count=25, deadline=None))


def test_a_deletion_by_record_is_a_tombstone(tmp_path: Path) -> None:
    logs = make_logs(tmp_path)
    write(logs, some_state(1))
    assert logs.append(KEY, [deleted(5)]) is Appended.WRITTEN
    assert logs.stats()["tombstones"] == 1
    logs.close()
