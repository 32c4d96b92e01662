"""A node's cache as its tenants manage it: lookups, pins and deletion over real tiers."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mneme.cachetier.admin import (
    MAX_PINS,
    Amount,
    FoundChunk,
    PinnedPrefix,
    leading,
    merged_pins,
    num_leading_tokens,
)
from mneme.cachetier.chunk.keys import Lineage, prefix_lineage
from mneme.cachetier.names import tenant_id
from mneme.cachetier.node import node_admin
from mneme.cachetier.node.node_admin import NodeAdmin
from mneme.cachetier.pin_book import PinName
from mneme.errors import CachePinRefused, ReplicaUnavailable
from tests.budget import examples
from tests.cachetier.chunks import CHUNK_TOKENS, FINGERPRINT, LINEAGE, chain_of, chunk_of, make_fingerprint
from tests.cachetier.nodes import Clock, make_node, query, write_due

pytestmark = pytest.mark.usefixtures("few_folders")

OTHER = prefix_lineage(FINGERPRINT, "other")
SALTED = prefix_lineage(FINGERPRINT, "tenant:salted")
OWNER = tenant_id("tenant")
PIN = PinName(OWNER, "p")


class Node:
    """A cache without threads, and its administrator."""

    def __init__(self, folder: Path | None = None, host_blocks: int = 256) -> None:
        self.clock = Clock()
        self.cache = make_node(folder, host_blocks, 256, clock=self.clock)
        self.admin = NodeAdmin(self.cache, "here", self.clock)

    def put(self, ids: list[int], lineage: Lineage = LINEAGE) -> None:
        for chunk in chain_of(ids, lineage):
            self.cache.put(chunk.header, chunk.layers)

    def write(self) -> None:
        """All that waits to be, to the disk."""
        self.clock.now_s += 60
        write_due(self.cache)

    def found(self, ids: list[int], lineage: Lineage = LINEAGE) -> int:
        return num_leading_tokens(leading(self.admin.lookup(query(ids, lineage=lineage)), CHUNK_TOKENS))

    def delete(self, ids: list[int], lineage: Lineage = LINEAGE, *, spares_longer: bool = False) -> int:
        return self.admin.delete(query(ids, lineage=lineage), spares_longer=spares_longer).num_chunks


@pytest.fixture
def node() -> Node:
    return Node()


@pytest.fixture
def disk_node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_a_lookup_names_every_place(disk_node: Node) -> None:
    disk_node.put(list(range(20)))
    found = disk_node.admin.lookup(query(list(range(30))))
    assert [(each.place, each.num_tokens, each.tier, each.node) for each in found] == [
        (0, 8, "host", "here"),
        (1, 8, "host", "here"),
        (2, 4, "host", "here"),
    ]
    disk_node.write()
    found = disk_node.admin.lookup(query([*range(18), 99]))
    assert [(each.place, each.num_tokens, each.tier) for each in found] == [
        (place, num_tokens, tier) for place, num_tokens in ((0, 8), (1, 8), (2, 2)) for tier in ("host", "disk")
    ]
    assert disk_node.found([*range(18), 99]) == 18
    assert disk_node.found(list(range(20)), OTHER) == 0


def test_looking_is_no_use_and_nobody_waits(node: Node) -> None:
    node.put([1] * 8)
    node.put([2] * 8)
    order, before = node.cache.snapshot(), node.cache.stats()
    assert node.found([1] * 8) == 8
    assert node.cache.snapshot() == order
    assert node.cache.stats() == before
    assert before["waiting"] == 0


def test_what_lies_behind_a_gap_is_found_and_does_not_lead(node: Node) -> None:
    node.put(list(range(32)))
    node.cache.delete([query(list(range(32))).keys[1]])
    found = node.admin.lookup(query(list(range(32))))
    assert [each.place for each in found] == [0, 2, 3]
    assert node.found(list(range(32))) == 8


def test_leading_chunks_of_several_nodes_make_one_run() -> None:
    def found(place: int, num_tokens: int, node: str) -> FoundChunk:
        return FoundChunk(place, bytes([place]) * 16, num_tokens, 100, "host", node)

    run = leading([found(2, 3, "b"), found(0, 8, "a"), found(1, 8, "b"), found(1, 8, "a"), found(2, 5, "a")], 8)
    assert [(each.place, each.num_tokens, each.node) for each in run] == [
        (0, 8, "a"),
        (1, 8, "b"),
        (1, 8, "a"),
        (2, 5, "a"),
    ]
    assert num_leading_tokens(run) == 21
    assert leading([found(1, 8, "a")], 8) == []
    assert num_leading_tokens(leading([found(0, 8, "a"), found(1, 2, "a"), found(2, 8, "a")], 8)) == 10


def test_pins_of_several_nodes_are_one() -> None:
    pins = [PinnedPrefix("p", 8, Amount(1, 10), 5.0), PinnedPrefix("q", 1, Amount(), None)]
    pins += [PinnedPrefix("p", 16, Amount(2, 20), None)]
    assert merged_pins(pins) == [PinnedPrefix("p", 16, Amount(3, 30), 5.0), PinnedPrefix("q", 1, Amount(), None)]


def test_a_pinned_sequence_outlives_everything_else() -> None:
    node = Node(host_blocks=8)
    node.put([1] * 8)
    pinned = node.admin.pin(PIN, query([1] * 8), 60)
    assert pinned is not None
    assert (pinned.num_tokens, pinned.amount.num_chunks, pinned.expires_in_s) == (8, 1, 60)
    for number in range(10, 40):
        node.put([number] * 8)
    assert node.found([1] * 8) == 8
    assert [pin.pin_id for pin in node.admin.pins(OWNER)] == ["p"]
    assert node.admin.pins(tenant_id("other")) == []
    assert not node.admin.unpin(PinName(tenant_id("other"), "p"))
    assert node.admin.unpin(PIN)
    assert not node.admin.unpin(PIN)
    for number in range(50, 80):
        node.put([number] * 8)
    assert node.found([1] * 8) == 0


def test_two_pins_may_share_chunks(node: Node) -> None:
    node.put([*range(16)])
    node.admin.pin(PinName(OWNER, "short"), query([*range(8)]), 10)
    node.admin.pin(PinName(OWNER, "long"), query([*range(16)]), 100)
    node.admin.pin(PinName(OWNER, "again"), query([*range(16)]), 50)
    assert node.cache.stats()["pins"]["keys"] == 2
    node.admin.unpin(PinName(OWNER, "long"))
    assert node.cache.stats()["pins"]["keys"] == 2
    node.clock.now_s += 60  # were it longer for the longest of all, it would be pinned still
    assert node.admin.pins(OWNER) == []
    node.cache.expire()
    assert node.cache.stats()["pins"]["keys"] == 0


def test_a_pinned_tail_that_has_grown_is_let_go(node: Node) -> None:
    node.put([1] * 5)
    node.admin.pin(PIN, query([1] * 5), None)
    node.put([1] * 7)
    assert node.cache.stats()["pins"]["keys"] == 1
    assert node.admin.unpin(PIN)
    assert node.cache.stats()["pins"]["keys"] == 0


def test_too_much_is_not_pinned_and_what_was_stays() -> None:
    node, big = Node(host_blocks=32), make_fingerprint(head_dim=64)  # a chunk takes four blocks
    lineage, ids = prefix_lineage(big, "tenant"), [*range(100, 148)]
    node.put([1] * 8)
    for part in lineage.chain(ids, CHUNK_TOKENS):
        chunk = chunk_of(ids[part.start : part.end], part.parent, big, lineage)
        node.cache.put(chunk.header, chunk.layers)
    node.admin.pin(PIN, query([1] * 8), 60)
    with pytest.raises(CachePinRefused):
        node.admin.pin(PIN, query(ids, lineage=lineage, fingerprint=big.digest), 60)
    assert [(pin.pin_id, pin.num_tokens) for pin in node.admin.pins(OWNER)] == [("p", 8)]
    assert node.cache.stats()["pins"]["keys"] == 1


def test_a_pin_that_is_taken_back_leaves_the_one_before(node: Node) -> None:
    node.put([1] * 16)
    node.put([2] * 8)
    assert not node.admin.revert_pin(PIN)
    for ids, num_keys in (([1] * 8, 1), ([1] * 16, 2)):
        node.admin.pin(PIN, query(ids), 60)
        assert node.cache.stats()["pins"]["keys"] == num_keys
    node.admin.pin(PIN, query([2] * 8), None)
    assert node.admin.revert_pin(PIN)
    assert [(pin.num_tokens, pin.expires_in_s) for pin in node.admin.pins(OWNER)] == [(16, 60)]
    assert node.cache.stats()["pins"]["keys"] == 2
    assert node.admin.revert_pin(PIN)  # one before is remembered, no more
    assert node.admin.pins(OWNER) == []
    assert node.cache.stats()["pins"]["keys"] == 0


def test_pins_of_all_tenants_are_so_many_and_each_can_be_renewed(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_admin, "_MAX_ALL_PINS", 2)
    node.put([1] * 8)
    for tenant in ("a", "b"):
        node.admin.pin(PinName(tenant_id(tenant), "p"), query([1] * 8), 60)
    with pytest.raises(CachePinRefused, match="2 pins of all API keys"):
        node.admin.pin(PIN, query([1] * 8), 60)
    node.admin.pin(PinName(tenant_id("a"), "p"), query([1] * 8), 90)
    assert [pin.expires_in_s for pin in node.admin.pins(tenant_id("a"))] == [90]


def test_pins_are_so_many(node: Node) -> None:
    node.put([1] * 8)
    for number in range(MAX_PINS):
        node.admin.pin(PinName(OWNER, str(number)), query([1] * 8), 60)
    with pytest.raises(CachePinRefused, match="64 pins at once"):
        node.admin.pin(PIN, query([1] * 8), 60)
    node.admin.pin(PinName(OWNER, "0"), query([1] * 8), 60)
    node.admin.pin(PinName(tenant_id("other"), "0"), query([1] * 8), 60)
    assert node.admin.pin(PIN, query([9] * 8), 60) is None


def test_what_begins_with_a_prefix_goes_from_all_tiers(disk_node: Node) -> None:
    disk_node.put([*range(8), *[5] * 10])
    disk_node.write()
    disk_node.put([*range(8), *[6] * 10])
    assert disk_node.delete([*range(8), *[5] * 10]) == 4  # two chunks, each in memory and on the disk
    assert disk_node.found([*range(8), *[5] * 10]) == 8
    assert disk_node.found([*range(8), *[6] * 10]) == 18
    assert disk_node.delete([*range(8)]) == 4
    assert disk_node.found([*range(8)]) == 0
    stats = disk_node.cache.stats()
    assert (stats["host"]["chunks"], stats["disk"]["chunks"]) == (0, 0)


def test_a_session_is_deleted_by_its_keys_however_many_begin_alike(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    sessions = [[7, *[number] * 3] for number in range(60)] + [[number] * 11 for number in range(100, 160)]
    for ids in sessions:
        node.put(ids)

    def header(key: bytes) -> None:
        raise AssertionError("no header needs to be read")

    monkeypatch.setattr(node.cache, "header", header)
    for ids in sessions:
        assert node.delete(ids, spares_longer=True)
    assert node.cache.stats()["host"]["chunks"] == 0


def test_what_begins_with_a_prompt_is_deleted_whole_or_the_deletion_fails(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(100):
        node.put([1, 2, number])
    monkeypatch.setattr(node_admin, "_SCAN_S", -1.0)
    with pytest.raises(ReplicaUnavailable, match="begins alike"):
        node.delete([1, 2])
    monkeypatch.undo()
    assert node.delete([1, 2]) == 100


def test_a_tenant_goes_with_all_salts_and_pins_and_no_other(disk_node: Node) -> None:
    for lineage in (LINEAGE, SALTED, OTHER):
        disk_node.put([*range(20)], lineage)
    disk_node.write()
    disk_node.admin.pin(PIN, query([*range(20)]), None)
    assert disk_node.admin.delete_tenant(OWNER).num_chunks == 12
    assert [disk_node.found([*range(20)], each) for each in (LINEAGE, SALTED, OTHER)] == [0, 0, 20]
    assert disk_node.cache.stats()["pins"]["keys"] == 0
    assert disk_node.admin.pins(OWNER) == []


ids_of = st.lists(st.integers(0, 1), min_size=1, max_size=20)


@given(st.lists(ids_of, min_size=1, max_size=6), ids_of, st.booleans())
@settings(max_examples=examples(100))
def test_deletion_spares_what_differs(kept: list[list[int]], gone: list[int], spares_longer: bool) -> None:
    node = Node()
    for ids in [*kept, gone]:
        node.put(ids)
    before = {tuple(ids): node.found(ids) for ids in kept}
    deleted = node.admin.delete(query(gone), spares_longer=spares_longer)
    for ids in kept:
        differs = gone[: len(ids)] != ids and ids[: len(gone)] != gone
        is_longer = ids[: len(gone)] == gone != ids
        if differs or (spares_longer and is_longer):
            assert node.found(ids) == before[tuple(ids)]
    if not spares_longer and all(ids[: len(gone)] == gone for ids in kept):
        assert node.cache.stats()["host"]["chunks"] == 0
        assert deleted.num_chunks > 0
    node.cache.close()
