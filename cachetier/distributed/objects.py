"""Chunks in a node's object store: a chunk is a few objects, each a run of its layers; a layer is a view of the store.

An object dies with the process that created it, so whoever computed a chunk puts it and hands over references, and the
node's actor puts it once more as its own. Reading copies nothing: what is read is pinned in the store for as long as
the arrays live, so readers let go of them. From another node the objects with the first layers come first: while a
layer is used, the next object of the same chunk is on its way. All waits are bounded, and a chunk that failed once is
not waited for again.

The store itself is never relied on for a policy: what does not fit makes it spill, or write to files instead of
memory, without a word. So bytes are counted here, those on their way in too, and refused beyond a bound.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from mneme.cachetier.chunk.header import ChunkHeader, Miss, U8Array
from mneme.cachetier.node.prefetch import LOADS_AGAIN_S

OBJECT_BYTES = 4 << 20  # about; small enough that first layers come early from another node, large enough to come fast
_TIMEOUT_S = 5.0
_SLOWEST_BYTES_PER_S = 50e6  # of a pull; what is slower is not waited for
_BASE_TIMEOUT_S = 1.0
_PULLED_AHEAD = 2  # chunks whose first objects come while another is read
_AHEAD_BYTES = 256 << 20  # of a span's chunks, asked for before they are needed

Refs = tuple[Any, ...]  # `ray.ObjectRef`, one for each run of layers


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class HeldObjects:
    """A chunk's objects, owned by this process."""

    refs: Refs
    num_bytes: int


class RayMemory:
    """See `ChunkMemory`; lives in the node's actor."""

    def __init__(self, max_bytes: int, timeout_s: float = _TIMEOUT_S) -> None:
        self.max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._lock = threading.RLock()  # a finalizer may run while it is held
        self._used_bytes = 0

    @property
    def used_bytes(self) -> int:
        """Held or on their way in."""
        return self._used_bytes

    def take(self, payload: object) -> HeldObjects:
        """`payload`: references to another process's objects."""
        if not isinstance(payload, tuple) or not all(isinstance(ref, ray.ObjectRef) for ref in payload):
            raise TypeError(f"payload: must be a tuple of references (got {type(payload).__name__})")
        runs = get_runs(payload, self._timeout_s)
        if isinstance(runs, Miss):
            raise MemoryError(f"the chunk's objects cannot be had ({runs.value})")
        return self._put(runs)

    def keep(self, layers: Sequence[U8Array]) -> HeldObjects:
        return self._put(runs_of(layers))

    def layers(self, held: object) -> tuple[U8Array, ...] | Miss:
        assert isinstance(held, HeldObjects)
        runs = get_runs(held.refs, self._timeout_s)
        return runs if isinstance(runs, Miss) else tuple(layer for run in runs for layer in run)

    def drop(self, held: object) -> None:
        """Do nothing: an object is freed with its last reference.

        So a reader in another process may have what is no longer counted here.
        """

    def _put(self, runs: Sequence[tuple[U8Array, ...]]) -> HeldObjects:
        num_bytes = sum(layer.nbytes for run in runs for layer in run)
        with self._lock:
            if self._used_bytes + num_bytes > self.max_bytes:
                raise MemoryError(f"{self._used_bytes} of {self.max_bytes} bytes are in use")
            self._used_bytes += num_bytes
        try:
            held = HeldObjects(put_runs(runs), num_bytes)
        except BaseException:
            self._release(num_bytes)
            raise
        weakref.finalize(held, self._release, num_bytes).atexit = False
        return held

    def _release(self, num_bytes: int) -> None:
        with self._lock:
            self._used_bytes -= num_bytes


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
    """Return how long bytes from another node or its disk are waited for."""
    return _BASE_TIMEOUT_S + num_bytes / _SLOWEST_BYTES_PER_S


def layers_per_object(layer_bytes: int) -> int:
    return max(1, OBJECT_BYTES // max(1, layer_bytes))


def runs_of(layers: Sequence[U8Array]) -> list[tuple[U8Array, ...]]:
    """Return what goes into each object."""
    step = layers_per_object(layers[0].nbytes)
    return [tuple(layers[start : start + step]) for start in range(0, len(layers), step)]


def put_runs(runs: Sequence[tuple[U8Array, ...]]) -> Refs:
    """One object for each run, owned by this process. Raises MemoryError if the store has no room, or is not there."""
    try:
        return tuple(ray.put(run) for run in runs)
    except RayError as error:
        raise MemoryError(f"the object store took nothing: {error}") from error


def get_runs(refs: Refs, timeout_s: float) -> list[tuple[U8Array, ...]] | Miss:
    """The layers in each object, read-only; whoever put them decides what they are, so their sizes are looked at."""
    try:
        runs = ray.get(list(refs), timeout=timeout_s)
    except GetTimeoutError:
        return Miss.BUSY
    except RayError:  # lost with its owner or its node
        return Miss.ABSENT
    is_sound = all(isinstance(run, tuple) and all(map(_is_layer, run)) for run in runs)
    return runs if is_sound else Miss.BAD_HEADER


def _is_layer(layer: object) -> bool:
    return isinstance(layer, np.ndarray) and layer.dtype == np.uint8 and layer.ndim == 1
