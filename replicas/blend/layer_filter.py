"""Lets rows leave a forward pass between its layers: those of documents whose KV is compared, or is good enough.

CacheBlend's selector (section 4.3) computes all tokens of documents in the first layer, which is exact, and compares
their keys in the second with the cached ones. Those that deviate most are computed anew, of them fewer from layer to
layer. Keys are compared in the frame in which they are cached, so documents are not moved for it.

Mechanism only: what stays is a count by layer, which `selectors.filter_counts` decides.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from mneme.kernels.kv_write import copy_slots, kv_deviation
from mneme.kernels.rope import RopeTable

COMPARED_LAYER = 1  # the first whose keys depend on what stands before a token


@dataclass(slots=True, eq=False, kw_only=True)
class DocumentRows:
    """Rows of one sequence in a step, and where the KV of their tokens is cached."""

    rows: Tensor  # int64 [n] rows of the step, ascending
    cached: Tensor  # int64 [n] slots
    positions: Tensor  # int32 [n] at which the cached keys are rotated
    # Where the rows' own KV goes, int64 [n], and how many stay from some layers on. None: all are compared in
    # `COMPARED_LAYER` and leave then.
    private: Tensor | None = None
    counts: dict[int, int] = field(default_factory=dict)
    # int64 [rows at first]: the layer that each left in, or the number of layers; and which are still there.
    left: Tensor | None = None
    staying: Tensor | None = None
    deviation: Tensor | None = None  # float32 [n], when they were compared

    def leave(self, stays: Tensor, layer: int) -> DocumentRows:
        """Drop the rows that do not stay (bool [n]) from a layer on; returns them."""
        assert self.private is not None
        assert self.left is not None
        assert self.staying is not None
        self.left[self.staying[~stays]] = layer
        self.staying = self.staying[stays]
        gone = DocumentRows(
            rows=self.rows[~stays],
            cached=self.cached[~stays],
            positions=self.positions[~stays],
            private=self.private[~stays],
        )
        self.rows, self.cached = self.rows[stays], self.cached[stays]
        self.positions, self.private = self.positions[stays], self.private[stays]
        return gone


class LayerFilter:
    """Narrows one step: a `StepInputs.layer_filter`."""

    def __init__(self, parts: list[DocumentRows], num_rows: int) -> None:
        """`num_rows`: of the step."""
        self._parts = parts
        self._left: Tensor | None = None  # the rows that are still there; None: all
        self._num_rows = num_rows
        self._gone: list[DocumentRows] = []

    def narrow(
        self, layer: int, k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, rope: RopeTable | None
    ) -> Tensor | None:
        """Return the rows that stay, ascending; None: all of them. To be called when the layer's KV was written.

        A row that has left has its cached KV in its own slot from that layer on. One row always stays.

        k, v              [rows that are still there, num_kv_heads, head_dim]  un-rotated
        k_pages, v_pages  the layer's pool
        """
        stays = torch.ones(self._num_rows, dtype=torch.bool, device=k.device)
        for part in self._parts:
            if part.private is None and layer == COMPARED_LAYER:
                part.deviation = self._deviation(part, k, v, k_pages, v_pages, rope)
                stays[part.rows] = False
            elif layer in part.counts:
                deviation = self._deviation(part, k, v, k_pages, v_pages, rope)
                best = deviation.argsort(descending=True, stable=True)[: part.counts[layer]]
                is_best = torch.zeros(len(deviation), dtype=torch.bool, device=k.device)
                is_best[best] = True
                self._gone.append(part.leave(is_best, layer))
                stays[self._gone[-1].rows] = False
        for gone in self._gone:
            assert gone.private is not None
            copy_slots(gone.cached, gone.private, k_pages, v_pages)
        if bool(stays.all()):
            return None
        stays[-1] |= ~stays.any()
        places = stays.cumsum(0) - 1
        for part in self._parts:
            if part.deviation is None:
                part.rows = places[part.rows]
        rows = stays.nonzero().squeeze(1)
        self._left = rows if self._left is None else self._left[rows]
        self._num_rows = len(rows)
        return rows

    def places(self, rows: Tensor) -> Tensor:
        """Say where rows of the step, none of which has left, are by now."""
        return rows if self._left is None else torch.searchsorted(self._left, rows)

    @staticmethod
    def _deviation(
        part: DocumentRows, k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, rope: RopeTable | None
    ) -> Tensor:
        """float32 [n] of the keys; that of the values chose worse, alone or beside it."""
        return kv_deviation(k[part.rows], v[part.rows], part.cached, part.positions, k_pages, v_pages, rope)[:, 0]
