"""A runner without tensors: it remembers which token was written to which slot, and reads a row's context back.

`forward` asserts that what each row sees is exactly its sequence up to its position, in order, and then "predicts"
a token that is a function of that context alone. So a policy that masks, shares, frees or reuses a page wrongly fails
at once, whatever it was that it did wrong.
"""

from __future__ import annotations

import zlib

import torch

from mneme.replicas.sequence import Chunk

FREE = 2**30


class FakeRunner:
    def __init__(self, num_pages: int, page_size: int, *, vocab_size: int = 5, max_context: int = 10_000) -> None:
        self.num_pages, self.page_size = num_pages, page_size
        self.first_page = 1
        self.vocab_size, self.max_context = vocab_size, max_context
        self.num_shared_segments = 0
        self.num_rows = 0
        self.fail_next = False
        self.flat = False  # predict every token alike
        self._slots: dict[tuple[int, int], tuple[int, int]] = {}  # (page, offset) -> (position, token)

    def prepare(self, chunks: list[Chunk], fresh_pages: list[int]) -> list[Chunk]:
        fresh = set(fresh_pages)
        self._slots = {slot: content for slot, content in self._slots.items() if slot[0] not in fresh}
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
            for position in range(chunk.start, chunk.end):
                context = self._visible(chunk, position)
                assert context == chunk.sequence.ids[: position + 1]
            if chunk.samples:
                rows.append(predict(chunk.sequence.ids, self.vocab_size))
        chosen = torch.nn.functional.one_hot(torch.tensor(rows, dtype=torch.int64), self.vocab_size).float()
        return chosen * (0 if self.flat else 10)

    def _write(self, chunk: Chunk) -> None:
        position = chunk.start
        for page_id, offset, count in chunk.runs:
            for index in range(count):
                assert position % self.page_size == offset + index
                assert (page_id, offset + index) not in self._slots, "a slot is written twice"
                self._slots[page_id, offset + index] = (position, chunk.sequence.ids[position])
                position += 1
        assert position == chunk.end or (not chunk.runs and chunk.num_rows == 1)

    def _visible(self, chunk: Chunk, query_position: int) -> list[int]:
        path = chunk.sequence.path
        assert path is not None
        seen = []
        for page_id, mask in zip(path.page_ids, path.masks, strict=True):
            for offset in range(self.page_size):
                position, token = self._slots.get((page_id, offset), (FREE, -1))
                if mask >> offset & 1 and position <= query_position:
                    seen.append((position, token))
        seen.sort()
        assert [position for position, _ in seen] == list(range(query_position + 1))
        return [token for _, token in seen]


def predict(ids: list[int], vocab_size: int) -> int:
    """The fake model's greedy next token."""
    return zlib.crc32(bytes(token % 256 for token in ids)) % vocab_size


def continuation(ids: list[int], num_tokens: int, vocab_size: int) -> list[int]:
    """What greedy decoding of the fake model must give."""
    ids = list(ids)
    for _ in range(num_tokens):
        ids.append(predict(ids, vocab_size))
    return ids[len(ids) - num_tokens :]
