"""A model's quality report is made behind traffic by a process that goes and pauses as told, and leaves no half."""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mneme.replicas.blend.first_report import IDLE_S, LIMIT_S, PAUSE_S, FirstReport, measuring
from mneme.replicas.blend.gate import NO_REPORT, Gate

pytestmark = pytest.mark.policy

ALLOWED = Gate({"hkvd": 0.2}, ratios=(0.2,), has_report=True)
# Writes what it is told into `heard`, and ends as its argument says once it was told three times.
MEASURES = """
import os, sys
folder, ending = sys.argv[1:]
heard = b""
while len(heard) < 3:
    heard += os.read(0, 1) or sys.exit(1)
    with open(folder + "/heard", "wb") as file:
        file.write(heard)
if ending == "fails":
    sys.exit("no such model")
open(folder + "/report", "w").close()
"""


class Play:
    """One engine's measurement under a clock of the test's own."""

    def __init__(self, folder: Path, ending: str = "reports", weights_bytes: int = 0) -> None:
        self.folder, self.now_s = folder, 0.0
        command = [sys.executable, "-c", MEASURES, str(folder), ending]
        self.report = FirstReport(
            command, folder=folder, read=self.read, weights_bytes=weights_bytes, clock=lambda: self.now_s
        )

    def read(self) -> Gate:
        return ALLOWED if (self.folder / "report").exists() else NO_REPORT

    def idle(self, seconds: float = 0.0) -> Gate | None:
        self.now_s += seconds
        return self.report.poll(is_idle=True)

    def heard(self) -> str:
        path = self.folder / "heard"
        return path.read_text() if path.exists() else ""


Begin = Callable[..., Play]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    plays = list[Play]()

    def make(*given: object) -> Play:
        plays.append(Play(tmp_path, *given))  # type: ignore[arg-type]
        return plays[-1]

    yield make
    for play in plays:
        play.report.close()


def until(happens: Callable[[], bool]) -> None:
    while not happens():
        os.sched_yield()


def end(play: Play) -> Gate:
    """Let it come to its end; return what is told then."""
    found: Gate | None = None
    while found is None:
        play.report.poll(is_idle=False)
        found = play.idle()
    return found


def test_it_begins_after_a_minute_without_work_and_steps_only_while_there_is_none(begin: Begin) -> None:
    play = begin()
    assert play.idle() is None
    assert play.idle(IDLE_S - 1) is None
    play.report.poll(is_idle=False)
    assert play.idle(2) is None  # the minute began anew
    told = play.idle(IDLE_S)
    assert told is not None
    assert (told.allowed, told.described()) == ({}, "the quality report of this model is being measured")
    until(lambda: play.heard() == "1")
    assert play.idle(1) is None  # nothing is new
    for _ in range(2):
        assert play.report.poll(is_idle=False) is None
    until(lambda: play.heard() == "10")
    assert end(play) == ALLOWED
    assert play.heard() == "101"
    assert play.idle(10 * IDLE_S) is None


def test_one_at_a_time_measures_and_others_read_what_it_found(begin: Begin) -> None:
    first, second = begin(), begin()
    for play in (first, second):
        assert play.idle() is None
    for play in (first, second):
        told = play.idle(IDLE_S)
        assert told is not None
        assert "is being measured" in told.why
    assert second.idle(IDLE_S - 1) is None  # it looks once a minute
    assert end(first) == ALLOWED
    assert second.idle(1) == ALLOWED
    assert second.idle(IDLE_S) is None


def test_what_fails_is_said_and_not_tried_again(begin: Begin, tmp_path: Path) -> None:
    play = begin("fails")
    play.idle()
    play.idle(IDLE_S)
    failed = end(play)
    assert failed.allowed == {}
    assert "could not be measured" in failed.why
    assert Path(failed.why.split(": ")[1].removesuffix(" says why")).read_text() == "no such model\n"
    assert play.idle(10 * IDLE_S) is None
    assert begin().idle() is None  # the next start's


def test_one_that_is_closed_ends_and_leaves_the_lock_to_others(begin: Begin, tmp_path: Path) -> None:
    play = begin()
    play.idle()
    play.idle(IDLE_S)
    play.report.close()
    with (tmp_path / "quality.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert not (tmp_path / "report").exists()
    assert play.idle(IDLE_S) is None


@pytest.mark.parametrize(
    ("weights_bytes", "folder", "said"),
    [(2**29, ".", "no memory for it"), (2**31, ".", "by hand"), (0, "nowhere", "No such file")],
)
def test_what_cannot_begin_is_said(
    weights_bytes: int, folder: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if weights_bytes == 2**29:
        monkeypatch.setattr("mneme.replicas.blend.first_report.available_bytes", lambda: 2**30)
    play = Play(tmp_path / folder, "reports", weights_bytes)
    play.idle()
    told = play.idle(IDLE_S)
    assert told is not None
    assert (told.allowed, said in told.why) == ({}, True)
    assert play.idle(IDLE_S) is None


def test_a_child_that_reads_nothing_holds_nobody_up(tmp_path: Path) -> None:
    """Thousands of requests, each a byte for it: its pipe is full at 65,536."""
    hangs = [sys.executable, "-c", "import time; time.sleep(600)"]
    report = FirstReport(hangs, folder=tmp_path, read=lambda: NO_REPORT, weights_bytes=0, clock=lambda: 0.0)
    report._idle_since_s = -IDLE_S
    assert report.poll(is_idle=True) is not None
    found: Gate | None = None
    for _ in range(40_000):
        report.poll(is_idle=False)
        found = found or report.poll(is_idle=True)
    until(lambda: (found or report.poll(is_idle=True)) is not None)


def test_one_that_pauses_for_long_gives_its_memory_back_and_begins_anew(begin: Begin) -> None:
    play = begin()
    play.idle()
    play.idle(IDLE_S)
    until(lambda: play.heard() == "1")
    play.report.poll(is_idle=False)
    until(lambda: play.heard() == "10")
    play.now_s += PAUSE_S
    play.report.poll(is_idle=False)
    assert play.report._process is None
    (play.folder / "heard").unlink()
    assert play.idle() is None
    assert play.idle(IDLE_S) is not None
    until(lambda: play.heard() == "1")
    assert end(play) == ALLOWED


def test_a_server_that_is_never_idle_for_long_stops_beginning_anew(begin: Begin) -> None:
    play, told = begin(), None
    for _ in range(6):
        play.idle()
        told = play.idle(IDLE_S)
        play.report.poll(is_idle=False)
        play.now_s += PAUSE_S
        play.report.poll(is_idle=False)
    assert told is not None
    assert "never idle for long enough" in told.why
    assert play.idle(10 * IDLE_S) is None


def test_one_that_takes_for_ever_is_ended(begin: Begin) -> None:
    play = begin()
    play.idle()
    play.idle(IDLE_S)
    told = play.idle(LIMIT_S)
    assert told is not None
    assert "within 4 hours" in told.why
    assert play.idle(IDLE_S) is None


def test_the_command_is_one_of_this_package() -> None:
    command = measuring("smollm2", "bfloat16", "auto", "auto", Path("kept"))
    assert command[:5] == [sys.executable, "-m", "mneme", "quality", "smollm2"]
    assert command[command.index("--dtype") + 1] == "bfloat16"
