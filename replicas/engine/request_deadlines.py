"""When requests must have ended. Policy only: no tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from mneme.replicas.sessions.deadlines import Deadlines


class RequestDeadlines:
    """Deadlines by request; what is due is found in time that depends on what is due only."""

    def __init__(self, clock: Callable[[], float], default_timeout_s: float | None) -> None:
        self._clock = clock
        self._default_timeout_s = default_timeout_s
        self._at_s_by_id: dict[str, float] = {}
        self._heap: Deadlines[str] = Deadlines()

    def __len__(self) -> int:
        return len(self._at_s_by_id)

    def add(self, request_id: str, timeout_s: float | None) -> None:
        """The request has so many seconds from now; None: the default, if there is one."""
        timeout_s = self._default_timeout_s if timeout_s is None else timeout_s
        if timeout_s is not None:
            at_s = self._at_s_by_id[request_id] = self._clock() + timeout_s
            self._heap.add(at_s, request_id)

    def discard(self, request_id: str) -> None:
        """The request has ended."""
        if self._at_s_by_id.pop(request_id, None) is not None and self._heap.is_stale(len(self)):
            self._heap.replace((at_s, each) for each, at_s in self._at_s_by_id.items())

    def take_due(self) -> Iterator[str]:
        """Requests whose time is up, each once."""
        if not self._at_s_by_id:
            return
        now_s = self._clock()
        for request_id in self._heap.take_due(now_s):
            # Else it is an older entry: the request ended, and another of its name runs.
            if self._at_s_by_id.get(request_id, now_s) < now_s:
                del self._at_s_by_id[request_id]
                yield request_id
