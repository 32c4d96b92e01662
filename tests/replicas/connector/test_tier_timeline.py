"""The timeline of an engine whose session comes back from the host: a file that trace viewers open."""

from __future__ import annotations

import gc
import itertools
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from mneme.cachetier.host_pages.cpu import DevicePool, HostMemory
from mneme.cachetier.host_pages.tier import SpanRecorder
from mneme.kernels.native.kv import scatter_chunk
from mneme.replicas.config import EngineConfig
from mneme.replicas.engine.build import build_engine
from mneme.replicas.engine.engine import Engine
from mneme.replicas.model import decoder as model
from mneme.replicas.model import runner as runner_module
from mneme.replicas.model.directory import load_model_config, model_directory
from mneme.replicas.request import GenerationRequest, PromptUsage, SamplingParams
from tests.replicas.model.test_step_load import HandInHand

pytestmark = pytest.mark.engine

NUM_LAYERS = load_model_config(model_directory("mneme-tiny")).num_layers
NUM_PAGES = 12
NUM_HISTORY = 200


class Event(NamedTuple):
    """A complete event, in microseconds."""

    name: str
    start: float
    end: float
    track: str


def ask(engine: Engine, name: str, ids: list[int]) -> PromptUsage:
    params = SamplingParams(temperature=0, max_tokens=1)
    engine.submit(GenerationRequest(request_id=name, prompt_token_ids=tuple(ids), sampling=params, session_id=name[0]))
    (event,) = [event for _ in iter(lambda: engine.has_work, False) for event in engine.step()]
    assert event.error is None
    assert event.usage is not None
    return event.usage


def history_on_host(engine: Engine) -> list[int]:
    ids = [5 + i % 90 for i in range(NUM_HISTORY)]
    ask(engine, "a1", ids)
    ask(engine, "b1", [7 + i % 70 for i in range(NUM_PAGES * 32 - 1)])
    return ids


def read_trace(path: Path) -> list[Event]:
    """The file's events by their start; asserts that it is what Chrome's format asks for."""
    trace = json.loads(path.read_text())
    events: list[dict[str, Any]] = trace["traceEvents"]
    assert {event["pid"] for event in events} == {os.getpid()}
    name_by_tid = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert {event["name"] for event in events if event["ph"] == "M"} == {"thread_name"}
    assert sorted(name_by_tid.values()) == ["engine", "transfers"]
    complete = [event for event in events if event["ph"] != "M"]
    assert {event["ph"] for event in complete} == {"X"}
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in complete)
    found = [Event(e["name"], e["ts"], e["ts"] + e["dur"], name_by_tid[e["tid"]]) for e in complete]
    assert [event.start for event in found] == sorted(event.start for event in found)
    return found


def last_by_name(events: list[Event]) -> dict[str, Event]:
    return {event.name: event for event in events}


def test_a_host_hit_is_on_the_timeline(tmp_path: Path) -> None:
    config = EngineConfig(
        num_pages=NUM_PAGES, host_cache_bytes=2**26, timeline=str(tmp_path / "trace-%p.json"), dtype="float32"
    )
    engine = build_engine("mneme-tiny", config)
    assert ask(engine, "a2", [*history_on_host(engine), 3, 4]).host_tokens >= NUM_HISTORY - 32
    del engine
    gc.collect()
    (path,) = tmp_path.iterdir()
    assert path.name == f"trace-{os.getpid()}.json"
    events = read_trace(path)
    last = last_by_name(events)
    for layer in range(NUM_LAYERS):
        for part in ("project", "attend", "mlp"):
            assert last[f"{part} layer {layer}"].track == "engine"
        assert last[f"save layer {layer}"].track == last[f"load layer {layer}"].track == "transfers"
        assert last[f"load layer {layer}"].end <= last[f"attend layer {layer}"].start
    for track in ("engine", "transfers"):
        spans = [event for event in events if event.track == track]
        for one, other in itertools.pairwise(spans):
            assert one.end <= other.start + 1e-3, "spans of a track follow each other"


def test_the_next_layer_comes_while_a_layer_attends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paced: layer l + 1 is loaded only while layer l attends, so a load of all layers before the step would hang."""
    paces: list[HandInHand] = []

    def scatter(*args: Any) -> None:
        (paces[0].scatter if paces else scatter_chunk)(*args)

    def tier(pool: DevicePool, num_pages: int, spans: SpanRecorder | None) -> HostMemory:
        return HostMemory(pool, num_pages, scatter=scatter, spans=spans)

    monkeypatch.setattr(runner_module, "make_tier", tier)
    config = EngineConfig(
        num_pages=NUM_PAGES, host_cache_bytes=2**26, timeline=str(tmp_path / "trace.json"), dtype="float32"
    )
    engine = build_engine("mneme-tiny", config)
    ids = history_on_host(engine)
    paces.append(HandInHand(NUM_LAYERS))
    monkeypatch.setattr(model, "attend", paces[0].attend)
    assert ask(engine, "a2", [*ids, 3, 4]).host_tokens >= NUM_HISTORY - 32
    del engine
    gc.collect()
    last = last_by_name(read_trace(tmp_path / "trace.json"))
    for layer in range(NUM_LAYERS - 1):
        load, attend = last[f"load layer {layer + 1}"], last[f"attend layer {layer}"]
        assert max(load.start, attend.start) < min(load.end, attend.end)
