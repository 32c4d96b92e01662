"""The directory's shards as Ray actors, and how a node reaches them.

A shard is a detached actor under a name of its own, restarted wherever there is room when it dies. It comes back empty,
asks each node for everything, and is whole again a moment later. Nothing waits for it longer than it says.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError

from mneme.cachetier.distributed.announcer import SEND_TIMEOUT_S
from mneme.cachetier.distributed.directory import Announcement, Directory, Place, Reply, shard_of
from mneme.cachetier.distributed.nodes import Breaker


class DirectoryActor:
    """One shard; its calls take milliseconds and come one after the other."""

    def __init__(self) -> None:
        self._directory = Directory()

    def announce(self, said: Announcement) -> Reply:
        return self._directory.announce(said)

    def lookup(self, keys: Sequence[bytes]) -> list[tuple[Place, ...]]:
        return self._directory.lookup(keys)

    def not_reached(self, node: str) -> None:
        self._directory.not_reached(node)

    def stats(self) -> dict[str, Any]:
        return self._directory.stats()


def directory_shard(namespace: str, number: int) -> Any:
    """The shard's actor, made if there is none."""
    options = {"name": f"directory-{number}", "namespace": namespace, "lifetime": "detached", "get_if_exists": True}
    return ray.remote(DirectoryActor).options(num_cpus=0, max_restarts=-1, **options).remote()


class DirectoryShards:
    """All shards, as one node sees them."""

    def __init__(self, namespace: str, num_shards: int) -> None:
        """Blocks until Ray knows the actors, not until they are up."""
        self._namespace = namespace
        self._shards = [directory_shard(namespace, number) for number in range(num_shards)]
        self._breaker = Breaker()
        self.counters: Counter[str] = Counter()

    def send(self, number: int, said: Announcement) -> Reply | None:
        """See `announcer.Send`; not from an event loop."""
        try:
            reply: Reply = ray.get(self._shards[number].announce.remote(said), timeout=SEND_TIMEOUT_S)
        except ActorDiedError:  # for good: somebody ended it
            self._shards[number] = directory_shard(self._namespace, number)
            self.counters["shard_lost"] += 1
            return None
        except RayError:
            return None
        return reply

    async def lookup(self, keys: Sequence[bytes], timeout_s: float) -> list[tuple[Place, ...]]:
        """Places of each key; nothing of a shard that does not answer in time."""
        if not keys:
            return []
        if not self._breaker.allows():
            self.counters["lookup_not_asked"] += 1
            return [()] * len(keys)
        by_shard: dict[int, list[int]] = {}
        for index, key in enumerate(keys):
            by_shard.setdefault(shard_of(key, len(self._shards)), []).append(index)
        asked = [self._shards[shard].lookup.remote([keys[i] for i in indices]) for shard, indices in by_shard.items()]
        answers = await asyncio.gather(*(_answer(ref, timeout_s) for ref in asked))
        places: list[tuple[Place, ...]] = [()] * len(keys)
        for indices, answer in zip(by_shard.values(), answers, strict=True):
            for index, each in zip(indices, answer or (), strict=answer is not None):
                places[index] = each
        if None in answers:
            self.counters["lookup_unanswered"] += answers.count(None)
            self._breaker.failed()
        else:
            self._breaker.succeeded()
        return places

    def not_reached(self, node: str) -> None:
        """Nobody waits for it to arrive."""
        for shard in self._shards:
            shard.not_reached.remote(node)


async def _answer(ref: Any, timeout_s: float) -> list[tuple[Place, ...]] | None:
    try:
        return await asyncio.wait_for(asyncio.wrap_future(ref.future()), timeout_s)
    except (TimeoutError, RayError):
        return None
