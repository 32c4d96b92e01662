"""The layers of a decoder whose MLPs are dense, in one call instead of one for each operation (cpp/layers.cpp).

A layer's calls took 110 to 170 us of Python and torch beside their arithmetic (an EPYC core, 1 to 32 rows): 4 ms of a
step of 30 layers. The compiled functions are those that `linear`, `ops`, `write_kv` and `attend` call, with the same
arguments, so results are the same bits.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mneme.kernels.arguments import AttendArgs
from mneme.kernels.native.backend import prepare
from mneme.kernels.native.library import COUNT, DTYPE_NUMBERS, NUMBER, POINTER, REAL, native_function, num_threads
from mneme.kernels.native.ops import ACTIVATIONS
from mneme.kernels.plan import Plan
from mneme.kernels.rope import RopeTable


class _Norm(ctypes.Structure):
    _fields_ = (("weight", POINTER), ("eps", REAL))


class _Weights(ctypes.Structure):
    _fields_ = (
        *((name, POINTER) for name in ("qkv", "o", "gate_up", "down")),
        *((name, _Norm) for name in ("q_norm", "k_norm", "mlp_norm", "next_norm")),
        ("activation", NUMBER),
    )


class _Run(ctypes.Structure):
    _fields_ = (
        *((name, POINTER) for name in ("layers", "steps")),
        *((name, COUNT) for name in ("num_layers", "hidden_size", "num_slots", "num_sampled", "pool_bytes")),
        *((name, POINTER) for name in ("k_pages", "v_pages", "slots", "positions", "sampled_rows")),
        *((name, POINTER) for name in ("hidden", "normed", "out")),
        ("num_threads", NUMBER),
    )


class RmsWeights(NamedTuple):
    """Holds the weights of an RMS norm."""

    weight: Tensor
    eps: float


class DenseLayer(NamedTuple):
    """Names the weights of one layer, all of one dtype."""

    qkv: int  # addresses of packed weights, which live as long as the layers
    o: int
    gate_up: int
    down: int
    activation: str
    head_norms: tuple[RmsWeights, ...]  # of each query and of each key; none: empty
    mlp_norm: RmsWeights
    next_norm: RmsWeights  # of the next layer, or the last one


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRows:
    """Holds what a step's rows are to all layers, T in all, of which S are sampled."""

    slots: Tensor  # int [T] where keys and values are written
    key_positions: Tensor  # int [T] for which keys are rotated
    sampled_rows: Tensor  # int64 [S]
    k_pages: Tensor  # [num_layers, num_kv_heads, num_pages, page_size, head_dim]
    v_pages: Tensor  # like k_pages
    slot_position: Tensor  # int32 [num_pages * page_size]
    plan: Plan


class NativeLayers:
    """Runs the layers of one decoder."""

    def __init__(
        self,
        layers: Sequence[DenseLayer],
        ropes: Sequence[RopeTable | None],
        windows: Sequence[int | None],
        *,
        softmax_scale: float,
        soft_cap: float | None,
    ) -> None:
        self._layers, self._ropes, self._windows = layers, ropes, windows
        self._softmax_scale, self._soft_cap = softmax_scale, soft_cap
        self._weights = (_Weights * len(layers))(*map(_weights, layers))

    def begin(self, hidden: Tensor, normed: Tensor, rows: LayerRows) -> LayersRun:
        """Make ready to run a step: hidden [T, H], which is changed, and its first norm, both contiguous."""
        if not hidden.is_contiguous() or not normed.is_contiguous():
            raise ValueError("hidden, normed: must be contiguous")
        plan, hidden_size = rows.plan, hidden.shape[1]
        q = hidden.new_empty(len(hidden), plan.num_q_heads, plan.head_dim)  # stands for what the layers will ask
        kinds = list(zip(self._ropes, self._windows, strict=True))
        prepared = {kind: prepare(self._attended(q, rows, *kind)) for kind in dict.fromkeys(kinds)}
        steps = (POINTER * len(kinds))(*(prepared[kind].address for kind in kinds))
        slots, positions = (x.to(torch.int64).contiguous() for x in (rows.slots, rows.key_positions))
        out = hidden.new_empty(len(rows.sampled_rows), hidden_size)
        run = _Run(
            layers=ctypes.addressof(self._weights),
            steps=ctypes.addressof(steps),
            num_layers=len(self._layers),
            hidden_size=hidden_size,
            num_slots=len(rows.slot_position),
            num_sampled=len(rows.sampled_rows),
            pool_bytes=rows.k_pages.stride(0) * rows.k_pages.element_size(),
            k_pages=rows.k_pages.data_ptr(),
            v_pages=rows.v_pages.data_ptr(),
            slots=slots.data_ptr(),
            positions=positions.data_ptr(),
            sampled_rows=rows.sampled_rows.data_ptr(),
            hidden=hidden.data_ptr(),
            normed=normed.data_ptr(),
            out=out.data_ptr(),
            num_threads=num_threads(),
        )
        alive = (hidden, normed, prepared, steps, slots, positions, rows)
        return LayersRun(run, out, alive)

    def _attended(self, q: Tensor, rows: LayerRows, rope: RopeTable | None, window: int | None) -> AttendArgs:
        args = AttendArgs(
            q, rows.k_pages[0], rows.v_pages[0], rows.slot_position, rope, rows.plan, self._softmax_scale, window,
            self._soft_cap,
        )  # fmt: skip
        args.check()
        return args


class LayersRun:
    """Is one step's way through the layers."""

    def __init__(self, run: _Run, out: Tensor, alive: tuple[object, ...]) -> None:
        """out [S, H] gets the sampled rows' hidden states behind the last norm; `alive`: all that `run` points to."""
        self.out = out
        self._run, self._alive = run, alive

    def run(self, first: int, last: int) -> None:
        """Run the layers [first, last). Raises ValueError for a slot or position out of range."""
        row = native_function("mneme_layers")(ctypes.addressof(self._run), first, last)
        if row >= 0:
            raise ValueError(f"slots, positions: row {row} is out of range")


def _weights(layer: DenseLayer) -> _Weights:
    norms = (*(layer.head_norms or (None, None)), layer.mlp_norm, layer.next_norm)
    in_c = (_Norm(None, 0.0) if norm is None else _Norm(norm.weight.data_ptr(), norm.eps) for norm in norms)
    return _Weights(layer.qkv, layer.o, layer.gate_up, layer.down, *in_c, ACTIVATIONS[layer.activation])


def can_run(dtype: torch.dtype, activation: str) -> bool:
    """Tell whether there is compiled code for such layers, on a CPU."""
    return dtype in DTYPE_NUMBERS and activation in ACTIVATIONS
