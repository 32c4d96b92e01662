"""Block hashes of token ids: what two prompts share, without sending the prompts.

The hash of block i covers blocks 0..i (a chain), so one equal hash means an equal prefix of that length.
Hashes are keyed by the tenant's salt and depend on neither PYTHONHASHSEED, process nor machine.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

BLOCK_TOKENS = 64
_HASH_BYTES = 8
_MAX_KEY_BYTES = 64  # BLAKE2b's limit


def block_hashes(token_ids: Sequence[int], *, salt: str = "", block_tokens: int = BLOCK_TOKENS) -> list[int]:
    """One 64-bit hash per full block; a tail that fills no block has none."""
    key = _key(salt)
    num_blocks = len(token_ids) // block_tokens
    packed = array("q", token_ids[: num_blocks * block_tokens]).tobytes()
    stride = 8 * block_tokens
    hashes = []
    parent = b""
    for start in range(0, len(packed), stride):
        parent = hashlib.blake2b(parent + packed[start : start + stride], digest_size=_HASH_BYTES, key=key).digest()
        hashes.append(int.from_bytes(parent, "little"))
    return hashes


def text_hash(text: str) -> int:
    """A 64-bit hash of a text, equal on every machine."""
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=_HASH_BYTES)
    return int.from_bytes(digest.digest(), "little")


def _key(salt: str) -> bytes:
    raw = salt.encode("utf-8", "surrogatepass")
    return raw if len(raw) <= _MAX_KEY_BYTES else hashlib.blake2b(raw, digest_size=_MAX_KEY_BYTES).digest()
