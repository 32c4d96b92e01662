"""Asks nodes' actors in bounded time (`Nodes`): what they are, how they are found, and when they are left alone."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Any, NamedTuple

import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayError
from ray.util import list_named_actors

from mneme.cachetier.config import CacheConfig
from mneme.errors import ReplicaUnavailable
from mneme.primitives import Workers

logger = logging.getLogger(__name__)

NODE_PREFIX = "node-"  # of the names of nodes' actors

_MAX_FAILURES = 3  # in a row
_PAUSE_S = 0.5  # then, doubled with each try that fails
_MAX_PAUSE_S = 16.0
_LATE_S = 1.0  # an answer that takes longer speaks against its node; one that only came after its deadline does not
_FIRST_LOOK_S = 0.15  # how long who asks first waits for the list of nodes
_MEMBERS_S = 2.0  # how old the list may be
_BACK_S = 30.0  # how long a node that lives counts though its actor is gone: engines there make another


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeIdentity:
    """Says which node an actor is of, and how much of it is the actor's."""

    node_id: str  # Ray's; another after a restart of Ray
    name: str  # in Ray
    namespace: str  # of the application's actors
    host_bytes: int  # of the host tier
    object_bytes: int  # that may ever be in the object store, with what is on its way
    session_ttl_s: float = 3600.0  # of session logs


class Ready(NamedTuple):
    """Says what a node's actor is, once it can be asked."""

    settings: tuple[CacheConfig, NodeIdentity]  # that it was made with
    problem: str  # why it goes without a disk, if it should have one
    is_refused: bool  # whether a start has to end for that; one that was made again goes on without


def node_actor_name(node_id: str) -> str:
    return NODE_PREFIX + node_id


def named_actors(namespace: str) -> list[str]:
    """List the names of an application's actors, sorted; some may be dead. Blocks, without a timeout."""
    named = list_named_actors(all_namespaces=True)
    return sorted(each["name"] for each in named if each["namespace"] == namespace)


def find_actor(name: str, namespace: str) -> Any:
    """Find an actor by its name; None if it died meanwhile. Blocks, without a timeout."""
    try:
        return ray.get_actor(name, namespace)
    except ValueError:
        return None


