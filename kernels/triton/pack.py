"""A step's work as one int32 buffer, of which each step uploads what changed; numpy only.

The buffer begins with a header: counts and a flag, then where each section begins. Sections have room to grow and keep
their places until one outgrows its room, so that a captured graph finds everything where it was.
"""

from __future__ import annotations

from enum import IntEnum, auto

import numpy as np

from mneme.kernels.triton.tiles import Tiles
from mneme.kernels.work import Int32Array, Int64Array, WorkList

# page_begin, page_end, delta_begin; first word of its masks and words per mask (0: one mask for all); unused words
RUN_WORDS = 8
_RUN_FIELDS = ("page_begin", "page_end", "delta_begin")
# Behind each mask, for blocks that reach over the end of their run.
_MASK_PADDING_WORDS = 8
_PAGE_END = _RUN_FIELDS.index("page_end")
_HEADER_WORDS = 32
_ALIGNMENT = 32  # words of a cache line
# Changed words closer together than this travel in one copy, with what lies between them.
_GAP_WORDS = 256


class Header(IntEnum):
    """Words of the header: counts and a flag, then the beginnings of sections, those that change most often first."""

    num_tiles = 0
    num_taken = auto()  # of tiles and heads, while a launch is under way; else 0
    num_apart = auto()  # wide tiles behind these, which a launch of their own takes
    one = auto()  # 1, as compilers do not know
    num_merged = auto()
    is_prefill = auto()
    position = auto()
    run = auto()
    page_id = auto()
    page_mask = auto()  # two words per listed page, low bits first: what every row of its run may see
    tile = auto()
    num_parts = auto()
    row = auto()
    delta = auto()
    mask_number = auto()
    mask = auto()  # bits in the order of a run's keys, one row of words per mask, where rows of a run have several
    merged_row = auto()
    part_begin = auto()
    part = auto()


_SECTIONS = tuple(Header)[Header.position :]
Span = tuple[int, int]  # [first word, end)


class NoRoom(Exception):
    """A step does not fit into buffers that may not move."""


