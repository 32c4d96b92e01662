"""The eviction policies by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

from mneme.cachetier.policy.eviction import EvictionPolicy
from mneme.cachetier.policy.eviction_fifo import FifoPolicy
from mneme.cachetier.policy.eviction_lfu import LfuPolicy
from mneme.cachetier.policy.eviction_lookahead import LookaheadPolicy
from mneme.cachetier.policy.eviction_lru import LruPolicy
from mneme.cachetier.policy.eviction_pensieve import PensievePolicy
from mneme.cachetier.policy.eviction_returning import ReturningPolicy
from mneme.errors import ConfigError, shown

PolicyName = Literal["lru", "lfu", "pensieve", "lookahead", "returning", "fifo"]


def make_policy(name: PolicyName, clock: Callable[[], float], capacity: int) -> EvictionPolicy:
    """A policy for a tier of `capacity` pages; `clock` gives the seconds that `last_used_s` is in.

    Raises `ConfigError` for another name.
    """
    if name == "pensieve":
        return PensievePolicy(clock)
    if name == "lookahead":
        return LookaheadPolicy(capacity)
    if name == "returning":
        return ReturningPolicy(capacity)
    if name == "fifo":
        return FifoPolicy(capacity)
    if name == "lfu":
        return LfuPolicy()
    if name == "lru":
        return LruPolicy()
    raise ConfigError(f"eviction: must be one of {', '.join(get_args(PolicyName))} (got {shown(name)})")
