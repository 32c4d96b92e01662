"""Keys of chunks that a process has seen in the tier: a bounded memory, so that few are put twice."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence

_MAX_KEYS = 1 << 16  # 10 MB


class KnownKeys:
    """The one that was seen longest ago goes first; thread-safe."""

    def __init__(self, max_keys: int = _MAX_KEYS) -> None:
        self._max_keys = max_keys
        self._lock = threading.Lock()
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def among(self, keys: Sequence[bytes]) -> frozenset[bytes]:
        with self._lock:
            return frozenset(key for key in keys if key in self._keys)

    def note(self, keys: Iterable[bytes]) -> None:
        """They are there."""
        with self._lock:
            for key in keys:
                self._keys[key] = None
                self._keys.move_to_end(key)
            while len(self._keys) > self._max_keys:
                self._keys.popitem(last=False)

    def drop(self, keys: Iterable[bytes]) -> None:
        """They are not."""
        with self._lock:
            for key in keys:
                self._keys.pop(key, None)

    def clear(self) -> None:
        with self._lock:
            self._keys.clear()
