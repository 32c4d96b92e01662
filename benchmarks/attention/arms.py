"""The arms that every device has: ours, and torch's SDPA over contiguous and over gathered KV.

Each baseline is called in the ways that could be fastest and the fastest of a family counts: over the batch in one call
and sequence by sequence; the query heads of a group as rows of one head (`enable_gqa` copies on a CPU, and costs 7
times the whole there, so it is tried on CUDA only: optional_arms.py). Baselines get queries that were rotated
beforehand; our arms rotate theirs. Contiguous KV was copied, and keys turned to their positions, outside of the timing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
import torch.nn.functional as F
from attention.scenes import Scene, contiguous_layers, rotated_q
from attention.timing import Arm
from torch import Tensor

from mneme.kernels.arguments import dequantized
from mneme.kernels.attention import attend
from mneme.kernels.page_table import PageTable, QueryRows
from mneme.kernels.work import Share

# Norm of the error over the norm of the result, against float64; every arm, ours and theirs.
TOLERANCE = {torch.float32: 2e-4, torch.float16: 2e-3, torch.bfloat16: 1e-2}
_LONG_TOKENS = 4096


def ours(scene: Scene, name: str = "auto", share: Share = "auto", backend: str = "auto") -> Arm:
    """Our attention; the plan is built once, as for all layers of a step."""
    plan = scene.plan(share)
    # The torch backend waits for the host, which ends a capture.
    is_capturable = backend != "torch"
    buffers = own_buffers(scene.q.device)

    def call(layer: int) -> Tensor:
        with buffers:
            return scene.attend(layer, plan, backend=backend)

    return Arm(name, call, len(scene.layers), is_capturable=is_capturable)


def own_buffers(device: torch.device) -> AbstractContextManager[object]:
    """Buffers for one plan: a captured pass finds it where it was, whatever other plans have run since."""
    if device.type != "cuda":
        return nullcontext()
    try:
        from mneme.kernels.triton.step import OwnStep
    except ImportError:
        return nullcontext()
    return OwnStep(device)


def contiguous(scene: Scene, cache_bytes: int = 0) -> list[Arm]:
    """SDPA over [B, Hkv, L, D]; sequences must have one length."""
    layers = contiguous_layers(scene, cache_bytes)
    num_layers = len(layers)
    grouped = _grouped_q(scene)
    mask = _causal_mask(scene, scene.lengths[0])

    def batched(layer: int) -> Tensor:
        return F.scaled_dot_product_attention(grouped, *layers[layer], attn_mask=mask)

    def per_sequence(layer: int) -> Tensor:
        k, v = layers[layer]
        outs = [
            F.scaled_dot_product_attention(grouped[i : i + 1], k[i : i + 1], v[i : i + 1], attn_mask=mask)
            for i in range(len(k))
        ]
        return torch.cat(outs)

    found = [_grouped_arm("contiguous/batched", batched, num_layers, scene)]
    if len(scene.tables) > 1:
        found.append(_grouped_arm("contiguous/per_sequence", per_sequence, num_layers, scene))
    return found


def gathered(scene: Scene) -> list[Arm]:
    """Copy the pages of the pool into contiguous KV in every call, then SDPA."""
    device, heads = scene.q.device, scene.heads
    ids = [torch.from_numpy(table.page_ids.astype(np.int64)).to(device) for table in scene.tables]
    together = torch.cat(ids)
    grouped = _grouped_q(scene)
    by_head = grouped.transpose(0, 1).contiguous()  # [Hkv, B, rows, D]
    mask = _causal_mask(scene, scene.lengths[0])

    def batched(layer: int) -> Tensor:
        shape = (heads.kv, len(ids), -1, heads.dim)
        k, v = (pages.index_select(1, together).view(shape) for pages in scene.layers[layer])
        return F.scaled_dot_product_attention(by_head, k, v, attn_mask=mask)

    def per_sequence(layer: int) -> Tensor:
        outs = []
        for i, own in enumerate(ids):
            k, v = (pages.index_select(1, own).view(1, heads.kv, -1, heads.dim) for pages in scene.layers[layer])
            outs.append(F.scaled_dot_product_attention(grouped[i : i + 1], k, v, attn_mask=mask))
        return torch.cat(outs)

    num_layers = len(scene.layers)
    by_head_arm = _grouped_arm("gather/batched", batched, num_layers, scene, heads_first=True)
    return [by_head_arm, _grouped_arm("gather/per_sequence", per_sequence, num_layers, scene)]


def virtual_queries(scene: Scene, share: Share = "auto") -> Arm:
    """Each query once per delta of its sequence, rotated in a pass of its own; un-rotated attention; a merge.

    A kernel without a delta per row must do this; Hogwild! inference rotates like it (arXiv 2504.06261).
    """
    tables, rows = _tables_by_delta(scene)
    sequence, delta = (torch.tensor(values, device=scene.q.device) for values in zip(*rows, strict=True))
    position = torch.from_numpy(scene.rows.arrays()[1]).to(scene.q.device)[sequence] - delta
    local = QueryRows(np.arange(len(rows)), position.cpu().numpy())
    plan = scene.plan_of(tables, local, share)
    num_parts = len(rows) // len(scene.tables)  # of a sequence; the same for all
    buffers = own_buffers(scene.q.device)

    def call(layer: int) -> Tensor:
        q = scene.rope.rotate(scene.q.index_select(0, sequence), position).to(scene.q.dtype)
        with buffers:
            out, lse = scene.attend_rows(layer, plan, q, rope=False)
        weights = lse.view(-1, num_parts, lse.shape[1]).softmax(1)
        return (out.float().view(-1, num_parts, *out.shape[1:]) * weights[..., None]).sum(1).to(q.dtype)

    return Arm("virtual", call, len(scene.layers))


def _tables_by_delta(scene: Scene) -> tuple[list[PageTable], list[tuple[int, int]]]:
    """A page table for each (sequence, delta), and that pair; delta 0 in the frame of the pages."""
    tables, rows = [], []
    for number, table in enumerate(scene.tables):
        for delta in np.unique(table.deltas):
            tables.append(PageTable.own(table.page_ids[table.deltas == delta]))
            rows.append((number, int(delta)))
    return tables, rows


def reference_rows(scene: Scene) -> dict[int, Tensor]:
    """The last row of some sequences in float64, by its index in q; of one sequence where contexts are long."""
    num_sequences = len(scene.tables)
    count = 3 if max(scene.lengths) <= _LONG_TOKENS else 1
    sampled = sorted({round(i) for i in np.linspace(num_sequences - 1, 0, count)})
    return {(i + 1) * scene.rows_per_sequence - 1: _reference_row(scene, i) for i in sampled}


def error_of(out: Tensor, wanted: dict[int, Tensor]) -> float:
    """Largest relative error of the sampled rows; out is [T, Hq, D]."""
    return max(float((out[row].double() - right).norm() / right.norm()) for row, right in wanted.items())


def check(arm: Arm, wanted: dict[int, Tensor], dtype: torch.dtype) -> None:
    """Refuse to time an arm that computes something else."""
    error = error_of(arm.output(), wanted)
    if not error <= TOLERANCE[dtype]:
        raise AssertionError(f"{arm.name}: relative error {error:.2g} against float64")


def _reference_row(scene: Scene, sequence: int) -> Tensor:
    """In a pool of this sequence's pages alone, so that a long scene fits in float64."""
    table = scene.tables[sequence]
    row = (sequence + 1) * scene.rows_per_sequence - 1
    ids = torch.from_numpy(table.page_ids.astype(np.int64)).to(scene.q.device)
    keys, values = (dequantized(pages.index_select(1, ids)).float() for pages in scene.layers[0])
    positions = scene.slot_position.view(-1, scene.page_size).index_select(0, ids).flatten()
    own = PageTable(np.arange(len(table), dtype=np.int32), table.deltas, table.masks)
    alone = QueryRows([0], scene.rows.arrays()[1][row : row + 1])
    plan = scene.plan_of([own], alone, "never")
    out, _ = attend(
        scene.q[row : row + 1].float(), keys, values, positions, scene.rope, plan,
        softmax_scale=scene.scale, backend="reference",
    )  # fmt: skip
    return out[0].double()


