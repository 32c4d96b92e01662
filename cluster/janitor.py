"""Leaves nothing behind: ends every process of one cluster and removes its directory, whatever ends the parent.

    python -m mneme.cluster.janitor MARKER DIRECTORY

waits until its standard input closes, which happens when the parent is done with it, and also when the parent is
killed. Processes of the cluster are told by an environment variable they inherit, never by name. Standard library
only: it starts in milliseconds and lives as long as the cluster.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

MARKER_VARIABLE = "MNEME_CLUSTER"
_SWEEP_LIMIT_S = 3.0


class Janitor:
    """The parent's end."""

    def __init__(self, marker: str, directory: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-E", os.path.abspath(__file__), marker, str(directory)],
            stdin=subprocess.PIPE,
            start_new_session=True,  # a Ctrl-C in the terminal is not for it
        )

    def clean(self, limit_s: float = _SWEEP_LIMIT_S + 1.0) -> None:
        """End what is left of the cluster and remove its directory; may be called twice, from any thread."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(limit_s)


def marked_processes(marker: str) -> Iterator[int]:
    """Process ids whose environment carries the marker, this process left out."""
    needle = f"{MARKER_VARIABLE}={marker}".encode()
    for entry in os.listdir("/proc"):
        if entry.isdecimal() and int(entry) != os.getpid() and needle in _environment(int(entry)):
            yield int(entry)


def sweep(marker: str) -> None:
    """Kill marked processes until there are none; new ones may be forked while the old ones die."""
    deadline = time.monotonic() + _SWEEP_LIMIT_S
    while time.monotonic() < deadline:
        pids = list(marked_processes(marker))
        if not pids:
            return
        for pid in pids:
            _kill(pid, marker)
        time.sleep(0.02)


def _kill(pid: int, marker: str) -> None:
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return
    try:
        # The id may have been given to another process: what the handle holds is looked at once more.
        if f"{MARKER_VARIABLE}={marker}".encode() in _environment(pid):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
    except OSError:
        pass
    finally:
        os.close(handle)


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # gone, or another user's
        return []


def main() -> None:
    """Wait for the end, then clean up."""
    marker, directory = sys.argv[1:]
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    sys.stdin.buffer.read()
    sweep(marker)
    shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
