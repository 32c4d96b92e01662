"""ChunkAttention appendix A: work and intensity of each module, and its time beside the roof's.

Intensity is the paper's (scores of the attention written and read once); the roof is the larger of flops over the
measured matrix rate and bytes over the measured copy rate, with attention counted as a fused causal kernel does it.
Sizes of Llama-2-7B, one layer, 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from attention.arms import check, ours, reference_rows
from attention.bench import DTYPES, Bench, NotRun
from attention.equations import (
    LLAMA_2_7B,
    Cost,
    attention_decode,
    attention_decode_fused,
    attention_prefill,
    attention_prefill_fused,
    linear_costs,
)
from attention.report import PartResult
from attention.scenes import Heads, prefix_scene
from attention.timing import Arm, interleaved
from torch import Tensor

_DIMS = LLAMA_2_7B
_HEADS = Heads(_DIMS.num_q_heads, _DIMS.num_kv_heads, _DIMS.head_dim)


class Point(NamedTuple):
    stage: str
    batch: int
    length: int  # of the prompt, or the context behind each decoded token


def run(bench: Bench) -> PartResult:
    """One row per point and module."""
    prompts = bench.pick(cuda=[(1, 1024), (1, 4096), (1, 8192), (4, 1024)], cpu=[(1, 128), (1, 512)], quick=[(1, 64)])
    decodes = bench.pick(
        cuda=[(b, n) for b in (1, 8, 32, 128) for n in (2048, 8192)], cpu=[(1, 1024), (8, 1024), (32, 1024)],
        quick=[(4, 256)],
    )  # fmt: skip
    points = [Point("prefill", *point) for point in prompts] + [Point("decode", *point) for point in decodes]
    products = _Products(bench)
    rows = []
    for row in bench.sweep(points, lambda point: {"modules": _measure(bench, point, products)}):
        rows += [row | module for module in row.pop("modules", [{}])]
    title = "appendix A roofline, Llama-2-7B, one layer, 16 bits; ms"
    return PartResult(name="roofline", title=title, rows=rows)


class _Products:
    """Weights of the linear modules, made once."""

    def __init__(self, bench: Bench) -> None:
        self.dtype = DTYPES["bfloat16"]
        self._device = bench.device
        qkv = _DIMS.q_width + 2 * _DIMS.kv_width
        self._qkv = self.random(qkv, _DIMS.hidden)
        self._gate_up = self.random(2 * _DIMS.intermediate, _DIMS.hidden)
        self._down = self.random(_DIMS.hidden, _DIMS.intermediate)
        self._output = self.random(_DIMS.vocab, _DIMS.hidden)

    def random(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self._device).normal_(std=0.02)

    def calls(self, rows: int) -> dict[str, Callable[[int], Tensor]]:
        """Each module over `rows` tokens; 100 MB of weights and more, so no cache holds them."""
        x = self.random(rows, _DIMS.hidden)

        def mlp(_layer: int) -> Tensor:
            gate, up = F.linear(x, self._gate_up).chunk(2, -1)
            return F.linear(F.silu(gate) * up, self._down)

        return {
            "qkv": lambda _layer: F.linear(x, self._qkv),
            "mlp": mlp,
            "output": lambda _layer: F.linear(x, self._output),
        }


def _measure(bench: Bench, point: Point, products: _Products) -> list[dict[str, Any]]:
    is_prefill = point.stage == "prefill"
    if not bench.may_read(point.batch * point.length * 4 * _DIMS.kv_width):
        raise NotRun("too long for this device")
    rows = point.batch * (point.length if is_prefill else 1)
    shape = (_DIMS, point.batch, point.length)
    papers = linear_costs(_DIMS, rows) | {"attention": (attention_prefill if is_prefill else attention_decode)(*shape)}
    fused = papers | {"attention": (attention_prefill_fused if is_prefill else attention_decode_fused)(*shape)}
    rows_per_sequence = point.length if is_prefill else 1
    options = bench.options(_HEADS, products.dtype)
    scene = prefix_scene(point.batch, 0, point.length, rows_per_sequence=rows_per_sequence, **options)
    attention = ours(scene, "attention")
    check(attention, reference_rows(scene), products.dtype)
    arms = [Arm(name, call) for name, call in products.calls(rows).items()]
    times = interleaved([*arms, attention], bench.device, budget_s=bench.point_s, now_s=bench.now_s, min_rounds=2)
    return [
        _row(bench, name, papers[name], fused[name], times.ms(name), products.dtype)
        for name in ("qkv", "attention", "mlp", "output")
    ]


def _row(bench: Bench, name: str, paper: Cost, fused: Cost, ms: float, dtype: torch.dtype) -> dict[str, Any]:
    compute_ms = fused.flops / bench.ceilings.flops_per_s[dtype] * 1e3
    memory_ms = fused.io_bytes / bench.ceilings.copy_bytes_per_s * 1e3
    return {
        "module": name,
        "GFLOP": paper.flops / 1e9,
        "IO_GB": paper.io_bytes / 1e9,
        "intensity": paper.intensity,
        "bound": "compute" if compute_ms > memory_ms else "memory",
        "roof": max(compute_ms, memory_ms),
        "measured": ms,
        "of_roof": max(compute_ms, memory_ms) / ms,
        "fused_intensity": fused.intensity,
        "TFLOP/s": fused.flops / ms / 1e9,
    }
