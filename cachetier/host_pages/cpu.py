"""The tier of a CPU engine: its own process's memory, and a thread that copies while the engine computes.

The memory is committed as pages are first saved. Copies run in compiled code or in numpy, in one thread, without the
interpreter lock.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from mneme.cachetier.host_pages.tier import PageLoad, SpanRecorder, checked_pages
from mneme.cachetier.host_pages.transfers import Transfers
from mneme.errors import ConfigError
from mneme.kernels.native.kv import U8Array, gather_chunk, scatter_chunk
from mneme.kernels.page_table import IntArray

TRACK = "transfers"  # of the spans
_PIECE_BYTES = 4 << 20  # of one layer of a save: what a load waits for; a copy's fixed cost is small beside it

Gather = Callable[[Tensor, Tensor, IntArray, int, U8Array], None]  # see `gather_chunk`: a host page is a chunk
Scatter = Callable[[U8Array, int, IntArray, Tensor, Tensor], None]


class DevicePool(Protocol):
    """Holds the pages of an engine."""

    @property
    def k_pages(self) -> Tensor:
        """[layers, num_kv_heads, num_pages, page_size, head_dim]"""

    @property
    def v_pages(self) -> Tensor:
        """Like k_pages."""


class CpuTier:
    """See `tier.KvTier`."""

    def __init__(
        self,
        pool: DevicePool,
        num_pages: int,
        *,
        gather: Gather = gather_chunk,
        scatter: Scatter = scatter_chunk,
        spans: SpanRecorder | None = None,
        piece_bytes: int = _PIECE_BYTES,
    ) -> None:
        """`gather` and `scatter` are called on the tier's thread. Raises `ConfigError` if there is no such memory."""
        self.num_pages = num_pages
        self._pool = pool
        self._gather, self._scatter, self._spans = gather, scatter, spans
        num_layers, _, self._num_device_pages, self._page_size, _ = pool.k_pages.shape
        memory = zeros(host_shape(pool, num_pages), pool.k_pages.dtype)
        self._memory = memory.flatten(2).view(torch.uint8).numpy()  # [layers, host pages, bytes]
        self._pages_per_piece = max(1, piece_bytes // self._memory.shape[2])
        self._transfers = Transfers(num_layers, self._num_device_pages, num_pages)
        # The thread knows the queue, not the tier: one that nobody holds any more ends it.
        self._close = weakref.finalize(self, self._transfers.close)

    @property
    def is_idle(self) -> bool:
        return not self._transfers.has_saves

    def save(self, device_pages: IntArray, host_pages: IntArray) -> None:
        device, host = self._checked(device_pages, host_pages)
        for start in range(0, len(device), self._pages_per_piece):
            part = slice(start, start + self._pages_per_piece)
            runs = self._runs(device[part], host[part])
            self._transfers.save(device[part], host[part], partial(self._save_layer, runs))

    def load(self, host_pages: IntArray, device_pages: IntArray) -> PageLoad:
        device, host = self._checked(device_pages, host_pages)
        return self._transfers.load(host, device, partial(self._load_layer, self._runs(device, host)))

    def before_reuse(self, device_pages: IntArray) -> None:
        self._transfers.before_reuse(device_pages)

    def close(self) -> None:
        self._close()

    def _checked(self, device_pages: IntArray, host_pages: IntArray) -> tuple[IntArray, IntArray]:
        device = checked_pages(device_pages, self._num_device_pages, host_pages)
        return device, checked_pages(host_pages, self.num_pages)

    def _runs(self, device: IntArray, host: IntArray) -> IntArray:
        whole = np.full_like(device, self._page_size)
        return np.stack((device, np.zeros_like(device), whole, host * self._page_size), 1)

    def _save_layer(self, runs: IntArray, layer: int) -> None:
        start_s = self._spans.clock() if self._spans else 0.0
        k_pages, v_pages = self._pool.k_pages[layer], self._pool.v_pages[layer]
        self._gather(k_pages, v_pages, runs, self._page_size, self._memory[layer])
        self._record(f"save layer {layer}", start_s, len(runs))

    def _load_layer(self, runs: IntArray, layer: int) -> None:
        start_s = self._spans.clock() if self._spans else 0.0
        k_pages, v_pages = self._pool.k_pages[layer], self._pool.v_pages[layer]
        self._scatter(self._memory[layer], self._page_size, runs, k_pages, v_pages)
        self._record(f"load layer {layer}", start_s, len(runs))

    def _record(self, name: str, start_s: float, num_pages: int) -> None:
        if self._spans is not None:
            self._spans.span(name, start_s, self._spans.clock(), TRACK, pages=num_pages)


def host_shape(pool: DevicePool, num_pages: int) -> tuple[int, ...]:
    """[layers, host pages, K and V, num_kv_heads, page_size, head_dim]: a layer of a page is one run of bytes."""
    num_layers, num_kv_heads, _, page_size, head_dim = pool.k_pages.shape
    return (num_layers, num_pages, 2, num_kv_heads, page_size, head_dim)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, alignment: int = 1) -> Tensor:
    """Zeros that take memory when they are first written. Raises `ConfigError` if the system would never have it."""
    num_bytes = math.prod(shape) * dtype.itemsize
    try:
        memory = np.zeros(num_bytes + alignment - 1, np.uint8)
        start = -memory.ctypes.data % alignment
        return torch.from_numpy(memory[start : start + num_bytes]).view(dtype).view(shape)
    except MemoryError:
        raise ConfigError(f"host tier: {shape[1]} pages take {num_bytes} bytes, which this machine refuses") from None
