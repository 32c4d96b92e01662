"""The tier of a CUDA engine: pinned host memory, a stream each way, and a thread that launches copies beside a step.

    load   host -> staging memory -> pages, in runs of neighbouring host pages
    save   pages -> staging memory -> host

`Transfers` says what is copied next, layer by layer, as on a CPU. Of a load the thread only launches: the engine's
thread waits until a layer is launched, its stream until the layer is there. Of a save the thread waits for each layer,
so at most one layer of a few pages is before a load, and nothing that was launched need be overtaken.

The memory is pinned slab by slab behind the start, as 64 GiB take 13 to 19 s. A copy works without that too: the driver
stages it, and the thread waits meanwhile. It must not cross the border of two slabs.
"""

from __future__ import annotations

import logging
import math
import threading
import weakref
from collections.abc import Sequence
from functools import partial

import numpy as np
from torch import Tensor

from mneme.cachetier.host_pages.cpu import CpuTier, DevicePool, host_shape, zeros
from mneme.cachetier.host_pages.streams import PIN_BYTES, CudaStreams, Event, EventSpans, Stream, Streams
from mneme.cachetier.host_pages.tier import JoinedPageLoad, KvTier, NoTier, PageLoad, SpanRecorder, checked_pages
from mneme.cachetier.host_pages.transfers import QueuedLoad, Transfers
from mneme.errors import ConfigError
from mneme.kernels.page_table import IntArray

logger = logging.getLogger(__name__)

_SLAB_BYTES = 64 << 20  # other threads' calls of CUDA may wait while so much is pinned, about 20 ms
_STAGING_BYTES = 16 << 20  # one way, for one layer of some pages
# Of one layer of a save: what a load waits for, 0.15 ms on a bus of 55 GB/s. Pieces of 1 MiB went at 4 GB/s beside an
# H100: each is some calls of Python, which the engine's launches wait for, too.
_SAVE_BYTES = 8 << 20


class _Transfer:
    """Pages on their way, and the events at the end of each layer that was launched."""

    def __init__(self, device: IntArray, host: IntArray, issued: Event) -> None:
        self.device, self.host = device, host
        self.issued = issued  # in the engine's stream: what others did to the device pages is done from here on
        self.page_ids: Tensor | None = None  # on the device, once the first layer is launched
        self.ends: list[Event] = []


class LaunchedLoad:
    """See `tier.PageLoad`."""

    def __init__(self, streams: Streams, queued: QueuedLoad, transfer: _Transfer) -> None:
        self._streams, self._queued, self._transfer = streams, queued, transfer

    def wait_layer(self, layer: int) -> None:
        self._queued.wait_layer(layer)
        self._streams.current().wait(self._transfer.ends[layer])


class _Pinning:
    """Pins slabs one after the other, the first before it returns, the others on a thread of its own."""

    def __init__(self, slabs: Sequence[Tensor], streams: Streams) -> None:
        """Raises `ConfigError` if nothing can be pinned. What cannot be pinned later stays as it is, with a warning."""
        self._slabs, self._streams = slabs, streams
        self._unpins = [streams.pin(slabs[0])]
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="kv-pinning", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        for slab in self._slabs[1:]:
            if self._is_closed:
                return
            try:
                self._unpins.append(self._streams.pin(slab))
            except ConfigError as error:
                logger.warning("copies to and from the rest of the host tier are slower: %s", error)
                return

    def wait(self) -> None:
        """Return when all is pinned that can be."""
        self._thread.join()

    def close(self) -> None:
        self._is_closed = True
        self.wait()
        for unpin in self._unpins:
            unpin()


