"""Bytes of chunks into a device pool and out of it, layer by layer, on threads beside the engine's.

On a CPU compiled code copies between a chunk's bytes and the pool. On CUDA the layers of many chunks go together:

    load   chunks -> a pinned slot (several threads) -> staging memory on the device -> slots of the pages
    save   slots of the pages -> staging memory -> a pinned slot -> chunks

A `ChunkPages` has a stream of its own, and an engine has two, one for loads and one for saves, so loads are not behind
saves. The stream waits for what the engine had issued when pages were handed over, and the engine's stream waits for a
layer's event. A pinned slot is written again when its last copy is done. Where tokens lie is computed and sent once.

4k tokens of an 8B model (32 layers, 8 KV heads of 128, bf16) are 16 chunks, 512 MiB. A load of them is one upload of
32 KB, and for each layer one copy of 16 MiB and two kernels: 97 launches. Predicted, not yet measured on a GPU: 9.8 ms
on the bus at 55 GB/s, 0.6 ms for the kernels; checking (15 GB/s) and staging (10 GB/s) take 90 ms of one thread and
22 ms of four, beside the bus: about 23 ms in all, where computing these tokens takes 100 to 130 ms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from mneme.cachetier.chunk.header import U8Array
from mneme.cachetier.host_pages.cpu import DevicePool
from mneme.cachetier.host_pages.streams import CudaStreams, Event, Streams
from mneme.kernels.native.kv import gather_chunk, scatter_chunk
from mneme.kernels.page_table import IntArray
from mneme.kernels.segments import ranges
from mneme.replicas.connector.chunk_pages import ChunkPages, ChunkTokens

_SLOT_BYTES = 16 << 20  # of pinned memory, for one layer of some chunks: large enough for the bus
_NUM_SLOTS = 2  # one is filled while the other is copied
_NUM_READERS = 4  # of a load: one thread checks and copies at a tenth of the bus


def make_chunk_pages(pool: DevicePool, max_layer_bytes: int) -> ChunkPages:
    """The one place that chooses; `max_layer_bytes`: of a full chunk's layer."""
    device = pool.k_pages.device
    return CpuChunkPages(pool) if device.type == "cpu" else DeviceChunkPages(pool, CudaStreams(device), max_layer_bytes)


class CpuChunkPages:
    """Copies happen when they are called for, in the caller's thread and without the interpreter lock."""

    num_readers, by_layer = 1, False

    def __init__(self, pool: DevicePool) -> None:
        self._pool = pool

    def issued(self) -> None:
        return None

    def wait(self, event: Event | None) -> None:
        pass

    def batches(self, chunks: Sequence[ChunkTokens]) -> list[CpuBatch]:
        return [CpuBatch(self._pool, index, chunk) for index, chunk in enumerate(chunks)]


class CpuBatch:
    """One chunk, which is copied while what was read of it is in the cache."""

    def __init__(self, pool: DevicePool, index: int, chunk: ChunkTokens) -> None:
        self.chunks = range(index, index + 1)
        self._pool, self._chunk = pool, chunk
        self._layer: U8Array | None = None

    def begin(self) -> None:
        pass

    def put(self, index: int, layer: U8Array) -> None:
        self._layer = layer

    def scatter(self, layer: int, after: Event | None) -> None:
        chunk, self._layer = self._layer, None
        if chunk is not None:
            scatter_chunk(chunk, *self._chunk, self._pool.k_pages[layer], self._pool.v_pages[layer])

    def gather(self, layer: int, into: Sequence[U8Array], after: Event | None) -> None:
        num_tokens, runs = self._chunk
        gather_chunk(self._pool.k_pages[layer], self._pool.v_pages[layer], runs, num_tokens, into[0])


