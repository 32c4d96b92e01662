"""Runs an engine's steps: owns the tensors, carries out a step's moves, turns its batch into one forward pass.

The plan of the last step is kept, or several, where a blend reads other slots from some layers on. While the same
sequences decode, a step only moves their rows forward and appends the pages that were begun (`with_rows`,
`append_new_pages`); any other change builds a new plan, with the sequences ordered depth-first through the forest, so
that a shared prefix's query rows are one slice.
"""

from __future__ import annotations

import collections.abc
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from mneme.cachetier.host_pages.cuda import make_tier
from mneme.cachetier.host_pages.tier import PageLoad, joined
from mneme.kernels.arguments import row_size
from mneme.kernels.attention import (
    PageTable,
    Plan,
    QueryRows,
    attend,
    build_plan,
    mark_free,
    mark_written,
    new_slot_position,
    share_cost_of,
)
from mneme.kernels.page_table import FREE_SLOT_POSITION, IntArray
from mneme.kernels.segments import Lineages, ranges
from mneme.kernels.upload import upload
from mneme.kernels.work import Share
from mneme.replicas.blend.layer_filter import DocumentRows, LayerFilter
from mneme.replicas.blend.selectors import FloatArray
from mneme.replicas.connector.save import ChunkSaver, SaveJob
from mneme.replicas.connector.step_load import ChunkLoader
from mneme.replicas.forest.moves import Moves
from mneme.replicas.forest.paths import Path, slots_of
from mneme.replicas.forest.tree import NOWHERE
from mneme.replicas.model.attention_mass import NUM_OBSERVED, MassObserver, QuestionObserver
from mneme.replicas.model.decoder import Decoder, KvPool, StepInputs
from mneme.replicas.model.draws import Draws, Expected, SampleRow
from mneme.replicas.model.graphs import MakeGraphs, fill_in
from mneme.replicas.model.sampler import prompt_logprobs, sample
from mneme.replicas.model.timeline import Timeline
from mneme.replicas.scoring import Scoring
from mneme.replicas.sequence import StepRows

# Page 0 is nobody's: rows whose KV is already resident write there. Its slots are never visible.
_SPARE_PAGES = 1
_SPARE_SLOT = 0
_SPARE_RUN = (0, 0, 1)
_MAX_LOGITS = 1 << 24  # of prompts at a time: 64 MB, and as much again for their log-probabilities
_NO_PAGES = PageTable.own([])  # of sequences that pad a step


@dataclass(slots=True)
class _KeptPlans:
    """Holds the plans of the last step, and for whom they were made: in the order of the batch, what each path was."""

    plans: dict[int, Plan]  # by the layer from which on
    order: IntArray  # which of the batch is the i-th sequence of the plans
    place: IntArray  # the inverse: where in the plans each of the batch is
    is_divided: bool  # by layers, where there is reason to
    batch: list[StepRows]
    paths: list[Path]
    num_pages: list[int]
    num_changes: list[int]
    last_page: IntArray  # of each path, its id
    begun: list[int]  # which of the batch began pages in the last step: a token that is learned may move them

    def follow(self, index: int) -> None:
        """Take note of the pages that a path has now."""
        page_ids = self.paths[index].page_ids
        self.num_pages[index], self.last_page[index] = len(page_ids), page_ids[-1]


