"""Chunks as files: written under a temporary name and renamed, read layer by layer into the caller's buffers.

A file appears whole or not at all; nothing is synced, as a cache needs atomicity and detection, not durability: after a
power failure a file may be full of zeros, which its checksums tell. Files are never mapped into memory: one that is
truncated under a map would kill the process.

What a reader gets is checked as the bytes that it uses: the checksum is of the buffer that was filled, and every number
of the file is bounded before anything is read by it (`chunk/header.py`). Every fault is a `Miss`; none is raised.

What stands around the layers makes it an Arrow IPC file of one record batch per layer: any Arrow reader opens it, the
schema's metadata carry the chunk's header, each batch is one column of bytes. We write with Arrow and do not read with
it. The frame depends on sizes alone, so pyarrow makes it once for each size of chunk and header, from zeros; and a
reader finds our own header by its magic bytes, so that no parser of another library ever sees a byte of an untrusted
file.
"""

from __future__ import annotations

import errno
import io
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import pyarrow as pa

from mneme.cachetier.chunk.fingerprint import MAX_LAYERS
from mneme.cachetier.chunk.header import (
    MAGIC,
    Chunk,
    ChunkHeader,
    LayerOffsets,
    StreamedChecksum,
    U8Array,
    checksum,
    encode_header,
    header_bytes,
    parse_header,
)
from mneme.cachetier.chunk.syscalls import Buffer, FileOperations, is_ours
from mneme.cachetier.names import MAX_CHUNK_TOKENS, Miss

_MAX_BUFFERS = 512  # of one call; systems take 1024
_FRAME_SLACK_BYTES = 1024  # what Arrow puts before and around the header: some 400
_USUAL_HEAD_BYTES = 4096  # 256 tokens and 80 layers
MAX_HEAD_BYTES = header_bytes(MAX_LAYERS, MAX_CHUNK_TOKENS) + _FRAME_SLACK_BYTES  # under 64 KB
_METADATA_KEY = b"mneme.chunk"
_COLUMN = "kv"
_FILE_PREFIX_BYTES = 8  # magic bytes of the Arrow format, padded
_PREFIX_BYTES = 8  # of an encapsulated message: continuation marker and length of the metadata
_KEPT_BYTES = 1 << 20  # a larger write is a layer, which no frame keeps

_MISS_BY_ERRNO = {
    errno.ENOENT: Miss.ABSENT,
    errno.ELOOP: Miss.NOT_OURS,
    errno.EACCES: Miss.NOT_OURS,
    errno.ENXIO: Miss.NOT_OURS,
    errno.EMFILE: Miss.BUSY,
    errno.ENFILE: Miss.BUSY,
    errno.ENOMEM: Miss.BUSY,
    errno.EAGAIN: Miss.BUSY,
    errno.EINTR: Miss.BUSY,
}


def file_bytes(header: ChunkHeader) -> int:
    """The size of this chunk's file."""
    return _offsets(header).file_bytes


def write_chunk(files: FileOperations, temporary: str, path: str, chunk: Chunk) -> None:
    """Raises OSError; then either file may be there, and the caller removes both."""
    fd = files.create(temporary)
    try:
        _write_all(files, fd, _pieces(chunk))
    finally:
        files.close(fd)
    files.rename(temporary, path)


def open_chunk(files: FileOperations, path: str) -> ChunkReader | Miss:
    """A reader of the file's layers, to be closed; the caller compares its header with what is wanted."""
    try:
        fd = files.open_to_read(path)
    except OSError as error:
        return miss_of(error)
    try:
        opened = _checked(files, fd)
    except OSError as error:
        opened = miss_of(error)
    if isinstance(opened, Miss):
        with suppress(OSError):
            files.close(fd)
    return opened


def miss_of(error: OSError) -> Miss:
    return _MISS_BY_ERRNO.get(error.errno or 0, Miss.IO_ERROR)


