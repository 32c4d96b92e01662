"""Block hashes of token ids: what two prompts share, without sending the prompts.

The hash of block i covers blocks 0..i (a chain), so one equal hash means an equal prefix of that length.
Hashes are keyed by the tenant's salt and depend on neither PYTHONHASHSEED, process nor machine.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Sequence

from mneme.replicas.report import BLOCK_TOKENS, first_digest, next_digest, pack, unpack

_HASH_BYTES = 8


def block_hashes(token_ids: Sequence[int], *, salt: str = "") -> list[int]:
    """One 64-bit hash per full block; a tail that fills no block has none.

    Raises `struct.error` for what is no int32.
    """
    num_tokens = len(token_ids) // BLOCK_TOKENS * BLOCK_TOKENS
    some = token_ids[:num_tokens]
    # An array takes twice as long to make, and none to give its bytes.
    if isinstance(some, array) and some.typecode == "i":
        packed = some.tobytes()
    else:
        packed = struct.pack(f"{num_tokens}i", *some)
    stride = 4 * BLOCK_TOKENS
    digests, digest = [], first_digest(salt)
    for start in range(0, len(packed), stride):
        digest = next_digest(digest, packed[start : start + stride])
        digests.append(digest)
    return unpack(pack(digests))


def text_hash(text: str) -> int:
    """A 64-bit hash of a text, equal on every machine."""
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=_HASH_BYTES)
    return int.from_bytes(digest.digest(), "little")
