"""A disk that works again after a while: what could not be removed goes, what could not be written is."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from mneme.cachetier.chunk.header import Chunk
from mneme.cachetier.node.cache import NodeCache
from mneme.cachetier.node.node_admin import NodeAdmin
from mneme.errors import ReplicaUnavailable
from tests.cachetier.chunks import LINEAGE, FailingFiles, chain_of, chunk_files, chunk_of
from tests.cachetier.nodes import BLOCK, Clock, make_node, prefetch, put, query, write_due

pytestmark = pytest.mark.usefixtures("few_folders")

CHANGES = ("create", "write", "rename", "unlink")
CHUNKS = [chunk_of([number] * 8) for number in range(30)]


@pytest.fixture
def files() -> FailingFiles:
    return FailingFiles(lambda _name, _number: None)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def set_read_only(files: FailingFiles, is_read_only: bool) -> None:
    files.fails = lambda name, _number: errno.EROFS if is_read_only and name in CHANGES else None


def save(node: NodeCache, chunks: list[Chunk]) -> None:
    for chunk in chunks:
        put(node, chunk)
    write_due(node)


def wait(node: NodeCache, clock: Clock) -> None:
    """As long as a pause of writes, and more."""
    for _ in range(4):
        clock.now_s += 10
        prefetch(node)
        write_due(node)


def num_on_disk(node: NodeCache, chunks: list[Chunk]) -> int:
    return sum("disk" in node.places(chunk.header.key) for chunk in chunks)


def test_what_could_not_be_removed_goes_and_then_there_is_room(
    tmp_path: Path, files: FailingFiles, clock: Clock
) -> None:
    """More files than make the tier give up evicting for others."""
    node = make_node(tmp_path, files=files, clock=clock)
    save(node, CHUNKS[:20])
    set_read_only(files, True)
    assert node.delete([chunk.header.key for chunk in CHUNKS[:12]]) == 12
    save(node, CHUNKS[20:])
    assert num_on_disk(node, CHUNKS) == 8
    set_read_only(files, False)
    wait(node, clock)
    assert num_on_disk(node, CHUNKS) == len(chunk_files(tmp_path)) == 18
    assert node.stats()["disk"]["bytes"] == 18 * BLOCK


@pytest.mark.parametrize("is_tenant", [True, False])
def test_a_deletion_is_sure_once_the_files_are_gone(
    tmp_path: Path, files: FailingFiles, clock: Clock, is_tenant: bool
) -> None:
    """Whoever asks again is told again, though nothing is found any more."""
    node = make_node(tmp_path, files=files, clock=clock)
    admin = NodeAdmin(node, "here", clock)

    def delete() -> None:
        if is_tenant:
            admin.delete_tenant(LINEAGE.tenant)
        else:
            admin.delete(query([1] * 8), spares_longer=False)

    save(node, CHUNKS[:12])
    set_read_only(files, True)
    for _ in range(2):
        with pytest.raises(ReplicaUnavailable, match="could not be removed yet"):
            delete()
    assert admin.delete_tenant(bytes(8)).num_chunks == 0  # another tenant's deletion is sure
    set_read_only(files, False)
    wait(node, clock)
    delete()
    node.close()
    again = make_node(tmp_path, clock=clock)
    assert not again.locate(query([1] * 8))


def test_what_comes_while_somebody_removes_files_is_written_later(tmp_path: Path, clock: Clock) -> None:
    """A writer's turn between a deletion and the end of its files, on a full tier."""
    meanwhile: list[Callable[[], None]] = []

    def interrupted(name: str, _number: int) -> None:
        if name == "unlink" and meanwhile:
            meanwhile.pop()()

    node = make_node(tmp_path, disk_blocks=20, files=FailingFiles(interrupted), clock=clock)
    save(node, CHUNKS[:20])
    chains = [chain_of([*range(100 * root, 100 * root + 16)]) for root in range(1, 4)]
    for chunk in (chunk for chain in chains for chunk in chain):
        put(node, chunk)
    meanwhile.append(lambda: write_due(node))
    node.delete([chunk.header.key for chunk in CHUNKS[:15]])
    wait(node, clock)
    assert [num_on_disk(node, chain) for chain in chains] == [2, 2, 2]
