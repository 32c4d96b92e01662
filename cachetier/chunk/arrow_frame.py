"""What stands around the layers of a chunk's file, so that it is an Arrow IPC file of one record batch per layer.

Any Arrow reader opens such a file: the schema's metadata carry the chunk's header, each batch is one column of bytes.
We write with Arrow and do not read with it. The frame depends on sizes alone, so pyarrow makes it once for each size of
chunk and header, from zeros; and a reader finds our own header by its magic bytes, so that no parser of another library
ever sees a byte of an untrusted file.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import pyarrow as pa

from mneme.cachetier.chunk.header import MAGIC, Placement

_METADATA_KEY = b"mneme.chunk"
_COLUMN = "kv"
_FILE_PREFIX_BYTES = 8  # magic bytes of the Arrow format, padded
_PREFIX_BYTES = 8  # of an encapsulated message: continuation marker and length of the metadata
_KEPT_BYTES = 1 << 20  # a larger write is a layer, which no frame keeps


@dataclass(frozen=True, slots=True)
class ArrowFrame:
    """`head`, layer 0, gap, layer 1, gap, ..., the last layer, `tail`."""

    head: bytes  # up to the first layer; a place for the header in it
    gap: bytes  # between two layers
    tail: bytes  # behind the last layer; another place for the header in it
    header_bytes: int
    placement: Placement

    def filled(self, header: bytes) -> tuple[bytes, bytes]:
        """Head and tail with a header in its places."""
        assert len(header) == self.header_bytes
        blank = _blank(self.header_bytes)
        return self.head.replace(blank, header), self.tail.replace(blank, header)


@lru_cache(maxsize=512)
def arrow_frame(num_layers: int, layer_bytes: int, num_header_bytes: int) -> ArrowFrame:
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
    return ArrowFrame(head, gap, tail, num_header_bytes, Placement(bodies[0], stride, sink.tell()))


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
