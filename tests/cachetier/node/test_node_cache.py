"""The cache of a node: what is put is found, to the token, within its bounds, in whatever order things happen."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mneme.cachetier.chunk.header import Chunk
from mneme.cachetier.chunk.keys import encoded, prefix_lineage
from mneme.cachetier.node.cache import NodeCache
from mneme.cachetier.node.index import Change, NodeIndex, descendants
from mneme.cachetier.node.memory import ProcessMemory
from mneme.cachetier.node.search import num_common
from mneme.cachetier.policy.eviction import make_policy
from mneme.lab.cache.simulator import BlockTier
from tests.budget import examples
from tests.cachetier.chunks import (
    CHUNK_TOKENS,
    FINGERPRINT,
    LINEAGE,
    FailingFiles,
    chain_of,
    chunk_files,
    chunk_of,
    folder_bytes,
    make_fingerprint,
)
from tests.cachetier.nodes import (
    BLOCK,
    Clock,
    RefusingMemory,
    found,
    is_right,
    make_node,
    prefetch,
    put,
    query,
    write_due,
)

pytestmark = pytest.mark.usefixtures("few_folders")

IDS = list(range(20))
OTHER_TENANT = prefix_lineage(FINGERPRINT, "other")


def put_all(node: NodeCache, chunks: list[Chunk]) -> set[str]:
    return {put(node, chunk) for chunk in chunks}


def on_disk(folder: Path, chunks: list[Chunk], clock: Clock | None = None, **arguments: Any) -> NodeCache:
    """A node whose host tier is empty and whose disk has these."""
    clock = clock or Clock()
    node = make_node(folder, clock=clock)
    put_all(node, chunks)
    clock.now_s += 3
    write_due(node)
    node.close(flush=False)
    return make_node(folder, clock=clock, **arguments)


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize(
    ("token_ids", "expected"),
    [
        (IDS, [8, 8, 4]),
        ([*IDS, 99], [8, 8, 4]),
        (IDS[:18], [8, 8, 2]),
        ([*IDS[:18], 99, 98], [8, 8, 2]),
        (IDS[:16], [8, 8]),
        ([*IDS[:5], 99, 98, 97, 96], [5]),
        (IDS[:3], [3]),
        ([99, *IDS], []),
        ([], []),
    ],
)
def test_what_is_located_is_right_to_the_token(
    tmp_path: Path, tier: str, token_ids: list[int], expected: list[int]
) -> None:
    chunks = chain_of(IDS)
    node = on_disk(tmp_path, chunks) if tier == "disk" else make_node()
    put_all(node, chunks if tier == "host" else [])
    located = node.locate(query(token_ids))
    assert [(each.tier, each.num_usable) for each in located] == [(tier, num) for num in expected]
    assert all(map(is_right, located, chunks))
    for first in range(len(expected) + 1):
        assert [each.num_usable for each in node.locate(query(token_ids, first=first))] == expected[first:]
    node.close(flush=False)


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_tail_is_found_among_many_that_begin_behind_the_same_chunk(tmp_path: Path, tier: str) -> None:
    """As after a system prompt: more than are compared, and far more than are opened."""
    numbers = range(100, 124 if tier == "disk" else 190)
    tails = [chunk_of([7, 7, number, number]) for number in numbers]
    node = on_disk(tmp_path, tails) if tier == "disk" else make_node()
    put_all(node, tails if tier == "host" else [])
    for number in numbers:
        assert found(node, [7, 7, number, number, 1]) == [(tier, 4)]
        assert found(node, [7, 7, number, number]) == [(tier, 4)]
    node.close(flush=False)


def test_a_tail_that_grows_among_many_replaces_what_it_was(tmp_path: Path) -> None:
    clock = Clock()
    node = make_node(tmp_path, host_blocks=300, disk_blocks=300, clock=clock)
    for length in (2, 3, 5):
        for number in range(100, 140):
            chunk = chunk_of([7, *[number] * length])
            assert node.put(chunk.header, chunk.layers, LINEAGE).value == "taken"
        clock.now_s += 3
        write_due(node)
        assert len(chunk_files(tmp_path)) == len(node.snapshot()) // 2 == 40
    node.close(flush=False)


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_another_models_or_tenants_chunk_is_a_miss(tmp_path: Path, tier: str) -> None:
    """Under the right keys, which nobody but a broken or hostile engine would make."""
    chunks = chain_of(IDS)
    node = on_disk(tmp_path, chunks) if tier == "disk" else make_node()
    put_all(node, chunks if tier == "host" else [])
    assert found(node, IDS, fingerprint=make_fingerprint("other").digest) == []
    stats = node.stats()[tier]
    assert stats["miss_other_model"] >= 1
    assert found(make_node(), IDS) == []
    assert found(node, IDS, lineage=OTHER_TENANT) == []
    node.close(flush=False)


def test_a_header_of_another_layout_is_no_chunk_to_read(tmp_path: Path) -> None:
    """Under the right key and fingerprint: a layout decides how much is read, and where to."""
    node, chunk = make_node(tmp_path, clock=Clock()), chunk_of([1] * CHUNK_TOKENS)
    other = replace(
        chunk.header, layout=replace(FINGERPRINT.layout, num_layers=1), checksums=chunk.header.checksums[:1]
    )
    assert put(node, Chunk(other, chunk.layers[:1])) == "taken"
    assert not found(node, [1] * CHUNK_TOKENS, layout=FINGERPRINT.layout)
    assert node.stats()["host"]["miss_other_model"] == 1
    assert found(node, [1] * CHUNK_TOKENS, layout=other.layout) == [("host", CHUNK_TOKENS)]
    node.close(flush=False)


def test_a_search_ends_in_time(tmp_path: Path) -> None:
    """Headers of files are read until the time is over; what was found until then counts."""

    class Ticking(Clock):
        def __call__(self) -> float:
            self.now_s += 1
            return self.now_s

    on_disk(tmp_path, chain_of(IDS)).close(flush=False)
    node = make_node(tmp_path, clock=Ticking())
    num_found = [len(node.locate(query(IDS), timeout_s)) for timeout_s in range(20)]
    assert num_found == sorted(num_found)
    assert {*num_found} >= {0, 1, 3}
    node.close(flush=False)


def test_tails_wait_and_cost_one_write(tmp_path: Path) -> None:
    clock = Clock()
    node = make_node(tmp_path, clock=clock)
    put(node, chunk_of(IDS[:CHUNK_TOKENS]))
    parent = chunk_of(IDS[:CHUNK_TOKENS]).header.key
    for length in range(1, 6):
        put(node, chunk_of(IDS[8 : 8 + length], parent))
        clock.now_s += 1
        write_due(node)
    assert len(chunk_files(tmp_path)) == 1
    clock.now_s += 2
    write_due(node)
    assert len(chunk_files(tmp_path)) == 2
    stats = node.stats()
    assert stats["writer"]["cancelled"] == 4
    assert stats["disk"]["written"] == 2
    assert stats["disk"].get("superseded_bytes", 0) == 0
    assert stats["host"]["put_bytes"] > stats["disk"]["written_bytes"] * 0.5
    assert stats["writer"]["bytes"] == 0
    node.close(flush=False)


def test_a_tenant_over_its_quota_evicts_its_own_oldest(tmp_path: Path) -> None:
    clock = Clock()
    node = make_node(tmp_path, clock=clock, tenant_bytes=3 * BLOCK)
    theirs = [chunk_of([number], lineage=OTHER_TENANT) for number in range(3)]
    put_all(node, theirs)
    mine = [chunk_of([number]) for number in range(5)]
    for chunk in mine:
        clock.now_s += 3
        put(node, chunk)
        write_due(node)
    clock.now_s += 3
    write_due(node)
    assert [chunk.header.key in node for chunk in mine] == [False] * 2 + [True] * 3
    assert all(chunk.header.key in node for chunk in theirs)
    assert node.stats()["owners"] == {
        tenant.hex(): {"host": 3 * BLOCK, "disk": 3 * BLOCK} for tenant in (LINEAGE.tenant, OTHER_TENANT.tenant)
    }
    node.close(flush=False)


def test_pins_keep_chunks_for_their_time_and_half_a_tier_at_most(tmp_path: Path) -> None:
    clock = Clock()
    node = make_node(tmp_path, 8, 8, clock=clock, ttl_s=50.0)
    pinned = [chunk_of([number]) for number in range(6)]
    for chunk in pinned:
        put(node, chunk)
        clock.now_s += 3
        write_due(node)
    keys = [chunk.header.key for chunk in pinned]
    assert node.pin([*keys, bytes(16)], 100) == 4
    assert node.stats()["pins"] == {"keys": 4, "host_bytes": 4 * BLOCK, "disk_bytes": 4 * BLOCK}
    for number in range(100, 130):
        put(node, chunk_of([number]))
        clock.now_s += 3
        write_due(node)
        node.expire()
    assert [key in node for key in keys] == [True] * 4 + [False] * 2
    assert node.unpin(keys[:1]) == 1
    clock.now_s += 101
    node.expire()
    assert not any(key in node for key in keys)
    assert node.stats()["pins"] == {"keys": 0, "host_bytes": 0, "disk_bytes": 0}
    node.close(flush=False)


class BusyMemory(ProcessMemory):
    """Has something done while it takes a chunk."""

    meanwhile: Callable[[], object] = staticmethod(lambda: None)

    def accept(self, payload: object) -> object:
        self.meanwhile()
        return super().accept(payload)


@pytest.mark.parametrize("is_busy", [False, True])
@pytest.mark.parametrize("order", [(1, 0, 2), (0, 2, 1), (2, 1, 0)])
def test_chunks_of_a_chain_that_come_in_another_order_are_all_written(
    tmp_path: Path, order: tuple[int, ...], is_busy: bool
) -> None:
    """When all are in memory, or while the next is on its way there: engines' calls overtake each other."""
    ids, memory = list(range(3 * CHUNK_TOKENS)), BusyMemory()
    chunks, node = chain_of(ids), make_node(tmp_path, memory=memory)
    if is_busy:
        memory.meanwhile = lambda: write_due(node)
    for index in order:
        assert put(node, chunks[index]) == "taken"
    write_due(node)
    node.close(flush=False)
    assert found(make_node(tmp_path), ids) == [("disk", CHUNK_TOKENS)] * 3


