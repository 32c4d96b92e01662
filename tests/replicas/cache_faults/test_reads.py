"""Faults of a disk that is read, under engines on small real models.

In each: the answers are those of an engine that has no tier, within a bounded time; what went wrong is counted; pages,
buffers, descriptors and files are back where they were (`faulty_tier.py`).
"""

from __future__ import annotations

import os
import random
import threading
import time
from pathlib import Path

import pytest

from mneme.replicas.model.decoder import Decoder
from tests.budget import examples
from tests.cachetier.nodes import RefusingMemory
from tests.replicas.cache_faults.saved_turn import NextTurn, Saved
from tests.replicas.chunk_stores import SlowRows
from tests.replicas.faulty_tier import NUM_NEW, WAIT_S, HookedFiles, ask, check_folder, faults_in
from tests.replicas.tiered_engine import draw, full_prefill

PAGE = 4096


def test_without_a_fault_all_is_loaded(next_turn: NextTurn) -> None:
    found = next_turn.ask()
    assert found.cached["turn"] == next_turn.saved.num_history
    assert (found.counters["misses"], found.counters["retracted"]) == (0, 0)
    assert (found.counters["plans_load"], found.counters["store_located"]) == (1, 4)
    assert not any(count for name, count in found.counters.items() if name.startswith("given_up"))


@pytest.mark.at_length
@pytest.mark.timeout(1800)
def test_a_file_is_truncated(next_turn: NextTurn) -> None:
    """Before the engine looks for it; then while it is read, which may be behind what was cut off."""
    path = next_turn.paths[1]
    boundaries = range(0, path.stat().st_size, PAGE)
    assert len(boundaries) > 10
    for length in [0, PAGE, *random.Random(1).sample(boundaries, examples(2, at_length=len(boundaries)))]:
        next_turn.saved.put_into(next_turn.folder)
        found = next_turn.ask_and_miss("misses", when_open=lambda: os.truncate(path, length))  # noqa: B023
        assert found.cached["turn"] <= 64
        next_turn.saved.put_into(next_turn.folder)
        files = HookedFiles()
        files.on_read = lambda name, offset: os.truncate(path, length) if offset and name == str(path) else None  # noqa: B023
        next_turn.ask_and_miss("misses", "disk_miss_short", files=files)


@pytest.mark.at_length
@pytest.mark.timeout(1800)
def test_a_bit_is_flipped(next_turn: NextTurn) -> None:
    """A bit of what is used is found; others, in Arrow's own tables and gaps, do not matter."""
    num_flips = examples(12, at_length=120)
    chance, num_misses = random.Random(num_flips), 0
    for _ in range(num_flips):
        next_turn.saved.put_into(next_turn.folder)
        path = chance.choice(next_turn.paths)
        content = bytearray(path.read_bytes())
        bit = chance.randrange(8 * len(content))
        content[bit // 8] ^= 1 << bit % 8
        path.write_bytes(content)
        found = next_turn.ask()
        is_missed = found.cached["turn"] < next_turn.saved.num_history
        assert is_missed == (found.counters["misses"] > 0), (path, bit)
        num_misses += is_missed
    assert num_misses > num_flips // 2


def test_a_file_is_deleted_before_it_is_opened(next_turn: NextTurn) -> None:
    """Its header is known by then."""
    path, files, opened = str(next_turn.paths[1]), HookedFiles(), []

    def on_open(name: str) -> None:
        opened.append(name)
        if opened.count(path) == 2:
            Path(path).unlink(missing_ok=True)

    files.on_open = on_open
    next_turn.ask_and_miss("disk_miss_absent", files=files)


def test_a_file_that_is_deleted_while_it_is_read_is_read_to_its_end(next_turn: NextTurn) -> None:
    path, files = next_turn.paths[1], HookedFiles()
    files.on_read = lambda name, offset: path.unlink(missing_ok=True) if offset and name == str(path) else None
    assert next_turn.ask(files=files).cached["turn"] == next_turn.saved.num_history
    assert not path.exists()


def test_a_disk_hangs(next_turn: NextTurn) -> None:
    """Rows take 10 ms each, so a load has some 100 ms; the read ends long after the answer."""
    goes_on, files = threading.Event(), HookedFiles()
    files.on_read = lambda name, offset: goes_on.wait(WAIT_S) if offset else None
    found = next_turn.ask(files=files, costs=SlowRows(1e-2, step_s=0.1), before_close=goes_on.set)
    assert found.cached["turn"] == 0
    assert found.counters["given_up_waiting"] + found.counters["given_up_loading"] == 1
    assert found.counters["disk_miss_busy"] == found.counters["misses"] == 0  # nobody knows that it is faulty


def test_no_memory_for_what_is_read(next_turn: NextTurn) -> None:
    files = HookedFiles()

    def refuse(name: str, offset: int) -> None:
        if offset and name == str(next_turn.paths[1]):
            raise MemoryError

    files.on_read = refuse
    found = next_turn.ask(files=files)
    assert found.cached["turn"] == 64
    assert found.counters["disk_miss_busy"] == found.counters["store_disk_miss_busy"] == 1


def test_host_memory_refuses(decoder: Decoder, saved: Saved, tmp_path: Path) -> None:
    """To save into it, and to bring up into it."""
    saved.put_into(tmp_path)
    memory = RefusingMemory()
    memory.is_full = True
    longer = [*saved.turn, *draw(4, 100)]
    found = ask(decoder, tmp_path, {"turn": saved.turn, "longer": longer}, memory=memory)
    assert found.tokens == {"turn": saved.answer, "longer": full_prefill(decoder, longer, NUM_NEW)[0]}
    assert found.counters["store_put_refused"] >= found.counters["host_memory_refused"] > 0
    assert found.counters["chunks_refused"] > 0
    assert found.counters["host_bytes"] == 0


@pytest.mark.parametrize("years", [-30, 30])
def test_the_wall_clock_jumps_while_the_tier_is_down(next_turn: NextTurn, years: int) -> None:
    """Files are as old as the newest of them says: nothing is lost under a TTL of 100 s."""
    time_s = time.time() + years * 365 * 86_400
    for path in next_turn.paths:
        os.utime(path, (time_s, time_s))
    found = next_turn.ask(ttl_s=100.0)
    assert found.cached["turn"] == next_turn.saved.num_history
    assert found.counters["disk_expired"] == 0


def test_what_is_left_after_faults_is_sound(next_turn: NextTurn) -> None:
    """Once it was read; an engine that saves then makes it whole again."""
    content = bytearray(next_turn.paths[2].read_bytes())
    content[len(content) // 2] ^= 1
    next_turn.paths[2].write_bytes(content)
    assert faults_in(next_turn.folder) == 1
    next_turn.ask_and_miss("disk_miss_bad_checksum")
    assert faults_in(next_turn.folder) == 0
    found = ask(next_turn.decoder, next_turn.folder, {"turn": next_turn.saved.turn})
    assert found.tokens["turn"] == next_turn.saved.answer
    assert faults_in(next_turn.folder) == 0
    check_folder(next_turn.folder)
    assert next_turn.ask().cached["turn"] >= next_turn.saved.num_history
