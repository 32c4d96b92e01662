"""Eviction policies alone: candidates in, victims out. No forest, no tensors."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator

import pytest

from mneme.cachetier.policy.eviction import (
    Candidate,
    DensityPolicy,
    EvictionPolicy,
    LookaheadPolicy,
    LruPolicy,
    PensievePolicy,
    make_policy,
)
from mneme.errors import ConfigError

NOW_S = 1000.0


def offer(policy: EvictionPolicy, key: str, num_pages: int, last_used_s: float) -> None:
    policy.offer(Candidate(key, num_pages, last_used_s))


def order(policy: EvictionPolicy) -> list[tuple[object, int]]:
    victims = []
    while (victim := policy.choose()) is not None:
        victims.append((victim.candidate.key, victim.num_pages))
    return victims


@pytest.mark.parametrize("name", ["lru", "pensieve", "lookahead", "returning", "density"])
def test_every_candidate_is_chosen_once_and_a_withdrawn_one_never(name: str) -> None:
    policy = make_policy(name, lambda: NOW_S, 100)  # type: ignore[arg-type]
    assert policy.choose() is None
    for index in range(50):
        offer(policy, f"k{index}", index % 7 + 1, float(index * 37 % 50))
    for index in range(0, 50, 2):
        policy.withdraw(f"k{index}")
    policy.withdraw("unknown")
    for index in range(1, 50, 4):  # again, of another size
        offer(policy, f"k{index}", index % 5 + 1, 3.0)
    assert sorted(key for key, _ in order(policy)) == sorted(f"k{index}" for index in range(1, 50, 2))  # type: ignore[type-var]


def test_another_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="must be one of lru, pensieve, lookahead, returning, density"):
        make_policy("lifo", lambda: NOW_S, 100)  # type: ignore[arg-type]


def test_lru_goes_by_last_use_and_takes_whole_runs() -> None:
    policy = LruPolicy()
    offer(policy, "young", 1, 9.0)
    offer(policy, "old", 5, 1.0)
    offer(policy, "middle", 2, 5.0)
    offer(policy, "old again", 4, 1.0)
    assert order(policy) == [("old", 5), ("old again", 4), ("middle", 2), ("young", 1)]


def test_pensieve_weighs_size_and_idle_time_and_takes_the_trailing_half() -> None:
    policy = PensievePolicy(lambda: NOW_S)
    offer(policy, "long idle, small", 1, NOW_S - 90)
    offer(policy, "short idle, large", 10, NOW_S - 10)
    offer(policy, "middling", 5, NOW_S - 19)
    assert order(policy) == [("short idle, large", 5), ("middling", 3), ("long idle, small", 1)]


def test_pensieve_passes_over_score_0_while_there_is_another() -> None:
    policy = PensievePolicy(lambda: NOW_S)
    offer(policy, "used just now", 1000, NOW_S)
    offer(policy, "small", 1, NOW_S - 0.001)
    assert order(policy) == [("small", 1), ("used just now", 500)]


def test_pensieve_chooses_the_highest_score_of_all() -> None:
    generator = random.Random(5)
    now_s = 0.0
    policy = PensievePolicy(lambda: now_s)
    for step in range(2_000):
        now_s += generator.random()
        offer(policy, f"k{step}", generator.randrange(1, 40), now_s)
        if step % 3 == 0:
            policy.withdraw(f"k{generator.randrange(step + 1)}")
        if step % 2 == 0 and policy.candidates:
            best = max(c.num_pages * (now_s - c.last_used_s) for c in policy.candidates.values())
            victim = policy.choose()
            assert victim is not None
            assert victim.candidate.num_pages * (now_s - victim.candidate.last_used_s) == best


def lookahead(queue: Callable[[], list[str | None]], capacity: int = 100) -> LookaheadPolicy:
    policy = LookaheadPolicy(capacity)
    policy.set_queue(queue)
    for index in range(5):
        offer(policy, f"k{index}", 2, float(index))
    return policy


def test_lookahead_exempts_what_waits_and_then_takes_the_tail_of_the_window_first() -> None:
    policy = lookahead(lambda: ["k0", None, "k3", "unknown", "k2"])
    assert order(policy) == [("k1", 2), ("k4", 2), ("k2", 2), ("k3", 2), ("k0", 2)]


def test_lookahead_counts_the_earliest_consumer_of_a_shared_run() -> None:
    policy = lookahead(lambda: ["k0", "k1", "k2", "k3", "k4", "k1", "k0"])
    assert [key for key, _ in order(policy)] == ["k4", "k3", "k2", "k1", "k0"]


def test_lookahead_sees_as_many_requests_as_runs_of_mean_size_fit_the_tier() -> None:
    policy = lookahead(lambda: ["k0", "k1", "k2"], capacity=4)  # two runs of two pages
    victim = policy.choose()
    assert victim is not None
    assert victim.candidate.key == "k2"  # the third in the queue is past the window: it goes before k3, by its last use


def test_lookahead_keeps_what_fits_memory_and_disk_together() -> None:
    """The tier's queue says how much room there is in all: (C_mem + C_disk) / S_kv requests."""
    policy = lookahead(lambda: ["k0", "k1", "k2"], capacity=4)
    policy.set_queue(lambda: ["k0", "k1", "k2"], 6)
    assert [key for key, _ in order(policy)] == ["k3", "k4", "k2", "k1", "k0"]


