"""Tiles cover a step's work exactly once, and packing uploads what changed; numpy only."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mneme.kernels.attention import PageTable, Plan, QueryRows, build_plan
from mneme.kernels.triton import tiles as triton_tiles
from mneme.kernels.triton.configs import (
    wide_config_of,
)
from mneme.kernels.triton.pack import Header, PackedWork
from mneme.kernels.triton.tiles import Grid, Tiles, cut
from mneme.kernels.work import WorkList
from tests.budget import examples
from tests.kernels.cases import Scene, scenes

SMALL_GRID = Grid(
    page_size=1, num_groups=2, num_kv_heads=2, narrow_m=4, wide_m=8, num_at_once=16, max_split_slots=1 << 20
)


def read_by(work: WorkList, tiles: Tiles) -> Counter[tuple[int, int, int]]:
    """How often tiles read each (run, page) for each entry of a piece, as the kernel walks them."""
    reads: Counter[tuple[int, int, int]] = Counter()
    for first, count, number, first_run, run_end, from_page, to_page, _ in tiles.tile.tolist():
        for run in range(first_run, run_end):
            begin = from_page if run == first_run else int(work.page_begin[run])
            end = int(work.page_end[run])
            if run == run_end - 1:
                end = min(end, to_page)
            for page in range(begin, end):
                for entry in range(first, first + count):
                    assert entry - first + number == entry - piece_begin(work, run)
                    reads[run, page, entry] += 1
    return reads


def piece_begin(work: WorkList, run: int) -> int:
    piece = int(np.searchsorted(work.run_begin, run, side="right")) - 1
    return int(work.row_begin[piece])


def wanted_reads(work: WorkList) -> Counter[tuple[int, int, int]]:
    return Counter(
        (run, page, entry)
        for piece in range(work.num_pieces)
        for run in range(work.run_begin[piece], work.run_begin[piece + 1])
        for page in range(work.page_begin[run], work.page_end[run])
        for entry in range(work.row_begin[piece], work.row_begin[piece + 1])
    )


@pytest.fixture
def short_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of a few pages are cut too."""
    monkeypatch.setattr(triton_tiles, "_SHORTEST_RANGE_TOKENS", 1)
    monkeypatch.setattr(triton_tiles, "_TOKENS_PER_PROGRAM", 0)
    monkeypatch.setattr(triton_tiles, "_TOKENS_PER_MERGE", 0)


@pytest.mark.usefixtures("short_ranges")
@given(scene=scenes(), share=st.sampled_from(["always", "never"]), narrow=st.booleans())
@settings(max_examples=examples(150))
def test_tiles_read_every_page_for_every_row_once(scene: Scene, share: str, narrow: bool) -> None:
    plan = scene.plan(share=share)
    tiles = cut(plan.work, plan.sequence, SMALL_GRID._replace(wide_m=4 if narrow else 8))
    assert read_by(plan.work, tiles) == wanted_reads(plan.work)
    assert (tiles.tile[:, 1] * SMALL_GRID.num_groups <= 8).all()


@pytest.mark.usefixtures("short_ranges")
@given(scene=scenes(), share=st.sampled_from(["always", "never"]))
@settings(max_examples=examples(100))
def test_every_part_is_written_once_and_merged_once(scene: Scene, share: str) -> None:
    plan = scene.plan(share=share)
    tiles = cut(plan.work, plan.sequence, SMALL_GRID)
    slots: dict[int, list[int]] = {row: [] for row in range(plan.num_rows)}
    for first, count, _, _, _, _, _, slot in tiles.tile.tolist():
        for index, row in enumerate(plan.work.row[first : first + count].tolist()):
            slots[row].append(slot + index)
    assert tiles.num_parts.tolist() == [len(slots[row]) for row in range(plan.num_rows)]
    merged = {row: found for row, found in slots.items() if len(found) > 1}
    assert tiles.merged_row.tolist() == list(merged)
    bounds = zip(tiles.part_begin[:-1], tiles.part_begin[1:], strict=True)
    assert [sorted(tiles.part[begin:end].tolist()) for begin, end in bounds] == [sorted(v) for v in merged.values()]
    used = [slot for found in merged.values() for slot in found]
    assert len(set(used)) == len(used)
    assert max(used, default=-1) < max(tiles.num_slots, 1)


def decode_plan(num_sequences: int, num_pages: int, page_size: int = 32) -> Plan:
    tables = [PageTable.own(range(i * num_pages, (i + 1) * num_pages)) for i in range(num_sequences)]
    rows = QueryRows(np.arange(num_sequences), np.full(num_sequences, num_pages * page_size - 1))
    return build_plan(tables, rows, page_size=page_size, num_q_heads=32, num_kv_heads=8, head_dim=128)


H200 = Grid(page_size=32, num_groups=4, num_kv_heads=8, narrow_m=16, wide_m=64, num_at_once=264, max_split_slots=4000)


def test_cutting_stops_at_the_bound_of_partial_results() -> None:
    plan = decode_plan(4, 512)
    assert cut(plan.work, plan.sequence, H200).num_slots > 20
    assert 0 < cut(plan.work, plan.sequence, H200._replace(max_split_slots=20)).num_slots <= 20
    assert cut(plan.work, plan.sequence, H200._replace(max_split_slots=3)).num_slots == 0


