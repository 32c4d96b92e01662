"""How long a simulated request waits for its first token: what an engine's own load controller would do about it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mneme.cachetier.policy.cost_model import CostModel
from mneme.cachetier.policy.load_controller import Loadable, LoadController
from mneme.cachetier.simulate.costs import stands_still
from mneme.cachetier.store import Edge

_EDGES: tuple[Edge, ...] = ("host", "disk")  # of the tiers under the device


class FirstToken(NamedTuple):
    ttft_s: float
    compute_s: float
    loaded: tuple[int, ...]  # blocks by tier: a beginning of what was found, the rest is computed again


class SimulatedLoads:
    """Requests that come one at a time; each block is a chunk."""

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs
        self._controller = LoadController(costs, stands_still)

    def first_token(self, input_tokens: int, block_tokens: int, found: Sequence[int]) -> FirstToken:
        """`found`: blocks by tier, device first; those nearer to the head are in faster tiers."""
        num_resident, below = found[0], list(zip(_EDGES, found[1:], strict=False))
        block_bytes = self.block_bytes(block_tokens)
        chunks = [Loadable(block_tokens, block_bytes, edge) for edge, count in below for _ in range(count)]
        plan = self._controller.plan(num_resident * block_tokens, input_tokens, chunks)
        left, loaded = plan.num_chunks, [num_resident]
        for _, count in below:
            loaded.append(min(count, left))
            left -= loaded[-1]
        num_new = max(input_tokens - sum(loaded) * block_tokens, 1)  # one token is always computed
        compute_s = self._costs.prefill_s(num_new, input_tokens - num_new)
        return FirstToken(plan.predicted_ttft_s, compute_s, tuple(loaded))

    def disk_blocks(self, seconds: float, block_tokens: int) -> float:
        """How many the disk gives in so long."""
        return seconds / self._costs.edge_s("disk", self.block_bytes(block_tokens))

    def block_bytes(self, block_tokens: int) -> int:
        return block_tokens * self._costs.calibration.kv_bytes_per_token