def test_a_share_is_kept_free_and_a_chain_goes_from_its_end() -> None:
    node = make_node(host_blocks=10, free_share=0.2)
    put_all(node, chain_of(list(range(8 * 20))))
    stats = node.stats()["host"]
    assert stats["bytes"] == 8 * BLOCK
    assert stats["orphan"] == 11
    assert found(node, list(range(8 * 20))) == [("host", 8)] * 8


@pytest.mark.parametrize("config", [{"host_blocks": 4}, {"tenant_bytes": 4 * BLOCK}])
def test_a_chain_larger_than_memory_keeps_its_beginning(config: dict[str, Any]) -> None:
    node, ids = make_node(**config), list(range(8 * 7))
    put(node, chunk_of([77]))
    outcomes = [put(node, chunk) for chunk in chain_of(ids)]
    assert outcomes == ["taken"] * 4 + ["refused"] * 3
    assert found(node, ids) == [("host", 8)] * 4
    assert put(node, chunk_of([78])) == "taken"


@pytest.mark.parametrize(("host_blocks", "disk_blocks"), [(3, 100), (100, 3), (3, 4), (0, 4), (0, 100)])
def test_a_chain_larger_than_a_tier_is_found_from_its_beginning(
    tmp_path: Path, host_blocks: int, disk_blocks: int
) -> None:
    clock, ids = Clock(), list(range(8 * 10))
    node = make_node(tmp_path, host_blocks, disk_blocks, clock=clock)
    for chunk in chain_of(ids):
        put(node, chunk)
        write_due(node)
    assert len(found(node, ids)) >= min(10, max(host_blocks, disk_blocks))
    node.close()
    node = make_node(tmp_path, host_blocks, disk_blocks, clock=clock)
    assert found(node, ids) == [("disk", 8)] * min(10, disk_blocks)
    node.close(flush=False)


