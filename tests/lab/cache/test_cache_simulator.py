"""The simulator against lists: hits, tiers, what moves; for every policy the invariants after each request."""

from __future__ import annotations

import random

import pytest

from mneme.cachetier.policy.eviction import LONG_S, USED_ONCE_S, Candidate, ReturningPolicy
from mneme.cachetier.policy.load_controller import overlapped_s
from mneme.errors import ConfigError
from mneme.lab.cache.costs import Rates
from mneme.lab.cache.simulator import SIMULATED_POLICIES, BlockTiers, CacheSimulator, SimulatedLoads
from tests.lab.trace_cases import lru_ratio, min_ratio, random_trace, request

FAST = Rates(host_gb_per_s=1e6, disk_gb_per_s=1e6, prefill_tokens_per_s=1.0)  # nothing is faster computed again


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("capacity", [1, 7, 20, 60, 1000])
def test_lru_and_min_are_those_of_a_list(seed: int, capacity: int) -> None:
    trace = random_trace(seed)
    assert CacheSimulator(trace, [capacity], "lru").run().block_hit_ratio == lru_ratio(trace, capacity)
    assert CacheSimulator(trace, [capacity], "min").run().block_hit_ratio == min_ratio(trace, capacity)


@pytest.mark.parametrize("policy", SIMULATED_POLICIES)
def test_no_policy_finds_more_than_min_or_than_there_is(policy: str) -> None:
    trace = random_trace(5)
    no_bound = CacheSimulator(trace, [None], policy).run().block_hit_ratio
    assert no_bound == lru_ratio(trace, 10**6)
    for capacity in (5, 20, 60):
        found = CacheSimulator(trace, [capacity], policy).run().block_hit_ratio
        assert 0 < found <= min_ratio(trace, capacity) < no_bound


def check(tiers: BlockTiers) -> None:
    """Each tier is within its bound, and what the device or the node has can be used from its root on."""
    device, *below = tiers.tiers
    for tier in tiers.tiers:
        assert tier.capacity is None or len(tier) <= tier.capacity
    for tiers_of_one in ([device], below):
        keys = {entry.key for tier in tiers_of_one for entry in tier}
        assert {entry.parent for tier in tiers_of_one for entry in tier} <= keys | {b""}


@pytest.mark.parametrize("policy", ["lru", "pensieve", "lookahead", "returning", "density", "fifo"])
@pytest.mark.parametrize("capacities", [[20], [3, 10, 40], [0, 5, 20], [10, 0, 30], [4, None]])
def test_every_tier_holds_its_own_after_each_request(policy: str, capacities: list[int | None]) -> None:
    simulator = CacheSimulator(random_trace(7), capacities, policy)
    outcome = simulator.run(lambda: check(simulator.tiers))
    assert [tier.num_written > 0 for tier in outcome.tiers] == [size != 0 for size in capacities]


def test_a_node_of_lru_finds_what_its_largest_tier_does() -> None:
    """What is in memory is on the disk too."""
    trace = random_trace(3)
    one = CacheSimulator(trace, [50], "lru").run()
    three = CacheSimulator(trace, [0, 15, 50], "lru", costs=FAST.cost_model()).run()
    assert three.block_hit_ratio == one.block_hit_ratio
    assert sum(tier.num_found for tier in three.tiers) == three.num_found
    assert all(tier.num_read == tier.num_found for tier in three.tiers[1:])


def test_blocks_are_in_the_node_as_soon_as_they_are_computed() -> None:
    trace = [request(0.0, [1, 2]), request(1.0, [3, 4]), request(2.0, [1, 2])]
    device, host = CacheSimulator(trace, [2, 4], "lru", costs=FAST.cost_model()).run().tiers
    assert (device.num_found, device.num_written, device.num_held) == (0, 6, 2)
    assert (host.num_found, host.num_read, host.num_written, host.num_held) == (2, 2, 4, 4)


def test_the_queue_is_what_lookahead_keeps() -> None:
    trace = [request(0.0, [1, 2]), request(1.0, [3, 4]), request(2.0, [5, 6]), request(3.0, [1, 2])]
    assert CacheSimulator(trace, [4], "lookahead").run().num_found == 0
    assert CacheSimulator(trace, [4], "lookahead", queue=1).run().num_found == 2
    assert CacheSimulator(trace, [4], "lookahead", queue=2).run().num_found == 2


