"""How much attention each token of a session gets: what `important` keeps when the session is truncated.

The last tokens are computed once more as query rows against the KV that is there, and what they attend to is summed
over rows, heads and layers. Such an observation window is SnapKV's (Li et al. 2024); the running sum of H2O (Zhang et
al. 2023) would ask for a state per sequence and for the scores of every step, where this costs one small pass per
truncation. One set of tokens serves all layers and heads, as a page does.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from mneme.kernels.page_table import IntArray
from mneme.kernels.rope import RopeTable
from mneme.kernels.segments import ranges
from mneme.replicas.forest_kept import references_of
from mneme.replicas.forest_nodes import Path
from mneme.replicas.model import Decoder, KvPool

NUM_OBSERVED = 32  # the last tokens, whose attention counts


class _Keys(NamedTuple):
    """Where the keys of a path's tokens lie; token i stands at position i."""

    slots: torch.Tensor  # int64 [L]
    runs: list[tuple[int, int, int]]  # (first token, end, their delta)


@dataclass(slots=True, kw_only=True)
class MassObserver:
    """Adds up the attention of one pass over the last tokens of a path: a `StepInputs.observe`."""

    keys: _Keys
    pool: KvPool
    rope: RopeTable
    scale: float  # of scores
    windows: tuple[int | None, ...]  # by layer
    mass: torch.Tensor  # float64 [L]

    @classmethod
    def over(cls, path: Path, pool: KvPool, decoder: Decoder) -> MassObserver | None:
        """None if not every token of the path has its key in its slot."""
        slots, deltas = _slots_of(path, pool.k_pages.shape[3])
        device_slots = torch.from_numpy(slots).to(pool.slot_position.device)
        rotated_at = torch.from_numpy(np.arange(len(slots)) - deltas).to(device_slots.device)
        if not torch.equal(pool.slot_position[device_slots].long(), rotated_at):
            return None
        config = decoder.config
        return cls(
            keys=_Keys(device_slots, _runs(deltas)),
            pool=pool,
            rope=decoder.rope,
            scale=config.head_dim**-0.5,
            windows=config.windows,
            mass=torch.zeros(len(slots), dtype=torch.float64, device=device_slots.device),
        )

    def __call__(self, layer: int, q: torch.Tensor, lse: torch.Tensor) -> None:
        """q float [T, Hq, D], un-rotated, of the path's last T tokens; lse float32 [T, Hq]."""
        num_rows, num_q_heads, head_dim = q.shape
        k_pages = self.pool.k_pages[layer]
        num_kv_heads = k_pages.shape[0]
        keys = k_pages.flatten(1, 2)[:, self.keys.slots].float()
        positions = torch.arange(len(self.mass) - num_rows, len(self.mass), device=q.device)
        grouped_lse = lse.view(num_rows, num_kv_heads, -1).permute(1, 2, 0)
        for start, end, delta in self.keys.runs:
            rotated = self.rope.rotate(q, positions - delta)
            queries = rotated.view(num_rows, num_kv_heads, num_q_heads // num_kv_heads, head_dim)
            scores = torch.einsum("tkgd,kld->kgtl", queries, keys[:, start:end]) * self.scale
            shares = (scores - grouped_lse[..., None]).exp()
            shares.masked_fill_(~self._is_visible(layer, positions, start, end), 0.0)
            self.mass[start:end] += shares.double().sum((0, 1, 2))

    def masses(self) -> list[float]:
        """Of each token of the path."""
        found: list[float] = self.mass.tolist()
        return found

    def _is_visible(self, layer: int, positions: torch.Tensor, start: int, end: int) -> torch.Tensor:
        """bool [T, end - start]"""
        distance = positions[:, None] - torch.arange(start, end, device=positions.device)
        window = self.windows[layer]
        is_past = distance >= 0
        return is_past if window is None else is_past & (distance < window)


def _slots_of(path: Path, page_size: int) -> tuple[IntArray, IntArray]:
    """The slot of each token of a path that is whole on the device, and its delta."""
    references = references_of(path)
    firsts, counts, deltas = np.array(
        [
            ((page_id or 0) * page_size + kept.start % page_size, kept.end - kept.start, kept.delta)
            for page_id, kept in zip(path.page_ids, references, strict=True)
        ],
        np.int64,
    ).T
    return ranges(firsts, counts), np.repeat(deltas, counts)


def _runs(deltas: IntArray) -> list[tuple[int, int, int]]:
    """Neighbours of one delta together."""
    starts = np.flatnonzero(np.diff(deltas, prepend=deltas[0] + 1))
    return [(int(start), int(end), int(deltas[start])) for start, end in pairwise([*starts, len(deltas)])]
