"""Keys of chunks: 128 bits over (model fingerprint, tenant salt, lineage, token ids).

A *lineage* is where KV descends from; each chunk's key is hashed from the key before it and its own token ids, under a
secret that is made of all the rest. So whoever does not know the salt can neither guess a key nor make one that
collides with another tenant's, and no key is ever taken from a client.

The hash is keyed BLAKE2b of the standard library: where it was measured, the keys of 100,000 tokens take 1 ms, of which
a dependency (BLAKE3) could only save a part.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mneme.cachetier.chunk.fingerprint import ModelFingerprint
from mneme.cachetier.names import tenant_id

KEY_BYTES = 16
MAX_TOKEN_ID = 2**31 - 1

TokenIds = Sequence[int] | npt.NDArray[np.integer]
U32Array = npt.NDArray[np.uint32]


class LineageKind(IntEnum):
    """The values are part of the file format."""

    PREFIX = 1  # exact KV of a prefix; anyone of the tenant with that prefix may use it
    DOCUMENT = 2  # reserved: a document behind its attention sink is a prefix, which blending uses at any position
    SESSION = 3  # approximate KV, after a truncation; only its session may use it


class KeyedRange(NamedTuple):
    """A chunk of a chain: the tokens [start, end) of it."""

    key: bytes
    parent: bytes
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Lineage:
    """A root, and how keys are made under it. Equal arguments give equal lineages wherever they are made."""

    kind: LineageKind
    root: bytes  # stands in for the parent of the first chunk
    tenant: bytes  # the tenant's id, for quotas and deletion; says nothing of the salt
    _secret: bytes = field(repr=False)

    def key(self, parent: bytes, token_ids: TokenIds) -> bytes:
        """Return the key of the chunk that holds these tokens behind `parent`."""
        return self._key(parent, memoryview(encoded(token_ids).tobytes()))

    def chain(self, token_ids: TokenIds, chunk_tokens: int) -> list[KeyedRange]:
        """All chunks of a sequence from the root on; the last may be short."""
        view, parent = memoryview(encoded(token_ids).tobytes()), self.root
        num_tokens = len(view) // 4
        ranges = []
        for start in range(0, num_tokens, chunk_tokens):
            end = min(start + chunk_tokens, num_tokens)
            key = self._key(parent, view[4 * start : 4 * end])
            ranges.append(KeyedRange(key, parent, start, end))
            parent = key
        return ranges

    def beginnings(self, parent: bytes, token_ids: TokenIds, lengths: Iterable[int] | None = None) -> list[bytes]:
        """Keys of the chunks behind `parent` that hold so many of these tokens, longest first; some 3 us each.

        Without `lengths`: the first, the first two, and so on up to all.
        """
        view, running, start = memoryview(encoded(token_ids).tobytes()), self._hash(parent), 0
        num_tokens, keys = len(view) // 4, []
        for length in range(1, num_tokens + 1) if lengths is None else sorted({n for n in lengths if n <= num_tokens}):
            running.update(view[start : 4 * length])
            start = 4 * length
            keys.append(running.copy().digest())
        return keys[::-1]

    def _key(self, parent: bytes, view: memoryview) -> bytes:
        running = self._hash(parent)
        running.update(view)
        return running.digest()

    def _hash(self, parent: bytes) -> blake2b:
        if len(parent) != KEY_BYTES:
            raise ValueError(f"parent: must be {KEY_BYTES} bytes (got {len(parent)})")
        return blake2b(parent, digest_size=KEY_BYTES, key=self._secret, person=b"mneme chunk")


def prefix_lineage(fingerprint: ModelFingerprint, salt: str) -> Lineage:
    return _lineage(LineageKind.PREFIX, fingerprint, salt)


def session_lineage(fingerprint: ModelFingerprint, salt: str, session_id: str, event: bytes = b"") -> Lineage:
    """The lineage of what a session has computed since an event that made its KV approximate.

    All events of a session have one root, so that whoever deletes it need not know them; no two have a key in common.
    """
    parts = (fingerprint, salt, session_id.encode("utf-8", "surrogatepass"))
    return replace(_lineage(LineageKind.SESSION, *parts, event), root=_lineage(LineageKind.SESSION, *parts).root)


def encoded(token_ids: TokenIds) -> U32Array:
    """Token ids as little-endian uint32 [n], contiguous. Raises ValueError for what is no token id."""
    ids = np.asarray(token_ids)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise ValueError(f"token_ids: must be a vector of integers (got {ids.dtype} {list(ids.shape)})")
    if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) <= MAX_TOKEN_ID:
        raise ValueError(f"token_ids: must be from 0 to {MAX_TOKEN_ID} (got {ids.min()}..{ids.max()})")
    return np.ascontiguousarray(ids, "<u4")


def _lineage(kind: LineageKind, fingerprint: ModelFingerprint, salt: str, *parts: bytes) -> Lineage:
    seed = blake2b(digest_size=32 + KEY_BYTES, person=b"mneme lineage")
    for part in (bytes([kind]), fingerprint.digest, salt.encode("utf-8", "surrogatepass"), *parts):
        seed.update(len(part).to_bytes(8, "little"))  # or ("ab", "c") would be ("a", "bc")
        seed.update(part)
    digest = seed.digest()
    return Lineage(kind, digest[32:], tenant_id(salt), digest[:32])
