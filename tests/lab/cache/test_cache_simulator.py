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


@pytest.mark.parametrize("policy", ["lru", "pensieve", "lookahead", "returning", "fifo"])
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


@pytest.mark.parametrize("seed", range(5))
def test_so_much_is_loaded_that_no_other_head_is_sooner(seed: int) -> None:
    rng = random.Random(seed)
    num_loads = 0
    for _ in range(40):
        rates = Rates(
            prefill_tokens_per_s=rng.uniform(10, 1000), host_gb_per_s=rng.uniform(0.1, 10),
            disk_gb_per_s=rng.uniform(0.01, 1), kv_bytes_per_token=1e6,
        )  # fmt: skip
        found = [rng.randrange(5) for _ in range(3)]
        num_tokens = 100 * sum(found) + rng.randrange(1, 200)
        timing = SimulatedLoads(rates.cost_model()).first_token(num_tokens, 100, found)
        below = [place for place, count in enumerate(found) for _ in range(count)][found[0] :]
        times = []
        for num_loaded in range(len(below) + 1):
            load_s = sum((0, 0.1 / rates.host_gb_per_s, 0.1 / rates.disk_gb_per_s)[at] for at in below[:num_loaded])
            compute_s = (num_tokens - 100 * (found[0] + num_loaded)) / rates.prefill_tokens_per_s
            times.append(overlapped_s(load_s, compute_s, 32) if num_loaded else compute_s)
        is_worth_it = min(times) <= 0.98 * times[0]
        assert timing.ttft_s == pytest.approx(min(times) if is_worth_it else times[0])
        num_loaded = sum(timing.loaded[1:])
        assert bool(num_loaded) == is_worth_it
        assert list(timing.loaded[1:]) == [below[:num_loaded].count(place) for place in (1, 2)]
        num_loads += is_worth_it
    assert 0 < num_loads < 40


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


def test_what_waits_stays_on_every_tier_that_has_some_of_it() -> None:
    trace = [request(0.0, [1, 2, 3, 4]), *(request(1.0 + at, [10 + at]) for at in range(2)), request(9.0, [1, 2, 3, 4])]
    device, host = CacheSimulator(trace, [4, 1], "lookahead", queue=3).run().tiers
    assert device.num_found + host.num_found == 3


def test_another_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"must be one of lru, .*, min"):
        CacheSimulator([], [1], "lifo")


def test_returning_counts_used_once_as_older_and_less_so_with_age() -> None:
    policy = ReturningPolicy(100)
    middle_s = LONG_S / 2
    for name, age_s, has_returned in [
        ("newest", 0.0, True),
        ("new", 0.0, False),
        ("returned, as new counts", USED_ONCE_S - 1, True),
        ("returned, before new", USED_ONCE_S + 1, True),
        ("middling", middle_s, False),
        ("returned, before middling", middle_s + USED_ONCE_S / 2 + 1, True),
        ("long ago", LONG_S + 1, False),
        ("returned, longer ago", LONG_S + 2, True),
    ]:
        policy.offer(Candidate(name, 1, 5000.0 - age_s, has_returned))
    keys = [policy.choose().candidate.key for _ in range(8)]  # type: ignore[union-attr]
    assert keys == [
        "returned, longer ago", "long ago", "returned, before middling", "middling", "returned, before new", "new",
        "returned, as new counts", "newest",
    ]  # fmt: skip


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


def test_returning_exempts_what_waits() -> None:
    policy = ReturningPolicy(100)
    for key, has_returned in (("once", False), ("returned", True), ("waits", False)):
        policy.offer(Candidate(key, 1, 1.0 if key == "waits" else 2.0, has_returned))
    policy.set_queue(lambda: ["waits", None])
    keys = [policy.choose().candidate.key for _ in range(3)]  # type: ignore[union-attr]
    assert keys == ["once", "returned", "waits"]


def test_returning_admits_what_would_not_go_next() -> None:
    policy = ReturningPolicy(100)
    assert policy.admits(Candidate("any", 1, 0.0))
    policy.offer(Candidate("held", 1, 1000.0, True))
    assert not policy.admits(Candidate("older", 1, 999.0, True))
    assert policy.admits(Candidate("younger", 1, 1001.0, True))
    assert not policy.admits(Candidate("younger, used once", 1, 1001.0))
    policy.offer(Candidate("newer", 1, 1001.0 + USED_ONCE_S, True))
    assert policy.admits(Candidate("newer, used once", 1, 1001.0 + USED_ONCE_S))


def test_a_flood_that_comes_once_does_not_flush_what_returned() -> None:
    session = [request(when_s, [1, 2, 3, 4]) for when_s in (0.0, 5.0, 70.0)]
    flood = [request(10.0 + number, [10 * number, 10 * number + 1]) for number in range(1, 50)]
    trace = [*session[:2], *flood, session[2]]
    assert CacheSimulator(trace, [20], "lru").run().num_found == 4
    assert CacheSimulator(trace, [20], "returning").run().num_found == 8