def _grouped_q(scene: Scene) -> Tensor:
    """[B, Hkv, group * rows, D]: the query heads of a KV head, and all rows of each, as rows."""
    heads, rows = scene.heads, scene.rows_per_sequence
    q = rotated_q(scene).view(-1, rows, heads.kv, heads.group, heads.dim)
    return q.permute(0, 2, 3, 1, 4).reshape(len(scene.tables), heads.kv, -1, heads.dim).contiguous()


def _causal_mask(scene: Scene, length: int) -> Tensor | None:
    """bool [group * rows, length] for several rows; a single row sees everything."""
    rows = scene.rows_per_sequence
    if rows == 1:
        return None
    row = torch.arange(rows, device=scene.q.device).repeat(scene.heads.group)
    return torch.arange(length, device=scene.q.device) <= (length - rows) + row[:, None]


def _grouped_arm(
    name: str, call: Callable[[int], Tensor], num_layers: int, scene: Scene, heads_first: bool = False
) -> Arm:
    """An arm that gives [B, Hkv, group * rows, D] (or heads first)."""

    def unpack(out: Tensor) -> Tensor:
        out = out.transpose(0, 1) if heads_first else out
        heads = scene.heads
        rows = out.reshape(-1, heads.kv, heads.group, scene.rows_per_sequence, heads.dim)
        return rows.permute(0, 3, 1, 2, 4).reshape(-1, heads.q, heads.dim)

    return Arm(name, call, num_layers, unpack)