class Breaker:
    """Allows nothing for a while after failures in a row, then a single try; thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._num_failures = self._num_tries = 0  # since the last success; tries while it was open
        self._next_try_s = float("-inf")

    @property
    def is_open(self) -> bool:
        """Return whether calls are held back, as too many in a row have failed."""
        return self._num_failures >= _MAX_FAILURES

    def allows(self) -> bool:
        """Return whether to try; `succeeded` or `failed` follows if so."""
        with self._lock:
            if not self.is_open:
                return True
            now_s = self._clock()
            if now_s < self._next_try_s:
                return False
            self._num_tries += 1
            self._next_try_s = now_s + self._pause_s()  # others wait for what comes of this try
            return True

    def succeeded(self) -> None:
        with self._lock:
            self._num_failures = self._num_tries = 0

    def failed(self) -> None:
        with self._lock:
            self._num_failures += 1
            if self.is_open:
                self._next_try_s = self._clock() + self._pause_s()

    def _pause_s(self) -> float:
        return min(_MAX_PAUSE_S, _PAUSE_S * 2.0 ** min(self._num_tries, 10))


class Call(NamedTuple):
    """A call that was made: to a node, with a name for its counters."""

    node: str
    name: str
    answer: Any
    since_s: float


class Nodes:
    """Asks the actors of an application's nodes; nobody waits for one longer than they say. Thread-safe.

    An engine's threads `call` and then wait for `answers`: a node that failed several times in a row is not called for
    a while. Where each answer matters nobody is left alone: `ask_all`, and `ask`, with which a node's actor asks others
    from its event loop. Ray's own look-ups of names have no timeout, so a thread makes them, and keeps a list.
    """

    def __init__(self, own_node: str, namespace: str, connect: Callable[[], Any] = lambda: None) -> None:
        """`connect`, in an engine's process, gives the actor of its own node, made if there is none or a dead one."""
        self.own_node, self._namespace, self._connect = own_node, namespace, connect
        self.own = connect()
        self.counters: Counter[str] = Counter()
        self._breakers: dict[str, Breaker] = {}
        self._names = Workers("nodes", 1)
        self._connecting: Future[None] | None = None
        self._lock = threading.Lock()  # of what looks
        self._looking: Future[bool] | None = None
        self._next_look_s = float("-inf")
        self._actors: dict[str, Any] = {}  # of other nodes
        self._listed_s: dict[str, float] = {}  # when each of them was
        self._dead: set[str] = set()  # nodes of these actors that are so for good

    def is_up(self) -> bool:
        """Return whether the own node answers, as far as the last calls tell."""
        return not self._breaker(self.own_node).is_open

    def call(self, node: str, name: str, method: Any, *args: Any) -> Call | None:
        """Begin a call; None if that node does not answer these days."""
        if not self._breaker(node).allows():
            self.counters["not_asked"] += 1
            return None
        return Call(node, name, method.remote(*args), time.monotonic())

    def answers(self, calls: Sequence[Call | None], deadline_s: float) -> list[Any]:
        """One for each call, None where there is none by the deadline, of `time.monotonic`."""
        return [None if call is None else self._answer(call, deadline_s) for call in calls]

    def ask_own(self, name: str, method: str, *args: Any, timeout_s: float) -> Any:
        """The answer of the own node; None where there is none in time."""
        call = self.call(self.own_node, name, getattr(self.own, method), *args)
        return self.answers([call], time.monotonic() + timeout_s)[0]

    def ask_all(
        self, method: str, *args: Any, timeout_s: float, among: Collection[str] | None = None, **options: Any
    ) -> dict[str, Any]:
        """The answers of all nodes, listed anew, or of these; None where there is none in time.

        Nobody is left out: what is asked of all may change them. Raises `ReplicaUnavailable` if they cannot be listed.
        """
        deadline_s = time.monotonic() + timeout_s
        try:
            is_listed = self._look().result(timeout_s)
        except TimeoutError:
            is_listed = False
        if not is_listed:
            raise ReplicaUnavailable("the nodes of the cache tier could not be listed")
        actors = {self.own_node: self.own, **self._actors}
        asked = sorted(actors if among is None else actors.keys() & among)
        begun = [getattr(actors[node], method).remote(*args, **options) for node in asked]
        calls = [Call(node, method, answer, time.monotonic()) for node, answer in zip(asked, begun, strict=True)]
        return dict(zip(asked, self.answers(calls, deadline_s), strict=True))

    def lost(self, node: str) -> None:
        """An actor is dead for good, its node perhaps too."""
        self.counters["actors_lost"] += 1
        if node != self.own_node:
            self.drop(node)
            self.own.not_reached.remote(node)
        elif self._connecting is None or self._connecting.done():
            self._connecting = self._names.begin(self._connect_again)

    async def ask(self, peer: Any, method: str, *args: Any, timeout_s: float) -> Any:
        """The answer of another node's actor, None if there is none in time."""
        try:
            async with asyncio.timeout(timeout_s):  # unlike `wait_for`, lets whoever asks be cancelled at any time
                return await getattr(peer, method).remote(*args)
        except (TimeoutError, RayError) as error:
            self.counters["peer_failed"] += 1
            if isinstance(error, ActorDiedError):  # it is asked, in vain, until there is another
                self._dead |= {node for node, actor in self._actors.items() if actor is peer}
            self.look_again()
            logger.debug("a peer did not answer %s: %s", method, type(error).__name__)
            return None

    async def find(self, nodes: Collection[str], timeout_s: float) -> dict[str, Any]:
        """Actors by node; None where there is none, or not yet: it is there for who asks later."""
        if any(self._actor(node) is None for node in nodes):
            await asyncio.wait({asyncio.wrap_future(self._look())}, timeout=timeout_s)
        return {node: self._actor(node) for node in nodes}

    async def in_order(self, name: bytes) -> list[Any]:
        """Actors of the others in a session's order; it changes with a node for that node's share of sessions only."""
        next_look_s = self._next_look_s
        if time.monotonic() >= next_look_s:
            looking = asyncio.wrap_future(self._look())
            if next_look_s == float("-inf"):
                await asyncio.wait({looking}, timeout=_FIRST_LOOK_S)
        return [self._actors[node] for node in rendezvous(name, self._actors)]

    def drop(self, node: str) -> None:
        """Forget a dead actor: the next who asks finds another."""
        self._dead.add(node)

    def look_again(self, *, is_new: bool = False) -> None:
        """Refresh the list of nodes; with `is_new`, the next caller waits for the result."""
        self._next_look_s = float("-inf") if is_new else min(self._next_look_s, time.monotonic())

    def _answer(self, call: Call, deadline_s: float) -> Any:
        breaker = self._breaker(call.node)
        try:
            answer = ray.get(call.answer, timeout=max(0.0, deadline_s - time.monotonic()))
        except GetTimeoutError:
            self.counters[f"{call.name}_timeout"] += 1
            breaker.failed()
            call.answer.future().add_done_callback(partial(self._came_late, call))
            return None
        except RayError as error:
            self.counters[f"{call.name}_failed"] += 1
            breaker.failed()
            if isinstance(error, ActorDiedError):
                self.lost(call.node)
            return None
        breaker.succeeded()
        return answer

    def _came_late(self, call: Call, answer: Future[Any]) -> None:
        """Forgive a node whose answer came, if soon enough: not every caller waits as long as a sound node may take."""
        if answer.exception() is None and time.monotonic() - call.since_s < _LATE_S:
            self._breaker(call.node).succeeded()

    def _breaker(self, node: str) -> Breaker:
        return self._breakers.setdefault(node, Breaker())

    def _connect_again(self) -> None:
        try:
            self.own = self._connect()
        except Exception:  # the thread's edge; the next call that fails begins another
            logger.exception("the actor of this node could not be made again")

    def _actor(self, node: str) -> Any:
        return None if node in self._dead else self._actors.get(node)

    def _look(self) -> Future[bool]:
        """List the nodes, unless that is under way; whether they could be."""
        with self._lock:
            if self._looking is None or self._looking.done():
                self._looking = self._names.begin(self._list)
            return self._looking

    def _list(self) -> bool:
        try:
            actors = self._live()
        except Exception:  # whatever Ray raises for this: the nodes of before stay
            logger.exception("the list of nodes is not to be had")
            return False
        else:
            self._dead -= {node for node in tuple(self._dead) if actors.get(node) is not self._actors.get(node)}
            self._actors = actors
            return True
        finally:
            self._next_look_s = time.monotonic() + _MEMBERS_S

    def _live(self) -> dict[str, Any]:
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        now_s, actors = time.monotonic(), {}
        for name in named_actors(self._namespace):
            node = name.removeprefix(NODE_PREFIX)
            if node in alive and node != self.own_node:
                actor = self._actor(node) or find_actor(name, self._namespace)
                if actor is not None:
                    actors[node], self._listed_s[node] = actor, now_s
        gone = {node: actor for node, actor in self._actors.items() if node in alive and node not in actors}
        return actors | {node: actor for node, actor in gone.items() if now_s - self._listed_s[node] < _BACK_S}


def rendezvous(name: bytes, nodes: Iterable[str]) -> list[str]:
    """Put nodes in the order of a session: highest random weight (Thaler and Ravishankar 1998)."""
    return sorted(nodes, key=lambda node: blake2b(node.encode(), digest_size=8, key=name).digest())
