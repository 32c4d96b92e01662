"""Chunks in files: what was written comes back, and anything else is a miss."""

from __future__ import annotations

import os
import random
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mneme.cachetier.chunk import header as chunk_module
from mneme.cachetier.chunk.file import MAX_HEAD_BYTES, ChunkReader, file_bytes, open_chunk, write_chunk
from mneme.cachetier.chunk.header import (
    MAGIC,
    Chunk,
    ChunkHeader,
    LayerOffsets,
    checksum,
    differs,
    encode_header,
    make_chunk,
)
from mneme.cachetier.chunk.keys import LineageKind
from mneme.cachetier.chunk.syscalls import FileOperations
from mneme.cachetier.names import Miss
from tests.budget import examples
from tests.cachetier.chunks import (
    FINGERPRINT,
    LINEAGE,
    chunk_of,
    is_payload,
    layers_of,
    make_fingerprint,
    read_all,
)

FILES = FileOperations()


def save(folder: Path, chunk: Chunk) -> Path:
    path = folder / "chunk.kv"
    write_chunk(FILES, str(folder / "chunk.part"), str(path), chunk)
    return path


@pytest.fixture
def chunk() -> Chunk:
    return chunk_of([5, 6, 7, 8, 9])


@pytest.fixture
def path(tmp_path: Path, chunk: Chunk) -> Path:
    return save(tmp_path, chunk)


LAYOUTS = st.fixed_dictionaries(
    {
        "num_layers": st.sampled_from([1, 2, 5, 300]),
        "num_kv_heads": st.integers(1, 3),
        "head_dim": st.integers(1, 9),
        "dtype": st.sampled_from(["float32", "bfloat16", "float16", "int8"]),
        "chunk_tokens": st.sampled_from([16, 64, 4096]),
    }
)


@settings(max_examples=examples(60))
@given(LAYOUTS, st.integers(1, 16), st.sampled_from(LineageKind), st.integers(0, 1000), st.data())
def test_what_was_written_comes_back(
    tmp_path_factory: pytest.TempPathFactory,
    layout: dict[str, object],
    num_tokens: int,
    kind: LineageKind,
    seed: int,
    data: st.DataObject,
) -> None:
    fingerprint = make_fingerprint(**layout)
    lineage = replace(LINEAGE, kind=kind)
    token_ids = data.draw(st.lists(st.integers(0, 2**31 - 1), min_size=num_tokens, max_size=num_tokens))
    positions = np.random.default_rng(seed).integers(-(2**31), 2**31, num_tokens).astype(np.int32)
    layers = layers_of(fingerprint, num_tokens, seed)
    chunk = make_chunk(lineage, fingerprint, bytes(range(16)), token_ids, positions, layers)
    folder = tmp_path_factory.mktemp("chunk")
    path = save(folder, chunk)
    assert os.listdir(folder) == ["chunk.kv"]
    assert path.stat().st_size == file_bytes(chunk.header)
    reader = open_chunk(FILES, str(path))
    assert isinstance(reader, ChunkReader)
    for name in ("key", "parent", "tenant", "kind", "fingerprint", "layout", "checksums"):
        assert getattr(reader.header, name) == getattr(chunk.header, name)
    assert reader.header.kind is kind
    assert reader.header.token_ids.tolist() == token_ids
    assert np.array_equal(reader.header.slot_position, positions)
    first = data.draw(st.integers(0, fingerprint.layout.num_layers - 1))
    some = [np.empty(reader.header.layer_bytes, np.uint8) for _ in layers[first:]]
    assert reader.read(first, some) is None
    assert all(map(np.array_equal, some, layers[first:]))
    assert is_payload(read_all(reader), chunk)


def test_arrow_reads_it_as_one_batch_per_layer(path: Path, chunk: Chunk) -> None:
    with pa.OSFile(str(path)) as file:
        reader = pa.ipc.open_file(file)
        assert reader.num_record_batches == 3
        for layer in range(3):
            assert np.array_equal(reader.get_batch(layer)["kv"].to_numpy(), chunk.layers[layer])
        assert reader.schema.metadata[b"mneme.chunk"].startswith(MAGIC)