class PackedWork:
    """The host's copy of the buffer; `update` brings it to a step and says which words changed."""

    def __init__(self, page_size: int, least_room: int = 0) -> None:
        """`least_room`: words of each section."""
        self._page_size, self._least_room = page_size, least_room
        self.words: Int32Array = np.zeros(0, np.int32)
        self._room = dict.fromkeys(_SECTIONS, 0)
        self._work: WorkList | None = None
        self._tiles: Tiles | None = None

    def forget(self) -> None:
        """Take over the next step's work whole."""
        self._work = self._tiles = None

    def update(self, work: WorkList, tiles: Tiles, position: Int32Array, *, may_grow: bool = True) -> list[Span]:
        """Take over a step's work. `tiles` may be those of the work that this one was appended to.

        may_grow  sections may get other places; else NoRoom is raised, and nothing has changed, if one has no room
        """
        last = self._work
        if last is work and self._tiles is tiles:
            spans = [self._write(Header.position, position)]
        elif last is not None and self._tiles is tiles and work.page_id is last.page_id:
            spans = [self._write(Header.position, position), *self._append(last, work)]
        else:
            spans = self._write_all(work, tiles, position, may_grow)
        self._work, self._tiles = work, tiles
        return _joined(sorted(span for span in spans if span[0] < span[1]))

    def _append(self, last: WorkList, work: WorkList) -> list[Span]:
        """Write what differs from the last step: ends of runs, and what stands between an old and a new end."""
        runs = np.flatnonzero(work.page_end != last.page_end)
        ends = self.words[self.words[Header.run] :][: RUN_WORDS * len(work.page_end)].reshape(-1, RUN_WORDS)
        ends[runs, _PAGE_END] = work.page_end[runs]
        spans = [
            (self._at(Header.run, RUN_WORDS * run), self._at(Header.run, RUN_WORDS * (run + 1)))
            for run in runs.tolist()
        ]
        for run in runs.tolist():
            old, new = sorted((int(last.page_end[run]), int(work.page_end[run])))
            at = int(work.mask_begin[run] - work.page_begin[run])
            spans.append(self._write(Header.page_id, work.page_id[old:new], old))
            spans.append(self._write(Header.page_mask, work.mask[at + old : at + new].view(np.int32), 2 * old))
        return spans

    def _write_all(self, work: WorkList, tiles: Tiles, position: Int32Array, may_grow: bool) -> list[Span]:
        arrays = _arrays(work, tiles, position, self._page_size)
        if any(arrays[section].size > self._room[section] for section in _SECTIONS):
            if not may_grow:
                raise NoRoom
            self._make_room(arrays)
        self.words[Header.num_tiles] = len(tiles.tile) - tiles.num_apart
        self.words[Header.num_apart] = tiles.num_apart
        self.words[Header.one] = 1
        self.words[Header.num_merged] = len(tiles.merged_row)
        self.words[Header.is_prefill] = tiles.is_prefill
        return [(0, _HEADER_WORDS), *(self._write(section, arrays[section]) for section in _SECTIONS)]

    def _make_room(self, arrays: dict[Header, Int32Array]) -> None:
        """Places with room for a half more in every section."""
        begin = _HEADER_WORDS
        begins = {}
        for section in _SECTIONS:
            wanted = max(self._room[section], self._least_room, arrays[section].size * 3 // 2)
            self._room[section] = -(-max(wanted, 1) // _ALIGNMENT) * _ALIGNMENT
            begins[section], begin = begin, begin + self._room[section]
        self.words = np.zeros(begin, np.int32)
        for section, start in begins.items():
            self.words[section] = start

    def _at(self, section: Header, word: int) -> int:
        return int(self.words[section]) + int(word)

    def _write(self, section: Header, array: Int32Array, first: int = 0) -> Span:
        start = self._at(section, first)
        self.words[start : start + array.size] = array
        return start, start + array.size


def _arrays(work: WorkList, tiles: Tiles, position: Int32Array, page_size: int) -> dict[Header, Int32Array]:
    runs = np.zeros((len(work.page_begin), RUN_WORDS), np.int32)
    for index, name in enumerate(_RUN_FIELDS):
        runs[:, index] = getattr(work, name)
    runs[:, 3], runs[:, 4], row_masks = _row_masks(work, page_size)
    return {
        Header.position: position,
        Header.run: runs.ravel(),
        Header.page_id: work.page_id,
        Header.page_mask: _page_masks(work).view(np.int32),
        Header.mask: row_masks,
        Header.tile: tiles.tile.ravel(),
        Header.num_parts: tiles.num_parts,
        Header.row: work.row,
        Header.delta: work.delta,
        Header.mask_number: work.mask_number,
        Header.merged_row: tiles.merged_row,
        Header.part_begin: tiles.part_begin,
        Header.part: tiles.part,
    }


def _page_masks(work: WorkList) -> Int64Array:
    """One mask per listed page: the run's only one, or all bits where rows differ; 0 for pages to come."""
    counts = work.page_end - work.page_begin
    ends = np.cumsum(counts)
    place = np.arange(ends[-1] if len(ends) else 0) + np.repeat(work.page_begin - (ends - counts), counts)
    source = place + np.repeat(work.mask_begin - work.page_begin, counts)
    masks = np.zeros(len(work.page_id), np.int64)
    masks[place] = np.where(np.repeat(work.mask_stride, counts) == 0, work.mask[source], -1)
    return masks


def _row_masks(work: WorkList, page_size: int) -> tuple[Int32Array, Int32Array, Int32Array]:
    """Return first word [R] and words per mask [R] of the runs whose rows have several masks, and the words."""
    first, stride = np.zeros((2, len(work.page_begin)), np.int32)
    words = [np.zeros(0, np.int32)]
    used = 0
    for run in np.flatnonzero(work.mask_stride).tolist():
        num_pages = int(work.page_end[run] - work.page_begin[run])
        entries = int(work.delta_begin[run]) + np.arange(_num_entries(work, run))
        num_masks = int(work.mask_number[entries].max()) + 1
        masks = work.mask[int(work.mask_begin[run]) :][: num_masks * int(work.mask_stride[run])]
        shown = (masks.reshape(num_masks, -1)[:, :num_pages, None] >> np.arange(page_size)) & 1
        bits = np.packbits(shown.reshape(num_masks, -1).astype(np.uint8), axis=1, bitorder="little")
        first[run], stride[run] = used, -(-bits.shape[1] // 4) + _MASK_PADDING_WORDS
        padded = np.zeros((num_masks, 4 * stride[run]), np.uint8)
        padded[:, : bits.shape[1]] = bits
        words.append(padded.view(np.int32).ravel())
        used += words[-1].size
    return first, stride, np.concatenate(words)


def _num_entries(work: WorkList, run: int) -> int:
    piece = int(np.searchsorted(work.run_begin, run, side="right")) - 1
    return int(work.row_begin[piece + 1] - work.row_begin[piece])


def _joined(spans: list[Span]) -> list[Span]:
    """Ascending spans, those with small gaps as one."""
    joined: list[Span] = []
    for start, end in spans:
        if joined and start - joined[-1][1] <= _GAP_WORDS:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined
