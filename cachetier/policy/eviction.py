"""Which cached pages go first: candidates in, victims out.

A candidate is a run of pages in one tier that are free to go together, last pages first: nobody holds them and nothing
else needs them. A policy ranks candidates and knows nothing of what is in them, so that the same policy serves pages of
the device and chunks of a host tier. The owner of the pages keeps its candidates true: it offers a run when it becomes
idle or its size changes, withdraws it when it is used, and asks for a victim when it needs room.

Costs do not depend on the number of candidates, but for the logarithm of a heap. A new policy is a class here and
a line in `make_policy`.
"""

from __future__ import annotations

import itertools
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterable
from typing import NamedTuple, get_args

from mneme.cachetier.names import EvictionPolicyName
from mneme.errors import ConfigError, shown
from mneme.primitives import LazyHeap

Queue = Callable[[], Iterable[Hashable | None]]  # keys that waiting requests will use, in their order; None: no key

_MAX_WINDOW = 256  # requests that `lookahead` looks at for a choice, however long the queue is

# In seconds, as people's pauses are, which have a median of two minutes. Tuned on the first half, by time, of the
# conversation trace, and judged on the second: `mneme simulate cache --trace FILE`. USED_ONCE_S < LONG_S: the order by
# last use is kept.
USED_ONCE_S = 300.0
LONG_S = 600.0

_AGES = 14  # of which each is twice as long: the last begins at 4,096 s
_LEARN_AFTER, _KEPT = 500, 0.9  # ends of runs, and how much what was learned before counts then
_NEWER = 1.5  # times
_OLDEST_SHARE = 0.5  # of choices where nobody came back: what is never used goes, and a cycle is seen nevertheless


class Candidate(NamedTuple):
    """One run. A new offer of the same key replaces the old."""

    key: Hashable
    num_pages: int  # that its eviction would free
    last_used_s: float
    has_returned: bool = False  # whether two thirds of it were used before that, as far as is known


class Victim(NamedTuple):
    """Says what is to go: pages from the tail of one that is no candidate any more. What stays is offered anew."""

    candidate: Candidate
    num_pages: int


class EvictionPolicy(ABC):
    """Keeps the candidates; subclasses rank them."""

    def __init__(self) -> None:
        self.candidates: dict[Hashable, Candidate] = {}
        self._queue: Queue = tuple
        self._capacity = 0  # pages

    def set_queue(self, queue: Queue, capacity: int | None = None) -> None:
        """Say where a policy that looks ahead reads what will be used next, and how many pages there are for it."""
        self._queue, self._capacity = queue, capacity or self._capacity

    def offer(self, candidate: Candidate) -> None:
        self.withdraw(candidate.key)
        self.candidates[candidate.key] = candidate
        self._rank(candidate)

    def withdraw(self, key: Hashable) -> None:
        """The run is in use or gone; unknown keys are ignored."""
        candidate = self.candidates.pop(key, None)
        if candidate is not None:
            self._unrank(candidate)

    def admits(self, candidate: Candidate) -> bool:
        """Return whether a full tier should take it, pages that another tier gives up; before anything is copied."""
        return True

    def choose(self) -> Victim | None:
        """The next victim; None if there are no candidates."""
        if not self.candidates:
            return None
        key, num_pages = self._choose()
        candidate = self.candidates[key]
        self.withdraw(key)
        return Victim(candidate, num_pages)

    @abstractmethod
    def _rank(self, candidate: Candidate) -> None: ...

    @abstractmethod
    def _unrank(self, candidate: Candidate) -> None: ...

    @abstractmethod
    def _choose(self) -> tuple[Hashable, int]:
        """A victim's key and how many pages; there is at least one candidate."""


class LruPolicy(EvictionPolicy):
    """Evicts whole runs by the time of their last use alone: pages of one run were last used together."""

    def __init__(self) -> None:
        super().__init__()
        self._heap = LazyHeap[Hashable]()

    def _rank(self, candidate: Candidate) -> None:
        self._heap.push(candidate.key, candidate.last_used_s)

    def _unrank(self, candidate: Candidate) -> None:
        self._heap.discard(candidate.key)

    def _choose(self) -> tuple[Hashable, int]:
        _, key = self._heap.first()
        return key, self.candidates[key].num_pages


