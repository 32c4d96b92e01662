"""Builds the parts of a layer of a checkpoint's tensors: what `replicas/model/families` write their layers in.

A `Source` gives tensors by name. Building twice, first of a `Checked` source, looks at each name and shape before any
byte of a tensor is read, so a hostile file can make neither a large allocation nor a wrong model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from mneme.errors import CheckpointError, ConfigError
from mneme.kernels.linear import Linear, PlainLinear, make_linear
from mneme.kernels.native.quantized import Codes, QuantizedLinear, join_rows, joined, packed_bytes, quantize
from mneme.kernels.torch.fp8 import Fp8Codes, Fp8Linear, fits, fp8_without_memory, join_fp8, quantize_fp8
from mneme.replicas.config import WeightsForm
from mneme.replicas.model.decoder_config import DecoderConfig, ExpertsConfig
from mneme.replicas.model.parts import (
    Attention,
    Experts,
    ExpertTensors,
    GatedMlp,
    GroupedExperts,
    Layer,
    LayerNorm,
    PlainMlp,
    RmsNorm,
    SeparateExperts,
    SharedExpert,
    UnitRmsNorm,
    can_group,
)

_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of MXFP4's numbers, the sign apart
_FP4_BLOCK = 32
_FP4_LARGEST = 127 + 125  # scale, times 6 a finite float32; 255 is NaN (OCP MX 1.0, 5.4.1)
_INNER: Literal[4] = 4  # bits that rounding leaves what leads into MLPs; 8 all else: of 7.2% of perplexity lost, 2.4
Weight = Tensor | Codes | Fp8Codes
Bits = Literal[4, 8, "fp8"]  # in which a weight is multiplied


class Quantized(NamedTuple):
    """What a file has a matrix as, if its numbers are in steps."""

    bits: Literal[4, 8]  # that CPUs multiply it in
    own: tuple[Bits, ...]  # in which `Source.codes` gives them, as far as headers tell; others round them once more


class Source(Protocol):
    """Gives a model's tensors by the names of its family."""

    def has(self, name: str) -> bool: ...

    def tensor(self, name: str, *shape: int) -> Tensor:
        """Return it in the engine's dtype, on its device; raises `CheckpointError`."""

    def stored(self, name: str, *shape: int) -> Tensor:
        """Return its bytes as they are in the file, uint8; raises `CheckpointError`."""

    def quantized(self, name: str) -> Quantized | None:
        """Say whether a matrix is quantized, by headers."""

    def codes(self, name: str, bits: Bits, *shape: int) -> Codes | Fp8Codes | None:
        """Return a matrix's own numbers as they are multiplied in so many bits; None where that would round them."""


class Files(Source, Protocol):
    """Knows from headers alone what tensors there are."""

    model_dir: Path

    @property
    def names(self) -> Collection[str]:
        """Return the tensors by the names that they have in the files."""

    def check(self, name: str, shape: tuple[int, ...]) -> tuple[str, ...]:
        """Return the names in the files of what it is made of, by the headers; raises `CheckpointError` without it."""