def test_the_first_token_waits_for_what_is_slower() -> None:
    rates = Rates(prefill_tokens_per_s=100.0, host_gb_per_s=1.0, disk_gb_per_s=0.1, kv_bytes_per_token=1e6)
    loads = SimulatedLoads(rates.cost_model())
    assert loads.first_token(400, 100, [0, 0, 0]).ttft_s == 4.0
    assert loads.first_token(400, 100, [3, 0, 0]).ttft_s == 1.0
    assert loads.first_token(400, 100, [4, 0, 0]).compute_s == 0.01  # one token is computed
    assert loads.first_token(400, 100, [0, 4, 0]).ttft_s == overlapped_s(0.4, 0.01, 32)  # 0.4 GB from the host
    last_computed = loads.first_token(400, 100, [0, 2, 2])
    assert last_computed.ttft_s == pytest.approx(overlapped_s(0.2 + 1.0, 1.0, 32))
    assert last_computed.loaded == (0, 2, 1)


def test_what_waits_is_brought_from_the_disk_as_far_as_the_disk_is_fast() -> None:
    session, others = [1, 2, 3], [[10 * number, 10 * number + 1] for number in range(1, 6)]
    trace = [request(0.0, session), *(request(1.0 + at, ids) for at, ids in enumerate(others)), request(8.0, session)]
    for seconds_per_block, num_ahead in ((0.1, 3), (2.0, 2), (9.0, 0)):
        rates = Rates(disk_gb_per_s=4e-3 / seconds_per_block, kv_bytes_per_token=1e6, prefill_tokens_per_s=1e-3)
        simulator = CacheSimulator(trace, [2, 4, 20], "lru", costs=rates.cost_model(), queue=1, prefetch=True)
        _, host, disk = simulator.run().tiers
        check(simulator.tiers)
        assert (host.num_prefetched, host.num_found, disk.num_found) == (num_ahead, num_ahead, 3 - num_ahead)
        assert disk.num_read == 3
    _, host, disk = CacheSimulator(trace, [2, 4, 20], "lru", costs=FAST.cost_model(), queue=1).run().tiers
    assert (host.num_found, disk.num_found) == (0, 3)


@pytest.mark.parametrize("policy", SIMULATED_POLICIES)
@pytest.mark.parametrize("capacities", [[3, 10, 40], [0, 5, 20], [4, 8, None]])
def test_prefetching_moves_and_loses_nothing(policy: str, capacities: list[int | None]) -> None:
    simulator = CacheSimulator(random_trace(9), capacities, policy, costs=FAST.cost_model(), queue=6, prefetch=True)
    outcome = simulator.run()
    check(simulator.tiers)
    plain = CacheSimulator(random_trace(9), capacities, policy, costs=FAST.cost_model(), queue=6).run()
    assert outcome.tiers[1].num_prefetched > 0
    assert outcome.tiers[2].num_found < plain.tiers[2].num_found
    if capacities[2] is None:
        assert outcome.num_found == plain.num_found


def test_a_prefetch_that_has_nowhere_to_go_is_refused() -> None:
    for capacities, queue in (([5, 5], 3), ([5, 0, 5], 3), ([5, 5, 5], 0)):
        with pytest.raises(ConfigError, match="prefetch: needs"):
            CacheSimulator([], capacities, "lru", queue=queue, prefetch=True)


def test_returning_is_what_a_scan_of_all_would_choose() -> None:
    rng = random.Random(2)
    policy, held, now_s = ReturningPolicy(100), {}, 0.0
    for step in range(3000):
        now_s += rng.expovariate(0.1)
        held[step] = (now_s, rng.random() < 0.4)
        policy.offer(Candidate(step, rng.randrange(1, 9), now_s, held[step][1]))
        if step % 7 == 0:
            gone = rng.choice(list(held))
            del held[gone]
            policy.withdraw(gone)
        if len(held) > 60:
            ages = {
                key: (age := now_s - used_s) + (0 if returned else USED_ONCE_S * max(0, 1 - age / LONG_S))
                for key, (used_s, returned) in held.items()
            }
            key = policy.choose().candidate.key  # type: ignore[union-attr]
            assert ages[key] == max(ages.values())
            del held[key]


def test_returning_admits_what_would_not_go_next() -> None:
    policy = ReturningPolicy(100)
    assert policy.admits(Candidate("any", 1, 0.0))
    policy.offer(Candidate("held", 1, 1000.0, True))
    assert not policy.admits(Candidate("older", 1, 999.0, True))
    assert policy.admits(Candidate("younger", 1, 1001.0, True))
    assert not policy.admits(Candidate("younger, used once", 1, 1001.0))
    policy.offer(Candidate("newer", 1, 1001.0 + USED_ONCE_S, True))
    assert policy.admits(Candidate("newer, used once", 1, 1001.0 + USED_ONCE_S))
