"""Chat templates, rendered where they can do no harm: in worker processes with a deadline and bounded memory.

A render costs about 0.2 ms over the socket and does not hold the interpreter lock. A worker that misses its
deadline is killed and replaced at the next render; others go on meanwhile. Safe to call from any thread.
"""

from __future__ import annotations

import contextlib
import json
import queue
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mneme.errors import InvalidRequest, MnemeError, Overloaded
from mneme.replicas.text.worker import Worker

MAX_RENDER_S = 10.0  # by the clock, on a machine that is busy: a loop has used up its time on a CPU long before
_START_S = 30.0  # for a worker's imports, on a machine that is busy
_SLOT_S = 10.0  # how long a render may wait for a worker
_NUM_WORKERS = 2  # so that one slow conversation does not hold up all others
_SCRIPT = Path(__file__).resolve().with_name("template_worker.py")


class ChatTemplate:
    """One model's template; workers start with `start`, or at the first render."""

    def __init__(self, source: str, variables: Mapping[str, Any], *, max_render_s: float = MAX_RENDER_S) -> None:
        self._source = source
        self._variables = dict(variables)
        self._max_render_s = max_render_s
        self._workers: queue.LifoQueue[Worker | None] = queue.LifoQueue()
        for _ in range(_NUM_WORKERS):
            self._workers.put(None)

    def render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        """Render a prompt's text; raises `InvalidRequest` if the template refuses, fails, or breaks a bound."""
        question = _question({**self._variables, **variables, "messages": list(messages)}, len(messages))
        worker = self._take_worker()
        try:
            worker = worker or _started(self._source)
            answer = worker.ask(question, time.monotonic() + self._max_render_s)
        except (OSError, EOFError) as error:
            rule = f"the chat template {_reason(error, self._max_render_s)}"
            raise InvalidRequest("messages", f"{len(messages)} messages", rule) from error
        finally:
            self._workers.put(_keep_if_sound(worker))
        if "error" in answer:
            rule = f"the chat template refused them: {answer['error']}"
            raise InvalidRequest("messages", f"{len(messages)} messages", rule)
        text: str = answer["text"]
        return text

    def start(self) -> None:
        """Start all workers, and have each compile the template and render a message, so that no request waits for it.

        Raises `MnemeError` if one does not start. What the template does wrong is told to who asks for a render.
        """
        message = {"role": "user", "content": "warm"}
        question = _question({**self._variables, "add_generation_prompt": True, "messages": [message]}, 1)
        workers = [self._take_worker() for _ in range(_NUM_WORKERS)]
        try:
            for index, worker in enumerate(workers):
                workers[index] = worker = worker or _started(self._source)
                with contextlib.suppress(OSError, EOFError):
                    worker.ask(question, time.monotonic() + self._max_render_s)
        finally:
            for worker in workers:
                self._workers.put(_keep_if_sound(worker))

    def close(self) -> None:
        """End the workers at rest; a later render starts new ones. One that renders is ended if it is not sound."""
        for worker in [self._workers.get() for _ in range(self._workers.qsize())]:
            if worker is not None:
                worker.close()
            self._workers.put(None)

    def _take_worker(self) -> Worker | None:
        try:
            return self._workers.get(timeout=_SLOT_S)
        except queue.Empty:
            raise Overloaded("all chat template workers are busy") from None


def _question(variables: Mapping[str, Any], num_messages: int) -> bytes:
    try:
        return json.dumps(variables).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest("messages", f"{num_messages} messages", "must be made of JSON values") from error


def _started(source: str) -> Worker:
    try:
        return Worker(_SCRIPT, {"template": source}, time.monotonic() + _START_S)
    except (OSError, EOFError, ValueError) as error:
        raise MnemeError("the process for chat templates did not start") from error


def _keep_if_sound(worker: Worker | None) -> Worker | None:
    if worker is None or worker.is_sound:
        return worker
    worker.close()
    return None


def _reason(error: Exception, max_render_s: float) -> str:
    if isinstance(error, TimeoutError):
        return f"did not end within {max_render_s:g} s"
    return "took more time or memory than it may"
