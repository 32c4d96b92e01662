"""Others' rules: who is there is chosen, what is in flight is counted, and each keeps to its description."""

from __future__ import annotations

import random

import pytest

from mneme.lab.cluster.policies import Policy, World
from mneme.lab.cluster.routers import ROUTERS
from mneme.lab.cluster.simulated_replica import DEFAULT_RATES
from mneme.lab.cluster.workload import Turn
from mneme.replicas.forest.tree import DEVICE, HOST

REPLICAS = range(4)
OTHERS = [name for name in ROUTERS if name not in ("mneme", "random", "hash")]
A_PROMPT, ANOTHER = [1, 2, 3, 4], [5, 6, 7, 8]


def router(name: str) -> Policy:
    made = ROUTERS[name](random.Random(0), World(DEFAULT_RATES.cost_model(), lambda: 0.0, 64, {}))
    assert isinstance(made, Policy)
    made.set_replicas(REPLICAS)
    return made


def turn(block_ids: list[int], session: int = 0) -> Turn:
    return Turn(0.0, block_ids, 64 * len(block_ids), 8, 64, session)


def home(policy: Policy, block_ids: list[int], session: int = 0) -> int:
    """Where a request goes that then ends."""
    asked = turn(block_ids, session)
    chosen = policy.place(asked)
    policy.ended(asked)
    return chosen


@pytest.mark.parametrize("name", OTHERS)
def test_who_is_there_is_chosen_and_what_has_ended_is_not_counted(name: str) -> None:
    policy, rng = router(name), random.Random(0)
    held: list[Turn] = []
    there = [*REPLICAS]
    for number in range(300):
        if number % 50 == 49:
            there = rng.sample(range(6), rng.randint(1, 5))
            policy.set_replicas(there)
        asked = turn([rng.randrange(3) * 10 + place for place in range(rng.choice([1, 5]))], number % 7)
        assert policy.place(asked) in there
        policy.started(asked, 0)
        held.append(asked)
        if rng.random() < 0.7:
            policy.ended(held.pop(rng.randrange(len(held))))
    for asked in held:
        policy.ended(asked)
    assert not any(policy.requests.values())
    assert not policy.placed_at


@pytest.mark.parametrize("name", ["ray", "sglang"])
def test_a_prefix_stays_where_it_was_sent_until_that_replica_is_gone(name: str) -> None:
    policy = router(name)
    first = home(policy, A_PROMPT)
    assert {home(policy, [*A_PROMPT, *ANOTHER[:n]]) for n in range(4)} == {first}
    policy.set_replicas([each for each in REPLICAS if each != first])
    assert home(policy, A_PROMPT) != first


@pytest.mark.parametrize("name", ["llm-d", "dynamo"])
def test_what_replicas_hold_is_known(name: str) -> None:
    """What is in host memory alone is not gone."""
    policy = router(name)
    for tier in (DEVICE, HOST):
        for block_id in A_PROMPT:
            policy.placed(2, block_id, tier)
        assert {home(policy, A_PROMPT) for _ in range(3)} == {2}
    for block_id in A_PROMPT:
        policy.placed(2, block_id, None)
    assert {home(policy, A_PROMPT) for _ in range(60)} == set(REPLICAS)
