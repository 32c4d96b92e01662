"""How much of a prompt's KV to load, and how long that may be waited for.

Behind a resident prefix there is a run of chunks that a tier has. Two rules, and one before it is known:

0. *Ask if an answer is expected to save what it takes*: of what computing takes the share of tokens that was found of
   late, and at least a hundredth. Else one prompt in 16 asks. (New prompts of 320 tokens took 1.17 times as long as
   without a tier when each asked, 0.97 since, and 1.36 and 1.00 times the processor time: 24 layers with wide KV,
   300 rounds of three arms in one run beside other work, 2026-11-28.)

1. *Load the head that is predicted to bring the first token soonest*, and compute the rest. The rest of the prompt is
   computed layer by layer behind what is loaded: of the whole load L and the first step's rows F, spread over n layers,
   the slower one decides, and the other's share of one layer does not overlap:

       ttft(head) = max(L + F / n, L / n + F) + what later steps compute

   Beside others nothing is computed before all that comes from far, that is from anywhere but this node's memory, is in
   memory, and then it is loaded in as many steps as would be as long as full ones (`step_chunks`): else they would be
   held up. There ttft(head) = L + F + what later steps compute. That is on the safe side: of a head that one step
   loads, what comes while that step computes is not waited for (`buffer_bytes`). A head that gains less than 2% is not
   loaded.

2. *Give it up when it was waited for longer than it may*: twice as long as it was predicted to take, or a quarter of C,
   what computing all takes; but not so long that the first token comes later than after 1.05 C. A load that comes makes
   no request more than 5% slower; one that hangs costs what it was waited for, and is predicted slower the next time.
   (With 0.05 C in the place of C / 4 a load of 5 ms was given up after 24 on a machine with three times as many
   threads as cores: 2026-11-24, 1k of history, warm files.)

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
from dataclasses import dataclass
from typing import NamedTuple

from mneme.cachetier.names import Edge
from mneme.cachetier.policy.cost_model import CostModel

TOLERANCE = 0.05  # of what computing takes
_PATIENCE = 0.25  # of the same, that any load may be waited for
_LOOKUP_SHARE = 0.01  # of what computing takes, that an answer may cost whatever earlier ones said
_FOUND_WEIGHT = 0.1  # of one answer, in the share that is found
_ASKED_ANYWAY = 16  # one in so many prompts for which it does not pay
_PATIENT_LOOKUP_S = 60.0  # the same where everything is to be loaded
_UNBOUNDED_S = 1e6  # likewise, of a load: each of its reads has a limit of its own
_LEAST_GAIN = 0.02  # of what computing takes: less is a tie, and nothing is loaded


class Loadable(NamedTuple):
    """A chunk that a tier has."""

    num_tokens: int  # that are of use
    num_bytes: int  # that are read for them
    edge: Edge


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """Load the first `num_chunks`, compute the rest."""

    num_chunks: int
    may_wait_s: float  # for it, in all, when its sequence could otherwise run; then it is given up
    predicted_ttft_s: float
    step_chunks: int  # that are loaded in the time that a full step computes
    # Of what comes from far, in memory before it computes beside others: the rest comes meanwhile.
    buffer_bytes: float = math.inf


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
        self._found_share = 1.0  # of the tokens that the tier was asked for, of late; without sessions' histories
        self._num_unasked = 0

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
        patience_s = max(_PATIENCE * recompute_s, slack_s)
        latest_s = recompute_s + slack_s - best.first_s - best.later_s
        step_chunks = self._step_chunks(chunks[: best.num_chunks])
        return LoadPlan(
            num_chunks=best.num_chunks,
            may_wait_s=_UNBOUNDED_S if self._loads_all else min(latest_s, max(2 * best.load_s, patience_s)),
            predicted_ttft_s=best.ttft_s,
            step_chunks=step_chunks,
            buffer_bytes=self._buffer_bytes(best, chunks) if best.num_chunks <= step_chunks else math.inf,
        )

    def asks(self, num_resident: int, num_tokens: int, num_stored: int = 0) -> bool:
        """Return whether the tier is asked for a prompt: if an answer takes no longer than it is expected to save, and
        for one in 16 of the others, to see whether that has changed."""
        computing_s = self._costs.prefill_s(num_tokens - num_resident, num_resident)
        worth_s = max(self._found_share, _LOOKUP_SHARE) * computing_s
        if self._loads_all or num_stored or self._costs.lookup_s <= worth_s:
            return True
        self._num_unasked += 1
        return self._num_unasked % _ASKED_ANYWAY == 0

    def learn_answer(self, num_found: int, num_asked: int) -> None:
        """The tier had so many of the tokens that a prompt without a history lacked."""
        with self._lock:
            self._found_share += _FOUND_WEIGHT * (min(num_found / max(num_asked, 1), 1.0) - self._found_share)

    def lookup_wait_s(self, num_resident: int, num_tokens: int, num_stored: int = 0) -> float:
        """Return how long a prompt waits for what the tier says, if so, before it is computed a chunk at a time.

        A twentieth of what computing takes, times the share that was found of late (a hundredth at least), or what one
        more step costs: the price of not waiting is a chunk that is computed though the tier has it. Not at all where
        answers are learned to take longer than that.

        num_stored  tokens behind the resident ones that a session had, so that they were stored: they are worth as much
                    time as computing them would take, which would also hold up others
        """
        if self._loads_all:
            return _PATIENT_LOOKUP_S
        if num_stored:
            return self._costs.prefill_s(num_stored, num_resident)
        computing_s = self._costs.prefill_s(num_tokens - num_resident, num_resident)
        share = max(TOLERANCE * self._found_share, _LOOKUP_SHARE)
        wait_s = max(self._costs.prefill_s(1, num_resident), share * computing_s)
        return wait_s if self._costs.lookup_s <= wait_s else 0.0

    def lookup_timeout_s(self, num_resident: int, num_tokens: int, num_stored: int = 0) -> float:
        """Return how long the question may take: as long as some of the prompt is still to be computed."""
        computing_s = self._costs.prefill_s(num_tokens - num_resident, num_resident)
        return self.lookup_wait_s(num_resident, num_tokens, num_stored) + computing_s

    def _best(self, choices: Sequence[_Choice], slack_s: float | None) -> _Choice:
        """Choose the head that is soonest, or the longest that is at most so much later."""
        none = choices[0]
        if slack_s is not None:
            return [each for each in choices if each.ttft_s <= none.ttft_s + slack_s][-1]
        best = min(choices, key=lambda each: each.ttft_s)
        return best if best.ttft_s <= none.ttft_s * (1 - _LEAST_GAIN) else none

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
