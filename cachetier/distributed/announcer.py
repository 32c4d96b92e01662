"""A node's side of the directory: what came and went is told to each shard, in batches and in order.

A shard that missed something, or that is new, says so and is told everything. An announcement whose answer does not
come is not repeated: its number is used up, so the shard sees a gap at the next one, at the latest at a sign of life.
A shard that is silent is sent signs of life alone until it answers: an account of all that a node holds takes a second.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from mneme.cachetier.distributed.directory import Announcement, Clock, Reply, shard_of
from mneme.cachetier.node.index import Change
from mneme.primitives import Worker

SIGN_OF_LIFE_S = 1.0  # see `directory.SILENT_S`
SEND_TIMEOUT_S = 2.0  # of one announcement; with the time between signs of life less than `directory.SILENT_S`
BATCH_CHANGES = 1000  # of one announcement: a shard takes some 3 ms for it
_SETTLE_S = 0.05  # that changes may wait for others to go with them
_RETRY_S = 0.5  # after an announcement that was not answered
_MAX_PENDING = 100_000  # changes of a shard; more, and it is told everything instead

Send = Callable[[int, Announcement], Reply | None]  # to a shard, in bounded time; None: there was no answer


class _Shard:
    """What a shard is still to be told."""

    def __init__(self) -> None:
        self.seq = 0
        self.wants_all = True
        self.pending: deque[Change] = deque()
        self.sent_s = float("-inf")
        self.next_try_s: float | None = None  # of a shard that did not answer


class Announcer:
    """`changed` may be called from any thread; all else comes from one, the announcer's own once it is started."""

    def __init__(
        self,
        node: str,
        num_shards: int,
        snapshot: Callable[[], Iterable[Change]],
        send: Send,
        *,
        epoch: int,
        clock: Clock = time.monotonic,
    ) -> None:
        """`snapshot` says what the node holds. What it leaves out or has too much, `changed` says afterwards.

        `epoch`: above that of all who announced for this node before. The wall clock will do: shards say if it is not.
        """
        self._node, self._snapshot, self._send = node, snapshot, send
        self._epoch, self._clock = epoch, clock
        self._shards = [_Shard() for _ in range(num_shards)]
        self._lock = threading.Lock()
        self.counters: Counter[str] = Counter()
        self._is_stopped = False
        self._thread = Worker("announcer", self.step, self._count_error, settle_s=_SETTLE_S)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._is_stopped = True
        self._thread.close(SEND_TIMEOUT_S)

    def changed(self, changes: Sequence[Change]) -> None:
        """To be announced in this order."""
        with self._lock:
            for change in changes:
                self._shards[shard_of(change[0], len(self._shards))].pending.append(change)
        self._thread.wake()

    def step(self) -> float:
        """Send what is due, until a shard does not answer: then it is the turn of the others again.

        For how many seconds nothing is due, but for changes.
        """
        for shard in self._shards:
            if len(shard.pending) > _MAX_PENDING:
                shard.wants_all = True
                with self._lock:  # a snapshot will have them
                    shard.pending.clear()
        silent = self._silent()
        answering = [each for each in enumerate(self._shards) if each[1].next_try_s is None]
        if self._tell_due(answering) and silent is not None:
            number, shard = silent
            shard.next_try_s = None
            self._tell(number, shard, ())
            if shard.next_try_s is None:
                self._tell_due([silent])
        return max(0.0, min(map(self._due_s, self._shards)) - self._clock())

    def _due_s(self, shard: _Shard) -> float:
        if shard.next_try_s is not None:
            return shard.next_try_s
        return shard.sent_s + (_SETTLE_S if shard.wants_all else SIGN_OF_LIFE_S)

    def _silent(self) -> tuple[int, _Shard] | None:
        """Of the shards that did not answer, the one whose turn it is to be tried again."""
        tries = [(each.next_try_s, number) for number, each in enumerate(self._shards) if each.next_try_s is not None]
        next_try_s, number = min(tries, default=(math.inf, 0))
        return (number, self._shards[number]) if next_try_s <= self._clock() else None

    def _tell_due(self, shards: Sequence[tuple[int, _Shard]]) -> bool:
        """Whether all answered. Changes come first, as signs of life."""
        for number, shard in shards:
            self._tell_changes(number, shard)
            if shard.next_try_s is not None:
                return False
        return self._tell_all([each for each in shards if each[1].wants_all])

    def _tell_all(self, shards: Sequence[tuple[int, _Shard]]) -> bool:
        if not shards:
            return True
        with self._lock:  # the snapshot, taken after this, has them
            for _, shard in shards:
                shard.pending.clear()
        changes_by_shard: list[list[Change]] = [[] for _ in self._shards]
        for change in self._snapshot():
            changes_by_shard[shard_of(change[0], len(self._shards))].append(change)
        for number, shard in shards:
            shard.wants_all = False
            self.counters["told_all"] += 1
            for part in _parts(changes_by_shard[number]):
                if not self._tell(number, shard, *part):
                    shard.wants_all = True
                    break
            if shard.next_try_s is not None:
                return False
        return True

    def _tell_changes(self, number: int, shard: _Shard) -> None:
        while not shard.wants_all and not self._is_stopped:
            with self._lock:
                changes = [shard.pending.popleft() for _ in range(min(BATCH_CHANGES, len(shard.pending)))]
            is_silent = self._clock() - shard.sent_s >= SIGN_OF_LIFE_S
            if not (changes or is_silent) or not self._tell(number, shard, changes):
                return

    def _tell(
        self, number: int, shard: _Shard, changes: Sequence[Change], is_first: bool = False, is_last: bool = False
    ) -> bool:
        """Whether to go on."""
        said = Announcement(
            node=self._node, epoch=self._epoch, seq=shard.seq, changes=changes, is_first=is_first, is_last=is_last
        )
        shard.seq += 1
        reply = self._send(number, said)
        shard.sent_s = self._clock()
        if reply is None:
            self.counters["announce_unanswered"] += 1
            shard.next_try_s = shard.sent_s + _RETRY_S
            return False
        if reply.epoch > self._epoch:
            self._begin(reply.epoch + 1)
            return False
        shard.wants_all = shard.wants_all or reply.wants_all
        return not reply.wants_all

    def _begin(self, epoch: int) -> None:
        """Another of this node's name announced under a higher epoch, or the clock was set back."""
        self._epoch = epoch
        for shard in self._shards:
            shard.seq, shard.wants_all = 0, True

    def _count_error(self) -> None:
        self.counters["announce_error"] += 1


def _parts(changes: Sequence[Change]) -> Iterator[tuple[Sequence[Change], bool, bool]]:
    """Of a whole account: what goes into one announcement, whether it is the first, whether the last."""
    starts = range(0, max(len(changes), 1), BATCH_CHANGES)
    for start, following in itertools.zip_longest(starts, starts[1:]):
        yield changes[start : start + BATCH_CHANGES], start == 0, following is None
