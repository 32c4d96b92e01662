"""Calls from an engine's process to actors of nodes: bounded in time, and not made where they would be in vain."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayError

from mneme.cachetier.breaker import Breaker


class Call:
    """One that was made: to a node, with a name for its counters."""

    def __init__(self, node: str, name: str, answer: Any) -> None:
        self.node, self.name, self.answer = node, name, answer


class Peers:
    """Breakers by node, and counters. `on_dead` hears of a node whose actor is dead for good."""

    def __init__(self, on_dead: Callable[[str], None]) -> None:
        self._breakers: dict[str, Breaker] = {}
        self._on_dead = on_dead
        self.counters: Counter[str] = Counter()

    def call(self, node: str, name: str, method: Any, *args: Any) -> Call | None:
        """Begin a call; None if that node does not answer these days."""
        if not self._breaker(node).allows():
            self.counters["not_asked"] += 1
            return None
        return Call(node, name, method.remote(*args))

    def answers(self, calls: Sequence[Call | None], deadline_s: float) -> list[Any]:
        """One for each call, None where there is none by the deadline, of `time.monotonic`."""
        return [None if call is None else self._answer(call, deadline_s) for call in calls]

    def _answer(self, call: Call, deadline_s: float) -> Any:
        breaker = self._breaker(call.node)
        try:
            answer = ray.get(call.answer, timeout=max(0.0, deadline_s - time.monotonic()))
        except GetTimeoutError:
            breaker.failed()
            self.counters[f"{call.name}_timeout"] += 1
            return None
        except RayError as error:
            breaker.failed()
            self.counters[f"{call.name}_failed"] += 1
            if isinstance(error, ActorDiedError):
                self._on_dead(call.node)
            return None
        breaker.succeeded()
        return answer

    def _breaker(self, node: str) -> Breaker:
        return self._breakers.setdefault(node, Breaker())
