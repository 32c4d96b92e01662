"""A process on a Ray node with engines of a small float32 model over the cache tier, and faults at chosen moments."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import ray
from ray.exceptions import ObjectStoreFullError, OutOfDiskError

from mneme.cachetier.chunk.header import Chunk, ChunkHeader, U8Array
from mneme.cachetier.chunk.keys import Lineage, prefix_lineage
from mneme.cachetier.config import CacheConfig
from mneme.cachetier.distributed.lifecycle import of_this_node, start_cache_tier
from mneme.cachetier.distributed.objects import Refs, put_runs, runs_of
from mneme.cachetier.distributed.ray_store import RayChunkStore
from mneme.cachetier.names import Edge, Miss
from mneme.cachetier.store import ChainQuery, ChunkSource
from mneme.replicas.engine.engine import Engine
from tests.e2e.nodes.cache_cluster import CALL_LIMIT_S
from tests.replicas.cache_faults.kill_engine import load
from tests.replicas.chunk_stores import CHUNK_TOKENS, SlowRows
from tests.replicas.faulty_tier import NUM_NEW, check_engine, run_bounded
from tests.replicas.tiered_engine import answers, fingerprint_of, make_cached_engine, submit, usages

ROW_S, STEP_S = 0.05, 0.5  # that they are said to take: lookups have 0.5 s then, loads 10 s, and are always worth it
FLUSH_S = 25.0  # a put that is not answered is given up after 20 s


class Kill(NamedTuple):
    """A process that ends right before (`put`, `read`) or after (`was_put`) so many chunks or layers of chunks."""

    when: Literal["put", "was_put", "read"]
    number: int  # from 1
    pid: int


class Told(NamedTuple):
    """What an engine answered."""

    tokens: list[int]
    num_cached: int  # of the prompt's tokens, that were not computed
    seconds: float
    is_flushed: bool  # what was to be saved was, or was refused


class SteadyCosts(SlowRows):
    """Edges are trusted whatever comes of them."""

    def learn_edge(self, *args: object, **options: object) -> None:
        pass


class KillingStore:
    """The store of an engine during one answer; it stays open behind it."""

    def __init__(self, store: RayChunkStore, kill: Kill | None) -> None:
        self._store, self._kill, self._num_left = store, kill, 0 if kill is None else kill.number

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def locate(self, query: ChainQuery, timeout_s: float) -> list[ChunkSource]:
        return [_Source(source, lambda: self.reached("read")) for source in self._store.locate(query, timeout_s)]

    def put(self, chunk: Chunk, lineage: Lineage) -> bool:
        self.reached("put")
        is_put = self._store.put(chunk, lineage)
        self.reached("was_put")
        return is_put

    def close(self) -> None:
        pass

    def reached(self, when: str) -> None:
        if self._kill is not None and self._kill.when == when:
            self._num_left -= 1
            if not self._num_left:
                os.kill(self._kill.pid, signal.SIGKILL)


@dataclass
class _Source:
    source: ChunkSource
    before_read: Callable[[], None]

    @property
    def header(self) -> ChunkHeader:
        return self.source.header

    @property
    def num_usable(self) -> int:
        return self.source.num_usable

    @property
    def edge(self) -> Edge:
        return self.source.edge

    def read(self, layer: int) -> U8Array | Miss:
        self.before_read()
        return self.source.read(layer)

    def close(self) -> None:
        self.source.close()


class ModelProcess:
    """Each answer is by an engine of its own, whose KV is all in the tier."""

    def __init__(self, model: str, config: CacheConfig, application: str) -> None:
        self._decoder, self._config = load(Path(model)), config
        self._store = start_cache_tier(of_this_node(config), application)
        self._pinned: list[Any] = []

    def answer(self, ids: list[int], kill: Kill | None = None) -> Told:
        started_s = time.monotonic()
        store: Any = KillingStore(self._store, kill)
        engine = make_cached_engine(self._decoder, store, costs=SteadyCosts(ROW_S, step_s=STEP_S), config=self._config)
        submit(engine, "it", ids, NUM_NEW)
        events = run_bounded(engine)
        seconds = time.monotonic() - started_s
        is_flushed = self._flush(engine)
        engine.close()
        check_engine(engine)
        return Told(answers(events)["it"], usages(events)["it"].cached_tokens, seconds, is_flushed)

    def located(self, ids: list[int]) -> int:
        """How many tokens of a sequence the tier has for this process; nobody waits for them."""
        fingerprint = fingerprint_of(self._decoder)
        lineage = prefix_lineage(fingerprint, "")
        sources = self._store.locate(ChainQuery.of(lineage, fingerprint.digest, ids, CHUNK_TOKENS), 2.0)
        for source in sources:
            source.close()
        return sum(source.num_usable for source in sources)

    def put_objects(self, chunk: Chunk) -> Refs:
        """As a put begins; the objects are this process's."""
        return put_runs(runs_of(chunk.layers))

    def stats(self) -> dict[str, int]:
        return {**self._store.stats(), "pid": os.getpid()}

    def fill_store(self) -> int:
        """Pinned objects, large ones and then small ones, until the node's store takes no more; how many."""
        for size in (4 << 20, 1 << 18, 1 << 14):
            for _ in range(1000):
                try:
                    reference = ray.put(np.full(size, 7, np.uint8))
                except (ObjectStoreFullError, OutOfDiskError):
                    break
                self._pinned.append((reference, ray.get(reference, timeout=CALL_LIMIT_S)))
        return len(self._pinned)

    def free_store(self) -> None:
        self._pinned.clear()

    def _flush(self, engine: Engine) -> bool:
        assert engine.connector is not None
        return engine.connector.saver.flush(FLUSH_S)
