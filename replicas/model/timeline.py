"""What ran when, as trace events that a browser's trace viewer opens (about:tracing, Perfetto).

The format is Chrome's: complete events ("ph": "X") with microseconds, one thread id per track, named by metadata.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

MAX_SPANS = 1_000_000  # the oldest go first: some 300 MB of JSON


class Span(NamedTuple):
    """Something that took from start to end."""

    name: str
    start_s: float
    end_s: float
    track: str
    args: dict[str, int | str]


class Timeline:
    """Spans of any threads, in the seconds of one clock."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter, max_spans: int = MAX_SPANS) -> None:
        self.clock = clock
        self._spans: deque[Span] = deque(maxlen=max_spans)
        self._lock = threading.Lock()
        self._flushes: list[Callable[[], None]] = []

    def span(self, name: str, start_s: float, end_s: float, track: str, **args: int | str) -> None:
        """Add a span; from any thread."""
        with self._lock:
            self._spans.append(Span(name, start_s, end_s, track, args))

    def before_write(self, flush: Callable[[], None]) -> None:
        """Call `flush` before the spans are read: it adds those whose end was not known yet."""
        self._flushes.append(flush)

    def spans(self) -> list[Span]:
        """All spans, by their start."""
        for flush in self._flushes:
            flush()
        with self._lock:
            spans = list(self._spans)
        return sorted(spans, key=lambda span: span.start_s)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write all spans as JSON, whole or not at all; raises OSError."""
        target = Path(path)
        scratch = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            scratch.write_text(json.dumps({"traceEvents": self._events(), "displayTimeUnit": "ms"}))
            scratch.replace(target)
        finally:
            scratch.unlink(missing_ok=True)

    def _events(self) -> list[dict[str, Any]]:
        spans = self.spans()
        tracks = {track: number for number, track in enumerate(sorted({span.track for span in spans}))}
        common = {"pid": os.getpid()}
        named = [
            {"name": "thread_name", "ph": "M", "tid": number, "args": {"name": track}, **common}
            for track, number in tracks.items()
        ]
        return named + [
            {
                "name": span.name,
                "ph": "X",
                "ts": span.start_s * 1e6,
                "dur": (span.end_s - span.start_s) * 1e6,
                "tid": tracks[span.track],
                "args": span.args,
                **common,
            }
            for span in spans
        ]
