"""The cache tier as tenants manage it: what is kept of a sequence and where, pins, deletion, figures.

Callers make keys from a tenant's own salt (`ChainQuery`), so a tenant reaches nothing but its own. All calls block, for
a bounded time; none changes what is evicted when, but for what is pinned.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple, Protocol, get_args, runtime_checkable

from mneme.cachetier.names import TierName
from mneme.cachetier.pin_book import PinName
from mneme.cachetier.store import ChainQuery

# `revert_pin`: of a node alone, where another has refused the pin.
AdminCall = Literal["lookup", "pin", "revert_pin", "unpin", "pins", "delete", "delete_tenant", "stats"]
ADMIN_CALLS: tuple[AdminCall, ...] = get_args(AdminCall)
MAX_PINS = 64  # of one tenant on one node


class FoundChunk(NamedTuple):
    """A chunk of a sequence in one place; a chunk that is in several places is found several times."""

    place: int  # in the sequence
    key: bytes
    num_tokens: int  # its leading tokens that are the sequence's
    num_bytes: int
    tier: TierName
    node: str
    is_near: bool = True  # on the node of who asked


class Amount(NamedTuple):
    """Says how many chunks and bytes; a chunk in two tiers counts twice."""

    num_chunks: int = 0
    num_bytes: int = 0

    def plus(self, other: Amount) -> Amount:
        return Amount(self.num_chunks + other.num_chunks, self.num_bytes + other.num_bytes)


class PinnedPrefix(NamedTuple):
    """Says what one node keeps for a pin."""

    pin_id: str
    num_tokens: int  # of the sequence
    amount: Amount
    expires_in_s: float | None  # None: until it is released, or the node's cache is started anew


class CacheAdmin(Protocol):
    """Manages what is kept on one node, or on all that live."""

    def lookup(self, query: ChainQuery) -> list[FoundChunk]:
        """Every place of every chunk of the sequence, from its root on, whatever is missing between."""

    def pin(self, name: PinName, query: ChainQuery, ttl_s: float | None) -> PinnedPrefix | None:
        """Keep what there is of the sequence; a pin of that name is replaced. None: there is nothing.

        Raises `CachePinRefused` if the tenant has too many pins, or too many bytes would be pinned; then that one
        stays.
        """

    def unpin(self, name: PinName) -> bool:
        """Release what the pin keeps; whether there was one."""

    def pins(self, tenant: bytes) -> list[PinnedPrefix]:
        """List the pins of a tenant."""

    def delete(self, query: ChainQuery, *, spares_longer: bool) -> Amount:
        """Forget the sequence, but for what others begin with too; unless spared, also what begins with it.

        Raises `ReplicaUnavailable` if some may be left: so much begins alike that not all of it can be looked at in
        time, or of the tenant's files one could not be removed.
        """

    def delete_tenant(self, tenant: bytes) -> Amount:
        """Forget all that a tenant has; raises as `delete` does."""

    def stats(self) -> list[dict[str, Any]]:
        """Figures of each node that answers: its name as "node", what `NodeCache.stats()` says, what its actor adds."""


@runtime_checkable
class Administered(Protocol):
    """A store whose tier can be managed."""

    @property
    def admin(self) -> CacheAdmin: ...


def leading(found: Iterable[FoundChunk], chunk_tokens: int) -> list[FoundChunk]:
    """The chunks without a gap from the sequence's root on, in all their places; only the last may be short."""
    by_place: dict[int, list[FoundChunk]] = {}
    for each in found:
        by_place.setdefault(each.place, []).append(each)
    run: list[FoundChunk] = []
    for place in range(len(by_place)):
        held = by_place.get(place, [])
        most = max((each.num_tokens for each in held), default=0)
        run += [each for each in held if each.num_tokens == most]
        if most < chunk_tokens:
            break
    return run


def num_leading_tokens(run: Sequence[FoundChunk]) -> int:
    """Count the sequence's tokens in what `leading` gave."""
    return sum({each.place: each.num_tokens for each in run}.values())


def merged_pins(pins: Iterable[PinnedPrefix]) -> list[PinnedPrefix]:
    """Pins of several nodes by name: what they have together, as long as the first of them lasts."""
    merged: dict[str, PinnedPrefix] = {}
    for pin in pins:
        known = merged.get(pin.pin_id, pin)
        lives = [each for each in (known.expires_in_s, pin.expires_in_s) if each is not None]
        amount = pin.amount if known is pin else known.amount.plus(pin.amount)
        num_tokens = max(known.num_tokens, pin.num_tokens)
        merged[pin.pin_id] = PinnedPrefix(pin.pin_id, num_tokens, amount, min(lives, default=None))
    return list(merged.values())
