"""Eviction policies alone: candidates in, victims out. No forest, no tensors."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest

from mneme.cachetier.policy.eviction import (
    Candidate,
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


@pytest.mark.parametrize("name", ["lru", "pensieve", "lookahead", "returning"])
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
    with pytest.raises(ConfigError, match="must be one of lru, pensieve, lookahead, returning"):
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
