"""What is said of a replica that could not start: never that it died alone."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from mneme.cluster.serve.start_failure import StartNote, reason_of

pytestmark = pytest.mark.policy

DIED = "The deployment failed to start 2 times in a row.\nSee controller logs for details. Error:\nActorDiedError()"
SEGFAULT = """:actor_name:ServeReplica:mneme:engine
Fatal Python error: Segmentation fault

Current thread 0x00007f08 (most recent call first):
  File "/x/OSError.py", line 12 in _read_error
Extension modules: numpy.error, yaml._yaml (total: 18)
"""
LOG = """INFO 2026-11-27 01:42:16,101 mneme_engine r1 -- Started initializing replica.
INFO 2026-11-27 01:42:17,546 mneme_engine r1 -- terminate called: CUDA error: bad access
INFO 2026-11-27 01:42:17,549 mneme_engine r1 -- and so on
"""


@pytest.fixture
def dead_pid() -> int:
    with subprocess.Popen(["true"]) as process:
        return process.pid


def write(logs: Path, name: str, text: str) -> None:
    (logs / name).parent.mkdir(exist_ok=True)
    (logs / name).write_text(text)


def test_an_exception_is_said_as_it_was_raised(tmp_path: Path) -> None:
    raised = "mneme.errors.CheckpointError: w: has shape [1], not [2]"
    message = f"...Error:\nTraceback\nray.exceptions.RayTaskError: x\n{raised}\n"
    assert reason_of(["", message], {}, tmp_path) == "CheckpointError: w: has shape [1], not [2]"
    assert reason_of(["Deployment is updating.", ""], {}, tmp_path) is None


@pytest.mark.parametrize("died", [DIED, "x\nray.exceptions.ActorDiedError: The actor died unexpectedly"])
def test_of_a_process_that_died_its_last_words_and_how_far_it_was_are_said(
    tmp_path: Path, dead_pid: int, died: str
) -> None:
    notes = {
        "r0": StartNote("ready", 1.0, dead_pid),  # long ago
        "r1": StartNote("loading weights", 0.4, dead_pid),
        "r2": StartNote("kernels", 0.1, os.getpid()),  # it goes on
    }
    silent = reason_of([died], notes, tmp_path)
    assert silent is not None
    assert silent.startswith("a replica died while it started, behind loading weights (40%): its log does not say why")
    assert "memory" in silent
    write(tmp_path, f"worker-ab-01-{dead_pid}.err", SEGFAULT)
    assert str(reason_of([died], notes, tmp_path)).endswith("(40%): Fatal Python error: Segmentation fault")
    (tmp_path / f"worker-ab-01-{dead_pid}.err").unlink()
    write(tmp_path, "serve/replica_mneme_engine_r1.log", LOG)
    assert str(reason_of([died], notes, tmp_path)).endswith("(40%): terminate called: CUDA error: bad access")


def test_whose_log_says_something_is_named_before_one_that_says_nothing(tmp_path: Path, dead_pid: int) -> None:
    notes = {name: StartNote(name, 0.5, dead_pid) for name in ("r0", "r1", "r2")}
    write(tmp_path, "serve/replica_mneme_engine_r1.log", LOG)
    assert "behind r1 (50%): terminate called" in str(reason_of([DIED], notes, tmp_path))
    assert reason_of([DIED], {}, tmp_path) == "a replica's process died before it began to load"
