"""The tier of a CUDA engine: pinned host memory, and streams that copy while the engine computes.

Both ways pages pass through device buffers (AttentionStore 3.2), so that a run of host pages is one copy over the bus:

    load   host -> read buffer (the fetch stream) -> pages (the unpack stream)
    save   pages -> write buffer (the pack stream) -> host (the store stream)

A load fetches into the read buffer while the step before still uses its device pages. A save gives its device pages
free once they are packed. Everything of a load is launched at once. Saves wait in a queue on the host, cut into a few
pages each, and few of them are launched at a time, none while a load is on its way: what was launched cannot be
overtaken.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
from torch import Tensor

from mneme.cachetier.event_spans import EventSpans
from mneme.cachetier.host_memory import DevicePool, host_shape, zeros
from mneme.cachetier.staging import Staging, parts, runs
from mneme.cachetier.streams import Event, Streams
from mneme.cachetier.tier import JoinedLoad, Load, SpanRecorder, checked_pages
from mneme.errors import TransferFailed
from mneme.kernels.page_table import IntArray

_STAGED_LAYERS = 3  # how far fetching runs ahead of unpacking, packing of writing
_READ_BYTES = 16 << 20  # of one buffer, for pages of one layer
_SAVE_BYTES = 32 << 20  # of one save, all layers
_SAVES_LAUNCHED = 2  # what a load may have to share the bus with


class _Save(NamedTuple):
    """A save that is not launched yet."""

    number: int
    device: IntArray
    host: IntArray
    issued: Event  # in the engine's stream: what the pages hold is there from here on


class _Launched(NamedTuple):
    """A save on its way."""

    number: int
    packed: Event  # its device pages are free
    written: Event


class EventLoad:
    """See `tier.Load`."""

    def __init__(self, streams: Streams, loaded: list[Event]) -> None:
        self._streams = streams
        self._loaded = loaded  # by layer

    def wait_layer(self, layer: int) -> None:
        self._streams.current().wait(self._loaded[layer])


class PinnedHostMemory:
    """See `tier.KvTier`."""

    def __init__(
        self,
        pool: DevicePool,
        num_pages: int,
        streams: Streams,
        *,
        spans: SpanRecorder | None = None,
        staged_layers: int = _STAGED_LAYERS,
        read_bytes: int = _READ_BYTES,
        save_bytes: int = _SAVE_BYTES,
    ) -> None:
        """Raises `ConfigError` if there is no such memory, or if it cannot be pinned."""
        self.num_pages = num_pages
        self._pool, self._streams = pool, streams
        self._num_layers, self._num_device_pages = pool.k_pages.shape[0], pool.k_pages.shape[2]
        self._memory = zeros(host_shape(pool, num_pages), pool.k_pages.dtype)
        self._fetch, self._unpack, self._pack, self._store = (streams.new() for _ in range(4))
        layer_bytes = self._memory[0, 0].nbytes
        self._read = self._staging(staged_layers, read_bytes // layer_bytes)
        self._write = self._staging(staged_layers, save_bytes // (layer_bytes * self._num_layers))
        self._spans = None if spans is None else EventSpans(spans, streams)
        self._saves: deque[_Save] = deque()
        self._launched: deque[_Launched] = deque()
        self._loaded: Event | None = None  # the end of the last load
        self._number = 0  # of the last save
        self._reading_save = np.zeros(self._num_device_pages, np.int64)  # the last save that reads a device page
        self._writing_save = np.zeros(num_pages, np.int64)  # the last save that writes a host page
        self._is_loading = np.zeros(self._num_device_pages, np.bool_)  # by loads up to the last
        self._close = weakref.finalize(self, _release, streams.pin(self._memory), self._memory)

    @property
    def is_idle(self) -> bool:
        self._launch_some()
        return not self._saves and not self._launched

    def save(self, device_pages: IntArray, host_pages: IntArray) -> None:
        device, host = self._checked(device_pages, host_pages)
        issued = self._streams.current().record()
        for part in parts(len(device), self._write.num_pages):
            self._number += 1
            self._reading_save[device[part]] = self._writing_save[host[part]] = self._number
            self._saves.append(_Save(self._number, device[part], host[part], issued))
        self._launch_some()

    def load(self, host_pages: IntArray, device_pages: IntArray) -> Load:
        device, host = self._checked(device_pages, host_pages)
        if not len(device):
            return JoinedLoad([])
        conflict = self._launched_save(max(self._writing_save[host].max(), self._reading_save[device].max()))
        if conflict is not None:
            self._fetch.wait(conflict.written)
        self._unpack.wait(self._streams.current().record())  # others used the device pages until here
        page_ids = self._unpack.upload(device)
        loaded = [self._load_layer(layer, host, page_ids) for layer in range(self._num_layers)]
        self._loaded = loaded[-1]
        self._is_loading[device] = True
        return EventLoad(self._streams, loaded)

    def before_reuse(self, device_pages: IntArray) -> None:
        device = checked_pages(device_pages, self._num_device_pages)
        save = self._launched_save(self._reading_save[device].max(initial=0))
        if save is not None:
            self._streams.current().wait(save.packed)
        if self._loaded is not None and self._is_loading[device].any():
            self._streams.current().wait(self._loaded)

    def close(self) -> None:
        self._saves.clear()
        if self._spans is not None:
            self._spans.finish()
        self._close()

    def _checked(self, device_pages: IntArray, host_pages: IntArray) -> tuple[IntArray, IntArray]:
        if not self._close.alive:
            raise TransferFailed("the tier is closed")
        device = checked_pages(device_pages, self._num_device_pages, host_pages)
        return device, checked_pages(host_pages, self.num_pages)

    def _staging(self, num_buffers: int, num_pages: int) -> Staging:
        shape = (max(1, num_pages), *self._memory.shape[2:])
        buffers = [self._streams.empty(shape, self._memory.dtype) for _ in range(num_buffers)]
        allocated = self._streams.current().record()  # the engine may still use the memory that these got
        for stream in (self._fetch, self._pack):
            stream.wait(allocated)
        return Staging(buffers)

    def _load_layer(self, layer: int, host: IntArray, page_ids: Tensor) -> Event:
        """Launch the load of one layer; the event at its end."""
        started = self._fetch.record()
        for part in parts(len(host), self._read.num_pages):
            number, buffer = self._read.take(self._fetch)
            self._fetch.run(partial(self._copy_runs, layer, host[part], buffer, into_host=False))
            fetched = self._fetch.record()
            self._unpack.wait(fetched)
            self._unpack.run(partial(self._scatter, layer, page_ids[part], buffer))
            loaded = self._unpack.record()
            self._read.give_back(number, loaded)
        self._record("load", layer, started, fetched, len(host))
        return loaded

    def _launch_some(self) -> None:
        """Launch saves that wait, as far as loads have a free way."""
        if self._loaded is not None and self._loaded.is_done():
            self._loaded = None
            self._is_loading[:] = False
        while self._launched and self._launched[0].written.is_done():
            self._launched.popleft()
        while self._saves and self._loaded is None and len(self._launched) < _SAVES_LAUNCHED:
            self._launch(self._saves.popleft())
        if self._spans is not None:
            self._spans.flush()

    def _launched_save(self, number: int) -> _Launched | None:
        """The save of this number, launched by now with all before it; None if it has ended."""
        while self._saves and self._saves[0].number <= number:
            self._launch(self._saves.popleft())
        return next((save for save in self._launched if save.number == number), None)

    def _launch(self, save: _Save) -> None:
        self._pack.wait(save.issued)
        if self._loaded is not None:  # it goes first, and may write these device pages or read these host pages
            self._pack.wait(self._loaded)
        page_ids = self._pack.upload(save.device)
        for layer in range(self._num_layers):
            number, buffer = self._write.take(self._pack)
            self._pack.run(partial(self._gather, layer, page_ids, buffer))
            packed = self._pack.record()
            self._store.wait(packed)
            started = self._store.record()
            self._store.run(partial(self._copy_runs, layer, save.host, buffer, into_host=True))
            written = self._store.record()
            self._write.give_back(number, written)
            self._record("save", layer, started, written, len(save.host))
        self._launched.append(_Launched(save.number, packed, written))

    def _copy_runs(self, layer: int, host: IntArray, buffer: Tensor, *, into_host: bool) -> None:
        for offset, first, end in runs(host):
            memory, staged = self._memory[layer, first:end], buffer[offset : offset + end - first]
            source, target = (staged, memory) if into_host else (memory, staged)
            target.copy_(source, non_blocking=True)

    def _gather(self, layer: int, page_ids: Tensor, buffer: Tensor) -> None:
        for index, pages in enumerate((self._pool.k_pages[layer], self._pool.v_pages[layer])):
            buffer[: len(page_ids), index] = pages.index_select(1, page_ids).transpose(0, 1)

    def _scatter(self, layer: int, page_ids: Tensor, buffer: Tensor) -> None:
        for index, pages in enumerate((self._pool.k_pages[layer], self._pool.v_pages[layer])):
            pages.index_copy_(1, page_ids, buffer[: len(page_ids), index].transpose(0, 1))

    def _record(self, what: str, layer: int, start: Event, end: Event, num_pages: int) -> None:
        """The time on the bus; loads and saves may overlap, so each have a track."""
        if self._spans is not None:
            self._spans.add(f"{what} layer {layer}", start, end, f"{what}s", pages=num_pages)


def _release(unpin: Callable[[], None], memory: Tensor) -> None:
    """`memory` is kept until here: the device may copy from and to it."""
    unpin()
