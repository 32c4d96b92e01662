"""What is not used for a time goes, and nothing that others descend from before them."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from mneme.cachetier.chunk.header import Chunk
from mneme.cachetier.node.cache import NodeCache
from tests.cachetier.chunks import CHUNK_TOKENS, LINEAGE, chain_of, chunk_files, chunk_of
from tests.cachetier.nodes import Clock, make_node, prefetch, put, query, write_due

TTL_S = 3600.0
IDS = list(range(80))

pytestmark = pytest.mark.usefixtures("few_folders")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=["host", "disk"])
def node(request: pytest.FixtureRequest, tmp_path: Path, clock: Clock) -> NodeCache:
    """Without a disk, or with one and little memory."""
    is_disk = request.param == "disk"
    return make_node(tmp_path if is_disk else None, 4 if is_disk else 100, clock=clock, ttl_s=TTL_S)


def save(node: NodeCache, chunks: list[Chunk]) -> None:
    for chunk in chunks:
        put(node, chunk)
        if node.writer is not None:
            write_due(node)


def num_found(node: NodeCache, ids: list[int]) -> int:
    """Chunks; it is no use of them."""
    return len(node.search(query(ids), float("inf")))


def test_the_beginning_of_a_conversation_that_goes_on_stays(node: NodeCache, clock: Clock) -> None:
    """An engine that has it on its device asks for what follows, and puts what is new."""
    for turn in range(10):
        chain = chain_of(IDS[: (turn + 1) * CHUNK_TOKENS])
        node.locate(query(IDS[: (turn + 1) * CHUNK_TOKENS], first=turn))
        save(node, chain[turn:])
        clock.now_s += TTL_S / 4
        prefetch(node)
    assert num_found(node, IDS) == 10


def test_a_use_in_memory_counts_after_a_restart(tmp_path: Path, clock: Clock) -> None:
    node = make_node(tmp_path, clock=clock)
    save(node, chain_of(IDS[:16]))
    for path in chunk_files(tmp_path):
        os.utime(path, (0, 0))
    clock.now_s += 100
    assert [each.tier for each in node.locate(query(IDS[:16]))] == ["host", "host"]
    assert all(path.stat().st_mtime == 0 for path in chunk_files(tmp_path))  # the disk may hang: nobody waits for it
    node.step()
    assert all(path.stat().st_mtime > 1e9 for path in chunk_files(tmp_path))


def test_what_a_pinned_chunk_descends_from_stays(node: NodeCache, clock: Clock) -> None:
    save(node, chain_of(IDS[:16]))
    assert node.pin([chain_of(IDS[:16])[-1].header.key], 10 * TTL_S) == 1
    for _ in range(9):
        clock.now_s += TTL_S
        node.expire()
    assert num_found(node, IDS[:16]) == 2
    clock.now_s += 2 * TTL_S
    node.expire()
    assert not node.snapshot()


def test_trees_used_in_any_order_are_as_young_as_what_was_used_behind_them(clock: Clock) -> None:
    """Against the definition: a chunk goes when neither it nor anything behind it was used for the time."""
    for seed in range(20):
        generator = random.Random(seed)
        node = make_node(clock=clock, ttl_s=TTL_S)
        parents: dict[bytes, bytes] = {}
        for number in range(40):
            parent = generator.choice([LINEAGE.root, *parents])
            chunk = chunk_of([number] * CHUNK_TOKENS, parent)
            parents[chunk.header.key] = parent
            put(node, chunk)
        used_s = dict.fromkeys(parents, clock.now_s)
        for key in generator.sample([*parents], 15):
            clock.now_s += 100
            node.read([key])
            while key in parents:
                used_s[key] = clock.now_s
                key = parents[key]
        for _ in range(8):
            clock.now_s += 600
            node.expire()
            expected = {key for key, time_s in used_s.items() if time_s >= clock.now_s - TTL_S}
            assert {change.key for change in node.snapshot()} == expected
        node.close()
