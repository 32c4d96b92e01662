"""The folders of what is made for a user and kept: compiled kernels, costs, digests, models out of packages; KV."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LOCK_TIMEOUT_S = 330.0  # the kernels' compiler has 300


def cache_folder() -> Path:
    """Return the folder, which need not be there. Raises OSError for a user without a home."""
    if chosen := os.environ.get("MNEME_CACHE_DIR"):
        return Path(chosen)
    if chosen := os.environ.get("XDG_CACHE_HOME"):
        return Path(chosen) / "mneme"
    try:
        return Path.home() / ".cache" / "mneme"
    except RuntimeError as error:
        raise FileNotFoundError(str(error)) from None


def state_folder() -> Path:
    """Return the folder of what a server goes on with after a restart, likewise."""
    chosen = Path(os.environ.get("XDG_STATE_HOME", ""))
    if chosen.is_absolute():  # the specification: others are to be ignored
        return chosen / "mneme"
    try:
        return Path.home() / ".local" / "state" / "mneme"
    except RuntimeError as error:
        raise FileNotFoundError(str(error)) from None


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lock out other processes; raises TimeoutError if one keeps the lock for longer than a build may take."""
    deadline = time.monotonic() + _LOCK_TIMEOUT_S
    with path.open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"another process has held {path} for {_LOCK_TIMEOUT_S:.0f} s") from None
                time.sleep(0.05)
        yield
