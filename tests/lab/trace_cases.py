"""Small traces, and caches of them that are as plain as can be."""

from __future__ import annotations

import random
from collections.abc import Sequence

from mneme.lab.cache.traces import TraceRequest

BLOCK_TOKENS = 4


def request(arrival_s: float, block_ids: list[int], output_tokens: int = 1) -> TraceRequest:
    return TraceRequest(arrival_s, block_ids, len(block_ids) * BLOCK_TOKENS, output_tokens, BLOCK_TOKENS)


def random_trace(seed: int, num_requests: int = 300, num_roots: int = 6) -> list[TraceRequest]:
    """Chains that branch anywhere: each follows an earlier one for a while, then goes on with new blocks."""
    rng = random.Random(seed)
    chains: list[list[int]] = [[root] for root in range(num_roots)]
    next_id, now_s, trace = num_roots, 0.0, []
    for _ in range(num_requests):
        now_s += rng.choice([0.0, 1.0, 20.0])
        base = rng.choice(chains[-12:] if rng.random() < 0.8 else chains)
        chain = base[: rng.randrange(1, len(base) + 1)]
        num_new = rng.randrange(0, 5)
        chain = [*chain, *range(next_id, next_id + num_new)]
        next_id += num_new
        chains.append(chain)
        trace.append(request(now_s, chain))
    return trace


def lru_ratio(trace: Sequence[TraceRequest], capacity: int) -> float:
    """A list, oldest first. All blocks of a request are touched, tail first; then the oldest over the capacity go."""
    blocks: list[int] = []
    return _ratio(trace, blocks, lambda _, used: _keep_newest(blocks, used, capacity))


def min_ratio(trace: Sequence[TraceRequest], capacity: int) -> float:
    """After each request, what is used again soonest stays; of equals the ones nearer to their head."""
    blocks: list[int] = []

    def keep(place: int, used: list[int]) -> None:
        blocks.extend(block for block in used if block not in blocks)
        depth = {block: at for later in trace for at, block in enumerate(later.block_ids)}
        coming: dict[int, int] = {}
        for later in range(place + 1, len(trace)):
            for block in trace[later].block_ids:
                coming.setdefault(block, later)
        blocks.sort(key=lambda block: (coming.get(block, len(trace)), depth[block]))
        del blocks[capacity:]

    return _ratio(trace, blocks, keep)


def _keep_newest(blocks: list[int], used: list[int], capacity: int) -> None:
    for block in reversed(used):
        if block in blocks:
            blocks.remove(block)
        blocks.append(block)
    del blocks[: max(len(blocks) - capacity, 0)]


def _ratio(trace, blocks, after) -> float:  # type: ignore[no-untyped-def]
    num_found = num_blocks = 0
    for place, asked in enumerate(trace):
        for block in asked.block_ids:
            if block not in blocks:
                break
            num_found += 1
        num_blocks += len(asked.block_ids)
        after(place, asked.block_ids)
    return num_found / num_blocks
