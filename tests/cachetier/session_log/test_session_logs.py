"""Session logs in a database: bounds, ages, deletions, what a restart finds, and faults of the disk."""

from __future__ import annotations

import gzip
import os
import random
import sqlite3
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from mneme.cachetier.names import Appended
from mneme.cachetier.session_log.log import MAX_CLOCK_SKEW_S, PAGE_BYTES, SessionLogs
from mneme.cachetier.session_log.log_store import LogKey
from mneme.cachetier.session_log.rows import SessionState, rows_of
from mneme.errors import ConfigError
from tests.budget import examples
from tests.cachetier.nodes import opened
from tests.cachetier.session_records import KEY, begin_turn, conversation, end_turn, ids_of, key_number

STEPS = conversation(5)
LIMIT_S = 20.0
Fails = Callable[[str], int | None]  # a statement that begins so: SQLite's code if it fails


class Clocks:
    """A wall clock, and one that does not jump."""

    def __init__(self) -> None:
        self.wall_s, self.now_s = time.time(), 500.0

    def wall(self) -> float:
        return self.wall_s

    def now(self) -> float:
        return self.now_s

    def pass_s(self, seconds: float) -> None:
        self.wall_s += seconds
        self.now_s += seconds


class Disk:
    """Connections of which a statement fails where `fails` says so; `num_calls` have begun."""

    def __init__(self) -> None:
        self.fails: Fails = lambda _statement: None
        self.num_calls = 0

    def connect(self, path: str, **options: Any) -> sqlite3.Connection:
        disk = self

        class Connection(sqlite3.Connection):
            def execute(self, statement: str, *args: Any) -> sqlite3.Cursor:
                disk.check(statement)
                return super().execute(statement, *args)

            def executemany(self, statement: str, *args: Any) -> sqlite3.Cursor:
                disk.check(statement)
                return super().executemany(statement, *args)

        return sqlite3.connect(path, factory=Connection, **options)

    def check(self, statement: str) -> None:
        self.num_calls += 1
        code = self.fails(statement)
        if code is not None:
            error = sqlite3.OperationalError("disk I/O error")
            error.sqlite_errorcode = code
            raise error


def make_logs(folder: Path, clocks: Clocks | None = None, disk: Disk | None = None, **options: Any) -> SessionLogs:
    clocks = clocks or Clocks()
    connect = sqlite3.connect if disk is None else disk.connect
    return opened(SessionLogs(str(folder), clock=clocks.now, wall_clock=clocks.wall, connect=connect, **options))


def state_in(logs: SessionLogs, key: LogKey = KEY) -> SessionState | None:
    """As a replica reads it; a tombstone is a state without ids."""
    rows = logs.read(key)
    return None if rows is None else rows.state()


def is_gone(logs: SessionLogs, key: LogKey = KEY) -> bool:
    state = state_in(logs, key)
    return state is None or not len(state.ids)


def write(logs: SessionLogs, state: SessionState, key: LogKey = KEY) -> Appended:
    return logs.append(key, rows_of(state))


def some_state(version: int, num_ids: int = 3) -> SessionState:
    return SessionState(version=version, ids=ids_of(version, num_ids), num_turns=1)


def database(folder: Path) -> Path:
    (path,) = folder.rglob("sessions.db")
    return path


def test_what_is_appended_is_read_after_a_restart(tmp_path: Path) -> None:
    for rows, state in STEPS:
        logs = make_logs(tmp_path)
        assert logs.append(KEY, rows) is Appended.WRITTEN
        assert state_in(logs) == state
        assert logs.read(KEY, state.version) is None
        assert logs.read(KEY, state.version - 1) is not None
        logs.close()
    logs = make_logs(tmp_path)
    assert state_in(logs) == STEPS[-1][1]
    assert logs.stats()["sessions"] == 1


def test_files_are_for_this_user_alone(tmp_path: Path) -> None:
    logs = make_logs(tmp_path)
    write(logs, some_state(1))
    folder = database(tmp_path).parent
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}


