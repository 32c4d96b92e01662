"""A runner without tensors: it remembers which token was written to which slot, and reads a row's context back.

`forward` asserts that what each row sees is exactly its sequence up to its position, in order, and then "predicts"
a token that is a function of that context alone. So a policy that masks, shares, frees or reuses a page wrongly fails
at once, whatever it was that it did wrong.
"""

from __future__ import annotations

import itertools
import zlib

import torch

from mneme.replicas.forest_moves import Moves
from mneme.replicas.sequence import Chunk

FREE = 2**30


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
    ) -> None:
        self.num_pages, self.page_size, self.num_host_pages = num_pages, page_size, num_host_pages
        self.window, self.is_windowed = window, window is not None
        self.can_copy = True
        self.first_page = 1
        self.vocab_size, self.max_context = vocab_size, max_context
        self.num_shared_segments = 0
        self.num_rows = 0
        self.fail_next = False
        self.flat = False  # predict every token alike
        self._slots: dict[tuple[int, int], tuple[int, int]] = {}  # (page, offset) -> (position, token)
        self._host: dict[int, dict[int, tuple[int, int]]] = {}  # host page -> offset -> (position, token)
        self.num_saved = self.num_loaded = 0  # pages

    def close(self) -> None:
        self.can_copy = False

    def prepare(self, chunks: list[Chunk], moves: Moves) -> list[Chunk]:
        self._move(moves)
        for chunk in chunks:
            self._write(chunk)
            self.num_rows += chunk.num_rows
        return chunks

    def forward(self, chunks: list[Chunk]) -> torch.Tensor:
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("the device is gone")
        rows = []
        for chunk in chunks:
            for position in itertools.chain(*itertools.starmap(range, chunk.spans)):
                self._check_context(chunk, position)
            if chunk.samples:
                rows.append(predict(chunk.sequence.context, self.vocab_size))
        chosen = torch.nn.functional.one_hot(torch.tensor(rows, dtype=torch.int64), self.vocab_size).float()
        return chosen * (0 if self.flat else 10)

    def _move(self, moves: Moves) -> None:
        for columns in (*zip(*moves.saves, strict=True), moves.fresh, [load.device_page for load in moves.loads]):
            assert len(set(columns)) == len(columns), "a page stands twice in a column"
        for device_page, host_page in moves.saves:
            self._host[host_page] = {at: told for (page, at), told in self._slots.items() if page == device_page}
        fresh = set(moves.fresh)
        self._slots = {slot: content for slot, content in self._slots.items() if slot[0] not in fresh}
        for host_page, device_page, start, num_tokens in moves.loads:
            assert device_page in fresh
            for position in range(start, start + num_tokens):
                offset = position % self.page_size
                self._slots[device_page, offset] = self._host[host_page][offset]
                assert self._slots[device_page, offset][0] == position
        self.num_saved += len(moves.saves)
        self.num_loaded += len(moves.loads)

    def _write(self, chunk: Chunk) -> None:
        positions = list(itertools.chain(*itertools.starmap(range, chunk.spans)))
        slots = [(page, offset + index) for page, offset, count in chunk.runs for index in range(count)]
        assert len(slots) == len(positions) or (len(slots) == len(positions) - 1 and chunk.samples)
        for position, slot in zip(positions, slots, strict=False):
            assert position % self.page_size == slot[1]
            assert slot not in self._slots, "a slot is written twice"
            self._slots[slot] = (position, chunk.sequence.context[position])

    def _check_context(self, chunk: Chunk, query_position: int) -> None:
        """The row sees each token of its window once, at its position; what is left of the window may be away."""
        path = chunk.sequence.path
        assert path is not None
        deltas = [kept.delta for kept in path.root.kept] + [0] * len(path.nodes)
        seen = []
        for page_id, mask, delta in zip(path.page_ids, path.masks, deltas, strict=False):
            for offset in range(self.page_size if page_id is not None else 0):
                position, token = self._slots.get((page_id, offset), (FREE, -1))
                if mask >> offset & 1 and position + delta <= query_position:
                    seen.append((position + delta, token))
        assert len({position for position, _ in seen}) == len(seen), "a position is seen twice"
        first = 0 if self.window is None else max(query_position - self.window + 1, 0)
        context = [(position, chunk.sequence.context[position]) for position in range(first, query_position + 1)]
        assert [each for each in sorted(seen) if each[0] >= first] == context


def predict(ids: list[int], vocab_size: int) -> int:
    """The fake model's greedy next token."""
    return zlib.crc32(bytes(token % 256 for token in ids)) % vocab_size


def continuation(ids: list[int], num_tokens: int, vocab_size: int) -> list[int]:
    """What greedy decoding of the fake model must give."""
    ids = list(ids)
    for _ in range(num_tokens):
        ids.append(predict(ids, vocab_size))
    return ids[len(ids) - num_tokens :]
