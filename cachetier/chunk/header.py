"""A chunk: the KV of up to `chunk_tokens` consecutive tokens, all layers, and the header that says what it is.

The header is fixed fields, token ids, slot positions and a checksum of each layer, closed by a checksum of its own; all
numbers are little-endian. Every field is bounded before it is used, so that what an untrusted file says decides neither
how much is allocated nor what is read.

Checksums (XXH3, 128 bits) find accidents. They are no signature: whoever can write to the folder of a tier is trusted.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from mneme.cachetier.chunk.fingerprint import DTYPE_BYTES, ChunkLayout, ModelFingerprint
from mneme.cachetier.chunk.keys import Lineage, LineageKind, TokenIds, U32Array, encoded
from mneme.cachetier.names import Miss
from mneme.errors import ConfigError

U8Array = npt.NDArray[np.uint8]
I32Array = npt.NDArray[np.int32]

MAGIC = b"MnemeKV\x00"
VERSION = 1
CHECKSUM_BYTES = 16

_DTYPE_CODES = {"float32": 1, "bfloat16": 2, "float16": 3, "int8": 4}  # part of the format
_DTYPES = {code: name for name, code in _DTYPE_CODES.items()}
# magic, version, header bytes, kind, dtype, layers, heads, dim, chunk_tokens, tokens, key, parent, tenant, fingerprint,
# first body, body stride, file bytes
FIXED_FIELDS = struct.Struct("<8sIIBBHHHHH16s16s8s32sQQQ")
_MAX_GAP_BYTES = 4096  # between the bodies of two layers


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChunkHeader:
    """Says what a chunk is."""

    key: bytes  # 16
    parent: bytes  # 16; the key of the chunk before, or the lineage's root
    tenant: bytes  # its id, 8 bytes
    kind: LineageKind
    fingerprint: bytes  # 32
    layout: ChunkLayout
    token_ids: U32Array  # [n]
    slot_position: I32Array  # [n]  where each key was rotated
    checksums: tuple[bytes, ...]  # of each layer's payload

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def layer_bytes(self) -> int:
        return self.layout.layer_bytes(len(self.token_ids))

    @property
    def payload_bytes(self) -> int:
        """Size of all layers."""
        return self.layout.num_layers * self.layer_bytes

    @property
    def num_bytes(self) -> int:
        """Size of this header, encoded."""
        return header_bytes(self.layout.num_layers, len(self.token_ids))


class LayerOffsets(NamedTuple):
    """Says where a file has its layers: layer l is `layer_bytes` bytes from first_body + l * stride."""

    first_body: int
    stride: int
    file_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """A header and the payload that its checksums are of."""

    header: ChunkHeader
    layers: tuple[U8Array, ...]  # each [layer_bytes]


def make_chunk(
    lineage: Lineage,
    fingerprint: ModelFingerprint,
    parent: bytes,
    token_ids: TokenIds,
    slot_position: Sequence[int] | I32Array,
    layers: Sequence[U8Array],
) -> Chunk:
    """A chunk behind `parent`; layers are bytes [K and V, num_kv_heads, n, head_dim] of one layer each.

    The checksums are computed here, so the layers must not change any more. Raises ValueError for sizes that do not
    fit.
    """
    layout, ids = fingerprint.layout, encoded(token_ids)
    positions = np.ascontiguousarray(slot_position, "<i4")
    if not 1 <= len(ids) <= layout.chunk_tokens or positions.shape != ids.shape:
        rule = f"must be 1 to {layout.chunk_tokens}, one position for each"
        raise ValueError(f"token_ids: {rule} (got {len(ids)}, {positions.shape})")
    num_bytes = layout.layer_bytes(len(ids))
    if len(layers) != layout.num_layers or any(layer.nbytes != num_bytes for layer in layers):
        raise ValueError(f"layers: must be {layout.num_layers} of {num_bytes} bytes")
    flat = tuple(np.ascontiguousarray(layer).view(np.uint8).reshape(-1) for layer in layers)
    header = ChunkHeader(
        key=lineage.key(parent, ids),
        parent=parent,
        tenant=lineage.tenant,
        kind=lineage.kind,
        fingerprint=fingerprint.digest,
        layout=layout,
        token_ids=ids,
        slot_position=positions,
        checksums=tuple(checksum(layer.data) for layer in flat),
    )
    return Chunk(header, flat)


def checksum(payload: bytes | memoryview) -> bytes:
    return xxhash.xxh3_128_digest(payload)


StreamedChecksum = xxhash.xxh3_128  # the same of a payload that comes in pieces: `update`, then `digest`


def header_bytes(num_layers: int, num_tokens: int) -> int:
    return FIXED_FIELDS.size + 8 * num_tokens + CHECKSUM_BYTES * (num_layers + 1)


def encode_header(header: ChunkHeader, offsets: LayerOffsets) -> bytes:
    layout = header.layout
    fixed = FIXED_FIELDS.pack(
        MAGIC,
        VERSION,
        header.num_bytes,
        header.kind,
        _DTYPE_CODES[layout.dtype],
        layout.num_layers,
        layout.num_kv_heads,
        layout.head_dim,
        layout.chunk_tokens,
        header.num_tokens,
        header.key,
        header.parent,
        header.tenant,
        header.fingerprint,
        *offsets,
    )
    body = b"".join((fixed, header.token_ids.tobytes(), header.slot_position.tobytes(), *header.checksums))
    return body + checksum(body)


def parse_header(head: bytes, file_bytes: int) -> tuple[ChunkHeader, LayerOffsets] | Miss:
    """The header in the first bytes of a file of `file_bytes`."""
    start = head.find(MAGIC)
    if start < 0 or start + FIXED_FIELDS.size > len(head):
        return Miss.NO_HEADER
    fields = FIXED_FIELDS.unpack_from(head, start)
    if fields[1] != VERSION:
        return Miss.OTHER_VERSION
    num_layers, num_tokens = fields[5], fields[9]
    end = start + fields[2]
    if fields[2] != header_bytes(num_layers, num_tokens):
        return Miss.BAD_HEADER
    if end > len(head):
        return Miss.SHORT
    if checksum(head[start : end - CHECKSUM_BYTES]) != head[end - CHECKSUM_BYTES : end]:
        return Miss.BAD_HEADER
    header = _header(fields, head, start + FIXED_FIELDS.size)
    if header is None:
        return Miss.BAD_HEADER
    offsets = LayerOffsets(*fields[-3:])
    reason = _offsets_fault(header, offsets, end, file_bytes)
    return reason or (header, offsets)


def differs(header: ChunkHeader, located: ChunkHeader) -> Miss | None:
    """Return why this is not the chunk that was located; None if it is, perhaps saved anew with other checksums."""
    if header.fingerprint != located.fingerprint or header.layout != located.layout:
        return Miss.OTHER_MODEL
    if (header.key, header.parent, header.tenant) != (located.key, located.parent, located.tenant):
        return Miss.OTHER_KEY
    is_same = np.array_equal(header.token_ids, located.token_ids)
    return None if is_same and np.array_equal(header.slot_position, located.slot_position) else Miss.OTHER_TOKENS


def is_beginning(header: ChunkHeader, other: ChunkHeader) -> bool:
    """Return whether this one, behind the same parent, holds a beginning of the other and no more."""
    num_tokens = header.num_tokens
    is_same_kind = (header.fingerprint, header.tenant) == (other.fingerprint, other.tenant)
    return (
        is_same_kind
        and num_tokens < other.num_tokens
        and np.array_equal(header.token_ids, other.token_ids[:num_tokens])
    )


def _header(fields: tuple[Any, ...], head: bytes, start: int) -> ChunkHeader | None:
    """Decode a header; None if a field is out of its bounds. Token ids, positions and checksums lie from `start` on."""
    _, _, _, kind, dtype, num_layers, num_kv_heads, head_dim, chunk_tokens, num_tokens = fields[:10]
    key, parent, tenant, fingerprint = fields[10:14]
    try:
        layout = ChunkLayout(
            num_layers=num_layers,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dtype=_DTYPES.get(dtype, ""),
            chunk_tokens=chunk_tokens,
        )
        lineage_kind = LineageKind(kind)
    except (ConfigError, ValueError):
        return None
    if not 1 <= num_tokens <= chunk_tokens:
        return None
    checksums_at = start + 8 * num_tokens
    return ChunkHeader(
        key=key,
        parent=parent,
        tenant=tenant,
        kind=lineage_kind,
        fingerprint=fingerprint,
        layout=layout,
        token_ids=np.frombuffer(head, "<u4", num_tokens, start),
        slot_position=np.frombuffer(head, "<i4", num_tokens, start + 4 * num_tokens),
        checksums=tuple(
            head[at : at + CHECKSUM_BYTES]
            for at in range(checksums_at, checksums_at + CHECKSUM_BYTES * num_layers, CHECKSUM_BYTES)
        ),
    )


def _offsets_fault(header: ChunkHeader, offsets: LayerOffsets, header_end: int, file_bytes: int) -> Miss | None:
    """Layers lie behind the header, apart, close together and within the file."""
    gap = offsets.stride - header.layer_bytes
    end = offsets.first_body + offsets.stride * (header.layout.num_layers - 1) + header.layer_bytes
    if not 0 <= gap <= _MAX_GAP_BYTES or not header_end <= offsets.first_body <= header_end + _MAX_GAP_BYTES:
        return Miss.BAD_HEADER
    if not end <= offsets.file_bytes:
        return Miss.BAD_HEADER
    return None if offsets.file_bytes == file_bytes else Miss.SHORT


assert set(_DTYPE_CODES) == set(DTYPE_BYTES)
