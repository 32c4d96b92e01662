"""A step whose pages are on their way computes what a step computes whose pages are there, while they come."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mneme.cachetier.host_pages.cpu import CpuTier
from mneme.cachetier.host_pages.tier import PageLoad
from mneme.errors import TransferFailed
from mneme.kernels.attention import PageTable, QueryRows, attend, build_plan, mark_free, mark_written, new_slot_position
from mneme.kernels.native.kv import scatter_chunk
from mneme.replicas.model import decoder as model
from mneme.replicas.model.decoder import Decoder, KvPool, StepInputs, StreamSpans
from mneme.replicas.model.timeline import Span, Timeline
from tests.cachetier.played_streams import PlayedStreams

PAGE_SIZE = 16
NUM_PAGES = 8
HISTORY = [1, 2, 3]  # pages; the last one half full
LOADED = [6, 4, 5]
NUM_HISTORY = 40
NUM_NEW = 20
TIMEOUT_S = 60.0


@pytest.fixture
def pool(decoder: Decoder) -> KvPool:
    config = decoder.config
    shape = (config.num_layers, config.num_kv_heads, NUM_PAGES, PAGE_SIZE, config.head_dim)
    return KvPool(
        k_pages=torch.zeros(shape), v_pages=torch.zeros(shape), slot_position=new_slot_position(NUM_PAGES * PAGE_SIZE)
    )


def slots_of(pages: list[int], start: int, end: int) -> Tensor:
    positions = np.arange(start, end)
    return torch.from_numpy(np.array(pages)[positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE)


def step(
    decoder: Decoder, pool: KvPool, pages: list[int], start: int, end: int, load: PageLoad | None = None
) -> Tensor:
    """Logits of the last of the rows [start, end) of a sequence on these pages."""
    config, positions = decoder.config, torch.arange(start, end, dtype=torch.int32)
    slots = slots_of(pages, start, end)
    mark_written(pool.slot_position, slots, positions)
    plan = build_plan(
        [PageTable.own(pages)],
        QueryRows(np.zeros(end - start, np.int64), np.arange(start, end)),
        page_size=PAGE_SIZE, num_q_heads=config.num_q_heads, num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim, share="auto",
    )  # fmt: skip
    inputs = StepInputs(
        token_ids=torch.arange(start, end) % 300, positions=positions, slots=slots,
        sampled_rows=torch.tensor([end - start - 1]), num_sampled=1, plan=plan, load=load,
    )  # fmt: skip
    return decoder.forward(inputs, pool)


def move_out(tier: CpuTier, pool: KvPool) -> None:
    """The history to host pages 0.., and nothing of it left in the pool."""
    tier.save(np.array(HISTORY), np.arange(3))
    tier.before_reuse(np.array(HISTORY))
    pool.k_pages.fill_(torch.nan)
    pool.v_pages.fill_(torch.nan)
    mark_free(pool.slot_position, torch.arange(NUM_PAGES * PAGE_SIZE))


def load_back(tier: CpuTier, pool: KvPool) -> PageLoad:
    load = tier.load(np.arange(3), np.array(LOADED))
    mark_written(pool.slot_position, slots_of(LOADED, 0, NUM_HISTORY), torch.arange(NUM_HISTORY))
    return load


class HandInHand:
    """Layer l + 1 is loaded only while layer l attends, and the other way round."""

    def __init__(self, num_layers: int) -> None:
        self._attending = [threading.Event() for _ in range(num_layers)]
        self._loading = [threading.Event() for _ in range(num_layers)]
        self._num_attended = self._num_scattered = 0

    def attend(self, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        layer, self._num_attended = self._num_attended, self._num_attended + 1
        self._attending[layer].set()
        if layer + 1 < len(self._loading):
            assert self._loading[layer + 1].wait(TIMEOUT_S)
        return attend(*args, **options)

    def scatter(self, *args: Any) -> None:
        layer, self._num_scattered = self._num_scattered, self._num_scattered + 1
        self._loading[layer].set()
        if layer > 0:
            assert self._attending[layer - 1].wait(TIMEOUT_S)
        scatter_chunk(*args)


def test_the_next_layer_is_loaded_while_a_layer_attends(
    decoder: Decoder, pool: KvPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_layers, end = decoder.config.num_layers, NUM_HISTORY + NUM_NEW
    step(decoder, pool, [*HISTORY, 7], 0, NUM_HISTORY)
    expected = step(decoder, pool, [*HISTORY, 7], NUM_HISTORY, end)
    step(decoder, pool, HISTORY, 0, NUM_HISTORY)
    pace, timeline = HandInHand(num_layers), Timeline()
    tier = CpuTier(pool, 3, scatter=pace.scatter, spans=timeline)
    move_out(tier, pool)
    monkeypatch.setattr(decoder, "_layer_spans", None)
    decoder.record(timeline)
    monkeypatch.setattr(model, "attend", pace.attend)
    # New rows fill the loaded page that is half full: what is loaded must not overwrite them.
    logits = step(decoder, pool, [*LOADED, 7], NUM_HISTORY, end, load_back(tier, pool))
    tier.close()
    assert torch.equal(logits, expected)
    span_by_name = {span.name: span for span in timeline.spans()}
    for layer in range(num_layers - 1):
        assert overlap(span_by_name[f"attend layer {layer}"], span_by_name[f"load layer {layer + 1}"])
    for layer in range(num_layers):
        assert span_by_name[f"load layer {layer}"].end_s <= span_by_name[f"attend layer {layer}"].start_s
    parts = [f"{part} layer {layer}" for layer in range(num_layers) for part in ("project", "wait", "attend", "mlp")]
    assert [span.name for span in timeline.spans() if span.track == "engine"] == parts


def overlap(one: Span, other: Span) -> bool:
    return max(one.start_s, other.start_s) < min(one.end_s, other.end_s)


def test_a_failed_load_ends_the_step(decoder: Decoder, pool: KvPool) -> None:
    def broken(*_: Any) -> None:
        raise OSError("unreadable")

    step(decoder, pool, HISTORY, 0, NUM_HISTORY)
    tier = CpuTier(pool, 3, scatter=broken)
    move_out(tier, pool)
    with pytest.raises(TransferFailed, match="unreadable"):
        step(decoder, pool, [*LOADED, 7], NUM_HISTORY, NUM_HISTORY + 1, load_back(tier, pool))
    tier.close()


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
