"""Keys of pages that are gone: a bounded memory, so that a return is known as one.

Without it every session that returns after its pages went would look like a new one. A few times as many keys as a tier
holds pages cost a thousandth of the pages themselves.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable


class PastKeys:
    """Of `max_keys` keys at most; the one that was noted longest ago goes first."""

    def __init__(self, max_keys: int) -> None:
        self._max_keys = max_keys
        self._keys: OrderedDict[Hashable, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._keys

    def note(self, key: Hashable) -> None:
        """The page of this key is gone."""
        self._keys[key] = None
        self._keys.move_to_end(key)
        if len(self._keys) > self._max_keys:
            self._keys.popitem(last=False)

    def take(self, key: Hashable) -> bool:
        """Whether a page of this key was here; it is forgotten now."""
        known = key in self._keys
        self._keys.pop(key, None)
        return known
