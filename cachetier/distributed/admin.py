"""`CacheAdmin` of all nodes: each node's actor is asked, and their answers are put together."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError
from ray.util import list_named_actors

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
from mneme.cachetier.distributed.node_identity import NODE_PREFIX
from mneme.cachetier.store import ChainQuery
from mneme.errors import MnemeError, ReplicaUnavailable

_logger = logging.getLogger(__name__)

_TIMEOUT_S = 5.0  # of one question to all nodes
_FIGURES_TIMEOUT_S = 1.0  # likewise, for figures: whoever scrapes them waits


class _Answer(NamedTuple):
    actor: str  # its name
    value: Any  # None where it did not answer
    is_there: bool


class RayCacheAdmin:
    """See `CacheAdmin`. A node that does not answer in time is left out, but where something is to be forgotten."""

    def __init__(self, own_actor: str, namespace: str, timeout_s: float = _TIMEOUT_S) -> None:
        """`own_actor` is the name of this node's."""
        self._own_actor, self._namespace, self._timeout_s = own_actor, namespace, timeout_s
        self._naming = ThreadPoolExecutor(1, "kv-admin")  # Ray's own look-ups of names have no timeout

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

    def _ask(self, call: AdminCall, *args: Any, among: Collection[str] | None = None, **options: Any) -> list[_Answer]:
        """Every node at once, or those of these actors; in the order of their names."""
        timeout_s = min(self._timeout_s, _FIGURES_TIMEOUT_S) if call == "stats" else self._timeout_s
        deadline_s = time.monotonic() + timeout_s
        try:
            actors = self._naming.submit(self._actors).result(timeout_s)
        except (TimeoutError, RayError) as error:
            raise ReplicaUnavailable("the nodes of the cache tier could not be listed") from error
        calls = [
            (name, actor.manage.remote(call, *args, **options))
            for name, actor in actors
            if among is None or name in among
        ]
        return [self._answer(name, call, answer, deadline_s) for name, answer in calls]

    def _answer(self, name: str, call: str, answer: Any, deadline_s: float) -> _Answer:
        try:
            return _Answer(name, ray.get(answer, timeout=max(0.0, deadline_s - time.monotonic())), True)
        except RayError as error:  # a timeout too
            _logger.warning("cache tier: actor=%s call=%s failed: %s", name, call, type(error).__name__)
            return _Answer(name, None, False)

    def _actors(self) -> list[tuple[str, Any]]:
        named = list_named_actors(all_namespaces=True)
        names = sorted(each["name"] for each in named if each["namespace"] == self._namespace)
        found = []
        for name in names:
            if name.startswith(NODE_PREFIX):
                try:
                    found.append((name, ray.get_actor(name, self._namespace)))
                except ValueError:  # it died meanwhile
                    continue
        return found


def _sum_of(answers: Sequence[_Answer]) -> Amount:
    total = Amount()
    for answer in answers:
        if isinstance(answer.value, MnemeError):
            raise answer.value
        if not isinstance(answer.value, Amount):
            raise ReplicaUnavailable("a node of the cache tier did not answer; some may be left there")
        total = total.plus(answer.value)
    return total
