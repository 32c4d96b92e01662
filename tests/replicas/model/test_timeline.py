"""Trace events that a browser opens, and spans that say how long parts of a step took."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch

from mneme.replicas.model.decoder import StreamSpans, layer_spans
from mneme.replicas.model.timeline import Span, Timeline
from tests.cachetier.played_streams import PlayedStreams


def test_spans_are_written_as_trace_events(tmp_path: Path) -> None:
    timeline = Timeline()
    timeline.span("load layer 0", 1.5, 1.75, "transfers", pages=3)
    timeline.span("attend layer 0", 1.0, 1.625, "engine")
    timeline.write(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert list(tmp_path.iterdir()) == [tmp_path / "trace.json"]
    names = {event["tid"]: event["args"]["name"] for event in trace["traceEvents"] if event["ph"] == "M"}
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert [(event["name"], event["ts"], event["dur"], names[event["tid"]], event["args"]) for event in events] == [
        ("attend layer 0", 1e6, 625e3, "engine", {}),
        ("load layer 0", 1.5e6, 250e3, "transfers", {"pages": 3}),
    ]
    assert len({event["pid"] for event in trace["traceEvents"]}) == 1


def test_a_folder_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="trace"):
        Timeline().write(tmp_path / "none" / "trace.json")


def test_the_latest_spans_are_kept() -> None:
    timeline = Timeline(max_spans=2)
    for start in range(5):
        timeline.span("s", start, start + 1, "engine")
    assert [span.start_s for span in timeline.spans()] == [3, 4]


def test_what_was_not_known_is_added_before_spans_are_read() -> None:
    timeline = Timeline()
    timeline.before_write(lambda: timeline.span("late", 0, 1, "engine"))
    assert timeline.spans() == [Span("late", 0, 1, "engine", {})]


def test_threads_add_spans_while_others_read() -> None:
    timeline = Timeline()

    def add() -> None:
        for start in range(500):
            timeline.span("s", start, start, "engine")

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        timeline.spans()
    assert len(timeline.spans()) == 2000


def test_layer_spans_follow_each_other_on_the_clock() -> None:
    ticks = iter([10.0, 11.0, 13.0, 20.0, 21.0])
    timeline = Timeline(clock=lambda: next(ticks))
    recorder = layer_spans(timeline, torch.device("cpu"))
    for _ in range(2):
        assert recorder.begin() is recorder
        recorder.end("project", 0)
        if timeline.spans()[-1].start_s == 10:
            recorder.end("attend", 0)
    spans = [(span.name, span.start_s, span.end_s, span.track) for span in timeline.spans()]
    assert spans == [
        ("project layer 0", 10, 11, "engine"),
        ("attend layer 0", 11, 13, "engine"),
        ("project layer 0", 20, 21, "engine"),
    ]


def test_layer_spans_of_a_device_come_from_its_events() -> None:
    timeline, streams = Timeline(clock=lambda: 5.0), PlayedStreams()
    recorder = StreamSpans(timeline, streams)
    assert recorder.begin() is recorder
    for part in ("project", "attend"):
        streams.current().run(lambda: None)
        recorder.end(part, 2)
    assert recorder.begin() is recorder  # nothing has run yet
    spans = timeline.spans()
    assert [(span.name, span.end_s - span.start_s) for span in spans] == [("project layer 2", 2), ("attend layer 2", 2)]
    assert spans[0].end_s == spans[1].start_s
    assert spans[0].start_s > 5
