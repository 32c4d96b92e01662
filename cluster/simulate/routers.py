"""The routers that are compared: ours, as it serves, and others' rules (`router/policies.py`).

Where others are told what their workers hold, they know at once and exactly here. `polled` is what selects by reports
of load that are some time old.
"""

from __future__ import annotations

import random
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from mneme.cachetier.policy.cost_model import CostModel
from mneme.cluster.simulate.replica import Status
from mneme.cluster.simulate.workload import Turn
from mneme.replicas.forest.pages import DEVICE, HOST
from mneme.replicas.report import BLOCK_TOKENS, ReplicaReport
from mneme.router.chooser import ReplicaChooser, Reservation
from mneme.router.policies import MINE, POLICIES, Policy, Request
from mneme.router.score import Asked, RouterConfig

_RATED_TOKENS = 8192  # of a long prompt


class World(NamedTuple):
    """What routers of one simulation share."""

    costs: CostModel
    clock: Callable[[], float]
    block_tokens: int
    hash_by_block: dict[int, int]
    replicas_per_node: int | None  # that share its tiers; None: there are none


class Router(Protocol):
    """Selects replicas. `place` counts the request there until `ended`."""

    def place(self, turn: Turn) -> int: ...

    def started(self, turn: Turn) -> None:
        """Its first token has come."""

    def ended(self, turn: Turn) -> None: ...

    def set_replicas(self, replicas: Sequence[int]) -> None: ...

    def restarted(self, replica: int) -> None:
        """The replica is there, and holds nothing."""

    def stored(self, replica: int, block_id: int, *, is_there: bool) -> None:
        """A block came to a replica's device, or went from it."""

    def expected(self, turn: Turn) -> int | None:
        """Return the blocks that it took the chosen replica to hold; None: it does not care."""

    def polled(self) -> None:
        """Ask replicas for their load."""

    def reported(self, replica: int, status: Status) -> None:
        """A step has ended."""


class Polled(Policy):
    """Sends to whoever reported the least load, until the next report."""

    def __init__(self, rng: random.Random, token_s: Callable[[], float]) -> None:
        super().__init__(rng, token_s)
        self._reported: dict[int, int] = {}

    def choose(self, request: Request) -> int:
        return min(self.replicas, key=lambda r: self._reported.get(r, 0))

    def polled(self) -> None:
        self._reported = dict(self.requests)


class _Chooser(ReplicaChooser):
    """Has no peers: simulated nodes fetch nothing from each other."""

    def _asked(self, *args: Any) -> Asked:
        asked = super()._asked(*args)
        return asked._replace(at_peers=np.zeros_like(asked.at_peers))


class Mneme:
    """The chooser of `mneme serve`, as it is, and its reports of load, costs and KV, as replicas send them.

    It names blocks of 64 tokens. A prompt is handed to it in grains of as many tokens as make that a block of the
    trace; costs are those of grains.
    """

    def __init__(self, rng: random.Random, world: World) -> None:
        self._world = world
        self._chooser = _Chooser(RouterConfig(index_blocks=10**7), world.clock)
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

    def started(self, turn: Turn) -> None:
        self._reservations[id(turn)].started()

    def found(self, turn: Turn, num_blocks: int) -> None:
        """Its first token has come, behind so many blocks that were not computed: it is `started` by that."""
        tokens = min(num_blocks * turn.block_tokens, turn.input_tokens)
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

    def stored(self, replica: int, block_id: int, *, is_there: bool) -> None:
        self.placed(replica, block_id, DEVICE if is_there else None)

    def placed(self, replica: int, block_id: int, tier: int | None) -> None:
        """A block came to the replica's device, or to its host memory alone; None: it is in neither any more."""
        block_hash = self._world.hash_by_block.get(block_id)
        if block_hash is not None:
            self._changes.setdefault(replica, {})[block_hash] = tier

    def reported(self, replica: int, status: Status) -> None:
        number, self._num_reports[replica] = self._num_reports[replica], self._num_reports[replica] + 1
        changes, per_node = self._changes.pop(replica, {}), self._world.replicas_per_node
        device, host, gone = (
            array("Q", [each for each, place in changes.items() if place == tier]).tobytes() if changes else b""
            for tier in (DEVICE, HOST, None)
        )
        report = ReplicaReport(
            epoch=f"{self._lives[replica]}",
            seq=number,
            queue_s=status.queue_s,
            queued_tokens=status.queued_tokens // self._grain,
            running=status.running,
            waiting=status.waiting,
            context_tokens=status.context_tokens // self._grain,
            free_page_share=status.free_share,
            cost=None if number else self._costs(),
            device=device,
            host=host,
            gone=gone,
            is_snapshot=number == 0,
            node="" if per_node is None else f"n{replica // per_node}",
        )
        self._chooser.take_report(str(replica), report)

    def expected(self, turn: Turn) -> int | None:
        tokens = self._reservations[id(turn)].matched_tokens * self._grain
        return min(-(-tokens // turn.block_tokens), len(turn.block_ids))

    def elsewhere_tokens(self, turn: Turn) -> int:
        """Return the tokens that it took another one to hold."""
        return self._reservations[id(turn)].route.elsewhere_tokens * self._grain

    def polled(self) -> None: ...

    def _name(self, turn: Turn, chain: Sequence[int]) -> None:
        """Note what the blocks are called that end with a block of the chooser's."""
        size, known = BLOCK_TOKENS * self._grain, self._world.hash_by_block
        if turn.block_ids[-1] not in known:
            for number, block_hash in enumerate(chain, 1):
                if number * size % turn.block_tokens == 0:
                    known[turn.block_ids[number * size // turn.block_tokens - 1]] = block_hash

    def _costs(self) -> dict[str, Any]:
        grain, costs = self._grain, self._world.costs.as_mapping()
        steps = {
            "prefill": [term * grain**power for power, term in enumerate(costs["prefill"])],
            "decode": [*costs["decode"][:2], costs["decode"][2] * grain],
            "step_rows": max(costs["step_rows"] // grain, 1),
            "kv_bytes_per_token": costs["kv_bytes_per_token"] * grain,
        }
        return costs | steps


def _by_policy(
    make: Callable[[random.Random, Callable[[], float]], Policy],
) -> Callable[[random.Random, World], Router]:
    return lambda rng, world: make(rng, lambda: world.costs.prefill_s(_RATED_TOKENS, 0) / _RATED_TOKENS)


ROUTERS: dict[str, Callable[[random.Random, World], Router]] = {
    MINE: Mneme,
    "polled": _by_policy(Polled),
    **{name: _by_policy(policy) for name, policy in POLICIES.items()},
}
