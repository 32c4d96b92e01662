"""What a truncated session's logits must be, computed densely in float64 with the weights of a `transformers` model.

Keys are kept as they were before rotation, each computed when its token was; whenever tokens attend, all keys are
rotated afresh to where their tokens stand then (AttentionStore 3.4). No pages, deltas or masks.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch

from mneme.replicas.truncation import Truncation, plan_truncation

Tensor = torch.Tensor


class DenseSession:
    """One conversation of a Llama or Qwen model."""

    def __init__(
        self, model: Any, window: int, truncation: Truncation, sliding: Sequence[int | None] | None = None
    ) -> None:
        """`sliding`: the sliding window of each layer, where there is one."""
        self._model = copy.deepcopy(model).double()
        self._inv_freq = model.model.rotary_emb.inv_freq.double()
        self._window = window
        self._truncation = truncation
        self.seen: list[int] = []
        num_layers = len(self._model.model.layers)
        self._keys: list[Tensor] = [torch.empty(0)] * num_layers  # float64 [tokens, Hkv, D], not rotated
        self._values: list[Tensor] = [torch.empty(0)] * num_layers
        self._sliding = sliding or [None] * num_layers
        self.num_truncations = 0
        self.masses_are_known = True  # to the engine, when it truncates
        self._masses: Tensor | None = None  # while they are added up
        self._waiting: list[int] = []  # the last output token, which has no KV until the next step

    def forget(self, start: int) -> None:
        """Lose the KV of all tokens from this one on: it is computed anew with the next step."""
        self._waiting = [*self.seen[start:], *self._waiting]
        self.seen = self.seen[:start]
        self._keys = [keys[:start] for keys in self._keys]
        self._values = [values[:start] for values in self._values]

    def begin_turn(self, ids: list[int]) -> None:
        """New tokens behind what was said; what is too long goes first."""
        history = [*self.seen, *self._waiting]
        num_over = len(history) + len(ids) - self._window
        if not self.seen and num_over > 0:  # nothing has KV: a prompt is cut
            self._waiting = [ids[place] for place in self._kept(list(range(len(ids))), num_new=1)]
            self.num_truncations += 1
            return
        self._waiting += ids
        if num_over > 0:
            self._truncate(len(history), num_new=len(ids) + 1)

    def step(self) -> Tensor:
        """Logits behind the last token, float64 [vocab]."""
        if len(self.seen) + len(self._waiting) > self._window:
            self._truncate(len(self.seen), num_new=2)
        logits = self._compute(self._waiting)
        self._waiting = []
        return logits

    def take(self, token_id: int) -> None:
        """The token that was drawn."""
        self._waiting = [token_id]

    def replay(self, ids: list[int], output: list[int]) -> Tensor:
        """The logits from which each token of a turn should have been drawn."""
        self.begin_turn(ids)
        logits = []
        for token_id in output:
            logits.append(self.step())
            self.take(token_id)
        return torch.stack(logits)

    def visible(self) -> list[int]:
        """All that the next token is drawn from, if it is drawn now."""
        return [*self.seen, *self._waiting]

    @torch.no_grad()
    def attention_mass(self) -> list[float]:
        """What each token with KV gets from the last 32, computed once more, over all layers and heads."""
        ids, self._masses = self.seen[-32:], torch.zeros(len(self.seen), dtype=torch.float64)
        self._compute(ids, is_new=False)
        masses, self._masses = self._masses.tolist(), None
        return masses

    def _kept(self, places: list[int], num_new: int) -> list[int]:
        """The first ones as asked for, and the most recent; or what attention chose."""
        if self._truncation.keep == "important" and self.masses_are_known:
            masses = [*self.attention_mass(), 0.0][: len(places)]
            ranges = plan_truncation(len(places), self._window, num_new, self._truncation, important=masses)
            return [place for start, end in ranges for place in places[start:end]]
        # `keep_first` is small enough for both in these tests.
        num_dropped = max(len(places) + num_new - self._window, math.ceil(self._truncation.ratio * self._window))
        if len(places) > self._window:  # far over: what stays leaves room
            room = int((1 - self._truncation.ratio) * self._window)
            num_dropped = max(num_dropped, len(places) - max(room, self._truncation.num_first))
        first = self._truncation.num_first
        return places[:first] + places[first + num_dropped :]

    def _truncate(self, num_history: int, num_new: int) -> None:
        tail = num_history - len(self.seen)  # of what waits, tokens that are history
        history = [*self.seen, *self._waiting[:tail]]
        places = self._kept(list(range(num_history)), num_new)
        with_kv = [place for place in places if place < len(self.seen)]
        self._waiting = [history[p] for p in places if p >= len(self.seen)] + self._waiting[tail:]
        self.seen = [self.seen[place] for place in with_kv]
        self._keys = [keys[with_kv] for keys in self._keys]
        self._values = [values[with_kv] for values in self._values]
        self.num_truncations += 1

    @torch.no_grad()
    def _compute(self, ids: list[int], *, is_new: bool = True) -> Tensor:
        body = self._model.model
        hidden = body.embed_tokens(torch.tensor(ids))
        for index, layer in enumerate(body.layers):
            hidden = hidden + self._attend(layer.self_attn, index, layer.input_layernorm(hidden))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        self.seen += ids if is_new else []
        logits: Tensor = self._model.lm_head(body.norm(hidden[-1]))
        return logits

    def _attend(self, attention: Any, index: int, hidden: Tensor) -> Tensor:
        num_rows = len(hidden)
        q, k, v = projected(attention, hidden)
        if self._masses is None:
            k = self._keys[index] = torch.cat((self._keys[index], k)) if self.seen else k
            v = self._values[index] = torch.cat((self._values[index], v)) if self.seen else v
        else:
            k, v = self._keys[index], self._values[index]
        num_groups = q.shape[1] // k.shape[1]
        places = torch.arange(len(k))
        queries = self._rotated(q, places[-num_rows:])
        turned = self._rotated(k, places).repeat_interleave(num_groups, 1)
        scores = torch.einsum("tHd,lHd->Htl", queries, turned) / attention.head_dim**0.5
        distance = places[-num_rows:, None] - places
        scores.masked_fill_((distance < 0) | (distance >= (self._sliding[index] or math.inf)), -torch.inf)
        shares = scores.softmax(-1)
        if self._masses is not None:
            self._masses += shares.sum((0, 1))
        out = torch.einsum("Htl,lHd->tHd", shares, v.repeat_interleave(num_groups, 1))
        attended: Tensor = attention.o_proj(out.flatten(1))
        return attended

    def _rotated(self, x: Tensor, places: Tensor) -> Tensor:
        return rotated(self._model, self._inv_freq, x, places)


def projected(attention: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute un-rotated queries, keys and values of an attention module: [rows, heads, head_dim]."""
    q, k, v = (
        project(hidden).view(len(hidden), -1, attention.head_dim)
        for project in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    if hasattr(attention, "q_norm"):
        q, k = attention.q_norm(q), attention.k_norm(k)
    return q, k, v


def rotated(model: Any, inv_freq: Tensor, x: Tensor, places: Tensor) -> Tensor:
    """Rotate [rows, heads, head_dim] to their places; `inv_freq` is the model's, in float64."""
    angles = places.double()[:, None] * inv_freq
    factor = model.model.rotary_emb.attention_scaling
    cos, sin = angles.cos()[:, None] * factor, angles.sin()[:, None] * factor
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
