"""The plan of a step: built on the CPU from page tables and query rows, reused by all layers (Pensieve 6.4).

A plan never changes; each edit gives a new one and reuses what the edit leaves valid (ChunkAttention 3.1):
`with_rows` keeps segments, and for the rows of the same sequences all work; `append_new_pages` fills room that the work
keeps behind a sequence's own pages, with pages that the caller knows to be in no table. So a decode step costs what
changed: the rows' positions and the pages begun, not the context. When a sequence joins or leaves, a plan is built
anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, get_args

import numpy as np

from mneme.kernels.page_table import (
    ALL_VISIBLE,
    MAX_ABS_POSITION,
    MAX_PAGE_SIZE,
    IntArray,
    PageRef,
    PageTable,
    QueryRows,
    References,
    is_integer,
    references_of,
)
from mneme.kernels.segments import (
    Lineages,
    LineageSegments,
    Segments,
    find_lineage_segments,
    find_segments,
    unite_repeats,
)
from mneme.kernels.share_cost import COMPILED_FLOAT32, ShareCost
from mneme.kernels.work import Share, WorkList, arrange


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Plan:
    """Holds what `attend` needs to know of a step; see `build_plan`.

    A plan belongs to one step: `slot_position` must not change between the first and the last layer that use it (a
    change is noticed, unless it is an inference tensor). `with_rows` starts the next step.
    """

    page_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    share: Share
    cost: ShareCost
    sequence: IntArray  # [T] of each query row
    position: IntArray  # [T]
    num_pages: int  # one more than the highest page id
    laid_out: tuple[PageTable, ...] | Lineages  # the tables for which segments were looked for
    segments: Segments | LineageSegments
    appended: tuple[References, ...]  # pages begun since
    work: WorkList
    # What a backend derives once per step and reads in every layer, by the backend's own key.
    prepared: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def rows(self) -> QueryRows:
        """Return the query rows, in the order of q."""
        return QueryRows(self.sequence, self.position)

    @property
    def page_tables(self) -> tuple[PageTable, ...]:
        """Return what each sequence sees."""
        tables = list(self.laid_out.page_tables if isinstance(self.laid_out, Lineages) else self.laid_out)
        for added in self.appended:
            for sequence, page_id, delta, mask in zip(*added, strict=True):
                tables[sequence] = tables[sequence].append([page_id], [delta], [mask])
        return tuple(tables)

    @property
    def num_sequences(self) -> int:
        """Count the page tables."""
        return len(self.laid_out)

    @property
    def num_rows(self) -> int:
        """Count the query rows, T."""
        return len(self.sequence)

    @property
    def pool_shape(self) -> tuple[int, int, int]:
        """Return a layer's pool without its number of pages: KV heads, page size, head dimension."""
        return self.num_kv_heads, self.page_size, self.head_dim

    def with_rows(self, rows: QueryRows) -> Plan:
        """Keep the tables, take other rows: the next decode step, or the next chunk of a prefill."""
        sequence, position = _checked_rows(rows)
        if np.array_equal(sequence, self.sequence):
            return replace(self, sequence=sequence, position=position, prepared={})
        if self.appended:
            return build_plan(
                self.page_tables, QueryRows(sequence, position), page_size=self.page_size, cost=self.cost,
                num_q_heads=self.num_q_heads, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim, share=self.share,
            )  # fmt: skip
        work = arrange(
            self.segments, sequence, self.num_sequences, page_size=self.page_size, cost=self.cost, share=self.share,
            num_groups=self.num_q_heads // self.num_kv_heads, head_dim=self.head_dim,
        )  # fmt: skip
        return replace(self, sequence=sequence, position=position, work=work, prepared={})

    def append_new_pages(self, sequence: IntArray, page_id: IntArray, position: IntArray | None = None) -> Plan | None:
        """Add a page that is in no table, with delta 0 and all in view, to each of these sequences.

        position    of the rows in the next step, one for each; None: as they are

        None where a plan has to be built anew: there is no room behind a sequence's own pages, or it gets two. Neither
        sequences nor pages are checked: it is the caller who knows that a page is new.
        """
        work = self.work.append(sequence, page_id)
        if work is None:
            return None
        zeros = np.zeros_like(page_id)
        return replace(
            self, position=self.position if position is None else _checked_positions(position),
            num_pages=max(self.num_pages, 1 + int(page_id.max(initial=-1))), work=work, prepared={},
            appended=(*self.appended, References(sequence, page_id, zeros, zeros + ALL_VISIBLE)),
        )  # fmt: skip


