"""Asks nodes' actors in bounded time: what they are, how they are found, and who asks them.

Ray's own look-ups of names have no timeout, so each is made beside whoever waits for it. An engine's process asks
through `NodeCalls`, a node's actor asks others through `PeerActors`; `admin` asks all nodes. A node that does not
answer is left alone for a while (`Breaker`).
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import takewhile
from typing import Any, NamedTuple

import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayError
from ray.util import list_named_actors

from mneme.cachetier.config import CacheConfig

logger = logging.getLogger(__name__)

NODE_PREFIX = "node-"  # of the names of nodes' actors

_MAX_FAILURES = 3  # in a row
_PAUSE_S = 0.5  # then, doubled while it goes on
_MAX_PAUSE_S = 16.0
_MAX_LATE = 64
_LATE_S = 1.0  # an answer that takes longer speaks against its node; one that only came after its deadline does not
_FIRST_LOOK_S = 0.15  # how long who asks first waits for the list of nodes
_MEMBERS_S = 2.0  # how old the list may be
_BACK_S = 30.0  # how long a node that lives counts though its actor is gone: engines there make another


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeIdentity:
    """Which node an actor is of, and what of it is the actor's."""

    node_id: str  # Ray's; another after a restart of Ray
    name: str  # in Ray
    namespace: str  # of the application's actors
    host_bytes: int  # of the host tier
    object_bytes: int  # that may ever be in the object store, with what is on its way
    session_ttl_s: float = 3600.0  # of session logs


class Ready(NamedTuple):
    """What a node's actor is, once it can be asked."""

    settings: tuple[CacheConfig, NodeIdentity]  # that it was made with
    problem: str  # why it goes without a disk, if it should have one
    is_refused: bool  # whether a start has to end for that; one that was made again goes on without


def node_actor_name(node_id: str) -> str:
    return NODE_PREFIX + node_id


def named_actors(namespace: str) -> list[str]:
    """Names of an application's actors, sorted; some may be dead. Blocks, without a timeout."""
    named = list_named_actors(all_namespaces=True)
    return sorted(each["name"] for each in named if each["namespace"] == namespace)


def find_actor(name: str, namespace: str) -> Any:
    """None: it died meanwhile. Blocks, without a timeout."""
    try:
        return ray.get_actor(name, namespace)
    except ValueError:
        return None