@pytest.mark.parametrize(
    ("changed", "miss"),
    [
        ({"fingerprint": make_fingerprint("other weights").digest}, Miss.OTHER_MODEL),
        ({"fingerprint": replace(FINGERPRINT, inv_freq=(1.0, 0.3)).digest}, Miss.OTHER_MODEL),
        ({"layout": make_fingerprint(dtype="bfloat16").layout}, Miss.OTHER_MODEL),  # as many bytes
        ({"key": bytes(16)}, Miss.OTHER_KEY),
        ({"parent": bytes(16)}, Miss.OTHER_KEY),
        ({"tenant": bytes(8)}, Miss.OTHER_KEY),
        ({"token_ids": np.arange(5, 9, dtype=np.uint32)}, Miss.OTHER_TOKENS),
        ({"token_ids": np.arange(1, 6, dtype=np.uint32)}, Miss.OTHER_TOKENS),
        ({"slot_position": np.ones(5, np.int32)}, Miss.OTHER_TOKENS),
        ({"checksums": (bytes(16),) * 3}, None),  # saved anew
    ],
)
def test_a_file_of_another_chunk_than_was_located_is_told_apart(
    path: Path, chunk: Chunk, changed: dict[str, object], miss: Miss | None
) -> None:
    reader = open_chunk(FILES, str(path))
    assert isinstance(reader, ChunkReader)
    with reader:
        assert differs(reader.header, replace(chunk.header, **changed)) is miss


def flip(path: Path, content: bytes, bit: int) -> None:
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    path.write_bytes(changed)


