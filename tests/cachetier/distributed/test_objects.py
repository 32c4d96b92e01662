"""Which objects are asked for at once, and in which order they come from other nodes; without Ray."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from mneme.cachetier.chunk.header import U8Array
from mneme.cachetier.distributed import objects as ray_sources
from mneme.cachetier.distributed.objects import ObjectLayers, PeerReads, Refs
from mneme.cachetier.names import Miss
from tests.cachetier.chunks import CHUNK_TOKENS, chain_of

CHUNKS = chain_of(list(range(1, 4 * CHUNK_TOKENS + 1)))
CHUNK, HEADERS = CHUNKS[0], [chunk.header for chunk in CHUNKS]
NUM_LAYERS = len(CHUNK.layers)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Refs]:
    """A layer is an object, and a reference its number."""
    asked: list[Refs] = []

    def get_runs(refs: Refs, timeout_s: float) -> list[tuple[U8Array, ...]] | Miss:
        asked.append(("get", *refs))
        return [(CHUNK.layers[ref],) for ref in refs]

    def begin_pull(refs: Sequence[int]) -> None:
        asked.append(("pull", *refs))

    monkeypatch.setattr(ray_sources, "get_runs", get_runs)
    monkeypatch.setattr(ray_sources, "begin_pull", begin_pull)
    monkeypatch.setattr(ray_sources, "layers_per_object", lambda layer_bytes: 1)
    return asked


def read_all(layers: ObjectLayers) -> None:
    for number, expected in enumerate(CHUNK.layers):
        found = layers(number)
        assert not isinstance(found, Miss)
        assert (found == expected).all()


def test_what_is_on_the_node_is_had_by_one_call(asked: list[Refs]) -> None:
    layers = ObjectLayers(CHUNK.header, lambda: tuple(range(NUM_LAYERS)))
    read_all(layers)
    assert asked == [("get", *range(NUM_LAYERS))]
    assert layers(NUM_LAYERS) is Miss.SHORT


def test_of_another_node_what_is_read_next_comes_while_one_object_is_used(asked: list[Refs]) -> None:
    read_all(
        ObjectLayers(CHUNK.header, lambda: tuple(range(NUM_LAYERS)), lambda number: asked.append(("next", number)))
    )
    assert asked == [call for number in range(NUM_LAYERS) for call in (("next", number), ("get", number))]


class Peer:
    """A node that has all it is asked for; answers are keys, and references say which object of which chunk."""

    def __init__(self) -> None:
        self.asked: list[list[bytes]] = []
        self.read = SimpleNamespace(remote=self._read)

    def _read(self, keys: list[bytes]) -> list[bytes]:
        self.asked.append(keys)
        return keys


def index_of(key: bytes) -> int:
    return [header.key for header in HEADERS].index(key)


class FakeRay:
    """Answers come at once, but for those that are `late`."""

    def __init__(self, late: set[int]) -> None:
        self.late = late

    def get(self, keys: list[bytes], timeout: float) -> list[Refs | None]:
        return [tuple((index_of(key), number) for number in range(NUM_LAYERS)) for key in keys]

    def wait(self, answers: list[list[bytes]], timeout: float) -> tuple[list[Any], list[Any]]:
        return [keys for keys in answers if index_of(keys[0]) not in self.late], []


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Chunks for which a node takes its time."""
    late: set[int] = set()
    monkeypatch.setattr(ray_sources, "ray", FakeRay(late))
    return late


def read_by_layer(reads: PeerReads, before: Callable[[int, int], None] = lambda number, index: None) -> None:
    for number in range(NUM_LAYERS):
        for index in range(len(HEADERS)):
            before(number, index)
            assert reads.fetch(index) == tuple((index, each) for each in range(NUM_LAYERS))
            reads.pull(index, number)


def test_neighbours_in_memory_are_asked_for_together_and_those_on_a_disk_one_by_one(
    asked: list[Refs], late: set[int]
) -> None:
    reads, peers = PeerReads(), (Peer(), Peer())
    keys = [header.key for header in HEADERS]
    assert reads.add(peers[0], HEADERS[:2], lambda: None, is_ready=True) == 0
    assert reads.add(peers[1], HEADERS[2:], lambda: None, is_ready=False) == 2
    assert (peers[0].asked, peers[1].asked) == ([], [])
    reads.fetch(0)
    assert peers[0].asked == [keys[:2]]
    assert peers[1].asked == [[key] for key in keys[2:]]
    read_by_layer(reads)
    assert len(peers[0].asked) + len(peers[1].asked) == 3


@pytest.mark.parametrize("num_ahead", [0, 1, 2, 100])
def test_first_layers_of_all_chunks_come_first_and_few_objects_at_a_time(
    asked: list[Refs], late: set[int], monkeypatch: pytest.MonkeyPatch, num_ahead: int
) -> None:
    monkeypatch.setattr(ray_sources, "_PULLED_AHEAD_BYTES", num_ahead * HEADERS[0].layer_bytes)
    reads, in_order = PeerReads(), [(index, number) for number in range(NUM_LAYERS) for index in range(len(HEADERS))]
    for header in HEADERS:
        reads.add(Peer(), [header], lambda: None, is_ready=True)

    def check(number: int, index: int) -> None:
        at = in_order.index((index, number))
        assert [ref for _, ref in asked] == in_order[: at + num_ahead if at else 0]

    read_by_layer(reads, check)
    assert [ref for _, ref in asked] == in_order


def test_what_nobody_reads_any_more_is_neither_asked_for_nor_pulled(asked: list[Refs], late: set[int]) -> None:
    reads, peer = PeerReads(), Peer()
    reads.add(peer, HEADERS, lambda: None, is_ready=False)
    for index in range(1, len(HEADERS) - 1):
        reads.drop(index)
    for number in range(NUM_LAYERS):
        for index in (0, len(HEADERS) - 1):
            assert reads.fetch(index)
            reads.pull(index, number)
    assert peer.asked == [[HEADERS[0].key], [HEADERS[-1].key]]
    assert [ref for _, ref in asked] == [(index, n) for n in range(NUM_LAYERS) for index in (0, len(HEADERS) - 1)]


def test_what_waits_for_a_late_answer_comes_when_it_is_read(asked: list[Refs], late: set[int]) -> None:
    reads = PeerReads()
    reads.add(Peer(), HEADERS, lambda: None, is_ready=False)
    late.add(2)
    assert reads.fetch(0)
    reads.pull(0, 0)
    assert asked == [("pull", (0, 0)), ("pull", (1, 0))]
    late.clear()
    reads.pull(1, 0)
    assert len(asked) == len(HEADERS) * NUM_LAYERS
