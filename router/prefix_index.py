"""Remembers which replica holds which prefix: a bounded map from block hash to replicas, as bits of one number.

What replicas report is there until they report it gone. What was only sent to a replica that reports is speculative: it
counts for `SENT_S` to twice that, unless a report confirms it; of one that does not report, until it is forgotten.

It is a hint, never a promise: a replica may have evicted what the index remembers, and then computes it again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

SENT_S = 4.0
_NUM_SWEPT = 64  # blocks looked at with each change, while bits of replicas that are gone are left


class Matches(NamedTuple):
    """Counts leading blocks of a prompt by replica: those that it has, and of them those in its host tier alone."""

    blocks: dict[str, int]
    host_blocks: dict[str, int]


class PrefixIndex:
    """Block hash -> replicas, least recently recorded blocks forgotten first.

    Each replica has two bits: the even one for its device, the odd one for its host tier. Whoever starts anew gets
    other bits, so that nothing has to be searched then; what is left of the old ones is swept away, some at a time.
    """

    def __init__(self, max_blocks: int = 1_000_000) -> None:
        self._max_blocks = max_blocks
        self._held: OrderedDict[int, int] = OrderedDict()
        self._sent: dict[int, int] = {}
        self._sent_before: dict[int, int] = {}
        self._turned_s = 0.0
        self._num_turns = 0
        self._bit: dict[str, int] = {}  # the even ones
        self._name: dict[int, str] = {}
        self._live = 0  # all even bits that are in use
        self._free: list[int] = []
        self._retired: list[tuple[int, int]] = []  # bit, and at which turn
        self._num_to_sweep = 0
        self._has_host = False
        self._same: dict[int, int] = {}  # one object for blocks held alike: half of the memory

    def __len__(self) -> int:
        return len(self._held)

    def record(self, hashes: Sequence[int], replica: str) -> None:
        """`replica` holds this chain of blocks, for good."""
        self._put(reversed(hashes), self._bit_of(replica))  # the root is the most recent: a chain loses its tail first

    def record_sent(self, hashes: Sequence[int], replica: str, now_s: float) -> None:
        """`replica` will hold this chain of blocks soon, and will say so; else it is forgotten."""
        self._turn(now_s)
        bit, sent = self._bit_of(replica), self._sent
        for block_hash in hashes:
            sent[block_hash] = sent.get(block_hash, 0) | bit

    def update(
        self, replica: str, *, device: Iterable[int] = (), host: Iterable[int] = (), gone: Iterable[int] = ()
    ) -> None:
        """Follow what `replica` reports: where these blocks are now."""
        bit, held = self._bit_of(replica), self._held
        self._put(reversed([*device]), bit)  # as reported, roots come first
        for block_hash in host:
            self._has_host = True
            self._set(block_hash, held.get(block_hash, 0) & ~bit | bit << 1)
        for block_hash in gone:
            for sent in (self._sent, self._sent_before):
                if sent.get(block_hash, 0) & bit:
                    sent[block_hash] &= ~bit
            if block_hash in held:
                self._set(block_hash, held[block_hash] & ~(bit | bit << 1))
        self._trim()

    def match(self, hashes: Sequence[int], now_s: float = 0.0) -> Matches:
        """Count the leading blocks that each replica has; a chain counts as far as it is unbroken."""
        self._turn(now_s)
        held, sent, before = self._held, self._sent, self._sent_before
        alive, depth = self._live, -1
        ends: list[tuple[int, int]] = []  # how deep, and the bits of those that end there
        host_only: list[int] = []
        for depth, block_hash in enumerate(hashes):
            bits = held.get(block_hash, 0)
            if sent or before:
                bits |= sent.get(block_hash, 0) | before.get(block_hash, 0)
            here = alive & (bits | bits >> 1) if self._has_host else alive & bits
            if here != alive:
                if depth:
                    ends.append((depth, alive ^ here))
                if not here:
                    break
                alive = here
            if self._has_host and alive & ~bits:
                host_only.append(alive & ~bits)
        else:
            if depth >= 0:
                ends.append((depth + 1, alive))
        host_blocks: dict[str, int] = {}
        for bits in host_only:
            for replica in self._names(bits):
                host_blocks[replica] = host_blocks.get(replica, 0) + 1
        return Matches({replica: depth for depth, bits in ends for replica in self._names(bits)}, host_blocks)

    def drop(self, hashes: Iterable[int]) -> None:
        """Nobody has these blocks."""
        for block_hash in hashes:
            self._held.pop(block_hash, None)

    def forget(self, replica: str) -> None:
        """Drop every trace of a replica that died or restarted, or of what it said before."""
        bit = self._bit.pop(replica, None)
        if bit is not None:
            del self._name[bit]
            self._live &= ~bit
            self._retired.append((bit, self._num_turns))
            self._num_to_sweep = len(self._held)

    def retain(self, replicas: Collection[str]) -> None:
        """Forget all replicas but these."""
        for replica in self._bit.keys() - set(replicas):
            self.forget(replica)

    def _bit_of(self, replica: str) -> int:
        bit = self._bit.get(replica)
        if bit is None:
            bit = self._free.pop() if self._free else 1 << 2 * (len(self._bit) + len(self._retired))
            self._bit[replica], self._name[bit] = bit, replica
            self._live |= bit
        return bit

    def _names(self, bits: int) -> list[str]:
        if 4 * bits.bit_count() > len(self._bit):  # quicker than one by one
            return [name for name, bit in self._bit.items() if bits & bit]
        names = []
        while bits:
            bit = bits & -bits
            names.append(self._name[bit])
            bits ^= bit
        return names

    def _put(self, hashes: Iterable[int], bit: int) -> None:
        held = self._held
        for block_hash in hashes:
            before = held.get(block_hash, 0)
            if self._retired or before & bit == 0 or before & bit << 1:  # at the end no sweep would find it
                self._set(block_hash, before & ~(bit << 1) | bit)
            held.move_to_end(block_hash)
        self._trim()

    def _set(self, block_hash: int, bits: int) -> None:
        bits &= self._live | self._live << 1
        if bits:
            self._held[block_hash] = self._same.setdefault(bits, bits)
        else:
            self._held.pop(block_hash, None)

    def _trim(self) -> None:
        while len(self._held) > self._max_blocks:
            self._held.popitem(last=False)
        if len(self._same) > self._max_blocks // 4 + 1024:
            self._same.clear()
        if self._retired:
            self._sweep()

    def _sweep(self) -> None:
        """Take the next blocks out and put them back without bits that are in use no more; free these at the end.

        Whatever else writes a block meanwhile leaves them out too.
        """
        for _ in range(min(_NUM_SWEPT, self._num_to_sweep, len(self._held))):
            self._set(*self._held.popitem(last=False))
        self._num_to_sweep = max(self._num_to_sweep - _NUM_SWEPT, 0)
        if not self._num_to_sweep:
            self._same.clear()
            done = [bit for bit, turn in self._retired if self._num_turns - turn > 2]  # what was sent is forgotten too
            self._retired = [(bit, turn) for bit, turn in self._retired if bit not in done]
            self._free += done

    def _turn(self, now_s: float) -> None:
        """Let what was sent grow old; a clock that was set back begins anew."""
        if now_s < self._turned_s:
            self._turned_s = now_s
        elif now_s - self._turned_s >= SENT_S:
            is_long_ago = now_s - self._turned_s >= 2 * SENT_S
            self._sent_before, self._sent = ({} if is_long_ago else self._sent), {}
            self._turned_s, self._num_turns = now_s, self._num_turns + 1 + is_long_ago