@pytest.mark.at_length
def test_a_flipped_bit_is_never_served(path: Path, chunk: Chunk) -> None:
    """It is a miss, or it is outside of all that is used: between layers, or in Arrow's own tables."""
    content, chance = path.read_bytes(), random.Random(1)
    bits = [chance.randrange(8 * len(content)) for _ in range(examples(300, at_length=3000))]
    used = [content.index(MAGIC), *(content.index(layer.tobytes()) for layer in chunk.layers)]
    sizes = [chunk.header.num_bytes, *[chunk.header.layer_bytes] * 3]
    num_misses = 0
    for bit in bits:
        flip(path, content, bit)
        read = read_all(open_chunk(FILES, str(path)))
        is_used = any(start <= bit // 8 < start + size for start, size in zip(used, sizes, strict=True))
        assert isinstance(read, Miss) == is_used, bit
        assert is_used or is_payload(read, chunk)
        num_misses += is_used
    assert num_misses > len(bits) // 4


def test_a_truncated_file_is_a_miss_at_every_length(tmp_path: Path) -> None:
    chunk = chunk_of(list(range(8)), fingerprint=make_fingerprint(head_dim=256))
    path = save(tmp_path, chunk)
    size = path.stat().st_size
    lengths = {*range(0, size, 4096), *range(0, 700), size - 1, size - 10}
    assert len(range(0, size, 4096)) > 10
    content = path.read_bytes()
    for length in sorted(lengths, reverse=True):
        os.truncate(path, length)
        assert isinstance(open_chunk(FILES, str(path)), Miss), length
    path.write_bytes(content + b"x")
    assert open_chunk(FILES, str(path)) is Miss.SHORT


FIXED = chunk_module.FIXED_FIELDS
FIELDS = {"version": 1, "size": 2, "kind": 3, "dtype": 4, "layers": 5, "heads": 6, "dim": 7, "chunk": 8, "tokens": 9}
FIELDS |= {"first": 14, "stride": 15, "file": 16}
BIG = {"version": 2**32 - 1, "size": 2**32 - 1, "kind": 255, "dtype": 255, "first": 2**64 - 1, "stride": 2**64 - 1}
BIG |= {"file": 2**64 - 1}


def with_field(path: Path, chunk: Chunk, field: str, value: int, *, is_signed: bool = True) -> None:
    """Change one field of the header; sign it anew, as a hostile writer would."""
    content = bytearray(path.read_bytes())
    start = content.index(MAGIC)
    fields = list(FIXED.unpack_from(content, start))
    fields[FIELDS[field]] = value
    FIXED.pack_into(content, start, *fields)
    if is_signed:
        end = start + chunk_module.header_bytes(fields[FIELDS["layers"]], fields[FIELDS["tokens"]]) - 16
        content[end : end + 16] = checksum(bytes(content[start:end]))
    path.write_bytes(content)


@pytest.mark.parametrize("is_signed", [True, False])
@pytest.mark.parametrize("field", FIELDS)
def test_hostile_headers_are_misses(path: Path, chunk: Chunk, field: str, is_signed: bool) -> None:
    content = path.read_bytes()
    now = FIXED.unpack_from(content, content.index(MAGIC))[FIELDS[field]]
    largest = BIG.get(field, 2**16 - 1)
    for value in {0, 1, now - 1, now + 1, now + 8, min(2**15, largest), largest} - {now}:
        path.write_bytes(content)
        with_field(path, chunk, field, value, is_signed=is_signed)
        read = read_all(open_chunk(FILES, str(path)))
        # A layout of the same size is told apart by who wants a certain model; the kind says nothing to a reader, as
        # the key is made of it.
        assert isinstance(read, Miss) or (is_signed and field in ("dtype", "chunk", "kind")), value


@pytest.mark.parametrize("content", [b"", bytes(9000), MAGIC, b"x" * 10_000, MAGIC * 9_000, b"\xff" * 100_000])
def test_what_is_no_chunk_is_a_miss(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other.kv"
    path.write_bytes(content)
    assert isinstance(open_chunk(FILES, str(path)), Miss)


def test_a_compressed_bomb_is_not_unpacked(tmp_path: Path, chunk: Chunk) -> None:
    """Arrow may compress bodies; we read no body but by our own header, and unpack nothing."""
    header = encode_header(chunk.header, LayerOffsets(4000, 10**9, 4 * 10**9))
    schema = pa.schema([pa.field("kv", pa.uint8())], metadata={b"mneme.chunk": header})
    batch = pa.record_batch([pa.array(np.zeros(50_000_000, np.uint8))], schema=schema)
    path = tmp_path / "bomb.kv"
    with pa.ipc.new_file(str(path), schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_batch(batch)
    assert path.stat().st_size < 100_000
    assert open_chunk(FILES, str(path)) is Miss.BAD_HEADER


class CountingFiles(FileOperations):
    def __init__(self) -> None:
        self.num_bytes = 0

    def read(self, fd: int, buffers: object, offset: int) -> int:
        self.num_bytes += sum(len(buffer) for buffer in buffers)  # type: ignore[attr-defined]
        return super().read(fd, buffers, offset)  # type: ignore[arg-type]


def test_a_huge_file_is_refused_without_reading_it(tmp_path: Path) -> None:
    path = tmp_path / "huge.kv"
    with open(path, "wb") as file:
        file.truncate(1 << 40)
    files = CountingFiles()
    assert open_chunk(files, str(path)) is Miss.NO_HEADER
    assert files.num_bytes <= 2 * MAX_HEAD_BYTES <= 2 * 65_536


def test_links_folders_pipes_and_other_users_files_are_refused(
    tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, folder, pipe = tmp_path / "link", tmp_path / "folder", tmp_path / "pipe"
    link.symlink_to(path)
    folder.mkdir()
    os.mkfifo(pipe)
    for other in (link, folder, pipe):
        assert open_chunk(FILES, str(other)) is Miss.NOT_OURS
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert open_chunk(FILES, str(path)) is Miss.NOT_OURS


def test_buffers_of_another_size_are_refused(path: Path, chunk: Chunk) -> None:
    reader = open_chunk(FILES, str(path))
    assert isinstance(reader, ChunkReader)
    good = np.empty(chunk.header.layer_bytes, np.uint8)
    for first, buffers in ((0, [good[:-1]]), (0, [good] * 4), (3, [good]), (-1, [good]), (0, [good.view(np.int8)])):
        with pytest.raises(ValueError, match="layers"):
            reader.read(first, buffers)
    reader.close()
    reader.close()


def test_chunks_that_do_not_fit_their_layout_are_refused() -> None:
    layers = layers_of(FINGERPRINT, 2, 0)
    root = LINEAGE.root
    for token_ids, positions, given_layers in (
        ([], [], layers),
        ([1] * 9, [0] * 9, layers_of(FINGERPRINT, 9, 0)),
        ([1, 2], [0], layers),
        ([1, 2], [0, 1], layers[:2]),
        ([1, 2], [0, 1], [*layers[:2], layers[2][:-1]]),
    ):
        with pytest.raises(ValueError, match="must be"):
            make_chunk(LINEAGE, FINGERPRINT, root, token_ids, positions, given_layers)


def test_a_header_is_what_its_fields_say() -> None:
    """Fixed by the format: little-endian, without padding."""
    header: ChunkHeader = chunk_of([1, 2]).header
    encoded = encode_header(header, LayerOffsets(1000, 2000, 9000))
    assert len(encoded) == header.num_bytes == struct.calcsize("<8sIIBBHHHHH16s16s8s32sQQQ") + 2 * 8 + 4 * 16
    assert encoded[:12] == b"MnemeKV\0\x01\0\0\0"
    assert encoded[-16:] == checksum(encoded[:-16])
