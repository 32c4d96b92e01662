"""Where the bytes of a node's host tier lie: in this process, or wherever the owner of the tier keeps them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from mneme.cachetier.chunk.header import U8Array
from mneme.cachetier.chunk.misses import Miss

# What a memory made of a chunk's bytes: it alone knows what it is.
Held = object


class ChunkMemory(Protocol):
    """Calls may come from several threads, and take a bounded time."""

    def take(self, payload: object) -> Held:
        """What an engine gave is ours from now on. Raises MemoryError if it cannot be had or there is no room."""

    def keep(self, layers: Sequence[U8Array]) -> Held:
        """Bytes that were read from a disk, one array for each layer; they change no more. Raises MemoryError."""

    def layers(self, held: Held) -> tuple[U8Array, ...] | Miss:
        """All layers, read-only; the memory stays as long as they are referred to."""

    def drop(self, held: Held) -> None:
        """The tier gave it up; who was given it before may still read it."""


class ProcessMemory:
    """Arrays of this process, as they are."""

    def take(self, payload: object) -> Held:
        if not isinstance(payload, tuple) or not all(isinstance(layer, np.ndarray) for layer in payload):
            raise TypeError(f"payload: must be a tuple of arrays (got {type(payload).__name__})")
        return payload

    def keep(self, layers: Sequence[U8Array]) -> Held:
        return tuple(layers)

    def layers(self, held: Held) -> tuple[U8Array, ...] | Miss:
        assert isinstance(held, tuple)
        return held

    def drop(self, held: Held) -> None:
        """Nothing: the last reference frees it."""
