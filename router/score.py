"""Decides where a request goes, by pure functions of what the router knows. No Ray, no torch, no clock, no randomness.

    load_bound   the most requests that a replica may have after one more was placed
    prices       what each candidate costs, term by term, in seconds
    rendezvous   preferences for a key that move little when replicas come and go

The currency is predicted time to the first token at each candidate, and what an answer there takes from others. All of
it is done for all candidates at once, in arrays: a choice among a hundred takes tens of microseconds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

import numpy as np
import numpy.ma  # the first median would import it, and a request wait 10 ms for that
from numpy.typing import NDArray
from typing_extensions import TypedDict  # pydantic's condition before Python 3.12

from mneme.errors import ConfigError
from mneme.router.token_hashes import text_hash

F64 = NDArray[np.float64]
U64 = NDArray[np.uint64]
Flags = NDArray[np.bool_]
MINE: Final = "mneme"  # predicted seconds: `prices`
RoutingPolicy = Literal["mneme", "random", "least-loaded", "hash"]

# The bound on load, in times of the mean, and requests above that: below a handful, load says nothing.
LOAD_FACTOR, LOAD_SLACK = 1.25, 4
_RUNNING_TOKENS = 16  # what one running request costs a new one, in tokens of prefill
_MOVE_TOKENS = 256  # what it costs a session, hint or prefix to leave its home, beyond the KV that is known there
# How often a request's prefill and loads are paid for again, by others who wait: docs/decisions/routing.md has what
# 0.25 and 4 did instead.
_WORK_WEIGHT = 2.0
_CHUNK_TOKENS = 256  # that an edge brings at once
_RECOMPUTED_SHARE = 0.15  # of a document that is reused in place
_MAX_S = 1e6  # of any term
# Columns of a replica's figures: three terms each of prefill and decode, as calibrated, and of what is brought from its
# host tier, its node's cache and other nodes'; a step's rows, bytes of a token's KV, and what prefill and decode take
# in times of their calibration.
_PREFILL, _DECODE, _HOST, _NODE, _PEER, _STEP_ROWS, _KV_BYTES, _SCALES = 0, 3, 6, 9, 12, 15, 16, 17
# SplitMix64's last steps.
_SPLIT_MIX = [(np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)), (np.uint64(27), np.uint64(0x94D049BB133111EB))]
_LAST_SHIFT = np.uint64(31)
# Until a replica says what its work costs: proportional to tokens, nothing for what is loaded.
UNKNOWN = np.array([0, 1e-4, 0, *[0.0] * 12, 2048, 1, math.nan, math.nan])


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """Says by what rule replicas are chosen."""

    policy: RoutingPolicy = MINE  # another: by that rule alone, as a measure of what this one is worth


class Loads(NamedTuple):
    """Says what each candidate has to do already."""

    figures: F64  # [candidates, 19], as `figures_of`, made `alike`
    usual: F64  # [1, 19]: the mean of all replicas' figures
    backlog_s: F64
    running: F64  # requests
    context_tokens: F64  # that they see
    overhead_s: F64  # that first tokens took beyond what was predicted of them
    late_load_s: float = 0.0  # and beyond that, on any replica, where KV had to be brought


class Asked(NamedTuple):
    """Says what a request finds at each candidate, in tokens."""

    num_tokens: int
    matched: F64  # of its beginning, on the device
    in_host: F64  # in the engine's host tier
    in_node: F64  # in the node's cache, memory or disk
    at_peers: F64  # in other nodes' caches, likewise
    reused: F64  # of documents that stand further behind
    is_away: Flags  # its session or hint has its home elsewhere; a prefix has it where most of it is

    @property
    def brought(self) -> F64:
        return self.in_host + self.in_node + self.at_peers


class Prices(NamedTuple):
    """Holds seconds for each candidate. The first six are the predicted time to the first token.

    `overhead` is not weighed: a replica that nobody is sent to would keep what was learned of it in a bad moment.
    """

    queue: F64  # until what is there is prefilled
    compute: F64  # its tokens that nothing has
    load: F64  # what of its KV has to be brought takes longer than that
    late_load: F64  # what loads have been seen to take besides
    decode: F64  # rows of running requests in the same steps
    overhead: F64  # the way there and back, and the step that is running
    batch: F64  # steps behind the first token are longer by those that run
    work: F64  # others wait for it, also for a load that this request does not wait for
    move: F64

    @property
    def ttft(self) -> F64:
        return self._weighed + self.overhead

    @property
    def total(self) -> F64:
        return self._weighed + self.batch + self.work + self.move

    @property
    def _weighed(self) -> F64:
        return self.queue + self.compute + self.load + self.late_load + self.decode


RouteReason = Literal["session", "score", "ring", "p2c", "policy"]


class RouteTokens(TypedDict):
    """Tokens of the prompt that a replica was thought to have: by their place, and of documents to be reused."""

    matched: int
    in_host: int
    in_node: int
    at_peers: int
    reused: int


class RouteMs(TypedDict, total=False):
    """Milliseconds that were predicted: `ttft` is the sum of the first six, `total`, which is weighed, of all terms
    but `overhead`."""

    queue: float
    compute: float
    load: float
    late_load: float
    decode: float
    overhead: float
    batch: float
    work: float
    move: float
    ttft: float
    total: float


class RouteCandidate(TypedDict):
    replica: str
    tokens: RouteTokens
    ms: RouteMs  # empty: prices were not asked for


class ShownRoute(TypedDict):
    """A choice among replicas, the cheapest first."""

    reason: RouteReason
    replica: str
    candidates: list[RouteCandidate]


def figures_of(cost: Sequence[float]) -> F64:
    """Check what a replica says of its costs (`CostModel.figures`); raises `ConfigError`."""
    try:
        figures = np.array(cost, np.float64)
    except (TypeError, ValueError) as error:  # of a replica of another version
        raise ConfigError("costs: must be numbers") from error
    is_sound = figures.shape == UNKNOWN.shape and np.isfinite(figures).all() and (figures >= 0).all()
    if not (is_sound and figures[_PREFILL:_DECODE].any() and figures[_STEP_ROWS]):
        raise ConfigError("costs: must be finite, and a prefill must take time")
    return figures


def token_s(figures: F64) -> F64:
    """Return what a step's row costs, by replica: with its share of the step's constant part."""
    return figures[..., _PREFILL + 1] + figures[..., _PREFILL] / figures[..., _STEP_ROWS]


def alike(figures: F64) -> F64:
    """Have all replicas' steps take, in times of their calibrations, what they take in the median.

    That is a moment's, mostly of what else their machine did: a replica that measured its last work on a busy machine
    would get no more, and so never know better. One that is slow for longer shows it by what waits there.
    """
    scales = figures[:, _SCALES:]
    known = scales[~np.isnan(scales[:, 0])]
    if not len(known):
        return figures
    figures = figures.copy()
    prefill, decode = np.median(known, axis=0)
    figures[:, _PREFILL:_DECODE] *= np.where(np.isnan(scales[:, :1]), 1.0, prefill)
    figures[:, _DECODE:_HOST] *= np.where(np.isnan(scales[:, 1:]), 1.0, decode)
    return figures


def prices(loads: Loads, asked: Asked) -> Prices:
    """Price all candidates."""
    figures, usual = loads.figures, loads.usual
    behind = asked.num_tokens - asked.matched
    brought = asked.brought
    anew = np.maximum(behind - brought - (1 - _RECOMPUTED_SHARE) * asked.reused, 1)
    compute_s = _prefill_s(figures, anew, asked.num_tokens - anew)
    load_s = np.zeros_like(compute_s)
    if brought.any():
        bringing_s = _bringing_s(figures, asked)
        all_anew_s = _prefill_s(figures, anew + brought, asked.num_tokens - anew - brought)
        load_s = np.clip(bringing_s - compute_s, 0, np.maximum(all_anew_s - compute_s, 0))  # else it is computed
    num_steps = np.ceil(anew / figures[:, _STEP_ROWS])
    decode_s = num_steps * (loads.running * figures[:, _DECODE + 1] + loads.context_tokens * figures[:, _DECODE + 2])
    row_s = token_s(figures)
    # What it costs others is taken to be the same wherever it is done: else the replica whose calibration came out best
    # would be ahead by all of its weight too.
    work_s = _prefill_s(usual, anew, asked.num_tokens - anew)
    if brought.any():
        work_s = work_s + _bringing_s(usual, asked)
    # Two replicas predict the same work differently, by what they measured. A load that is hidden behind a millisecond
    # is no reason to leave the replica that has the KV already, and to hold it twice.
    best = asked.matched.max(initial=0)
    is_away = asked.is_away | (asked.matched + _CHUNK_TOKENS < best)
    # What several have already will be asked for again: whoever computes it too is one more who has it. By the square,
    # as by the number alone two of eight replicas stay without a prompt that is under everything.
    num_holders = max(int(np.count_nonzero(asked.matched == best)), 1)
    terms = [
        loads.backlog_s,
        compute_s,
        load_s,
        (brought > 0) * loads.late_load_s,
        decode_s,
        loads.overhead_s,
        loads.running * _RUNNING_TOKENS * row_s,
        work_s * _WORK_WEIGHT / num_holders**2,
        is_away * _MOVE_TOKENS * token_s(usual),
    ]
    return Prices(*np.maximum(np.fmin(terms, _MAX_S), 0))  # NaN is the worst


def load_bound(total_running: int, num_replicas: int) -> int:
    """The most requests that any replica may have after one more was placed; at least one replica has fewer."""
    return math.ceil(LOAD_FACTOR * (total_running + 1) / num_replicas) + LOAD_SLACK


def rendezvous(key: str, replica_hashes: U64) -> U64:
    """Preferences of `key`, one for each replica: adding or removing one moves no key between the others."""
    mixed = replica_hashes ^ np.uint64(text_hash(key))
    for shift, factor in _SPLIT_MIX:
        mixed = (mixed ^ (mixed >> shift)) * factor
    return mixed ^ (mixed >> _LAST_SHIFT)


def replica_hashes(replica_ids: Sequence[str]) -> U64:
    """Hash replicas for `rendezvous`."""
    return np.array([text_hash(f"replica {replica_id}") for replica_id in replica_ids], np.uint64)


def _prefill_s(figures: F64, num_new: F64, context: F64) -> F64:
    constant, row, pair = figures[:, _PREFILL], figures[:, _PREFILL + 1], figures[:, _PREFILL + 2]
    num_steps = np.ceil(num_new / figures[:, _STEP_ROWS])
    return constant * num_steps + row * num_new + pair * num_new * (context + num_new / 2)


def _bringing_s(figures: F64, asked: Asked) -> F64:
    kv_bytes = figures[:, _KV_BYTES]
    own_s = _edge_s(figures[:, _HOST:], asked.in_host, kv_bytes) + _edge_s(figures[:, _NODE:], asked.in_node, kv_bytes)
    return own_s + _edge_s(figures[:, _PEER:], asked.at_peers, kv_bytes)


def _edge_s(terms: F64, num_tokens: F64, kv_bytes: F64) -> F64:
    some = terms[:, 0] + terms[:, 1] * np.ceil(num_tokens / _CHUNK_TOKENS) + terms[:, 2] * num_tokens * kv_bytes
    return np.where(num_tokens > 0, some, 0.0)