def test_a_second_process_is_refused_and_a_folder_that_cannot_be_used(tmp_path: Path) -> None:
    logs = make_logs(tmp_path)
    with pytest.raises(ConfigError, match="in use by another cluster"):
        make_logs(tmp_path)
    logs.close()
    make_logs(tmp_path).close()
    with pytest.raises(ConfigError, match="cannot be used"):
        make_logs(tmp_path / "none")
    disk = Disk()
    for statement in ("PRAGMA journal_mode", "PRAGMA quick_check"):
        disk.fails = lambda text, begin=statement: sqlite3.SQLITE_IOERR if text.startswith(begin) else None
        with pytest.raises(ConfigError, match="cannot be used"):
            make_logs(tmp_path, disk=disk)
    path = database(tmp_path)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="cannot be used"):
        make_logs(tmp_path)
    path.unlink()
    make_logs(tmp_path).close()


def test_what_does_not_go_on_from_the_log_is_refused(tmp_path: Path) -> None:
    logs = make_logs(tmp_path)
    rows = [each for each, _ in STEPS]
    assert logs.append(KEY, rows[1]) is Appended.NEEDS_WHOLE
    for each in rows[:2]:
        assert logs.append(KEY, each) is Appended.WRITTEN
    for each in rows[:2]:
        assert logs.append(KEY, each) is Appended.STALE
    assert logs.append(KEY, rows[3]) is Appended.NEEDS_WHOLE
    assert write(logs, STEPS[0][1]) is Appended.STALE
    assert write(logs, STEPS[3][1]) is Appended.WRITTEN
    assert logs.append(KEY, rows[4]) is Appended.WRITTEN
    assert state_in(logs) == STEPS[4][1]
    with pytest.raises(ValueError, match="must be all of a session's"):
        logs.append(KEY, rows[5]._replace(base=None))


def test_what_an_edit_replaces_is_not_kept(tmp_path: Path) -> None:
    """Wherever it goes on: in the last turn, before it, or from nothing."""
    logs, chance, state = make_logs(tmp_path), random.Random(1), SessionState()
    for number in range(200):
        rows, running = begin_turn(state, number)
        assert logs.append(KEY, rows) is Appended.WRITTEN
        rows, ended = end_turn(running, number, 100, 200)
        start = chance.randrange(len(state.ids) + 1) if number % 2 else len(state.ids)
        ended = ended._replace(ids=state.ids[:start] + ids_of(number, 300))
        assert logs.append(KEY, rows_of(ended, running)) is Appended.WRITTEN
        state = ended
        assert state_in(logs) == state
        found = logs.read(KEY)
        assert found is not None
        assert sum(len(turn.ids) for turn in found.turns) == 4 * len(state.ids)


@pytest.mark.parametrize("options", [{"capacity_bytes": 30 * PAGE_BYTES}, {"max_sessions": 10}])
def test_sessions_are_bounded_in_bytes_and_number_and_the_oldest_go(tmp_path: Path, options: dict[str, int]) -> None:
    logs = make_logs(tmp_path, **options)
    for number in range(200):
        assert write(logs, some_state(number + 1, 300), key_number(number)) is Appended.WRITTEN
        assert logs.stats()["used_bytes"] <= logs.stats()["capacity_bytes"]
    kept = [number for number in range(200) if state_in(logs, key_number(number)) is not None]
    assert kept == list(range(200 - len(kept), 200))
    assert len(kept) == 10 or 30 < len(kept) < 90
    is_bounded = "capacity_bytes" in options
    huge = write(logs, some_state(999, 40_000), key_number(999))
    assert huge is (Appended.FAILED if is_bounded else Appended.WRITTEN)
    if is_bounded:  # it would not fit: it costs nobody their log
        assert state_in(logs, key_number(kept[0])) is not None
        logs.close()
        assert database(tmp_path).stat().st_size <= 30 * PAGE_BYTES


def test_a_long_prompt_is_written_once(tmp_path: Path) -> None:
    """It may be a new session's, or not: its prompt is no more obsolete than its past."""
    logs, state, num_ids = make_logs(tmp_path), SessionState(), 0
    for number, num_prompt in enumerate((40_000, 10, 60_000)):
        rows, running = begin_turn(state, number)
        assert logs.append(KEY, rows) is Appended.WRITTEN
        rows, state = end_turn(running, number, num_prompt, 50)
        assert logs.append(KEY, rows) is Appended.WRITTEN
        num_ids += num_prompt + 50
    assert logs.stats()["counters"]["written_bytes"] < 4 * num_ids + PAGE_BYTES
    assert state_in(logs) == state


