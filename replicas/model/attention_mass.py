"""Measures how much attention each token of a session gets: what `important` keeps when the session is truncated.

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
from mneme.replicas.forest.pages import Path
from mneme.replicas.forest.paths import references_of
from mneme.replicas.model.decoder import Decoder, KvPool

NUM_OBSERVED = 32  # the last tokens, whose attention counts


class _Run(NamedTuple):
    """The tokens [start, end) of a path, of one delta."""

    start: int
    end: int
    delta: int


class _Keys(NamedTuple):
    """Where the keys of a path's tokens lie; token i stands at position i."""

    slots: torch.Tensor  # int64 [L]
    runs: list[_Run]


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
        """Observe a path; None if not every token of the path has its key in its slot."""
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
        num_rows, num_kv_heads = len(q), self.pool.k_pages.shape[1]
        keys = self.pool.k_pages[layer].flatten(1, 2)[:, self.keys.slots].float()
        num_tokens = len(self.mass)
        positions = torch.arange(num_tokens - num_rows, num_tokens, device=q.device)
        queries = self._queries(q, positions).view(-1, num_kv_heads, q.shape[1] // num_kv_heads * num_rows, q.shape[2])
        parts = [own @ keys[:, run.start : run.end].mT for own, run in zip(queries, self.keys.runs, strict=True)]
        scores = torch.cat(parts, -1).view(-1, num_rows, num_tokens) * self.scale  # [Hq, T, L]
        shares = (scores - lse.T[..., None]).exp_()
        shares.masked_fill_(~self._is_visible(layer, positions), 0.0)
        self.mass += shares.sum((0, 1), dtype=torch.float64)

    def masses(self) -> list[float]:
        """Return the sum for each token of the path."""
        found: list[float] = self.mass.tolist()
        return found

    def _queries(self, q: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Repeat the queries for each run, rotated to where its keys are: float32 [runs, Hq, T, D]."""
        deltas = torch.tensor([run.delta for run in self.keys.runs], device=q.device)
        rotated = self.rope.rotate(q.repeat(len(deltas), 1, 1), (positions - deltas[:, None]).flatten())
        return rotated.view(len(deltas), *q.shape).transpose(1, 2).contiguous()

    def _is_visible(self, layer: int, positions: torch.Tensor) -> torch.Tensor:
        """bool [T, L]"""
        distance = positions[:, None] - torch.arange(len(self.mass), device=positions.device)
        window = self.windows[layer]
        is_past = distance >= 0
        return is_past if window is None else is_past & (distance < window)


def _slots_of(path: Path, page_size: int) -> tuple[IntArray, IntArray]:
    """Return the slot of each token of a path that is whole on the device, and its delta."""
    references = references_of(path)
    firsts, counts, deltas = np.array(
        [
            ((page_id or 0) * page_size + kept.start % page_size, kept.end - kept.start, kept.delta)
            for page_id, kept in zip(path.page_ids, references, strict=True)
        ],
        np.int64,
    ).T
    return ranges(firsts, counts), np.repeat(deltas, counts)


def _runs(deltas: IntArray) -> list[_Run]:
    """Join neighbours of one delta."""
    starts = np.flatnonzero(np.diff(deltas, prepend=deltas[0] + 1))
    return [_Run(int(start), int(end), int(deltas[start])) for start, end in pairwise([*starts, len(deltas)])]
