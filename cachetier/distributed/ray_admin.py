"""`CacheAdmin` of all nodes: each node's actor is asked, and their answers are put together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mneme.cachetier.admin import (
    AdminCall,
    Amount,
    FoundChunk,
    PinnedPrefix,
    leading,
    merged_pins,
    num_leading_tokens,
)
from mneme.cachetier.distributed.nodes import Nodes
from mneme.cachetier.pin_book import PinName
from mneme.cachetier.store import ChainQuery
from mneme.errors import MnemeError, ReplicaUnavailable

_TIMEOUT_S = 5.0  # of one question to all nodes
_FIGURES_TIMEOUT_S = 1.0  # likewise, for figures: whoever scrapes them waits


class RayCacheAdmin:
    """See `CacheAdmin`. A node that does not answer in time is left out, but where something is to be forgotten."""

    def __init__(self, nodes: Nodes, timeout_s: float = _TIMEOUT_S) -> None:
        self._nodes, self._timeout_s = nodes, timeout_s

    def lookup(self, query: ChainQuery) -> list[FoundChunk]:
        answers = self._ask("lookup", query)
        return [
            found._replace(is_near=node == self._nodes.own_node)
            for node, answer in answers.items()
            for found in answer or ()
        ]

    def pin(self, name: PinName, query: ChainQuery, ttl_s: float | None) -> PinnedPrefix | None:
        """Pin on every node that has some of it, or on none, and then an older pin stays."""
        answers = self._ask("pin", name, query, ttl_s)
        pinned = {node: answer for node, answer in answers.items() if isinstance(answer, PinnedPrefix)}
        for answer in answers.values():
            if isinstance(answer, MnemeError):
                self._ask("revert_pin", name, among=pinned.keys())
                raise answer
        merged = merged_pins(pinned.values())
        if not merged:
            return None
        num_tokens = num_leading_tokens(leading(self.lookup(query), query.chunk_tokens))
        return merged[0]._replace(num_tokens=num_tokens)

    def unpin(self, name: PinName) -> bool:
        return any(answer is True for answer in self._ask("unpin", name).values())

    def pins(self, tenant: bytes) -> list[PinnedPrefix]:
        return merged_pins(pin for answer in self._ask("pins", tenant).values() for pin in answer or ())

    def delete(self, query: ChainQuery, *, spares_longer: bool) -> Amount:
        """Raises `ReplicaUnavailable` if a node did not answer: it may have some still."""
        return _sum_of(self._ask("delete", query, spares_longer=spares_longer).values())

    def delete_tenant(self, tenant: bytes) -> Amount:
        return _sum_of(self._ask("delete_tenant", tenant).values())

    def stats(self) -> list[dict[str, Any]]:
        return [figures for answer in self._ask("stats").values() for figures in answer or ()]

    def _ask(self, call: AdminCall, *args: Any, **options: Any) -> dict[str, Any]:
        """See `Nodes.ask_all`."""
        timeout_s = min(self._timeout_s, _FIGURES_TIMEOUT_S) if call == "stats" else self._timeout_s
        return self._nodes.ask_all("manage", call, *args, timeout_s=timeout_s, **options)


def _sum_of(answers: Iterable[Any]) -> Amount:
    total = Amount()
    for answer in answers:
        if isinstance(answer, MnemeError):
            raise answer
        if not isinstance(answer, Amount):
            raise ReplicaUnavailable("a node of the cache tier did not answer; some may be left there")
        total = total.plus(answer)
    return total
