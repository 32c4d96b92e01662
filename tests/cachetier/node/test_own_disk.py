"""The disk tier of a server that was told of none: a private folder of its user's, which no two servers share."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

from mneme.cachetier.chunk.syscalls import FileOperations, HeldLock
from mneme.cachetier.config import DiskTierConfig
from mneme.cachetier.node import own_disk as folder_module
from mneme.cachetier.node.folder import DiskFolder
from mneme.cachetier.node.own_disk import take_own_disk

GIB = 2**30


class Usage(NamedTuple):
    total: int
    used: int
    free: int


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    disk_of(monkeypatch, 100 * GIB)
    return tmp_path / "state" / "mneme"


@pytest.fixture
def held() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def disk_of(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr(folder_module.shutil, "disk_usage", lambda path: Usage(2 * free, free, free))  # type: ignore[attr-defined]


def taken(held: ExitStack) -> DiskTierConfig:
    found = take_own_disk(held, pytest.fail)
    assert found is not None
    return found


def test_each_server_has_a_folder_and_the_next_one_has_that_of_one_that_ended(state: Path, held: ExitStack) -> None:
    with ExitStack() as first:
        assert taken(first) == DiskTierConfig(folder=str(state / "kv-0"), capacity_bytes=10 * GIB)
        assert taken(held).folder == str(state / "kv-1")
        DiskFolder(str(state / "kv-0"), FileOperations()).close()  # the tier itself locks it anew
    assert taken(held).folder == str(state / "kv-0")
    for folder in (state, state / "kv-0", state / "kv-1"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_server_that_is_still_ending_is_waited_for(state: Path, held: ExitStack) -> None:
    """It was killed, so the next one has its number, but a process of its own has the folder for another moment."""
    taken(held)
    held.close()
    ending = DiskFolder(str(state / "kv-0"), FileOperations())

    class Ends(folder_module.LockWaitingFiles):  # type: ignore[name-defined, misc]
        def lock(self, path: str) -> int:
            with pytest.raises(BlockingIOError):
                HeldLock(FileOperations(), path)
            ending.close()
            return super().lock(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folder_module, "LockWaitingFiles", Ends)
        assert taken(held).folder == str(state / "kv-0")


@pytest.mark.parametrize(("free_gib", "capacity_gib"), [(5.1, 0.51), (4.9, None), (640, 64), (10_000, 64)])
def test_it_takes_a_tenth_of_what_is_free_within_bounds(
    free_gib: float, capacity_gib: float | None, monkeypatch: pytest.MonkeyPatch, held: ExitStack
) -> None:
    disk_of(monkeypatch, int(free_gib * GIB))
    if capacity_gib is None:
        assert "is nearly full" in refused(held)
    else:
        assert taken(held).capacity_bytes == pytest.approx(capacity_gib * GIB)


def test_what_it_wrote_itself_counts_as_free(state: Path, monkeypatch: pytest.MonkeyPatch, held: ExitStack) -> None:
    """Else a tier that was full is off at the next start, and what it kept lies there unseen."""
    taken(held)
    held.close()
    with (state / "kv-0" / "mneme-kv-1" / "chunk").open("wb") as file:
        file.truncate(GIB)  # of holes
    disk_of(monkeypatch, int(4.9 * GIB))
    assert taken(held).capacity_bytes == pytest.approx(0.59 * GIB, rel=1e-6)


def test_a_folder_that_cannot_be_used_is_passed_over(state: Path, held: ExitStack) -> None:
    (state / "kv-0" / "mneme-kv-1").mkdir(parents=True)
    (state / "kv-0" / "mneme-kv-1").chmod(0o777)
    state.chmod(0o700)
    assert taken(held).folder == str(state / "kv-1")


def test_a_folder_that_no_server_had_for_a_week_is_removed(state: Path, held: ExitStack) -> None:
    with ExitStack() as all_three:
        for _ in range(3):
            taken(all_three)
    for number in (1, 2):
        age(state / f"kv-{number}")
    (state / "kv-2" / "mneme-kv-1" / "chunk").touch()
    taken(held)
    assert sorted(path.name for path in state.iterdir()) == ["kv-0", "kv-2"]


@pytest.mark.parametrize("lock", ["lock", "mneme-kv-1/lock"])
def test_a_folder_that_somebody_has_is_not_removed_however_old(lock: str, state: Path, held: ExitStack) -> None:
    """A server that wrote nothing for a week, or a process that one left behind."""
    with ExitStack() as both:
        for _ in range(2):
            taken(both)
    held.callback(HeldLock(FileOperations(), str(state / "kv-1" / lock)).close)
    age(state / "kv-1")
    taken(held)
    assert sorted(path.name for path in state.iterdir()) == ["kv-0", "kv-1"]


def test_a_week_begins_when_a_folder_is_given_back(state: Path, held: ExitStack) -> None:
    with ExitStack() as both:
        for _ in range(2):
            taken(both)
        age(state / "kv-1")
    taken(held)
    assert (state / "kv-1").is_dir()


def test_a_full_disk_keeps_nothing_that_is_abandoned(
    state: Path, monkeypatch: pytest.MonkeyPatch, held: ExitStack
) -> None:
    with ExitStack() as both:
        for _ in range(2):
            taken(both)
    age(state / "kv-0")
    age(state / "kv-1")
    (state / "kv-3.gone-17").mkdir()  # of a server that was killed while it removed one
    disk_of(monkeypatch, 4 * GIB)
    assert "nearly full" in refused(held)
    assert [*state.iterdir()] == []


def age(folder: Path) -> None:
    for path in (*folder.rglob("*"), folder):
        os.utime(path, (0, 0))


def refused(held: ExitStack) -> str:
    said = list[str]()
    assert take_own_disk(held, said.append) is None
    return " ".join(said)


def test_who_has_no_folder_of_his_own_has_no_disk(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: ExitStack
) -> None:
    state.mkdir(parents=True)
    state.chmod(0o777)
    assert "others may write to it" in refused(held)
    monkeypatch.setenv("XDG_STATE_HOME", os.devnull)
    assert refused(held) == ""  # which is how to ask for none
    monkeypatch.setenv("XDG_STATE_HOME", "state")  # not absolute: ignored
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert taken(held).folder == str(tmp_path / ".local" / "state" / "mneme" / "kv-0")
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    assert "no home" in refused(held)