def test_who_goes_on_at_the_bound_of_sessions_costs_nobody_their_log(tmp_path: Path) -> None:
    logs = make_logs(tmp_path, max_sessions=3)
    for number in range(3):
        assert logs.append(key_number(number), STEPS[0][0]) is Appended.WRITTEN
    assert logs.append(key_number(2), STEPS[1][0]) is Appended.WRITTEN
    assert write(logs, STEPS[3][1], key_number(2)) is Appended.WRITTEN
    assert logs.stats()["sessions"] == 3
    assert logs.delete(key_number(2))
    assert (logs.stats()["sessions"], logs.stats()["tombstones"]) == (2, 1)


def test_tombstones_leave_room_for_sessions(tmp_path: Path) -> None:
    """The latest are kept, in half of the bytes."""
    logs = make_logs(tmp_path, capacity_bytes=24 * PAGE_BYTES)
    for number in range(300):
        assert write(logs, some_state(1), key_number(number)) is Appended.WRITTEN
        assert logs.delete(key_number(number))
    assert logs.stats()["tombstones"] == 12 * PAGE_BYTES // 256
    assert logs.stats()["used_bytes"] <= 24 * PAGE_BYTES
    for number in range(300, 305):
        assert write(logs, some_state(1), key_number(number)) is Appended.WRITTEN
    known = [number for number in range(305) if state_in(logs, key_number(number)) is not None]
    assert known == list(range(300 - 192, 305))


def test_sessions_expire_by_the_time_that_passes_also_while_nothing_runs(tmp_path: Path) -> None:
    clocks = Clocks()
    logs = make_logs(tmp_path, clocks, ttl_s=100.0)
    write(logs, some_state(1), key_number(1))
    own = SessionState(version=2, ids=ids_of(2, 3), ttl_s=30.0)
    write(logs, own, key_number(2))
    clocks.pass_s(31.0)
    assert [state_in(logs, key_number(number)) is not None for number in (1, 2)] == [True, False]
    write(logs, some_state(1), key_number(3))
    assert logs.stats()["sessions"] == 2  # its rows too
    logs.close()
    clocks.wall_s += 60.0
    logs = make_logs(tmp_path, clocks, ttl_s=100.0)
    assert state_in(logs, key_number(1)) is not None
    clocks.now_s += 12.0
    assert state_in(logs, key_number(1)) is None
    clocks.pass_s(120.0)
    write(logs, some_state(1), key_number(4))
    assert logs.stats()["sessions"] == 1


def test_clocks_that_jump_while_it_runs_do_nothing(tmp_path: Path) -> None:
    clocks = Clocks()
    logs = make_logs(tmp_path, clocks, ttl_s=100.0)
    write(logs, some_state(1))
    for jump in (1e9, -2e9):
        clocks.wall_s += jump
        assert state_in(logs) is not None
    logs.close()
    logs = make_logs(tmp_path, clocks, ttl_s=100.0)  # what is from the future is new
    assert state_in(logs) is not None


def test_what_was_deleted_does_not_come_back(tmp_path: Path) -> None:
    clocks = Clocks()
    logs = make_logs(tmp_path, clocks, ttl_s=100.0)
    for rows, _ in STEPS:
        logs.append(KEY, rows)
    copy = logs.read(KEY)
    assert copy is not None
    assert logs.delete(KEY)
    assert not logs.delete(KEY)
    assert not logs.delete(key_number(5))
    for _ in range(2):
        gone = state_in(logs)
        assert gone is not None
        assert (len(gone.ids), gone.version > STEPS[-1][1].version) == (0, True)
        assert logs.append(KEY, copy) is Appended.STALE  # another node's
        assert logs.append(KEY, STEPS[-1][0]) is Appended.STALE
        assert write(logs, STEPS[-1][1]) is Appended.STALE
        assert (logs.stats()["sessions"], logs.stats()["tombstones"]) == (0, 1)
        logs.close()
        logs = make_logs(tmp_path, clocks, ttl_s=100.0)
    clocks.pass_s(100.0 + MAX_CLOCK_SKEW_S - 1)
    assert state_in(logs) is not None
    clocks.pass_s(2)
    assert state_in(logs) is None


