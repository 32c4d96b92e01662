"""Truncation without pages: KV in plain tensors, all sequences in step with each other.

`naive` is AttentionStore's NKVT (4.3.7): keys stay rotated to where their tokens once stood, and new tokens are
numbered from the truncated length. A key is visible because it came earlier, whatever its position says: this order
mask is the arm's own, as our primitive hides keys that stand behind a query. `afresh` rotates every key to where its
token stands now: what `reuse_kv` does without rotating keys, so the two must agree.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from truncation_arms import Thought, thoughts_of

from mneme.replicas.model.decoder import Decoder, KvPool, StepInputs
from mneme.replicas.model.weights import LayerWeights
from mneme.replicas.truncation import Truncation, plan_truncation

Positions = Literal["naive", "afresh"]


class DenseDecoder(Decoder):
    """The same forward pass with another attention; `begin` before each batch of sequences."""

    def begin(self, num_sequences: int, window: int, truncation: Truncation, positions: Positions) -> None:
        config = self.config
        shape = (config.num_layers, num_sequences, window + 1, config.num_kv_heads, config.head_dim)
        self._keys, self._values = torch.zeros(shape), torch.zeros(shape)
        self._num_tokens = 0
        self._window, self._truncation, self._positions = window, truncation, positions

    def feed(self, ids: Tensor) -> Tensor:
        """Logits behind the last of these tokens, float32 [B, vocab]; room is made first if they do not fit.

        ids  int64 [B, n]
        """
        num_new = ids.shape[1]
        if self._num_tokens + num_new > self._window:
            self._truncate(num_new)
        num_rows = ids.numel()
        inputs = StepInputs(
            token_ids=ids.reshape(-1),
            positions=torch.arange(self._num_tokens, self._num_tokens + num_new),  # of one sequence: all are alike
            slots=torch.empty(0),
            sampled_rows=torch.arange(num_new - 1, num_rows, num_new),
            num_sampled=len(ids),
            plan=None,  # type: ignore[arg-type]  # nothing here has pages
        )
        logits = self.forward(inputs, None)  # type: ignore[arg-type]
        self._num_tokens += num_new
        return logits

    def read(self, ids: Tensor, num_prompt: int) -> list[list[Thought]]:
        """What is thought of the tokens behind the first `num_prompt` of each text; ids int64 [B, n]."""
        logits = self.feed(ids[:, :num_prompt])
        thoughts = [thoughts_of(logits, ids[:, num_prompt])]
        rest = range(num_prompt, ids.shape[1] - 1)
        thoughts += [thoughts_of(self.feed(ids[:, place : place + 1]), ids[:, place + 1]) for place in rest]
        return [list(own) for own in zip(*thoughts, strict=True)]

    def _truncate(self, num_new: int) -> None:
        """As the engine does it: so that one more token fits behind the new ones."""
        ranges = plan_truncation(self._num_tokens, self._window, num_new + 1, self._truncation)
        kept = torch.cat([torch.arange(start, end) for start, end in ranges])
        for cache in (self._keys, self._values):
            cache[:, :, : len(kept)] = cache[:, :, kept]
        self._num_tokens = len(kept)

    def _attend(
        self, layer: LayerWeights, index: int, hidden: Tensor, inputs: StepInputs, pool: KvPool, spans: object
    ) -> Tensor:
        config, places = self.config, inputs.positions
        num_new, batch = len(places), len(self._keys[index])
        heads = layer.qkv(hidden).view(batch, num_new, -1, config.head_dim)
        q, k, v = heads.split([config.num_q_heads, config.num_kv_heads, config.num_kv_heads], 2)
        if self._positions == "naive":
            k = self.rope.rotate(k.contiguous(), places)
        end = self._num_tokens + num_new
        self._keys[index, :, self._num_tokens : end] = k
        self._values[index, :, self._num_tokens : end] = v
        keys = self._keys[index, :, :end]
        if self._positions == "afresh":
            keys = self.rope.rotate(keys, torch.arange(end))
        came_earlier = torch.arange(end) <= places[:, None]
        out = torch.nn.functional.scaled_dot_product_attention(
            self.rope.rotate(q.contiguous(), places).transpose(1, 2),
            keys.transpose(1, 2),
            self._values[index, :, :end].transpose(1, 2),
            attn_mask=came_earlier,
            enable_gqa=True,
        )
        return out.transpose(1, 2).reshape(batch * num_new, -1)
