"""One ingress's view of its replicas: selects a replica and reserves its load in one step.

Selecting first and reserving later herds: every request that arrives in between sees the same idle replica.
Nothing here awaits, so on an event loop a choice is atomic; and nothing here raises. Every choice is made by the first
of these that can be:

    session  a session that is answering keeps its replica, whatever it costs: only there do its turns wait for each
             other. Every ingress knows its own turns alone
    score    the lowest price (`score.prices`) within the bound on load; of equal ones the first in rendezvous order
    ring     every replica has been silent for long, while it had work or should have reported: the home of the session
             or hint
    p2c      as that, without either: of two, by hash, the one with fewer requests

Where `router.policy` names a rule (`_numbers_by_rule`), that stands in the place of the last three, as "policy".

A replica's load is what it reports and what was reserved here since, or all that was reserved here if it reports
nothing. Figures that are no sensible numbers count as not reported.
"""

from __future__ import annotations

import itertools
import logging
import math
import random
import statistics
import struct
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import numpy as np

from mneme.errors import ConfigError
from mneme.primitives import Bounded
from mneme.replicas.report import BLOCK_TOKENS, ReplicaReport, unpack
from mneme.router.prefix_index import SENT_S, PrefixIndex
from mneme.router.score import (
    F64,
    MINE,
    U64,
    UNKNOWN,
    Asked,
    Flags,
    Loads,
    Prices,
    RouteCandidate,
    RouteMs,
    RouterConfig,
    RouteReason,
    RouteTokens,
    RoutingPolicy,
    ShownRoute,
    alike,
    figures_of,
    load_bound,
    prices,
    rendezvous,
    replica_hashes,
    token_s,
)
from mneme.router.token_hashes import block_hashes

logger = logging.getLogger(__name__)

INDEX_BLOCKS = 1_000_000  # that an ingress remembers, of replicas and of nodes each
SILENT_S = 5.0  # a replica with work that has said nothing for so long: a step takes very long, or its reports are lost
_MANY = 1e6  # requests: more than any replica has
_TRANSIT_S = 0.02  # a report that comes may have been written before what was admitted since then
_RESEND_S, _NUM_RESENT = SENT_S / 2, 256  # blocks with each choice or report: 50 us
_MAX_LATE = 256  # reports that wait for a snapshot
_NODE_S = 600.0  # a node that no replica has named for so long is gone; links may be lost for a while
_MAX_PRIVATE = 50_000  # sessions
_NUM_LATE = 32  # first tokens of a replica from which its overhead is learned
_LATE_LOADS_S = 60.0  # how long it is known what loads took longer: else a bad moment would end all loads for ever
_MAX_ERROR = 10.0  # of one prediction, in the sum of relative errors

_Session = tuple[str, str]  # (salt, session id)


# Columns of what is known of each replica; its figures stand behind them.
_RUNNING = 0  # requests reserved here
_QUEUED_NS = 1  # prefill reserved here, without a first token; whole numbers, so that nothing is left of sums
_FRESH_NS = 2  # of that, what the replica's last report cannot know
_CONTEXT = 3  # tokens of what was reserved here
_REPORTED_S = 4  # when it reported last; NaN: it has not
_SAID_QUEUE_S, _SAID_RUNNING, _SAID_CONTEXT = 5, 6, 7  # what it said
_OVERHEAD_S = 8  # that first tokens took beyond what was predicted of them, in the median
_NODE = 9  # its number; 0: it has not said where it is
_SILENT = 10  # 1: its reports are lost
_FIGURES = 11


