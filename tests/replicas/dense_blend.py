"""What a blended prompt's logits must be, computed densely in float64 with the weights of a `transformers` model.

Each document's KV is computed alone behind the sink, its keys kept as they were before rotation. Then the rows that are
computed anew go through the layers together: in each, their KV takes its places, and all keys are rotated to where
their tokens stand (CacheBlend 4.2). No pages, deltas or masks.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from tests.replicas.model.dense_session import projected, rotated

Tensor = torch.Tensor


class DenseBlend:
    """Computes prompts of a Llama or Qwen model."""

    def __init__(self, model: Any, sink: Sequence[int] = ()) -> None:
        self._model = copy.deepcopy(model).double()
        self._inv_freq = model.model.rotary_emb.inv_freq.double()
        self._sink = list(sink)
        self._shares: list[Tensor] = []  # of attention, of the last rows that were computed, by layer: [Hq, T, L]

    def logits(
        self,
        ids: Sequence[int],
        spans: Sequence[tuple[int, int]],
        computed: Collection[int] = (),
        counts: Mapping[int, int] | None = None,
    ) -> Tensor:
        """Logits float64 [rows, vocab] of what is behind the last document.

        computed  positions in documents that are computed anew
        counts    how many of them stay from some layers on: those whose keys are farthest from the cached ones there
        """
        cached = self._alone(ids, spans)
        reused = {position for span in spans for position in range(*span)}.difference(computed)
        rows = [position for position in range(len(ids)) if position not in reused]
        return self._compute(ids, rows, cached, counts or {}, set(computed))[-(len(ids) - spans[-1][1]) :]

    def key_deviation(self, ids: Sequence[int], spans: Sequence[tuple[int, int]]) -> Tensor:
        """What the selector `hkvd` goes by, float64 by position: how far layer 1's keys are from those of a prefill."""
        cached, exact = self._alone(ids, spans), self._alone(ids, [])
        self._compute(ids, range(len(ids)), exact)
        far = torch.zeros(len(ids), dtype=torch.float64)
        for position in (position for span in spans for position in range(*span)):
            far[position] = (cached[2][position] - exact[2][position]).square().sum()
        return far

    def _alone(self, ids: Sequence[int], spans: Sequence[tuple[int, int]]) -> list[list[Tensor]]:
        """What documents have, computed alone: by layer keys, then values, by position."""
        num_layers = len(self._model.model.layers)
        cached: list[list[Tensor]] = [[torch.empty(0)] * len(ids) for _ in range(2 * num_layers)]
        for start, end in spans:
            alone, empty = [*self._sink, *ids[start:end]], [[torch.empty(0)] * (end - start + 16) for _ in cached]
            self._compute(alone, range(len(alone)), empty)
            for ours, theirs in zip(cached, empty, strict=True):
                ours[start:end] = theirs[len(self._sink) : len(alone)]
        return cached

    def question_scores(self, ids: Sequence[int], spans: Sequence[tuple[int, int]], num_rows: int) -> Tensor:
        """What the selector `query` goes by, float64 by position: the last rows see documents that are all reused."""
        self.logits(ids, spans)
        num_rows = min(num_rows, len(ids) - spans[-1][1])
        return torch.stack([shares[:, -num_rows:].mean(0).square().sum(0) for shares in self._shares]).sum(0)

    @torch.no_grad()
    def _compute(
        self,
        ids: Sequence[int],
        rows: Sequence[int],
        cached: list[list[Tensor]],
        counts: Mapping[int, int] | None = None,
        leaving: Collection[int] = (),
    ) -> Tensor:
        """Compute the rows; `cached` has the keys, then the values of each layer by position, float64 [Hkv, D].

        counts, leaving  how many of some rows stay from some layers on
        """
        body, self._shares = self._model.model, []
        hidden = body.embed_tokens(torch.tensor([ids[row] for row in rows]))
        for index, layer in enumerate(body.layers):
            keys, values = cached[2 * index : 2 * index + 2]
            if counts is not None and index in counts:
                fresh = projected(layer.self_attn, layer.input_layernorm(hidden))[1]
                far = {
                    row: (k - keys[row]).square().sum() for row, k in zip(rows, fresh, strict=True) if row in leaving
                }
                gone = set(sorted(far, key=lambda row: far[row])[: len(far) - counts[index]])
                hidden = hidden[[at for at, row in enumerate(rows) if row not in gone]]
                rows = [row for row in rows if row not in gone]
            hidden = hidden + self._attend(layer.self_attn, layer.input_layernorm(hidden), rows, keys, values, len(ids))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        logits: Tensor = self._model.lm_head(body.norm(hidden))
        return logits

    def _attend(
        self, attention: Any, hidden: Tensor, rows: Sequence[int], keys: list[Tensor], values: list[Tensor], num: int
    ) -> Tensor:
        q, k, v = projected(attention, hidden)
        for row, own_key, own_value in zip(rows, k, v, strict=True):
            keys[row], values[row] = own_key, own_value
        num_groups = q.shape[1] // k.shape[1]
        at, places = torch.tensor(list(rows)), torch.arange(num)
        turned = self._rotated(torch.stack(keys[:num]), places).repeat_interleave(num_groups, 1)
        scores = torch.einsum("tHd,lHd->Htl", self._rotated(q, at), turned) / attention.head_dim**0.5
        scores.masked_fill_(places > at[:, None], -torch.inf)
        self._shares.append(scores.softmax(-1))
        seen = torch.stack(values[:num]).repeat_interleave(num_groups, 1)
        out: Tensor = attention.o_proj(torch.einsum("Htl,lHd->tHd", self._shares[-1], seen).flatten(1))
        return out

    def _rotated(self, x: Tensor, places: Tensor) -> Tensor:
        return rotated(self._model, self._inv_freq, x, places)
