"""What is attended: a pool of random keys, page tables and query rows, in several layers of different memory.

A *block* is a run of tokens that sit in pages of their own; sequences *use* blocks, each with a delta. Pages lie in the
pool in random order, as they do after a while of serving. All layers hold the same numbers, so one check serves all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mneme.kernels.arguments import quantized
from mneme.kernels.attention import PageTable, Plan, QueryRows, RopeTable, attend, build_plan, share_cost_of
from mneme.kernels.page_table import IntArray
from mneme.kernels.work import Share

MAX_LAYERS = 32
_TIMES_THE_CACHE = 3  # bytes of all layers together
_ROPE_THETA = 500_000.0


class Heads(NamedTuple):
    """Query heads, KV heads and their dimension."""

    q: int
    kv: int
    dim: int

    @property
    def group(self) -> int:
        return self.q // self.kv

    def __str__(self) -> str:
        return f"{self.q}/{self.kv}x{self.dim}"


class Block(NamedTuple):
    """`num_tokens` (whole pages) whose keys were rotated at `start`, `start + 1`, ..."""

    num_tokens: int
    start: int = 0


class Use(NamedTuple):
    """A sequence sees a block, `delta` positions behind where it was rotated."""

    block: int
    delta: int = 0


@dataclass(frozen=True, kw_only=True)
class Scene:
    """One attention call and its layers; every sequence has `rows_per_sequence` query rows, its last tokens."""

    heads: Heads
    page_size: int
    tables: tuple[PageTable, ...]
    rows: QueryRows
    rows_per_sequence: int
    layers: tuple[tuple[Tensor, Tensor], ...]  # keys and values, each [Hkv, num_pages, page_size, D], int8: D + 4
    slot_position: Tensor
    rope: RopeTable
    q: Tensor  # [T, Hq, D] un-rotated

    @property
    def scale(self) -> float:
        return float(self.heads.dim**-0.5)

    @property
    def token_bytes(self) -> int:
        """Key and value of one token in one layer."""
        keys = self.layers[0][0]
        return 2 * self.heads.kv * keys.shape[3] * keys.element_size()

    @property
    def lengths(self) -> list[int]:
        """Tokens that each sequence sees."""
        return [len(table) * self.page_size for table in self.tables]

    @property
    def bytes_apart(self) -> int:
        """KV that sequence-first attention reads."""
        return sum(self.lengths) * self.token_bytes

    @property
    def bytes_once(self) -> int:
        """KV of all distinct pages: the least that anybody reads."""
        pages = np.unique(np.concatenate([table.page_ids for table in self.tables]))
        return len(pages) * self.page_size * self.token_bytes

    def plan(self, share: Share = "auto") -> Plan:
        """The plan of one step."""
        return self.plan_of(self.tables, self.rows, share)

    def plan_of(self, tables: Sequence[PageTable], rows: QueryRows, share: Share) -> Plan:
        """`build_plan` for the scene's heads, pages and device."""
        return build_plan(
            tables, rows, page_size=self.page_size, num_q_heads=self.heads.q, num_kv_heads=self.heads.kv,
            head_dim=self.heads.dim, share=share, cost=share_cost_of(self.q.device, self.q.dtype),
        )  # fmt: skip

    def attend(self, layer: int, plan: Plan, *, backend: str = "auto", rope: bool = True) -> Tensor:
        """[T, Hq, D]."""
        return self.attend_rows(layer, plan, self.q, backend=backend, rope=rope)[0]

    def attend_rows(
        self, layer: int, plan: Plan, q: Tensor, *, backend: str = "auto", rope: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Out and lse for other queries than the scene's."""
        keys, values = self.layers[layer]
        table = self.rope if rope else None
        return attend(
            q, keys, values, self.slot_position, table, plan, softmax_scale=self.scale, backend=backend  # type: ignore[arg-type]
        )  # fmt: skip


def build_scene(
    blocks: Sequence[Block],
    uses: Sequence[Sequence[Use]],
    *,
    heads: Heads,
    dtype: torch.dtype,
    device: torch.device,
    page_size: int = 32,
    rows_per_sequence: int = 1,
    room: int = 0,
    cache_bytes: int = 0,
    seed: int = 0,
) -> Scene:
    """A scene in as many layers as overflow a cache of `cache_bytes`; rows stand `room` positions behind the end."""
    assert all(block.num_tokens % page_size == 0 for block in blocks), "blocks are whole pages"
    rng = np.random.default_rng(seed)
    counts = np.array([block.num_tokens // page_size for block in blocks])
    page_ids = np.split(rng.permutation(counts.sum()), np.cumsum(counts)[:-1])
    ends = [max(blocks[use.block].start + use.delta + blocks[use.block].num_tokens for use in own) for own in uses]
    generator = torch.Generator(device).manual_seed(seed)
    num_pages = int(counts.sum())
    shape = (heads.kv, num_pages, page_size, heads.dim)
    first = tuple(_random(shape, dtype, device, generator) for _ in range(2))
    num_layers = layers_for(2 * first[0].numel() * first[0].element_size(), cache_bytes)
    return Scene(
        heads=heads,
        page_size=page_size,
        tables=tuple(_table(own, page_ids) for own in uses),
        rows=_rows(ends, rows_per_sequence, room),
        rows_per_sequence=rows_per_sequence,
        layers=((first[0], first[1]), *((first[0].clone(), first[1].clone()) for _ in range(num_layers - 1))),
        slot_position=_slot_position(blocks, page_ids, page_size).to(device),
        rope=_rope(heads.dim, _next_power_of_two(max(ends) + room), device),
        q=_random((len(uses) * rows_per_sequence, heads.q, heads.dim), dtype, device, generator),
    )


def layers_for(layer_bytes: int, cache_bytes: int) -> int:
    """Copies of a layer that overflow the cache; one where it does by itself."""
    return min(MAX_LAYERS, max(1, -(-_TIMES_THE_CACHE * cache_bytes // max(layer_bytes, 1))))


def prefix_scene(batch: int, shared: int, private: int, **options: object) -> Scene:
    """Every sequence sees the same `shared` tokens and then `private` tokens of its own; either may be 0."""
    blocks = ([Block(shared)] if shared else []) + ([Block(private, shared)] * batch if private else [])
    own = 1 if shared else 0
    common = [Use(0)] if shared else []
    uses = [[*common, *([Use(own + i)] if private else [])] for i in range(batch)]
    return build_scene(blocks, uses, **options)  # type: ignore[arg-type]


def int8_scene(scene: Scene, cache_bytes: int = 0) -> Scene:
    """The same scene with its keys and values in 8 bits, in as many layers as overflow the cache."""
    keys, values = (quantized(pages) for pages in scene.layers[0])
    num_layers = layers_for(2 * keys.numel(), cache_bytes)
    return replace(scene, layers=((keys, values), *((keys.clone(), values.clone()) for _ in range(num_layers - 1))))


def documents_scene(
    orders: Sequence[Sequence[int]], num_documents: int, document_tokens: int, private: int, **options: object
) -> Scene:
    """Sequence i sees the documents `orders[i]` one behind the other, then tokens of its own."""
    blocks = [Block(document_tokens)] * num_documents
    blocks += [Block(private, len(order) * document_tokens) for order in orders]
    uses = [
        [*(Use(document, slot * document_tokens) for slot, document in enumerate(order)), Use(num_documents + i)]
        for i, order in enumerate(orders)
    ]
    return build_scene(blocks, uses, **options)  # type: ignore[arg-type]


def unshared(scene: Scene, cache_bytes: int = 0, seed: int = 0) -> Scene:
    """The same attention over pages of which every sequence has copies of its own, in random order."""
    ids = np.concatenate([table.page_ids for table in scene.tables])
    place = np.random.default_rng(seed).permutation(len(ids))  # where in the new pool each page goes
    source = torch.from_numpy(ids[np.argsort(place)].astype(np.int64)).to(scene.q.device)
    keys, values = (pages.index_select(1, source) for pages in scene.layers[0])
    num_layers = layers_for(2 * keys.numel() * keys.element_size(), cache_bytes)
    position = scene.slot_position.view(-1, scene.page_size).index_select(0, source).flatten()
    parts = np.split(place, np.cumsum([len(table) for table in scene.tables])[:-1])
    tables = tuple(
        PageTable(part.astype(np.int32), table.deltas, table.masks)
        for part, table in zip(parts, scene.tables, strict=True)
    )
    layers = ((keys, values), *((keys.clone(), values.clone()) for _ in range(num_layers - 1)))
    return replace(scene, tables=tables, layers=layers, slot_position=position)


def contiguous_kv(scene: Scene) -> tuple[Tensor, Tensor]:
    """Keys and values as other engines keep them, [B, Hkv, L, D]: keys rotated to where each sequence uses them."""
    keys, values = [], []
    for table in scene.tables:
        ids = torch.from_numpy(table.page_ids.astype(np.int64)).to(scene.q.device)
        own_keys, own_values = (pages.index_select(1, ids).flatten(1, 2) for pages in scene.layers[0])
        keys.append(_moved(own_keys, table, scene))
        values.append(own_values)
    return torch.stack(keys), torch.stack(values)


def contiguous_layers(scene: Scene, cache_bytes: int = 0) -> list[tuple[Tensor, Tensor]]:
    """`contiguous_kv` in as many copies as overflow the cache."""
    keys, values = contiguous_kv(scene)
    num_layers = layers_for(2 * keys.numel() * keys.element_size(), cache_bytes)
    return [(keys, values), *((keys.clone(), values.clone()) for _ in range(num_layers - 1))]


def rotated_q(scene: Scene) -> Tensor:
    """The queries at their own positions, [T, Hq, D]."""
    positions = torch.from_numpy(scene.rows.arrays()[1])
    return scene.rope.rotate(scene.q, positions.to(scene.q.device)).to(scene.q.dtype)


def _moved(keys: Tensor, table: PageTable, scene: Scene) -> Tensor:
    """Keys [Hkv, L, D] turned on by their deltas, which must not be negative here."""
    if not table.deltas.any():
        return keys
    deltas = torch.from_numpy(np.repeat(table.deltas.astype(np.int64), scene.page_size)).to(keys.device)
    return scene.rope.rotate(keys.transpose(0, 1), deltas).transpose(0, 1).to(keys.dtype)


def _random(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device).normal_(generator=generator)


def _table(uses: Sequence[Use], page_ids: Sequence[IntArray]) -> PageTable:
    own = [page_ids[use.block] for use in uses]
    deltas = np.repeat([use.delta for use in uses], [len(ids) for ids in own])
    table = PageTable.own(np.concatenate(own))
    return PageTable(table.page_ids, deltas.astype(np.int32), table.masks)


def _rows(ends: Sequence[int], rows_per_sequence: int, room: int) -> QueryRows:
    sequence = np.repeat(np.arange(len(ends)), rows_per_sequence)
    first = np.array(ends) + room - rows_per_sequence
    return QueryRows(sequence, (first[:, None] + np.arange(rows_per_sequence)).ravel())


def _slot_position(blocks: Sequence[Block], page_ids: Sequence[IntArray], page_size: int) -> Tensor:
    position = torch.empty(sum(map(len, page_ids)), page_size, dtype=torch.int32)
    for block, ids in zip(blocks, page_ids, strict=True):
        tokens = torch.arange(block.start, block.start + block.num_tokens, dtype=torch.int32)
        position[torch.from_numpy(ids)] = tokens.view(-1, page_size)
    return position.flatten()


def _next_power_of_two(value: int) -> int:
    return 1 << max(value - 1, 1).bit_length()


@cache
def _rope(dim: int, max_position: int, device: torch.device) -> RopeTable:
    return RopeTable.from_theta(_ROPE_THETA, dim, max_position).to(device)