class _Load:
    """Holds what is known of one replica in one life: of its process, and of the ingress's link to it."""

    def __init__(self) -> None:
        # A row of the table, once it is there.
        self.row = np.array([0.0] * _REPORTED_S + [math.nan] + [0.0] * (_FIGURES - _REPORTED_S - 1) + [*UNKNOWN])
        self.fresh: dict[Reservation, None] = {}
        self._late_s = deque[float](maxlen=_NUM_LATE)
        self.order = _ReportOrder()
        self.node = ""
        self.sink_ids: tuple[int, ...] = ()

    def reserve(self, reservation: Reservation) -> None:
        self._add(reservation._running, reservation._work_ns, reservation._context_tokens)
        self.row[_FRESH_NS] += reservation._work_ns
        self.fresh[reservation] = None

    def leave_queue(self, reservation: Reservation) -> None:
        self._add(0, -reservation._work_ns, 0)
        if reservation in self.fresh:
            self._know(reservation)

    def release(self, reservation: Reservation) -> None:
        self._add(-reservation._running, 0, -reservation._context_tokens)

    def add_overhead(self, late_s: float) -> None:
        """A first token took so much longer than its price, or less."""
        self._late_s.append(late_s)
        self.row[_OVERHEAD_S] = max(statistics.median(self._late_s), 0.0)

    def apply(self, report: ReplicaReport, now_s: float) -> None:
        for reservation in [each for each in self.fresh if each._admitted_s <= now_s - _TRANSIT_S]:
            self._know(reservation)
        row, self.node, self.sink_ids = self.row, report.node, report.sink_ids
        if report.cost is not None:
            try:
                row[_FIGURES:] = figures_of(report.cost)
            except ConfigError as error:
                logger.warning("a replica's costs are not taken: %s", error)
        backlog_s = report.backlog_s
        if not 0 <= backlog_s < math.inf:
            backlog_s = max(report.queued_tokens, 0) * float(token_s(row[_FIGURES:]))
        said = backlog_s, max(report.running + report.waiting, 0), max(report.context_tokens, 0)
        row[_REPORTED_S : _SAID_CONTEXT + 1] = now_s, *said
        row[_SILENT] = 0

    def _know(self, reservation: Reservation) -> None:
        del self.fresh[reservation]
        self.row[_FRESH_NS] -= reservation._work_ns

    def _add(self, running: int, queued_ns: int, context_tokens: int) -> None:
        self.row[_RUNNING] += running
        self.row[_QUEUED_NS] += queued_ns
        self.row[_CONTEXT] += context_tokens


class _ReportOrder:
    """Puts the reports of one replica in order: a gap, or another epoch, is closed by a snapshot."""

    def __init__(self) -> None:
        self.epoch: str | None = None  # None: nothing is known, and a snapshot is needed
        self._seq = -1
        self._late: dict[int, ReplicaReport] = {}
        self._past: set[str] = set()

    @property
    def is_whole(self) -> bool:
        return self.epoch is not None and not self._late

    def in_order(self, report: ReplicaReport) -> list[ReplicaReport]:
        """Return what follows, in order; a snapshot comes first in it."""
        if report.epoch in self._past or (report.epoch == self.epoch and report.seq <= self._seq):
            return []
        if report.epoch == self.epoch and report.seq == self._seq + 1 and not (self._late or report.is_snapshot):
            self._seq += 1
            return [report]  # as almost all
        follows: list[ReplicaReport] = []
        if report.is_snapshot:
            if self.epoch not in (None, report.epoch):
                self._past.add(str(self.epoch))
            self.epoch, self._seq, follows = report.epoch, report.seq, [report]
            self._late = {seq: each for seq, each in self._late.items() if each.epoch == report.epoch}
        elif len(self._late) < _MAX_LATE:
            self._late[report.seq] = report
        while self.epoch is not None and self._seq + 1 in self._late:
            if self._late[self._seq + 1].epoch != self.epoch:
                break
            self._seq += 1
            follows.append(self._late.pop(self._seq))
        self._late = {seq: each for seq, each in self._late.items() if each.epoch != self.epoch or seq > self._seq}
        return follows


