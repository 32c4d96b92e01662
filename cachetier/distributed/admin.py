"""`CacheAdmin` of all nodes: each node's actor is asked, and their answers are put together."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError

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
from mneme.cachetier.distributed.nodes import NODE_PREFIX, find_actor, named_actors
from mneme.cachetier.store import ChainQuery
from mneme.errors import MnemeError, ReplicaUnavailable

logger = logging.getLogger(__name__)

_TIMEOUT_S = 5.0  # of one question to all nodes
_FIGURES_TIMEOUT_S = 1.0  # likewise, for figures: whoever scrapes them waits


class _Answer(NamedTuple):
    """What one node said."""

    actor: str  # its name
    value: Any  # None where it did not answer


class RayCacheAdmin:
    """See `CacheAdmin`. A node that does not answer in time is left out, but where something is to be forgotten."""

    def __init__(self, own_actor: str, namespace: str, timeout_s: float = _TIMEOUT_S) -> None:
        """`own_actor` is the name of this node's."""
        self._own_actor, self._timeout_s = own_actor, timeout_s
        self._namespace = namespace
        self._naming = ThreadPoolExecutor(1, "node-names")  # Ray's look-ups have no timeout

    def lookup(self, query: ChainQuery) -> list[FoundChunk]:
        answers = self._ask("lookup", query)
        return [
            found._replace(is_near=answer.actor == self._own_actor)
            for answer in answers
            for found in answer.value or ()
        ]

    def pin(self, name: PinName, query: ChainQuery, ttl_s: float | None) -> PinnedPrefix | None:
        """On every node that has some of it, or on none, and then an older one stays."""
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
        return any(answer.value is True for answer in self._ask("unpin", name))

    def pins(self, tenant: bytes) -> list[PinnedPrefix]:
        return merged_pins(pin for answer in self._ask("pins", tenant) for pin in answer.value or ())

    def delete(self, query: ChainQuery, *, spares_longer: bool) -> Amount:
        """Raises `ReplicaUnavailable` if a node did not answer: it may have some still."""
        return _sum_of(self._ask("delete", query, spares_longer=spares_longer))

    def delete_tenant(self, tenant: bytes) -> Amount:
        return _sum_of(self._ask("delete_tenant", tenant))

    def stats(self) -> list[dict[str, Any]]:
        return [figures for answer in self._ask("stats") for figures in answer.value or ()]

    def _ask(self, call: AdminCall, *args: Any, among: Collection[str] | None = None, **options: Any) -> list[_Answer]:
        """Answers of all nodes, or of these actors, in the order of their names.

        Raises `ReplicaUnavailable` if the nodes could not be listed in time.
        """
        timeout_s = min(self._timeout_s, _FIGURES_TIMEOUT_S) if call == "stats" else self._timeout_s
        deadline_s = time.monotonic() + timeout_s
        try:
            actors = self._naming.submit(self._actors).result(timeout_s)
        except (TimeoutError, RayError) as error:
            raise ReplicaUnavailable("the nodes of the cache tier could not be listed") from error
        asked = {
            name: actor.manage.remote(call, *args, **options)
            for name, actor in actors.items()
            if among is None or name in among
        }
        return [_Answer(name, _value_of(name, answer, deadline_s)) for name, answer in asked.items()]

    def _actors(self) -> dict[str, Any]:
        names = [name for name in named_actors(self._namespace) if name.startswith(NODE_PREFIX)]
        found = {name: find_actor(name, self._namespace) for name in names}
        return {name: actor for name, actor in found.items() if actor is not None}


def _value_of(name: str, answer: Any, deadline_s: float) -> Any:
    try:
        return ray.get(answer, timeout=max(0.0, deadline_s - time.monotonic()))
    except RayError as error:  # a timeout too
        logger.warning("cache tier: actor=%s did not answer: %s", name, type(error).__name__)
        return None


def _sum_of(answers: Sequence[_Answer]) -> Amount:
    total = Amount()
    for answer in answers:
        if isinstance(answer.value, MnemeError):
            raise answer.value
        if not isinstance(answer.value, Amount):
            raise ReplicaUnavailable("a node of the cache tier did not answer; some may be left there")
        total = total.plus(answer.value)
    return total