@pytest.mark.parametrize("is_waiting", [True, False])
def test_what_is_brought_up_does_not_evict_what_it_follows(tmp_path: Path, is_waiting: bool) -> None:
    ids = list(range(8 * 6))
    chain = chain_of(ids)
    node = on_disk(tmp_path, chain, host_blocks=3)
    if is_waiting:
        found(node, ids, request_id="r")
        prefetch(node)
    else:
        assert None not in node.read([chunk.header.key for chunk in chain])
    assert found(node, ids) == [("host", 8)] * 3 + [("disk", 8)] * 3
    node.close(flush=False)


def test_chunks_used_once_do_not_flush_what_returned(tmp_path: Path) -> None:
    clock = Clock()
    node = make_node(tmp_path, 10, clock=clock, eviction="returning", free_share=0.2)
    outcomes = []
    for number in (*range(8), *range(100, 190)):
        clock.now_s += 1
        outcomes.append(put(node, chunk_of([number, *range(7)])))
        write_due(node)
        assert all(found(node, [n, *range(7)]) == [("host", 8)] for n in range(min(8, len(outcomes))))
    assert {*outcomes} == {"taken", "to_disk"}
    assert len(chunk_files(tmp_path)) == 98
    node.close(flush=False)


def test_what_waiting_requests_want_stays(tmp_path: Path) -> None:
    clock = Clock()
    node = make_node(host_blocks=4, clock=clock, eviction="lookahead")
    for number in range(3):
        put(node, chunk_of([number]))
        clock.now_s += 1
        found(node, [number], request_id=f"r{number}")
    for number in range(100, 110):
        clock.now_s += 1
        put(node, chunk_of([number]))
        assert all(found(node, [n]) for n in range(3))
    node.forget(["r0", "r1", "r2", "unknown"])
    for number in range(110, 120):
        clock.now_s += 1
        put(node, chunk_of([number]))
    assert not any(found(node, [n]) for n in range(3))