def build_plan(
    page_tables: Sequence[PageTable | Sequence[PageRef]] | Lineages,
    rows: QueryRows,
    *,
    page_size: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    share: Share = "auto",
    cost: ShareCost = COMPILED_FLOAT32,
) -> Plan:
    """Find the segments of these tables and lay out the step's work.

    Sequences should be ordered depth-first through the forest of prefixes: the rows of a shared prefix are then one
    slice of q, which is faster; any order is correct. For `Lineages` that takes less time. `share`
    decides per segment by `cost` (`share_cost_of` the device that will run it), or overrides that.

    Raises ValueError, naming the argument, for sizes or rows that break a rule and for a slot that one sequence shows
    twice with one delta.
    """
    _check_sizes(page_size, num_q_heads, num_kv_heads, head_dim, share)
    sequence, position = _checked_rows(rows)
    tables: tuple[PageTable, ...] | Lineages
    found: Segments | LineageSegments
    if isinstance(page_tables, Lineages):
        tables, found = page_tables, find_lineage_segments(page_tables, page_size)
    else:
        tables = tuple(PageTable.from_refs(table) for table in page_tables)
        found = find_segments(unite_repeats(references_of(tables, page_size)))
    work = arrange(
        found, sequence, len(tables), page_size=page_size, num_groups=num_q_heads // num_kv_heads,
        head_dim=head_dim, share=share, cost=cost,
    )  # fmt: skip
    return Plan(
        page_size=page_size, num_q_heads=num_q_heads, num_kv_heads=num_kv_heads, head_dim=head_dim,
        share=share, cost=cost, sequence=sequence, position=position, num_pages=int(found.page_ids.max(initial=-1)) + 1,
        laid_out=tables, segments=found, appended=(), work=work,
    )  # fmt: skip


@lru_cache(typed=True)  # 2.0 is no integer, though it equals one
def _check_sizes(page_size: int, num_q_heads: int, num_kv_heads: int, head_dim: int, share: str) -> None:
    sizes = {"page_size": page_size, "num_q_heads": num_q_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    for name, size in sizes.items():
        if not is_integer(size):
            raise ValueError(f"{name}: must be an integer (got {size!r})")
    if not 1 <= page_size <= MAX_PAGE_SIZE or page_size & (page_size - 1):
        raise ValueError(f"page_size: must be a power of two up to {MAX_PAGE_SIZE} (got {page_size})")
    if num_kv_heads < 1 or num_q_heads < 1 or num_q_heads % num_kv_heads:
        raise ValueError(f"num_q_heads: must be a multiple of num_kv_heads (got {num_q_heads}, {num_kv_heads})")
    if head_dim < 1:
        raise ValueError(f"head_dim: must be at least 1 (got {head_dim})")
    if share not in get_args(Share):
        raise ValueError(f"share: must be one of {', '.join(get_args(Share))} (got {share!r})")


def _checked_rows(rows: QueryRows) -> tuple[IntArray, IntArray]:
    sequence, position = rows.arrays()
    return sequence, _checked_positions(position)


def _checked_positions(position: IntArray) -> IntArray:
    if position.size and not 0 <= position.min() <= position.max() < MAX_ABS_POSITION:
        raise ValueError(f"rows: position must be in [0, {MAX_ABS_POSITION}) (got {position.min()}..{position.max()})")
    return position
