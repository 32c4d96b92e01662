"""Chunks in a node's object store: a chunk is a few objects, each a run of its layers; a layer is a view of the store.

An object dies with the process that created it, so whoever computed a chunk puts it and hands over references, and the
node's actor puts it once more as its own. Reading copies nothing: what is read is pinned in the store for as long as
the arrays live, so readers let go of them. From other nodes the objects with the first layers of all chunks come first,
as engines read them: while one is used, those behind it are on their way. All waits are bounded, and a chunk that
failed once is not waited for again.

The store itself is never relied on for a policy: what does not fit makes it spill, or write to files instead of
memory, without a word. So bytes are counted here, those on their way in too, and refused beyond a bound.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from mneme.cachetier.chunk.header import ChunkHeader, U8Array
from mneme.cachetier.names import Miss
from mneme.cachetier.node.prefetch import LOADS_AGAIN_S

OBJECT_BYTES = 4 << 20  # about; small enough that first layers come early from another node, large enough to come fast
_TIMEOUT_S = 5.0
_SLOWEST_BYTES_PER_S = 50e6  # of a pull; what is slower is not waited for
_BASE_TIMEOUT_S = 1.0
_ASKED_AHEAD_BYTES = 256 << 20  # of chunks that are asked for before they are needed
_PULLED_AHEAD_BYTES = 64 << 20  # of objects that are on their way while one is read; of chunks that one call asks for

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

    def accept(self, payload: object) -> HeldObjects:
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

    def __init__(
        self, header: ChunkHeader, fetch: Callable[[], Refs | Miss], before_read: Callable[[int], None] | None = None
    ) -> None:
        """`before_read`, of what is at another node, hears which object is read next.

        Without it all objects are on this node: one call has them, as each costs as much as a layer's checksum.
        """
        self._header, self._fetch, self._before_read = header, fetch, before_read
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
        first, wanted = 0, refs
        if self._before_read is not None:
            self._before_read(number)
            first, wanted = number, refs[number : number + 1]
        runs = get_runs(wanted, timeout_s(len(wanted) * self._step * self._header.layer_bytes))
        if isinstance(runs, Miss):
            return runs
        self._runs = dict(enumerate(runs, first))
        return self._runs[number]


@dataclass(slots=True, eq=False)
class _PeerCall:
    """Asks a node for neighbours of a chain."""

    peer: Any
    headers: Sequence[ChunkHeader]
    on_dead: Callable[[], None]
    answer: Any = None  # a reference to what `NodeActor.read` answers, once it is asked

    def begin(self) -> None:
        if self.answer is None:
            self.answer = self.peer.read.remote([header.key for header in self.headers])

    def refs(self, limit_s: float) -> list[Refs | None] | Miss:
        """References to the objects of each chunk; None: the node does not have it."""
        try:
            refs: list[Refs | None] = ray.get(self.answer, timeout=limit_s)
        except GetTimeoutError:
            return Miss.BUSY
        except RayActorError:
            self.on_dead()
            return Miss.ABSENT
        except RayError:
            return Miss.ABSENT
        return refs


class PeerReads:
    """The chunks of a chain that other nodes have: asked for, and pulled, ahead of need and in the order of engines.

    These read layer by layer of all chunks, whichever nodes have them. Nothing is asked for before the first read.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._headers: list[ChunkHeader] = []
        self._calls: list[tuple[_PeerCall, int]] = []  # for each chunk, with its place in the answer
        self._refs: dict[int, Refs | Miss] = {}  # by chunk, as far as they are known
        self._objects: list[tuple[int, int]] = []  # first layer and chunk of each, in order
        self._num_asked = self._num_pulled = 0  # chunks and objects
        self._dropped: set[int] = set()  # chunks that nobody reads any more

    def add(self, peer: Any, headers: Sequence[ChunkHeader], on_dead: Callable[[], None], *, is_ready: bool) -> int:
        """Add chunks behind those before, all before the first read; returns the first one's number.

        `is_ready`: they are in that node's memory, so few calls will do; else each is waited for by itself.
        """
        first = len(self._headers)
        most = max(1, _PULLED_AHEAD_BYTES // max(1, headers[0].payload_bytes)) if is_ready else 1
        for start in range(0, len(headers), most):
            call = _PeerCall(peer, headers[start : start + most], on_dead)
            self._calls += [(call, place) for place in range(len(call.headers))]
        self._headers += headers
        return first

    def fetch(self, index: int) -> Refs | Miss:
        """References to a chunk's objects, when its node has them in memory."""
        with self._lock:
            self._ask(index)
        return self._refs_of(index, timeout_s(sum(each.payload_bytes for each in self._calls[index][0].headers)))

    def pull(self, index: int, number: int) -> None:
        """Have a chunk's object and those that are read behind it come here."""
        with self._lock:
            self._put_in_order()
            step = layers_per_object(self._headers[index].layer_bytes)
            at, left_bytes = bisect_left(self._objects, (number * step, index)), _PULLED_AHEAD_BYTES
            for place in range(at, len(self._objects)):
                layer, chunk = self._objects[place]
                if chunk in self._dropped:
                    continue
                if left_bytes < 0 or (place >= self._num_pulled and not self._pull(layer, chunk)):
                    break
                left_bytes -= layers_per_object(self._headers[chunk].layer_bytes) * self._headers[chunk].layer_bytes
                self._num_pulled = max(self._num_pulled, place + 1)

    def drop(self, index: int) -> None:
        """Nobody reads that chunk any more: it is neither asked for nor pulled."""
        with self._lock:
            self._dropped.add(index)

    def _ask(self, index: int) -> None:
        ahead = max(1, _ASKED_AHEAD_BYTES // max(1, self._headers[index].payload_bytes))
        for chunk, (call, _) in enumerate(self._calls[self._num_asked : index + ahead], self._num_asked):
            if chunk not in self._dropped:
                call.begin()
        self._num_asked = max(self._num_asked, index + ahead)

    def _put_in_order(self) -> None:
        if self._objects:
            return
        steps = [layers_per_object(header.layer_bytes) for header in self._headers]
        self._objects = sorted(
            (layer, index)
            for index, header in enumerate(self._headers)
            for layer in range(0, header.layout.num_layers, steps[index])
        )

    def _pull(self, layer: int, index: int) -> bool:
        """False if it is not known yet where it is."""
        call, _ = self._calls[index]
        if index not in self._refs and not (call.answer and ray.wait([call.answer], timeout=0)[0]):
            return False
        refs, number = self._refs_of(index, 0.0), layer // layers_per_object(self._headers[index].layer_bytes)
        begin_pull(() if isinstance(refs, Miss) else refs[number : number + 1])
        return True

    def _refs_of(self, index: int, limit_s: float) -> Refs | Miss:
        if index in self._refs:
            return self._refs[index]
        call, place = self._calls[index]
        found = call.refs(limit_s)
        if found is Miss.BUSY:
            return found
        refs = found if isinstance(found, Miss) else found[place]
        self._refs[index] = Miss.ABSENT if refs is None else refs
        return self._refs[index]


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