class CudaTier:
    """See `tier.KvTier`."""

    def __init__(
        self,
        pool: DevicePool,
        num_pages: int,
        streams: Streams,
        *,
        spans: SpanRecorder | None = None,
        staging_bytes: int = _STAGING_BYTES,
        save_bytes: int = _SAVE_BYTES,
        slab_bytes: int = _SLAB_BYTES,
    ) -> None:
        """Raises `ConfigError` if there is no such memory, or if none of it can be pinned."""
        self.num_pages = num_pages
        self._pool, self._streams = pool, streams
        num_layers, self._num_device_pages = pool.k_pages.shape[0], pool.k_pages.shape[2]
        shape = host_shape(pool, num_pages)
        page_bytes = math.prod(shape[2:]) * pool.k_pages.dtype.itemsize
        unit = PIN_BYTES // math.gcd(PIN_BYTES, page_bytes)  # pages that end where the system's pages do
        self._slab_pages = max(unit, slab_bytes // page_bytes // unit * unit)
        room = (num_layers, -(-num_pages // unit) * unit, *shape[2:])
        self._memory = zeros(room, pool.k_pages.dtype, PIN_BYTES)[:, :num_pages]
        self._num_staged, self._num_saved = (max(1, size // page_bytes) for size in (staging_bytes, save_bytes))
        self._loads, self._saves = streams.new(), streams.new()
        self._read = streams.empty((self._num_staged, *shape[2:]), self._memory.dtype)
        self._write = streams.empty((self._num_saved, *shape[2:]), self._memory.dtype)
        allocated = streams.current().record()  # the engine may still use the memory that these got
        for stream in (self._loads, self._saves):
            stream.wait(allocated)
        self._spans = None if spans is None else EventSpans(spans, streams)
        self._loaded: Event | None = None  # the end of what was launched of loads
        # Pages that are given out first, in all layers, come first.
        starts = range(0, num_pages, self._slab_pages)
        slabs = [layer[start : start + self._slab_pages] for start in starts for layer in self._memory]
        self._pinning = _Pinning(slabs, streams)
        self._transfers = Transfers(num_layers, self._num_device_pages, num_pages)
        self._close = weakref.finalize(self, _release, self._transfers, self._pinning, self._memory)

    @property
    def is_idle(self) -> bool:
        if self._spans is not None:
            self._spans.flush()
        return not self._transfers.has_saves

    def save(self, device_pages: IntArray, host_pages: IntArray) -> None:
        device, host = self._checked(device_pages, host_pages)
        issued = self._streams.current().record()
        for start in range(0, len(device), self._num_saved):
            part = slice(start, start + self._num_saved)
            transfer = _Transfer(device[part], host[part], issued)
            self._transfers.save(transfer.device, transfer.host, partial(self._save_layer, transfer))

    def load(self, host_pages: IntArray, device_pages: IntArray) -> PageLoad:
        device, host = self._checked(device_pages, host_pages)
        if not len(host):
            return JoinedPageLoad([])
        transfer = _Transfer(device, host, self._streams.current().record())
        queued = self._transfers.load(host, device, partial(self._load_layer, transfer))
        return LaunchedLoad(self._streams, queued, transfer)

    def before_reuse(self, device_pages: IntArray) -> None:
        self._transfers.before_reuse(checked_pages(device_pages, self._num_device_pages))
        if self._loaded is not None:
            self._streams.current().wait(self._loaded)

    def wait_pinned(self) -> None:
        """Return when copies are as fast as they will be, for measurements."""
        self._pinning.wait()

    def close(self) -> None:
        self._close()
        if self._spans is not None:
            self._spans.finish()

    def _checked(self, device_pages: IntArray, host_pages: IntArray) -> tuple[IntArray, IntArray]:
        device = checked_pages(device_pages, self._num_device_pages, host_pages)
        return device, checked_pages(host_pages, self.num_pages)

    def _load_layer(self, transfer: _Transfer, layer: int) -> None:
        """Launch it."""
        stream, page_ids = self._loads, self._begun(transfer, self._loads)
        started = stream.record()
        for start in range(0, len(page_ids), self._num_staged):
            part = slice(start, start + self._num_staged)
            stream.run(partial(self._copy_runs, layer, transfer.host[part], self._read, into_host=False))
            stream.run(partial(self._scatter, layer, page_ids[part]))
        self._loaded = stream.record()
        transfer.ends.append(self._loaded)
        self._record("load", layer, started, self._loaded, len(page_ids))

    def _save_layer(self, transfer: _Transfer, layer: int) -> None:
        """Return when it is in host memory."""
        stream = self._saves
        if transfer.page_ids is None and self._loaded is not None:
            stream.wait(self._loaded)  # it may write these device pages or read these host pages
        page_ids = self._begun(transfer, stream)
        started = stream.record()
        stream.run(partial(self._gather, layer, page_ids))
        stream.run(partial(self._copy_runs, layer, transfer.host, self._write, into_host=True))
        saved = stream.record()
        saved.wait()
        self._record("save", layer, started, saved, len(page_ids))

    def _begun(self, transfer: _Transfer, stream: Stream) -> Tensor:
        if transfer.page_ids is None:
            stream.wait(transfer.issued)
            transfer.page_ids = stream.upload(transfer.device)
        return transfer.page_ids

    def _copy_runs(self, layer: int, host: IntArray, buffer: Tensor, *, into_host: bool) -> None:
        for offset, first, end in runs(host, self._slab_pages):
            memory, staged = self._memory[layer, first:end], buffer[offset : offset + end - first]
            source, target = (staged, memory) if into_host else (memory, staged)
            target.copy_(source, non_blocking=True)

    def _gather(self, layer: int, page_ids: Tensor) -> None:
        for index, pages in enumerate((self._pool.k_pages[layer], self._pool.v_pages[layer])):
            self._write[: len(page_ids), index] = pages.index_select(1, page_ids).transpose(0, 1)

    def _scatter(self, layer: int, page_ids: Tensor) -> None:
        for index, pages in enumerate((self._pool.k_pages[layer], self._pool.v_pages[layer])):
            pages.index_copy_(1, page_ids, self._read[: len(page_ids), index].transpose(0, 1))

    def _record(self, what: str, layer: int, start: Event, end: Event, num_pages: int) -> None:
        """The time on the device; loads and saves may overlap, so each have a track."""
        if self._spans is not None:
            self._spans.add(f"{what} layer {layer}", start, end, f"{what}s", pages=num_pages)


def runs(pages: IntArray, slab_pages: int) -> list[tuple[int, int, int]]:
    """(offset, first, end) of each run of neighbours in a slab: pages[offset:][:end - first] are first..end-1."""
    if not len(pages):
        return []
    starts = np.flatnonzero((np.diff(pages, prepend=pages[0] - 2) != 1) | (pages % slab_pages == 0))
    lengths = np.diff(starts, append=len(pages))
    return [(int(s), int(pages[s]), int(pages[s] + n)) for s, n in zip(starts, lengths, strict=True)]


def _release(transfers: Transfers, pinning: _Pinning, memory: Tensor) -> None:
    """`memory` is kept until here: the device may copy from and to it."""
    transfers.close()
    pinning.close()


def make_tier(pool: DevicePool, num_pages: int, spans: SpanRecorder | None = None) -> KvTier:
    """A tier of `num_pages` host pages; 0: none. Raises `ConfigError` if there is no such memory."""
    if num_pages == 0:
        return NoTier()
    device = pool.k_pages.device
    if device.type == "cuda":
        return CudaTier(pool, num_pages, CudaStreams(device, is_timed=spans is not None), spans=spans)
    return CpuTier(pool, num_pages, spans=spans)
