"""The parts that a layer of any family is made of: norms, attention's projections, MLPs and experts.

Shapes: T rows, H hidden, I intermediate, E experts, of which each row has C. A row's result does not depend on the
other rows, except on CUDA, where a product may be summed otherwise for another number of rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from mneme.kernels.linear import Linear, PackedLinear
from mneme.kernels.native.layers import DenseLayer, RmsWeights, can_run
from mneme.kernels.native.quantized import Codes, QuantizedLinear
from mneme.kernels.ops import Activation, add_rms_norm, gated, rms_norm
from mneme.kernels.torch.fp8 import Fp8Codes

CLAMPED = "swiglu_clamped"
_ALPHA, _LIMIT = 1.702, 7.0  # of it


class Norm(Protocol):
    """Normalizes rows, and adds what is added before."""

    def __call__(self, x: Tensor) -> Tensor:
        """[T, H] -> the same, in the engine's dtype"""

    def add(self, hidden: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        """Return `hidden + delta`, in hidden's dtype and maybe its place, and its norm."""


@dataclass(slots=True)
class RmsNorm:
    """Divides by the root of the mean square."""

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def add(self, hidden: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        return add_rms_norm(hidden, delta, self.weight, self.eps)


@dataclass(slots=True)
class UnitRmsNorm:
    """Is an `RmsNorm` of weights 1 + w, kept in float32: in bfloat16 the sum would lose most of w."""

    weight: Tensor  # float32
    eps: float
    dtype: torch.dtype

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps).to(self.dtype)

    def add(self, hidden: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        hidden = hidden + delta
        return hidden, self(hidden)


@dataclass(slots=True)
class LayerNorm:
    """Subtracts the mean, divides by the standard deviation."""

    weight: Tensor
    bias: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
        return F.layer_norm(x, self.weight.shape, weight, bias, self.eps).to(self.weight.dtype)

    def add(self, hidden: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        hidden = hidden + delta
        return hidden, self(hidden)


@dataclass(slots=True, kw_only=True)
class Attention:
    """What stands around attention; projections that read the same input are one matrix."""

    qkv: Linear  # H -> q_size + 2 kv_size
    o: Linear  # q_size -> H
    q_norm: Norm | None = None  # of each head
    k_norm: Norm | None = None
    sinks: Tensor | None = None  # float32 [Hq]


class Mlp(Protocol):
    """Computes what a row adds to itself."""

    def __call__(self, x: Tensor, out_dtype: torch.dtype) -> Tensor:
        """[T, H] -> [T, H]"""


@dataclass(slots=True, kw_only=True)
class Layer:
    """One layer; the norms of None are not there."""

    attention_norm: Norm
    attention: Attention
    behind_attention: Norm | None = None
    mlp_norm: Norm | None
    mlp: Mlp
    behind_mlp: Norm | None = None


@dataclass(slots=True)
class GatedMlp:
    """`down(activation(gate) * up)`"""

    gate_up: Linear  # H -> 2 I, gates first
    down: Linear  # I -> H
    activation: str

    def __call__(self, x: Tensor, out_dtype: torch.dtype) -> Tensor:
        return self.down(activated(self.gate_up(x), self.activation), out_dtype)


@dataclass(slots=True)
class PlainMlp:
    """`down(activation(up))`"""

    up: Linear
    down: Linear
    activation: str

    def __call__(self, x: Tensor, out_dtype: torch.dtype) -> Tensor:
        inner = self.up(x)
        return self.down(F.relu(inner) if self.activation == "relu" else F.gelu(inner), out_dtype)


class _OtherPart(Exception):
    """Says that a layer has a part which compiled code does not know."""


def dense_layers(layers: Sequence[Layer], last_norm: Norm, dtype: torch.dtype) -> list[DenseLayer] | None:
    """Describe layers to compiled code that runs them whole; None where one has a part that it does not know."""
    norms = [*(layer.attention_norm for layer in layers[1:]), last_norm]
    try:
        return [_dense(layer, norm, dtype) for layer, norm in zip(layers, norms, strict=True)]
    except _OtherPart:
        return None


def _dense(layer: Layer, next_norm: Norm, dtype: torch.dtype) -> DenseLayer:
    attention, mlp = layer.attention, layer.mlp
    if layer.behind_attention or layer.behind_mlp or attention.sinks is not None or not isinstance(mlp, GatedMlp):
        raise _OtherPart
    if not can_run(dtype, mlp.activation):
        raise _OtherPart
    return DenseLayer(
        qkv=_address(attention.qkv),
        o=_address(attention.o),
        gate_up=_address(mlp.gate_up),
        down=_address(mlp.down),
        activation=mlp.activation,
        head_norms=tuple(_rms(norm, dtype) for norm in (attention.q_norm, attention.k_norm) if norm is not None),
        mlp_norm=_rms(layer.mlp_norm, dtype),
        next_norm=_rms(next_norm, dtype),
    )


def _address(linear: Linear) -> int:
    if not isinstance(linear, (PackedLinear, QuantizedLinear)) or linear.address is None:
        raise _OtherPart
    return linear.address


def _rms(norm: Norm | None, dtype: torch.dtype) -> RmsWeights:
    if not isinstance(norm, RmsNorm) or norm.weight.dtype is not dtype:
        raise _OtherPart
    return RmsWeights(norm.weight.contiguous(), norm.eps)


@dataclass(slots=True)
class SharedExpert:
    """An expert that every row has, weighed by a gate of its own."""

    mlp: Mlp
    gate: Linear  # H -> 1

    def __call__(self, x: Tensor, out_dtype: torch.dtype) -> Tensor:
        return self.mlp(x, out_dtype) * torch.sigmoid(self.gate(x)).to(out_dtype)


def activated(gate_up: Tensor, activation: str) -> Tensor:
    """Apply gates to ups, [T, 2 I] -> [T, I]; gpt-oss's SwiGLU clamps both, and adds 1 to ups."""
    if activation != CLAMPED:
        return gated(gate_up, cast("Activation", activation))
    gate, up = gate_up.chunk(2, dim=-1)
    gate, up = gate.clamp(max=_LIMIT), up.clamp(-_LIMIT, _LIMIT)
    return (up + 1) * (gate * torch.sigmoid(gate * _ALPHA))


class ExpertTensors(NamedTuple):
    """The weights of one expert, as they are multiplied from the right."""

    gate_up: Tensor | Codes | Fp8Codes  # [2 I, H], gates first
    down: Tensor | Codes | Fp8Codes  # [H, I]
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None


def can_group(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the rows of all experts can be one product, without asking the device how many each has.

    Elsewhere than on capability 9.0 torch 2.11 multiplies for each expert, and asks: no graph can have that.
    """
    return device.type == "cuda" and dtype is torch.bfloat16 and torch.cuda.get_device_capability(device) == (9, 0)


class GroupedExperts:
    """Experts of one tensor each: rows, sorted by their expert, are one grouped product (`torch._grouped_mm`).

    Bytes: the weights of experts that any row has, once. Flops: 6 T C H I. Nothing waits for the device.
    """

    def __init__(self, mlps: Sequence[ExpertTensors], activation: str) -> None:
        gate_up, down, gate_up_bias, down_bias = zip(*mlps, strict=True)
        self._gate_up, self._down = torch.stack(gate_up).transpose(1, 2), torch.stack(down).transpose(1, 2)
        self._gate_up_bias = None if gate_up_bias[0] is None else torch.stack(gate_up_bias)
        self._down_bias = None if down_bias[0] is None else torch.stack(down_bias)
        self._activation = activation
        self.num_bytes = self._gate_up.nbytes + self._down.nbytes

    def __call__(self, x: Tensor, experts: Tensor) -> Tensor:
        """See `SeparateExperts`."""
        ends = torch.searchsorted(experts, torch.arange(len(self._down), device=x.device), right=True).int()
        inner = torch._grouped_mm(x, self._gate_up, offs=ends)
        if self._gate_up_bias is not None:
            inner = inner + self._gate_up_bias[experts]
        out = torch._grouped_mm(activated(inner, self._activation), self._down, offs=ends)
        return out if self._down_bias is None else out + self._down_bias[experts]


class SeparateExperts:
    """Experts that are MLPs of their own, each called with the rows that have it."""

    def __init__(self, experts: Sequence[Mlp]) -> None:
        self._experts = experts

    def __call__(self, x: Tensor, experts: Tensor) -> Tensor:
        """Apply expert e to the rows that have it: x [n, H], experts int64 [n], ascending."""
        counts = torch.bincount(experts, minlength=len(self._experts)).tolist()
        parts = zip(self._experts, torch.split(x, counts), strict=True)
        return torch.cat([expert(part, x.dtype) for expert, part in parts if len(part)])


@dataclass(slots=True, kw_only=True)
class Experts:
    """MLPs of which a router chooses `num_chosen` for each row; their weighted sum is added."""

    router: Linear  # H -> E
    experts: GroupedExperts | SeparateExperts
    num_chosen: int
    is_normalized: bool
    shared: SharedExpert | None = None

    def __call__(self, x: Tensor, out_dtype: torch.dtype) -> Tensor:
        if not len(x):
            return x.to(out_dtype)
        logits = self.router(x, torch.float32)
        best, chosen = logits.topk(self.num_chosen, dim=-1)
        # The softmax of the chosen ones is the softmax of all, made to sum to 1.
        weights = best.softmax(-1) if self.is_normalized else logits.softmax(-1).gather(-1, chosen)
        order = chosen.flatten().argsort(stable=True)
        sorted_out = self.experts(x[order // self.num_chosen], chosen.flatten()[order])
        out = torch.empty_like(sorted_out)
        out[order] = sorted_out
        by_rank = out.view(len(x), self.num_chosen, -1)
        total = by_rank[:, 0].float() * weights[:, :1]
        for rank in range(1, self.num_chosen):  # one after the other: a row's sum is the same in every batch
            total.addcmul_(by_rank[:, rank].float(), weights[:, rank : rank + 1])
        total = total.to(out_dtype)
        return total if self.shared is None else total + self.shared(x, out_dtype)


@dataclass(slots=True, kw_only=True)
class DecoderWeights:
    """All tensors of a decoder on one device, in one dtype."""

    embedding: Tensor | None  # [vocab, H]; None where it is tied to the head
    layers: list[Layer]
    norm: Norm
    head: Linear  # H -> vocab
    dtype: torch.dtype
    device: torch.device
    positions: Tensor | None = None  # [max_context, H], added to embeddings
    num_bytes: Mapping[str, int] = field(
        default_factory=dict
    )  # of matrices, by format: float32, bfloat16, int8, int4, fp8
    num_rounded_bytes: int = 0  # of those in int8, int4 and fp8, what is not the file's own numbers

    @property
    def num_all_bytes(self) -> int:
        """Count what matrices take, an embedding that is no output among them."""
        return sum(self.num_bytes.values()) + (0 if self.embedding is None else self.embedding.nbytes)

    def embed(self, token_ids: Tensor) -> Tensor:
        """int64 [T] -> [T, H]"""
        if self.embedding is None:
            return self.head.weight_rows(token_ids)
        return F.embedding(token_ids, self.embedding)
