"""Keys of chunks that a process has seen in the tier: a bounded memory, so that few are put twice."""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

_MAX_KEYS = 1 << 16  # 20 MB


class _Seen(NamedTuple):
    parent: bytes
    time_s: float


class KnownKeys:
    """The one that was seen longest ago goes first; thread-safe."""

    def __init__(
        self,
        max_keys: int = _MAX_KEYS,
        *,
        max_age_s: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """What was seen `max_age_s` ago is not known: to put it again is the use that keeps it there."""
        self._max_keys, self._max_age_s, self._clock = max_keys, max_age_s, clock
        self._lock = threading.Lock()
        self._seen: OrderedDict[bytes, _Seen] = OrderedDict()

    def among(self, keys: Sequence[bytes]) -> frozenset[bytes]:
        since_s = self._clock() - self._max_age_s
        with self._lock:
            return frozenset(key for key in keys if key in self._seen and self._seen[key].time_s > since_s)

    def note(self, parents: Mapping[bytes, bytes]) -> None:
        """These keys, each with its parent's, are there."""
        now_s = self._clock()
        with self._lock:
            for key, parent in parents.items():
                self._seen[key] = _Seen(parent, now_s)
                self._seen.move_to_end(key)
            while len(self._seen) > self._max_keys:
                self._seen.popitem(last=False)

    def drop(self, keys: Iterable[bytes]) -> None:
        """They are not."""
        with self._lock:
            for key in keys:
                self._seen.pop(key, None)

    def drop_chain(self, key: bytes) -> None:
        """It is not, nor need be what it follows: all of that is asked for anew, up to what is not known anyway."""
        with self._lock:
            while (seen := self._seen.pop(key, None)) is not None:
                key = seen.parent

    def clear(self) -> None:
        with self._lock:
            self._seen.clear()
