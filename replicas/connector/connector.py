"""Connects one engine to its cache tier: looks up, loads and saves chunks.

Engine._start     look_up     a sequence that begins is looked for; the scheduler waits for the answer, not for long:
                              then it computes the first rows, and what comes before the last of them is still used
Scheduler._admit              pages for what was found (`forest/paths.py: graft`)
Engine._launch    begin_step  chunks that the step completes; where steps are launched ahead, `save_launched` behind it
Runner.prepare                loads and saves begin (`ChunkLoader`, `ChunkSaver`); layers are waited for, and told
Engine._commit    end_step    what did not come is taken back, what is sound goes to the store
Engine._finish    ended       a request's last chunk
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict
from itertools import islice
from typing import Any

from mneme.cachetier.chunk.fingerprint import ModelFingerprint
from mneme.cachetier.config import CacheConfig
from mneme.cachetier.policy.cost_model import CostModel
from mneme.cachetier.policy.load_controller import LoadController
from mneme.cachetier.store import ChainQuery, ChunkStore
from mneme.replicas.connector.loads import Loads, MakeWorkers
from mneme.replicas.connector.save import ChunkSaver, SaveJob, SavePolicy
from mneme.replicas.connector.step_load import ChunkLoader
from mneme.replicas.forest.forest import PrefixForest
from mneme.replicas.forest.tree import Page
from mneme.replicas.sequence import End, StepRows
from mneme.replicas.sequence import Sequence as RunningSequence

MIN_LOAD_TOKENS = 64  # fewer are computed without a question: a question takes a millisecond
_LOOK_AGAIN_S = 0.1  # since it was last looked whether a request that waits is to be asked for again
_NUM_LOOKED_AT = 8  # of the queue, its head first


class KvConnector:
    """Connects one engine to its store. The engine's thread calls it, but for `stats`."""

    def __init__(
        self,
        store: ChunkStore,
        fingerprint: ModelFingerprint,
        costs: CostModel,
        config: CacheConfig,
        *,
        loader: ChunkLoader,
        saver: ChunkSaver,
        page_size: int,
        clock: Callable[[], float] = time.monotonic,
        make_workers: MakeWorkers | None = None,
    ) -> None:
        self.store, self.fingerprint, self.config = store, fingerprint, config
        self.loader, self.saver = loader, saver  # the runner begins what they do, and calls them layer by layer
        self._saves = SavePolicy(store, fingerprint, page_size)
        self.costs, self._clock = costs, clock
        self._controller = LoadController(
            costs, num_layers=fingerprint.layout.num_layers, loads_all=config.load == "always"
        )
        self.loads = Loads(
            store,
            self._controller,
            costs,
            clock=clock,
            make_workers=make_workers,
        )
        self.counts: Counter[str] = Counter()
        self.min_load_tokens = MIN_LOAD_TOKENS

    def set_on_answer(self, on_answer: Callable[[], None]) -> None:
        """Have this called, on another thread, as soon as the engine may not be blocked any more."""
        self.loads.on_answer = on_answer

    def look_up(self, sequence: RunningSequence, forest: PrefixForest, *, is_alone: bool, asks: bool = True) -> None:
        """Begin to look up what the engine lacks of a sequence, if that is worth a question.

        is_alone  nothing else runs or waits
        asks      False: never ask for it
        """
        if sequence.request.leaves_nothing:
            return
        salt, context, event = sequence.request.salt, sequence.context, sequence.view.event
        sequence.chain = self._saves.chain(sequence, event)
        sequence.chain.asked_s = self._clock() if asks else math.inf
        if sequence.root is not None and not sequence.root.is_lost:
            return
        if (
            not asks or self.config.load == "never" or sequence.request.choice_index
        ):  # other choices follow the first, which asks
            return
        num_resident = sum(forest.resident(salt, context))
        if len(context) - num_resident < self.min_load_tokens:
            return
        if event:  # what is resident is other KV
            num_resident = 0
        # Where the engine lacks full chunks of what its session had, they were stored.
        num_stored = sequence.view.num_history - num_resident
        num_stored = num_stored if num_stored >= self.fingerprint.layout.chunk_tokens else 0
        if not self._controller.asks(num_resident, len(context), num_stored):
            return
        query = self._query(sequence, num_resident)
        sequence.load = self.loads.begin(query, num_resident, num_stored=num_stored, is_alone=is_alone)
        self.counts["lookups"] += 1

    def look_again(self, unstarted: Iterable[RunningSequence], forest: PrefixForest) -> None:
        """Ask anew for the first that wait, from time to time, if what the engine had of them has gone meanwhile.

        What was found behind it would be of no use (AttentionStore 3.3.1).
        """
        now_s = self._clock()
        for sequence in islice(unstarted, _NUM_LOOKED_AT):
            chain, load, context = sequence.chain, sequence.load, sequence.context
            if chain is None or now_s - chain.asked_s < _LOOK_AGAIN_S:
                continue
            chain.asked_s = now_s
            if load is not None and not load.is_outdated(sum(forest.resident(sequence.request.salt, context))):
                continue
            sequence.load = None
            self.look_up(sequence, forest, is_alone=False)
            if load is not None:  # behind: the request waits on
                load.close()

    def begin_step(self, batch: Sequence[StepRows]) -> list[SaveJob]:
        """Return the chunks that a step completes for the store."""
        return self._saves.of_step(batch)

    def save_launched(self, batch: Sequence[StepRows]) -> None:
        """Save the chunks that a step completes, which is launched whole; all tokens before its draws are known by now.

        They are copied behind what was launched so far, whoever waits for the step, and confirmed by `end_step`.
        """
        self.saver.begin(self._saves.of_step(batch))
        self.saver.all_launched()

    def end_step(
        self,
        unsound: Collection[RunningSequence],
        retract: Callable[[Collection[Page]], None],
        *,
        has_loads: bool,
    ) -> None:
        """Take back what a step that was computed should have loaded and did not, and save what is sound.

        unsound    sequences whose logits are not finite
        retract    `Scheduler.retract`
        has_loads  False: it loaded nothing, and what is being loaded is the next step's
        """
        lost = self.loader.end() if has_loads else None
        if lost:
            retract(lost)
        self.saver.end(unsound)

    def ended(self, end: End) -> None:
        """End a request's use of the store: save what it still has for it, if that is sound. It has its pages still."""
        end.sequence.drop_load()
        if end.is_sound:
            self.saver.save(self._saves.of_end(end.sequence))

    def abandon(self) -> None:
        """Give up what a failed step was to load and to save, and what was found for others."""
        self.loader.end()
        self.saver.abandon()
        self.loads.abandon()

    def stats(self) -> dict[str, Any]:
        """Return counters, from any thread; `store` is what `ChunkStore.stats` says."""
        return {
            **self.counts,
            "plans": dict(self._controller.num_plans),
            "given_up": dict(self.loads.num_given_up),
            "read_buffer_bytes": self.loads.budget.num_used,
            "chunks": {"loaded": self.loader.num_loaded, "lost": self.loader.num_lost, **asdict(self.saver.counts)},
            "store": dict(self.store.stats()),
        }

    def close(self) -> None:
        self.loader.close()
        self.saver.close()
        self.loads.close()
        self.store.close()

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
