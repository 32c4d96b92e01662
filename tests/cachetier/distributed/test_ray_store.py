"""What an engine's process believes of its node, and how it learns better; without Ray."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from ray.exceptions import ActorDiedError, GetTimeoutError

from mneme.cachetier.chunk.file import write_chunk
from mneme.cachetier.chunk.header import Chunk, ChunkHeader
from mneme.cachetier.chunk.keys import Lineage
from mneme.cachetier.chunk.syscalls import FileOperations
from mneme.cachetier.distributed import nodes as ray_nodes
from mneme.cachetier.distributed import ray_store
from mneme.cachetier.distributed.actor import ChainAnswer, PutAnswer
from mneme.cachetier.distributed.directory import Span
from mneme.cachetier.distributed.nodes import Nodes
from mneme.cachetier.distributed.objects import LoadNotices
from mneme.cachetier.distributed.ray_store import KnownKeys, PutsUnderWay, RayChunkStore
from mneme.cachetier.names import HostPut, Miss
from mneme.cachetier.node.prefetch import LOADS_AGAIN_S
from mneme.cachetier.node.search import Located
from mneme.cachetier.store import ChainQuery
from tests.cachetier.chunks import CHUNK_TOKENS, FINGERPRINT, LINEAGE, chain_of, chunk_of
from tests.cachetier.nodes import Clock

IDS = list(range(1, 4 * CHUNK_TOKENS + 1))
CHAIN = chain_of(IDS)
KEYS = [chunk.header.key for chunk in CHAIN]

Done = Callable[[ChunkHeader, PutAnswer | None], None]


class FakeNode:
    """A node's actor: it refuses what follows a chunk that is not here, as one does that has evicted it."""

    def __init__(self, epoch: int = 1) -> None:
        self.keys: set[bytes] = set()
        self.epoch = epoch
        self.is_full = self.is_lost = False
        self.forgotten: list[str] = []
        self.num_loads = 0
        self.loads = SimpleNamespace(remote=self.note_load)
        self.forget = SimpleNamespace(remote=self.forgotten.extend)
        self.locate = SimpleNamespace(remote=lambda query, timeout_s: ChainAnswer([], (), {}, self.epoch))

    def note_load(self) -> None:
        self.num_loads += 1

    def put(self, header: ChunkHeader) -> PutAnswer | None:
        has_parent = header.parent in self.keys or header.parent == LINEAGE.root
        if self.is_lost:
            return None
        if self.is_full or not has_parent:
            return PutAnswer(HostPut.REFUSED, has_parent, self.epoch)
        outcome = HostPut.KEPT if header.key in self.keys else HostPut.TAKEN
        self.keys.add(header.key)
        return PutAnswer(outcome, has_parent, self.epoch)


class PromptPuts:
    """`PutsUnderWay` of which each put is answered before `put` returns."""

    def __init__(self, max_bytes: int, wait_s: float, done: Done) -> None:
        self._done = done

    def put(self, node: FakeNode, chunk: Chunk, lineage: Lineage) -> bool:
        self._done(chunk.header, node.put(chunk.header))
        return True

    def stats(self) -> dict[str, int]:
        return {}


class BusyPuts(PromptPuts):
    def put(self, node: FakeNode, chunk: Chunk, lineage: Lineage) -> bool:
        return False


@pytest.fixture
def node() -> FakeNode:
    return FakeNode()


@pytest.fixture
def store(node: FakeNode, monkeypatch: pytest.MonkeyPatch) -> RayChunkStore:
    monkeypatch.setattr(ray_nodes, "ray", SimpleNamespace(get=lambda answer, timeout: answer))
    return make_store(node, monkeypatch, PromptPuts)


def make_store(node: FakeNode, monkeypatch: pytest.MonkeyPatch, puts: type) -> RayChunkStore:
    monkeypatch.setattr(ray_store, "PutsUnderWay", puts)
    return RayChunkStore(Nodes("n", "test", lambda: node), put_bytes=1)


def save_turn(store: RayChunkStore, num_chunks: int) -> int:
    """As an engine does it that has all of the chain; how many were put."""
    known = store.known(KEYS[:num_chunks])
    unknown = [chunk for chunk in CHAIN[:num_chunks] if chunk.header.key not in known]
    for chunk in unknown:
        store.put(chunk, LINEAGE)
    return len(unknown)


def test_a_chain_whose_beginning_was_evicted_is_there_again_after_the_next_turn(
    store: RayChunkStore, node: FakeNode
) -> None:
    assert save_turn(store, 3) == 3
    node.keys.clear()
    assert save_turn(store, 4) == 1  # refused: what it follows is not there
    assert not store.known(KEYS)
    assert save_turn(store, 4) == 4
    assert node.keys == set(KEYS) == store.known(KEYS)
    assert save_turn(store, 4) == 0