class Linears:
    """Makes products with weights in the form that was asked for, and counts their bytes by format."""

    def __init__(
        self, form: WeightsForm = "dense", torch_rows: int | None = None, squares: Sequence[Tensor | None] = ()
    ) -> None:
        """Make products in a form.

        torch_rows  from so many rows on torch multiplies dense ones, see `mneme.kernels.linear.PackedLinear`
        squares     of inputs of each product, see `mneme.kernels.native.quantized.quantize`
        """
        self._form, self._torch_rows = form, torch_rows
        self._squares = iter(squares)
        self.num_bytes: Counter[str] = Counter()
        self.num_rounded_bytes: Counter[str] = Counter()  # of those not dense, what is not the file's own numbers

    def bits(
        self, stored: Sequence[Quantized | None], least: Literal[4, 8] = 8, *, takes_fp8: bool = True
    ) -> Bits | None:
        """Return in how many bits a weight of such parts is multiplied; None: dense.

        least      bits that rounding leaves it
        takes_fp8  outputs do not, nor experts, which are one product on a GPU
        """
        if self._form == "fp8":
            return "fp8" if takes_fp8 else None
        if self._form == "dense" or (self._form == "auto" and None in stored):
            return None
        if self._form == "auto":
            return max(each.bits for each in stored if each is not None)
        has_four = all(each is not None and 4 in each.own for each in stored)
        return 8 if self._form == "int8" else 4 if has_four else least

    def make(
        self,
        weight: Weight,
        bias: Tensor | None = None,
        *,
        stored: Sequence[Quantized | None],
        least: Literal[4, 8] = 8,
        takes_fp8: bool = True,
    ) -> Linear:
        """stored: what the file has its parts as; least, takes_fp8: see `bits`"""
        bits, squares = self.bits(stored, least, takes_fp8=takes_fp8), next(self._squares, None)
        if bits is None:
            assert isinstance(weight, Tensor)
            linear = self._dense(weight, bias)
            self.num_bytes[linear.format] += linear.num_bytes
            return linear
        is_rounded = isinstance(weight, Tensor)
        if bits == "fp8":
            linear = _fp8(weight, bias)
            name, num_bytes = linear.format, linear.num_bytes
        elif weight.device.type == "meta":  # on trial, see `weights.count_bytes`
            values = weight if isinstance(weight, Tensor) else weight.values
            num_inputs = weight.num_inputs if isinstance(weight, Codes) else values.shape[1]
            linear = PlainLinear(values)
            name, num_bytes = f"int{bits}", packed_bytes(len(values), num_inputs, bits)
        else:
            if isinstance(weight, Tensor):
                weight = quantize(weight, least if self._form == "int4" else 8, squares)
            assert isinstance(weight, Codes), "of the bits that were asked for"
            linear = QuantizedLinear(weight, bias)
            name, num_bytes = linear.format, linear.num_bytes
        self.num_bytes[name] += num_bytes
        if is_rounded:
            self.num_rounded_bytes[name] += num_bytes
        return linear

    def _dense(self, weight: Tensor, bias: Tensor | None) -> Linear:
        return make_linear(weight, bias, self._torch_rows)


def _fp8(weight: Weight, bias: Tensor | None) -> Fp8Linear:
    assert not isinstance(weight, Codes), "of the bits that were asked for"
    sizes = (weight if isinstance(weight, Tensor) else weight.values).shape
    if not fits(*sizes):
        rule = f"16 must divide both sizes of a matrix (got {list(sizes)})"
        raise ConfigError(f"engine.weights: fp8: {rule}; dense serves the model here")
    if isinstance(weight, Tensor):
        weight = fp8_without_memory(sizes[0], sizes[1], weight.dtype) if weight.is_meta else quantize_fp8(weight)
    return Fp8Linear(weight, bias)


