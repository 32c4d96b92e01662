"""Spans of work on a device, from the times of events between it."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from mneme.cachetier.pages.streams import Event, Streams
from mneme.cachetier.pages.tier import SpanRecorder

_REBASE_S = 1.0  # times between events come as float32


class _Pending(NamedTuple):
    """A span whose end the device has not reached when it was added."""

    name: str
    start: Event
    end: Event
    track: str
    args: dict[str, int]


class EventSpans:
    """Adds spans to a recorder once the device is past their ends."""

    def __init__(self, recorder: SpanRecorder, streams: Streams) -> None:
        """Waits for the device, to know one event's time on the recorder's clock."""
        self._recorder = recorder
        self._pending: deque[_Pending] = deque()
        self._streams = streams
        self._base = streams.current().record()
        streams.finish()
        self._base_s = recorder.clock()
        recorder.before_write(self.finish)

    def add(self, name: str, start: Event, end: Event, track: str, **args: int) -> None:
        """A span between two timed events."""
        self._pending.append(_Pending(name, start, end, track, args))

    def flush(self) -> None:
        """Pass on what the device is past."""
        while self._pending and self._pending[0].end.is_done():
            span = self._pending.popleft()
            start_s = self._base_s + span.start.seconds_since(self._base)
            end_s = self._base_s + span.end.seconds_since(self._base)
            self._recorder.span(span.name, start_s, end_s, span.track, **span.args)
            if end_s - self._base_s > _REBASE_S:
                self._base, self._base_s = span.end, end_s

    def finish(self) -> None:
        """Pass on everything; waits for the device."""
        if self._pending:
            self._streams.finish()
            self.flush()