class ChunkReader:
    """An open file whose header is sound."""

    def __init__(self, files: FileOperations, fd: int, header: ChunkHeader, offsets: LayerOffsets) -> None:
        self.header = header
        self._files, self._fd, self._offsets = files, fd, offsets
        self._is_closed = False

    def __enter__(self) -> ChunkReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self, first_layer: int, layers: Sequence[U8Array]) -> Miss | None:
        """Fill one buffer [layer_bytes] per layer, from `first_layer` on; after a miss their contents are worthless."""
        header, offsets = self.header, self._offsets
        if not 0 <= first_layer <= first_layer + len(layers) <= header.layout.num_layers:
            raise ValueError(f"layers: {first_layer}..{first_layer + len(layers)} of {header.layout.num_layers}")
        if any(layer.dtype != np.uint8 or layer.shape != (header.layer_bytes,) for layer in layers):
            raise ValueError(f"layers: must be buffers of {header.layer_bytes} bytes")
        gap = bytearray(offsets.stride - header.layer_bytes)
        buffers: list[Buffer] = []
        for layer in layers:
            buffers += [layer.data, gap]
        try:
            is_whole = _read_all(self._files, self._fd, buffers[:-1], offsets.first_body + first_layer * offsets.stride)
        except OSError as error:
            return miss_of(error)
        if not is_whole:
            return Miss.SHORT
        expected = header.checksums[first_layer : first_layer + len(layers)]
        return None if expected == tuple(checksum(layer.data) for layer in layers) else Miss.BAD_CHECKSUM

    def check(self, buffer: memoryview) -> Miss | None:
        """Compare every layer with its checksum, piece by piece through a buffer: a layer may be larger than memory."""
        for layer, expected in enumerate(self.header.checksums):
            start, running = self._offsets.first_body + layer * self._offsets.stride, StreamedChecksum()
            for offset in range(0, self.header.layer_bytes, len(buffer)):
                piece = buffer[: min(len(buffer), self.header.layer_bytes - offset)]
                try:
                    if not _read_all(self._files, self._fd, [piece], start + offset):
                        return Miss.SHORT
                except OSError as error:
                    return miss_of(error)
                running.update(piece)
            if running.digest() != expected:
                return Miss.BAD_CHECKSUM
        return None

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            with suppress(OSError):
                self._files.close(self._fd)


def _checked(files: FileOperations, fd: int) -> ChunkReader | Miss:
    status = files.status(fd)
    if not is_ours(status):
        return Miss.NOT_OURS
    parsed: tuple[ChunkHeader, LayerOffsets] | Miss = Miss.SHORT
    for size in sorted({min(size, status.st_size) for size in (_USUAL_HEAD_BYTES, MAX_HEAD_BYTES)}):
        head = bytearray(size)
        if not _read_all(files, fd, [head], 0):
            return Miss.SHORT
        parsed = parse_header(bytes(head), status.st_size)
        if parsed is not Miss.SHORT:
            break
    return parsed if isinstance(parsed, Miss) else ChunkReader(files, fd, *parsed)


def _offsets(header: ChunkHeader) -> LayerOffsets:
    return _arrow_frame(header.layout.num_layers, header.layer_bytes, header.num_bytes).offsets


def _pieces(chunk: Chunk) -> list[bytes | Buffer]:
    header = chunk.header
    frame = _arrow_frame(header.layout.num_layers, header.layer_bytes, header.num_bytes)
    head, tail = frame.filled(encode_header(header, frame.offsets))
    pieces: list[bytes | Buffer] = [head]
    for layer in chunk.layers:
        pieces += [layer.data, frame.gap]
    return [*pieces[:-1], tail]


def _write_all(files: FileOperations, fd: int, pieces: Sequence[bytes | Buffer]) -> None:
    views, offset = [memoryview(piece) for piece in pieces if len(piece)], 0
    while views:
        num_written = files.write(fd, views[:_MAX_BUFFERS], offset)
        if num_written <= 0:
            raise OSError(errno.EIO, "nothing was written")
        offset += num_written
        views = _rest(views, num_written)


