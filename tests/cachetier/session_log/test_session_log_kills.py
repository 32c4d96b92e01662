"""A process that is killed while it writes leaves what it told of, and whole turns."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.budget import examples
from tests.cachetier.kill_log_writer import NUM_SESSIONS, expected_ids, open_logs, read

ROOT = Path(__file__).resolve().parents[3]


def run_until_killed(folder: Path, seed: int) -> dict[int, int]:
    """Turns by session, as far as it told."""
    command = [sys.executable, "-m", "tests.cachetier.kill_log_writer", str(folder), str(seed)]
    told: dict[int, int] = {}
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        for _ in range(random.Random(seed).randrange(1, 120)):
            number, num_turns = map(int, process.stdout.readline().split())
            told[number] = num_turns
        process.kill()
        for line in process.stdout.read().splitlines(keepends=True):  # told before the kill
            if line.endswith("\n"):
                number, num_turns = map(int, line.split())
                told[number] = num_turns
    return told


def check(folder: Path, told: dict[int, int]) -> None:
    logs = open_logs(str(folder))
    for number in range(NUM_SESSIONS):
        state = read(logs, number)
        assert state.ids.tolist() == expected_ids(state.num_turns)
        if number in told:  # what it told of, and maybe the turn or the deletion after it
            assert state.num_turns in (told[number], told[number] + 1, 0)
            assert state.num_turns or told[number] in (0, 40)
    assert not list(folder.rglob("*.part"))
    logs.close()


@pytest.mark.at_length
def test_whoever_is_killed_leaves_whole_turns(tmp_path: Path) -> None:
    told: dict[int, int] = {}
    for seed in range(examples(4, at_length=8)):
        told |= run_until_killed(tmp_path, seed)
        check(tmp_path, told)
