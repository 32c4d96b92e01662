"""`mneme serve` as a process of its own: started, waited for, stopped, and checked to have left nothing."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

START_LIMIT_S = 300.0
_STOP_LIMIT_S = 180.0  # on a machine that is busy with other things
REPOSITORY = Path(__file__).parents[2]
SERVE = (sys.executable, "-m", "mneme.cluster.cli.main", "serve")
SERVE_LOCAL = (sys.executable, "-m", "tests.fakes.serve_local")  # where there is no Ray
SERVE_FAKE = (sys.executable, "-m", "tests.fakes.serve_fake")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class ServerProcess:
    """One server; `marker` is an environment variable that all of its processes were started with."""

    def __init__(self, command: Sequence[str], **settings: str) -> None:
        """`settings`: environment variables of its own."""
        self.temp_dir = Path(tempfile.mkdtemp(prefix="mt-", dir="/tmp"))  # short: Ray's sockets lie in there
        self.marker = f"MNEME_TEST_RUN={self.temp_dir.name}"
        name, value = self.marker.split("=")
        environment = {**os.environ, name: value, "TMPDIR": str(self.temp_dir), "RAY_AUTH_MODE": "token"}
        paths = (REPOSITORY / "src", REPOSITORY)  # this tree, and the fakes by name, in every process
        environment["XDG_STATE_HOME"] = os.devnull  # each begins without KV, unless it is told where some is
        environment["PYTHONPATH"] = os.pathsep.join(map(str, paths))
        environment |= settings
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=REPOSITORY,
            start_new_session=True,
        )
        self.lines: list[str] = []
        self._has_spoken = threading.Condition()
        self._readers = [
            threading.Thread(target=self._read, args=(stream,), daemon=True)
            for stream in (self.process.stdout, self.process.stderr)
        ]
        for reader in self._readers:
            reader.start()

    def await_ready(self) -> str:
        """The base URL, once the server says that it is ready."""
        return self.await_line("ready:").split()[1]

    def await_line(self, begin: str) -> str:
        """The first line that begins so, once it is there."""
        deadline = time.monotonic() + START_LIMIT_S
        with self._has_spoken:
            while (found := self._line(begin)) is None:
                left_s = deadline - time.monotonic()
                assert self.process.poll() is None, f"the server ended: {self.lines}"
                assert left_s > 0, f"no {begin!r} after {START_LIMIT_S:g} s: {self.lines}"
                self._has_spoken.wait(min(left_s, 1.0))
        return found

    def ready_seconds(self) -> float:
        match = re.search(r"seconds=([\d.]+)", self._line("ready:") or "")
        assert match is not None
        return float(match[1])

    def stop(self, number: int = signal.SIGINT, *, whole_group: bool = False) -> None:
        """Send a signal, to the process alone or as a terminal does, and wait for its end."""
        if whole_group:
            os.killpg(self.process.pid, number)
        else:
            self.process.send_signal(number)
        self.process.wait(_STOP_LIMIT_S)

    def left_behind(self) -> list[str]:
        """Processes of this server that still run, and files it left."""
        processes = [f"{pid}: {command}" for pid, command in self.processes().items()]
        return processes + [str(path) for path in self.temp_dir.iterdir()]

    def await_nothing_left(self) -> None:
        deadline = time.monotonic() + _STOP_LIMIT_S
        while left := self.left_behind():
            assert time.monotonic() < deadline, left
            time.sleep(0.05)

    def processes(self) -> dict[int, str]:
        """Command lines by pid of everything that inherited this server's environment or writes to its directory."""
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal() and int(entry.name) != os.getpid() and self._is_mine(entry):
                found[int(entry.name)] = _read(entry / "cmdline").replace("\0", " ").strip()
        return found

    def discard(self) -> None:
        """Whatever happened before: end the processes, remove the directory."""
        for pid in self.processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait(10)
        for reader in self._readers:
            reader.join(5)
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()
        subprocess.run(["rm", "-rf", str(self.temp_dir)], check=True)

    def _is_mine(self, entry: Path) -> bool:
        if self.marker in _read(entry / "environ").split("\0"):
            return "<defunct>" not in _read(entry / "cmdline")
        try:
            return any(
                os.readlink(descriptor).startswith(f"{self.temp_dir}/") for descriptor in (entry / "fd").iterdir()
            )
        except OSError:
            return False

    def _line(self, begin: str) -> str | None:
        return next((line for line in self.lines if line.startswith(begin)), None)

    def _read(self, stream: object) -> None:
        for line in stream:  # type: ignore[attr-defined]
            with self._has_spoken:
                self.lines.append(line.rstrip("\n"))
                self._has_spoken.notify_all()


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode(errors="replace")
    except OSError:
        return ""


@contextmanager
def running(*command: str, **settings: str) -> Iterator[ServerProcess]:
    """Start a process, with `settings` in its environment; whatever happens within, nothing of it is left."""
    process = ServerProcess(command, **settings)
    try:
        yield process
    finally:
        process.discard()


@contextmanager
def tiered(folder: Path, model: str = "mneme-tiny", *more: str) -> Iterator[tuple[ServerProcess, httpx.Client]]:
    """Start two replicas in float32 over a cache tier with a disk, which loads whatever that takes this machine."""
    disk = {"folder": str(folder), "capacity_bytes": 256 * 2**20}
    settings = ("engine.dtype=float32", "cache.load=always", f"cache.disk={json.dumps(disk)}")
    given = [*more, *(part for each in settings for part in ("--set", each))]
    with (
        running(*SERVE, model, "--replicas", "2", "--port", str(free_port()), *given) as process,
        httpx.Client(base_url=process.await_ready(), timeout=240) as http,
    ):
        yield process, http


@contextmanager
def serving(*command: str) -> Iterator[ServerProcess]:
    """Start a server and wait until it answers; it then has to stop in order and to leave nothing behind."""
    with running(*command) as process:
        process.await_ready()
        yield process
        process.stop()
        assert process.process.returncode == 0, process.lines
        assert process.left_behind() == []
