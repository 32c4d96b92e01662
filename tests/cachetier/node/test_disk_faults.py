"""Faults of the disk: each is a miss or a write that is skipped, and nothing wrong is ever served."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mneme.cachetier.chunk.header import Chunk
from mneme.cachetier.names import Miss
from mneme.cachetier.node.disk import DiskTier, Put
from mneme.errors import ConfigError
from tests.budget import examples
from tests.cachetier.chunks import (
    OPERATIONS,
    FailingFiles,
    chain_of,
    chunk_files,
    chunk_of,
    failing_at,
    folder_bytes,
    is_payload,
    read_all,
)
from tests.cachetier.conftest import NUM_FOLDERS
from tests.cachetier.kill_writer import CAPACITY_BYTES, chunk_number, open_tier
from tests.cachetier.node.test_disk_tier import make_tier
from tests.cachetier.nodes import BLOCK, Clock

ROOT = Path(__file__).resolve().parents[3]
CHUNKS = [chunk for root in range(3) for chunk in chain_of([root, *range(20)])]
LOCKED = 2 + NUM_FOLDERS  # calls until the folder is ours: its own folder, the lock, those of files
TAILS = [chunk_of([7, 8, 9][:length]) for length in (1, 2, 3)]


def never_fails(_operation: str, _number: int) -> int | None:
    return None


def fresh(folder: Path, number: int) -> Path:
    (folder / str(number)).mkdir()
    return folder / str(number)


def work(tier: DiskTier, folder: Path, num_blocks: int) -> int:
    """Saves, loads and deletes; checks after each; the number of chunks that were read."""
    num_hits = 0
    for saved in (*CHUNKS, *TAILS, *CHUNKS[:4]):
        tier.put(saved)
        assert folder_bytes(folder) <= tier.stats()["bytes"] <= num_blocks * BLOCK
        for chunk in (saved, CHUNKS[0]):
            read = read_all(tier.open(chunk.header.key))
            assert isinstance(read, Miss) or is_payload(read, chunk)
            num_hits += not isinstance(read, Miss)
    tier.delete([CHUNKS[0].header.key])
    return num_hits


def check_clean(folder: Path, num_blocks: int) -> None:
    """A restart without faults finds sound chunks and nothing else."""
    tier = make_tier(folder, num_blocks)
    assert not list(folder.rglob("*.part"))
    assert len(chunk_files(folder)) == tier.stats()["chunks"]
    assert folder_bytes(folder) == tier.stats()["bytes"] <= num_blocks * BLOCK
    for chunk in (*CHUNKS, *TAILS):
        is_there = chunk.header.key in tier
        assert is_payload(read_all(tier.open(chunk.header.key)), chunk) == is_there
    tier.close()


@pytest.mark.usefixtures("few_folders")
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_any_one_call_may_fail(tmp_path: Path, code: int) -> None:
    """The k-th call to the file system fails, for every k after the start."""
    files = FailingFiles(never_fails)
    tier = make_tier(fresh(tmp_path, 0), 6, files=files)
    all_hits = work(tier, tmp_path / "0", 6)
    tier.close()
    num_worse = 0
    for number in range(LOCKED + 1, files.num_calls + 1):
        folder = fresh(tmp_path, number)
        tier = make_tier(folder, 6, files=failing_at(number, code))
        num_hits = work(tier, folder, 6)
        tier.close()
        num_worse += num_hits < all_hits
        assert num_hits >= all_hits // 2, number  # one failure costs a chunk, perhaps that which is asked for most
        check_clean(folder, 6)
    assert num_worse > 20


@pytest.mark.usefixtures("few_folders")
@pytest.mark.parametrize("number", range(1, LOCKED + 1))
def test_a_start_that_fails_is_refused_and_leaves_no_lock(tmp_path: Path, number: int) -> None:
    with pytest.raises(ConfigError, match="cannot be used"):
        make_tier(tmp_path, files=failing_at(number))
    make_tier(tmp_path).close()


@pytest.mark.parametrize("operation", OPERATIONS[3:])
@pytest.mark.parametrize("code", [errno.EIO, errno.EMFILE])
@pytest.mark.usefixtures("few_folders")
def test_all_calls_of_a_kind_may_fail_for_a_while(tmp_path: Path, operation: str, code: int) -> None:
    files, clock = FailingFiles(never_fails), Clock()
    tier = make_tier(tmp_path, 6, files=files, clock=clock)
    work(tier, tmp_path, 6)
    files.fails = lambda name, _number: code if name == operation else None
    work(tier, tmp_path, 6)
    files.fails = never_fails
    clock.now_s += 20  # a pause of writes ends
    assert tier.put(chunk_of([77])) in (Put.WRITTEN, Put.BLOCKED)  # the second: litter had the room until now
    assert tier.put(chunk_of([78])) is Put.WRITTEN
    assert is_payload(read_all(tier.open(chunk_of([78]).header.key)), chunk_of([78]))
    assert folder_bytes(tmp_path) == tier.stats()["bytes"]
    tier.close()
    check_clean(tmp_path, 6)


@pytest.mark.usefixtures("few_folders")
def test_a_read_only_folder_keeps_what_it_has(tmp_path: Path) -> None:
    """Nothing is evicted for chunks that cannot be written."""
    files, clock = FailingFiles(never_fails), Clock()
    tier = make_tier(tmp_path, 20, files=files, clock=clock)
    for number in range(20):
        tier.put(chunk_of([number]))
    writes = ("create", "write", "rename", "unlink")
    files.fails = lambda name, _number: errno.EROFS if name in writes else None
    for number in range(100, 200):
        clock.now_s += 5
        assert tier.put(chunk_of([number])) is not Put.WRITTEN
    sound = [number for number in range(20) if not isinstance(read_all(tier.open(chunk_of([number]).header.key)), Miss)]
    assert len(sound) >= 12
    assert tier.stats()["unlink_failed"] > 0
    files.fails = never_fails
    clock.now_s += 60
    tier.put(chunk_of([300]))
    assert tier.put(chunk_of([301])) is Put.WRITTEN


@pytest.mark.usefixtures("few_folders")
def test_a_full_disk_makes_room_and_then_waits(tmp_path: Path) -> None:
    """The file system has room for four files, less than the bound."""
    clock = Clock()

    def is_full(operation: str, _number: int) -> int | None:
        return errno.ENOSPC if operation == "write" and folder_bytes(tmp_path) >= 4 * BLOCK else None

    tier = make_tier(tmp_path, 50, files=FailingFiles(is_full), clock=clock)
    outcomes = [tier.put(chunk_of([number])) for number in range(12)]
    assert outcomes[:4] == [Put.WRITTEN] * 4
    assert outcomes[4:] == [Put.FAILED, Put.WRITTEN] * 4  # after each failure one chunk goes
    counters = tier.stats()
    assert (counters["disk_full"], counters["write_failed"], counters["evicted"]) == (4, 4, 4)


@pytest.mark.usefixtures("few_folders")
def test_writes_pause_after_failures_in_a_row(tmp_path: Path) -> None:
    files, clock = FailingFiles(never_fails), Clock()
    tier = make_tier(tmp_path, 50, files=files, clock=clock)
    files.fails = lambda name, _number: errno.EIO if name == "write" else None
    outcomes = [tier.put(chunk_of([number])) for number in range(6)]
    assert outcomes == [Put.FAILED] * 3 + [Put.PAUSED] * 3
    clock.now_s += 11
    assert tier.put(chunk_of([0])) is Put.FAILED
    assert tier.put(chunk_of([0])) is Put.PAUSED
    files.fails = never_fails
    clock.now_s += 11
    assert tier.put(chunk_of([0])) is Put.WRITTEN
    assert tier.stats()["write_paused"] == 4


@pytest.mark.usefixtures("few_folders")
def test_too_many_open_files_say_nothing_against_a_chunk(tmp_path: Path) -> None:
    files, chunk = FailingFiles(never_fails), chunk_of([1])
    tier = make_tier(tmp_path, files=files)
    tier.put(chunk)
    files.fails = lambda name, _number: errno.EMFILE if name == "open_to_read" else None
    assert tier.open(chunk.header.key) is Miss.BUSY
    files.fails = never_fails
    assert is_payload(read_all(tier.open(chunk.header.key)), chunk)


def kill_and_check(folder: Path, seed: int, way: str, sound: dict[str, Chunk]) -> int:
    """Kill a writer at a random moment; the number of chunks that a restart then finds, all of them right."""
    command = [sys.executable, "-m", "tests.cachetier.kill_writer", str(folder), str(seed), way]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *sys.path])}
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT, env=environment) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"ready\n"
        with pytest.raises(ConfigError, match="in use"):
            open_tier(str(folder))
        deadline_s = time.monotonic() + 60.0
        while not chunk_files(folder):  # a busy machine may let it write nothing for a while
            assert time.monotonic() < deadline_s
        with pytest.raises(subprocess.TimeoutExpired):
            writer.wait(0.02 + 0.3 * random.Random(seed).random())
        writer.kill()
    tier = open_tier(str(folder))
    assert not list(folder.rglob("*.part"))
    assert folder_bytes(folder) == tier.stats()["bytes"] <= CAPACITY_BYTES
    files = chunk_files(folder)
    assert len(files) == tier.stats()["chunks"]
    for path in files:
        chunk = sound[path.name[:32]]
        assert is_payload(read_all(tier.open(chunk.header.key)), chunk)
    tier.close()
    return len(files)


@pytest.mark.at_length
@pytest.mark.parametrize(("way", "num_kills"), [("direct", 5), ("behind", 3)])
def test_a_writer_that_is_killed_leaves_only_sound_chunks(tmp_path: Path, way: str, num_kills: int) -> None:
    chunks = [chunk_number(number) for number in range(320)]
    sound = {chunk.header.key.hex(): chunk for chunk in chunks}
    found = [kill_and_check(tmp_path, seed, way, sound) for seed in range(examples(num_kills, at_length=8))]
    assert min(found) > 0
