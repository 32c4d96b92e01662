"""A runner without tensors: it remembers which token was written to which slot, and reads a row's context back.

`forward` asserts that what each row sees is exactly its sequence up to its position, in order, and then "predicts"
a token that is a function of that context alone. So a policy that masks, shares, frees or reuses a page wrongly fails
at once, whatever it was that it did wrong.

A slot remembers its lineage too: a hash of the tenant's salt and of all tokens that its key and value were computed
behind, through whatever KV these were seen. A sequence of exact lineage asserts that it sees no other.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from mneme.errors import TransferFailed
from mneme.replicas.connector.save import SaveJob
from mneme.replicas.forest.moves import Moves
from mneme.replicas.forest.tree import NOWHERE
from mneme.replicas.model.draws import Expected, Sampled, SampleRow
from mneme.replicas.sequence import StepRows

FREE = 2**30
WRONG = -9  # a token whose KV is not what it should be

Slot = tuple[int, int]  # page, offset
Content = tuple[int, int, int]  # position, token, lineage
Slots = dict[Slot, Content]


class Clock:
    """The time is what a test says."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class FakeRunner:
    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        vocab_size: int = 5,
        max_context: int = 10_000,
        num_host_pages: int = 0,
        window: int | None = None,
        runs_ahead: bool = False,
    ) -> None:
        """`runs_ahead`: steps are launched before the tokens of the last one are known to the engine."""
        self.runs_ahead = runs_ahead
        self._expected: Expected | None = None
        self.num_pages, self.page_size, self.num_host_pages = num_pages, page_size, num_host_pages
        self.window, self.immovable = window, None if window is None else "sliding_window"
        self.device, self.dtype, self.kernels, self.weight_bytes = "none", "none", None, {"none": 1}
        self.kv_dtype, self.kv_bytes = "none", 1
        self.can_copy = True
        self.first_page = 1
        self.vocab_size, self.max_context = vocab_size, max_context
        self.num_layers = 4
        self.num_shared_segments = 0
        self.graphs = None
        self.num_rows = 0
        self.fail_next = False
        self.flat = False  # predict every token alike
        self.slots: Slots = {}
        self._writers: dict[Slot, tuple[StepRows, int]] = {}  # of this step, whose lineage is not known yet
        self.loader: Any = None  # of chunks, where there is a cache tier (`played_chunks`); and what saves them
        self.saver: Any = None
        self.doubtful: set[Slot] = set()  # of this step: what was to be loaded and was not, and what was computed of it
        self.num_failing_transfers = 0
        self._probing: list[StepRows] = []
        self._host: dict[int, dict[int, Content]] = {}  # host page -> offset
        self.num_saved = self.num_loaded = 0  # pages

    def close(self) -> None:
        self.can_copy = False

    def free_memory(self) -> None:
        pass

    def context(self, part: StepRows) -> list[int]:
        """Return what the sequence sees, as a device does: with the tokens that placeholders stand for."""
        context = part.sequence.context
        if self._expected is None or context[-1] >= 0:
            return context
        (source,) = self._expected.sources(np.array(context[-1:]))
        return [*context[:-1], max(int(self._expected.draws.tokens[source]), 0)]

    def prepare(
        self, batch: list[StepRows], moves: Moves, saves: Sequence[SaveJob] = (), expected: Expected | None = None
    ) -> list[StepRows]:
        self._expected = expected
        if self.num_failing_transfers:
            self.num_failing_transfers -= 1
            raise TransferFailed("no such memory")
        self._move(moves)
        self.doubtful = set()
        if moves.grafts:
            self.doubtful = self.loader.begin(moves.grafts, self.slots)
        for part in batch:
            self._write(part)
            self.num_rows += part.num_rows
        while self._writers:  # what stands before a row is noted with it
            self._note_lineage(next(iter(self._writers)))
        self._spread_doubt(batch)
        if self.saver is not None:
            self.saver.slots = self.slots
            if saves:
                self.saver.begin(saves)
        return batch

    def forward(self, batch: list[StepRows]) -> np.ndarray:
        """Logits [rows that sample, vocab]: the token that the context predicts, above all others."""
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("the device is gone")
        rows = []
        for part in batch:
            seen = [slot for position in part.positions.tolist() for slot in self._check_context(part, position)]
            if part.samples:
                is_wrong = not self.doubtful.isdisjoint(seen)
                rows.append((predict(self.context(part), self.vocab_size) + is_wrong) % self.vocab_size)
        self._probing = [part for part in batch if part.probes or part.num_compared]
        self.doubtful = set()
        return np.eye(self.vocab_size, dtype=np.float32)[rows] * (0 if self.flat else 10)

    def sample(self, logits: np.ndarray, rows: Sequence[SampleRow]) -> Any:
        if all(_is_plain(row) for row in rows):
            return _Drawn(logits)
        import torch  # only here: policy has no tensors

        from mneme.replicas.model.sampler import sample

        return sample(torch.from_numpy(logits), rows)

    def is_out_of_memory(self, error: Exception) -> bool:
        return isinstance(error, MemoryError)

    def pop_scores(self) -> list[tuple[Any, Any]]:
        """Any numbers for what is asked of documents."""
        scores = [(part, np.random.default_rng(5).random(_num_scored(part))) for part in self._probing]
        self._probing = []
        return scores

    def pop_departures(self) -> list[tuple[Any, Any]]:
        return []  # rows leave between layers, of which it has none

    def _move(self, moves: Moves) -> None:
        for columns in (*zip(*moves.saves, strict=True), moves.fresh, [load.device_page for load in moves.loads]):
            assert len(set(columns)) == len(columns), "a page stands twice in a column"
        for device_page, host_page in moves.saves:
            self._host[host_page] = {at: told for (page, at), told in self.slots.items() if page == device_page}
        fresh = set(moves.fresh)
        self.slots = {slot: content for slot, content in self.slots.items() if slot[0] not in fresh}
        for host_page, device_page, start, num_tokens in moves.loads:
            assert device_page in fresh
            for position in range(start, start + num_tokens):
                offset = position % self.page_size
                self.slots[device_page, offset] = self._host[host_page][offset]
                assert self.slots[device_page, offset][0] == position
        self.num_saved += len(moves.saves)
        self.num_loaded += len(moves.loads)

    def _write(self, part: StepRows) -> None:
        positions, context = part.positions.tolist(), self.context(part)
        slots = written_slots(part)
        positions = positions[: len(positions) - part.num_compared]
        assert len(slots) == len(positions) or (len(slots) == len(positions) - 1 and part.is_last)
        path = part.sequence.path
        private = {page.ids[0] for page in path.pages if page.positions is not None}
        for position, slot, key_position in zip(positions, slots, part.key_positions.tolist(), strict=False):
            assert position % self.page_size == slot[1] or slot[0] in private
            assert slot not in self.slots, "a slot is written twice"
            self.slots[slot] = (key_position, context[position], 0)
            self._writers[slot] = part, position

    def _note_lineage(self, slot: Slot) -> None:
        """Hash what stands before a row that was written in this step, which others of the step may have written."""
        chain = [slot]
        while (before := self._slot_before(*self._writers[chain[-1]])) in self._writers:
            assert before is not None
            chain.append(before)
        for each in reversed(chain):
            part, position = self._writers.pop(each)
            before = self._slot_before(part, position)
            lineage = root_lineage(part.sequence.request.salt) if before is None else self.slots[before][2]
            key_position, token, _ = self.slots[each]
            self.slots[each] = key_position, token, next_lineage(lineage, token)

    def _slot_before(self, part: StepRows, position: int) -> Slot | None:
        return next((slot for at, slot in self._seen(part, position) if at == position - 1), None)

    def _check_context(self, part: StepRows, query_position: int) -> list[Slot]:
        """The row sees each token of its window once, at its position; what is left of the window may be away.

        Returns where it sees them.
        """
        seen = self._seen(part, query_position)
        found = {position: self.slots[slot][1] for position, slot in seen}
        assert len(found) == len(seen), "a position is seen twice"
        first = self._first_seen(query_position)
        known = self.context(part)
        context = {position: known[position] for position in range(first, query_position + 1)}
        wrong = [slot for position, slot in seen if context.get(position) != self.slots[slot][1]]
        assert self.doubtful.issuperset(wrong), "a row sees what is not its context"
        assert found.keys() == context.keys()
        path = part.sequence.path
        if path is not None and not path.root.is_own:
            exact = {position: slot for position, slot in seen if slot not in self.doubtful}
            for position, lineage in enumerate(lineages(path.root.salt, known)):
                assert position not in exact or self.slots[exact[position]][2] == lineage, "approximate KV"
        return [slot for _, slot in seen]

    def _seen(self, part: StepRows, query_position: int) -> list[tuple[int, Slot]]:
        """What a row sees, in its window: positions in its sequence, and slots."""
        path, first = part.sequence.path, self._first_seen(query_position)
        deltas = [kept.delta for kept in path.root.kept] + [0] * len(path.pages)
        seen = []
        for page_id, mask, delta in zip(path.page_ids, path.all_masks().tolist(), deltas, strict=False):
            for offset in range(self.page_size if page_id != NOWHERE else 0):
                position = self.slots.get((page_id, offset), (FREE, -1, 0))[0] + delta
                if mask >> offset & 1 and first <= position <= query_position:
                    seen.append((position, (page_id, offset)))
        return seen

    def _first_seen(self, query_position: int) -> int:
        return 0 if self.window is None else max(query_position - self.window + 1, 0)

    def _spread_doubt(self, batch: list[StepRows]) -> None:
        """KV of rows that see what is not there is wrong, whoever sees it; its slots say so from now on."""
        num_before = 0
        while len(self.doubtful) > num_before:
            num_before = len(self.doubtful)
            for part in batch:
                for position, slot in zip(part.positions.tolist(), written_slots(part), strict=False):
                    if not self.doubtful.isdisjoint(each for _, each in self._seen(part, position)):
                        self.doubtful.add(slot)
        for slot in self.doubtful:
            self.slots[slot] = (self.slots[slot][0], WRONG, 0)


