"""What the parts of a node's cache share: its tiers over one index, and the requests that wait."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from itertools import islice

from mneme.cachetier.chunk.header import ChunkHeader
from mneme.cachetier.chunk.keys import Lineage
from mneme.cachetier.config import CacheConfig
from mneme.cachetier.node.disk import DiskTier
from mneme.cachetier.node.index import BLOCK_BYTES, Change, NodeIndex
from mneme.cachetier.node.memory import ChunkMemory, Held, HostTier, chunk_bytes
from mneme.cachetier.node.search import Located
from mneme.cachetier.policy.eviction import make_policy
from mneme.primitives import Bounded

_MAX_REQUESTS = 1024
_MAX_AGE_S = 600.0
_LATE_S = 30.0  # by which a request may come after it was forgotten


class NodeTiers:
    """The host tier over the disk tier. The index's lock is over all that is known of both, and never held in I/O."""

    def __init__(
        self,
        config: CacheConfig,
        memory: ChunkMemory,
        host_bytes: int,
        disk: DiskTier | None,
        clock: Callable[[], float],
        on_change: Callable[[Change], None] | None,
        free_share: float,
    ) -> None:
        self.clock, self.memory, self.disk = clock, memory, disk
        self.index = NodeIndex(clock) if disk is None else disk.index
        self.lock = self.index.lock
        self.waiting = WaitingRequests(clock)
        self.index.on_change = on_change
        policy = make_policy(config.eviction, clock, host_bytes // BLOCK_BYTES)
        # The window of what is kept: (C_mem + C_disk) / S_kv (AttentionStore 3.3.2).
        num_blocks = host_bytes // BLOCK_BYTES + (0 if disk is None else disk.max_blocks)
        policy.set_queue(self.waiting.host_queue, num_blocks)
        self.host = HostTier(self.index, policy, host_bytes, free_share=free_share, tenant_bytes=config.tenant_bytes)
        if disk is not None:
            disk.policy.set_queue(self.waiting.disk_queue, num_blocks)

    def arrive(self, header: ChunkHeader, held: Held, lineage: Lineage | None = None) -> list[bytes]:
        """Under the lock: put a chunk into the room that was made for it, and free the free share again.

        Returns the keys of chunks that it supersedes, which are gone from memory.
        """
        self.host.arrive(header, held)
        superseded = self.host.supersede(header, lineage) if header.key in self.host else []
        self.index.inherit_pin(superseded, header.key)
        self.host.keep_share_free(self.waiting.exempt())
        return superseded

    def drop_gone(self) -> None:
        """Outside of the lock: drop the bytes of what is gone."""
        with self.lock:
            gone = self.host.claim_gone()
        for held in gone:
            self.memory.drop(held)


class _Request:
    """`*_leaves`: the chunks at which a tier's part of the chain ends; eviction begins there."""

    __slots__ = ("brought", "disk_leaves", "host_leaves", "num_bytes", "since_s", "wanted")

    def __init__(self, chain: Sequence[Located], since_s: float) -> None:
        self.since_s = since_s
        self.num_bytes = sum(chunk_bytes(each.header) for each in chain)
        pairs = zip(chain, [*chain[1:], None], strict=True)
        ends = [each for each, following in pairs if following is None or following.tier != each.tier]
        self.host_leaves = tuple(each.header.key for each in ends if each.tier == "host")
        self.disk_leaves = tuple(each.header.key for each in ends if each.tier == "disk" or each is chain[-1])
        self.wanted = deque(each.header.key for each in chain if each.tier == "disk")
        self.brought: bytes | None = None  # the last that came up from the disk


class WaitingRequests:
    """Remembers requests that wait, in the order of arrival, and the chunks that they will use (AttentionStore 3.3).

    What they want is prefetched and kept from eviction. A request whose client died does not tell: requests are bounded
    in number and age. The lock is its own and nothing else is called under it: policies ask under the index's.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._requests: dict[str, _Request] = {}  # in the order of arrival
        self._forgotten = Bounded[str, float](_MAX_REQUESTS)  # since when: those that did not wait, or not yet
        self._host_queue: tuple[bytes, ...] = ()
        self._disk_queue: tuple[bytes, ...] = ()
        self._exempt: frozenset[bytes] = frozenset()

    def __len__(self) -> int:
        return len(self._requests)

    def host_queue(self) -> tuple[bytes, ...]:
        """Return where the host's parts of the chains end, first come, first served; for a policy."""
        return self._host_queue

    def disk_queue(self) -> tuple[bytes, ...]:
        return self._disk_queue

    def exempt(self) -> frozenset[bytes]:
        """All of `host_queue`."""
        return self._exempt

    def put(self, request_id: str, chain: Sequence[Located]) -> None:
        """A request waits for these, unless it was forgotten meanwhile; if it did before, it keeps its place."""
        now_s = self._clock()
        with self._lock:
            if now_s - self._forgotten.pop(request_id, float("-inf")) <= _LATE_S:
                return
            earlier = self._requests.get(request_id)
            self._requests[request_id] = _Request(chain, now_s if earlier is None else earlier.since_s)
            self._drop_old(now_s)
            self._renew()

    def forget(self, request_ids: Collection[str]) -> None:
        now_s = self._clock()
        with self._lock:
            found = [each for each in request_ids if self._requests.pop(each, None) is not None]
            self._forgotten.update(dict.fromkeys(set(request_ids).difference(found), now_s))
            if found:
                self._renew()

    def next_wanted(self, capacity_bytes: int) -> tuple[str, bytes] | None:
        """The next chunk to bring up, and who wants it: `brought` or `give_up` follows, or it is the next again.

        Of the requests within the window: as many as fit the host tier, L_pw = C_mem / S_kv (AttentionStore 3.3.1).
        """
        with self._lock:
            if self._drop_old(self._clock()):
                self._renew()
            num_bytes = sum(request.num_bytes for request in self._requests.values())
            window = capacity_bytes * len(self._requests) // max(1, num_bytes)
            for request_id, request in islice(self._requests.items(), window):
                if request.wanted:
                    return request_id, request.wanted[0]
        return None

    def brought(self, request_id: str, key: bytes) -> None:
        """Note that it is in the host tier now."""
        with self._lock:
            request = self._requests.get(request_id)
            if request is not None:
                request.brought = key
                if request.wanted and request.wanted[0] == key:
                    request.wanted.popleft()
                self._renew()

    def give_up(self, request_id: str) -> None:
        """The chunk cannot be had, so what is behind it is of no use."""
        with self._lock:
            request = self._requests.get(request_id)
            if request is not None:
                request.wanted.clear()

    def _drop_old(self, now_s: float) -> bool:
        num_before = len(self._requests)
        while self._requests:
            request_id, first = next(iter(self._requests.items()))
            if len(self._requests) <= _MAX_REQUESTS and now_s - first.since_s <= _MAX_AGE_S:
                break
            del self._requests[request_id]
        return len(self._requests) < num_before

    def _renew(self) -> None:
        host: dict[bytes, None] = {}
        disk: dict[bytes, None] = {}
        for request in self._requests.values():
            host.update(dict.fromkeys(request.host_leaves))
            if request.brought is not None:
                host[request.brought] = None
            disk.update(dict.fromkeys(request.disk_leaves))
        self._host_queue, self._disk_queue, self._exempt = tuple(host), tuple(disk), frozenset(host)
