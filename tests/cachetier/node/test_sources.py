"""The cache tier in one process, with its threads, and its faults: no wrong byte, counters, bytes back to nothing."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mneme.cachetier.chunk.header import Chunk, U8Array, checksum
from mneme.cachetier.chunk.syscalls import Buffer, FileOperations
from mneme.cachetier.config import CacheConfig, DiskTierConfig
from mneme.cachetier.names import Miss
from mneme.cachetier.node.sources import ProcessChunkStore
from mneme.cachetier.store import ChunkSource
from tests.cachetier.chunks import (
    FINGERPRINT,
    LINEAGE,
    FailingFiles,
    chain_of,
    chunk_files,
    chunk_of,
    folder_bytes,
    layers_of,
)
from tests.cachetier.nodes import BLOCK, query

pytestmark = pytest.mark.usefixtures("few_folders")

IDS = list(range(20))
CHUNKS = chain_of(IDS)
NUM_LAYERS = FINGERPRINT.layout.num_layers
TIMEOUT_S = 20.0


@contextmanager
def open_store(folder: Path | None, num_blocks: int = 100, **arguments: Any) -> Iterator[ProcessChunkStore]:
    disk = None if folder is None else DiskTierConfig(folder=str(folder), capacity_bytes=num_blocks * BLOCK)
    config = {key: arguments.pop(key) for key in ("ttl_s", "tenant_bytes") if key in arguments}
    cache = CacheConfig(host_bytes=num_blocks * BLOCK, disk=disk, **config)
    store = ProcessChunkStore(cache, **arguments)
    try:
        yield store
    finally:
        store.close()


def save(folder: Path, chunks: Sequence[Chunk] = CHUNKS) -> None:
    """Chunks that only the disk has afterwards."""
    with open_store(folder) as store:
        assert all(store.put(chunk, LINEAGE) for chunk in chunks)


def sources_of(store: ProcessChunkStore, token_ids: list[int] = IDS, **fields: Any) -> list[ChunkSource]:
    return store.locate(query(token_ids, **fields), TIMEOUT_S)


def read(source: ChunkSource) -> list[U8Array] | Miss:
    """All layers; closes the source."""
    layers: list[U8Array] = []
    try:
        for layer in range(NUM_LAYERS):
            found = source.read(layer)
            if isinstance(found, Miss):
                return found
            layers.append(found)
    finally:
        source.close()
    return layers


def is_right(read_layers: list[U8Array] | Miss, chunk: Chunk) -> bool:
    return not isinstance(read_layers, Miss) and all(map(np.array_equal, read_layers, chunk.layers))


def check_empty(store: ProcessChunkStore, folder: Path | None) -> None:
    """Bytes are back to nothing once all is deleted."""
    store.node.delete(store.node.keys_of(LINEAGE.tenant))
    assert store.node.flush(TIMEOUT_S)
    stats = store.node.stats()
    assert stats["host"]["bytes"] == 0
    assert stats["owners"] == {}
    if folder is not None:
        assert (stats["disk"]["bytes"], stats["writer"]["bytes"], folder_bytes(folder)) == (0, 0, 0)


def test_conversations_that_are_many_times_what_memory_holds_are_all_on_the_disk(tmp_path: Path) -> None:
    """Each chain to its tail, which waits: until it is written, nothing of the chain can go from memory."""
    disk = DiskTierConfig(folder=str(tmp_path), capacity_bytes=1000 * BLOCK)
    store = ProcessChunkStore(CacheConfig(host_bytes=24 * BLOCK, disk=disk))
    try:
        chunks = [chunk for number in range(10) for chunk in chain_of([number, *range(40)])]
        assert all(store.put(chunk, LINEAGE) for chunk in chunks)
        assert store.node.flush(TIMEOUT_S)
        assert store.node.stats()["disk"]["chunks"] == len(chunks)
    finally:
        store.close()


def test_chunks_are_found_from_memory_then_from_disk(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        assert all(store.put(chunk, LINEAGE) for chunk in CHUNKS)
        sources = sources_of(store)
        assert [(each.edge, each.num_usable) for each in sources] == [("host", 8), ("host", 8), ("host", 4)]
        assert all(is_right(read(each), chunk) for each, chunk in zip(sources, CHUNKS, strict=True))
        keys = [chunk.header.key for chunk in CHUNKS]
        assert store.known([*keys, bytes(16)]) == frozenset(keys)
    assert len(chunk_files(tmp_path)) == 3  # the tail too: what waits is written at the end
    with open_store(tmp_path) as store:
        sources = sources_of(store)
        assert [(each.edge, each.num_usable) for each in sources] == [("disk", 8), ("disk", 8), ("disk", 4)]
        assert all(is_right(read(each), chunk) for each, chunk in zip(sources, CHUNKS, strict=True))
        check_empty(store, tmp_path)


def test_what_is_given_is_read_only() -> None:
    with open_store(None) as store:
        store.put(CHUNKS[0], LINEAGE)
        (source,) = sources_of(store, IDS[:8])
        layer = source.read(0)
        assert not isinstance(layer, Miss)
        with pytest.raises(ValueError, match="read-only"):
            layer[0] = 1
        source.close()
        source.close()
        assert source.read(0) is Miss.ABSENT
        assert store.node.stats()["host"]["chunks"] == 1
        check_empty(store, None)


def test_a_flipped_bit_in_memory_is_a_miss_and_the_chunk_goes() -> None:
    broken = chunk_of([1, 2, 3])
    with open_store(None) as store:
        store.put(broken, LINEAGE)
        broken.layers[1][5] ^= 1
        (source,) = sources_of(store, [1, 2, 3])
        assert not isinstance(source.read(0), Miss)
        assert source.read(1) is Miss.BAD_CHECKSUM
        assert sources_of(store, [1, 2, 3]) == []
        assert store.node.stats()["host"]["miss_bad_checksum"] == 1
        assert store.node.stats()["host"]["bytes"] == 0


def flip_last_layer(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[content.index(CHUNKS[0].layers[-1].tobytes()) + 3] ^= 16
    with path.open("r+b") as file:  # in place: who has it open sees it
        file.write(content)


def move_behind_a_link(path: Path) -> None:
    path.symlink_to(path.rename(path.with_suffix(".other")))


DAMAGES: dict[Miss, Callable[[Path], None]] = {
    Miss.BAD_CHECKSUM: flip_last_layer,
    Miss.NOT_OURS: move_behind_a_link,
    Miss.SHORT: lambda path: os.truncate(path, path.stat().st_size // 2),
    Miss.ABSENT: Path.unlink,
    Miss.NO_HEADER: lambda path: path.write_bytes(bytes(path.stat().st_size)) and None,
}


@pytest.mark.parametrize("moment", ["before it is opened", "while it is read"])
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda miss: miss.value)
def test_a_file_that_is_damaged_after_it_was_located_is_a_miss(tmp_path: Path, damage: Miss, moment: str) -> None:
    save(tmp_path)
    with open_store(tmp_path) as store:
        source = sources_of(store)[0]
        if moment == "while it is read":
            assert np.array_equal(source.read(0), CHUNKS[0].layers[0])  # type: ignore[arg-type]
        (path,) = [path for path in chunk_files(tmp_path) if path.name.startswith(CHUNKS[0].header.key.hex())]
        DAMAGES[damage](path)
        outcome = read(source)
        is_open = moment == "while it is read"
        if damage in (Miss.ABSENT, Miss.NOT_OURS) and is_open:
            assert is_right(outcome, CHUNKS[0])  # a file that is unlinked while it is open is read to its end
        else:
            assert outcome is (Miss.BAD_CHECKSUM if damage is Miss.NO_HEADER and is_open else damage)
            assert store.node.stats()["disk"][f"miss_{outcome.value}"] == 1
            assert sources_of(store) == []
            assert path.is_symlink() == (damage is Miss.NOT_OURS)
            assert store.put(CHUNKS[0], LINEAGE)
            assert is_right(read(sources_of(store)[0]), CHUNKS[0])
        if damage is not Miss.NOT_OURS:  # that is left where it is
            check_empty(store, tmp_path)


def test_a_chunk_that_is_saved_anew_meanwhile_is_read_as_it_is_now(tmp_path: Path) -> None:
    """In bfloat16 two engines compute one chunk with different bytes; both are right."""
    save(tmp_path)
    header = CHUNKS[0].header
    layers = layers_of(FINGERPRINT, 8, 12345)
    anew = Chunk(replace(header, checksums=tuple(checksum(layer.data) for layer in layers)), tuple(layers))
    with open_store(tmp_path) as store:
        source = sources_of(store)[0]
        store.node.delete([header.key])
        store.put(anew, LINEAGE)
        assert store.node.flush(TIMEOUT_S)
        assert is_right(read(source), anew)


def test_a_disk_that_cannot_be_written_costs_only_its_chunks(tmp_path: Path) -> None:
    files = FailingFiles(lambda _operation, _number: None)
    with open_store(tmp_path, files=files) as store:
        files.fails = lambda operation, _number: errno.EROFS if operation in ("create", "write", "rename") else None
        assert all(store.put(chunk, LINEAGE) for chunk in CHUNKS)
        assert store.node.flush(TIMEOUT_S)
        assert all(is_right(read(each), chunk) for each, chunk in zip(sources_of(store), CHUNKS, strict=True))
        stats = store.node.stats()
        assert stats["disk"]["write_failed"] == 1  # what follows it is not tried: nobody would find it
        assert stats["host"]["not_written_orphan"] == 2
        assert stats["writer"]["bytes"] == 0
        assert chunk_files(tmp_path) == []
        files.fails = lambda _operation, _number: None
        check_empty(store, tmp_path)


class GatedFiles(FileOperations):
    """Reads wait at a gate."""

    def __init__(self) -> None:
        self.gate, self.reading = threading.Event(), threading.Event()
        self.gate.set()
        self.closed: list[int] = []

    def read(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        self.reading.set()
        assert self.gate.wait(TIMEOUT_S)
        return super().read(fd, buffers, offset)

    def close(self, fd: int) -> None:
        self.closed.append(fd)
        super().close(fd)


def test_locate_does_not_wait_for_a_slow_prefetch(tmp_path: Path) -> None:
    save(tmp_path)
    files = GatedFiles()
    with open_store(tmp_path, files=files) as store:
        assert [each.edge for each in sources_of(store)] == ["disk"] * 3  # headers are known from here on
        files.gate.clear()
        files.reading.clear()
        sources_of(store, request_id="r")
        assert files.reading.wait(TIMEOUT_S)
        assert [each.edge for each in sources_of(store)] == ["disk"] * 3
        assert store.put(chunk_of([500]), LINEAGE)
        assert [each.edge for each in sources_of(store, [500])] == ["host"]
        store.node.forget(["r"])
        files.gate.set()


def test_a_source_that_is_closed_while_it_is_read_lets_the_read_end(tmp_path: Path) -> None:
    """Its descriptor might be another file's otherwise."""
    save(tmp_path)
    files = GatedFiles()
    with open_store(tmp_path, files=files) as store:
        source = sources_of(store)[0]
        source.read(0)
        files.gate.clear()
        files.reading.clear()
        files.closed.clear()
        outcomes: list[U8Array | Miss] = []
        reader = threading.Thread(target=lambda: outcomes.append(source.read(1)))
        reader.start()
        assert files.reading.wait(TIMEOUT_S)
        source.close()
        assert files.closed == []
        files.gate.set()
        reader.join(TIMEOUT_S)
        assert np.array_equal(outcomes[0], CHUNKS[0].layers[1])  # type: ignore[arg-type]
        assert len(files.closed) == 1
        assert source.read(2) is Miss.ABSENT
        assert len(sources_of(store)) == 3


