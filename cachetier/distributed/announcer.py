"""A node's side of the directory: what came and went is told to it, in batches and in order.

A directory that missed something, or that is new, says so and is told everything. An announcement whose answer does not
come is not repeated: its number is used up, so the directory sees a gap at the next one, at the latest at a sign of
life. While it is silent it is sent signs of life alone: an account of all that a node holds takes a second.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from mneme.cachetier.distributed.directory import SEND_TIMEOUT_S, Announcement, Clock, Reply
from mneme.cachetier.node.index import Change
from mneme.primitives import Worker

SIGN_OF_LIFE_S = 1.0  # see `directory.SILENT_S`
BATCH_CHANGES = 1000  # of one announcement: the directory takes some 3 ms for it
MAX_PENDING = 100_000  # changes; more, and it is told everything instead
_SEND_DELAY_S = 0.05  # that changes may wait for others to go with them
_RETRY_S = 0.5  # after an announcement that was not answered

Send = Callable[[Announcement], Reply | None]  # in bounded time; None: there was no answer


class Announcer:
    """Tells the directory; `changed` may be called from any thread, `step` from one, its own once that is started."""

    def __init__(
        self,
        node: str,
        snapshot: Callable[[], Iterable[Change]],
        send: Send,
        *,
        epoch: int,
        clock: Clock = time.monotonic,
    ) -> None:
        """`snapshot` says what the node holds. What it leaves out or has too much, `changed` says afterwards.

        `epoch`: above that of all who announced for this node before. The wall clock will do: the directory says if it
        is not.
        """
        self.snapshot, self.send = snapshot, send
        self.counters: Counter[str] = Counter()
        self._node, self._epoch, self._clock = node, epoch, clock
        self._seq = 0
        self._wants_all = True
        self._sent_s = float("-inf")
        self._retry_at_s: float | None = None  # while it does not answer
        self._lock = threading.Lock()  # of what is pending
        self.pending: deque[Change] = deque()
        self._is_stopped = False
        self._thread = Worker("announcer", self.step, self._count_error, wake_delay_s=_SEND_DELAY_S)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._is_stopped = True
        self._thread.close(SEND_TIMEOUT_S)

    def changed(self, *changes: Change) -> None:
        """Queue changes; they are announced in this order. Takes no lock that is held for long."""
        with self._lock:
            self.pending.extend(changes)
        self._thread.wake()

    def step(self) -> float:
        """Tell what is due; for how many seconds nothing is, but for changes."""
        if len(self.pending) > MAX_PENDING:
            self._wants_all = True
            self._clear_pending()
        if self._retry_at_s is not None:
            if self._clock() < self._retry_at_s:
                return self._retry_at_s - self._clock()
            self._send(())
        if self._retry_at_s is None:
            self._send_changes()
        if self._retry_at_s is None and self._wants_all:
            self._send_all()
        due_s = self._sent_s + (_SEND_DELAY_S if self._wants_all else SIGN_OF_LIFE_S)
        return max(0.0, (self._retry_at_s or due_s) - self._clock())

    def _send_changes(self) -> None:
        """Or, where there are none, that the node lives."""
        while not self._wants_all and not self._is_stopped:
            with self._lock:
                changes = [self.pending.popleft() for _ in range(min(BATCH_CHANGES, len(self.pending)))]
            is_silent = self._clock() - self._sent_s >= SIGN_OF_LIFE_S
            if not (changes or is_silent) or not self._send(changes):
                return

    def _send_all(self) -> None:
        self._clear_pending()
        held = list(self.snapshot())
        self.counters["told_all"] += 1
        if all(self._send(*part) for part in _parts(held)):
            self._wants_all = False

    def _clear_pending(self) -> None:
        """The snapshot that is taken after this has them."""
        with self._lock:
            self.pending.clear()

    def _send(self, changes: Sequence[Change], is_first: bool = False, is_last: bool = False) -> bool:
        """Tell the directory what changed; returns whether to go on."""
        said = Announcement(
            node=self._node, epoch=self._epoch, seq=self._seq, changes=changes, is_first=is_first, is_last=is_last
        )
        self._seq += 1
        reply = self.send(said)
        self._sent_s = self._clock()
        self._retry_at_s = self._sent_s + _RETRY_S if reply is None else None
        if reply is None:
            self.counters["announce_unanswered"] += 1
            return False
        if reply.epoch > self._epoch:  # another of this node's name announced, or the clock was set back
            self._epoch, self._seq, self._wants_all = reply.epoch + 1, 0, True
            return False
        self._wants_all = self._wants_all or reply.wants_all
        return not reply.wants_all

    def _count_error(self) -> None:
        self.counters["announce_error"] += 1


def _parts(changes: Sequence[Change]) -> Iterator[tuple[Sequence[Change], bool, bool]]:
    """Cut a whole account into announcements: changes, whether they are the first, whether the last."""
    starts = range(0, max(len(changes), 1), BATCH_CHANGES)
    for start, following in itertools.zip_longest(starts, starts[1:]):
        yield changes[start : start + BATCH_CHANGES], start == 0, following is None
