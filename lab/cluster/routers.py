"""The routers that are compared: ours, as it serves, by each of its rules, and others' (`policies.py`)."""

from __future__ import annotations

import random
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from mneme.cachetier.policy.cost_model import CostModel
from mneme.lab.cluster import policies
from mneme.lab.cluster.policies import Router, World
from mneme.lab.cluster.simulated_replica import Status
from mneme.lab.cluster.workload import Turn
from mneme.replicas.forest.tree import DEVICE, HOST
from mneme.replicas.report import BLOCK_TOKENS, ReplicaReport
from mneme.router.chooser import ReplicaChooser, Reservation
from mneme.router.score import MINE, RouterConfig, RoutingPolicy


class Mneme(Router):
    """The chooser of `mneme serve`, as it is, and its reports of load, costs and KV, as replicas send them.

    It names blocks of 64 tokens. A prompt is handed to it in grains of as many tokens as make that a block of the
    trace; costs are those of grains.
    """

    def __init__(self, rng: random.Random, world: World, policy: RoutingPolicy = MINE) -> None:
        self._world = world
        self._chooser = ReplicaChooser(RouterConfig(policy=policy), world.clock, rng, index_blocks=10**7)
        self._reservations: dict[int, Reservation] = {}
        self._grain = max(world.block_tokens // BLOCK_TOKENS, 1)
        self._lives: Counter[int] = Counter()
        self._num_reports: Counter[int] = Counter()  # in this life
        self._changes: dict[int, dict[int, int | None]] = {}  # where which hashes went, since the last report

    def place(self, turn: Turn) -> int:
        grains = np.repeat(np.array(turn.block_ids, np.int32), -(-turn.block_tokens // self._grain))
        ids = array("i", grains[: -(-turn.input_tokens // self._grain)].tobytes())
        reservation = self._chooser.select_and_reserve(ids, session_id=f"{turn.session}")
        assert reservation is not None, "a cluster has replicas"
        self._name(turn, reservation.chain)
        reservation.admitted()  # a simulated call takes no time
        self._reservations[id(turn)] = reservation
        return int(reservation.replica_id)

    def started(self, turn: Turn, num_found: int) -> None:
        tokens = min(num_found * turn.block_tokens, turn.input_tokens)
        self._reservations[id(turn)].started(tokens // self._grain)

    def ended(self, turn: Turn) -> None:
        self._reservations.pop(id(turn)).release()

    def set_replicas(self, replicas: Sequence[int]) -> None:
        self._chooser.set_replicas([str(r) for r in replicas])

    def restarted(self, replica: int) -> None:
        self._chooser.forget_prefixes(str(replica))
        self._lives[replica] += 1
        self._num_reports[replica] = 0
        self._changes.pop(replica, None)

    def placed(self, replica: int, block_id: int, tier: int | None) -> None:
        block_hash = self._world.hash_by_block.get(block_id)
        if block_hash is not None:
            self._changes.setdefault(replica, {})[block_hash] = tier

    def reported(self, replica: int, status: Status) -> None:
        number, self._num_reports[replica] = self._num_reports[replica], self._num_reports[replica] + 1
        changes = self._changes.pop(replica, {})
        device, host, gone = (
            array("Q", [each for each, place in changes.items() if place == tier]).tobytes() if changes else b""
            for tier in (DEVICE, HOST, None)
        )
        report = ReplicaReport(
            epoch=f"{self._lives[replica]}", seq=number, backlog_s=status.backlog_s,
            queued_tokens=status.queued_tokens // self._grain, running=status.running, waiting=status.waiting,
            context_tokens=status.context_tokens // self._grain, free_page_share=status.free_share,
            cost=None if number else self._costs(), device=device, host=host, gone=gone, is_snapshot=number == 0,
        )  # fmt: skip
        self._chooser.apply_report(str(replica), report)

    def expected(self, turn: Turn) -> int | None:
        tokens = self._reservations[id(turn)].matched_tokens * self._grain
        return min(-(-tokens // turn.block_tokens), len(turn.block_ids))

    def elsewhere_tokens(self, turn: Turn) -> int:
        return self._reservations[id(turn)].route.elsewhere_tokens * self._grain

    def _name(self, turn: Turn, chain: Sequence[int]) -> None:
        """Note what the blocks are called that end with a block of the chooser's."""
        size, known = BLOCK_TOKENS * self._grain, self._world.hash_by_block
        if turn.block_ids[-1] not in known:
            for number, block_hash in enumerate(chain, 1):
                if number * size % turn.block_tokens == 0:
                    known[turn.block_ids[number * size // turn.block_tokens - 1]] = block_hash

    def _costs(self) -> tuple[float, ...]:
        grain, costs = self._grain, self._world.costs.as_mapping()
        steps = {
            "prefill": [term * grain**power for power, term in enumerate(costs["prefill"])],
            "decode": [*costs["decode"][:2], costs["decode"][2] * grain],
            "step_rows": max(costs["step_rows"] // grain, 1),
            "kv_bytes_per_token": costs["kv_bytes_per_token"] * grain,
        }
        return CostModel.from_mapping(costs | steps).figures()


ROUTERS: dict[str, Callable[[random.Random, World], Router]] = {
    MINE: Mneme,
    "polled": policies.Polled,
    "random": partial(Mneme, policy="random"),
    "round-robin": policies.RoundRobin,
    "power-of-two": policies.PowerOfTwo,
    "hash": partial(Mneme, policy="hash"),
    "ring": policies.HashRing,
    "ray": policies.RayPrefix,
    "sglang": policies.SGLangGateway,
    "llm-d": policies.LlmdFilter,
    "dynamo": policies.DynamoCost,
}
