"""Which pages are shared by whom."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mneme.kernels import segments
from mneme.kernels.page_table import PageRef, PageTable, References, references_of
from mneme.kernels.segments import PRIVATE, Segments, find_segments, unite_repeats
from tests.budget import examples
from tests.kernels.cases import random_tables


def segments_of(*tables: list[PageRef], page_size: int = 4) -> Segments:
    return find_segments(unite_repeats(references_of([PageTable.from_refs(table) for table in tables], page_size)))


def pages(*ids: int, delta: int = 0) -> list[PageRef]:
    return [PageRef(page, delta) for page in ids]


def test_pages_keep_the_order_of_the_table() -> None:
    (segment,) = segments_of(pages(9, 2, 7, 1), pages(9, 2, 7, 1)).segments
    assert segment.page_ids.tolist() == [9, 2, 7, 1]


def test_disjoint_masks_of_one_page_unite() -> None:
    """The page that straddles a truncation, should both halves end up with one delta."""
    refs = unite_repeats(
        references_of([PageTable.from_refs([PageRef(7, 5, 0b0011), PageRef(1), PageRef(7, 5, 0b0100)])], 4)
    )
    assert refs.page_id.tolist() == [7, 1]
    assert refs.mask.tolist() == [0b0111, 0b1111]


def test_a_slot_shown_twice_with_one_delta_is_refused() -> None:
    with pytest.raises(ValueError, match="sequence 1 shows a slot of page 7 with delta 5 twice"):
        segments_of(pages(7), [PageRef(7, 5, 0b0011), PageRef(7, 5, 0b0110)])


@given(seed=st.integers(0, 9999), masked=st.booleans(), constant_hash=st.booleans())
@settings(max_examples=examples(60))
def test_segments_are_the_pages_with_equal_sharers(seed: int, masked: bool, constant_hash: bool) -> None:
    """Against sets in plain Python; also when all hashes collide."""
    rng = np.random.default_rng(seed)
    tables = random_tables(rng, 4, 5, num_documents=3, masked=masked)
    refs = unite_repeats(references_of([PageTable.from_refs(table) for table in tables], 4))
    with pytest.MonkeyPatch.context() as patch:
        if constant_hash:
            patch.setattr(segments, "_scrambled", lambda values: np.ones(len(values), np.uint64))
        found = find_segments(refs)
    sharers_by_page = defaultdict(set)
    for sequence, page, delta, _ in zip(*refs, strict=True):
        sharers_by_page[int(page)].add((int(sequence), int(delta)))
    for reference, index in enumerate(found.segment_of_ref):
        page = int(refs.page_id[reference])
        assert (index == PRIVATE) == (len(sharers_by_page[page]) == 1)
        assert index == PRIVATE or page in found.segments[index].page_ids
    for segment in found.segments:
        wanted = set(zip(segment.sequences.tolist(), segment.deltas.tolist(), strict=True))
        assert all(sharers_by_page[page] == wanted for page in segment.page_ids.tolist())
        check_masks(refs, segment)
    if not constant_hash:  # collisions may split a segment, never join two
        groups = {
            (frozenset(sharers), len({int(mask) for mask in refs.mask[refs.page_id == page]}) == 1)
            for page, sharers in sharers_by_page.items()
            if len(sharers) > 1
        }
        assert len(found.segments) == len(groups)


def check_masks(refs: References, segment: segments.Segment) -> None:
    mask_by_use = {tuple(use): mask for *use, mask in zip(*(array.tolist() for array in refs), strict=True)}
    masks = np.broadcast_to(segment.masks, (len(segment.sequences), len(segment.page_ids)))
    for sharer, (sequence, delta) in enumerate(zip(segment.sequences, segment.deltas, strict=True)):
        for column, page in enumerate(segment.page_ids):
            assert masks[sharer, column] == mask_by_use[(sequence, page, delta)]
