"""Which rows run in the next step: decodes and parts of prompts in one batch under a token budget (Pensieve 4.2).

Running sequences go first, one row per decode set aside for each before parts of prompts share what is left
(`step_budget.py`); then waiting ones are admitted, fairly (`schedule/queue.py`). Where costs are known, of prompts the
one goes first that would be done first had it begun as it came: what is left of it, in predicted seconds, from its
arrival on. So a short prompt waits for no huge one, equal ones end one after the other, and nobody who comes later than
a prompt would take goes before it. Beside streams a step's rows of prompts take no longer than `max_step_s` allows.
When pages run out the latest arrival that has no rows in this step is suspended: its pages stay cached, it goes back to
the head of the queue and finds them again.
A sequence that fits the pool alone can therefore always finish: the oldest is never suspended, and pages are pinned
only as long as each request that was taken fits beside the pinned ones (`engine/pins.py`). A tenth of the pages is left
to running sequences: admission stops short of it, decodes may use it (Pensieve 4.3).

Before each part the forest is asked again, so a prompt that another sequence is prefilling is computed once:
the later one follows the pages as they come.

Policy only: no tensors.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterable, Iterator
from itertools import islice

import numpy as np

from mneme.cachetier.policy.cost_model import CostModel
from mneme.replicas.forest.forest import PrefixForest
from mneme.replicas.forest.moves import Graft
from mneme.replicas.forest.page_store import OutOfPages
from mneme.replicas.forest.paths import Path
from mneme.replicas.forest.tree import Page
from mneme.replicas.load import Load
from mneme.replicas.schedule.gathering import Gathering
from mneme.replicas.schedule.opener import AttentionMass, PathOpener
from mneme.replicas.schedule.queue import OUTPUT_WEIGHT, WaitingQueue
from mneme.replicas.schedule.step_budget import StepBudget, seconds_beside
from mneme.replicas.sequence import DecodeRow, End, Sequence, StepRows

# Steps after which a head that did not fit is matched again even if no page came free: what it would reuse stays young.
_REMATCH_STEPS = 64
_NUM_OVERTAKING = 8  # behind a head that waits for the cache tier
_MOST_SHRUNK = 8  # times fewer rows
_SHRUNK_STEPS = 1000  # that are smaller after one for which the device had no memory
_MAX_SHOWN = 64  # of a request, by `GET /v1/kv/explain`
_MAX_RETRIES = 2  # of steps that failed, by request and between two of its tokens: one that always fails ends it


class Scheduler:
    """Owns the queue and the running set; the forest owns the pages."""

    def __init__(
        self,
        forest: PrefixForest,
        *,
        max_batch_tokens: int,
        max_running: int,
        attention_mass: AttentionMass | None = None,
        costs: CostModel | None = None,
        max_step_s: float | None = None,
    ) -> None:
        """`max_step_s`: of a step beside streams, where costs are known, as `seconds_beside` has it."""
        self._forest = forest
        self._costs, self._max_step_s = costs, max_step_s
        self._opener = PathOpener(forest, attention_mass)
        self._max_batch_tokens = max_batch_tokens
        self.max_running = max_running
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []  # in order of arrival
        self.gathering = Gathering(self.waiting.add)  # neither: documents that they reuse are computed first
        self._failed: dict[Sequence, tuple[int, int]] = {}  # its output, and how many steps failed that it was in then
        self.num_suspensions = 0
        self.num_retracted = 0  # sequences that went back because their chunks did not come
        # The head that did not fit, and the steps before it is tried again; any release of pages forgets it. Only that
        # can make it fit: a page that another sequence takes, one that the head would share too, leaves as much room.
        self._refused: Sequence | None = None
        self._rematch_in = 0
        self._budget = StepBudget(0, forest.page_size)  # of the step that is being scheduled
        self._shrunk_tokens, self._num_shrunk = max_batch_tokens, 0  # rows of a step, for so many steps
        forest.look_ahead(lambda: (sequence.owner for sequence in self.waiting))

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(
        self,
        sequence: Sequence,
        *,
        parent: Sequence | None = None,
        leader: Sequence | None = None,
        num_missing: int = 0,
    ) -> None:
        """Add a sequence to the queue, or to those that wait for others.

        parent       for whom it computes a prompt
        leader       the choice of the same turn that it follows
        num_missing  prompts that are to be computed for it, by children that are added next
        """
        if parent is not None:
            self.gathering.parent_by_child[sequence] = parent
        sequence.due_s = sequence.request.taken_s
        if self._costs is not None:
            num_resident = 0
            if not sequence.request.reads_prompt:
                num_resident = sum(self._forest.resident(sequence.request.salt, sequence.context))
            sequence.num_expected = max(len(sequence.context) - num_resident, 1)
            sequence.due_s += self._costs.prefill_s(sequence.num_expected, num_resident)
        if leader is not None or num_missing:
            self.gathering.wait(sequence, num_missing=num_missing, leader=leader)
        else:
            self.waiting.add(sequence)

    def ended(self, end: End) -> None:
        """Forget a sequence. Its pages become cached, or go if it leaves nothing; its parent waits for it no more."""
        self.remove(end.sequence)
        request = end.sequence.request
        if request.leaves_nothing:
            self._forest.drop_salts(lambda salt: salt == request.kv_salt, is_counted=False)
        self.gathering.end_child(end.sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended; its pages become cached, its session's if it has one."""
        self._failed.pop(sequence, None)
        self.gathering.release_followers(sequence)
        if sequence in self.gathering:
            self.gathering.remove(sequence)
        elif sequence.path is None:
            self._refused = None
            self.waiting.remove(sequence)
        else:
            self._release(sequence)
            self.waiting.end(sequence)

    def pin(self, salt: str, ids: list[int], *, num_kept_tokens: int) -> Path:
        """Keep what is resident of a prefix until `unpin`.

        `num_kept_tokens` is what the longest request that was taken may need (`pins.py`). Raises `PinRefused` if
        nothing is resident, and if then that, or the reserve, would not be left.
        """
        pinned = self._forest.pin(salt, ids, num_kept_tokens=num_kept_tokens)
        _limit_output([*self.gathering, *self.waiting, *self.running], self._forest.capacity)
        return pinned

    def unpin(self, pinned: Path) -> None:
        """Let pinned pages be as any others again."""
        self._refused = None
        self._forest.release(pinned)

    @property
    def is_blocked(self) -> bool:
        """Return whether all there is to do is to wait for what the cache tier has of the next prompt."""
        return not self.running and bool(self.waiting) and not self._is_ready(self.waiting.head)

    def reopen(self, sequence: Sequence) -> None:
        """Let one that runs go back to the queue's front: it is known what of its documents is computed anew."""
        self._put_back([sequence])
        sequence.root = sequence.blend.drop_path(self._forest)

    def retract(self, pages: Collection[Page]) -> None:
        """The KV of grafted pages did not come: who is on them, or on what was computed behind them, goes back to the
        queue, to compute what they had."""
        lost = {each for page in pages for each in (page, *page.below_it())}
        gone = [s for s in self.running if s.path is not None and not lost.isdisjoint(s.path.pages)]
        self.num_retracted += len(gone)
        self._put_back(gone)
        if self._forest.store.sharing:  # else nothing stays of a path that was given back
            for page in pages:
                self._forest.store.drop_from(page)

    def retract_all(self) -> list[Sequence]:
        """The step was not computed, and no page can be trusted: who ran goes back to the queue.

        Returns those for whom that was once too often.
        """
        sequences = list(self.running)
        self.num_retracted += len(sequences)
        self._put_back(sequences)
        self._forest.clear(is_trusted=False)
        for sequence in sequences:
            num_output, num_failed = self._failed.get(sequence, (0, 0))
            is_again = num_output == sequence.num_output
            self._failed[sequence] = sequence.num_output, num_failed + 1 if is_again else 1
        return [sequence for sequence in sequences if self._failed[sequence][1] > _MAX_RETRIES]

    def schedule(self, ending: Collection[Sequence] = ()) -> list[StepRows]:
        """Return the rows of the next step, by sequence; every page they write to is taken.

        ending  sequences that end with the token that is on its way
        """
        batch: list[StepRows] = []
        running = [each for each in self.running if each not in ending] if ending else self.running.copy()
        others = [each for each in running if each.row is None or each.row.path is not each.path]
        loading = self._loading(others) if others else []
        decodes, prefills = running, list[Sequence]()
        if others:
            prefills = [each for each in others if each not in loading and self._num_pending(each) > 1]
            apart = {*loading, *prefills}
            decodes = [each for each in running if each not in apart]
        num_prefills = len(prefills)
        budget = self._budget = self._make_budget(decodes)
        order = running
        if self._costs is not None and prefills:
            order = [*loading, *decodes, *sorted(prefills, key=self._set_due)]
        for sequence in self._take_next(order, batch):
            if sequence.path is None:  # suspended for an earlier one, in this very step
                continue
            if loading and sequence in loading:
                budget.cut(sequence, sequence.path.num_tokens, self._num_missing_pages(sequence))
                continue
            if (view := sequence.view).is_over(len(sequence.context)):
                # The history is perhaps more than the cache tier had of it.
                num_history = max(sequence.path.num_tokens, view.num_history if view.event else 0)
                sequence.path = self._opener.shorten(sequence, sequence.path, num_history)
            is_decode = self._num_pending(sequence) <= 1
            num_prefills -= not is_decode
            limit = 1 if is_decode else self._limit(sequence, has_others=bool(num_prefills or self.waiting))
            part = self._take_or_suspend(sequence, limit, batch)
            if part is not None:
                batch.append(part)
                if not is_decode:
                    budget.add(part, self._num_missing_pages)
        for sequence in [s for s in loading if s.path is not None]:
            self._graft_more(sequence, batch)
        self._admit(batch, budget)
        if self.gathering and self.gathering.arrive(self.running, self._has_all):
            self._admit(batch, budget)
        self._widen(batch, budget)
        self.waiting.charge([part.sequence for part in batch if part.samples], OUTPUT_WEIGHT)
        return batch

    def _make_budget(self, decodes: Collection[Sequence]) -> StepBudget:
        """Set a row aside for each decode, and its time where somebody's next token waits for the step."""
        self._num_shrunk = max(self._num_shrunk - 1, 0)
        max_rows = self._max_batch_tokens
        if self._num_shrunk:  # whatever decodes leave, prompts go on
            max_rows = max(self._shrunk_tokens, len(decodes) + self._forest.page_size)
        num_rows, seconds = max_rows - len(decodes), math.inf
        if self._costs is not None and any(sequence.num_output for sequence in decodes):
            decode_s = self._costs.decode_s(len(decodes), sum(len(sequence.context) for sequence in decodes))
            seconds = seconds_beside(decode_s, self._max_step_s)
        return StepBudget(num_rows, self._forest.page_size, self._costs, seconds)

    def shrink(self) -> None:
        """Halve the rows of prompts in a step for a while: the device had no memory for as many."""
        before = self._shrunk_tokens if self._num_shrunk else self._max_batch_tokens
        least = -(-self._max_batch_tokens // _MOST_SHRUNK)
        self._shrunk_tokens, self._num_shrunk = max(before // 2, least), _SHRUNK_STEPS

    def _set_due(self, sequence: Sequence) -> float:
        """Note and return by when its prompt would be done, had what is left of it begun as it came."""
        assert self._costs is not None
        assert sequence.path is not None
        left_s = self._costs.prefill_s(self._num_pending(sequence), sequence.path.num_tokens)
        sequence.due_s = sequence.request.taken_s + left_s
        return sequence.due_s

    def _limit(self, sequence: Sequence, *, has_others: bool) -> int:
        """Return the rows that a prompt may have, beside those of one that waits and goes before it."""
        assert sequence.path is not None
        num_reserved = 0
        if self._costs is not None and self.waiting and len(self.running) < self.max_running:
            head = self.waiting.head
            if head is not self._refused and head.due_s < sequence.due_s:
                num_reserved = head.num_expected
        return self._budget.limit(sequence.path.num_tokens, has_others=has_others, num_reserved=num_reserved)

    def _admit(self, batch: list[StepRows], budget: StepBudget) -> None:
        chosen = self.waiting.chosen
        if chosen is not None and chosen.load is not None:
            chosen.load.pause()  # its chunks cost nothing while they are not what it waits for
        while self.waiting and budget.has_room and len(self.running) < self.max_running:
            sequence = self.waiting.head
            if not self._is_ready(sequence):
                self._admit_behind(sequence, batch)
                return
            if sequence is self._refused and self._rematch_in > 0:
                self._rematch_in -= 1
                return
            if not self._opener.admit(sequence, len(self.running), budget):
                self._refused, self._rematch_in = sequence, _REMATCH_STEPS
                return
            self.waiting.pop(self._start(sequence))
            self._begin(sequence, batch, has_others=bool(self.waiting))

    def _admit_behind(self, head: Sequence, batch: list[StepRows]) -> None:
        """While the head waits for its chunks, those of the next few that do not hold it up: their whole prompts are
        computed in this step, and they leave the head its pages and its place among the running."""
        num_kept = self._opener.num_pages(head)
        for sequence in list(islice(self.waiting, 1, 1 + _NUM_OVERTAKING)) if self.running else []:
            is_short = len(sequence.context) <= self._budget.num_rows(0) and sequence.request.choice_index == 0
            is_ready = self._comes_whole(sequence)
            can_run = is_short and is_ready and len(self.running) + 1 < self.max_running
            if can_run and self._opener.admit(sequence, len(self.running), self._budget, num_kept=num_kept):
                self.waiting.overtake(sequence, self._start(sequence))
                self._begin(sequence, batch, has_others=False)

    def _start(self, sequence: Sequence) -> int:
        """Let a sequence that has a path run; returns how many tokens it has to compute."""
        self._graft(sequence)
        _insert_by_arrival(self.running, sequence)
        return self._num_pending(sequence) - sequence.num_to_come

    def _graft(self, sequence: Sequence) -> None:
        """Give the sequence pages for what the cache tier has of it, and the forest has not.

        Beside others that already have tokens to give, a step loads no more than in the time that a full step computes,
        of all sequences together, the oldest first: a long history comes in parts, and its sequence has rows from the
        last of them on. `load` stays if more is to come.
        """
        load, path = sequence.load, sequence.path
        if load is None or load.is_asking:
            return
        assert path is not None
        # Pages of their own may be one more than counted.
        has_room = self._forest.has_room(self._num_missing_pages(sequence) + 1)
        limit = self._load_limit(load)
        if has_room and limit == 0 and sequence.num_to_come:
            return  # others load in this step
        graft = None
        if has_room and sequence.view.event:
            graft = self._restore(sequence, path, load, limit)
        elif has_room and sequence.root is None:
            graft = path.graft(sequence.context, load, limit)
        for piece in () if graft is None else graft.pieces:
            sequence.add_origin(piece.start, piece.end, load.source_of(piece.chunk))
        if graft is None:
            sequence.drop_load()
            return
        self._budget.num_loaded += len(graft.pieces)
        if graft.is_last:
            sequence.load = None

    def _restore(self, sequence: Sequence, path: Path, load: Load, limit: int | None) -> Graft | None:
        """Let a truncated or blended session go on from its stored KV, if that is more than was computed meanwhile.

        Where not all is there that it had, it is another event: what is computed behind is not what was.
        """
        event = sequence.view.event if load.has_all(sequence.view.num_history - 1) else b""
        is_more = path.root.is_own or load.end > path.num_tokens
        restored = self._forest.restore(path, sequence.context, load, event, limit) if is_more else None
        if restored is None:
            return None
        sequence.path, graft = restored
        sequence.root = sequence.path.root
        return graft

    def _comes_whole(self, sequence: Sequence) -> bool:
        """Return whether one that does not run yet would wait neither for its chunks nor for a step to load them."""
        load = sequence.load
        if load is None or not load.is_decided:
            return load is None
        limit = self._load_limit(load)
        return limit is None or len(load.spans) <= limit

    def _load_limit(self, load: Load) -> int | None:
        """Return how many chunks the step may still load of it; None: all."""
        if load.plan is None or not self._has_streams:
            return None
        return load.num_at_once(max(load.plan.step_chunks - self._budget.num_loaded, 0))

    def _loading(self, running: Iterable[Sequence]) -> list[Sequence]:
        """Return who of these has no rows before more of its chunks is loaded."""
        answered = [s for s in running if s.load is not None and not s.load.is_asking]
        for sequence in answered:
            if not sequence.num_to_come:  # it computed, or follows, as much meanwhile
                sequence.drop_load()
        return [s for s in answered if s.load is not None]

    def _graft_more(self, sequence: Sequence, batch: list[StepRows]) -> None:
        """Graft the next of its chunks. Behind all rows: whose pages these are is not suspended in this step any more.

        Those that were found after its first rows may be on their way: it is waited for them only beside others.
        """
        assert sequence.path is not None
        if sequence.load is not None and not sequence.load.is_ready(is_alone=not batch):
            return
        sequence.path.extend(sequence.context, len(sequence.context))
        self._graft(sequence)
        with contextlib.suppress(OutOfPages):  # it has rows in the next step, at others' cost
            self._begin(sequence, batch, has_others=bool(self.waiting))

    def _begin(self, sequence: Sequence, batch: list[StepRows], *, has_others: bool) -> None:
        """Give it its first rows, if all that is loaded of it comes with this step."""
        budget = self._budget
        if sequence.load is not None and not sequence.load.is_asking:
            assert sequence.path is not None
            budget.cut(sequence, sequence.path.num_tokens, self._num_missing_pages(sequence))
        elif budget.num_left > 0 and not sequence.view.is_over(len(sequence.context)):
            assert sequence.path is not None
            limit = budget.limit(sequence.path.num_tokens, has_others=has_others)
            part = self._take_rows(sequence, limit) if limit else None
            if part is not None:
                batch.append(part)
                budget.add(part, self._num_missing_pages)

    def _widen(self, batch: list[StepRows], budget: StepBudget) -> None:
        """Give the rows that are left to prompts that were cut, the oldest first."""
        for index in [index for index, part in enumerate(batch) if not part.samples]:
            part = batch[index]
            path, ids = part.sequence.path, part.sequence.context
            if part.end == len(ids) or part.sequence.load is not None or part.sequence.blend.num_to_compare:
                continue
            assert path is not None
            num_rows = budget.num_rows(part.end)
            if num_rows == 0:
                continue
            if path.extend(ids, len(ids)):
                continue
            with contextlib.suppress(OutOfPages):  # it has its share
                rows = path.take_rows(ids, num_rows)
                part.sequence.add_origins(rows)
                batch[index] = wider = part.with_rows(rows)
                budget.spend(wider.num_rows - part.num_rows, part.end)

    def _num_missing_pages(self, sequence: Sequence) -> int:
        assert sequence.path is not None
        return sequence.path.num_new_pages(sequence.context, sequence.view.num_fitting(len(sequence.context)))

    @property
    def _has_streams(self) -> bool:
        """Return whether somebody's next token would wait for what a step loads."""
        return any(sequence.num_output for sequence in self.running)

    def _is_ready(self, sequence: Sequence) -> bool:
        """Return whether it need not wait for the cache tier; alone, it may be computed while its chunks come.

        Not before others whose chunks come too: they are read at the same time, so its step would wait longer.
        """
        if sequence.load is None:
            return True
        others = islice(self.waiting, 1, 1 + _NUM_OVERTAKING)
        return sequence.load.is_ready(is_alone=not self.running and all(each.load is None for each in others))

    def _take_or_suspend(self, sequence: Sequence, budget: int, batch: Iterable[StepRows]) -> StepRows | None:
        """Take the sequence's rows; suspends later arrivals while pages are short, at last the sequence itself."""
        if budget <= 0:
            return None
        while True:
            try:
                return self._take_rows(sequence, budget)
            except OutOfPages:
                scheduled = {id(part.sequence) for part in batch}
                victim = next(s for s in reversed(self.running) if id(s) not in scheduled)
                if victim is self.running[0] and batch:  # it keeps what it has: others, which went before it, end
                    return None
                self._suspend(victim)
                if victim is sequence:
                    return None

    def _take_next(self, order: Iterable[Sequence], batch: list[StepRows]) -> Iterator[Sequence]:
        """Take decodes' rows where these go on in pages of their own; yields the others in their turn."""
        for sequence in order:
            row, path = sequence.row, sequence.path
            if row is None or row.path is not path or len(row.context) > row.window:
                yield sequence
            elif path.write_next(row.context):
                row.end = path.num_tokens
                batch.append(row)
            elif path.begin_next(row.context):
                sequence.row = DecodeRow(sequence, path)
                batch.append(sequence.row)
            else:
                yield sequence

    def _take_rows(self, sequence: Sequence, budget: int) -> StepRows | None:
        """Take at most so many rows.

        None if another prompt, which goes the same way, has them in this step, or if the cache tier is still asked for
        this one: while another prompt is computed nothing is lost by waiting, unless the answer is overdue.
        """
        if sequence.blend.num_to_compare:
            return self._take_compared(sequence, budget)
        path, ids = sequence.path, sequence.context
        assert path is not None
        num_had = path.num_tokens
        path.extend(ids, len(ids))
        if path.num_tokens + 1 < len(ids) and self._budget.follows(path, ids):
            return None
        if budget > 1 and path.num_tokens > num_had:  # rows behind what it found now take longer
            budget = min(budget, self._budget.num_rows(path.num_tokens))
            if budget == 0:
                self._budget.cut(sequence, path.num_tokens, self._num_missing_pages(sequence))
                return None
        load = sequence.load
        if load is not None:  # more of it may be said to be in a tier before these are computed
            waits = path.num_tokens < len(ids) and not load.is_overdue  # not where only its logits are missing
            if self._budget.num_taken and waits:  # its pages are promised all the same
                self._budget.cut(sequence, path.num_tokens, self._num_missing_pages(sequence))
                return None
            budget = min(budget, load.num_rows_before(path.num_tokens))
        rows = path.take_rows(ids, budget)
        sequence.add_origins(rows)
        part = StepRows(sequence, rows.spans, rows.runs, rows.shifts)
        # Of a warm-up none: so `Engine._commit` and `Outbox.append_next` count whatever has one, and need not ask.
        is_counted = not sequence.request.is_warm_up
        sequence.row = DecodeRow(sequence, path) if part.is_plain and is_counted else None  # of the steps behind this
        if load is not None:
            if not sequence.view.event:  # what it computes is a part of what is found
                load.num_resident = path.num_tokens
            if part.samples:  # it has all its rows: too late
                load.give_up("lookup")
                sequence.drop_load()
        return part

    def _take_compared(self, sequence: Sequence, budget: int) -> StepRows:
        """Take rows of documents behind all text between them, which they see."""
        path, ids = sequence.path, sequence.context
        assert path is not None
        num_text = path.num_pending(ids) - (len(ids) - path.num_tokens)
        rows = path.take_rows(ids, min(num_text, budget))
        sequence.add_origins(rows)
        positions = sequence.blend.next_compared(max(budget - num_text, 0))
        pieces = np.split(positions, np.flatnonzero(np.diff(positions) > 1) + 1) if len(positions) else []
        spans = [*rows.spans, *((int(piece[0]), int(piece[-1]) + 1) for piece in pieces)]
        return StepRows(sequence, spans, rows.runs, rows.shifts + [0] * len(pieces), len(positions))

    def _put_back(self, sequences: Collection[Sequence]) -> None:
        parents = self.gathering.parent_by_child
        for sequence in sequences:
            assert sequence.path is not None
            self.running.remove(sequence)
            self._forest.release(sequence.path)
            sequence.path = sequence.row = None
            sequence.num_put_back += 1
            sequence.drop_load()
            if sequence.chain is not None:
                sequence.chain.num_saved = 0
            num_children = sum(parents.get(child) is sequence for child in sequences)
            if sequence.request.documents and num_children:  # they came in the step that is gone, and come again
                self.waiting.end(sequence)
                self.gathering.wait(sequence, num_missing=num_children)
            else:
                self.waiting.put_back(sequence)
        self._refused = None

    def _has_all(self, sequence: Sequence) -> bool:
        """Return whether all of its tokens have KV when the step that is being scheduled has run."""
        return sequence.load is None and not self._num_pending(sequence)

    def _num_pending(self, sequence: Sequence) -> int:
        """Count the rows before its next token: 1 in decode; 0 where all has KV and only the logits are missing."""
        path = sequence.path
        assert path is not None
        num_pending = path.num_pending(sequence.context) if path.gaps else len(sequence.context) - path.num_tokens
        return sequence.blend.num_to_compare + num_pending

    def _suspend(self, sequence: Sequence) -> None:
        self._release(sequence)
        sequence.drop_load()
        self.num_suspensions += 1
        if len(sequence.suspended_at) < _MAX_SHOWN:
            sequence.suspended_at.append(sequence.request.output_offset + sequence.num_output)
        self.waiting.put_back(sequence)

    def _release(self, sequence: Sequence) -> None:
        """Release its path, the session's if it is the first choice of a turn: the session goes on from that."""
        assert sequence.path is not None
        self._refused = None
        self.running.remove(sequence)
        self._forest.release(sequence.path, sequence.owner if sequence.request.choice_index == 0 else None)
        sequence.path = sequence.row = None  # else each is in a circle of references, which waits for the collector


def _insert_by_arrival(running: list[Sequence], sequence: Sequence) -> None:
    index = len(running)
    while index and running[index - 1].arrival > sequence.arrival:
        index -= 1
    running.insert(index, sequence)


def _limit_output(sequences: Iterable[Sequence], capacity: int) -> None:
    """Let requests that named no `max_tokens` end at `capacity` tokens with their prompt, as pages were pinned.

    Those that are truncated when they outgrow their window have a smaller one.
    """
    for sequence in sequences:
        sequence.row = None  # it knows the limits
        if sequence.view.window is not None:
            sequence.view.window = min(sequence.view.window, capacity)
        elif sequence.request.sampling.max_tokens is None:
            sequence.max_tokens = min(sequence.max_tokens, capacity - sequence.num_prompt)
