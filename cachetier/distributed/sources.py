"""Chunks in object stores, as an engine reads them: without a copy on the own node, pulled from others.

From another node the objects with the first layers come first: while a layer is used, the next object of the same chunk
is on its way. All waits are bounded, and a chunk that failed once is not waited for again.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from mneme.cachetier.chunk.header import ChunkHeader, U8Array
from mneme.cachetier.chunk.misses import Miss
from mneme.cachetier.distributed.objects import Refs, get_runs, layers_per_object
from mneme.cachetier.node.promoting import LOADS_AGAIN_S

_SLOWEST_BYTES_PER_S = 50e6  # of a pull; what is slower is not waited for
_BASE_TIMEOUT_S = 1.0
_PULLED_AHEAD = 2  # chunks whose first objects come while another is read
_AHEAD_BYTES = 256 << 20  # of a span's chunks, asked for before they are needed


class ObjectLayers:
    """The layers of one chunk, for a `HostSource`. `fetch` gives the references, at the first read."""

    def __init__(self, header: ChunkHeader, fetch: Callable[[], Refs | Miss], *, is_here: bool = False) -> None:
        """`is_here`: on this node; then one call has all objects, as each costs as much as a layer's checksum."""
        self._header, self._fetch, self._is_here = header, fetch, is_here
        self._step = layers_per_object(header.layer_bytes)
        self._refs: Refs | None = None
        self._runs: dict[int, tuple[U8Array, ...]] = {}  # the layers of what was read last, by object
        self._miss: Miss | None = None

    def __call__(self, layer: int) -> U8Array | Miss:
        if self._miss is None:
            number, offset = divmod(layer, self._step)
            layers = self._layers_of(number)
            if not isinstance(layers, Miss):
                return layers[offset] if offset < len(layers) else Miss.SHORT
            self._miss = layers
        return self._miss

    def _layers_of(self, number: int) -> tuple[U8Array, ...] | Miss:
        if number in self._runs:
            return self._runs[number]
        refs = self._fetch() if self._refs is None else self._refs
        if isinstance(refs, Miss):
            return refs
        self._refs = refs
        if number >= len(refs):
            return Miss.SHORT
        first, wanted = (0, refs) if self._is_here else (number, refs[number : number + 1])
        runs = get_runs(wanted, timeout_s(len(wanted) * self._step * self._header.layer_bytes))
        if isinstance(runs, Miss):
            return runs
        if not self._is_here:
            begin_pull(refs[number + 1 : number + 2])
        self._runs = dict(enumerate(runs, first))
        return self._runs[number]


class PeerReads:
    """The chunks of a span at another node: they are asked for ahead of need, in order, one call each."""

    def __init__(self, peer: Any, headers: Sequence[ChunkHeader], on_dead: Callable[[], None]) -> None:
        self._peer, self._headers, self._on_dead = peer, headers, on_dead
        self._lock = threading.Lock()
        self._calls: list[Any] = []  # of the first chunks: references to what `NodeActor.read` answers
        self._ahead = max(1, _AHEAD_BYTES // max(1, headers[0].payload_bytes))

    def fetch(self, index: int) -> Refs | Miss:
        """References to a chunk's objects, when the peer has them in memory; the first is on its way here."""
        with self._lock:
            for header in self._headers[len(self._calls) : index + self._ahead]:
                self._calls.append(self._peer.read.remote([header.key]))
            calls = self._calls[index : index + 1 + _PULLED_AHEAD]
        refs = self._refs(calls[0], timeout_s(self._headers[index].payload_bytes))
        if isinstance(refs, Miss):
            return refs
        begin_pull(refs[:1])
        for call in ray.wait(calls, num_returns=len(calls), timeout=0)[0]:
            following = self._refs(call, 0.0)
            begin_pull(() if isinstance(following, Miss) else following[:1])
        return refs

    def _refs(self, call: Any, limit_s: float) -> Refs | Miss:
        try:
            (refs,) = ray.get(call, timeout=limit_s)
        except GetTimeoutError:
            return Miss.BUSY
        except RayActorError:
            self._on_dead()
            return Miss.ABSENT
        except RayError:
            return Miss.ABSENT
        return Miss.ABSENT if refs is None else tuple(refs)


class LoadNotices:
    """The `loading` of a `DiskSource` whose files another process writes: that one hears of it while it lasts."""

    def __init__(self, tell: Callable[[], object], clock: Callable[[], float] = time.monotonic) -> None:
        self._tell, self._clock = tell, clock
        self._told_s = -math.inf

    def __call__(self) -> AbstractContextManager[None]:
        if self._clock() - self._told_s >= LOADS_AGAIN_S / 2:
            self._told_s = self._clock()
            self._tell()
        return nullcontext()


def begin_pull(refs: Refs) -> None:
    """Objects that are elsewhere begin to come here; nobody waits."""
    if refs:
        ray.wait(list(refs), timeout=0, fetch_local=True)


def timeout_s(num_bytes: int) -> float:
    """How long bytes from another node or its disk are waited for."""
    return _BASE_TIMEOUT_S + num_bytes / _SLOWEST_BYTES_PER_S
