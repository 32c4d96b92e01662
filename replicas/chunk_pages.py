"""Bytes of chunks into a device pool and out of it, layer by layer, on a thread beside the engine's.

On a CPU compiled code copies between a chunk's bytes and the pool. On any other device bytes cross over on a stream of
their own: it waits for what the engine had issued when pages were handed over, and the engine's stream waits for a
layer's event. Not yet run on a GPU.
"""

from __future__ import annotations

import contextlib
from typing import Protocol

import numpy as np
import torch

from mneme.cachetier.chunk import U8Array
from mneme.cachetier.host_memory import DevicePool
from mneme.kernels.native_chunks import gather_chunk, scatter_chunk
from mneme.kernels.page_table import IntArray

Event = torch.cuda.Event | None  # None where there are no streams


class ChunkPages(Protocol):
    """The pages of one pool; `runs` are int64 [r, 4]: page id, first offset, number of tokens, first in the chunk."""

    def issued(self) -> Event:
        """All that the engine has issued so far; the engine's thread calls it."""

    def wait(self, event: Event) -> None:
        """What the engine issues from now on goes behind this; the engine's thread calls it."""

    def scatter(self, layer: int, chunk: U8Array, num_tokens: int, runs: IntArray, after: Event) -> Event:
        """Into the pool, behind an event; the pool has the bytes when the event that is returned has come."""

    def gather(self, layer: int, chunk: U8Array, num_tokens: int, runs: IntArray, after: Event) -> None:
        """Out of the pool, behind an event; returns when the bytes are in `chunk`."""


def make_chunk_pages(pool: DevicePool) -> ChunkPages:
    """The one place that chooses."""
    return CpuChunkPages(pool) if pool.k_pages.device.type == "cpu" else DeviceChunkPages(pool)


class CpuChunkPages:
    """Copies happen when they are called for, in the caller's thread and without the interpreter lock."""

    def __init__(self, pool: DevicePool) -> None:
        self._pool = pool

    def issued(self) -> Event:
        return None

    def wait(self, event: Event) -> None:
        pass

    def scatter(self, layer: int, chunk: U8Array, num_tokens: int, runs: IntArray, after: Event) -> Event:
        scatter_chunk(chunk, num_tokens, runs, self._pool.k_pages[layer], self._pool.v_pages[layer])
        return None

    def gather(self, layer: int, chunk: U8Array, num_tokens: int, runs: IntArray, after: Event) -> None:
        gather_chunk(self._pool.k_pages[layer], self._pool.v_pages[layer], runs, num_tokens, chunk)


class DeviceChunkPages:
    """With torch's operations, on a stream where the device has streams."""

    def __init__(self, pool: DevicePool) -> None:
        self._pool = pool
        device = pool.k_pages.device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def issued(self) -> Event:
        return None if self._stream is None else torch.cuda.current_stream(self._stream.device).record_event()

    def wait(self, event: Event) -> None:
        if event is not None and self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(event)

    def scatter(self, layer: int, chunk: U8Array, num_tokens: int, runs: IntArray, after: Event) -> Event:
        slots, tokens = self._places(runs)
        with self._behind(after):
            k, v = self._device_bytes(chunk, num_tokens)
            for pages, part in ((self._pool.k_pages, k), (self._pool.v_pages, v)):
                pages[layer].flatten(1, 2)[:, slots] = part[:, tokens]
            return None if self._stream is None else self._stream.record_event()

    def gather(self, layer: int, chunk: U8Array, num_tokens: int, runs: IntArray, after: Event) -> None:
        slots, tokens = self._places(runs)
        k_pages, v_pages = self._pool.k_pages[layer], self._pool.v_pages[layer]
        with self._behind(after):
            shape = (k_pages.shape[0], num_tokens, k_pages.shape[-1])
            packed = k_pages.new_zeros((2, *shape))
            packed[0][:, tokens] = k_pages.flatten(1, 2)[:, slots]
            packed[1][:, tokens] = v_pages.flatten(1, 2)[:, slots]
            host = packed.view(torch.uint8).flatten().cpu()  # waits for the stream
        chunk[:] = host.numpy()

    def _behind(self, after: Event) -> contextlib.AbstractContextManager[object]:
        if self._stream is None:
            return contextlib.nullcontext()
        if after is not None:
            self._stream.wait_event(after)
        return torch.cuda.stream(self._stream)

    def _device_bytes(self, chunk: U8Array, num_tokens: int) -> torch.Tensor:
        """[K and V, num_kv_heads, num_tokens, head_dim]"""
        k_pages = self._pool.k_pages
        data = torch.from_numpy(np.array(chunk)).to(k_pages.device)  # a copy: the bytes may be read-only
        return data.view(k_pages.dtype).view(2, k_pages.shape[1], num_tokens, k_pages.shape[-1])

    def _places(self, runs: IntArray) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots of the pool and tokens of the chunk, side by side."""
        page_size = self._pool.k_pages.shape[3]
        slots = [np.arange(count) + page * page_size + offset for page, offset, count, _ in runs.tolist()]
        tokens = [np.arange(count) + first for _, _, count, first in runs.tolist()]
        device = self._pool.k_pages.device
        return tuple(torch.from_numpy(np.concatenate(each)).to(device) for each in (slots, tokens))  # type: ignore[return-value]
