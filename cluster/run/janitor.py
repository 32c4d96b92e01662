"""Leaves nothing behind: whatever ends the parent, ends the rest of its cluster and removes its directory.

    python -m mneme.cluster.run.janitor MARKER DIRECTORY

waits until its standard input closes, which happens when the parent is done with it, and also when the parent
is killed. A process belongs to the cluster if it inherited the marker in its environment, or writes into the
cluster's directory (Ray's workers overwrite their environment with a process title); names say nothing.
Standard library only: it starts in milliseconds and lives as long as the cluster.
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
from typing import NamedTuple

MARKER_VARIABLE = "MNEME_CLUSTER"
_SWEEP_LIMIT_S = 3.0


class Janitor:
    """Is the parent's end of the janitor."""

    def __init__(self, marker: str, directory: Path) -> None:
        self._directory = directory
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
        shutil.rmtree(self._directory, ignore_errors=True)  # Ray in this process, which is spared, may write there late


class Cluster(NamedTuple):
    """Tells a cluster's processes from all others."""

    marker: str
    directory: str

    def processes(self) -> Iterator[int]:
        """Ids of its processes, but for this one and a parent that still lives: it ends by itself."""
        spared = (os.getpid(), os.getppid())
        for entry in os.listdir("/proc"):
            if entry.isdecimal() and int(entry) not in spared and self.owns(int(entry)):
                yield int(entry)

    def owns(self, pid: int) -> bool:
        """Return whether the process is one of the cluster's."""
        return self._is_marked(pid) or self._writes_here(pid)

    def _is_marked(self, pid: int) -> bool:
        needle = f"{MARKER_VARIABLE}={self.marker}".encode()
        with contextlib.suppress(OSError):  # gone, or another user's
            return needle in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        return False

    def _writes_here(self, pid: int) -> bool:
        with contextlib.suppress(OSError):
            for descriptor in os.listdir(f"/proc/{pid}/fd"):
                target = os.readlink(f"/proc/{pid}/fd/{descriptor}")
                if target.startswith(f"{self.directory}/") and _is_writable(pid, descriptor):
                    return True
        return False


def sweep(cluster: Cluster) -> None:
    """Kill its processes until there are none; new ones may be forked while the old ones die."""
    deadline = time.monotonic() + _SWEEP_LIMIT_S
    while time.monotonic() < deadline:
        num_left = 0
        for pid in cluster.processes():  # each at once: on a busy machine the rest competes with the search
            _kill(pid, cluster)
            num_left += 1
        if not num_left:
            return
        time.sleep(0.02)


def _kill(pid: int, cluster: Cluster) -> None:
    with contextlib.suppress(OSError):
        handle = os.pidfd_open(pid)
        try:
            if cluster.owns(pid):  # the id may have been given to another process before it was opened
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        finally:
            os.close(handle)


def _is_writable(pid: int, descriptor: str) -> bool:
    """Return whether a descriptor is open for writing; who only reads a log (`tail -f`) is not ours."""
    for line in Path(f"/proc/{pid}/fdinfo/{descriptor}").read_text(encoding="ascii").splitlines():
        if line.startswith("flags:"):
            return int(line.split()[1], 8) & os.O_ACCMODE != os.O_RDONLY
    return False


def main() -> None:
    """Wait for the end, then clean up."""
    marker, directory = sys.argv[1:]
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    sys.stdin.buffer.read()
    sweep(Cluster(marker, directory))
    shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