class Route(NamedTuple):
    """Keeps how a choice was made, to be explained."""

    reason: RouteReason
    chosen: int
    replica_ids: tuple[str, ...]
    asked: Asked
    prices: Prices | None  # None: they were not asked for

    @property
    def ttft_s(self) -> float:
        return 0.0 if self.prices is None else float(self.prices.ttft[self.chosen])

    @property
    def found_tokens(self) -> int:
        """Return how much of the prompt the chosen one is thought to have, or to bring."""
        asked, chosen = self.asked, self.chosen
        return int(asked.matched[chosen] + asked.brought[chosen] + asked.reused[chosen])

    @property
    def elsewhere_tokens(self) -> int:
        """Return the most of the prompt that another candidate is thought to have, or to bring."""
        found = self.asked.matched + self.asked.brought
        return int(np.delete(found, self.chosen).max(initial=0))

    def as_json(self) -> ShownRoute:
        """Show every candidate's terms in milliseconds, the cheapest first."""
        candidates: list[RouteCandidate] = []
        for index, replica_id in enumerate(self.replica_ids):
            tokens = {name: int(getattr(self.asked, name)[index]) for name in RouteTokens.__annotations__}
            terms = () if self.prices is None else RouteMs.__annotations__
            ms = {name: round(float(getattr(self.prices, name)[index]) * 1e3, 3) for name in terms}
            candidates.append({"replica": replica_id, "tokens": cast(RouteTokens, tokens), "ms": cast(RouteMs, ms)})
        candidates.sort(key=lambda each: each["ms"].get("total", 0.0))
        return {"reason": self.reason, "replica": self.replica_ids[self.chosen], "candidates": candidates}


@dataclass(slots=True, eq=False)
class Reservation:
    """Load that a chosen replica carries until its release; `started` and `release` may be called twice."""

    replica_id: str
    matched_tokens: int
    route: Route
    _load: _Load
    _running: int
    _work_ns: int
    _context_tokens: int
    _reserved_s: float
    chain: Sequence[int]  # hashes of the prompt's blocks
    _chooser: ReplicaChooser
    _session: _Session | None
    _on_release: Callable[[Reservation], None] | None = None  # of a session's turn
    _is_started: bool = False
    _admitted_s: float = math.inf

    def admitted(self) -> None:
        """The replica has taken the request: what it reports from now on counts it."""
        self._admitted_s = self._chooser.clock()

    def started(self, cached_tokens: int | None = None, *, is_private: bool = False) -> None:
        """The first output came back: the prompt is no longer queued.

        cached_tokens  of it, that were not computed; None: not known
        is_private     its KV is its session's alone, and in no report
        """
        if self._is_started:
            return
        if cached_tokens is not None:
            self._chooser._learn_from_first(self, cached_tokens, is_private)
        self._leave_queue()

    def release(self) -> None:
        """The request has finished, was refused or was aborted."""
        self._leave_queue()
        self._load.release(self)
        self._running = self._context_tokens = 0
        if self._on_release is not None:
            self._on_release(self)
            self._on_release = None

    def _leave_queue(self) -> None:
        self._is_started = True
        self._load.leave_queue(self)
        self._work_ns = 0
        self._chooser._unstarted.pop(self, None)


