"""What a cache tier says of its chunks, as plain values for an answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from mneme.cachetier.admin import Amount, FoundChunk, PinnedPrefix, leading, num_leading_tokens
from mneme.cachetier.store import ChainQuery


def shown_lookup(found: Sequence[FoundChunk], query: ChainQuery) -> dict[str, Any]:
    """Leading tokens by where they are; one that is in several places counts in each."""
    run = leading(found, query.chunk_tokens)
    nodes: dict[str, Counter[str]] = {}
    for each in run:
        nodes.setdefault(each.node, Counter())[each.tier] += each.num_tokens
    return {
        "tokens": num_leading_tokens(run),
        **_by_kind(run),
        "nodes": [{"node": node, "host": sums["host"], "disk": sums["disk"]} for node, sums in sorted(nodes.items())],
        "chunks": [_chunk_shown(each, query) for each in run],
    }


def _by_kind(run: Sequence[FoundChunk]) -> dict[str, int]:
    """Tokens in this node's memory, on its disk, and on other nodes alone."""
    sums: dict[str, int] = {}
    near = {each.place for each in run if each.is_near}
    for tier in ("host", "disk"):
        sums[tier] = sum(each.num_tokens for each in run if each.is_near and each.tier == tier)
    far = {each.place: each.num_tokens for each in run if each.place not in near}
    return sums | {"peer": sum(far.values())}


def _chunk_shown(each: FoundChunk, query: ChainQuery) -> dict[str, Any]:
    start = each.place * query.chunk_tokens
    return {
        "start": start,
        "tokens": each.num_tokens,
        "bytes": each.num_bytes,
        "tier": each.tier,
        "node": each.node,
    }


def shown_pin(pin: PinnedPrefix) -> dict[str, Any]:
    return {
        "id": pin.pin_id,
        "num_tokens": pin.num_tokens,
        "num_chunks": pin.amount.num_chunks,
        "num_bytes": pin.amount.num_bytes,
        "expires_in_s": pin.expires_in_s,
    }


def shown_amount(amount: Amount) -> dict[str, int]:
    return {"chunks": amount.num_chunks, "bytes": amount.num_bytes}