class _Drawn:
    """The best tokens."""

    def __init__(self, logits: np.ndarray) -> None:
        self.tokens = np.where(np.isfinite(logits).all(axis=1), logits.argmax(axis=1), -1) if len(logits) else []

    def __len__(self) -> int:
        return len(self.tokens)

    def wait(self) -> list[Sampled]:
        return [Sampled(int(token) if token >= 0 else None, None) for token in self.tokens]


def _is_plain(row: SampleRow) -> bool:
    """Return whether a row takes the best token, whatever was said before."""
    params = row.params
    is_edited = params.logit_bias or row.barred_ids or row.mask is not None or row.seen or row.drawn
    return not (params.weighing.temperature or is_edited or params.logprobs is not None)


def _num_scored(part: StepRows) -> int:
    return part.num_compared or len(part.sequence.blend.reused)


def written_slots(part: StepRows) -> list[Slot]:
    return [(page, offset + index) for page, offset, count in part.runs for index in range(count)]


def root_lineage(salt: str) -> int:
    return zlib.crc32(salt.encode())


def next_lineage(lineage: int, token: int) -> int:
    return zlib.crc32(lineage.to_bytes(4, "little") + token.to_bytes(4, "little", signed=True))


def lineages(salt: str, ids: Sequence[int]) -> list[int]:
    """Return the lineage of each token of an exact prompt."""
    return list(itertools.accumulate(ids, next_lineage, initial=root_lineage(salt)))[1:]


def predict(ids: list[int], vocab_size: int) -> int:
    """The fake model's greedy next token."""
    return zlib.crc32(bytes(token % 256 for token in ids)) % vocab_size


def continuation(ids: list[int], num_tokens: int, vocab_size: int) -> list[int]:
    """What greedy decoding of the fake model must give."""
    ids = list(ids)
    for _ in range(num_tokens):
        ids.append(predict(ids, vocab_size))
    return ids[len(ids) - num_tokens :]


def lose(engine: Any, index: int) -> None:
    """Let one of the pages that nobody holds, on the device or on the host, be lost."""
    forest = engine.forest
    pages = [page for root in forest.roots.values() for page in root.below_it() if not page.refs]
    pages = [
        (page, tier) for page in pages for tier in (forest.device, forest.host) if page.ids[tier.index] is not None
    ]
    if pages:
        page, tier = pages[index % len(pages)]
        forest.store.drop(page, tier)
        forest.check()
