"""Chunks that are deleted while they are on their way into a node's memory: they do not come back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from mneme.cachetier.names import Miss
from mneme.cachetier.node.cache import NodeCache
from mneme.cachetier.node.disk import DiskTier
from mneme.cachetier.node.memory import ProcessMemory
from tests.cachetier.chunks import LINEAGE, FailingFiles, chain_of, chunk_files
from tests.cachetier.nodes import found, is_right, make_node, prefetch, put, write_due

pytestmark = pytest.mark.usefixtures("few_folders")

IDS = list(range(8))
(CHUNK,) = chain_of(IDS)


class Interruption:
    """What happens in the midst of something else, once."""

    def __init__(self) -> None:
        self.call: Callable[[], object] = lambda: None

    def __call__(self) -> None:
        call, self.call = self.call, lambda: None
        call()


class InterruptedMemory(ProcessMemory):
    def __init__(self, interruption: Interruption) -> None:
        self._interruption = interruption

    def accept(self, payload: object) -> object:
        self._interruption()
        return super().accept(payload)


@pytest.fixture
def interruption() -> Interruption:
    return Interruption()


@pytest.fixture
def node(tmp_path: Path, interruption: Interruption) -> Iterator[NodeCache]:
    """The interruption comes at the next read of a file, or when memory takes what is put."""

    def interrupts(operation: str, _number: int) -> None:
        if operation == "read":
            interruption()

    node = make_node(tmp_path, memory=InterruptedMemory(interruption), files=FailingFiles(interrupts))
    yield node
    node.close(flush=False)


def check_gone(node: NodeCache, folder: Path) -> None:
    write_due(node)
    assert CHUNK.header.key not in node
    assert found(node, IDS) == []
    assert chunk_files(folder) == []
    assert node.stats()["host"]["bytes"] == 0
    assert put(node, CHUNK) == "taken"
    assert found(node, IDS) == [("host", 8)]


@pytest.mark.parametrize("num_reads", [0, 1])  # of its header before there is room for it, of its bytes after that
@pytest.mark.parametrize("is_prefetch", [False, True])
def test_what_is_deleted_while_it_is_brought_up(
    node: NodeCache, interruption: Interruption, tmp_path: Path, num_reads: int, is_prefetch: bool
) -> None:
    put(node, CHUNK)
    write_due(node)
    node.missed(CHUNK.header.key, "host", Miss.ABSENT)
    found(node, IDS, request_id="r" if is_prefetch else "")

    def delete() -> None:
        assert node.delete([CHUNK.header.key]) == 1

    def delete_at_next() -> None:
        interruption.call = delete

    interruption.call = (delete, delete_at_next)[num_reads]
    if is_prefetch:
        prefetch(node)
    else:
        (located,) = node.read([CHUNK.header.key])
        assert located is not None
        assert is_right(located, CHUNK)  # who reads it reads on
    check_gone(node, tmp_path)


def test_what_is_brought_up_in_the_midst_of_its_deletion(
    node: NodeCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def delete(disk: DiskTier, keys: Iterable[bytes]) -> int:
        node.read([CHUNK.header.key])
        return deletes(disk, keys)

    put(node, CHUNK)
    write_due(node)
    deletes = DiskTier.delete
    with monkeypatch.context() as patched:
        patched.setattr(DiskTier, "delete", delete)
        assert node.delete([CHUNK.header.key]) == 1
    check_gone(node, tmp_path)


def test_what_is_deleted_while_it_is_put(node: NodeCache, interruption: Interruption, tmp_path: Path) -> None:
    interruption.call = lambda: node.delete(node.keys_of(LINEAGE.tenant))
    put(node, CHUNK)
    check_gone(node, tmp_path)
