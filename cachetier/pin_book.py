"""The book of pins: names of tenants, and when each of them ends. Engines keep prompts by it, nodes keep chunks.

A page and a chunk know no more than that they are pinned.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeVar


class PinName(NamedTuple):
    tenant: bytes  # its id, as `names.tenant_id` says it
    pin_id: str  # drawn by the caller, so that it is the same on every replica and every node


class Pin(Protocol):
    """Says what one name keeps."""

    @property
    def expires_at_s(self) -> float:
        """Return when it expires, on the book's clock; infinite: when it is unpinned."""


P = TypeVar("P", bound=Pin)


class PinBook(dict[PinName, P]):
    """Pins by name, each until its time; whoever owns the book takes those out that are `over`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__()
        self._clock = clock

    def end_s(self, ttl_s: float | None) -> float:
        """Return when a pin of so many seconds ends; None: never."""
        return math.inf if ttl_s is None else self._clock() + ttl_s

    def left_s(self, pin: Pin) -> float | None:
        """Seconds until it ends; None for a pin without an end."""
        return None if math.isinf(pin.expires_at_s) else max(0.0, pin.expires_at_s - self._clock())

    def over(self) -> list[PinName]:
        now_s = self._clock()
        return [name for name, pin in self.items() if pin.expires_at_s <= now_s]

    def of_tenant(self, tenant: bytes) -> dict[PinName, P]:
        return {name: pin for name, pin in self.items() if name.tenant == tenant}
