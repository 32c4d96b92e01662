"""Measures what the inputs of products are, for rounding to 4 bits: the model reads tokens once, dense.

An error of a weight counts by the mean square of its input (the diagonal of GPTQ's Hessian, Frantar et al. 2022, and
what AWQ's scales follow, Lin et al. 2023). The tokens are drawn from the vocabulary, always the same ones: they need no
text of any language, and two replicas on one kind of processor round alike. On SmolLM2 they leave 9% of perplexity lost
of 18; 2,000 tokens of Python's standard library: 6.5 (benchmarks/results/2026-11-28-weights.md).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from mneme.kernels.attention import PageTable, QueryRows, build_plan, mark_written, new_slot_position
from mneme.kernels.linear import Linear
from mneme.replicas.model.decoder import Decoder, KvPool, StepInputs
from mneme.replicas.model.decoder_config import DecoderConfig
from mneme.replicas.model.parts import DecoderWeights
from mneme.replicas.model.tensors import Linears

_NUM_TOKENS, _PAGE_SIZE = 512, 16
_ROWS_A_LOGIT = 4
_PER_OCTAVE = 4  # so that rounding of sums, which differs between processors, changes few squares (60 of 12,800)


class ObservedLinear:
    """Multiplies as another does, and adds up the squares of its inputs."""

    def __init__(self, linear: Linear, num_inputs: int) -> None:
        self._linear, self.format, self.num_bytes = linear, linear.format, linear.num_bytes
        self._sums, self._num_rows = torch.zeros(num_inputs), 0

    def __call__(self, x: Tensor, out_dtype: torch.dtype | None = None, out: Tensor | None = None) -> Tensor:
        """See `Linear`."""
        self._sums += x.float().square().sum(0)
        self._num_rows += len(x)
        return self._linear(x, out_dtype, out)

    def weight_rows(self, index: Tensor) -> Tensor:
        """See `Linear`."""
        return self._linear.weight_rows(index)

    def squares(self) -> Tensor | None:
        """Return the mean square of each input, float32 [K], to a quarter of an octave; None: there was no row."""
        if not self._num_rows:
            return None
        return ((self._sums / self._num_rows).log2() * _PER_OCTAVE).round_().div_(_PER_OCTAVE).exp2_()


class Observed(Linears):
    """Makes dense products that are observed."""

    def __init__(self) -> None:
        super().__init__()
        self._made: list[ObservedLinear] = []

    def _dense(self, weight: Tensor, bias: Tensor | None) -> Linear:
        self._made.append(ObservedLinear(super()._dense(weight, bias), weight.shape[1]))
        return self._made[-1]

    def squares(self) -> list[Tensor | None]:
        """Return them for each product, in the order in which they were made."""
        return [each.squares() for each in self._made]


def observe(config: DecoderConfig, weights: DecoderWeights) -> None:
    """Read a prompt of drawn tokens."""
    size = min(_NUM_TOKENS, config.max_context)
    rows, num_pages = np.arange(size), -(-size // _PAGE_SIZE)
    decoder, positions = Decoder(config, weights, max_context=size), torch.arange(size)
    shape = (config.num_layers, config.num_kv_heads, num_pages, _PAGE_SIZE, config.head_dim)
    k_pages, v_pages = (torch.zeros(shape, dtype=weights.dtype) for _ in range(2))
    pool = KvPool(k_pages=k_pages, v_pages=v_pages, slot_position=new_slot_position(num_pages * _PAGE_SIZE))
    mark_written(pool.slot_position, positions, positions)
    plan = build_plan(
        [PageTable.own(np.arange(num_pages))], QueryRows(np.zeros_like(rows), rows), page_size=_PAGE_SIZE,
        num_q_heads=config.num_q_heads, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim,
    )  # fmt: skip
    drawn = torch.randint(config.vocab_size, (size,), generator=torch.Generator().manual_seed(0))
    sampled = positions[::_ROWS_A_LOGIT]  # which the last layer's MLP has alone
    inputs = StepInputs(
        token_ids=drawn, positions=positions.int(), slots=positions, sampled_rows=sampled, num_sampled=len(sampled),
        plan=plan,
    )  # fmt: skip
    decoder.forward(inputs, pool)
