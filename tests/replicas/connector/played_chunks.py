"""An engine's cache tier without tensors and threads: a test says when the store answers, and what comes of it.

A chunk's bytes are the positions and the tokens that they are the KV of, so what a fake runner loads and saves can be
compared with what it should be.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mneme.cachetier.chunk.fingerprint import ChunkLayout, ModelFingerprint
from mneme.cachetier.chunk.header import make_chunk
from mneme.cachetier.config import CacheConfig, LoadPolicy
from mneme.cachetier.names import Miss
from mneme.replicas.config import EngineConfig
from mneme.replicas.connector.connector import KvConnector
from mneme.replicas.connector.save import SaveCounts, SaveJob
from mneme.replicas.engine.engine import Engine
from mneme.replicas.forest.moves import Graft
from mneme.replicas.forest.tree import Page
from mneme.replicas.load import Load, ReadBudget
from mneme.replicas.request import SessionKey, TokenEvent
from tests.replicas.chunk_stores import FakeStore, SlowRows
from tests.replicas.fake_runner import WRONG, Content, FakeRunner, Slot, Slots, lose

CHUNK_TOKENS = 8
LAYOUT = ChunkLayout(num_layers=2, num_kv_heads=1, head_dim=2, dtype="float32", chunk_tokens=CHUNK_TOKENS)
FINGERPRINT = ModelFingerprint(weights="00", layout=LAYOUT, inv_freq=(1.0,))


class PlayedWorkers:
    """Tasks run when the test says so, in order."""

    def __init__(self) -> None:
        self.tasks: deque[Callable[[], None]] = deque()

    def run(self, task: Callable[[], None]) -> None:
        self.tasks.append(task)

    def play(self, num_tasks: int | None = None) -> None:
        """So many of those that wait; None: until nothing waits."""
        while self.tasks and num_tasks != 0:
            self.tasks.popleft()()
            num_tasks = None if num_tasks is None else num_tasks - 1

    def close(self, timeout_s: float) -> None:
        self.play()


class PlayedBudget(ReadBudget):
    """Whoever would have to wait for room is let in."""

    def reserve(self, num_bytes: int, is_urgent: Callable[[], bool], is_over: Callable[[], bool]) -> bool:
        return super().reserve(num_bytes, lambda: True, is_over)


class PlayedCache:
    """The parts that a test moves."""

    def __init__(
        self,
        store: FakeStore,
        page_size: int,
        *,
        read_buffer_bytes: int = 1 << 20,
        step_chunks: int | None = None,
        load: LoadPolicy = "auto",
    ) -> None:
        """`step_chunks`: that one step loads beside others."""
        self.now_s = 0.0
        self.workers: dict[str, PlayedWorkers] = {}
        config = CacheConfig(load=load)
        self.loader: Any = FakeLoader(self._make_workers("kv-read"))
        saver: Any = FakeSaver(store)
        self.cache = KvConnector(
            store,
            FINGERPRINT,
            SlowRows() if step_chunks is None else SlowRows(step_rows=CHUNK_TOKENS, chunk_s=5.0 / step_chunks),
            config,
            loader=self.loader,
            saver=saver,
            page_size=page_size,
            clock=lambda: self.now_s,
            make_workers=self._make_workers,
        )
        self.cache.min_load_tokens = 1
        self.cache.loads.budget = PlayedBudget(read_buffer_bytes)

    @property
    def num_open(self) -> int:
        return self.cache.loads.num_open

    def play(self, num_looks: int | None = None, num_reads: int | None = None) -> None:
        """The store answers, and chunks are read; for as many tasks as wait, or until nothing waits."""
        looks, reads = self.workers["kv-look"], self.workers["kv-read"]
        looks.play(num_looks)
        reads.play(num_reads)
        while num_looks is num_reads is None and looks.tasks:
            looks.play()
            reads.play()

    def _make_workers(self, name: str, num_threads: int = 1) -> Any:
        return self.workers.setdefault(name, PlayedWorkers())


@dataclass
class _Save:
    job: SaveJob
    told: list[Content]  # what was copied


class FakeLoader:
    """`ChunkLoader` over the slots of a fake runner."""

    def __init__(self, readers: PlayedWorkers) -> None:
        self.num_lost = self.num_loaded = 0
        self.is_late: Callable[[], bool] = lambda: False  # whether a load that is under way is given up
        self._readers = readers
        self._lost: list[Page] | None = None
        self._ending: list[Load] = []

    def begin(self, grafts: Sequence[Graft], slots: Slots) -> set[Slot]:
        """Returns the slots whose KV did not come."""
        self._lost, doubtful = [], set[Slot]()
        for graft in grafts:
            load = graft.chunks
            assert isinstance(load, Load)
            self._ending += [load] if graft.is_last else []
            end = graft.pieces[-1].chunk + 1
            load.begin(end)
            if load.num_read < end and not self.is_late():
                self._readers.play()
            is_lost = load.num_read < end
            if is_lost:
                load.give_up("loading")
            for piece in graft.pieces:
                told = None if is_lost else self._taken(load, piece.chunk)
                is_lost = told is None
                places = [(page, offset + i) for page, offset, count in piece.runs for i in range(count)]
                counts = [count for *_, count in piece.runs]
                rotated = [p.start + i for p, count in zip(piece.pages, counts, strict=True) for i in range(count)]
                first = piece.start - load.start_of(piece.chunk)
                for number, (slot, position) in enumerate(zip(places, rotated, strict=True), first):
                    slots[slot] = (position, WRONG, 0) if told is None else told[number]
                    assert slots[slot][0] == position
                doubtful.update(places if is_lost else ())
                self._lost += piece.pages if is_lost else ()
        return doubtful

    def end(self) -> list[Page] | None:
        lost, self._lost = self._lost, None
        ending, self._ending = self._ending, []
        for load in ending:
            load.close()
        self.num_lost += len(lost or ())
        self.num_loaded += len(ending)
        return lost

    def close(self) -> None:
        self.end()

    def _taken(self, load: Load, index: int) -> list[Content] | None:
        """What each slot held; None if a layer does not come."""
        layers = [load.read(index, layer) for layer in range(LAYOUT.num_layers)]
        if any(isinstance(layer, Miss) for layer in layers):
            return None
        told = [_decoded(layer) for layer in layers if not isinstance(layer, Miss)]
        assert all(each == told[0] for each in told)
        return told[0]


class FakeSaver:
    """`ChunkSaver` over the slots of a fake runner."""

    def __init__(self, store: FakeStore) -> None:
        self.counts = SaveCounts()
        self._store = store
        self._saves: list[_Save] = []
        self.slots: Slots = {}

    def begin(self, jobs: Sequence[SaveJob]) -> None:
        self._saves = [_Save(job, self._copied(job)) for job in jobs]

    def end(self, unsound: Collection[object] = ()) -> None:
        saves, self._saves = self._saves, []
        self._put([save for save in saves if not save.job.is_void and save.job.sequence not in unsound])

    def save(self, jobs: Sequence[SaveJob]) -> None:
        self._put([_Save(job, self._copied(job)) for job in jobs])

    def all_launched(self) -> None:
        pass

    def abandon(self) -> None:
        self._saves = []

    def close(self) -> None:
        self.abandon()

    def _copied(self, job: SaveJob) -> list[Content]:
        return [self.slots[page, offset + i] for page, offset, count, _ in job.runs for i in range(count)]

    def _put(self, saves: list[_Save]) -> None:
        for save in saves:
            job = save.job
            expected = list(zip(job.rotated.tolist(), job.token_ids, strict=True))
            assert [content[:2] for content in save.told] == expected, "what is saved is not what it says it is"
            layers = [_encoded(save.told)] * LAYOUT.num_layers
            chunk = make_chunk(job.lineage, FINGERPRINT, job.parent, job.token_ids, job.rotated, layers)
            self.counts.chunks += self._store.put(chunk, job.lineage)


def _encoded(told: list[Content]) -> np.ndarray:
    """K: position and token; V: the lineage, in two halves that float32 holds."""
    halves = [divmod(lineage, 2**16) for _, _, lineage in told]
    return np.array([[content[:2] for content in told], halves], np.float32).view(np.uint8).reshape(-1)


def _decoded(layer: np.ndarray) -> list[Content]:
    keys, values = layer.view(np.float32).reshape(2, -1, 2).astype(int).tolist()
    return [(position, token, high * 2**16 + low) for (position, token), (high, low) in zip(keys, values, strict=True)]


def make_played_engine(runner: FakeRunner, played: PlayedCache, clock: Callable[[], float], **options: Any) -> Engine:
    runner.loader, runner.saver = played.cache.loader, played.cache.saver
    config = EngineConfig(**{"max_batch_tokens": 16, "max_running": 8, "max_step_ms": 0, **options})
    return Engine(runner, None, config, connector=played.cache, clock=clock)  # type: ignore[arg-type]


def run_played(engine: Engine, cache: PlayedCache, chance: random.Random) -> list[TokenEvent]:
    """Step until nothing is left to do; before each step some of what the cache is asked is done, by chance."""
    events: list[TokenEvent] = []
    while engine.has_work:
        cache.now_s += chance.choice([0.1, 1, 20])
        cache.play(chance.choice([0, 1, None]), chance.choice([0, 1, None]))
        events += engine.step()
        engine.forest.check()
    return events


class MovingSessions:
    """Two engines over one store that loses chunks; a session's next turn runs where it is, or on the other one."""

    def __init__(
        self, chance: random.Random, edge: Any, fault_share: float, num_pages: int, *, of_cache: Any, **options: Any
    ) -> None:
        self.chance, self.home = chance, dict[SessionKey, int]()
        max_context = options.pop("max_context", 10_000)
        lost: Any = lambda _header, _at: Miss.SHORT if chance.random() < fault_share else None  # noqa: E731
        self.store = FakeStore(edge=edge, fault=lost)
        self.caches = [PlayedCache(self.store, 4, **of_cache) for _ in range(2)]
        num_host_pages = chance.choice([0, 20])
        self.engines = [
            make_played_engine(
                FakeRunner(num_pages, 4, max_context=max_context, num_host_pages=num_host_pages),
                cache,
                itertools.count().__next__,
                **options,
            )
            for cache in self.caches
        ]

    def engine_of(self, key: SessionKey, *, moves: bool, version: int, num_losses: int) -> tuple[Engine, PlayedCache]:
        """Where its next turn runs; before that the session may move, and pages of that engine are lost."""
        old = self.engines[self.home.setdefault(key, 0)]
        if moves:
            self.home[key] = self.chance.randrange(2)
        engine, log = self.engines[self.home[key]], old.sessions.get(key)
        if moves and log is not None:
            state = log.state()
            assert old.sessions.delete(key, is_elsewhere=True)
            engine.sessions.restore(key, state._replace(version=version), version)
        for _ in range(num_losses):
            lose(engine, self.chance.randrange(100))
        return engine, self.caches[self.home[key]]

    def check_rest(self) -> None:
        """Once its sessions are deleted nothing is kept, and nothing is open."""
        for engine, cache in zip(self.engines, self.caches, strict=True):
            cache.play()
            assert (engine.forest.device.num_in_use, cache.num_open) == (0, 0)
            for key in self.home:
                engine.sessions.delete(key)
            engine.forest.clear()
            assert not engine.forest.kept_roots
        assert self.store.num_open == 0
