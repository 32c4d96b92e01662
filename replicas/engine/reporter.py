"""Writes a replica's reports: its load, what its work costs, and which blocks of tokens came and went since the last.

The forest notes pages that changed; what became of them is looked at when a report is due. A block is there where the
page that it ends with is there whole: what is evicted goes from the end. KV that no other prompt can find (of truncated
sessions and blends) is not reported.
"""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Callable
from typing import Any

from mneme.replicas.engine.engine import Engine
from mneme.replicas.engine.stats import backlog_s, num_queued_tokens
from mneme.replicas.forest.tree import DEVICE, HOST, Page, Root
from mneme.replicas.report import BLOCK_TOKENS, ReplicaReport, first_digest, next_digest, pack

REPORT_S = 0.05  # reports are at least so far apart
_ALIVE_S, IDLE_REPORT_S = 1.0, 2.0  # and at most, while there is work, and while there is none
_NEW_COST = 1.05  # costs are told again when one of them has changed by this factor
_NEW_SHARE = 0.1  # or the share of what disks have of what the tier finds, by so much


class Reporter:
    """Belongs to one engine, on its thread."""

    def __init__(self, engine: Engine, epoch: str, node: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        """`node`: whose cache tier the engine uses; empty: it has none."""
        self._engine, self._epoch, self._node, self._clock = engine, epoch, node, clock
        self._seq = -1
        self._told: dict[Page, tuple[bytes, int]] = {}  # each block's name, and its tier
        self._last: tuple[Any, ...] = ()
        self._scales: dict[str, float] = {}
        self._disk_shares: dict[str, float] = {}
        self._due_s = self._sent_s = -math.inf
        self._changed = engine.forest.report_changes()
        self._sink_ids = engine.sink_ids

    def poll(self) -> ReplicaReport | None:
        """Return the next report, if it is time and there is something new to say."""
        now_s = self._clock()
        if now_s < self._due_s:
            return None
        self._due_s = now_s + REPORT_S
        load = self._load()
        has_news = self._has_news(load) or now_s - self._sent_s >= (_ALIVE_S if any(load[1:3]) else IDLE_REPORT_S)
        if not has_news and not self._changed:
            return None
        cost = self._cost(is_all=False)
        came: tuple[list[bytes], list[bytes]] = ([], [])
        gone: list[bytes] = []
        while self._changed:
            page = self._changed.pop()
            block, tier = self._place(page)
            told = self._told.get(page)
            if told is not None and (tier is None or told[0] != block):
                gone.append(told[0])
                del self._told[page]
            if tier is not None and told != (block, tier):
                self._told[page] = block, tier
                came[tier].append(block)
        if not (has_news or cost or gone or any(came)):
            return None
        self._seq, self._sent_s, self._last = self._seq + 1, now_s, load
        return self._report(load, cost, device=pack(came[DEVICE]), host=pack(came[HOST]), gone=pack(gone))

    @property
    def is_waiting(self) -> bool:
        """Return whether there is something to say, for which it is not time yet."""
        return bool(self._changed) or self._has_news(self._load())

    def snapshot(self) -> ReplicaReport:
        """Return all that was told until now, for who has missed some of it; the others still hear what is new."""
        blocks: tuple[list[bytes], list[bytes]] = ([], [])
        for block, tier in self._told.values():
            blocks[tier].append(block)
        device, host = pack(blocks[DEVICE]), pack(blocks[HOST])
        return self._report(self._load(), self._cost(is_all=True), device=device, host=host, is_snapshot=True)

    def _report(self, load: tuple[Any, ...], cost: tuple[float, ...] | None, **changes: Any) -> ReplicaReport:
        queued_tokens, running, waiting, context_tokens, free_page_share = load
        return ReplicaReport(
            epoch=self._epoch,
            seq=self._seq,
            backlog_s=self._backlog_s(queued_tokens, running, context_tokens),
            queued_tokens=queued_tokens,
            running=running,
            waiting=waiting,
            context_tokens=context_tokens,
            free_page_share=free_page_share,
            cost=cost,
            node=self._node,
            sink_ids=self._sink_ids,
            **changes,
        )

    def _has_news(self, load: tuple[Any, ...]) -> bool:
        """Return whether the load is another; streams that go on are none."""
        return load[:3] != self._last[:3]

    def _load(self) -> tuple[int, int, int, int, float]:
        engine = self._engine
        running = engine.scheduler.running
        pages = engine.forest.stats()["pages"]
        return (
            num_queued_tokens(engine),
            len(running),
            engine.limits.num_requests,
            sum(len(each.context) for each in running),
            round((pages["free"] + pages["cached"]) / pages["total"], 3),
        )

    def _backlog_s(self, queued_tokens: int, running: int, context_tokens: int) -> float:
        costs = self._engine.costs
        return math.nan if costs is None else backlog_s(costs, queued_tokens, running, context_tokens)

    def _cost(self, *, is_all: bool) -> tuple[float, ...] | None:
        costs = self._engine.costs
        if costs is None or is_all:
            return None if costs is None else costs.figures()
        mapping = costs.as_mapping()
        scales: dict[str, float] = mapping["scales"]
        shares: dict[str, float] = mapping["disk_shares"]
        known = self._scales
        is_known = scales.keys() == known.keys()
        is_known &= all(abs(share - self._disk_shares.get(kind, 0.0)) < _NEW_SHARE for kind, share in shares.items())
        if is_known and all(1 / _NEW_COST < scale / known[kind] < _NEW_COST for kind, scale in scales.items()):
            return None
        self._scales, self._disk_shares = scales, shares
        return costs.figures()

    def _place(self, page: Page) -> tuple[bytes, int | None]:
        """Name the block that the page ends, and the tier that has it whole; None: none has, or it ends no block."""
        size = len(page.tokens)
        tier = DEVICE if page.filled[DEVICE] == size else HOST if page.filled[HOST] == size else None
        if page.parent is None or not size or page.end % BLOCK_TOKENS or tier is None:
            return b"", None
        block = self._name(page)
        return (b"", None) if block is None else (block, tier)

    def _name(self, page: Page) -> bytes | None:
        """Name the block that ends with a page, and those before it that have none yet; None: it is nobody else's."""
        unnamed: list[tuple[Page, bytes]] = []
        while page.block is None:
            start, end, pieces, first = page.end - BLOCK_TOKENS, page.end, [], page
            while True:
                pieces.append(first.tokens[max(start - first.start, 0) : end - first.start])
                if first.start <= start or first.parent is None or isinstance(first.parent, Root):
                    break
                end, first = first.start, first.parent
            packed = array("i")
            for piece in reversed(pieces):
                packed += piece
            unnamed.append((page, packed.tobytes()))
            before = first.parent
            if before is not None and before.salt != page.salt:  # behind public pages
                return None
            if isinstance(before, Root):
                if before.is_own or first.start:
                    return None
                digest = first_digest(before.salt)
                break
            if before is None or first.start != start:
                return None
            page = before
        else:
            digest = page.block
        for page, tokens in reversed(unnamed):
            page.block = digest = next_digest(digest, tokens)
        return digest