@dataclass(slots=True)
class ReplicaChooser:
    """Candidates, their load, and the prefixes that they hold."""

    config: RouterConfig
    clock: Callable[[], float] = time.monotonic
    rng: random.Random = field(default_factory=random.Random)  # of the rule `random`
    index_blocks: int = INDEX_BLOCKS
    decisions: Counter[str] = field(init=False, default_factory=Counter)  # by reason
    # Of requests that were answered: seconds to the first token, and tokens of prompts that were not computed.
    accuracy: defaultdict[str, float] = field(init=False, default_factory=lambda: defaultdict(float))
    _index: PrefixIndex = field(init=False)
    _in_tier: PrefixIndex = field(init=False)  # by node
    _named_s: dict[str, float] = field(init=False, default_factory=dict)  # when a replica last said that it is there
    _node_numbers: dict[str, int] = field(init=False)
    _loads: dict[str, _Load] = field(init=False, default_factory=dict)
    _table: F64 = field(init=False)  # a row for each of them
    _figures: F64 | None = field(init=False)  # of the table, made alike; None: to be made when they are needed
    _usual: F64 = field(init=False)  # their mean
    _hashes: U64 = field(init=False)
    _turns: dict[_Session, list[Reservation]] = field(init=False, default_factory=dict)  # in flight, in order
    _private: Bounded[_Session, tuple[_Load, int]] = field(init=False)  # tokens there that no report can have
    _late_loads: deque[tuple[float, float]] = field(init=False, default_factory=lambda: deque(maxlen=_NUM_LATE))
    _unstarted: dict[Reservation, None] = field(init=False, default_factory=dict)
    _resent_s: float = field(init=False, default=0.0)
    _to_resend: deque[Reservation] = field(init=False, default_factory=deque)
    _unique: itertools.count[int] = field(init=False, default_factory=itertools.count)

    def __post_init__(self) -> None:
        self._index = PrefixIndex(self.index_blocks)
        self._in_tier = PrefixIndex(self.index_blocks)
        self._private = Bounded(_MAX_PRIVATE)
        self.set_replicas(())

    def set_replicas(self, replica_ids: Collection[str]) -> None:
        """Replicas that may be chosen from now on; those that are gone leave no trace."""
        self._loads = {r: self._loads.get(r) or _Load() for r in replica_ids}
        self._table = np.array([load.row for load in self._loads.values()]).reshape(-1, _FIGURES + len(UNKNOWN))
        self._node_numbers = {"": 0}
        for load, row in zip(self._loads.values(), self._table, strict=True):
            load.row = row
            self._number_node(load)
        self._figures = None
        self._hashes = replica_hashes(list(self._loads))
        self._index.retain(self._loads)
        now_s = self.clock()
        for node in [node for node, named_s in self._named_s.items() if abs(now_s - named_s) > _NODE_S]:
            self._in_tier.forget(node)
            del self._named_s[node]

    def forget_prefixes(self, replica_id: str) -> None:
        """The replica restarted: it is a candidate, and holds nothing."""
        self._index.forget(replica_id)

    def apply_report(self, replica_id: str, report: ReplicaReport) -> bool:
        """Follow what a replica says; False: something is missing, and a snapshot is to be asked for."""
        load = self._loads.get(replica_id)
        if load is None:
            return True
        self._send_again(self.clock())
        for each in load.order.in_order(report):
            try:
                if each.cost is not None:
                    self._figures = None
                load.apply(each, self.clock())
                self._number_node(load)
                self._named_s[each.node] = self.clock()
                self._follow(replica_id, each)
            except Exception:  # whatever a replica says, requests are routed
                logger.exception("replica_id=%s a report could not be taken", replica_id)
                load.order.epoch = None  # what it said is lost
        return load.order.is_whole

    def mark_silent(self, replica_id: str) -> None:
        """Its reports are lost: until it makes one again it is not taken for idle, whatever it said last."""
        load = self._loads.get(replica_id)
        if load is not None:
            load.row[_SILENT] = 1
            if math.isnan(load.row[_REPORTED_S]):
                load.row[_REPORTED_S] = self.clock() - SILENT_S

    def running(self, replica_id: str) -> int:
        """Requests reserved on this replica."""
        load = self._loads.get(replica_id)
        return int(load.row[_RUNNING]) if load else 0

    def is_answering(self, session_id: str | None, *, salt: str = "") -> bool:
        """Return whether a turn of this session is in flight on a replica that is there."""
        return session_id is not None and self._answering((salt, session_id)) is not None

    def is_held(self, token_ids: Sequence[int], *, salt: str = "") -> bool:
        """Return whether a replica has half of this prompt or more."""
        chain = self._chain(token_ids, salt)
        return 2 * max(self._index.match(chain, self.clock()).blocks.values(), default=0) >= max(len(chain), 1)

    def sink_ids(self) -> tuple[int, ...]:
        """Return the tokens behind which replicas compute documents apart, as they say."""
        return next((load.sink_ids for load in self._loads.values() if load.sink_ids), ())

    def select_and_reserve(
        self,
        token_ids: Sequence[int],
        *,
        salt: str = "",
        session_id: str | None = None,
        affinity: str | None = None,
        num_choices: int = 1,
        exclude: Collection[str] = (),
        documents: Sequence[Sequence[int]] = (),
    ) -> Reservation | None:
        """Choose the session's replica, else the cheapest, and reserve it; None when there is no candidate.

        affinity   without a session: requests with the same go to one replica, unless load or KV says otherwise.
                   Nothing is remembered of it: a hash says which, in every ingress the same
        documents  prompts with whose KV documents of this one can be reused in place
        """
        replica_ids, table, hashes = tuple(self._loads), self._table, self._hashes
        if exclude:
            kept = [index for index, r in enumerate(replica_ids) if r not in exclude]
            replica_ids, table, hashes = tuple(replica_ids[index] for index in kept), table[kept], hashes[kept]
        if not replica_ids:
            return None
        now_s = self.clock()
        chains = tuple(self._chain(ids, salt) for ids in (token_ids, *documents))
        session = None if session_id is None else (salt, session_id)
        shared = f"s{session[1]}" if session else f"a{affinity}" if affinity else None
        # A prompt without one that comes through several ingresses at once is computed once, too.
        has_home = bool(chains[0]) and self.config.policy == MINE
        own = f"p{chains[0][0]}" if has_home else f"r{next(self._unique)}"
        preferences = rendezvous(shared or own, hashes)
        is_away = np.ones(len(replica_ids), bool) if shared else np.zeros(len(replica_ids), bool)
        is_away[preferences.argmax()] = False
        running, age_s = table[:, _RUNNING], np.maximum(now_s - table[:, _REPORTED_S], 0)  # NaN stays
        is_silent = (age_s > SILENT_S) & ((running > 0) | (table[:, _SILENT] > 0))
        is_eligible = running + 1 <= load_bound(int(running.sum()), len(replica_ids))
        priced: Prices | None = None
        try:
            self._send_again(now_s)
            asked = self._asked(len(token_ids), chains, replica_ids, table[:, _NODE], is_away, now_s)
            self._add_private(session, asked, replica_ids)
            if self._figures is None:
                self._figures = alike(self._table[:, _FIGURES:])
                self._usual = self._figures.mean(axis=0, keepdims=True)
            figures = self._figures[kept] if exclude else self._figures
            loads = _loads_of(table, figures, self._usual, age_s, is_silent, self._late_load_s(now_s))
            priced = prices(loads, asked)
        except Exception:
            logger.exception("requests are routed without prices")
            nothing = np.zeros(len(replica_ids))
            asked = Asked(len(token_ids), nothing, nothing, nothing, nothing, nothing, is_away)
        answering = self._answering(session)
        if answering in replica_ids:
            reason: RouteReason = "session"
            chosen = replica_ids.index(answering)
        elif self.config.policy != MINE:
            requests = np.fmax(running, table[:, _SAID_RUNNING]) + is_silent * _MANY
            numbers = _numbers_by_rule(self.config.policy, requests, self.rng)
            reason, chosen = "policy", _first_of_least(numbers, preferences)
        elif priced is not None and not is_silent.all():
            reason, chosen = "score", _first_of_least(np.where(is_eligible, priced.total, np.inf), preferences)
        else:
            order = [int(i) for i in np.argsort(preferences)[::-1] if is_eligible[i]]
            reason, chosen = ("ring", order[0]) if shared else ("p2c", min(order[:2], key=lambda i: running[i]))
        self.decisions[reason] += 1
        route = Route(reason, chosen, replica_ids, asked, priced)
        return self._reserve(route, chains, num_choices, session, now_s)

    def record(self, token_ids: Sequence[int], replica_id: str, *, salt: str = "") -> None:
        """`replica_id` holds the KV of these tokens now."""
        if replica_id in self._loads:
            self._send(self._chain(token_ids, salt), replica_id, self.clock())

    def _reserve(
        self,
        route: Route,
        chains: tuple[Sequence[int], ...],
        num_choices: int,
        session: _Session | None,
        now_s: float,
    ) -> Reservation:
        replica_id = route.replica_ids[route.chosen]
        load, asked, priced = self._loads[replica_id], route.asked, route.prices
        work_s = 0.0 if priced is None else float(priced.compute[route.chosen] + priced.load[route.chosen])
        reservation = Reservation(
            replica_id=replica_id,
            matched_tokens=min(route.found_tokens, asked.num_tokens),
            route=route,
            _load=load,
            _running=num_choices,
            _work_ns=round(work_s * 1e9),
            _context_tokens=asked.num_tokens,
            _reserved_s=now_s,
            chain=chains[0],
            _chooser=self,
            _session=session,
        )
        load.reserve(reservation)
        self._unstarted[reservation] = None
        self._send(chains[0], replica_id, now_s)
        if session is not None:
            self._add_turn(session, reservation)
        return reservation

    def _asked(
        self,
        num_tokens: int,
        chains: Sequence[Sequence[int]],
        replica_ids: Sequence[str],
        node_numbers: F64,
        is_away: Flags,
        now_s: float,
    ) -> Asked:
        found = self._index.match(chains[0], now_s)
        matched = np.array([found.blocks.get(r, 0) for r in replica_ids]) * float(BLOCK_TOKENS)
        in_host, in_node, at_peers, reused = np.zeros((4, len(replica_ids)))
        if found.host_blocks:
            in_host = np.array([found.host_blocks.get(r, 0) for r in replica_ids]) * float(BLOCK_TOKENS)
            matched -= in_host
        if len(self._in_tier):
            nodes = self._in_tier.match(chains[0], now_s).blocks
            if nodes:
                by_node = np.array([nodes.get(node, 0) for node in self._node_numbers]) * float(BLOCK_TOKENS)
                own = by_node[node_numbers.astype(int)]
                best = (node_numbers > 0) * float(max(nodes.values()) * BLOCK_TOKENS)
                in_node = np.maximum(own - matched - in_host, 0)
                at_peers = np.maximum(best - matched - in_host - in_node, 0)
        for chain in chains[1:]:
            blocks = self._index.match(chain, now_s).blocks
            if blocks:
                reused = reused + np.array([blocks.get(r, 0) for r in replica_ids]) * float(BLOCK_TOKENS)
        left = np.maximum(num_tokens - matched - in_host - in_node - at_peers, 0)
        return Asked(num_tokens, matched, in_host, in_node, at_peers, np.minimum(reused, left), is_away)

    def _add_private(self, session: _Session | None, asked: Asked, replica_ids: Sequence[str]) -> None:
        """Count what a session has that was truncated, or has documents in it: only its own replica finds that."""
        load, num_tokens = self._private.get(session, (None, 0)) if session else (None, 0)
        for index, replica_id in enumerate(replica_ids if load is not None else ()):
            if self._loads[replica_id] is load:
                asked.matched[index] = max(asked.matched[index], min(num_tokens, asked.num_tokens))
                asked.in_host[index] = asked.in_node[index] = asked.at_peers[index] = asked.reused[index] = 0

    def _number_node(self, load: _Load) -> None:
        load.row[_NODE] = self._node_numbers.setdefault(load.node, len(self._node_numbers))

    def _follow(self, replica_id: str, report: ReplicaReport) -> None:
        """Let the index have what a report says."""
        if not (report.device or report.host or report.gone or report.is_snapshot):
            return
        if report.is_snapshot:
            self._index.forget(replica_id)
        device = unpack(report.device)
        self._index.update(replica_id, device=device, host=unpack(report.host), gone=unpack(report.gone))
        if report.node and device:  # what is computed is saved
            self._in_tier.update(report.node, device=device)

    def _send(self, chain: Sequence[int], replica_id: str, now_s: float) -> None:
        """Note what a replica will have: until it says so itself, if it says such things."""
        if self._loads[replica_id].order.epoch is not None:
            self._index.record_sent(chain, replica_id, now_s)
        else:
            self._index.record(chain, replica_id)

    def _send_again(self, now_s: float) -> None:
        """Keep what waits in long queues from being forgotten, some with each choice; the clock may jump."""
        if not self._to_resend and abs(now_s - self._resent_s) >= _RESEND_S:
            self._resent_s = now_s
            self._to_resend.extend(self._unstarted)
        left = _NUM_RESENT
        while self._to_resend and left > 0:
            each = self._to_resend.popleft()
            if not each._is_started and self._loads.get(each.replica_id) is each._load:
                self._send(each.chain, each.replica_id, now_s)
                left -= len(each.chain)

    def _learn_from_first(self, reservation: Reservation, cached_tokens: int, is_private: bool) -> None:
        """Compare what was predicted with what came."""
        session, num_tokens = reservation._session, reservation.route.asked.num_tokens
        if session is not None and (is_private or session in self._private):
            if is_private or 2 * cached_tokens >= num_tokens:
                self._private[session] = reservation._load, num_tokens
            else:  # it began anew
                del self._private[session]
        route, actual_s = reservation.route, max(self.clock() - reservation._reserved_s, 1e-9)
        missing = route.found_tokens - cached_tokens
        brought = route.asked.brought[route.chosen]
        if route.prices is not None and route.reason != "session":  # that waits for the turn before
            priced_s = route.ttft_s - float(route.prices.overhead[route.chosen])
            if brought:
                late_s = actual_s - route.ttft_s + float(route.prices.late_load[route.chosen])
                self._late_loads.append((self.clock(), late_s))
            else:
                reservation._load.add_overhead(actual_s - priced_s)
        for name, amount in (
            ("count", 1),
            ("predicted_s", route.ttft_s),
            ("actual_s", actual_s),
            ("later", actual_s > route.ttft_s),
            ("relative_error", min(abs(route.ttft_s - actual_s) / actual_s, _MAX_ERROR)),
            ("predicted_tokens", route.found_tokens),
            ("found_tokens", cached_tokens),
            ("missing_tokens", max(missing, 0)),
            ("surplus_tokens", max(-missing, 0)),
        ):
            self.accuracy[name] += amount
        if brought and missing > BLOCK_TOKENS:  # the tier has lost it, as far as is known
            self._in_tier.drop(reservation.chain[cached_tokens // BLOCK_TOKENS :])

    def _late_load_s(self, now_s: float) -> float:
        while self._late_loads and not 0 <= now_s - self._late_loads[0][0] <= _LATE_LOADS_S:
            self._late_loads.popleft()
        return max(statistics.median(late_s for _, late_s in self._late_loads), 0.0) if self._late_loads else 0.0

    def _answering(self, session: _Session | None) -> str | None:
        """The replica where the session's latest turn is in flight; a replica that came back is another one."""
        turns = self._turns.get(session, ()) if session else ()
        alive = (t.replica_id for t in reversed(turns) if self._loads.get(t.replica_id) is t._load)
        return next(alive, None)

    def _add_turn(self, session: _Session, reservation: Reservation) -> None:
        def forget(released: Reservation) -> None:
            turns = self._turns[session]
            turns.remove(released)
            if not turns:
                del self._turns[session]

        reservation._on_release = forget
        self._turns.setdefault(session, []).append(reservation)

    def _chain(self, token_ids: Sequence[int], salt: str) -> list[int]:
        try:
            return block_hashes(token_ids, salt=salt)
        except (struct.error, TypeError):  # no ids of any vocabulary: the engine says so
            return []


def _numbers_by_rule(policy: RoutingPolicy, running: F64, rng: random.Random) -> F64:
    """Return a number for each candidate, of which the smallest is chosen.

    random        any of them
    least-loaded  the fewest requests, by what a replica reports or what was reserved here
    hash          all are alike: the home of the session or hint, whatever it has to do; other requests go to any
    """
    if policy == "random":
        return np.array([rng.random() for _ in running])
    return running if policy == "least-loaded" else np.zeros_like(running)


def _first_of_least(numbers: F64, preferences: U64) -> int:
    """Return the candidate with the smallest number, of equal ones the first in rendezvous order."""
    best = np.flatnonzero(numbers == numbers.min())
    return int(best[preferences[best].argmax()])


def _loads_of(table: F64, figures: F64, usual: F64, age_s: F64, is_silent: Flags, late_load_s: float) -> Loads:
    """Say what replicas have to do: what they report, less what they have done since, and what was reserved since."""
    said_s = np.maximum(table[:, _SAID_QUEUE_S] - age_s, 0) + is_silent * age_s + table[:, _FRESH_NS] / 1e9
    return Loads(
        figures,
        usual,
        np.where(np.isnan(age_s), table[:, _QUEUED_NS] / 1e9, said_s),
        np.maximum(table[:, _RUNNING], table[:, _SAID_RUNNING]),
        np.maximum(table[:, _CONTEXT], table[:, _SAID_CONTEXT]),
        table[:, _OVERHEAD_S],
        late_load_s,
    )