@pytest.mark.parametrize(
    ("sequences", "is_prefill"),
    [
        (range(64), False),  # decodes over what they share, of which each sees all
        ([0] * 64, True),
        ([0] * 64 + [1] * 64, True),  # two prompts behind the same pages
        ([0] * 8 + [*range(1, 57)], False),  # a short prompt beside decodes
    ],
)
def test_keys_that_rows_cannot_see_are_looked_for_where_prompts_read_most_pages(
    sequences: list[int], is_prefill: bool
) -> None:
    num_sequences, shared, end = max(sequences) + 1, range(64), 65 * 32 - 1
    tables = [PageTable.own([*shared, 64 + index]) for index in range(num_sequences)]
    rows = QueryRows(np.array(sequences), np.full(len(sequences), end))
    plan = build_plan(tables, rows, page_size=32, num_q_heads=32, num_kv_heads=8, head_dim=128, share="always")
    assert plan.work.num_shared == (num_sequences > 1)
    assert cut(plan.work, plan.sequence, H200).is_prefill == is_prefill


@given(scene=scenes(), share=st.sampled_from(["always", "never"]), data=st.data())
@settings(max_examples=examples(100))
def test_tiles_stay_right_when_pages_are_appended(scene: Scene, share: str, data: st.DataObject) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_tiles, "_SHORTEST_RANGE_TOKENS", data.draw(st.sampled_from([1, 2])))
        plan = scene.plan(share=share)
        tiles = cut(plan.work, plan.sequence, SMALL_GRID)
    for page in range(24, 24 + data.draw(st.integers(1, 3))):
        if plan.page_tables:
            sequence = np.array([data.draw(st.integers(0, plan.num_sequences - 1))])
            plan = plan.append_new_pages(sequence, np.array([page])) or plan
    assert read_by(plan.work, tiles) == wanted_reads(plan.work)


def test_a_decode_step_uploads_positions_and_a_new_page_a_few_words() -> None:
    plan = decode_plan(32, 64)
    tiles = cut(plan.work, plan.sequence, H200)
    packed = PackedWork(plan.page_size)
    first = packed.update(plan.work, tiles, plan.position.astype(np.int32))
    assert sum(end - start for start, end in first) > 32 * 64 * 3
    position = int(packed.words[Header.position])
    following = plan.with_rows(QueryRows(plan.sequence, plan.position + 1))
    assert packed.update(following.work, tiles, following.position.astype(np.int32)) == [(position, position + 32)]
    grown = following.append_new_pages(np.array([5]), np.array([3000]))
    assert grown is not None
    spans = packed.update(grown.work, tiles, grown.position.astype(np.int32))
    assert sum(end - start for start, end in spans) <= 32 + 32 * 8 + 300
    fresh = PackedWork(plan.page_size)
    fresh.update(grown.work, tiles, grown.position.astype(np.int32))
    for section in (Header.position, Header.run, Header.page_id, Header.page_mask):
        begin, end = packed.words[section], packed.words[section + 1]
        np.testing.assert_array_equal(packed.words[begin:end], fresh.words[begin:end])


def test_sections_keep_their_places_until_one_outgrows_its_room() -> None:
    packed = PackedWork(32)
    begins = []
    for num_sequences in (32, 40, 80):
        plan = decode_plan(num_sequences, 8)
        tiles = cut(plan.work, plan.sequence, H200)
        packed.update(plan.work, tiles, plan.position.astype(np.int32))
        begins.append(packed.words[Header.position : Header.part + 1].tolist())
        start = packed.words[Header.page_id]
        np.testing.assert_array_equal(packed.words[start : start + len(plan.work.page_id)], plan.work.page_id)
    assert begins[0] == begins[1] != begins[2]


def test_wide_tiles_stand_behind_the_others_and_are_launched_apart_where_that_was_tried() -> None:
    prompt = build_plan(
        [PageTable.own(range(64)), PageTable.own([70])], QueryRows([0] * 256 + [1], [*range(1792, 2048), 40]),
        page_size=32, num_q_heads=32, num_kv_heads=8, head_dim=128,
    )  # fmt: skip
    tiles = cut(prompt.work, prompt.sequence, H200._replace(wide_m=128, is_apart=True))
    is_wide = tiles.tile[:, 1] * 4 > 16
    assert tiles.num_apart == is_wide.sum() > 0
    assert is_wide[-tiles.num_apart :].all()
    packed = PackedWork(32)
    packed.update(prompt.work, tiles, prompt.position.astype(np.int32))
    assert packed.words[Header.num_tiles] + packed.words[Header.num_apart] == len(tiles.tile)
    for page_size, architecture, dim, groups in (
        (64, 90, 128, 4),
        (32, 90, 128, 4),
        (64, 120, 128, 4),
        (64, 100, 64, 8),
    ):
        wide = wide_config_of(
            head_dim=dim, element_bytes=2, num_groups=groups, page_size=page_size, architecture=architecture
        )
        assert (wide is not None) == ((page_size, architecture) == (64, 90))