class Tensors:
    """Builds parts of the tensors whose names begin with a prefix."""

    def __init__(self, source: Source, config: DecoderConfig, linears: Linears, prefix: str = "") -> None:
        self._source, self._config, self._linears, self._prefix = source, config, linears, prefix

    def under(self, prefix: str) -> Tensors:
        """Return the tensors behind a further prefix."""
        return Tensors(self._source, self._config, self._linears, self._prefix + prefix)

    def quantized(self, *names: str) -> list[Quantized | None]:
        """Return what the file has each of some matrices as."""
        return [self._source.quantized(f"{self._prefix}{name}.weight") for name in names]

    def matrix(
        self,
        size_by_name: dict[str, int],
        num_inputs: int,
        *,
        stored: Sequence[Quantized | None] = (),
        least: Literal[4, 8] = 8,
        takes_fp8: bool = True,
    ) -> Weight:
        """Join matrices of the same input, in order: the file's own numbers where those are what is multiplied.

        stored, least, takes_fp8  see `Linears.make`
        """
        named = [(f"{self._prefix}{name}.weight", size) for name, size in size_by_name.items()]
        bits = self._linears.bits(stored, least, takes_fp8=takes_fp8) if stored else None
        if bits is not None and all((each := self._source.quantized(name)) and bits in each.own for name, _ in named):
            found = [codes for name, size in named if (codes := self._source.codes(name, bits, size, num_inputs))]
            if len(found) == len(named) and (whole := _joined(found)) is not None:
                return whole
        weights = [self._source.tensor(name, size, num_inputs) for name, size in named]
        return weights[0] if len(weights) == 1 else join_rows(weights)

    def has(self, name: str) -> bool:
        return self._source.has(self._prefix + name)

    def tensor(self, name: str, *shape: int) -> Tensor:
        return self._source.tensor(self._prefix + name, *shape)

    def layer(self, **parts: Any) -> Layer:
        return Layer(**parts)

    def rms_norm(self, name: str, *, size: int | None = None, is_unit: bool = False) -> RmsNorm | UnitRmsNorm:
        """is_unit: 1 is added to the weight"""
        weight = self.tensor(f"{name}.weight", size or self._config.hidden_size)
        if is_unit:
            return UnitRmsNorm(1 + weight.float(), self._config.norm_eps, weight.dtype)
        return RmsNorm(weight, self._config.norm_eps)

    def layer_norm(self, name: str) -> LayerNorm:
        weight, bias = (self.tensor(f"{name}.{part}", self._config.hidden_size) for part in ("weight", "bias"))
        return LayerNorm(weight, bias, self._config.norm_eps)

    def linear(
        self, size_by_name: dict[str, int], num_inputs: int, *, has_bias: bool = False, least: Literal[4, 8] = 8
    ) -> Linear:
        """Join projections of the same input, in order, into one matrix. least: see `Linears.make`."""
        stored = self.quantized(*size_by_name)
        weight = self.matrix(size_by_name, num_inputs, stored=stored, least=least)
        return self._linears.make(weight, self._bias(size_by_name) if has_bias else None, stored=stored, least=least)

    def gate(self, name: str, num_outputs: int, *, has_bias: bool = False) -> Linear:
        """Make what chooses or weighs experts, which is never rounded."""
        weight = self.tensor(f"{name}.weight", num_outputs, self._config.hidden_size)
        return make_linear(weight, self._bias({name: num_outputs}) if has_bias else None)

    def attention(
        self,
        *,
        qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj"),
        o: str = "o_proj",
        by_group: bool = False,
        has_unit_norms: bool = False,
    ) -> Attention:
        """qkv: three names, or that of one matrix, whose rows follow each other group by group with `by_group`"""
        config = self._config
        sizes = (config.q_size, config.kv_size, config.kv_size)
        named = dict(zip(qkv, sizes if len(qkv) == len(sizes) else (sum(sizes),), strict=True))
        stored, bias = self.quantized(*named), self._bias(named) if config.qkv_bias else None
        weight = self.matrix(named, config.hidden_size, stored=stored)
        if by_group:
            weight = self._ungrouped(weight) if isinstance(weight, Tensor) else weight.rows(self._ungrouped)
            bias = None if bias is None else self._ungrouped(bias)
        norms: dict[str, Any] = {}
        if config.qk_norm:
            norms = {n: self.rms_norm(n, size=config.head_dim, is_unit=has_unit_norms) for n in ("q_norm", "k_norm")}
        if config.has_sinks:
            norms["sinks"] = self.tensor("sinks", config.num_q_heads).float()
        out = self.linear({o: config.hidden_size}, config.q_size, has_bias=config.o_bias)
        return Attention(qkv=self._linears.make(weight, bias, stored=stored), o=out, **norms)

    def gated_mlp(
        self, *, gate_up: tuple[str, ...] = ("gate_proj", "up_proj"), down: str = "down_proj", size: int | None = None
    ) -> GatedMlp:
        """gate_up: two names, or that of one matrix; size: I"""
        config, inner = self._config, size or self._config.intermediate_size
        named = dict.fromkeys(gate_up, 2 * inner // len(gate_up))
        return GatedMlp(
            self.linear(named, config.hidden_size, has_bias=config.mlp_bias, least=_INNER),
            self.linear({down: config.hidden_size}, inner, has_bias=config.mlp_bias),
            config.activation,
        )

    def plain_mlp(self, *, up: str, down: str) -> PlainMlp:
        config = self._config
        return PlainMlp(
            self.linear({up: config.intermediate_size}, config.hidden_size, has_bias=config.mlp_bias, least=_INNER),
            self.linear({down: config.hidden_size}, config.intermediate_size, has_bias=config.mlp_bias),
            config.activation,
        )

    def experts(self, *, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj") -> Experts:
        """Build experts whose tensors have a number each."""
        hidden, own, shared, found = self._config.hidden_size, self._own_experts, None, []
        names = [f"experts.{index}.{name}" for index in range(own.num_experts) for name in (gate, up, down)]
        stored, inner = self.quantized(*names), own.intermediate_size
        for index in range(own.num_experts):
            matrix = partial(self.under(f"experts.{index}.").matrix, stored=stored, takes_fp8=False)
            gate_up = matrix(dict.fromkeys((gate, up), inner), hidden, least=_INNER)
            found.append(ExpertTensors(gate_up, matrix({down: hidden}, inner)))
        if own.shared_size is not None:
            mlp = self.under("shared_expert.").gated_mlp(size=own.shared_size)
            shared = SharedExpert(mlp, self.gate("shared_expert_gate", 1))
        return self._experts(self.gate("gate", own.num_experts), found, shared, stored)

    def fused_experts(self) -> Experts:
        """Build gpt-oss's experts: one tensor of all, in MXFP4 or not, with gates and ups in turns."""
        hidden, own, at = self._config.hidden_size, self._own_experts, self.under("experts.")
        gate_up, gate_up_bias = at._fused("gate_up_proj", own.num_experts, 2 * own.intermediate_size, hidden)
        down, down_bias = at._fused("down_proj", own.num_experts, hidden, own.intermediate_size)
        by_expert = zip(gate_up, down, gate_up_bias, down_bias, strict=True)
        found = [ExpertTensors(_gates_first(up), out, _gates_first(b), c) for up, out, b, c in by_expert]
        return self._experts(self.gate("router", own.num_experts, has_bias=True), found)

    @property
    def _own_experts(self) -> ExpertsConfig:
        assert self._config.experts is not None
        return self._config.experts

    def _experts(
        self,
        router: Linear,
        found: list[ExpertTensors],
        shared: SharedExpert | None = None,
        stored: Sequence[Quantized | None] = (None,),
    ) -> Experts:
        own, activation, first = self._own_experts, self._config.activation, found[0].down
        experts: GroupedExperts | SeparateExperts
        if can_group(first.device, first.dtype):
            experts = GroupedExperts(found, activation)  # no kernel has codes there
            self._linears.num_bytes[str(first.dtype).removeprefix("torch.")] += experts.num_bytes
        else:
            make = partial(self._linears.make, stored=stored, takes_fp8=False)
            matrices = ((make(e.gate_up, e.gate_up_bias, least=_INNER), make(e.down, e.down_bias)) for e in found)
            experts = SeparateExperts([GatedMlp(*both, activation) for both in matrices])
        num_chosen, is_normalized = own.num_chosen, own.is_normalized
        return Experts(
            router=router, experts=experts, num_chosen=num_chosen, is_normalized=is_normalized, shared=shared
        )

    def _bias(self, size_by_name: dict[str, int]) -> Tensor:
        biases = [self.tensor(f"{name}.bias", size) for name, size in size_by_name.items()]
        return biases[0] if len(biases) == 1 else join_rows(biases)

    def _ungrouped(self, rows: Tensor) -> Tensor:
        """Put the queries of all groups first, then the keys, then the values."""
        config = self._config
        group = config.num_q_heads // config.num_kv_heads
        grouped = rows.view(config.num_kv_heads, group + 2, config.head_dim, *rows.shape[1:])
        parts = (grouped[:, :group], grouped[:, group : group + 1], grouped[:, group + 1 :])
        return join_rows([part.flatten(0, 2) for part in parts])

    def _fused(self, name: str, num_experts: int, num_outputs: int, num_inputs: int) -> tuple[Tensor, Tensor]:
        """Return weights [E, outputs, inputs], which lie the other way round or in MXFP4, and biases [E, outputs]."""
        bias = self.tensor(f"{name}_bias", num_experts, num_outputs)
        if not self.has(f"{name}_blocks"):
            return self.tensor(name, num_experts, num_inputs, num_outputs).transpose(1, 2), bias
        blocks = (num_experts, num_outputs, num_inputs // _FP4_BLOCK)
        packed = self._source.stored(f"{self._prefix}{name}_blocks", *blocks, _FP4_BLOCK // 2)
        scales = self._source.stored(f"{self._prefix}{name}_scales", *blocks)
        if not scales.is_meta and int(scales.max()) > _FP4_LARGEST:
            raise CheckpointError(f"{self._prefix}{name}_scales has a scale that is NaN or too large")
        values = torch.tensor([*_FP4, *(-value for value in _FP4)], dtype=bias.dtype, device=packed.device)
        numbers = torch.stack((values[(packed & 15).int()], values[(packed >> 4).int()]), -1).flatten(-2)
        return torch.ldexp(numbers, (scales.int() - 127)[..., None]).flatten(-2).to(bias.dtype), bias


def _joined(parts: Sequence[Codes | Fp8Codes]) -> Codes | Fp8Codes | None:
    """Join rows of weights that are multiplied in the same bits."""
    if isinstance(parts[0], Fp8Codes):
        return join_fp8(cast("Sequence[Fp8Codes]", parts))
    return joined(cast("Sequence[Codes]", parts))


def _gates_first(rows: Tensor) -> Tensor:
    """Put even rows, which are gates, before odd ones."""
    return join_rows((rows[::2], rows[1::2]))
