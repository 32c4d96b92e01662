"""How much of a prompt's KV to load and how much to compute, so that its first token comes soonest.

Behind a resident prefix there is a run of chunks that a tier has. Its head is loaded and the rest is computed, layer
by layer behind it: of the whole load L and the first step's rows F, spread over n layers, the slower one decides, and
the other's share of one layer does not overlap:

    ttft(head) = max(L + F / n, L / n + F) + what later steps compute

Beside others nothing is computed before all that comes from far, that is from anywhere but this node's memory, is in
memory, and then it is loaded in as many steps as would be as long as full ones (`step_chunks`): else they would be held
up. There one comes after the other, ttft(head) = L + F + what later steps compute. That is on
the safe side: of a head that one step loads, what comes while that step computes is not waited for (`buffer_bytes`).

The best head is the one with the least ttft, at a tie the shorter one; none, if it gains less than 2%. C = ttft(none)
is what computing costs.

When to give a load up. Let it take T, of which L was predicted. It makes the request no more than 5% slower than
computing all of it

    if it is kept to its end   iff ttft <= 1.05 C with T for L, that is T <= latest (at least L + 0.05 C)
    if it is given up at D     iff D + C <= 1.05 C, that is D <= 0.05 C

Time counts from when the request could have been computed: what comes while it waits for its turn costs nothing.

The second would hold for any T, but would give up every load that is to take more than a twentieth of what computing
takes, and smaller ones for a little noise. So there are two rules. Who sees how far a load is uses `LoadPlan.due_s`:
unit i of u must have come by max(0.05 C, latest * i / u); if it waited w for its turn to be read, which may be 0.05 C
at most, by max(0.05 C, w + (latest - w) * i / u). At a constant rate a load that will be in time misses none, and one
that will be too late is given up by 0.05 C + latest / u, behind such a wait somewhat later. A load that stalls in the
middle costs what it had been given until then, at most `latest`. Who sees no progress uses `deadline_s`: max(0.05 C,
min(2 L, L + 0.05 C)). Up to L = C / 40 giving up costs 5% and nothing more, and a load may take twice as long as
predicted; beyond, it costs L as well, and noise of 0.05 C is all that is borne.

All of that bounds the regret of prompts of which nobody knows whether they are stored. A session's history was: there
the time that computing it would take stands in the place of 0.05 C, and the longest head that keeps to it is loaded. On
a busy machine the first loads make an edge look slow before any step has shown how slow computing is.

What was read of a load that was given up is measured like any other: two that were slow say that their edge is, and
that is forgotten with the half-life of a minute. An edge that nobody has measured is tried on one chunk: peers cannot
be calibrated at start, and where the guess is slower than computing nobody would ever load from one.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from mneme.cachetier.names import Edge
from mneme.cachetier.policy.cost_model import CostModel

TOLERANCE = 0.05  # of what computing takes
_LOOKUP_SHARE = 0.01  # of what computing takes, that is waited for an answer
_LATER = 1.3  # than usual an answer comes, or a step would end right before it, and the next one begin without it
_PATIENT_LOOKUP_S = 60.0  # the same where everything is to be loaded
_UNBOUNDED_S = 1e6  # likewise, of a load: each of its reads has a limit of its own
_LEAST_GAIN = 0.02  # of what computing takes: less is a tie, and nothing is loaded
_TIE = 1e-9  # relative


class Loadable(NamedTuple):
    """A chunk that a tier has."""

    num_tokens: int  # that are of use
    num_bytes: int  # that are read for them
    edge: Edge


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """Load the first `num_chunks`, compute the rest. Times count from when that could begin."""

    num_chunks: int
    deadline_s: float  # give the load up then, if nothing is known of how far it is
    slack_s: float  # that may be lost whatever comes of the load
    predicted_load_s: float
    predicted_recompute_s: float  # the time to the first token without a load
    predicted_ttft_s: float  # with it
    latest_s: float  # a load that ends by then is no more than 5% slower than computing
    latest_beside_s: float  # the same for its far part, where nothing is computed before that is in memory
    step_chunks: int  # that are loaded in the time that a full step computes
    first_s: float = 0.0  # that the first step computes of it beside the load
    # Of what comes from far, in memory before it computes beside others: the rest comes meanwhile.
    buffer_bytes: float = math.inf

    def part(self, num_chunks: int) -> LoadPlan:
        """Return the plan of so many of the chunks, all of which are in memory before they are loaded."""
        share = num_chunks / self.num_chunks
        return replace(
            self,
            num_chunks=num_chunks,
            deadline_s=share * self.deadline_s,
            slack_s=share * self.slack_s,
            predicted_load_s=share * self.predicted_load_s,
            predicted_recompute_s=share * self.predicted_recompute_s,
            latest_s=share * self.latest_s,
            latest_beside_s=share * self.latest_beside_s,
            buffer_bytes=math.inf,
        )

    def due_s(self, num_done: int, num_units: int, *, waited_s: float = 0.0, is_alone: bool = True) -> float:
        """Return when the next unit (the load in equal parts, layers of chunks) must be there, else it is given up.

        `waited_s`: before the first was begun; `is_alone`: the request is computed meanwhile.
        """
        latest_s = self.latest_s if is_alone else self.latest_beside_s
        return max(self.slack_s, waited_s + (num_done + 1) / num_units * (latest_s - waited_s))


class _Choice(NamedTuple):
    num_chunks: int
    near_s: float  # to load from this node's memory
    far_s: float  # from elsewhere
    first_s: float  # computing in the first step, which runs beside the load
    later_s: float  # in the steps after it
    ttft_s: float

    @property
    def load_s(self) -> float:
        return self.near_s + self.far_s


class LoadController:
    """Plans the loads of one engine. Calls may come from any thread."""

    def __init__(
        self,
        cost_model: CostModel,
        *,
        num_layers: int = 32,
        loads_all: bool = False,
    ) -> None:
        """`loads_all`: whatever it is predicted to cost, and nothing is given up (`cache.load: always`)."""
        self._costs, self._loads_all = cost_model, loads_all
        self._num_layers = num_layers
        self._lock = threading.Lock()
        self.num_plans: Counter[str] = Counter()  # "load" (all), "split", "compute" (all)

    def plan(
        self,
        num_resident: int,
        num_tokens: int,
        chunks: Sequence[Loadable],
        *,
        num_stored: int = 0,
        is_alone: bool = True,
    ) -> LoadPlan:
        """Decide how many of the chunks behind `num_resident` tokens, in order and without a gap, to load.

        num_tokens  of the prompt; its last is always computed
        num_stored  see `lookup_wait_s`: then the longest head is loaded that costs no more than that much later
        is_alone    nothing else runs
        """
        choices = list(self._choices(num_resident, num_tokens, chunks, is_alone))
        recompute_s = choices[0].ttft_s
        slack_s = max(TOLERANCE * recompute_s, self._costs.prefill_s(num_stored, num_resident))
        best = choices[-1] if self._loads_all else self._best(choices, slack_s if num_stored else None)
        behind = chunks[best.num_chunks] if best.num_chunks < len(chunks) else None
        if behind is not None and behind.num_tokens and not self._costs.is_measured(behind.edge):
            best = choices[best.num_chunks + 1]  # to know what it costs
        self._count(best.num_chunks, len(chunks))
        slack_s = _UNBOUNDED_S if self._loads_all else slack_s
        deadline_s = max(slack_s, min(2 * best.load_s, best.load_s + slack_s))
        step_chunks = self._step_chunks(chunks[: best.num_chunks])
        return LoadPlan(
            num_chunks=best.num_chunks,
            deadline_s=deadline_s,
            slack_s=slack_s,
            predicted_load_s=best.load_s,
            predicted_recompute_s=recompute_s,
            predicted_ttft_s=best.ttft_s,
            latest_s=self._latest_s(best, recompute_s + slack_s),
            latest_beside_s=self._latest_beside_s(best, recompute_s + slack_s),
            step_chunks=step_chunks,
            first_s=best.first_s,
            buffer_bytes=self._buffer_bytes(best, chunks) if best.num_chunks <= step_chunks else math.inf,
        )

    def lookup_wait_s(self, num_resident: int, num_tokens: int, num_stored: int = 0) -> float:
        """Return how long a prompt waits for what the tier says, if so, before it is computed a chunk at a time.

        A hundredth of what computing takes, or what one more step costs, as that would be the price of not waiting.

        num_stored  tokens behind the resident ones that a session had, so that they were stored: they are worth as much
                    time as computing them would take, which would also hold up others
        """
        if self._loads_all:
            return _PATIENT_LOOKUP_S
        computing_s = self._costs.prefill_s(num_tokens - num_resident, num_resident)
        wait_s = max(self._costs.prefill_s(1, num_resident), _LOOKUP_SHARE * computing_s)
        return max(wait_s, self._costs.prefill_s(num_stored, num_resident))

    def first_rows(self, num_resident: int, num_stored: int = 0) -> int:
        """Return how many rows a step computes in the time of an answer: a prompt begins with them, and waits for none.

        0: it waits. One step more costs as much as an answer or more, or it is known what was stored.
        """
        if self._loads_all or num_stored:
            return 0
        left_s = _LATER * self._costs.lookup_s - self._costs.prefill_s(1, num_resident)
        return int(min(self._costs.rows_within(left_s, num_resident), self._costs.step_rows)) if left_s > 0 else 0

    def lookup_timeout_s(self, num_resident: int, num_tokens: int, num_stored: int = 0) -> float:
        """Return how long the question may take: as long as some of the prompt is still to be computed."""
        computing_s = self._costs.prefill_s(num_tokens - num_resident, num_resident)
        return self.lookup_wait_s(num_resident, num_tokens, num_stored) + computing_s

    def _best(self, choices: Sequence[_Choice], slack_s: float | None) -> _Choice:
        """Choose the head that is soonest, or the longest that is at most so much later."""
        best = choices[0]
        if slack_s is not None:
            return [each for each in choices if each.ttft_s <= best.ttft_s + slack_s][-1]
        for choice in choices:
            if choice.ttft_s < best.ttft_s * (1 - _TIE):
                best = choice
        return best if best.ttft_s <= choices[0].ttft_s * (1 - _LEAST_GAIN) else choices[0]

    def _choices(
        self, num_resident: int, num_tokens: int, chunks: Sequence[Loadable], is_alone: bool
    ) -> Iterable[_Choice]:
        """Item k: the first k chunks are loaded."""
        num_known, seconds_by_edge = num_resident, dict[Edge, float]()
        loaded: dict[Edge, tuple[int, int]] = {}  # bytes, chunks
        yield self._choice(0, seconds_by_edge, num_known, num_tokens, is_alone)
        for index, chunk in enumerate(chunks):
            num_bytes, num_chunks = loaded.get(chunk.edge, (0, 0))
            loaded[chunk.edge] = now = (num_bytes + chunk.num_bytes, num_chunks + 1)
            seconds_by_edge[chunk.edge] = self._costs.edge_s(chunk.edge, *now)
            num_known += chunk.num_tokens
            yield self._choice(index + 1, seconds_by_edge, num_known, num_tokens, is_alone)

    def _choice(
        self, num_chunks: int, seconds_by_edge: Mapping[Edge, float], num_known: int, num_tokens: int, is_alone: bool
    ) -> _Choice:
        num_rows = max(num_tokens - num_known, 1)
        context = num_tokens - num_rows
        first_s = self._costs.prefill_s(min(num_rows, self._costs.step_rows), context)
        later_s = self._costs.prefill_s(num_rows, context) - first_s
        near_s = seconds_by_edge.get("host", 0.0)
        far_s = sum(seconds for edge, seconds in seconds_by_edge.items() if edge != "host")
        load_s = near_s + far_s
        together_s = overlapped_s(load_s, first_s, self._num_layers) if is_alone else load_s + first_s
        return _Choice(num_chunks, near_s, far_s, first_s, later_s, together_s + later_s)

    def _latest_s(self, choice: _Choice, ttft_s: float) -> float:
        """Return how long the load may take for a first token at that time: `overlapped_s`, solved for the load."""
        together_s, num_layers = ttft_s - choice.later_s, self._num_layers
        return min(together_s - choice.first_s / num_layers, (together_s - choice.first_s) * num_layers)

    def _latest_beside_s(self, choice: _Choice, ttft_s: float) -> float:
        """Return how long its far part may take, where the rest comes behind it."""
        return ttft_s - choice.later_s - choice.first_s - choice.near_s

    def _buffer_bytes(self, choice: _Choice, chunks: Sequence[Loadable]) -> float:
        """Size the read buffer: B (T_load L_hist - T_pref L_new), and a layer, before which nothing is computed.

        AttentionStore 3.2.1; what edges are busy with for a token is T_load, and bytes by that time B.
        """
        num_bytes = sum(chunk.num_bytes for chunk in chunks[: choice.num_chunks] if chunk.edge != "host")
        gap_s = max(choice.far_s - choice.first_s, 0.0)
        return num_bytes * (gap_s / choice.far_s if gap_s else 0.0) + num_bytes / self._num_layers

    def _step_chunks(self, chunks: Sequence[Loadable]) -> int:
        size = max((chunk.num_bytes for chunk in chunks), default=0)
        return max(int(self._costs.prefill_s(self._costs.step_rows, 0) / self._costs.edge_s("host", size)), 1)

    def _count(self, num_loaded: int, num_chunks: int) -> None:
        with self._lock:
            self.num_plans["compute" if not num_loaded else "load" if num_loaded == num_chunks else "split"] += 1


def overlapped_s(load_s: float, compute_s: float, num_layers: int) -> float:
    """Layers are loaded in order and computed once they are there: the slower of the two, a layer of the other."""
    return max(load_s + compute_s / num_layers, load_s / num_layers + compute_s)