class _Slot:
    """Holds pinned memory."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory  # uint8
        self.bytes: U8Array = memory.numpy()
        self.free: Event | None = None  # the end of its last copy


class DeviceChunkPages:
    """Pages of a CUDA pool, copied by a stream through a ring of pinned slots."""

    num_readers, by_layer = _NUM_READERS, True

    def __init__(
        self, pool: DevicePool, streams: Streams, max_layer_bytes: int, *, slot_bytes: int = _SLOT_BYTES
    ) -> None:
        self.pool, self._streams, self.stream = pool, streams, streams.new()
        _, num_kv_heads, self.num_pages, self.page_size, head_dim = pool.k_pages.shape
        self.shape = (2 * num_kv_heads, head_dim * pool.k_pages.itemsize)  # rows of a token, bytes of one
        token_bytes = self.shape[0] * self.shape[1]
        self._max_tokens = max(slot_bytes, max_layer_bytes) // token_bytes
        num_bytes = self._max_tokens * token_bytes
        self._slots = [_Slot(streams.host_memory(num_bytes)) for _ in range(_NUM_SLOTS)]
        self.staging = streams.empty((num_bytes // pool.k_pages.itemsize,), pool.k_pages.dtype)
        self.stream.wait(streams.current().record())  # the engine may still use the memory that this got

    def issued(self) -> Event:
        return self._streams.current().record()

    def wait(self, event: Event | None) -> None:
        if event is not None:
            self._streams.current().wait(event)

    def batches(self, chunks: Sequence[ChunkTokens]) -> list[DeviceBatch]:
        starts, room = [0], self._max_tokens
        for index, (_, runs) in enumerate(chunks):
            count = int(runs[:, 2].sum())
            if count > room:
                starts.append(index)
                room = self._max_tokens
            room -= count
        parts = [range(*span) for span in zip(starts, [*starts[1:], len(chunks)], strict=True)]
        return [DeviceBatch(self, part, chunks[part.start : part.stop]) for part in parts if part]

    def next_slot(self) -> _Slot:
        """Return the slot whose last use is the longest ago, when that is over."""
        slot = self._slots.pop(0)
        self._slots.append(slot)
        if slot.free is not None:
            slot.free.wait()
        return slot


class DeviceBatch:
    """The chunks that one slot holds: their tokens side by side, [K and V of each head, token, bytes of head_dim]."""

    def __init__(self, pages: DeviceChunkPages, chunks: range, tokens: Sequence[ChunkTokens]) -> None:
        for num_tokens, runs in tokens:
            _check_runs(runs, pages.num_pages, pages.page_size, num_tokens)
        self.chunks = chunks
        self._pages = pages
        self._spans, at = [], 0
        for num_tokens, runs in tokens:
            self._spans.append((num_tokens, _spans(runs, at)))
            at += int(runs[:, 2].sum())
        self._num_tokens = at
        page_ids, offsets, counts, _ = np.concatenate([runs for _, runs in tokens]).T
        self._places = pages.stream.upload(ranges(page_ids * pages.page_size + offsets, counts))
        self._slot: _Slot | None = None

    def begin(self) -> None:
        self._slot = self._pages.next_slot()

    def put(self, index: int, layer: U8Array) -> None:
        assert self._slot is not None
        num_tokens, spans = self._spans[index - self.chunks.start]
        staged, chunk = self._view(self._slot.bytes, self._num_tokens), self._view(layer, num_tokens)
        for at, first, count in spans:
            staged[:, at : at + count] = chunk[:, first : first + count]

    def scatter(self, layer: int, after: Event | None) -> Event:
        assert self._slot is not None
        return self._launch(self._scatter, layer, self._slot, after)

    def gather(self, layer: int, into: Sequence[U8Array], after: Event | None) -> None:
        slot = self._pages.next_slot()
        self._launch(self._gather, layer, slot, after).wait()
        staged = self._view(slot.bytes, self._num_tokens)
        for layer_bytes, (num_tokens, spans) in zip(into, self._spans, strict=True):
            chunk = self._view(layer_bytes, num_tokens)
            for at, first, count in spans:
                chunk[:, first : first + count] = staged[:, at : at + count]

    def _view(self, memory: U8Array, num_tokens: int) -> U8Array:
        num_rows, row_bytes = self._pages.shape
        return memory[: num_rows * num_tokens * row_bytes].reshape(num_rows, num_tokens, row_bytes)

    def _launch(self, work: Callable[[int, torch.Tensor], None], layer: int, slot: _Slot, after: Event | None) -> Event:
        stream = self._pages.stream
        if after is not None:
            stream.wait(after)
        stream.run(partial(work, layer, slot.memory))
        slot.free = stream.record()
        return slot.free

    def _staged(self, memory: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return memory on the device [K and V, num_kv_heads, tokens, head_dim], and the same part of a slot."""
        _, num_kv_heads, _, _, head_dim = self._pages.pool.k_pages.shape
        shape = (2, num_kv_heads, self._num_tokens, head_dim)
        staging = self._pages.staging[: 2 * num_kv_heads * self._num_tokens * head_dim]
        return staging.view(shape), memory[: staging.nbytes].view(staging.dtype).view(shape)

    def _scatter(self, layer: int, memory: torch.Tensor) -> None:
        staging, pinned = self._staged(memory)
        staging.copy_(pinned, non_blocking=True)
        for slots, part in zip(self._slots(layer), staging, strict=True):
            slots.index_copy_(1, self._places, part)

    def _gather(self, layer: int, memory: torch.Tensor) -> None:
        staging, pinned = self._staged(memory)
        for slots, part in zip(self._slots(layer), staging, strict=True):
            torch.index_select(slots, 1, self._places, out=part)
        pinned.copy_(staging, non_blocking=True)

    def _slots(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of one layer [num_kv_heads, slots, head_dim]."""
        pool = self._pages.pool
        return pool.k_pages[layer].flatten(1, 2), pool.v_pages[layer].flatten(1, 2)


def _check_runs(runs: IntArray, num_pages: int, page_size: int, num_tokens: int) -> None:
    """Refuse runs out of range: the device would stop at one, for good."""
    page_ids, offsets, counts, firsts = runs.T
    is_in_page = (page_ids >= 0) & (page_ids < num_pages) & (offsets >= 0) & (offsets + counts <= page_size)
    is_sound = is_in_page & (counts > 0) & (firsts >= 0) & (firsts + counts <= num_tokens)
    if not is_sound.all():
        bad = int(np.flatnonzero(~is_sound)[0])
        rule = f"must be in {num_pages} pages of {page_size} and {num_tokens} tokens"
        raise ValueError(f"runs: run {bad} {rule} (got {runs[bad].tolist()})")


def _spans(runs: IntArray, at: int) -> list[tuple[int, int, int]]:
    """(where it is staged, first in the chunk, how many) of each span of a chunk's tokens; adjacent runs are one."""
    spans: list[tuple[int, int, int]] = []
    for _, _, count, first in runs.tolist():
        if spans and spans[-1][1] + spans[-1][2] == first:
            spans[-1] = (*spans[-1][:2], spans[-1][2] + count)
        else:
            spans.append((at, first, count))
        at += count
    return spans