def test_waiting_requests_are_bounded_in_number_and_age() -> None:
    clock = Clock()
    node = make_node(clock=clock)
    put(node, chunk_of([1]))
    for number in range(1500):
        found(node, [1], request_id=str(number))
    assert node.stats()["waiting"] == 1024
    clock.now_s += 601
    found(node, [1], request_id="last")
    assert node.stats()["waiting"] == 1
    found(node, [1])
    assert node.stats()["waiting"] == 1


def test_a_request_that_was_forgotten_before_it_was_known_does_not_wait() -> None:
    """The node took longer to look than its client waited: what it wanted would be kept for nobody."""
    clock = Clock()
    node = make_node(clock=clock)
    put(node, chunk_of([1]))
    node.forget(["r", "s"])
    found(node, [1], request_id="r")
    assert node.stats()["waiting"] == 0
    found(node, [1], request_id="r")  # another of its name
    assert node.stats()["waiting"] == 1
    clock.now_s += 60
    found(node, [1], request_id="s")
    assert node.stats()["waiting"] == 2


def test_a_chunk_that_cannot_be_brought_up_holds_up_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = ProcessMemory()
    node = on_disk(tmp_path, [chunk_of([number]) for number in (1, 2)], memory=memory)
    for number in (1, 2):
        assert found(node, [number], request_id=str(number)) == [("disk", 1)]

    def fails(layers: object) -> object:
        raise RuntimeError("a bug")

    with monkeypatch.context() as patched:
        patched.setattr(memory, "keep", fails)
        with pytest.raises(RuntimeError):  # the thread's edge counts it
            node.step()
    prefetch(node)
    assert (found(node, [1]), found(node, [2])) == ([("disk", 1)], [("host", 1)])
    assert node.stats()["host"]["bytes"] == BLOCK
    node.close(flush=False)


def test_what_waits_is_brought_up_in_the_order_of_arrival(tmp_path: Path) -> None:
    """Until memory is full of what waiting requests want."""
    chains = [chain_of([root, *range(15)]) for root in (50, 60, 70, 80)]
    node = on_disk(tmp_path, [chunk for chain in chains for chunk in chain], host_blocks=5, eviction="lookahead")
    idle = chunk_of([1])
    put(node, idle)
    for root in (70, 50, 60):
        assert found(node, [root, *range(15)], request_id=str(root)) == [("disk", 8)] * 2
    prefetch(node)
    assert found(node, [70, *range(15)]) == [("host", 8)] * 2
    assert found(node, [50, *range(15)]) == [("host", 8)] * 2
    assert found(node, [60, *range(15)])[-1] == ("disk", 8)
    assert node.stats()["host"]["prefetch_no_room"] == 1
    assert node.stats()["host"]["bytes"] <= 5 * BLOCK
    assert found(node, [80, *range(15)], request_id="80") == [("disk", 8)] * 2
    node.forget(["70"])
    prefetch(node)
    assert found(node, [60, *range(15)]) == [("host", 8)] * 2
    assert found(node, [80, *range(15)])[-1] == ("disk", 8)
    node.forget(["50", "60"])
    prefetch(node)
    assert found(node, [80, *range(15)]) == [("host", 8)] * 2
    node.close(flush=False)


def test_who_reads_all_the_time_does_not_keep_what_waits_on_the_disk(tmp_path: Path) -> None:
    node = on_disk(tmp_path, chain_of(IDS))
    assert found(node, IDS, request_id="r")[0] == ("disk", 8)
    with node.loading():
        waits = iter(node.step, 0.0)
        assert 10 < sum(1 for _ in waits) < 100
        assert found(node, IDS)[:2] == [("host", 8), ("disk", 8)]
        assert node.step() != 0.0  # behind one chunk they go first again
    node.close(flush=False)


