"""The cache tier of one engine: what is looked for, loaded and saved, and what that costs.

Engine._start     want        a sequence that begins is looked for; the scheduler waits for the answer, not for long:
                              then it computes the first rows, and what comes before the last of them is still used
Scheduler._admit              pages for what was found (`forest/paths.py: graft`)
Engine._moves     add_saves   chunks that the step completes
Runner.prepare                loads and saves begin (`connector/mover.py`); layers are waited for, and told
Engine._commit    settle      what did not come is taken back, what is sound goes to the store
Engine._finish    end         a request's last chunk
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from mneme.cachetier.chunk.fingerprint import ModelFingerprint
from mneme.cachetier.config import CacheConfig
from mneme.cachetier.policy.cost_model import CostModel
from mneme.cachetier.policy.load_controller import LoadController
from mneme.cachetier.store import ChainQuery, ChunkStore
from mneme.replicas.connector.fetches import Fetches, MakeWorkers
from mneme.replicas.connector.saves import ChunkChain, ChunkSaves
from mneme.replicas.forest.forest import PrefixForest
from mneme.replicas.forest.moves import Moves
from mneme.replicas.sequence import Chunk
from mneme.replicas.sequence import Sequence as RunningSequence

if TYPE_CHECKING:
    from mneme.replicas.model.runner import Runner
    from mneme.replicas.model.sampler import Sampled
    from mneme.replicas.schedule.scheduler import Scheduler


class ChunkCache:
    """Policy between an engine and its store; all but the threads of `Fetches` is the engine's thread's."""

    def __init__(
        self,
        store: ChunkStore,
        fingerprint: ModelFingerprint,
        costs: CostModel,
        config: CacheConfig,
        *,
        page_size: int,
        on_close: Callable[[], None] = lambda: None,
        settle_saves: Callable[[float], bool] = lambda _timeout_s: True,
        clock: Callable[[], float] = time.monotonic,
        make_workers: MakeWorkers | None = None,
    ) -> None:
        self.store, self.fingerprint, self.config = store, fingerprint, config
        self.saves = ChunkSaves(store, fingerprint, page_size)
        self.settle_saves = settle_saves  # `ChunkSaver.settle`
        self._costs, self._clock = costs, clock
        self._step_began_s = 0.0
        self._on_close = on_close
        self._controller = LoadController(
            costs, clock, num_layers=fingerprint.layout.num_layers, loads_all=config.load == "always"
        )
        self._fetches = Fetches(
            store,
            self._controller,
            costs,
            read_buffer_bytes=config.read_buffer_bytes,
            clock=clock,
            make_workers=make_workers,
        )
        self.counts: Counter[str] = Counter()

    def tell(self, on_answer: Callable[[], None]) -> None:
        """Who drives the engine hears that it may not be blocked any more: on another thread, at once."""
        self._fetches.on_answer = on_answer

    def want(self, sequence: RunningSequence, forest: PrefixForest, *, is_alone: bool) -> None:
        """Begin to look for what the engine lacks of a sequence, if that is worth a question.

        `is_alone`: nothing else runs or waits.
        """
        if sequence.root is not None or sequence.request.is_warm_up:
            return
        salt, context = sequence.request.salt, sequence.context
        sequence.chain = ChunkChain(self.saves.lineage(salt))
        if self.config.load == "never" or sequence.request.choice_index:  # other choices follow the first, which asks
            return
        resident = forest.resident(salt, context)
        num_resident = resident.device + resident.host
        if len(context) - num_resident < self.config.min_load_tokens:
            return
        query = self._query(sequence, num_resident)
        sequence.found = self._fetches.begin(query, num_resident, is_alone=is_alone)
        self.counts["lookups"] += 1

    def add_saves(self, moves: Moves, chunks: Sequence[Chunk]) -> Moves:
        """What the step of these chunks completes for the store; the step begins."""
        self._step_began_s = self._clock()
        return moves._replace(completed=self.saves.of_step(chunks))

    def settle(self, chunks: Sequence[Chunk], sampled: Sequence[Sampled], runner: Runner, scheduler: Scheduler) -> None:
        """The step was computed: what should have come and did not is taken back, what is sound is saved."""
        assert runner.chunks is not None
        lost = runner.chunks.end_load()
        is_warm_up = any(chunk.sequence.request.is_warm_up for chunk in chunks)
        if lost is None and chunks and not is_warm_up:  # else it may have waited
            rows = [(chunk.num_rows, chunk.end - chunk.num_rows) for chunk in chunks]
            self._costs.note_step(rows, self._clock() - self._step_began_s)
        if lost:
            scheduler.retract(lost)
        sampling = [chunk.sequence for chunk in chunks if chunk.samples]
        outcomes = zip(sampling, sampled, strict=True)
        runner.chunks.end_saves({sequence for sequence, outcome in outcomes if outcome.token_id is None})

    def end(self, sequence: RunningSequence, runner: Runner, *, is_sound: bool) -> None:
        """A request ends: what it still has for the store is saved, if that is sound. It has its pages still."""
        found, sequence.found = sequence.found, None
        if found is not None:
            found.close()
        if is_sound and runner.chunks is not None:
            runner.chunks.saver.save(self.saves.of_end(sequence))

    def abandon(self, runner: Runner) -> None:
        """A step failed: nothing that it was to load or to save counts, nor what was found for others."""
        if runner.chunks is not None:
            runner.chunks.abandon()
        self._fetches.abandon()

    def stats(self) -> dict[str, Any]:
        """From any thread; `store` is what `ChunkStore.stats` says."""
        return {
            **self.counts,
            "plans": dict(self._controller.num_plans),
            "given_up": dict(self._fetches.num_given_up),
            "read_buffer_bytes": self._fetches.room.num_used,
            "accuracy": self._costs.accuracy(),
            "store": dict(self.store.stats()),
        }

    def close(self) -> None:
        self._fetches.close()
        self.store.close()
        self._on_close()

    def _query(self, sequence: RunningSequence, num_resident: int) -> ChainQuery:
        assert sequence.chain is not None
        size = self.fingerprint.layout.chunk_tokens
        query = ChainQuery.of(
            sequence.chain.lineage,
            self.fingerprint.digest,
            sequence.context,
            size,
            request_id=sequence.request.request_id,
            first=num_resident // size,
            layout=self.fingerprint.layout,
        )
        sequence.chain.keys = list(query.keys)
        return query