def test_lookahead_reads_a_bounded_part_of_the_queue() -> None:
    num_read = 0

    def queue() -> Iterator[str]:
        nonlocal num_read
        for index in range(100_000):
            num_read += 1
            yield f"k{index}"

    policy = LookaheadPolicy(10**9)
    policy.set_queue(queue)
    offer(policy, "k50000", 1, 0.0)
    offer(policy, "k3", 1, 0.0)
    assert [key for key, _ in order(policy)] == ["k50000", "k3"]
    assert num_read <= 2 * 256


def turns(policy: EvictionPolicy, clock: Callable[[float], None], num_places: int, cycle_s: float, num: int) -> int:
    """Play sessions that each ask once in a cycle, all in turn, with room for `num_places`; how often one was there."""
    stored, num_found = set[int](), 0
    for turn in range(num):
        clock(turn * cycle_s / 10)
        session = turn % 10
        if session in stored:
            num_found += 1
            policy.withdraw(session)
        while len(stored - {session}) >= num_places:
            victim = policy.choose()
            assert victim is not None
            stored.discard(victim.candidate.key)  # type: ignore[arg-type]
        stored.add(session)
        policy.offer(Candidate(session, 1, turn * cycle_s / 10))
    return num_found


def test_density_learns_that_in_a_cycle_the_newest_comes_back_last() -> None:
    """Where LRU finds nothing, as each session goes right before it returns."""
    now_s = [0.0]
    policies = {name: make_policy(name, lambda: now_s[0], 100) for name in ("lru", "pensieve", "density")}  # type: ignore[arg-type]
    found = {
        name: turns(policy, lambda time_s: now_s.__setitem__(0, time_s), 5, 60.0, 4000)
        for name, policy in policies.items()
    }
    assert found["lru"] == 0
    assert found["pensieve"] < 10
    assert found["density"] > 1000  # of 2,000 that the best would find


def test_density_is_lru_by_trailing_halves_until_it_has_learned_and_keeps_what_waits() -> None:
    policy = DensityPolicy(lambda: NOW_S, 100)
    for index, age_s in enumerate((90, 5, 40)):
        offer(policy, f"k{index}", 4, NOW_S - age_s)
    assert order(policy) == [("k0", 2), ("k2", 2), ("k1", 2)]
    for index, age_s in enumerate((90, 5, 40)):
        offer(policy, f"k{index}", 4, NOW_S - age_s)
    policy.set_queue(lambda: ["k0", "k2"])
    assert [key for key, _ in order(policy)] == ["k1", "k2", "k0"]


def test_a_run_that_changed_its_size_did_not_come_back() -> None:
    """Density counts as returns only what was withdrawn. Nobody came back: the newest goes in half of all turns."""
    now_s, gone = [0.0], list[object]()
    policy = DensityPolicy(lambda: now_s[0], 10**6)
    for turn in range(1000):
        now_s[0] = float(turn)
        policy.offer(Candidate(turn, 2, now_s[0]))
        policy.offer(Candidate(turn, 3, now_s[0]))
        if turn >= 40:
            victim = policy.choose()
            assert victim is not None
            assert victim.num_pages == 2
            gone.append(victim.candidate.key)
    assert gone[:400] == [*range(400)]
    newest = {key for turn, key in enumerate(gone, 40) if key == turn}
    assert 150 < len(newest) < 350


@pytest.mark.parametrize("others", [0, 1])
def test_after_a_flood_of_prompts_that_nobody_repeats_those_who_return_are_found(others: int) -> None:
    """`others` one-off prompts go on beside each turn. The pool has room for all who return between two turns."""
    now_s, stored, draw, counter = [0.0], dict[object, int](), random.Random(0), itertools.count()
    policy = DensityPolicy(lambda: now_s[0], 1000)

    def turn(session: object, size: int) -> int:
        found = stored.get(session, 0)
        if found:
            policy.withdraw(session)
        while sum(stored.values()) + size - found > 1000:
            victim = policy.choose()
            assert victim is not None
            key = victim.candidate.key
            stored[key] -= victim.num_pages
            if not stored[key]:
                del stored[key]
            else:
                policy.offer(victim.candidate._replace(num_pages=stored[key]))
        stored[session] = size
        policy.offer(Candidate(session, size, now_s[0], found > size // 2))
        return found

    for _ in range(2000):
        now_s[0] += 1.2
        turn(next(counter), 10)
    for _ in range(20):
        found = 0
        for chat in range(40):
            now_s[0] += 1.2 * draw.uniform(0.5, 1.5)
            found += turn(("chat", chat), 10)
            for _ in range(others):
                turn(next(counter), 10)
    assert found > 0.95 * 400