def test_a_folder_that_is_not_there_is_made(tmp_path: Path) -> None:
    with open_store(tmp_path / "not" / "there"):
        assert (tmp_path / "not" / "there").stat().st_mode & 0o777 == 0o700


def test_threads_that_put_find_read_and_delete_at_once_see_sound_chunks(tmp_path: Path) -> None:
    chains = [chain_of([root, *range(19)]) for root in range(6)]
    faults: list[str] = []
    with open_store(tmp_path, 12) as store:

        def work(seed: int) -> None:
            chance = random.Random(seed)
            for number in range(150):
                root = chance.randrange(6)
                choice = chance.random()
                if choice < 0.4:
                    for chunk in chains[root][: chance.randint(1, 3)]:
                        store.put(chunk, LINEAGE)
                elif choice < 0.9:
                    sources = sources_of(store, [root, *range(19)], request_id=f"{seed}-{number}")
                    for source, chunk in zip(sources, chains[root], strict=False):
                        outcome = read(source)
                        if source.header.key != chunk.header.key and source.num_usable == 8:
                            faults.append("another chunk")
                        if isinstance(outcome, Miss):
                            faults.extend([outcome.value] if outcome is not Miss.ABSENT else [])
                        elif not is_right(outcome, chunk):
                            faults.append("wrong bytes")
                    store.forget([f"{seed}-{number}"])
                else:
                    store.node.delete([chance.choice(chains[root]).header.key])

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not faults
        stats = store.node.stats()
        assert stats["host"]["bytes"] <= 12 * BLOCK
        assert stats["waiting"] == 0
        assert stats["host"].get("thread_error", 0) == stats["writer"].get("error", 0) == 0
        check_empty(store, tmp_path)
