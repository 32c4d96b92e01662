"""Blocks of many requests in tiers of bounded size, without a byte of KV: what `mneme simulate cache` counts in.

A block is in one tier, or gone. A request finds the blocks from its first up to the first that is gone, and all of its
blocks are in the first tier afterwards; what is over a tier's capacity goes to the tier below, or away. Leaves go
first, in the runs and by the policies of an engine's own tiers: so a block is never below its children, and what is
there of a request is always its beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence

from mneme.cachetier.policy.eviction import Candidate, EvictionPolicy
from mneme.primitives import Bounded

GHOSTS = 4  # keys of blocks that are gone that are remembered for each block that all tiers hold


class Block:
    """`tier` counts from 0; `release` tells blocks that were used together."""

    __slots__ = ("children", "has_returned", "key", "last_used_s", "num_below", "parent", "release", "tier")

    def __init__(self, key: int, parent: Block | None) -> None:
        self.key = key
        self.parent = parent
        self.children: dict[int, Block] = {}  # in any tier
        self.num_below = 0  # of them, in the same tier
        self.tier = 0
        self.release = 0
        self.last_used_s = 0.0
        self.has_returned = False


class Tier:
    """One tier's candidates. `capacity` in blocks; None is without a bound."""

    def __init__(self, index: int, capacity: int | None, policy: EvictionPolicy) -> None:
        self.capacity = capacity
        self.policy = policy
        self.num_blocks = 0
        self.num_found = 0
        self.num_written = 0  # blocks that came from above; in the first tier, that were computed
        self.num_prefetched = 0  # blocks that came from the tier below ahead of their use
        self._index = index
        self._victim: Block | None = None
        self._num_victims = 0
        self._run: Candidate | None = None  # what the victim is part of
        self._arrived: Block | None = None  # the last from above, not offered yet: its parent may follow

    @property
    def is_over(self) -> bool:
        return self.capacity is not None and self.num_blocks > self.capacity

    @property
    def is_full(self) -> bool:
        return self.capacity is not None and self.num_blocks >= self.capacity

    def used(self, block: Block) -> None:
        if block is self._victim:
            self._victim = None
        if not block.num_below:
            self.policy.withdraw(block)

    def offer(self, block: Block) -> None:
        """Offer the run that this block is in, if it is one."""
        while block.num_below == 1:
            block = next(child for child in block.children.values() if child.tier == self._index)
        if not block.num_below and block is not self._victim:
            self.policy.offer(self._candidate(block))

    def arrived(self, block: Block) -> None:
        """It came from the tier above. `flush` is to follow: a run that comes block by block is offered once."""
        self.num_blocks += 1
        self.num_written += 1
        block.num_below = sum(child.tier == self._index for child in block.children.values())
        if self._arrived is not None and (self._arrived.parent is not block or block.num_below != 1):
            self.flush()
        self._arrived = block

    def flush(self) -> None:
        """Offer what has arrived."""
        if self._arrived is not None:
            self.offer(self._arrived)
            self._arrived = None

    def choose(self) -> tuple[Block, Candidate]:
        """The leaf to go next, and the run it was chosen with. `removed` is to follow."""
        while self._victim is None:
            victim = self.policy.choose()
            assert victim is not None, "a tier that is over its capacity has a leaf"
            leaf = victim.candidate.key
            assert isinstance(leaf, Block)
            run = self._candidate(leaf)
            if run.num_pages == victim.candidate.num_pages:
                self._victim, self._num_victims, self._run = leaf, victim.num_pages, run
            else:  # its upper part was used since
                self.policy.offer(run)
        assert self._run is not None
        return self._victim, self._run

    def removed(self, block: Block) -> None:
        """The leaf that was chosen is not here any more."""
        parent, self._victim = block.parent, None
        self._num_victims -= 1
        if parent is None or parent.tier != self._index:
            return
        parent.num_below -= 1
        if self._num_victims and not parent.num_below and parent.release == block.release:
            self._victim = parent
        else:
            self.offer(parent)

    def _candidate(self, leaf: Block) -> Candidate:
        run = [leaf]
        while (parent := run[-1].parent) is not None and self._continues(leaf, parent):
            run.append(parent)
        return Candidate(leaf, len(run), leaf.last_used_s, run[len(run) // 3].has_returned)

    def _continues(self, leaf: Block, parent: Block) -> bool:
        return parent.release == leaf.release and parent.num_below == 1 and parent.tier == self._index


class SimulatedTiers:
    """`capacities` in blocks, the fastest tier first; `make_policy` is asked once per tier."""

    def __init__(self, capacities: Sequence[int | None], make_policy: Callable[[int | None], EvictionPolicy]) -> None:
        self.tiers = [Tier(index, capacity, make_policy(capacity)) for index, capacity in enumerate(capacities)]
        self.blocks: dict[int, Block] = {}
        self._past = Bounded[Hashable, bool](GHOSTS * sum(capacity or 0 for capacity in capacities))
        self._release = 0

    def use(self, keys: Sequence[int], now_s: float) -> int:
        """One request; how many of its blocks were there, from its first on. `now_s` rises from call to call."""
        num_found = self.num_present(keys)
        self._release += 1
        parent: Block | None = None
        for key in keys:
            parent = self._use(key, parent, now_s)
        if parent is not None:
            self.tiers[0].offer(parent)
        self._settle()
        return num_found

    def prefetch(self, keys: Sequence[int], source: int, limit: int, now_s: float) -> int:
        """Bring what is of a request in the tier `source` to the tier above; at most so many blocks, head first.

        For the order of evictions it counts as a use now; `now_s` never falls. Returns how many came.
        """
        blocks = [self.blocks[key] for key in keys[: self.num_present(keys)]]
        moved = [block for block in blocks if block.tier == source][:limit]
        for block in moved:
            self._move_up(block, now_s)
        if moved:
            self.tiers[source - 1].offer(moved[-1])
            self._settle()
        return len(moved)

    def num_present(self, keys: Sequence[int]) -> int:
        """Blocks of a request that are there: by halving, as a block is there only if those before it are."""
        low, high = 0, len(keys)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if keys[middle - 1] in self.blocks else (low, middle - 1)
        return low

    def leaves_of(self, requests: Iterable[Sequence[int]], tier: int) -> list[Hashable | None]:
        """For each request that waits, the leaf whose run in a tier it will use; None if there is none."""
        return [self._leaf_of(keys, tier) for keys in requests]

    def check(self) -> None:
        """Assert every invariant."""
        for index, tier in enumerate(self.tiers):
            here = [block for block in self.blocks.values() if block.tier == index]
            assert len(here) == tier.num_blocks
            assert not tier.is_over
            assert {block for block in here if not block.num_below} - set(tier.policy.candidates) <= {tier._victim}
        for block in self.blocks.values():
            assert block.parent is None or block.parent.tier <= block.tier
            assert block.parent is None or block.parent.children[block.key] is block
            assert block.num_below == sum(child.tier == block.tier for child in block.children.values())

    def _use(self, key: int, parent: Block | None, now_s: float) -> Block:
        block = self.blocks.get(key)
        if block is None:
            block = self._create(key, parent)
        else:
            self._reuse(block)
        block.release, block.last_used_s = self._release, now_s
        return block

    def _create(self, key: int, parent: Block | None) -> Block:
        block = self.blocks[key] = Block(key, parent)
        block.has_returned = self._past.pop(key, False)
        if parent is not None:
            parent.children[key] = block
            parent.num_below += 1
        self.tiers[0].num_blocks += 1
        self.tiers[0].num_written += 1
        return block

    def _reuse(self, block: Block) -> None:
        """Its parent was used before it, so it is in the first tier already."""
        tier = self.tiers[block.tier]
        tier.used(block)
        tier.num_found += 1
        block.has_returned = True
        if block.tier:
            tier.num_blocks -= 1
            self.tiers[0].num_blocks += 1
            block.tier = block.num_below = 0
            if block.parent is not None:
                block.parent.num_below += 1

    def _move_up(self, block: Block, now_s: float) -> None:
        """By one tier; what is before it in its request is there already, or above."""
        source, target = self.tiers[block.tier], self.tiers[block.tier - 1]
        source.used(block)
        source.num_blocks -= 1
        block.tier -= 1
        block.num_below = 0
        block.last_used_s = now_s
        target.num_blocks += 1
        target.num_prefetched += 1
        if block.parent is not None and block.parent.tier == block.tier:
            target.used(block.parent)
            block.parent.num_below += 1

    def _settle(self) -> None:
        """Move down what is too much."""
        for index, tier in enumerate(self.tiers):
            tier.flush()
            while tier.is_over:
                self._move_down(index)

    def _move_down(self, index: int) -> None:
        tier = self.tiers[index]
        block, run = tier.choose()
        below = self._tier_below(index, block, run)
        block.tier = len(self.tiers) if below is None else below
        tier.num_blocks -= 1
        tier.removed(block)
        if below is None:
            self._drop(block)
            return
        self.tiers[below].arrived(block)

    def _tier_below(self, index: int, block: Block, run: Candidate) -> int | None:
        """The next that takes it; None if it goes for good. Never below its children."""
        lowest = min((child.tier for child in block.children.values()), default=None)
        for below in range(index + 1, len(self.tiers)):
            tier = self.tiers[below]
            if below == lowest or (tier.capacity != 0 and (not tier.is_full or tier.policy.admits(run))):
                return below
        return None

    def _drop(self, block: Block) -> None:
        del self.blocks[block.key]
        if block.parent is not None:
            del block.parent.children[block.key]
        self._past[block.key] = True

    def _leaf_of(self, keys: Sequence[int], tier: int) -> Block | None:
        used = (self.blocks[key] for key in reversed(keys[: self.num_present(keys)]))
        block = next((block for block in used if block.tier <= tier), None)
        if block is None or block.tier != tier:
            return None
        while block.num_below == 1:
            block = next(child for child in block.children.values() if child.tier == tier)
        return None if block.num_below else block
