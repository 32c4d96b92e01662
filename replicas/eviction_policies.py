"""The eviction policies by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from mneme.replicas.eviction import EvictionPolicy
from mneme.replicas.eviction_lfu import LfuPolicy
from mneme.replicas.eviction_lookahead import LookaheadPolicy
from mneme.replicas.eviction_lru import LruPolicy
from mneme.replicas.eviction_pensieve import PensievePolicy

PolicyName = Literal["lru", "lfu", "pensieve", "lookahead"]


def make_policy(name: PolicyName, clock: Callable[[], float], capacity: int) -> EvictionPolicy:
    """A policy for a tier of `capacity` pages; `clock` gives the seconds that `last_used_s` is in."""
    if name == "pensieve":
        return PensievePolicy(clock)
    if name == "lookahead":
        return LookaheadPolicy(capacity)
    return LfuPolicy() if name == "lfu" else LruPolicy()
