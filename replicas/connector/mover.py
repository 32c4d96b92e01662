"""The loads and the saves of chunks in one step, and their end."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from mneme.cachetier.chunk.fingerprint import ModelFingerprint
from mneme.cachetier.config import CacheConfig
from mneme.cachetier.pages.host_memory import DevicePool
from mneme.cachetier.store import ChunkStore
from mneme.replicas.connector.loads import ChunkLoad, ChunkLoads
from mneme.replicas.connector.pages import make_chunk_pages
from mneme.replicas.connector.saver import ChunkSaver, NoteSave, StepSaves
from mneme.replicas.connector.saves import SaveJob
from mneme.replicas.forest.moves import Graft
from mneme.replicas.forest.nodes import Node


class ChunkMover:
    """Between one device pool and a store; the engine's thread calls it."""

    def __init__(
        self,
        pool: DevicePool,
        store: ChunkStore,
        fingerprint: ModelFingerprint,
        config: CacheConfig,
        note_save: NoteSave = lambda _num_bytes, _seconds: None,
    ) -> None:
        layout = fingerprint.layout
        loaded, saved = (make_chunk_pages(pool, layout.layer_bytes(layout.chunk_tokens)) for _ in range(2))
        self.saver = ChunkSaver(
            store, fingerprint, saved, write_buffer_bytes=config.write_buffer_bytes, note_save=note_save
        )
        self.num_lost = 0  # chunks that were to be loaded and did not come
        self.num_loaded = 0
        self._loads = ChunkLoads(layout.num_layers, loaded)
        self._load: ChunkLoad | None = None
        self._saves: StepSaves | None = None

    def load(self, grafts: Sequence[Graft]) -> ChunkLoad:
        """The one load of chunks of the next step."""
        self._load = self._loads.begin(grafts)
        self.num_loaded += sum(len(graft.pieces) for graft in grafts)
        return self._load

    def save(self, jobs: Sequence[SaveJob]) -> StepSaves:
        """The chunks that the next step completes."""
        self._saves = saves = StepSaves(self.saver)
        saves.add(jobs)
        return saves

    def end_load(self) -> list[Node] | None:
        """The step's forward pass is over; returns the nodes whose KV did not come, None if none was to come."""
        load, self._load = self._load, None
        if load is None:
            return None
        lost = load.finish()
        self.num_lost += load.num_lost
        self.num_loaded -= load.num_lost
        return lost

    def end_saves(self, unsound: Collection[object] = ()) -> None:
        """It is known which sequences computed what they were to compute, and of which nothing may be kept."""
        if self._saves is not None:
            self._saves.finish(unsound)
        self._saves = None  # last: what Ctrl-C interrupts is abandoned

    def abandon(self) -> None:
        """The step failed, if it has not ended."""
        self.end_load()
        saves, self._saves = self._saves, None
        if saves is not None:
            saves.abandon()

    def close(self) -> None:
        self.abandon()
        self._loads.close()
        self.saver.close()