def test_what_is_saved_waits_while_other_processes_read_files(tmp_path: Path) -> None:
    clock = Clock()
    node = make_node(tmp_path, clock=clock)
    put_all(node, chain_of(IDS))
    node.others_load()
    write_due(node)
    assert not chunk_files(tmp_path)
    clock.now_s += 60
    write_due(node)
    assert len(chunk_files(tmp_path)) == len(chain_of(IDS))
    node.close(flush=False)


def test_peers_get_bytes_whatever_tier_has_them(tmp_path: Path) -> None:
    chunks = chain_of(IDS)
    node = on_disk(tmp_path, chunks, host_blocks=2)
    read = node.read([*(chunk.header.key for chunk in chunks), bytes(16)])
    assert read[3] is None
    assert all(each is not None and is_right(each, chunk) for each, chunk in zip(read, chunks, strict=False))
    assert all(each is None or each.held is not None for each in read)
    assert node.stats()["host"]["bytes"] == 2 * BLOCK
    node.close(flush=False)


def test_memory_that_refuses_costs_nothing_but_the_chunk(tmp_path: Path) -> None:
    memory, chunks = RefusingMemory(), chain_of(IDS)
    node = on_disk(tmp_path, chunks[:1])
    node.close(flush=False)
    node = make_node(tmp_path, memory=memory)
    memory.is_full = True
    assert put_all(node, chunks[1:]) == {"refused"}
    assert node.read([chunks[0].header.key]) == [None]
    assert found(node, IDS, request_id="r") == [("disk", 8)]
    prefetch(node)
    assert node.stats()["host"]["bytes"] == 0
    assert node.stats()["host"]["memory_refused"] == 3
    assert node.stats()["writer"]["bytes"] == 0
    memory.is_full = False
    assert put_all(node, chunks[1:]) == {"taken"}
    assert found(node, IDS) == [("disk", 8), ("host", 8), ("host", 4)]
    node.close(flush=False)


def test_what_a_fault_or_a_full_queue_kept_from_the_disk_is_written_later(tmp_path: Path) -> None:
    files, clock = FailingFiles(lambda _operation, _number: None), Clock()
    node = make_node(tmp_path, host_blocks=12, files=files, clock=clock)
    chunks = chain_of(list(range(44)))  # more than may wait
    files.fails = lambda operation, _number: errno.EIO if operation == "write" else None
    assert put_all(node, chunks) == {"taken"}
    for _ in range(3):  # in vain
        clock.now_s += 20
        write_due(node)
        prefetch(node)
    assert (chunk_files(tmp_path), node.stats()["writer"]["bytes"] > 0) == ([], True)
    assert node.stats()["host"].get("written_late", 0) == 0
    files.fails = lambda _operation, _number: None
    for _ in range(3):
        clock.now_s += 20
        write_due(node)
        prefetch(node)
    assert len(chunk_files(tmp_path)) == len(chunks)
    num_late = node.stats()["host"]["written_late"]
    clock.now_s += 20
    prefetch(node)
    assert node.stats()["host"]["written_late"] == num_late == len(chunks)
    node.close(flush=False)


SIZES = st.sampled_from([(200, 200), (6, 200), (200, 6), (5, 7)])
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "put", "locate", "wait", "delete", "below", "write", "prefetch", "read", "pin"]),
        st.integers(0, 4),
        st.integers(0, 30),
    ),
    max_size=40,
)


def sequence(number: int) -> list[int]:
    """Sequences of 30 tokens that share beginnings of different lengths."""
    shared = (0, 5, 8, 19, 27)[number]
    return [*range(shared), *range(1000 * (number + 1), 1000 * (number + 1) + 30 - shared)]