class PensievePolicy(EvictionPolicy):
    """Evicts by size times idle time, a trailing half at a time (Pensieve 4.3).

    Size is what the eviction would free. A run that was used just now scores 0, and goes only when all others do too.
    Runs of one size are in order of their last use, so the highest score is that of the oldest of some size: a choice
    looks at one run per size that occurs, and n pages have at most sqrt(2 n) sizes.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__()
        self._clock = clock
        self._heap_by_size: dict[int, LazyHeap[Hashable]] = {}

    def _rank(self, candidate: Candidate) -> None:
        heap = self._heap_by_size.setdefault(candidate.num_pages, LazyHeap[Hashable]())
        heap.push(candidate.key, candidate.last_used_s)

    def _unrank(self, candidate: Candidate) -> None:
        heap = self._heap_by_size[candidate.num_pages]
        heap.discard(candidate.key)
        if not heap:
            del self._heap_by_size[candidate.num_pages]

    def _choose(self) -> tuple[Hashable, int]:
        now_s = self._clock()
        oldest = [(size, *heap.first()) for size, heap in self._heap_by_size.items()]
        # Of equal scores the one that was idle for longer.
        size, _, key = max(oldest, key=lambda entry: (entry[0] * (now_s - entry[1]), -entry[1]))
        return key, -(-size // 2)


class LookaheadPolicy(LruPolicy):
    """Keeps what the queue will use (AttentionStore 3.3.2). `capacity` is the tier's, in pages, until `set_queue`.

    The look-ahead window is the head of the queue: as many requests as sessions fit, (capacity / mean size of
    a run) of them. A run that one of them will use is exempt; the others go by their last use. If all runs are exempt,
    the one whose first consumer is nearest to the window's tail goes. A run goes as a whole or not at all: a session
    uses all of its KV or none.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self._capacity = capacity
        self._num_pages = 0  # of all candidates

    def _rank(self, candidate: Candidate) -> None:
        self._num_pages += candidate.num_pages
        self._heap.push(candidate.key, candidate.last_used_s)

    def _unrank(self, candidate: Candidate) -> None:
        self._num_pages -= candidate.num_pages
        self._heap.discard(candidate.key)

    def _choose(self) -> tuple[Hashable, int]:
        exempt = self._first_consumers()
        key = self._oldest_but(exempt)
        if key is None:
            key = max(exempt, key=exempt.__getitem__)
        return key, self.candidates[key].num_pages

    def _first_consumers(self) -> dict[Hashable, int]:
        """The candidates in the window, with the place in the queue of the first request that will use each."""
        window = min(max(1, self._capacity * len(self.candidates) // self._num_pages), _MAX_WINDOW)
        places: dict[Hashable, int] = {}
        for place, key in enumerate(itertools.islice(self._queue(), window)):
            if key in self.candidates:
                places.setdefault(key, place)
        return places

    def _oldest_but(self, exempt: Collection[Hashable]) -> Hashable | None:
        return self._heap.first_but(exempt)


class ReturningPolicy(LookaheadPolicy):
    """Evicts by the last use, where a run that was used once counts as older: who came back comes back again.

    Most runs are used once (2Q and LRU-2: Johnson & Shasha 1994, O'Neil et al. 1993). One that was counts as older by
    `USED_ONCE_S` when it is new and by less the older it is: it goes before all that returned about as recently, so a
    flood of new sessions does not flush a tier, and what returned is not kept for ever either. A run that nobody came
    back to for `LONG_S` is as old as it is: a tier that keeps everything for so long is LRU. Both kinds stand in the
    order of their last use, and a choice compares two. What the queue will use stays, as in `lookahead`.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._returned = LazyHeap[Hashable]()  # the other heap has what was used once
        self._newest_s = -math.inf

    def admits(self, candidate: Candidate) -> bool:
        """Return whether it would not be the next victim itself."""
        key = self._oldest_but(())
        return key is None or self._counted_age_s(candidate) < self._counted_age_s(self.candidates[key])

    def _rank(self, candidate: Candidate) -> None:
        self._newest_s = max(self._newest_s, candidate.last_used_s)
        self._num_pages += candidate.num_pages
        heap = self._returned if candidate.has_returned else self._heap
        heap.push(candidate.key, candidate.last_used_s)

    def _unrank(self, candidate: Candidate) -> None:
        super()._unrank(candidate)
        self._returned.discard(candidate.key)

    def _oldest_but(self, exempt: Collection[Hashable]) -> Hashable | None:
        keys = [key for heap in (self._heap, self._returned) if (key := heap.first_but(exempt)) is not None]
        return max(keys, key=lambda key: self._counted_age_s(self.candidates[key]), default=None)

    def _counted_age_s(self, candidate: Candidate) -> float:
        age_s = self._newest_s - candidate.last_used_s
        return age_s if candidate.has_returned else age_s + USED_ONCE_S * max(0.0, 1 - age_s / LONG_S)


class DensityPolicy(LookaheadPolicy):
    """Evicts what is worth least: chance of return times seconds to compute it, over bytes and time that it stays.

    That is the least hit density (LHD: Beckmann, Chen & Cidon, NSDI 2018), over a run's pages. Pages have one size, and
    their times differ by their place in the context alone, by less than the chances do: they cancel. The chance by age
    and class (used once, returned) is learned from runs that came back and runs that went: of a page that is t seconds
    idle it is those of t and more that came back, over the time that they stayed. Where all come back, and room is for
    fewer, the newest is worth least (LRU finds nothing there), else the oldest, so a choice compares these two. The
    newest goes only where it is worth less by half: the chances are counts. Where nobody came back to either, they go
    in turns: some stay long enough to be seen to come back, and what fills the tier and is never used goes. Half a run
    goes at a time, its end, as in `pensieve`. What the queue will use stays, as in `lookahead`.
    """

    def __init__(self, clock: Callable[[], float], capacity: int) -> None:
        super().__init__(capacity)
        self._clock, self._newest = clock, LazyHeap[Hashable]()
        self._returned, self._gone = ([[0.0] * _AGES for _ in range(2)] for _ in range(2))  # pages by class and age
        self._density = [[0.5**age for age in range(_AGES)] for _ in range(2)]  # LRU until it has learned
        self._num_ends = 0  # of runs, since it has
        self._random = random.Random(0)

    def withdraw(self, key: Hashable) -> None:
        """Learn that a run came back."""
        if (candidate := self.candidates.get(key)) is not None:
            self._learn(self._returned, candidate, candidate.num_pages)
        super().withdraw(key)

    def _rank(self, candidate: Candidate) -> None:
        super()._rank(candidate)
        self._newest.push(candidate.key, -candidate.last_used_s)

    def _unrank(self, candidate: Candidate) -> None:
        super()._unrank(candidate)
        self._newest.discard(candidate.key)

    def offer(self, candidate: Candidate) -> None:
        """Take a run; one that is here already, of another size now, has not come back."""
        EvictionPolicy.withdraw(self, candidate.key)
        super().offer(candidate)

    def choose(self) -> Victim | None:
        if not self.candidates:
            return None
        key, num_pages = self._choose()
        candidate = self.candidates[key]
        EvictionPolicy.withdraw(self, key)
        self._learn(self._gone, candidate, num_pages)
        return Victim(candidate, num_pages)

    def _choose(self) -> tuple[Hashable, int]:
        exempt = self._first_consumers()
        oldest, newest = self._heap.first_but(exempt), self._newest.first_but(exempt)
        if oldest is None or newest is None:
            key = max(exempt, key=exempt.__getitem__)
        else:
            new, old = self._density_of(newest), self._density_of(oldest)
            is_new = _NEWER * new < old if new or old else self._random.random() >= _OLDEST_SHARE
            key = newest if is_new else oldest
        return key, -(-self.candidates[key].num_pages // 2)

    def _age(self, candidate: Candidate) -> int:
        """Return which class of ages it is in: 0 to 1 s, then each twice as long."""
        return min(int(max(self._clock() - candidate.last_used_s, 0.0)).bit_length(), _AGES - 1)

    def _density_of(self, key: Hashable) -> float:
        candidate = self.candidates[key]
        return self._density[candidate.has_returned][self._age(candidate)]

    def _learn(self, book: list[list[float]], candidate: Candidate, num_pages: int) -> None:
        book[candidate.has_returned][self._age(candidate)] += num_pages
        self._num_ends += 1
        if self._num_ends % _LEARN_AFTER:
            return
        for kind in range(2):
            returned = stayed = later = 0.0
            for age in reversed(range(_AGES)):
                ended, seconds = self._returned[kind][age] + self._gone[kind][age], 2.0**age / (1 if age == 0 else 2)
                returned += self._returned[kind][age]
                stayed += (later + ended / 2) * seconds
                later += ended
                self._density[kind][age] = returned / stayed if stayed else 0.0
            for each in (self._returned[kind], self._gone[kind]):
                each[:] = [_KEPT * pages for pages in each]


def make_policy(name: EvictionPolicyName, clock: Callable[[], float], capacity: int) -> EvictionPolicy:
    """A policy for a tier of `capacity` pages; `clock` gives the seconds that `last_used_s` is in.

    Raises `ConfigError` for another name.
    """
    if name == "pensieve":
        return PensievePolicy(clock)
    if name == "density":
        return DensityPolicy(clock, capacity)
    if name == "lookahead":
        return LookaheadPolicy(capacity)
    if name == "returning":
        return ReturningPolicy(capacity)
    if name == "lru":
        return LruPolicy()
    raise ConfigError(f"eviction: must be one of {', '.join(get_args(EvictionPolicyName))} (got {shown(name)})")
