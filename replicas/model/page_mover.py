"""Carries out a step's moves: pages out to the tier, slots hidden, pages back in."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch

from mneme.cachetier.pages.tier import KvTier, Load, joined
from mneme.kernels.attention import mark_free, mark_written
from mneme.kernels.page_table import IntArray
from mneme.kernels.segments import ranges
from mneme.replicas.connector.load import ChunkLoader
from mneme.replicas.connector.save import ChunkSaver
from mneme.replicas.forest.moves import Graft, GraftPiece, LoadedPage, Moves


class PageMover:
    """Over the slots of one device pool and the tier under it."""

    def __init__(self, slot_position: torch.Tensor, page_size: int, tier: KvTier) -> None:
        self._slot_position = slot_position
        self._page_size = page_size
        self._tier = tier
        self.loader: ChunkLoader | None = None  # where there is a cache tier
        self.saver: ChunkSaver | None = None

    def move(self, moves: Moves) -> Load | None:
        """Begin them; the forward pass waits for what is returned, layer by layer.

        Nothing of what a fresh page held may be seen by its next owner.
        """
        if self.loader is not None and self.saver is not None:  # of a step that failed
            self.loader.end()
            self.saver.abandon()
        if moves.saves:
            device_pages, host_pages = np.array(moves.saves, np.int64).T
            self._tier.save(device_pages, host_pages)
        if moves.fresh:
            fresh = np.array(moves.fresh, np.int64)
            self._tier.before_reuse(fresh)
            if self.saver is not None:
                self.saver.before_reuse(fresh)
            mark_free(self._slot_position, self._tensor(ranges(fresh * self._page_size, self._page_sizes(len(fresh)))))
        loads = [self._load(moves.loads)] if moves.loads else []
        if moves.grafts:
            loads.append(self._graft(moves.grafts))
        return joined(loads)

    def _load(self, loads: Sequence[LoadedPage]) -> Load:
        host_pages, device_pages, starts, counts = np.array(loads, np.int64).T
        slots = ranges(device_pages * self._page_size + starts % self._page_size, counts)
        mark_written(self._slot_position, self._tensor(slots), self._tensor(ranges(starts, counts)))
        return self._tier.load(host_pages, device_pages)

    def _graft(self, grafts: Sequence[Graft]) -> Load:
        assert self.loader is not None
        runs = [run for graft in grafts for piece in graft.pieces for run in piece.runs]
        starts = [start for graft in grafts for piece in graft.pieces for start in _run_starts(piece)]
        page_ids, offsets, counts = np.array(runs, np.int64).T
        slots = ranges(page_ids * self._page_size + offsets, counts)
        mark_written(self._slot_position, self._tensor(slots), self._tensor(ranges(np.array(starts, np.int64), counts)))
        return self.loader.begin(grafts)

    def _page_sizes(self, num_pages: int) -> IntArray:
        return np.full(num_pages, self._page_size, np.int64)

    def _tensor(self, array: IntArray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._slot_position.device)


def _run_starts(piece: GraftPiece) -> list[int]:
    """The position at which each run begins."""
    counts = [count for _, _, count in piece.runs]
    return list(accumulate(counts[:-1], initial=piece.start))
