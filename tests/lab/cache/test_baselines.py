"""Policies that others are compared with: candidates in, victims out."""

from __future__ import annotations

from mneme.lab.cache.baselines import FifoPolicy
from tests.cachetier.policy.test_eviction import offer, order


def test_fifo_goes_by_arrival_whatever_was_used() -> None:
    policy = FifoPolicy(100)
    offer(policy, "first", 2, 1.0)
    offer(policy, "second", 1, 2.0)
    policy.withdraw("first")
    offer(policy, "third", 1, 3.0)
    offer(policy, "first", 3, 9.0)
    assert order(policy) == [("first", 3), ("second", 1), ("third", 1)]
    offer(policy, "third", 1, 10.0)
    offer(policy, "first", 1, 11.0)  # came back: it is the youngest now
    assert order(policy) == [("third", 1), ("first", 1)]


def test_fifo_does_not_know_all_keys_for_ever() -> None:
    policy = FifoPolicy(1)
    for key in ("once", *range(1024), "before"):
        offer(policy, key, 1, 0.0)
        policy.withdraw(key)
    offer(policy, "once", 1, 0.0)
    offer(policy, "before", 1, 0.0)
    assert [key for key, _ in order(policy)] == ["before", "once"]
