"""Chooses how documents are reused where a request leaves that to the engine: CacheBlend's loading controller (5.1).

Of what the model's quality report allows, it takes the selector and ratio with the soonest first token as the cost
model predicts it, and computes in full where that is sooner, or not a tenth later. With n document tokens behind the
exact prefix, t other tokens and L layers, at ratio r:

    rows(r)  prefill of r n + t rows, which see the other document tokens too
    query    prefill of the t other rows, then rows(r)
    hkvd     the documents' n rows through a layer and the keys of the next, of L, unless the first share is 1; then
             rows(r), of which the first layer has those of the first share
    others   rows(r)

That, times how much longer blends took lately: passes of few rows, choosing and copies have costs of their own. (430
tokens of `mneme-tiny`, 27 November, processor time: 34 ms in full, 41 ms with `hkvd`, which was thought to be sooner.)
Documents that are computed before it cost nothing here: they were asked for before, and serve all who come. What comes
from a tier in the very step hides rows behind it, so the ratio is raised to the largest measured one that hides:
r = max(r*, that). Policy only: no tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from mneme.cachetier.names import Edge
from mneme.cachetier.policy.cost_model import CostModel
from mneme.replicas.blend.gate import NO_REPORT, Gate
from mneme.replicas.blend.selectors import first_share
from mneme.replicas.documents import BlendOptions, Declined, Selector

_CHEAPEST: tuple[Selector, ...] = ("none", "first-k", "random", "query", "query+first-k", "hkvd", "all")
_LEARNED = 0.5  # of how slow the last blend was
_SLOWEST = 4.0  # times of what was predicted that one blend counts for: more says of the machine, not of blends
_KEPT = 0.98  # of how slow they were, with each request that is computed in full instead
_WORTH = 1.1  # times the predicted time: exact KV is found by all who come after, so less is no gain
_TIE = 1.02  # times the soonest: then the smaller ratio is taken, and the cheaper selector
_COMPARED_LAYERS = 1.2  # that hkvd computes of all document tokens, to compare keys
_CHUNK_TOKENS = 256
_EDGES: Mapping[str, Edge] = {"host": "host", "disk": "disk", "peer": "peer_host"}  # by where KV comes from


class Work(NamedTuple):
    """Holds what there is to compute of a prompt."""

    num_exact: int  # tokens that are found as an exact prefix
    num_reused: int  # behind them, of documents that are reused
    num_text: int  # and all others
    num_layers: int


class Decision(NamedTuple):
    """Says how documents are reused."""

    options: BlendOptions
    why: str
    predicted_s: float | None = None  # by the rows alone; None: without costs


class Controller:
    """Decides for one engine."""

    def __init__(self, gate: Gate = NO_REPORT, costs: CostModel | None = None) -> None:
        """`costs`: None: nothing is predicted, and the smallest ratio is taken."""
        self.gate, self._costs = gate, costs
        self._slowness = 1.0  # what blends took, as times of what their rows cost

    def decide(self, options: BlendOptions, work: Work) -> Decision | Declined:
        """Choose what options of the mode `auto` leave open: one whose ratio is below 1, if the report allows any."""
        ratios = {
            selector: smallest if options.ratio is None else options.ratio
            for selector, smallest in self.gate.allowed.items()
            if options.selector in (None, selector) and (options.ratio is None or options.ratio >= smallest)
        }
        ratios = {selector: ratio for selector, ratio in ratios.items() if ratio < 1}
        if not ratios:
            why = "the quality report does not allow it" if self.gate.allowed else self.gate.why
            return Declined("not_allowed", why)
        why, fast, times = "the quality report allows it", list(ratios), dict[Selector, float]()
        if self._costs is not None and work.num_reused:
            times = {selector: self.predicted_s(selector, ratio, work) for selector, ratio in ratios.items()}
            soonest_s = min(times.values()) * self._slowness
            full_s = self._costs.prefill_s(work.num_reused + work.num_text, work.num_exact)
            if full_s <= _WORTH * soonest_s:
                self._slowness = 1 + (self._slowness - 1) * _KEPT  # it may have been the machine
                return Declined(
                    "sooner_in_full", f"predicted to be sooner: {full_s:.3g} s, {soonest_s:.3g} s with reuse"
                )
            fast = [selector for selector in ratios if times[selector] <= _TIE * min(times.values())]
            why += f"; predicted: {soonest_s:.3g} s, {full_s:.3g} s in full"
        best = min(fast, key=lambda selector: (ratios[selector], _CHEAPEST.index(selector)))
        chosen = replace(options, mode="selective", selector=best, ratio=ratios[best])
        return Decision(chosen, why, times.get(best))

    def learn(self, predicted_s: float, took_s: float) -> None:
        """Take how long the steps of a blend took that were its alone, and how long its rows should have."""
        self._slowness += _LEARNED * (min(took_s / predicted_s, _SLOWEST) - self._slowness)

    def predicted_s(self, selector: Selector, ratio: float, work: Work) -> float:
        """Predict the seconds from when all documents are there to the first token."""
        assert self._costs is not None
        num_exact, num_reused, num_text, num_layers = work
        seconds = self._rows_s(ratio * num_reused, work)
        if selector in ("query", "query+first-k"):
            seconds += self._costs.prefill_s(num_text, num_exact + num_reused)
        elif selector == "hkvd":
            share = first_share(num_layers, ratio)
            first_s = self._rows_s(share * num_reused, work)
            seconds += max(first_s - seconds, 0.0) / num_layers  # the mean over the others is the ratio
            if share < 1:
                seconds += self._costs.prefill_s(num_reused, num_exact) * min(_COMPARED_LAYERS / num_layers, 1)
        return seconds

    def _rows_s(self, num_chosen: float, work: Work) -> float:
        """Predict the seconds of a pass with all other text, and so many document tokens between the reused ones."""
        assert self._costs is not None
        context = int(work.num_exact + (work.num_reused - num_chosen) / 2)
        return self._costs.prefill_s(int(num_chosen) + work.num_text, context)

    def raised(self, work: Work, options: BlendOptions, num_loaded: Mapping[str, int]) -> BlendOptions:
        """Raise the ratio to the largest measured one of which the rows hide behind what is loaded meanwhile.

        num_loaded  tokens by where their KV comes from, as `kv_details` has it
        """
        assert options.selector is not None
        assert options.ratio is not None
        if self._costs is None:
            return options
        token_bytes = self._costs.calibration.kv_bytes_per_token
        load_s = sum(
            self._costs.edge_s(edge, num_loaded[source] * token_bytes, -(-num_loaded[source] // _CHUNK_TOKENS))
            for source, edge in _EDGES.items()
            if num_loaded.get(source)
        )
        for ratio in sorted(self.gate.ratios, reverse=True):
            if not options.ratio < ratio < 1:
                continue
            if self._slowness * self.predicted_s(options.selector, ratio, work) <= load_s:
                return replace(options, ratio=ratio)
        return options
