"""What an engine loop sends to its subscribers, and what it holds back until sessions' logs have it."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mneme.replicas.request import StepMessage, TokenEvent

log = logging.getLogger(__name__)

HOLD_S = 0.05  # no event waits longer for a log: a disk that hangs must not hang clients

Deliver = Callable[[StepMessage], None]
Batches = Mapping[str, list[TokenEvent]]  # by subscriber


class Subscriber:
    """Counts the messages of one token stream. Thread-safe."""

    def __init__(self, deliver: Deliver) -> None:
        self._deliver = deliver
        self._seq = 0
        self._lock = threading.Lock()

    def send(self, epoch: str, events: tuple[TokenEvent, ...]) -> None:
        with self._lock:
            message = StepMessage(epoch, self._seq, events)
            self._seq += 1
            try:
                self._deliver(message)
            except Exception:  # a subscriber's fault must not reach the engine or the others
                log.exception("a token stream could not take its message seq=%s", message.seq)


@dataclass(slots=True, eq=False)
class _Held:
    batches: Batches
    until_s: float


class WithheldEvents:
    """The last events of sessions' turns: sent when the logs have them, by the thread that wrote them. Thread-safe."""

    def __init__(
        self,
        send: Callable[[Batches], None],
        after: Callable[[Callable[[], None]], bool] | None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`after` is `SessionLogWriter.after`; None: there are no logs, and nothing is held back."""
        self._send, self._after, self._clock = send, after, clock
        self._held: deque[_Held] = deque()  # oldest first
        self._lock = threading.Lock()

    def __bool__(self) -> bool:
        return bool(self._held)

    def send(self, batches: Batches) -> None:
        """Now, or as soon as what was said until now is written."""
        held = _Held(batches, self._clock() + HOLD_S)
        with self._lock:
            self._held.append(held)
        if self._after is None or self._after(lambda: self._let_go(held)):
            self._let_go(held)

    def release(self, *, everything: bool = False) -> None:
        """Send what has waited too long."""
        if not self._held:
            return
        now_s = self._clock()
        with self._lock:
            late = [held for held in self._held if everything or held.until_s <= now_s]
        for held in late:
            self._let_go(held)

    def _let_go(self, held: _Held) -> None:
        with self._lock:
            if held not in self._held:
                return  # somebody else was faster
            self._held.remove(held)
        self._send(held.batches)
