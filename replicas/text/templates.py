"""Chat templates, rendered where they can do no harm: in worker processes with a deadline and bounded memory.

A render costs about 0.2 ms over the socket and does not hold the interpreter lock. A worker that misses its
deadline is killed and replaced at the next render; others go on meanwhile. Safe to call from any thread.
"""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import struct
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mneme.errors import InvalidRequest, MnemeError, Overloaded

MAX_RENDER_S = 2.0
_START_S = 30.0  # for a worker's imports, on a machine that is busy
_SLOT_S = 10.0  # how long a render may wait for a worker
_NUM_WORKERS = 2  # so that one slow conversation does not hold up all others
_WORKER = Path(__file__).resolve().with_name("template_worker.py")


class ChatTemplate:
    """One model's template; workers start with `start`, or at the first render."""

    def __init__(self, source: str, variables: Mapping[str, Any], *, max_render_s: float = MAX_RENDER_S) -> None:
        self._source = source
        self._variables = dict(variables)
        self._max_render_s = max_render_s
        self._workers: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        for _ in range(_NUM_WORKERS):
            self._workers.put(None)
        self._close = weakref.finalize(self, _close_all, self._workers)

    def render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        """Render a prompt's text; raises `InvalidRequest` if the template refuses, fails, or breaks a bound."""
        question = _question({**self._variables, **variables, "messages": list(messages)}, len(messages))
        worker = self._take_worker()
        try:
            worker = worker or _Worker(self._source)
            answer = worker.ask(question, time.monotonic() + self._max_render_s)
        except (OSError, EOFError) as error:
            rule = f"the chat template {_reason(error, self._max_render_s)}"
            raise InvalidRequest("messages", f"{len(messages)} messages", rule) from error
        finally:
            self._workers.put(_keep_if_sound(worker))
        if "error" in answer:
            rule = f"the chat template refused them: {answer['error']}"
            raise InvalidRequest("messages", f"{len(messages)} messages", rule)
        return answer["text"]

    def start(self) -> None:
        """Start all workers, and have each compile the template and render a message, so that no request waits for it.

        Raises `MnemeError` if one does not start. What the template does wrong is told to who asks for a render.
        """
        message = {"role": "user", "content": "warm"}
        question = _question({**self._variables, "add_generation_prompt": True, "messages": [message]}, 1)
        workers = [self._take_worker() for _ in range(_NUM_WORKERS)]
        try:
            for index, worker in enumerate(workers):
                workers[index] = worker = worker or _Worker(self._source)
                with contextlib.suppress(OSError, EOFError):
                    worker.ask(question, time.monotonic() + self._max_render_s)
        finally:
            for worker in workers:
                self._workers.put(_keep_if_sound(worker))

    def close(self) -> None:
        """End the workers; a later render starts new ones."""
        _close_all(self._workers)

    def _take_worker(self) -> _Worker | None:
        try:
            return self._workers.get(timeout=_SLOT_S)
        except queue.Empty:
            raise Overloaded("all chat template workers are busy") from None


class _Worker:
    """One process and the socket to it."""

    def __init__(self, source: str) -> None:
        self._socket, theirs = socket.socketpair()
        command = [sys.executable, "-I", str(_WORKER)]
        with theirs:
            self._process = subprocess.Popen(command, stdin=theirs.fileno(), stdout=theirs.fileno())
        self.sound = False  # true between an answer and the next question
        try:
            self.ask(json.dumps({"template": source}).encode(), time.monotonic() + _START_S)
        except (OSError, EOFError) as error:
            self.close()
            raise MnemeError("the process for chat templates did not start") from error

    def ask(self, question: bytes, deadline: float) -> dict[str, str]:
        """Return the answer; raises `TimeoutError` at the deadline, `EOFError` or `OSError` if the process ended."""
        self.sound = False
        self._socket.settimeout(max(deadline - time.monotonic(), 1e-3))
        self._socket.sendall(struct.pack(">I", len(question)) + question)
        size = struct.unpack(">I", self._receive(4, deadline))[0]
        answer: dict[str, str] = json.loads(self._receive(size, deadline))
        self.sound = True
        return answer

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._socket.close()

    def _receive(self, num_bytes: int, deadline: float) -> bytes:
        received = bytearray()
        while len(received) < num_bytes:
            self._socket.settimeout(max(deadline - time.monotonic(), 1e-3))
            part = self._socket.recv(num_bytes - len(received))
            if not part:
                raise EOFError
            received += part
        return bytes(received)


def _question(variables: Mapping[str, Any], num_messages: int) -> bytes:
    try:
        return json.dumps(variables).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest("messages", f"{num_messages} messages", "must be made of JSON values") from error


def _keep_if_sound(worker: _Worker | None) -> _Worker | None:
    if worker is None or worker.sound:
        return worker
    worker.close()
    return None


def _reason(error: Exception, max_render_s: float) -> str:
    if isinstance(error, TimeoutError):
        return f"did not end within {max_render_s:g} s"
    return "broke the bounds of its process"


def _close_all(workers: queue.LifoQueue[_Worker | None]) -> None:
    """Close the workers at rest; a worker that is rendering is closed by its render if it is not sound."""
    at_rest = [workers.get() for _ in range(workers.qsize())]
    for worker in at_rest:
        if worker is not None:
            worker.close()
        workers.put(None)
