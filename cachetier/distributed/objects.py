"""Chunks in a node's object store: a chunk is a few objects, each a run of its layers; a layer is a view of the store.

An object dies with the process that created it, so whoever computed a chunk puts it and hands over references, and the
node's actor puts it once more as its own. Reading copies nothing: what is read is pinned in the store for as long as
the arrays live, so readers let go of them.

The store itself is never relied on for a policy: what does not fit makes it spill, or write to files instead of
memory, without a word. So bytes are counted here, those on their way in too, and refused beyond a bound.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayError

from mneme.cachetier.chunk.header import U8Array
from mneme.cachetier.chunk.misses import Miss

OBJECT_BYTES = 4 << 20  # about; small enough that first layers come early from another node, large enough to come fast
_TIMEOUT_S = 5.0

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
        """Nothing: the last reference in this process frees it, and the last of all frees the memory.

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


def layers_per_object(layer_bytes: int) -> int:
    return max(1, OBJECT_BYTES // max(1, layer_bytes))


def runs_of(layers: Sequence[U8Array]) -> list[tuple[U8Array, ...]]:
    """What goes into each object."""
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
