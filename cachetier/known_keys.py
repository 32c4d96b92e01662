"""Keys of chunks that a process has seen in the tier: a bounded memory, so that few are put twice."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

_MAX_KEYS = 1 << 16  # 14 MB


class KnownKeys:
    """The one that was seen longest ago goes first; thread-safe."""

    def __init__(self, max_keys: int = _MAX_KEYS) -> None:
        self._max_keys = max_keys
        self._lock = threading.Lock()
        self._keys: OrderedDict[bytes, bytes] = OrderedDict()  # with their parents

    def among(self, keys: Sequence[bytes]) -> frozenset[bytes]:
        with self._lock:
            return frozenset(key for key in keys if key in self._keys)

    def note(self, parents: Mapping[bytes, bytes]) -> None:
        """These keys, each with its parent's, are there."""
        with self._lock:
            for key, parent in parents.items():
                self._keys[key] = parent
                self._keys.move_to_end(key)
            while len(self._keys) > self._max_keys:
                self._keys.popitem(last=False)

    def drop(self, keys: Iterable[bytes]) -> None:
        """They are not."""
        with self._lock:
            for key in keys:
                self._keys.pop(key, None)

    def drop_chain(self, key: bytes) -> None:
        """It is not, nor need be what it follows: all of that is asked for anew, up to what is not known anyway."""
        with self._lock:
            while (parent := self._keys.pop(key, None)) is not None:
                key = parent

    def clear(self) -> None:
        with self._lock:
            self._keys.clear()