def test_a_newer_copy_of_another_node_is_taken_and_an_older_one_is_not(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    one, two = make_logs(tmp_path / "a"), make_logs(tmp_path / "b")
    for rows, _ in STEPS:
        one.append(KEY, rows)
    copy = one.read(KEY)
    assert copy is not None
    assert two.append(KEY, copy) is Appended.WRITTEN
    assert two.append(KEY, copy) is Appended.STALE
    assert two.read(KEY) == copy
    assert state_in(two) == STEPS[-1][1]
    one.delete(KEY)
    tombstone = one.read(KEY)
    assert tombstone is not None
    assert two.append(KEY, tombstone) is Appended.WRITTEN
    assert one.append(KEY, copy) is Appended.STALE


def test_a_tenant_s_sessions_can_be_deleted_together(tmp_path: Path) -> None:
    logs = make_logs(tmp_path)
    for number in range(3):
        write(logs, some_state(1), key_number(number))
    assert logs.delete_tenant(b"x" * 8) == 0
    assert logs.delete_tenant(KEY.tenant) == 3
    assert logs.stats()["sessions"] == 0


def filled(folder: Path, num_sessions: int = 40) -> dict[int, SessionState]:
    """Closed; the states in it."""
    logs, states = make_logs(folder), {}
    for number in range(num_sessions):
        for rows, state in conversation(4, number):
            assert logs.append(key_number(number), rows) is Appended.WRITTEN
            states[number] = state
    logs.close()
    return states


@pytest.mark.parametrize("seed", range(16))
def test_a_database_that_is_damaged_anywhere_gives_what_was_written_or_nothing(tmp_path: Path, seed: int) -> None:
    """Bits that flip, bytes that are overwritten, a file that is cut; afterwards it takes logs as before."""
    chance, states = random.Random(seed), filled(tmp_path)
    path = database(tmp_path)
    content = bytearray(path.read_bytes())
    if seed % 4 == 0:
        del content[chance.randrange(len(content)) :]
    else:
        start, length = chance.randrange(len(content)), 1 if seed % 4 < 3 else 500
        content[start : start + length] = bytes(
            byte ^ 1 << chance.randrange(8) for byte in content[start : start + length]
        )
    path.write_bytes(content)
    logs = make_logs(tmp_path)
    for number, state in states.items():
        try:
            found = state_in(logs, key_number(number))
        except OSError:  # found when it was read: it is set aside now
            continue
        assert found in (None, state)
    counters = logs.stats()["counters"]
    if any(logs.read(key_number(number)) is None for number in states) and seed % 4 == 0:
        assert counters["damaged"] == 1
        assert list(tmp_path.rglob("sessions.damaged.db"))
    later = SessionState(version=1 << 120, ids=ids_of(7, 7), num_turns=1)
    assert write(logs, later, key_number(1)) is Appended.WRITTEN
    assert state_in(logs, key_number(1)) == later
    logs.close()
    logs = make_logs(tmp_path)
    assert state_in(logs, key_number(1)) == later


@pytest.mark.parametrize("num_kept", [1, 3])
def test_ids_that_a_disk_has_changed_are_not_taken_for_sound_where_an_edit_cuts_them(
    tmp_path: Path, num_kept: int
) -> None:
    logs = make_logs(tmp_path)
    state = some_state(1, 4)
    write(logs, state)
    with closing(sqlite3.connect(database(tmp_path), isolation_level=None)) as other:
        other.execute("UPDATE turns SET ids = zeroblob(16)")
    edited = state._replace(version=2, ids=state.ids[:num_kept] + ids_of(9, 2), num_turns=2)
    assert logs.append(KEY, rows_of(edited, state)) is Appended.WRITTEN
    assert logs.read(KEY) is None
    assert logs.stats()["counters"]["damaged"] == 1


def test_a_file_that_is_no_database_or_of_another_format_is_set_aside(tmp_path: Path) -> None:
    filled(tmp_path, 1)
    path = database(tmp_path)
    with closing(sqlite3.connect(path)) as other:
        other.execute("PRAGMA user_version = 1")
    for content in (path.read_bytes(), b"no database" * 1000, b"another"):
        path.write_bytes(content)
        logs = make_logs(tmp_path)
        assert logs.stats()["counters"]["damaged"] == 1
        assert path.with_name("sessions.damaged.db").read_bytes() == content
        assert write(logs, some_state(1)) is Appended.WRITTEN
        logs.close()


def test_a_database_of_format_4_is_read_and_written_on(tmp_path: Path) -> None:
    """format-4.db.gz: what the last version of that format kept of these conversations, and of one it deleted."""
    filled(tmp_path, 0)
    database(tmp_path).write_bytes(gzip.decompress(Path(__file__).with_name("format-4.db.gz").read_bytes()))
    clocks = Clocks()
    clocks.wall_s = 1_700_000_010.0  # ten seconds later
    for attempt in range(2):
        logs = make_logs(tmp_path, clocks)
        assert logs.stats()["sessions"] == 2
        assert logs.stats()["tombstones"] == 1
        assert not logs.stats()["counters"]
        for number in (0, 1):
            *_, (_, state) = conversation(4 + attempt, number)
            assert state_in(logs, key_number(number)) == state._replace(
                forked_from=state.forked_from if attempt else None
            )
        assert is_gone(logs, key_number(2))
        if not attempt:
            for number in (0, 1):
                for rows, _ in conversation(5, number)[-2:]:
                    assert logs.append(key_number(number), rows) is Appended.WRITTEN
        logs.close()


def test_a_row_of_format_4_that_is_damaged_is_dropped(tmp_path: Path) -> None:
    filled(tmp_path, 0)
    path = database(tmp_path)
    path.write_bytes(gzip.decompress(Path(__file__).with_name("format-4.db.gz").read_bytes()))
    with closing(sqlite3.connect(path)) as other, other:
        other.execute("UPDATE sessions SET num_turns = num_turns + 1 WHERE name = ?", (key_number(0).name,))
    clocks = Clocks()
    clocks.wall_s = 1_700_000_010.0
    logs = make_logs(tmp_path, clocks)
    assert logs.read(key_number(0)) is None
    assert logs.read(key_number(1)) is not None
    assert logs.stats()["counters"]["damaged"] == 1


def play(logs: SessionLogs) -> dict[int, SessionState]:
    """What a replica does with it; the last states of which it was told that they are written."""
    written: dict[int, SessionState] = {}
    for number in range(3):
        key = key_number(number)
        for index, (rows, state) in enumerate(conversation(3, number)):
            outcome = logs.append(key, rows)
            if outcome is Appended.NEEDS_WHOLE and index % 2:  # the turn's end
                outcome = write(logs, state, key)
            if outcome is Appended.WRITTEN:
                written[number] = state
            try:
                found = state_in(logs, key)
            except OSError:
                continue
            assert found is None or not len(found.ids) or found in states_of(number)
    try:
        logs.delete(key_number(0))
        written[0] = SessionState()
    except OSError:  # it was not, and whoever asked is told so
        written.pop(0, None)
    return written


def states_of(number: int) -> list[SessionState]:
    return [state for _, state in conversation(3, number)]


@pytest.mark.parametrize("code", [sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL])
def test_any_one_statement_may_fail(tmp_path: Path, code: int) -> None:
    """The k-th one, for every k after the start: a log is behind by what failed, or whole."""
    disk = Disk()
    (tmp_path / "0").mkdir()
    logs = make_logs(tmp_path / "0", disk=disk)
    num_first = disk.num_calls
    assert len(play(logs)) == 3
    logs.close()
    num_counted, last = 0, disk.num_calls
    for number in range(num_first + 1, last + 1, 3):
        folder = tmp_path / str(number)
        folder.mkdir()
        disk = Disk()
        logs = make_logs(folder, disk=disk)
        disk.fails = lambda _, disk=disk, number=number: code if disk.num_calls == number else None
        written = play(logs)
        counters = logs.stats()["counters"]
        num_counted += any(counters.get(name) for name in ("append_failed", "read_failed", "tombstone_failed"))
        logs.close()
        logs = make_logs(folder)
        for session, state in written.items():
            found = state_in(logs, key_number(session))
            if not len(state.ids):
                assert is_gone(logs, key_number(session))
            elif found is None:  # a full disk: the one written longest ago goes
                assert code == sqlite3.SQLITE_FULL
            else:
                assert found in states_of(session)
                assert found.version >= state.version
        logs.close()
    assert num_counted > (last - num_first) // 6


def test_on_a_full_disk_the_session_written_longest_ago_makes_room(tmp_path: Path) -> None:
    disk = Disk()
    logs = make_logs(tmp_path, disk=disk)
    for number in range(3):
        write(logs, some_state(1), key_number(number))
    disk.fails = lambda statement: sqlite3.SQLITE_FULL if "INTO turns" in statement else None
    assert write(logs, some_state(1), key_number(3)) is Appended.FAILED
    disk.fails = lambda _statement: None
    assert logs.stats()["counters"]["disk_full"] == 1
    assert [state_in(logs, key_number(number)) is not None for number in range(4)] == [False, True, True, False]
    assert logs.stats()["sessions"] == 2


def test_a_log_that_cannot_be_read_now_is_not_an_unknown_one(tmp_path: Path) -> None:
    disk = Disk()
    logs = make_logs(tmp_path, disk=disk)
    write(logs, some_state(1))
    disk.fails = lambda _statement: sqlite3.SQLITE_IOERR
    with pytest.raises(OSError, match="I/O error"):
        logs.read(KEY)
    disk.fails = lambda _statement: None
    assert state_in(logs) is not None


def test_a_disk_that_stands_still_for_a_record_holds_up_no_read(tmp_path: Path) -> None:
    disk, entered, go = Disk(), threading.Event(), threading.Event()
    logs = make_logs(tmp_path, disk=disk)
    write(logs, some_state(1))

    def stand_still(statement: str) -> None:
        if statement == "COMMIT":
            entered.set()
            assert go.wait(LIMIT_S)

    disk.fails = stand_still
    with ThreadPoolExecutor(2) as pool:
        stuck = pool.submit(write, logs, some_state(2))
        try:
            assert entered.wait(LIMIT_S)
            assert pool.submit(state_in, logs).result(LIMIT_S / 2) == some_state(1)
            assert pool.submit(logs.stats).result(LIMIT_S / 2)["sessions"] == 1
        finally:
            go.set()
        assert stuck.result(LIMIT_S) is Appended.WRITTEN
    assert state_in(logs) == some_state(2)


def test_calls_from_many_threads_leave_what_each_was_told(tmp_path: Path) -> None:
    logs = make_logs(tmp_path, capacity_bytes=60 * PAGE_BYTES)

    def converse(number: int) -> int:
        """Two threads to a session; versions of one are odd. The last that was written."""
        key, last = key_number(number // 2), 0
        for turn in range(60):
            version = 2 * turn + number % 2 + 1
            if write(logs, some_state(version, 100 * (turn % 30)), key) is Appended.WRITTEN:
                last = version
            logs.read(key)
            if turn % 20 == 19 and number % 2:
                logs.delete(key_number(number // 2 + 50))
        return last

    with ThreadPoolExecutor(8) as pool:
        lasts = list(pool.map(converse, range(8)))
    for session in range(4):
        state = state_in(logs, key_number(session))
        assert state is None or state.version == max(lasts[2 * session : 2 * session + 2])
    assert logs.stats()["used_bytes"] <= 60 * PAGE_BYTES
    assert not {"damaged", "append_failed"} & logs.stats()["counters"].keys()


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
        rows, state = begin_turn(state, self.num_turns)
        assert self.logs.append(key_number(number), rows) is Appended.WRITTEN
        if ends:
            rows, state = end_turn(state, self.num_turns, num_prompt, 3)
            assert self.logs.append(key_number(number), rows) is Appended.WRITTEN
        self.states[number] = state

    @rule(number=st.integers(0, 2))
    def rewrite(self, number: int) -> None:
        if number in self.states:
            state = self.states[number]
            state = state._replace(version=state.version + 1, ids=state.ids[:2])
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

    @invariant()
    def logs_are_what_was_written(self) -> None:
        for number in range(3):
            found = state_in(self.logs, key_number(number))
            expected = self.states.get(number)
            assert found == expected if expected is not None else found is None or not len(found.ids)
        kept, num_states = self.logs.stats(), sum(state is not None for state in self.states.values())
        assert num_states == kept["sessions"]

    def teardown(self) -> None:
        self.logs.close()


@pytest.mark.hypothesis
def test_logs_against_a_dictionary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_LOGS", str(tmp_path))
    run_state_machine_as_test(LogsMachine, settings=settings(max_examples=examples(60), stateful_step_count=25))