def _read_all(files: FileOperations, fd: int, buffers: Sequence[Buffer], offset: int) -> bool:
    """False if the file ended before."""
    views = [memoryview(buffer) for buffer in buffers if len(buffer)]
    while views:
        num_read = files.read(fd, views[:_MAX_BUFFERS], offset)
        if num_read <= 0:
            return False
        offset += num_read
        views = _rest(views, num_read)
    return True


def _rest(views: list[memoryview], num_bytes: int) -> list[memoryview]:
    """Return what is left of the buffers behind so many bytes."""
    for index, view in enumerate(views):
        if num_bytes < len(view):
            return [view[num_bytes:], *views[index + 1 :]]
        num_bytes -= len(view)
    return []


@dataclass(frozen=True, slots=True)
class _ArrowFrame:
    """`head`, layer 0, gap, layer 1, gap, ..., the last layer, `tail`."""

    head: bytes  # up to the first layer; a place for the header in it
    gap: bytes  # between two layers
    tail: bytes  # behind the last layer; another place for the header in it
    header_bytes: int
    offsets: LayerOffsets

    def filled(self, header: bytes) -> tuple[bytes, bytes]:
        """Head and tail with a header in its places."""
        assert len(header) == self.header_bytes
        blank = _blank(self.header_bytes)
        return self.head.replace(blank, header), self.tail.replace(blank, header)


@lru_cache(maxsize=512)
def _arrow_frame(num_layers: int, layer_bytes: int, num_header_bytes: int) -> _ArrowFrame:
    blank = _blank(num_header_bytes)
    schema = pa.schema([pa.field(_COLUMN, pa.uint8(), nullable=False)], metadata={_METADATA_KEY: blank})
    batch = pa.record_batch([pa.array(np.zeros(layer_bytes, np.uint8))], schema=schema)
    sink, ends = _Sink(), []
    with pa.ipc.new_file(sink, schema, options=pa.ipc.IpcWriteOptions(compression=None)) as writer:
        for _ in range(num_layers):
            writer.write_batch(batch)
            ends.append(sink.tell())
    starts = [_body_start(sink, _FILE_PREFIX_BYTES), *ends[:-1]]  # a schema message has no body
    bodies = [_body_start(sink, start) for start in starts]
    stride = ends[0] - starts[0]
    assert all(end - start == stride for start, end in zip(starts, ends, strict=True))
    head, tail = sink.between(0, bodies[0]), sink.between(bodies[-1] + layer_bytes, sink.tell())
    assert head.count(blank) == tail.count(blank) == 1
    gap = sink.between(bodies[0] + layer_bytes, bodies[1]) if num_layers > 1 else b""
    return _ArrowFrame(head, gap, tail, num_header_bytes, LayerOffsets(bodies[0], stride, sink.tell()))


def _blank(num_bytes: int) -> bytes:
    """Stands for a header while its frame is made; nothing else in a frame has the magic bytes."""
    return MAGIC + b"\xff" * (num_bytes - len(MAGIC))


def _body_start(sink: _Sink, message_start: int) -> int:
    length_at = message_start + 4
    metadata_bytes = int.from_bytes(sink.between(length_at, length_at + 4), "little")
    return message_start + _PREFIX_BYTES + metadata_bytes


class _Sink(io.RawIOBase):
    """Keeps what Arrow writes, without the layers."""

    def __init__(self) -> None:
        super().__init__()
        self._writes: list[tuple[int, bytes | None]] = []  # where, and what; None: a part of a layer
        self._end = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._end

    def write(self, written: object) -> int:
        view = memoryview(written).cast("B")  # type: ignore[arg-type]  # a buffer
        self._writes.append((self._end, bytes(view) if len(view) < _KEPT_BYTES else None))
        self._end += len(view)
        return len(view)

    def between(self, start: int, end: int) -> bytes:
        pieces = []
        for position, written in self._writes:
            if written is not None and position < end and start < position + len(written):
                pieces.append(written[max(0, start - position) : end - position])
        piece = b"".join(pieces)
        assert len(piece) == end - start
        return piece
