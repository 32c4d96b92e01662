"""Sequences that wait for KV which others compute for them: for documents, or for the first choice of their turn.

Each document that an engine lacks is a prompt of its own, which a *child* computes. The other choices of a turn are
*followers*: they go on from the path on which the first has its documents. Policy only: no tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from copy import copy

from mneme.replicas.sequence import Sequence


class Gathering:
    """Knows who waits for whom. Who waits here is not in the queue, and does not run."""

    def __init__(self, on_ready: Callable[[Sequence], None]) -> None:
        self.parent_by_child: dict[Sequence, Sequence] = {}  # of all children that have not ended
        self._on_ready = on_ready  # called with each that waits no longer
        self._num_missing: dict[Sequence, int] = {}  # children that are waited for, by who waits
        self._leader_by_follower: dict[Sequence, Sequence] = {}

    def __len__(self) -> int:
        return len(self._num_missing) + len(self._leader_by_follower)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._num_missing or sequence in self._leader_by_follower

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._num_missing
        yield from self._leader_by_follower

    def asker(self, sequence: Sequence) -> Sequence:
        """Return for whom a sequence is computed: its parent, or itself."""
        return self.parent_by_child.get(sequence, sequence)

    def wait(self, sequence: Sequence, *, num_missing: int, leader: Sequence | None = None) -> None:
        """Let a sequence wait for its leader, if it follows one, else for so many children."""
        if leader is None:
            self._num_missing[sequence] = num_missing
        else:
            self._leader_by_follower[sequence] = leader

    def remove(self, sequence: Sequence) -> None:
        """Forget one that has ended while it waited."""
        self._num_missing.pop(sequence, None)
        self._leader_by_follower.pop(sequence, None)

    def release_followers(self, leader: Sequence) -> None:
        """Let the other choices of a turn go on from the path on which the first has its documents, if it has one."""
        for sequence in [each for each, other in self._leader_by_follower.items() if other is leader]:
            del self._leader_by_follower[sequence]
            if leader.num_output:
                sequence.blend, sequence.root = copy(leader.blend), leader.root
            self._on_ready(sequence)

    def end_child(self, child: Sequence) -> None:
        """Note that a sequence has ended: if it is a child, its prompt is there, or was computed in vain."""
        if child in self.parent_by_child:
            self._arrived(child)
            del self.parent_by_child[child]

    def arrive(self, running: Iterable[Sequence], comes_whole: Callable[[Sequence], bool]) -> bool:
        """Note what comes whole in this very step; returns whether somebody's documents are complete by that.

        Its rows run beside those of the documents: what these read is written, or waited for, layer by layer before
        (CacheBlend's pipeline, section 5.2).
        """
        arriving = [child for child in running if child in self.parent_by_child and comes_whole(child)]
        num_waiting = len(self._num_missing)
        for parent, num_missing in list(self._num_missing.items()):
            children = [child for child in arriving if self.parent_by_child[child] is parent]
            if len(children) == num_missing:
                loaded: Counter[str] = Counter()
                for child in children:
                    for start, end, source in child.origins.ranges(child.num_prompt):
                        loaded[source] += end - start
                parent.blend.apply_loading(loaded)
                for child in children:
                    self._arrived(child)
        return len(self._num_missing) < num_waiting

    def _arrived(self, child: Sequence) -> None:
        parent = self.parent_by_child[child]
        if parent not in self._num_missing:
            return
        first, shift = parent.blend.place(child.ids[: child.num_prompt], parent.context)
        for start, end, source in child.origins.ranges(child.num_prompt):
            parent.add_origin(max(start + shift, first), end + shift, source)
        self._num_missing[parent] -= 1
        if not self._num_missing[parent]:
            del self._num_missing[parent]
            self._on_ready(parent)
