"""Decides where a request goes, by pure functions of what the router knows. No Ray, no torch, no clock, no randomness.

    eligible    bounded load: replicas that may take one more request (never none)
    price       of one candidate, lower is better
    cheapest    the eligible candidate that is chosen

The currency is tokens of prefill: prompt tokens that the candidate would have to compute, tokens queued there
before them, and what its running requests cost, expressed in the same unit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mneme.config import check_range
from mneme.router.token_hashes import BLOCK_TOKENS, text_hash


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """Says how affinity is weighed against load."""

    block_tokens: int = BLOCK_TOKENS  # tokens per hashed block
    index_blocks: int = 200_000  # blocks remembered per ingress
    load_factor: float = 1.25  # a replica takes at most this multiple of the mean load...
    load_slack: int = 4  # ...plus this many requests: below a handful, load says nothing
    running_tokens: int = 16  # what one running request costs a new one, in tokens of prefill
    move_tokens: int = 64  # what it costs a session or hint to leave its home, beyond the KV that is known there

    def __post_init__(self) -> None:
        check_range("router.block_tokens", self.block_tokens, 1, 4096)
        check_range("router.index_blocks", self.index_blocks, 1, 10**8)
        check_range("router.load_factor", self.load_factor, 1.0, 100.0)
        check_range("router.load_slack", self.load_slack, 0, 10**6)
        check_range("router.running_tokens", self.running_tokens, 0, 10**6)
        check_range("router.move_tokens", self.move_tokens, 0, 10**9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Carries what the router knows of a replica at this moment, and of a request there."""

    replica_id: str
    running: int = 0  # requests sent there that have not finished
    queued_tokens: int = 0  # prompt tokens sent there whose first output has not come back
    uncached_tokens: int = 0  # prompt tokens of this request that it neither holds nor was sent
    is_away: bool = False  # the request's session or hint has its home elsewhere


def rendezvous_order(key: str, replica_ids: Sequence[str]) -> list[str]:
    """Replicas by preference for `key`: adding or removing one moves no key between the others."""
    return sorted(replica_ids, key=lambda replica: (text_hash(f"{key}\0{replica}"), replica), reverse=True)


def load_bound(total_running: int, num_replicas: int, config: RouterConfig) -> int:
    """The most requests that any replica may have after one more was placed."""
    return math.ceil(config.load_factor * (total_running + 1) / num_replicas) + config.load_slack


def eligible(candidates: Sequence[Candidate], config: RouterConfig) -> list[Candidate]:
    """Candidates that stay within the bound with one more request; at least one always does."""
    bound = load_bound(sum(c.running for c in candidates), len(candidates), config)
    return [c for c in candidates if c.running + 1 <= bound]


def price(candidate: Candidate, config: RouterConfig) -> float:
    """Tokens to compute, tokens queued before them, the running batch, leaving home."""
    leaving = config.move_tokens if candidate.is_away else 0
    running = candidate.running * config.running_tokens
    return candidate.uncached_tokens + candidate.queued_tokens + running + leaving


def cheapest(candidates: Sequence[Candidate], config: RouterConfig) -> Candidate:
    """The eligible candidate with the lowest price; of equal ones the first: they come in rendezvous order."""
    return min(eligible(candidates, config), key=lambda candidate: price(candidate, config))
