"""Fetches of an engine without their threads: how they end."""

from __future__ import annotations

import time
from typing import Any

from mneme.cachetier.chunk_store import ChainQuery
from mneme.cachetier.load_controller import LoadController
from mneme.replicas.chunk_fetches import Fetches
from mneme.replicas.workers import Task
from tests.cachetier.chunks import CHUNK_TOKENS, FINGERPRINT, LINEAGE, chain_of
from tests.replicas.chunk_stores import FakeStore, SlowRows

IDS = list(range(3 * CHUNK_TOKENS))


class Inline:
    """`Workers` without threads."""

    def __init__(self, name: str, num_threads: int) -> None:
        pass

    def run(self, task: Task) -> None:
        task()

    def close(self, timeout_s: float) -> None:
        pass


class Costs(SlowRows):
    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []
        self.meanwhile: Any = lambda: None

    def note_edge(self, edge: Any, *args: Any, **options: Any) -> None:
        self.told.append(edge)
        self.meanwhile()


def test_a_read_that_ends_after_its_fetch_does_not_disturb_what_is_told_of_it() -> None:
    """A load thread may still read from memory, of an edge that was not used before."""
    store, costs = FakeStore(edge="disk"), Costs()
    store.chunks = {chunk.header.key: chunk for chunk in chain_of(IDS)}
    controller = LoadController(costs, time.monotonic, num_layers=FINGERPRINT.layout.num_layers)
    make: Any = Inline
    fetches = Fetches(store, controller, costs, read_buffer_bytes=1 << 20, clock=time.monotonic, make_workers=make)
    fetch = fetches.begin(ChainQuery.of(LINEAGE, FINGERPRINT.digest, IDS, CHUNK_TOKENS, request_id="r"), 0)

    def read_late() -> None:
        store.edge = "host"
        fetch.note_read(0, 1, 1, 1.0)

    costs.meanwhile = read_late
    fetch.close()
    assert costs.told == ["disk"]
    assert (fetches.num_open, store.num_open, store.waiting) == (0, 0, set())