class Breaker:
    """Allows nothing for a while after failures in a row, then a single try; thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._num_failures = 0
        self._next_try_s = float("-inf")

    @property
    def is_open(self) -> bool:
        """Nothing gets through."""
        return self._num_failures >= _MAX_FAILURES

    def allows(self) -> bool:
        """Whether to try; `succeeded` or `failed` follows if so."""
        with self._lock:
            if not self.is_open:
                return True
            now_s = self._clock()
            if now_s < self._next_try_s:
                return False
            self._next_try_s = now_s + self._pause_s()  # others wait for what comes of this try
            return True

    def succeeded(self) -> None:
        with self._lock:
            self._num_failures = 0

    def failed(self) -> None:
        with self._lock:
            self._num_failures += 1
            if self.is_open:
                self._next_try_s = self._clock() + self._pause_s()

    def _pause_s(self) -> float:
        return min(_MAX_PAUSE_S, _PAUSE_S * 2.0 ** min(self._num_failures - _MAX_FAILURES, 10))


class Call(NamedTuple):
    """A call that was made: to a node, with a name for its counters."""

    node: str
    name: str
    answer: Any
    since_s: float


class NodeCalls:
    """Calls from an engine's process, which are not made where they would be in vain.

    `own` is the actor of the process's own node. `connect` gives it, made if there is none; when it is dead for good it
    is made again, on a thread, and `on_new` hears of that.
    """

    def __init__(self, node_id: str, connect: Callable[[], Any], on_new: Callable[[], object] = lambda: None) -> None:
        self._node_id, self._connect, self._on_new = node_id, connect, on_new
        self.own = connect()
        self._connecting = threading.Lock()
        self._breakers: dict[str, Breaker] = {}
        self._lock = threading.Lock()
        self._late: deque[Call] = deque(maxlen=_MAX_LATE)  # oldest first
        self._timer: threading.Timer | None = None  # while there are such
        self.counters: Counter[str] = Counter()

    def call(self, node: str, name: str, method: Any, *args: Any) -> Call | None:
        """Begin a call; None if that node does not answer these days."""
        if not self._breaker(node).allows():
            self.counters["not_asked"] += 1
            return None
        return Call(node, name, method.remote(*args), time.monotonic())

    def is_up(self) -> bool:
        """Whether the own node answers, as far as the last calls tell."""
        return not self._breaker(self._node_id).is_open

    def answers(self, calls: Sequence[Call | None], deadline_s: float) -> list[Any]:
        """One for each call, None where there is none by the deadline, of `time.monotonic`."""
        return [None if call is None else self._answer(call, deadline_s) for call in calls]

    def ask_own(self, name: str, method: str, *args: Any, timeout_s: float) -> Any:
        """The answer of the own node; None where there is none in time."""
        call = self.call(self._node_id, name, getattr(self.own, method), *args)
        return self.answers([call], time.monotonic() + timeout_s)[0]

    def lost(self, node: str) -> None:
        """An actor is dead for good, its node perhaps too."""
        self.counters["actors_lost"] += 1
        if node != self._node_id:
            self.own.not_reached.remote(node)
        elif self._connecting.acquire(blocking=False):
            threading.Thread(target=self._connect_again, name="mneme-reconnect", daemon=True).start()

    def _connect_again(self) -> None:
        try:
            self.own = self._connect()
            self._on_new()
        except Exception:  # the thread's edge; the next call that fails begins another
            logger.exception("the actor of this node could not be made again")
        finally:
            self._connecting.release()

    def _answer(self, call: Call, deadline_s: float) -> Any:
        breaker = self._breaker(call.node)
        try:
            answer = ray.get(call.answer, timeout=max(0.0, deadline_s - time.monotonic()))
        except GetTimeoutError:
            self.counters[f"{call.name}_timeout"] += 1
            with self._lock:
                self._late.append(call)
                self._judge_later()
            return None
        except RayError as error:
            breaker.failed()
            self.counters[f"{call.name}_failed"] += 1
            if isinstance(error, ActorDiedError):
                self.lost(call.node)
            return None
        breaker.succeeded()
        return answer

    def _judge_later(self) -> None:
        """Under the lock. Whether or not anybody calls again: answers keep the objects that they name."""
        if self._timer is None:
            self._timer = threading.Timer(_LATE_S, self._judge_late)
            self._timer.daemon = True
            self._timer.start()

    def _judge_late(self) -> None:
        """Learn whether calls that missed their deadlines were answered after all."""
        oldest_s = time.monotonic() - _LATE_S
        with self._lock:
            due = list(takewhile(lambda call: call.since_s <= oldest_s, self._late))
            for _ in due:
                self._late.popleft()
            self._timer = None
            if self._late:
                self._judge_later()
        for call in due if ray.is_initialized() else ():
            breaker = self._breaker(call.node)
            if ray.wait([call.answer], timeout=0)[0]:
                breaker.succeeded()
            else:
                breaker.failed()

    def _breaker(self, node: str) -> Breaker:
        return self._breakers.setdefault(node, Breaker())


class PeerActors:
    """Actors of the other nodes of an application, for one event loop; nobody waits longer for them than it says."""

    def __init__(self, node_id: str, namespace: str) -> None:
        self._own, self._namespace = node_id, namespace
        self._actors: dict[str, Any] = {}
        self._dead: set[str] = set()  # nodes of these actors that are so for good
        self._listed_s: dict[str, float] = {}  # when each of them was
        self.counters: Counter[str] = Counter()
        self._next_look_s = float("-inf")
        self._looking: asyncio.Task[None] | None = None

    async def of(self, nodes: Collection[str], timeout_s: float) -> dict[str, Any]:
        """By node; None where there is none, or not yet: it is there for who asks later."""
        if any(self._actor(node) is None for node in nodes):
            await asyncio.wait({self._look()}, timeout=timeout_s)
        return {node: self._actor(node) for node in nodes}

    async def in_order(self, name: bytes) -> list[Any]:
        """All in a session's order; it changes with a node for that node's share of sessions only."""
        is_first = self._next_look_s == float("-inf")
        looking = self._look() if time.monotonic() >= self._next_look_s else self._looking
        if looking is not None and is_first:
            await asyncio.wait({looking}, timeout=_FIRST_LOOK_S)
        return [self._actors[node] for node in rendezvous(name, self._actors)]

    def drop(self, node: str) -> None:
        """Forget a dead actor: the next who asks finds another."""
        self._dead.add(node)

    def look_again(self, *, is_new: bool = False) -> None:
        """Refresh the list of nodes; with `is_new`, the next caller waits for the result."""
        self._next_look_s = float("-inf") if is_new else min(self._next_look_s, time.monotonic())

    async def ask(self, peer: Any, method: str, *args: Any, timeout_s: float) -> Any:
        """None if it does not answer."""
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

    def _actor(self, node: str) -> Any:
        return None if node in self._dead else self._actors.get(node)

    def _look(self) -> asyncio.Task[None]:
        self._looking = self._looking or asyncio.ensure_future(self._list())
        return self._looking

    async def _list(self) -> None:
        try:
            actors = await asyncio.to_thread(self._live)
            self._dead = {node for node in self._dead if actors.get(node) is self._actors.get(node)}
            self._actors = actors
        except Exception:  # whatever Ray raises for this: the nodes of before stay
            logger.exception("the list of nodes is not to be had")
        finally:
            self._next_look_s, self._looking = time.monotonic() + _MEMBERS_S, None

    def _live(self) -> dict[str, Any]:
        """Blocks: Ray's calls for this have no timeout."""
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        now_s, actors = time.monotonic(), {}
        for name in named_actors(self._namespace):
            node = name.removeprefix(NODE_PREFIX)
            if node in alive and node != self._own:
                actor = self._actor(node) or find_actor(name, self._namespace)
                if actor is not None:
                    actors[node], self._listed_s[node] = actor, now_s
        gone = {node: actor for node, actor in self._actors.items() if node in alive and node not in actors}
        return actors | {node: actor for node, actor in gone.items() if now_s - self._listed_s[node] < _BACK_S}


def rendezvous(name: bytes, nodes: Iterable[str]) -> list[str]:
    """Nodes in the order of a session: highest random weight (Thaler and Ravishankar 1998)."""
    return sorted(nodes, key=lambda node: blake2b(node.encode(), digest_size=8, key=name).digest())
