"""What the parts of a forward pass take, as spans on the engine's track of a timeline."""

from __future__ import annotations

from typing import Protocol

import torch

from mneme.cachetier.pages.event_spans import EventSpans
from mneme.cachetier.pages.streams import CudaStreams, Streams
from mneme.replicas.model.timeline import Timeline

TRACK = "engine"


class Laps(Protocol):
    """Spans that follow each other."""

    def begin(self) -> Laps | None:
        """The first span starts now; None where nothing can be timed."""

    def end(self, part: str, layer: int) -> None:
        """The part of the layer that ran until now has ended, the next one starts."""


class ClockLaps:
    """On the host's clock, for a device whose work is done when a call returns."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._start_s = 0.0

    def begin(self) -> ClockLaps:
        self._start_s = self._timeline.clock()
        return self

    def end(self, part: str, layer: int) -> None:
        now_s = self._timeline.clock()
        self._timeline.span(f"{part} layer {layer}", self._start_s, now_s, TRACK)
        self._start_s = now_s


class EventLaps:
    """By events in the stream that computes."""

    def __init__(self, timeline: Timeline, streams: Streams) -> None:
        self._streams = streams
        self._spans = EventSpans(timeline, streams)
        self._start = streams.current().record()

    def begin(self) -> EventLaps | None:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return None  # events of a graph have no times
        self._spans.flush()
        self._start = self._streams.current().record()
        return self

    def end(self, part: str, layer: int) -> None:
        now = self._streams.current().record()
        self._spans.add(f"{part} layer {layer}", self._start, now, TRACK)
        self._start = now


def laps_of(timeline: Timeline, device: torch.device) -> Laps:
    """The laps of forward passes on this device."""
    if device.type == "cuda":
        return EventLaps(timeline, CudaStreams(device, is_timed=True))
    return ClockLaps(timeline)
