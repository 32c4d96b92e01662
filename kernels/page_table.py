"""Page tables: what a sequence sees, as integer arrays.

A reference `(page_id, delta, mask)` says: the tokens of this page whose mask bit is set stand in the sequence `delta`
positions behind the place at which their keys were rotated. Python objects per page would cost more than a forward
pass of a small model, so tables are arrays; `PageRef` is for tests and for callers that hold few pages.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]

# The position of a slot that holds no key: above every query position, hence invisible whatever the masks say.
FREE_SLOT_POSITION = 2**30
# Positions and deltas stay under this, so that no difference of two reaches FREE_SLOT_POSITION.
MAX_ABS_POSITION = 2**29
# Every offset of the page; bits behind page_size are ignored.
ALL_VISIBLE = -1
MAX_PAGE_SIZE = 64
KV_SCALE_BYTES = 4  # of the float32 behind each row (one token, one head) of int8 keys or values
_NUMBER_TYPES = (np.dtype(np.int32), np.dtype(np.int64))
_MASK_TYPES = (np.dtype(np.int64),)


class PageRef(NamedTuple):
    """One reference of a page table."""

    page_id: int
    delta: int = 0  # position in the sequence minus the position of the rotated key
    mask: int = ALL_VISIBLE  # bit i shows offset i; 64 bits, signed or unsigned


@dataclass(frozen=True, slots=True, eq=False)
class PageTable:
    """The references of one sequence.

    page_ids    int32 [P]  or int64
    deltas      int32 [P]  or int64
    masks       int64 [P]  bit i shows offset i (two's complement)

    Raises ValueError, naming the argument, for others.
    """

    page_ids: npt.NDArray[np.integer[Any]]
    deltas: npt.NDArray[np.integer[Any]]
    masks: npt.NDArray[np.integer[Any]]

    def __post_init__(self) -> None:
        _check_column("page_ids", self.page_ids, _NUMBER_TYPES)
        _check_column("deltas", self.deltas, _NUMBER_TYPES)
        _check_column("masks", self.masks, _MASK_TYPES)
        for name, array in (("deltas", self.deltas), ("masks", self.masks)):
            if array.shape != self.page_ids.shape:
                raise ValueError(f"{name}: must be one for each of {len(self.page_ids)} page ids (got {len(array)})")

    def __len__(self) -> int:
        return len(self.page_ids)

    @classmethod
    def own(cls, page_ids: npt.ArrayLike) -> PageTable:
        """Make a table of the sequence's own pages: delta 0, every offset visible."""
        ids = _fitting("page_ids", page_ids, np.dtype(np.int32))
        return cls(ids, np.zeros(len(ids), np.int32), np.full(len(ids), ALL_VISIBLE, np.int64))

    @classmethod
    def from_refs(cls, refs: PageTable | Sequence[PageRef]) -> PageTable:
        """Make a table of arrays from a list of references (a table is returned as it is).

        Raises ValueError for numbers that are no integers or do not fit their type.
        """
        if isinstance(refs, PageTable):
            return refs
        if not refs:
            return cls.own([])
        try:
            page_ids, deltas, masks = (list(map(operator.index, column)) for column in zip(*refs, strict=True))
            signed = [mask - 2**64 if 2**63 <= mask < 2**64 else mask for mask in masks]
            return cls(np.array(page_ids, np.int32), np.array(deltas, np.int32), np.array(signed, np.int64))
        except (OverflowError, TypeError) as error:
            raise ValueError(
                f"page_tables: a page id, delta or mask is no integer or does not fit its type ({error})"
            ) from None

    def append(self, page_ids: npt.ArrayLike, deltas: npt.ArrayLike, masks: npt.ArrayLike) -> PageTable:
        """Return this table with more references behind it."""
        return PageTable(
            np.append(self.page_ids, _fitting("page_ids", page_ids, self.page_ids.dtype)),
            np.append(self.deltas, _fitting("deltas", deltas, self.deltas.dtype)),
            np.append(self.masks, signed_integers("masks", masks)),
        )


@dataclass(frozen=True, slots=True, eq=False)
class QueryRows:
    """The query rows of a step: row t is a token of `sequence[t]` at `position[t]`.

    sequence    int [T]  index of a page table; the rows of one sequence are contiguous
    position    int [T]  position in that sequence
    """

    sequence: npt.ArrayLike
    position: npt.ArrayLike

    def arrays(self) -> tuple[IntArray, IntArray]:
        """Return both as int64 vectors of one length; ValueError if they are not."""
        sequence, position = np.asarray(self.sequence), np.asarray(self.position)
        if sequence.ndim != 1 or sequence.shape != position.shape:
            raise ValueError(
                f"rows: sequence and position must be vectors of one length (got {sequence.shape}, {position.shape})"
            )
        if sequence.size and not (sequence.dtype.kind in "iu" and position.dtype.kind in "iu"):
            raise ValueError(f"rows: must be integers (got {sequence.dtype}, {position.dtype})")
        return sequence.astype(np.int64), position.astype(np.int64)


def is_integer(value: Any) -> bool:
    """Tell whether a number is Python's or numpy's integer; 2.0 is not."""
    return isinstance(value, Integral)


def signed_integers(name: str, values: npt.ArrayLike) -> IntArray:
    """Convert integers of any kind to int64; unsigned 64-bit masks keep their bits, anything else is refused."""
    array = np.asarray(values)
    if array.size and array.dtype.kind not in "iu":  # signed and unsigned 64-bit values in one list become floats
        raise ValueError(f"{name}: must be integers of one kind (got {array.dtype})")
    return array.astype(np.int64)


def _fitting(name: str, values: npt.ArrayLike, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Convert integers to this type; ValueError, not other numbers, where they do not fit."""
    array, limits = signed_integers(name, values), np.iinfo(dtype)
    if array.size and not limits.min <= array.min() <= array.max() <= limits.max:
        raise ValueError(f"{name}: must fit {dtype} (got {array.min()}..{array.max()})")
    return array.astype(dtype)


def _check_column(name: str, array: Any, types: tuple[np.dtype[Any], ...]) -> None:
    if isinstance(array, np.ndarray) and array.ndim == 1 and array.dtype in types:
        return
    got = f"{array.dtype} {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
    raise ValueError(f"{name}: must be a numpy vector of {' or '.join(map(str, types))} (got {got})")


class References(NamedTuple):
    """Every reference of every table, one behind the other."""

    sequence: IntArray  # [N]
    page_id: IntArray  # [N]
    delta: IntArray  # [N]
    mask: IntArray  # [N] bits at and behind page_size are clear


def full_mask(page_size: int) -> int:
    """Return the mask that shows a whole page, as a signed 64-bit integer."""
    return -1 if page_size == MAX_PAGE_SIZE else (1 << page_size) - 1


def references_of(page_tables: Sequence[PageTable], page_size: int) -> References:
    """Concatenate tables; references that show nothing are left out, a (slot, delta) shown twice is refused."""
    if not page_tables:
        empty = np.zeros(0, np.int64)
        return References(empty, empty, empty, empty)
    counts = np.fromiter(map(len, page_tables), np.int64, len(page_tables))
    refs = References(
        np.repeat(np.arange(len(counts)), counts),
        np.concatenate([table.page_ids for table in page_tables]).astype(np.int64),
        np.concatenate([table.deltas for table in page_tables]).astype(np.int64),
        np.concatenate([table.masks for table in page_tables]).astype(np.int64) & full_mask(page_size),
    )
    check_references(refs)
    if not refs.mask.all():
        shown = refs.mask != 0
        refs = References(*(array[shown] for array in refs))
    return refs


def check_references(refs: References) -> None:
    """Refuse page ids and deltas out of range."""
    if refs.page_id.size and not 0 <= refs.page_id.min() <= refs.page_id.max() < 2**31:
        raise ValueError(
            f"page_tables: page ids must be in [0, 2**31) (got {refs.page_id.min()}..{refs.page_id.max()})"
        )
    if refs.delta.size and not -MAX_ABS_POSITION < refs.delta.min() <= refs.delta.max() < MAX_ABS_POSITION:
        raise ValueError(f"page_tables: deltas must lie within +-{MAX_ABS_POSITION}")
