"""A process that does for its parent what may take without end: both ends of its socket.

The parent's end is `Worker`. The child's is this file run as a script, `python -I worker.py SCRIPT`: what it does is
SCRIPT's `begin`, which takes the first frame and returns the function that answers the later ones. It is kept from the
parent's packages and memory, and ends when its parent does (end of input).

Protocol, on one socket at file descriptors 0 and 1: frames of a big-endian uint32 length and UTF-8 JSON. The first
one is answered by `{}` when `begin` has returned, each later one by what its answer is. Where that raises the answer is
`{"error": str}`. Only the standard library is imported: a worker starts in the time of what SCRIPT needs.
"""

from __future__ import annotations

import importlib.util
import json
import resource
import signal
import socket
import struct
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

_THIS = Path(__file__).resolve()

Answerer = Callable[[dict[str, Any]], dict[str, Any]]


class Worker:
    """One process and the socket to it. Closed with its last reference, if not before."""

    def __init__(self, script: Path, first: Mapping[str, Any], deadline: float) -> None:
        """Start it; raises what `ask` does, and `ValueError` with what `begin` raised."""
        self._socket, theirs = socket.socketpair()
        command = [sys.executable, "-I", str(_THIS), str(script)]
        with theirs:
            self._process = subprocess.Popen(command, stdin=theirs.fileno(), stdout=theirs.fileno())
        self._end = weakref.finalize(self, _end, self._process, self._socket)
        self._has_answered = False
        try:
            answer = self.ask(json.dumps(first).encode(), deadline)
        except BaseException:
            self.close()
            raise
        if "error" in answer:
            self.close()
            raise ValueError(answer["error"])

    @property
    def is_sound(self) -> bool:
        """Return whether it can be asked: it runs, and has answered what it was asked before."""
        return self._has_answered and self._process.poll() is None

    def ask(self, question: bytes, deadline: float) -> dict[str, Any]:
        """Return the answer; raises `TimeoutError` at the deadline, `EOFError` or `OSError` if the process ended."""
        self._has_answered = False
        self._socket.settimeout(max(deadline - time.monotonic(), 1e-3))
        self._socket.sendall(struct.pack(">I", len(question)) + question)
        size = struct.unpack(">I", self._receive(4, deadline))[0]
        answer: dict[str, Any] = json.loads(self._receive(size, deadline))
        self._has_answered = True
        return answer

    def close(self) -> None:
        self._end()

    def _receive(self, num_bytes: int, deadline: float) -> bytes:
        received = bytearray()
        while len(received) < num_bytes:
            self._socket.settimeout(max(deadline - time.monotonic(), 1e-3))
            part = self._socket.recv(num_bytes - len(received))
            if not part:
                raise EOFError
            received += part
        return bytes(received)


def _end(process: subprocess.Popen[bytes], ours: socket.socket) -> None:
    process.kill()
    process.wait()
    ours.close()


def _read_frame(stream: BinaryIO) -> dict[str, Any] | None:
    """Read the next frame; None at the end of input."""
    header = stream.read(4)
    if len(header) < 4:
        return None
    frame: dict[str, Any] = json.loads(stream.read(struct.unpack(">I", header)[0]))
    return frame


def _write_frame(stream: BinaryIO, frame: dict[str, Any]) -> None:
    payload = json.dumps(frame).encode()
    stream.write(struct.pack(">I", len(payload)) + payload)
    stream.flush()


def _begin_of(script: str) -> Callable[[dict[str, Any]], Answerer]:
    """Load a script's `begin`; its folder is not on the path, and neither is this package."""
    spec = importlib.util.spec_from_file_location("script", script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    begin: Callable[[dict[str, Any]], Answerer] = module.begin
    return begin


def _main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    begin, answerer = _begin_of(sys.argv[1]), None
    while (frame := _read_frame(source)) is not None:
        answer: dict[str, Any] = {}
        try:
            if answerer is None:
                answerer = begin(frame)
            else:
                answer = answerer(frame)
        except MemoryError:
            answer = {"error": "it needs too much memory"}
        except Exception as error:  # the edge of a process that runs foreign code
            answer = {"error": f"{type(error).__name__}: {error}"[:300]}
        _write_frame(sink, answer)


if __name__ == "__main__":
    _main()
