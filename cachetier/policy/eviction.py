"""Which cached pages go first: candidates in, victims out.

A candidate is a run of pages in one tier that are free to go together, last pages first: nobody holds them and nothing
else needs them. A policy ranks candidates and knows nothing of what is in them, so that the same policy serves pages of
the device and chunks of a host tier. The owner of the pages keeps its candidates true: it offers a run when it becomes
idle or its size changes, withdraws it when it is used, and asks for a victim when it needs room.

Costs do not depend on the number of candidates, but for the logarithm of a heap.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable
from typing import NamedTuple

Queue = Callable[[], Iterable[Hashable | None]]  # keys that waiting requests will use, in their order; None: no key


class Candidate(NamedTuple):
    """One run. A new offer of the same key replaces the old."""

    key: Hashable
    num_pages: int  # that its eviction would free
    last_used_s: float
    num_uses: int  # how often its last page was used
    has_returned: bool = False  # whether two thirds of it were used before that, as far as is known


class Victim(NamedTuple):
    """What is to go: so many pages from the tail of one that is no candidate any more. What stays is offered anew."""

    candidate: Candidate
    num_pages: int


class EvictionPolicy(ABC):
    """Keeps the candidates; subclasses rank them."""

    def __init__(self) -> None:
        self.candidates: dict[Hashable, Candidate] = {}
        self._queue: Queue = tuple

    def set_queue(self, queue: Queue) -> None:
        """Where a policy that looks ahead reads what will be used next."""
        self._queue = queue

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
        """Whether a full tier should take it, pages that another tier gives up; before anything is copied."""
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