class Runner:
    """Runs one decoder over its pool."""

    first_page = _SPARE_PAGES

    def __init__(
        self,
        decoder: Decoder,
        num_pages: int,
        page_size: int,
        make_graphs: MakeGraphs | None = None,
        *,
        kv_dtype: torch.dtype | None = None,
        num_host_pages: int = 0,
        timeline: Timeline | None = None,
    ) -> None:
        """`make_graphs` gets the pass that graphs capture, and the pool; `kv_dtype`: int8, or the decoder's."""
        config = decoder.config
        self._decoder = decoder
        self.num_pages = num_pages
        self.page_size = page_size
        self.num_layers = config.num_layers
        self.max_context = decoder.max_context
        self.device, self.dtype = str(decoder.device), str(decoder.dtype).removeprefix("torch.")
        self.kernels = str(decoder.kernels) if decoder.device.type == "cpu" else None
        self.weight_bytes = decoder.weight_bytes
        self.vocab_size = config.vocab_size
        self.num_shared_segments = 0  # read once for several sequences, over all steps
        self.share_cost = share_cost_of(decoder.device, decoder.dtype)
        total = num_pages + _SPARE_PAGES
        kept_as = kv_dtype or decoder.dtype
        self.kv_dtype = str(kept_as).removeprefix("torch.")
        shape = (config.num_layers, config.num_kv_heads, total, page_size, row_size(config.head_dim, kept_as))
        self.pool = KvPool(
            k_pages=_zeros(shape, kept_as, decoder.device),
            v_pages=_zeros(shape, kept_as, decoder.device),
            slot_position=new_slot_position(total * page_size, decoder.device),
        )
        self.kv_bytes = 2 * self.pool.k_pages.nbytes
        self.window, self.immovable = config.window, config.immovable
        self.num_host_pages = num_host_pages
        self._tier = make_tier(self.pool, num_host_pages, timeline)
        self._loader: ChunkLoader | None = None  # where there is a cache tier
        self._saver: ChunkSaver | None = None
        if timeline is not None:
            decoder.record(timeline)
        self.graphs = None if make_graphs is None else make_graphs(self.launch, self.pool)
        # Of the step: who looks at documents, the rows that are compared, and what lets rows leave between layers.
        self._observers: list[QuestionObserver] = []
        self._compared: list[tuple[StepRows, DocumentRows]] = []
        self._narrowed: list[tuple[StepRows, DocumentRows]] = []
        self._layer_filter: LayerFilter | None = None
        self._kept: _KeptPlans | None = None
        # For measurements: gets the logits of a prompt's tokens that are scored, float32 [rows, vocab], in order.
        self.on_prompt_logits: Callable[[torch.Tensor], None] | None = None

    @property
    def can_copy(self) -> bool:
        """Return whether the tier has time for copies ahead of need."""
        return self._tier.is_idle

    @property
    def runs_ahead(self) -> bool:
        """Return whether a step may be launched before the last one's tokens are known to the host."""
        return self.graphs is not None

    def prepare(
        self,
        batch: list[StepRows],
        moves: Moves,
        saves: collections.abc.Sequence[SaveJob] = (),
        expected: Expected | None = None,
    ) -> StepInputs | None:
        """Make tensors and plan of a step; None if there are no rows. Slots of fresh pages become invisible first.

        saves     chunks of the cache tier that the step completes
        expected  tokens that the last step drew, whose placeholders the batch's sequences have
        """
        load = self._begin_moves(moves)
        if not batch:
            if load is not None:  # parts of long histories alone
                for layer in range(self._decoder.config.num_layers):
                    load.wait_layer(layer)
            return None
        others = [part for part in batch if not part.is_plain]
        begun = self._begun(batch)
        kept = self._kept
        order = kept.order if kept is not None and begun is not None else _depth_first(batch)
        ordered = [batch[index] for index in order.tolist()] if others else []  # decodes are laid out as arrays
        is_single = all(part.num_rows == 1 for part in others)
        positions = np.array([part.end for part in batch])[order] - 1 if is_single else _positions(ordered)
        is_shifted, is_read = any(part.is_shifted for part in others), any(part.is_read for part in others)
        bucket = None if load is not None or is_shifted or is_read else self._bucket(batch, others)
        kept = self._step_plans(batch, order, positions, bucket, begun, others)
        plans = kept.plans
        if is_single:
            token_ids = np.array([part.sequence.context[part.end - 1] for part in batch])[order]
            slots = kept.last_page[order] * self.page_size + positions % self.page_size
            if others:
                apart = [row for row, part in enumerate(ordered) if not part.is_plain]
                slots[apart] = self._slots([ordered[row] for row in apart])
            sampled_rows = kept.place if all(part.samples for part in others) else _sampled_rows(batch, order)
        else:
            token_ids, slots, sampled_rows = _token_ids(ordered), self._slots(ordered), _sampled_rows(batch, order)
        sources = np.full_like(token_ids, -1) if expected is None else expected.sources(token_ids)
        arrays = (token_ids, positions, slots, sources, sampled_rows)
        draws = None if expected is None or sources.max() < 0 else expected.draws.tokens
        inputs = self._inputs(arrays, plans[0], bucket, draws)
        inputs.load, inputs.plans = load, plans if len(plans) > 1 else {}
        rotated = positions
        if is_shifted:
            rotated = np.concatenate([part.key_positions for part in ordered])
            inputs.key_positions = self._tensor(rotated)
        self._observers, self._compared, self._narrowed, self._layer_filter = [], [], [], None
        if any(part.is_blended for part in others):
            self._follow_blends(inputs, ordered, slots)
        if is_read:
            self._read_prompts(inputs, ordered)
        if saves and self._saver is not None:
            self._saver.begin(saves)
            inputs.layer_done = self._saver.layer_done
        written = slots != _SPARE_SLOT
        if not others or written.all():
            where = inputs.positions if inputs.key_positions is None else inputs.key_positions
            mark_written(self.pool.slot_position, inputs.slots[: len(slots)], where[: len(slots)])
        else:
            mark_written(self.pool.slot_position, self._tensor(slots[written]), self._tensor(rotated[written]))
        self.num_shared_segments += inputs.plan.work.num_shared
        return inputs

    def use_chunks(self, loader: ChunkLoader, saver: ChunkSaver) -> None:
        """Let steps load chunks from the cache tier, and save them there, from now on."""
        self._loader, self._saver = loader, saver

    def free_memory(self) -> None:
        """Give what torch keeps for later back to the device."""
        if self._decoder.device.type == "cuda":
            torch.cuda.empty_cache()

    def close(self) -> None:
        """Give the host tier's memory and thread back; nothing can be computed any more."""
        self._tier.close()

    def forward(self, inputs: StepInputs | None) -> torch.Tensor:
        """Logits float32 [rows that sample, vocab], in the order of the batch."""
        if inputs is None:
            return torch.empty(0, self.vocab_size)
        logits = self.launch(inputs) if self.graphs is None else self.graphs.forward(inputs)
        return logits[: inputs.num_sampled]

    def sample(self, logits: torch.Tensor, rows: collections.abc.Sequence[SampleRow]) -> Draws:
        """Launch the draw of a token for each row of logits, float32 [rows, vocab], which are changed in place."""
        return sample(logits, rows)

    def is_out_of_memory(self, error: Exception) -> bool:
        """Return whether a step failed because the device had no memory for it."""
        return isinstance(error, torch.OutOfMemoryError)

    def pop_scores(self) -> list[tuple[StepRows, FloatArray]]:
        """Take what rows of the last step found of documents: see `Blend.add_scores`."""
        observers, compared = self._observers, self._compared
        self._observers, self._compared = [], []
        scores = [(observer.part, observer.scores()) for observer in observers]
        deviations = [(part, rows.deviation) for part, rows in compared if rows.deviation is not None]
        return scores + [(part, deviation.double().cpu().numpy()) for part, deviation in deviations]

    def pop_departures(self) -> list[tuple[StepRows, IntArray]]:
        """Take the layers in which rows of documents left the last step: see `Blend.add_departures`."""
        narrowed, self._narrowed = self._narrowed, []
        return [(part, rows.left.cpu().numpy()) for part, rows in narrowed if rows.left is not None]

    def _follow_blends(self, inputs: StepInputs, ordered: list[StepRows], slots: IntArray) -> None:
        """Let the step tell what blends choose by, and let rows leave it between layers."""
        self._observers = self._question_observers(ordered)
        if self._observers:
            inputs.observe = self._observe
        self._compared, self._narrowed = self._document_rows(ordered, slots)
        if self._compared or self._narrowed:
            self._layer_filter = LayerFilter([rows for _, rows in (*self._compared, *self._narrowed)], len(slots))
            inputs.layer_filter = self._layer_filter

    def _read_prompts(self, inputs: StepInputs, ordered: list[StepRows]) -> None:
        """Let the step give sequences what they want to know of their prompts' hidden states."""
        ends = accumulate(part.num_rows for part in ordered)
        wanted = [(part, end) for part, end in zip(ordered, ends, strict=True) if part.is_read]
        inputs.read_rows = self._tensor(np.concatenate([np.arange(end - part.num_rows, end) for part, end in wanted]))

        def read(hidden: torch.Tensor) -> None:
            for part, _ in wanted:
                states, hidden = hidden[: part.num_rows], hidden[part.num_rows :]
                scoring = part.sequence.scoring
                assert scoring is not None
                if scoring.pooling is not None:
                    scoring.pool(part.positions, states.double().cpu().numpy())
                self._score(part, scoring, states)

        inputs.read = read

    def _score(self, part: StepRows, scoring: Scoring, states: torch.Tensor) -> None:
        """Give a sequence the log-probabilities of its prompt's tokens that follow these rows, [rows, H]."""
        size = max(_MAX_LOGITS // self.vocab_size, 1)
        rows = scoring.unscored(part.positions)
        for some in np.split(rows, range(size, len(rows), size)) if len(rows) else []:
            token_ids = [part.sequence.ids[position + 1] for position in part.positions[some]]
            logits = self._decoder.logits(states[self._tensor(some)])
            if self.on_prompt_logits is not None:
                self.on_prompt_logits(logits)
            scoring.add(prompt_logprobs(logits, token_ids, scoring.num_top or 0), len(some))

    def _question_observers(self, ordered: list[StepRows]) -> list[QuestionObserver]:
        both = zip(ordered, accumulate(part.num_rows for part in ordered), strict=True)
        observers = (QuestionObserver.over(part, end, self.pool, self._decoder) for part, end in both if part.probes)
        return [observer for observer in observers if observer is not None]

    def _observe(self, layer: int, q: torch.Tensor, lse: torch.Tensor) -> None:
        for observer in self._observers:
            rows = observer.rows if self._layer_filter is None else self._layer_filter.places(observer.rows)
            observer(layer, q[rows], lse[rows])

    def _document_rows(
        self, ordered: list[StepRows], slots: IntArray
    ) -> tuple[list[tuple[StepRows, DocumentRows]], list[tuple[StepRows, DocumentRows]]]:
        """Find the rows that are computed to be compared, and those that may leave between layers."""
        compared = []
        narrowed = []
        for part, end in zip(ordered, accumulate(part.num_rows for part in ordered), strict=True):
            if part.num_compared:
                rows = np.arange(end - part.num_compared, end)
                compared.append((part, self._rows_of(_path(part), rows, part.compared)))
            elif len(rows := part.narrowed):
                positions = part.positions[rows]
                rows += end - part.num_rows
                own = self._rows_of(_path(part), rows, positions)
                own.private = self._tensor(slots[rows])
                own.counts = part.num_staying(len(rows))
                own.left = torch.full_like(own.cached, self.num_layers)
                own.staying = self._tensor(np.arange(len(rows)))
                narrowed.append((part, own))
        return compared, narrowed

    def _rows_of(self, path: Path, rows: IntArray, positions: IntArray) -> DocumentRows:
        cached, deltas = slots_of(path, self.page_size, positions)
        return DocumentRows(
            rows=self._tensor(rows), cached=self._tensor(cached), positions=self._tensor(positions - deltas)
        )

    def capture_graphs(self, num_sequences: int, num_rows: int, report: Callable[[float], None]) -> None:
        """Capture all steps that are to be replayed; no page may be in use, and no token is kept.

        Graphs point to buffers that do not move any more: they have room for a step of so many sequences and rows over
        all pages.
        """
        if self.graphs is None:
            return
        pages = np.array_split(np.arange(_SPARE_PAGES, self.num_pages + _SPARE_PAGES), num_sequences)
        longest = self.max_context // self.page_size
        tables = [PageTable.own(own[:longest].tolist()) for own in pages]
        sequence = np.sort(np.arange(num_rows) % num_sequences)
        positions = np.array([max(len(own[:longest]) * self.page_size - 1, 0) for own in pages])[sequence]
        self.graphs.attention.reserve(self._plan_of(tables, QueryRows(sequence, positions)))
        self.graphs.capture_all(self._padding, report)

    def _padding(self, num_rows: int, num_sampled: int) -> StepInputs:
        """Make the inputs of a step that has no row but padding."""
        zeros = np.zeros(num_rows, np.int64)
        plan = self._plan_of([_NO_PAGES] * num_rows, QueryRows(np.arange(num_rows), zeros))
        return self._inputs((zeros, zeros, zeros, zeros - 1, zeros[:num_sampled]), plan, num_rows)

    @contextmanager
    def no_trace(self) -> Iterator[None]:
        """Leave no trace of what runs in here: no slot is visible afterwards, no counter has moved."""
        num_shared, graphs = self.num_shared_segments, self.graphs
        num_replays = 0 if graphs is None else graphs.num_replays
        try:
            yield
        finally:
            self.pool.slot_position.fill_(FREE_SLOT_POSITION)
            self.num_shared_segments = num_shared
            if graphs is not None:
                graphs.num_replays = num_replays

    def attention_mass(self, path: Path, context: list[int]) -> list[float] | None:
        """Return the attention mass of each token on the path, as its last tokens see it; writes no KV.

        None if some of the path is yet to be computed or loaded, which is not looked for in fresh pages.
        """
        end = path.num_tokens
        observer = MassObserver.over(path, self.pool, self._decoder) if end else None
        if observer is None:
            return None
        positions = np.arange(max(end - NUM_OBSERVED, 0), end)
        plan = self._new_plan([path], QueryRows(np.zeros_like(positions), positions), num_padding=0)
        slots = np.full_like(positions, _SPARE_SLOT)
        token_ids = np.array(context[positions[0] : end], np.int64)
        known = np.full_like(positions, -1)
        inputs = self._inputs((token_ids, positions, slots, known, np.array([len(positions) - 1])), plan, None)
        inputs.observe = observer
        self.launch(inputs)
        return observer.masses()

    def launch(self, inputs: StepInputs) -> torch.Tensor:
        """Run `forward` without graphs; returns the logits of padding rows too."""
        return self._decoder.forward(inputs, self.pool)

    def _begin_moves(self, moves: Moves) -> PageLoad | None:
        """Begin to move pages; the forward pass waits for what is returned, layer by layer.

        Nothing of what a fresh page held may be seen by its next owner.
        """
        if moves.saves:
            device_pages, host_pages = np.array(moves.saves, np.int64).T
            self._tier.save(device_pages, host_pages)
        if moves.fresh:
            fresh = np.array(moves.fresh, np.int64)
            self._tier.before_reuse(fresh)
            if self._saver is not None:
                self._saver.before_reuse(fresh)
            slots = fresh[:, None] * self.page_size + np.arange(self.page_size)
            mark_free(self.pool.slot_position, self._tensor(slots.ravel()))
        loads = []
        if moves.loads:
            host_pages, device_pages, starts, counts = np.array(moves.loads, np.int64).T
            self._mark_written(device_pages, starts % self.page_size, counts, starts)
            loads.append(self._tier.load(host_pages, device_pages))
        if moves.grafts:
            assert self._loader is not None
            pieces = [piece for graft in moves.grafts for piece in graft.pieces]
            page_ids, offsets, counts = np.array([run for piece in pieces for run in piece.runs], np.int64).T
            starts = np.array([page.start for piece in pieces for page in piece.pages], np.int64)
            self._mark_written(page_ids, offsets, counts, starts)
            loads.append(self._loader.begin(moves.grafts))
        return joined(loads)

    def _mark_written(self, page_ids: IntArray, offsets: IntArray, counts: IntArray, starts: IntArray) -> None:
        """Make runs of slots visible: their keys are rotated from `starts` on."""
        slots = ranges(page_ids * self.page_size + offsets, counts)
        mark_written(self.pool.slot_position, self._tensor(slots), self._tensor(ranges(starts, counts)))

    def _bucket(self, batch: list[StepRows], others: list[StepRows]) -> int | None:
        """The rows that a step is padded to for its graph; None: too many, or a blend looks into it."""
        if self.graphs is None or any(map(_is_watched, others)):
            return None
        num_rows, num_sampled = sum(part.num_rows for part in others), sum(part.samples for part in others)
        num_plain = len(batch) - len(others)
        return self.graphs.bucket(num_plain + num_rows, num_plain + num_sampled)

    def _inputs(
        self, arrays: tuple[IntArray, ...], plan: Plan, bucket: int | None, draws: torch.Tensor | None = None
    ) -> StepInputs:
        if bucket is not None and self.graphs is not None:
            return self.graphs.inputs(arrays, plan, bucket, draws)
        token_ids, positions, slots, sources, sampled_rows = arrays
        ids_on_device = self._tensor(token_ids)
        if draws is not None:
            fill_in(ids_on_device, self._tensor(sources), draws)
        return StepInputs(
            token_ids=ids_on_device,
            positions=self._tensor(positions),
            slots=self._tensor(slots),
            sampled_rows=self._tensor(sampled_rows),
            num_sampled=len(sampled_rows),
            plan=plan,
        )

    def _begun(self, batch: list[StepRows]) -> list[int] | None:
        """Find which of a batch began pages since the kept plan. None where the order may be another now: there are
        other sequences, a path has changed, or a page is begun that another path has too."""
        kept = self._kept
        if kept is None or len(batch) != len(kept.batch):
            return None
        begun = []
        changed = [index for index, last in enumerate(kept.batch) if batch[index] is not last]
        for index in sorted({*changed, *kept.begun}):  # others decode in their own pages, as before
            path, num_pages = kept.paths[index], kept.num_pages[index]
            if batch[index].sequence.path is not path or path.num_changes != kept.num_changes[index]:
                return None
            if len(path.page_ids) != num_pages:
                if any(page.refs > 1 for page in path.pages[num_pages:]):
                    return None
                begun.append(index)
        return begun

    def _step_plans(
        self,
        batch: list[StepRows],
        order: IntArray,
        positions: IntArray,
        bucket: int | None,
        begun: list[int] | None,
        others: list[StepRows],
    ) -> _KeptPlans:
        """Plan the step, by the layer from which on; rows that fill it up to a bucket are at position 0 of sequences
        that have no pages."""
        kept, num_padding = self._kept, 0 if bucket is None else bucket - len(positions)
        num_sequences = len(batch) + num_padding
        sequence = np.arange(num_sequences)
        if len(positions) > len(batch):
            counts = np.array([part.num_rows for part in batch])[order]
            sequence = np.repeat(sequence, np.append(counts, np.ones(num_padding, np.int64)))
        rows = QueryRows(sequence, np.pad(positions, (0, num_padding)) if num_padding else positions)
        # One plan is captured, and rows that leave between layers have one: private slots hold copies in all layers.
        is_divided = self.graphs is None and not any(map(_is_watched, others))
        if begun is not None and kept is not None and kept.is_divided == is_divided:
            plans = self._appended(kept, begun, rows, num_sequences)
            if plans is not None:
                kept.plans, kept.batch, kept.begun = plans, batch, begun
                for index in begun:
                    kept.follow(index)
                return kept
        paths = _paths(batch)
        ordered = [paths[index] for index in order.tolist()]
        layers = {layer for root in {path.root for path in paths} for layer, _ in root.masks_from if is_divided}
        where: list[int | None] = [*sorted(layers)] or [None]
        plans = {layer or 0: self._new_plan(ordered, rows, num_padding, layer) for layer in where}
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        self._kept = _KeptPlans(
            plans,
            order,
            place,
            is_divided,
            batch,
            paths,
            [len(path.page_ids) for path in paths],
            [path.num_changes for path in paths],
            np.array([path.page_ids[-1] if path.page_ids else NOWHERE for path in paths], np.int64),
            list(range(len(batch))),
        )
        return self._kept

    def _appended(
        self, kept: _KeptPlans, begun: list[int], rows: QueryRows, num_sequences: int
    ) -> dict[int, Plan] | None:
        """Append the pages begun since to the kept plans, with these rows; None where they have to be built anew."""
        first = kept.plans[0]
        if first.num_sequences != num_sequences:
            return None
        if not np.array_equal(first.sequence, np.asarray(rows.sequence)):
            if begun or first.appended:  # work is laid out anew, which the tree does faster than the tables
                return None
        elif begun:
            new = [kept.paths[index].page_ids[kept.num_pages[index] :] for index in begun]
            places = np.repeat(kept.place[begun], [len(each) for each in new])
            page_ids, position = np.concatenate(new, dtype=np.int64), np.asarray(rows.position)
            grown = {layer: plan.append_new_pages(places, page_ids, position) for layer, plan in kept.plans.items()}
            plans = {layer: plan for layer, plan in grown.items() if plan is not None}
            return plans if len(plans) == len(grown) else None
        return {layer: plan.with_rows(rows) for layer, plan in kept.plans.items()}

    def _new_plan(self, paths: list[Path], rows: QueryRows, num_padding: int, layer: int | None = None) -> Plan:
        """Plan what is seen from a layer on; None: in any, private slots in place of what they hold copies of."""
        if any(path.gaps for path in paths) or any(root.is_own for root in {path.root for path in paths}):
            return self._plan_of([*(_page_table(path, layer) for path in paths), *[_NO_PAGES] * num_padding], rows)
        page_ids = np.frombuffer(b"".join([path.page_ids for path in paths]), np.int32)
        counts = np.array([len(path.page_ids) for path in paths] + [0] * num_padding, np.int64)
        starts = (np.cumsum(counts) - counts).tolist()
        masked = [(start + i, path.masks[i]) for path, start in zip(paths, starts, strict=False) for i in path.masks]
        return self._plan_of(Lineages(page_ids, counts, *np.array(masked, np.int64).reshape(-1, 2).T), rows)

    def _plan_of(self, tables: list[PageTable] | Lineages, rows: QueryRows, share: Share | None = None) -> Plan:
        config = self._decoder.config
        return build_plan(
            tables,
            rows,
            page_size=self.page_size,
            num_q_heads=config.num_q_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            share=share or self._decoder.share,
            cost=self.share_cost,
        )

    def attention_of(
        self, tables: list[PageTable], rows: QueryRows, share: Share
    ) -> tuple[Plan, collections.abc.Callable[[], None]]:
        """Return the plan of such a step, and what runs its attention alone, in all layers, to be measured."""
        plan, decoder = self._plan_of(tables, rows, share), self._decoder
        shape = (plan.num_rows, plan.num_q_heads, plan.head_dim)
        q = torch.zeros(shape, dtype=decoder.dtype, device=decoder.device)

        def run() -> None:
            for k_pages, v_pages, rope in zip(self.pool.k_pages, self.pool.v_pages, decoder.ropes, strict=True):
                attend(q, k_pages, v_pages, self.pool.slot_position, rope, plan, softmax_scale=1.0)

        return plan, run

    def _slots(self, ordered: list[StepRows]) -> IntArray:
        """Return where each row's KV is written; the spare slot for a last row without a run."""
        runs = [run for part in ordered for run in [*part.runs, *[_SPARE_RUN] * (part.num_rows - part.num_written)]]
        page_ids, offsets, counts = np.array(runs, np.int64).reshape(-1, 3).T
        return ranges(page_ids * self.page_size + offsets, counts)

    def _tensor(self, array: IntArray) -> torch.Tensor:
        return upload(array, self._decoder.device)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Make zeros; on a CPU by calloc, so that pages of the pool that were never used take no memory."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)


def _path(part: StepRows) -> Path:
    assert part.sequence.path is not None
    return part.sequence.path


def _paths(batch: list[StepRows]) -> list[Path]:
    found = [part.sequence.path for part in batch if part.sequence.path is not None]
    assert len(found) == len(batch)
    return found


def _depth_first(batch: list[StepRows]) -> IntArray:
    """Order a batch depth-first through the forest; returns indices into it."""
    keys = [path.page_ids.tobytes() for path in _paths(batch)]
    return np.array(sorted(range(len(batch)), key=keys.__getitem__))


def _positions(ordered: list[StepRows]) -> IntArray:
    """Return the position of each row."""
    starts, ends = np.array([span for part in ordered for span in part.spans]).T
    return ranges(starts, ends - starts)


def _token_ids(ordered: list[StepRows]) -> IntArray:
    """Return the token of each row; of one that is not known yet, its placeholder."""
    ids = [t for part in ordered for start, end in part.spans for t in part.sequence.context[start:end]]
    return np.array(ids, np.int64)


def _is_watched(part: StepRows) -> bool:
    """Return whether something looks at a blend's rows between layers, or lets them leave there."""
    return part.is_blended and (part.probes or bool(part.num_compared) or len(part.narrowed) > 0)


def _page_table(path: Path, layer: int | None) -> PageTable:
    """Return what the device has of the path, root first; in a layer: see `divide_layers`."""
    deltas = np.zeros(len(path.page_ids), np.int32)
    deltas[: len(path.root.kept)] = [kept.delta for kept in path.root.kept]
    page_ids, masks = np.array(path.page_ids, np.int32), path.all_masks()
    for first, seen in path.root.masks_from:
        if layer is not None and first <= layer:
            masks[: len(seen)] = seen
    present = slice(None) if not path.gaps else page_ids != NOWHERE
    return PageTable(page_ids[present], deltas[present], masks[present])


def _sampled_rows(batch: list[StepRows], order: IntArray) -> IntArray:
    """Find the last row of each sequence that samples, in the order of `batch`; the plan's is `order`."""
    last_rows = np.empty(len(batch), np.int64)
    last_rows[order] = np.cumsum(np.array([part.num_rows for part in batch])[order]) - 1
    return last_rows[[part.samples for part in batch]]
