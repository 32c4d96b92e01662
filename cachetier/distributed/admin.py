"""`CacheAdmin` of all nodes: each node's actor is asked, and their answers are put together."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from mneme.cachetier.admin import (
    AdminCall,
    Amount,
    FoundChunk,
    PinName,
    PinnedPrefix,
    leading,
    merged_pins,
    num_leading_tokens,
)
from mneme.cachetier.distributed.nodes import AllNodes, Answer
from mneme.cachetier.store import ChainQuery
from mneme.errors import MnemeError, ReplicaUnavailable

_TIMEOUT_S = 5.0  # of one question to all nodes
_FIGURES_TIMEOUT_S = 1.0  # likewise, for figures: whoever scrapes them waits


class RayCacheAdmin:
    """See `CacheAdmin`. A node that does not answer in time is left out, but where something is to be forgotten."""

    def __init__(self, own_actor: str, namespace: str, timeout_s: float = _TIMEOUT_S) -> None:
        """`own_actor` is the name of this node's."""
        self._own_actor, self._timeout_s = own_actor, timeout_s
        self._nodes = AllNodes(namespace)

    def lookup(self, query: ChainQuery) -> list[FoundChunk]:
        """See `CacheAdmin.lookup`."""
        answers = self._ask("lookup", query)
        return [
            found._replace(is_near=answer.actor == self._own_actor)
            for answer in answers
            for found in answer.value or ()
        ]

    def pin(self, name: PinName, query: ChainQuery, ttl_s: float | None) -> PinnedPrefix | None:
        """See `CacheAdmin.pin`: on every node that has some of it, or on none, and then an older one stays."""
        answers = self._ask("pin", name, query, ttl_s)
        pinned = {answer.actor: answer.value for answer in answers if isinstance(answer.value, PinnedPrefix)}
        for answer in answers:
            if isinstance(answer.value, MnemeError):
                self._ask("take_back_pin", name, among=pinned.keys())
                raise answer.value
        merged = merged_pins(pinned.values())
        if not merged:
            return None
        num_tokens = num_leading_tokens(leading(self.lookup(query), query.chunk_tokens))
        return merged[0]._replace(num_tokens=num_tokens)

    def unpin(self, name: PinName) -> bool:
        """See `CacheAdmin.unpin`."""
        return any(answer.value is True for answer in self._ask("unpin", name))

    def pins(self, owner: bytes) -> list[PinnedPrefix]:
        """See `CacheAdmin.pins`."""
        return merged_pins(pin for answer in self._ask("pins", owner) for pin in answer.value or ())

    def delete(self, query: ChainQuery, *, spares_longer: bool) -> Amount:
        """See `CacheAdmin.delete`. Raises `ReplicaUnavailable` if a node did not answer: it may have some still."""
        return _sum_of(self._ask("delete", query, spares_longer=spares_longer))

    def delete_owned(self, owner: bytes) -> Amount:
        """See `CacheAdmin.delete_owned`; raises likewise."""
        return _sum_of(self._ask("delete_owned", owner))

    def stats(self) -> list[dict[str, Any]]:
        """See `CacheAdmin.stats`."""
        return [figures for answer in self._ask("stats") for figures in answer.value or ()]

    def _ask(self, call: AdminCall, *args: Any, among: Collection[str] | None = None, **options: Any) -> list[Answer]:
        timeout_s = min(self._timeout_s, _FIGURES_TIMEOUT_S) if call == "stats" else self._timeout_s
        return self._nodes.ask("manage", call, *args, timeout_s=timeout_s, among=among, **options)


def _sum_of(answers: Sequence[Answer]) -> Amount:
    total = Amount()
    for answer in answers:
        if isinstance(answer.value, MnemeError):
            raise answer.value
        if not isinstance(answer.value, Amount):
            raise ReplicaUnavailable("a node of the cache tier did not answer; some may be left there")
        total = total.plus(answer.value)
    return total