@settings(max_examples=examples(150), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sizes=SIZES, has_disk=st.booleans(), steps=STEPS)
def test_any_order_of_calls_finds_what_a_dictionary_has(
    tmp_path_factory: pytest.TempPathFactory, sizes: tuple[int, int], has_disk: bool, steps: list[tuple[str, int, int]]
) -> None:
    """With room for all it finds all of it; with less it finds a beginning, and nothing that was not put."""
    clock, folder = Clock(), tmp_path_factory.mktemp("node")
    followed: dict[tuple[bytes, str], int] = {}

    def follow(change: Change) -> None:
        if change.is_added:
            followed[change.key, change.tier] = change.num_bytes
        else:
            del followed[change.key, change.tier]

    node = make_node(folder if has_disk else None, *sizes, clock=clock, on_change=follow, eviction="lookahead")
    model: dict[bytes, Chunk] = {}
    for operation, number, length in steps:
        clock.now_s += 0.5
        ids = sequence(number)[:length]
        chunks = chain_of(ids)
        keys = [chunk.header.key for chunk in chunks]
        if operation == "put":
            for chunk in chunks:
                outcome = put(node, chunk)
                if outcome in ("taken", "to_disk"):
                    _supersede(model, chunk)
                    model[chunk.header.key] = chunk
        elif operation in ("locate", "wait"):
            _check_located(node, model, ids, is_complete=sizes == (200, 200), is_waiting=operation == "wait")
        elif operation == "delete":
            node.delete(keys[-1:])
            for key in keys[-1:]:
                model.pop(key, None)
        elif operation == "below":
            node.delete(descendants(keys[0] if keys else LINEAGE.root, node.children))
            if sizes == (200, 200):
                _drop_below(model, keys[0] if keys else LINEAGE.root)
        elif operation == "write" and has_disk:
            clock.now_s += 3
            write_due(node)
        elif operation == "prefetch":
            prefetch(node)
        elif operation == "read":
            read = node.read(keys)
            assert all(each is None or is_right(each, model[each.header.key]) for each in read)
        elif operation == "pin":
            node.pin(keys, 10)
        stats = node.stats()
        assert stats["host"]["bytes"] <= sizes[0] * BLOCK
        assert folder_bytes(folder) <= sizes[1] * BLOCK
    assert followed == {(change.key, change.tier): change.num_bytes for change in node.snapshot()}
    node.delete(descendants(LINEAGE.root, node.children))
    node.delete([*model])
    stats = node.stats()
    assert (stats["host"]["bytes"], folder_bytes(folder), followed) == (0, 0, {})
    assert not has_disk or stats["writer"]["bytes"] == 0
    node.close(flush=False)


def _supersede(model: dict[bytes, Chunk], chunk: Chunk) -> None:
    ids = chunk.header.token_ids
    parents = {other.header.parent for other in model.values()}
    for key, other in [*model.items()]:
        mine = other.header
        is_shorter = mine.parent == chunk.header.parent and mine.num_tokens < len(ids)
        if is_shorter and key not in parents and num_common(mine.token_ids, ids) == mine.num_tokens:
            del model[key]


def _drop_below(model: dict[bytes, Chunk], key: bytes) -> None:
    for child in [other for other, chunk in model.items() if chunk.header.parent == key]:
        del model[child]
        _drop_below(model, child)


def _check_located(
    node: NodeCache, model: dict[bytes, Chunk], ids: list[int], *, is_complete: bool, is_waiting: bool
) -> None:
    wanted = query(ids, request_id=str(ids) if is_waiting else "")
    located = node.locate(wanted)
    for place, each in enumerate(located):
        header = each.header
        assert is_right(each, model[header.key])
        assert header.parent == wanted.parent(place)
        assert each.num_usable == num_common(header.token_ids, wanted.tokens_of(place)) > 0
        assert each.num_usable == CHUNK_TOKENS or place == len(located) - 1
    if is_complete:
        num_whole = len([*takewhile(model.__contains__, wanted.keys)])
        rest = encoded(ids)[num_whole * CHUNK_TOKENS :]
        children = [c.header.token_ids for c in model.values() if c.header.parent == wanted.parent(num_whole)]
        num_partial = max((num_common(child, rest) for child in children), default=0)
        assert sum(each.num_usable for each in located) == num_whole * CHUNK_TOKENS + num_partial


@pytest.mark.parametrize(("num_chunks", "num_known"), [(1, 1024), (600, 2400)])
def test_a_node_knows_four_gone_chunks_for_each_that_it_has_and_at_least_a_thousand(
    num_chunks: int, num_known: int
) -> None:
    index = NodeIndex(Clock())
    tier = BlockTier(index, "host", num_chunks, make_policy("lru", Clock(), num_chunks))
    assert all(tier.add_block(number.to_bytes(8), b"") for number in range(num_chunks))
    gone = [b"gone %d" % number for number in range(3000)]
    for key in gone:
        index.mark_gone(key)
    assert [index.was_here(key) for key in gone] == [False] * (3000 - num_known) + [True] * num_known
