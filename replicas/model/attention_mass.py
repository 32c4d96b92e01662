"""Measures how much attention tokens get: what a truncated session keeps, and what of its documents a prompt is about.

`important` keeps the tokens of a session that its last ones attend to. These are computed once more as query rows
against the KV that is there, and what they attend to is summed over rows, heads and layers. Such an observation window
is SnapKV's (Li et al. 2024); the running sum of H2O (Zhang et al. 2023) would ask for a state per sequence and for the
scores of every step, where this costs one small pass per truncation. One set of tokens serves all layers and heads, as
a page does.

The selector `query` asks for the tokens of documents that a question attends to (InfoFlow KV, ICML'26): its rows are
part of a step like any others.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from mneme.kernels.arguments import dequantized
from mneme.kernels.page_table import IntArray
from mneme.kernels.rope import RopeTable
from mneme.replicas.blend.selectors import FloatArray
from mneme.replicas.forest.paths import Path, slots_of
from mneme.replicas.model.decoder import Decoder, KvPool
from mneme.replicas.sequence import StepRows

NUM_OBSERVED = 32  # the last tokens, whose attention counts
NUM_ASKING = 8  # the same of a question: a chat template ends in some of its own, and the more, the worse they choose


class _Run(NamedTuple):
    """The tokens [start, end) of those that are looked at, of one delta."""

    start: int
    end: int
    delta: int


@dataclass(slots=True, kw_only=True)
class _Shares:
    """Computes which share of a row's attention each of some tokens gets."""

    slots: torch.Tensor  # int64 [L] where their keys lie
    runs: list[_Run]
    pool: KvPool
    rope: RopeTable
    scale: float  # of scores
    soft_cap: float | None

    @classmethod
    def of(cls, slots: torch.Tensor, deltas: IntArray, pool: KvPool, decoder: Decoder) -> _Shares:
        (rope,) = set(decoder.ropes)  # KV is moved where all layers see the whole context, and all rotate alike
        assert rope is not None
        config = decoder.config
        return cls(slots=slots, runs=_runs(deltas), pool=pool, rope=rope, scale=config.scale, soft_cap=config.soft_cap)

    def __call__(self, layer: int, q: torch.Tensor, lse: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """float32 [Hq, T, L], of tokens that the rows do not see too.

        q float [T, Hq, D], un-rotated; lse float32 [T, Hq]; positions int [T] of the rows
        """
        num_rows, num_kv_heads, num_tokens = len(q), self.pool.k_pages.shape[1], len(self.slots)
        keys = dequantized(self.pool.k_pages[layer].flatten(1, 2).index_select(1, self.slots)).float()
        queries = self._queries(q, positions).view(-1, num_kv_heads, q.shape[1] // num_kv_heads * num_rows, q.shape[2])
        parts = [own @ keys[:, run.start : run.end].mT for own, run in zip(queries, self.runs, strict=True)]
        scores = torch.cat(parts, -1).view(-1, num_rows, num_tokens) * self.scale
        if self.soft_cap is not None:
            scores = (scores / self.soft_cap).tanh_() * self.soft_cap
        return (scores - lse.T[..., None]).exp_()

    def _queries(self, q: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Repeat the queries for each run, rotated to where its keys are: float32 [runs, Hq, T, D]."""
        deltas = torch.tensor([run.delta for run in self.runs], device=q.device)
        rotated = self.rope.rotate(q.repeat(len(deltas), 1, 1), (positions - deltas[:, None]).flatten())
        return rotated.view(len(deltas), *q.shape).transpose(1, 2).contiguous()


@dataclass(slots=True, kw_only=True)
class MassObserver:
    """Adds up the attention of one pass over the last tokens of a path: a `StepInputs.observe`."""

    shares: _Shares
    windows: tuple[int | None, ...]  # by layer
    mass: torch.Tensor  # float64 [L]; token i stands at position i

    @classmethod
    def over(cls, path: Path, pool: KvPool, decoder: Decoder) -> MassObserver | None:
        """Observe a path; None if not every token of the path has its key in its slot."""
        slots, deltas = slots_of(path, pool.k_pages.shape[3])
        device_slots = torch.from_numpy(slots).to(pool.slot_position.device)
        rotated_at = torch.from_numpy(np.arange(len(slots)) - deltas).to(device_slots.device)
        if not torch.equal(pool.slot_position[device_slots].long(), rotated_at):
            return None
        return cls(
            shares=_Shares.of(device_slots, deltas, pool, decoder),
            windows=decoder.config.windows,
            mass=torch.zeros(len(slots), dtype=torch.float64, device=device_slots.device),
        )

    def __call__(self, layer: int, q: torch.Tensor, lse: torch.Tensor) -> None:
        """q float [T, Hq, D], un-rotated, of the path's last T tokens; lse float32 [T, Hq]."""
        positions = torch.arange(len(self.mass) - len(q), len(self.mass), device=q.device)
        shares = self.shares(layer, q, lse, positions).masked_fill_(~self._is_visible(layer, positions), 0.0)
        self.mass += shares.sum((0, 1), dtype=torch.float64)

    def masses(self) -> list[float]:
        """Return the sum for each token of the path."""
        found: list[float] = self.mass.tolist()
        return found

    def _is_visible(self, layer: int, positions: torch.Tensor) -> torch.Tensor:
        """bool [T, L]"""
        distance = positions[:, None] - torch.arange(len(self.mass), device=positions.device)
        window = self.windows[layer]
        is_past = distance >= 0
        return is_past if window is None else is_past & (distance < window)


@dataclass(slots=True, kw_only=True)
class QuestionObserver:
    """Scores the documents' tokens of one sequence by what the last rows of its prompt attend to.

    A token's score is the squared norm, over these rows and all layers, of the share of attention that it gets, which
    is the mean over heads. Scores of several steps add up.
    """

    part: StepRows
    rows: (
        torch.Tensor
    )  # int64 [T] of the step: those of the prompt's last ones, behind all of its documents, that it has
    positions: torch.Tensor  # int64 [T]
    shares: _Shares  # of the documents' tokens that are reused, in order
    total: torch.Tensor  # float64 [L]

    @classmethod
    def over(cls, part: StepRows, end_row: int, pool: KvPool, decoder: Decoder) -> QuestionObserver | None:
        """Observe what rows, which end before `end_row` of the step, see of documents; None if none of them ask."""
        path = part.sequence.path
        assert path is not None
        positions = part.positions
        positions = positions[positions >= max(path.root.start, len(part.sequence.context) - NUM_ASKING)]
        if not len(positions):
            return None
        slots, deltas = slots_of(path, pool.k_pages.shape[3], part.reused)
        device_slots = torch.from_numpy(slots).to(pool.slot_position.device)
        return cls(
            part=part,
            rows=torch.arange(end_row - len(positions), end_row, device=device_slots.device),
            positions=torch.from_numpy(positions).to(device_slots.device),
            shares=_Shares.of(device_slots, deltas, pool, decoder),
            total=torch.zeros(len(slots), dtype=torch.float64, device=device_slots.device),
        )

    def __call__(self, layer: int, q: torch.Tensor, lse: torch.Tensor) -> None:
        """q float [T, Hq, D], un-rotated; lse float32 [T, Hq]."""
        shares = self.shares(layer, q, lse, self.positions)
        self.total += shares.mean(0).square().sum(0, dtype=torch.float64)

    def scores(self) -> FloatArray:
        """Return the score of each of the sequence's reused tokens, in order."""
        found: FloatArray = self.total.cpu().numpy()
        return found


def _runs(deltas: IntArray) -> list[_Run]:
    """Join neighbours of one delta."""
    starts = np.flatnonzero(np.diff(deltas, prepend=deltas[0] + 1))
    return [_Run(int(start), int(end), int(deltas[start])) for start, end in pairwise([*starts, len(deltas)])]
