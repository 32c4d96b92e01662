"""What a device holds of the present step: its work, the positions of its keys, and room for partial results.

One step of a thread is on a device at a time, as an engine has one thread. A plan whose work was overwritten by another
plan's is uploaded again when it is used again.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mneme.kernels.page_bounds import version_of
from mneme.kernels.plan import Plan
from mneme.kernels.triton.attention import key_position_kernel
from mneme.kernels.triton.pack import NoRoom, PackedWork, Span
from mneme.kernels.triton.tiles import Grid, Tiles, cut
from mneme.kernels.upload import upload_into
from mneme.kernels.work import WorkList

_KEYS_PER_PROGRAM = 1024
# Words of each section where room is reserved: for each partial result as many as a tile has, so many at most.
_WORDS_PER_SLOT = 8
_MOST_RESERVED_WORDS = 1 << 16


class DeviceStep:
    """The buffers of one device. They grow by half at least, so a server soon stops growing them.

    Once room is reserved, graphs may point to them: they do not move any more, what they cannot hold is put beside.
    """

    def __init__(self, device: torch.device, *, is_own: bool = False) -> None:
        self.device = device
        self.staged: Plan | None = None  # the plan that will be brought here again before a replay
        self.launch: Any = None  # how the staged plan is to be launched
        self._is_own = is_own
        self._beside: DeviceStep | None = None
        self._may_move = True
        self._num_slots = 0  # at least, of partial results
        self.words = torch.zeros(0, dtype=torch.int32, device=device)
        self.key_position = torch.zeros(0, dtype=torch.int32, device=device)
        self.partials = (torch.zeros(0, device=device), torch.zeros(0, device=device))
        self.num_apart = 0
        self.num_merged = 0
        self.has_empty_rows = False  # that have no keys
        self.uploaded_bytes = 0  # since the start, for tests and metrics
        self._packed: PackedWork | None = None
        self._page_size = 0
        self._last: tuple[WorkList, Grid, Tiles] | None = None
        self._plan: Plan | None = None
        self._placed: tuple[Tensor, int | None] | None = None  # slot positions and their version

    def active(self) -> AbstractContextManager[object]:
        """Let launches go to this device."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def reserve(self, plan: Plan, slot_position: Tensor, grid: Grid) -> None:
        """Make room for a plan, the largest, and let the buffers have their addresses from then on.

        There is room for as many partial results as cutting may leave, and as many again of rows that several pieces
        read, whatever the plan has.
        """
        if not self._may_move:
            return
        self._num_slots = 2 * grid.max_split_slots
        self._packed = None
        self.prepare(plan, slot_position, grid)
        self._may_move = False

    def holding(self, plan: Plan, slot_position: Tensor, grid: Grid) -> DeviceStep:
        """Prepare a plan here, or beside where these buffers do not hold it and may not move; return where it is."""
        if self._beside is None or self._beside._plan is not plan:
            try:
                self.prepare(plan, slot_position, grid)
                return self
            except NoRoom:
                self._beside = self._beside or DeviceStep(self.device, is_own=self._is_own)
        self._beside.prepare(plan, slot_position, grid)
        return self._beside

    def prepare(self, plan: Plan, slot_position: Tensor, grid: Grid) -> None:
        """Bring the buffers to a plan; does nothing for the second layer of a step."""
        version = version_of(slot_position)
        is_new = self._plan is not plan or self._last is None or self._last[1] != grid
        if not is_new and self._placed is not None and self._placed[0] is slot_position and self._placed[1] == version:
            return
        try:
            if is_new:
                self._upload(plan, grid)
            self._place_keys(plan, slot_position)
        except NoRoom:
            raise
        except BaseException:
            self._forget()
            raise
        self._plan, self._placed = plan, (slot_position, version)

    def _forget(self) -> None:
        """Take the buffers for unknown: the next plan is uploaded whole."""
        if self._packed is not None:
            self._packed.forget()
        self._last = self._plan = self._placed = self.staged = None

    def check_capture(self, plan: Plan) -> None:
        """Refuse to capture launches that would find another plan's work here when they are replayed."""
        if torch.cuda.is_current_stream_capturing() and not (self._is_own or self.staged is plan):
            raise RuntimeError("a captured plan must have been staged, or have buffers of its own (OwnStep)")

    @torch.inference_mode(False)  # buffers outlive the mode in which they are first needed
    def _upload(self, plan: Plan, grid: Grid) -> None:
        tiles = self._tiles_of(plan, grid)
        self._make_room(plan, tiles)
        if self._packed is None or self._page_size != plan.page_size:
            least = min(_WORDS_PER_SLOT * self._num_slots, _MOST_RESERVED_WORDS)
            self._packed, self._page_size = PackedWork(plan.page_size, least), plan.page_size
        spans = self._packed.update(plan.work, tiles, plan.position.astype(np.int32), may_grow=self._may_move)
        if len(self.words) != len(self._packed.words):
            self.words = torch.zeros(len(self._packed.words), dtype=torch.int32, device=self.device)
            spans = [(0, len(self.words))]
        self._copy(self._packed.words, spans)
        self._last = (plan.work, grid, tiles)
        self.num_merged, self.has_empty_rows = len(tiles.merged_row), not tiles.num_parts.all()
        self.num_apart = tiles.num_apart

    def _tiles_of(self, plan: Plan, grid: Grid) -> Tiles:
        """Tiles are cut once per work; those of the work that this one was appended to are still right."""
        key = ("triton", "tiles", grid)
        tiles: Tiles | None = plan.work.derived.get(key)
        if tiles is None:
            last = self._last
            if last is not None and last[0].page_id is plan.work.page_id and last[1] == grid:
                tiles = last[2]
            else:
                tiles = cut(plan.work, plan.sequence, grid)
            plan.work.derived[key] = tiles
        return tiles

    def _copy(self, words: np.ndarray[tuple[int], np.dtype[np.int32]], spans: list[Span]) -> None:
        self.uploaded_bytes += 4 * sum(end - start for start, end in spans)
        for start, end in spans:
            upload_into(self.words[start:end], words[start:end])

    def _make_room(self, plan: Plan, tiles: Tiles) -> None:
        """Make room for what kernels write. Raises NoRoom, and has changed nothing then."""
        num_lses = max(tiles.num_slots, self._num_slots) * plan.num_q_heads
        sizes = (len(plan.work.page_id) * plan.page_size, num_lses * plan.head_dim, num_lses)
        is_short = [len(b) < size for b, size in zip((self.key_position, *self.partials), sizes, strict=True)]
        is_other = plan.page_size != self._page_size
        if (any(is_short) or is_other) and not self._may_move:
            raise NoRoom
        if is_short[0]:
            self.key_position = torch.zeros(sizes[0] * 3 // 2, dtype=torch.int32, device=self.device)
        if is_short[1] or is_short[2]:
            out, lse = (torch.zeros(size * 3 // 2, device=self.device) for size in sizes[1:])
            self.partials = (out, lse)

    def _place_keys(self, plan: Plan, slot_position: Tensor) -> None:
        pages = max(1, _KEYS_PER_PROGRAM // plan.page_size)
        num_listed = len(plan.work.page_id)
        if not num_listed:
            return
        with self.active():
            key_position_kernel[(-(-num_listed // pages),)](
                self.key_position, slot_position, self.words, num_listed, PAGE_SIZE=plan.page_size, PAGES=pages
            )


class _Steps(threading.local):
    """Each thread its own, so that engines on one device do not write each other's buffers."""

    def __init__(self) -> None:
        self.by_device: dict[torch.device, DeviceStep] = {}


_STEPS = _Steps()


class OwnStep:
    """Gives this thread's attention on a device buffers of its own within the block.

    For launches that are captured with one plan and replayed whatever other plans have run since. The block may be
    entered again and again; the buffers stay.
    """

    def __init__(self, device: torch.device) -> None:
        self._step = DeviceStep(device, is_own=True)
        self._outer: list[DeviceStep | None] = []

    def __enter__(self) -> DeviceStep:
        self._outer.append(_STEPS.by_device.get(self._step.device))
        _STEPS.by_device[self._step.device] = self._step
        return self._step

    def __exit__(self, *exception: object) -> None:
        outer = self._outer.pop()
        if outer is None:
            del _STEPS.by_device[self._step.device]
        else:
            _STEPS.by_device[self._step.device] = outer


def step_of(device: torch.device) -> DeviceStep:
    """Return the present step of a device, for the calling thread."""
    if device not in _STEPS.by_device:
        _STEPS.by_device[device] = DeviceStep(device)
    return _STEPS.by_device[device]