def test_a_chunk_that_there_is_no_room_for_does_not_have_others_put_again(store: RayChunkStore, node: FakeNode) -> None:
    save_turn(store, 2)
    node.is_full = True
    assert save_turn(store, 3) == 1
    assert save_turn(store, 4) == 2  # nor does one behind it
    assert store.known(KEYS) == set(KEYS[:2])


def test_what_is_refused_or_not_answered_at_once_is_not_known(store: RayChunkStore, node: FakeNode) -> None:
    node.is_full = True
    assert store.put(CHAIN[0], LINEAGE)
    assert not store.known(KEYS)
    node.is_lost = True
    assert store.put(CHAIN[0], LINEAGE)
    assert not store.known(KEYS)


def test_what_is_not_put_is_not_known(node: FakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_store(node, monkeypatch, BusyPuts)
    assert not store.put(CHAIN[0], LINEAGE)
    assert not store.known(KEYS)


def test_an_actor_that_was_made_again_is_noticed_by_its_answer_to_a_question(
    store: RayChunkStore, node: FakeNode
) -> None:
    locate(store, KEYS[3:])
    save_turn(store, 3)
    locate(store, KEYS[3:])
    assert store.known(KEYS) == set(KEYS[:3])
    node.epoch += 1
    locate(store, KEYS[3:])
    assert not store.known(KEYS)
    assert store.stats()["node_restarted"] == 1


def test_an_actor_that_was_made_again_is_noticed_by_its_answer_to_a_put(store: RayChunkStore, node: FakeNode) -> None:
    save_turn(store, 3)
    node.epoch += 1
    save_turn(store, 4)
    assert not store.known(KEYS[:3])


def test_a_node_that_answers_too_late_is_told_that_the_request_waits_no_longer(
    store: RayChunkStore, node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(answer: object, timeout: float) -> object:
        raise GetTimeoutError

    monkeypatch.setattr(ray_nodes, "ray", SimpleNamespace(get=late))
    monkeypatch.setattr(node, "locate", SimpleNamespace(remote=lambda *_: SimpleNamespace(future=Future)))
    query = ChainQuery.of(LINEAGE, FINGERPRINT.digest, IDS, CHUNK_TOKENS, request_id="r")
    assert store.locate(query, 1.0) == []
    store.forget(["r", "another"])
    assert node.forgotten == ["r"]


def test_what_lies_behind_a_chunk_that_is_usable_in_part_is_not_used(
    store: RayChunkStore, node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peer of the first span lost its second chunk, and has another that begins alike."""
    start = CHUNK_TOKENS
    sibling = chunk_of([*IDS[start : start + 3], 99], KEYS[0])
    gone: list[bytes] = []
    peers = {name: SimpleNamespace(not_here=SimpleNamespace(remote=gone.extend)) for name in ("a", "b")}
    has = {"a": [CHAIN[0], sibling], "b": CHAIN[2:]}
    for name, peer in peers.items():
        located = [Located(chunk.header, CHUNK_TOKENS, "host", None, None) for chunk in has[name]]
        peer.locate_here = SimpleNamespace(remote=lambda query, timeout_s, located=located: located)
    found = ChainAnswer([], (Span("a", 0, 2), Span("b", 2, 2)), peers, node.epoch)
    monkeypatch.setattr(node, "locate", SimpleNamespace(remote=lambda query, timeout_s: found))
    sources = store.locate(ChainQuery.of(LINEAGE, FINGERPRINT.digest, IDS, CHUNK_TOKENS), 1.0)
    assert [source.num_usable for source in sources] == [CHUNK_TOKENS, 3]
    assert gone == [KEYS[1]]
    assert store.stats()["directory_ghosts"] == 1


def test_a_peer_is_not_asked_when_no_time_is_left(
    store: RayChunkStore, node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it could not look for would be taken for a fault of the directory."""
    asked: list[ChainQuery] = []
    peer = SimpleNamespace(locate_here=SimpleNamespace(remote=lambda query, timeout_s: asked.append(query)))
    found = ChainAnswer([], (Span("a", 0, 2),), {"a": peer}, node.epoch)
    monkeypatch.setattr(node, "locate", SimpleNamespace(remote=lambda query, timeout_s: found))
    query = ChainQuery.of(LINEAGE, FINGERPRINT.digest, IDS, CHUNK_TOKENS)
    assert store.locate(query, 0.0) == []
    assert (asked, store.stats()["peer_locate_too_late"]) == ([], 1)
    store.locate(query, 10.0)
    assert len(asked) == 1


def test_a_node_hears_that_its_files_are_read(
    store: RayChunkStore, node: FakeNode, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "chunk.kv"
    write_chunk(FileOperations(), str(tmp_path / "temporary"), str(path), CHAIN[0])
    here = [Located(CHAIN[0].header, CHUNK_TOKENS, "disk", None, str(path))]
    found = ChainAnswer(here, (), {}, node.epoch)
    monkeypatch.setattr(node, "locate", SimpleNamespace(remote=lambda query, timeout_s: found))
    (source,) = store.locate(ChainQuery.of(LINEAGE, FINGERPRINT.digest, IDS, CHUNK_TOKENS), 10.0)
    assert node.num_loads == 0
    assert not isinstance(source.read(0), Miss)
    assert node.num_loads == 1
    source.close()


def test_loads_are_told_again_while_they_last_and_no_more_often() -> None:
    clock, told = Clock(), list[float]()
    notices = LoadNotices(lambda: told.append(clock.now_s), clock)
    for _ in range(100):
        with notices():
            clock.now_s += 0.01
    assert 10 <= len(told) <= 20
    assert max(after - before for before, after in pairwise(told)) < LOADS_AGAIN_S


def locate(store: RayChunkStore, keys: list[bytes]) -> None:
    """Its last chunks, none of which the fake finds."""
    query = ChainQuery.of(LINEAGE, FINGERPRINT.digest, IDS, CHUNK_TOKENS, first=len(KEYS) - len(keys))
    assert store.locate(query, 1.0) == []


def test_what_was_seen_long_ago_is_put_again() -> None:
    """Who has a chunk on its device does not ask for it: to put it is what keeps it from expiring."""
    clock = Clock()
    known = KnownKeys(max_age_s=10, clock=clock)
    known.add({b"1": b"0", b"2": b"1"})
    clock.now_s += 9
    assert known.among([b"1", b"2"]) == {b"1", b"2"}
    known.add({b"1": b"0"})
    clock.now_s += 9
    assert known.among([b"1", b"2"]) == {b"1"}


def test_what_is_gone_is_not_known() -> None:
    known = KnownKeys()
    known.add({b"1": b"0", b"2": b"1"})
    known.drop([b"1", b"never seen"])
    assert known.among([b"1", b"2"]) == {b"2"}
    known.clear()
    assert not known.among([b"2"])


def test_a_chain_is_dropped_up_to_what_is_not_known_anyway() -> None:
    known = KnownKeys()
    known.add({b"1": b"0", b"3": b"2", b"4": b"3", b"5": b"4", b"x": b"3"})
    known.drop_chain(b"4")
    assert known.among([b"1", b"3", b"4", b"5", b"x"]) == {b"1", b"5", b"x"}


CHUNK = chunk_of(list(range(8)))
ANSWER = PutAnswer(HostPut.TAKEN, True, 1)


class Node:
    """Puts are answered by who sets the futures in `answers`; `error` is raised instead of a put."""

    def __init__(self) -> None:
        self.answers: list[Future[PutAnswer]] = []
        self.error: Exception | None = None
        self.put = SimpleNamespace(remote=self._put)

    def _put(self, *args: object) -> object:
        if self.error is not None:
            raise self.error
        self.answers.append(Future())
        return SimpleNamespace(future=lambda: self.answers[-1])


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> list[tuple[ChunkHeader, PutAnswer | None]]:
    monkeypatch.setattr(ray_store, "put_runs", lambda runs: ())
    return []


@pytest.fixture
def puts(heard: list[tuple[ChunkHeader, PutAnswer | None]]) -> PutsUnderWay:
    return PutsUnderWay(1, 0.0, lambda header, answer: heard.append((header, answer)))


def test_a_put_is_under_way_until_it_is_answered_or_lost(
    puts: PutsUnderWay, heard: list[tuple[ChunkHeader, PutAnswer | None]]
) -> None:
    node = Node()
    assert puts.put(node, CHUNK, LINEAGE)
    assert not puts.put(node, CHUNK, LINEAGE)  # no room
    assert not puts.flush(0.0)
    node.answers[0].set_result(ANSWER)
    assert puts.flush(0.0)
    assert puts.put(node, CHUNK, LINEAGE)
    node.answers[1].set_exception(ActorDiedError())
    assert puts.flush(0.0)
    assert heard == [(CHUNK.header, ANSWER), (CHUNK.header, None)]
    assert puts.stats() == {"put_bytes_under_way": 0, "put_dropped": 1, "put_taken": 1, "put_lost": 1}


def test_a_put_that_raises_is_not_under_way(puts: PutsUnderWay) -> None:
    node = Node()
    node.error = TypeError("a bug")
    with pytest.raises(TypeError):
        puts.put(node, CHUNK, LINEAGE)
    assert puts.stats() == {"put_bytes_under_way": 0, "put_failed": 1}
    node.error = None
    assert puts.put(node, CHUNK, LINEAGE)  # there is room
