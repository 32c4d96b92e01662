"""Calls from an engine's process to actors of nodes: bounded in time, and not made where they would be in vain."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayError

from mneme.cachetier.distributed.breaker import Breaker

_MAX_LATE = 64
_LATE_S = 1.0  # an answer that takes longer speaks against its node; one that only came after its deadline does not


class Call(NamedTuple):
    """One that was made: to a node, with a name for its counters."""

    node: str
    name: str
    answer: Any
    since_s: float


class Peers:
    """Breakers by node, and counters. `on_dead` hears of a node whose actor is dead for good."""

    def __init__(self, on_dead: Callable[[str], None]) -> None:
        self._breakers: dict[str, Breaker] = {}
        self._lock = threading.Lock()
        self._late: deque[Call] = deque(maxlen=_MAX_LATE)  # oldest first
        self._timer: threading.Timer | None = None  # while there are such
        self._on_dead = on_dead
        self.counters: Counter[str] = Counter()

    def call(self, node: str, name: str, method: Any, *args: Any) -> Call | None:
        """Begin a call; None if that node does not answer these days."""
        if not self._breaker(node).allows():
            self.counters["not_asked"] += 1
            return None
        return Call(node, name, method.remote(*args), time.monotonic())

    def is_up(self, node: str) -> bool:
        """As far as the last calls tell."""
        return not self._breaker(node).is_open

    def answers(self, calls: Sequence[Call | None], deadline_s: float) -> list[Any]:
        """One for each call, None where there is none by the deadline, of `time.monotonic`."""
        return [None if call is None else self._answer(call, deadline_s) for call in calls]

    def _answer(self, call: Call, deadline_s: float) -> Any:
        breaker = self._breaker(call.node)
        try:
            answer = ray.get(call.answer, timeout=max(0.0, deadline_s - time.monotonic()))
        except GetTimeoutError:
            self.counters[f"{call.name}_timeout"] += 1
            with self._lock:
                self._late.append(call)
                self._settle_later()
            return None
        except RayError as error:
            breaker.failed()
            self.counters[f"{call.name}_failed"] += 1
            if isinstance(error, ActorDiedError):
                self._on_dead(call.node)
            return None
        breaker.succeeded()
        return answer

    def _settle_later(self) -> None:
        """Under the lock. Whether or not anybody calls again: answers keep the objects that they name."""
        if self._timer is None:
            self._timer = threading.Timer(_LATE_S, self._settle_late)
            self._timer.daemon = True
            self._timer.start()

    def _settle_late(self) -> None:
        """Calls that missed their deadlines: were they answered after all?"""
        oldest_s = time.monotonic() - _LATE_S
        with self._lock:
            due = list(takewhile(lambda call: call.since_s <= oldest_s, self._late))
            for _ in due:
                self._late.popleft()
            self._timer = None
            if self._late:
                self._settle_later()
        for call in due if ray.is_initialized() else ():
            breaker = self._breaker(call.node)
            if ray.wait([call.answer], timeout=0)[0]:
                breaker.succeeded()
            else:
                breaker.failed()

    def _breaker(self, node: str) -> Breaker:
        return self._breakers.setdefault(node, Breaker())
