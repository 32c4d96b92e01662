"""What a file of the disk tier is called: all that its index needs, so that it is rebuilt without opening a file."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

from mneme.cachetier.chunk.header import ChunkHeader
from mneme.cachetier.chunk.keys import KEY_BYTES, LineageKind

NUM_FOLDERS = 256  # by the first byte of the key
MODEL_BYTES = 8  # of the fingerprint

_LETTER_BY_KIND = {LineageKind.PREFIX: "p", LineageKind.DOCUMENT: "d", LineageKind.SESSION: "s"}
_KIND_BY_LETTER = {letter: kind for kind, letter in _LETTER_BY_KIND.items()}
_NAME = re.compile(
    r"([0-9a-f]{32})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{16})-([pds])(0|[1-9][0-9]{0,3})-([1-9][0-9]{0,14})\.kv"
)
_TEMPORARY = re.compile(r"[0-9a-f]{32}\.[0-9]{1,19}\.part")


class ChunkName(NamedTuple):
    """A file's name, in parts."""

    key: bytes
    parent: bytes
    owner: bytes
    model: bytes  # the fingerprint's first bytes: for listings; the header has all of them
    kind: LineageKind
    num_tokens: int
    num_bytes: int  # of the file

    def __str__(self) -> str:
        names = "-".join((self.key.hex(), self.parent.hex(), self.owner.hex(), self.model.hex()))
        return f"{names}-{_LETTER_BY_KIND[self.kind]}{self.num_tokens}-{self.num_bytes}.kv"


def name_of(header: ChunkHeader, num_bytes: int) -> ChunkName:
    model = header.fingerprint[:MODEL_BYTES]
    return ChunkName(header.key, header.parent, header.owner, model, header.kind, header.num_tokens, num_bytes)


def temporary_name(key: bytes, number: int) -> str:
    return f"{key.hex()}.{number}.part"


def parse_name(text: str) -> ChunkName | None:
    """None for a name that we would not give."""
    match = _NAME.fullmatch(text)
    if match is None:
        return None
    key, parent, owner, model, kind, num_tokens, num_bytes = match.groups()
    return ChunkName(
        bytes.fromhex(key),
        bytes.fromhex(parent),
        _shared(owner),
        _shared(model),
        _KIND_BY_LETTER[kind],
        int(num_tokens),
        int(num_bytes),
    )


def is_temporary(text: str) -> bool:
    return _TEMPORARY.fullmatch(text) is not None


@lru_cache(maxsize=4096)
def _shared(text: str) -> bytes:
    """One object for all names: there are few tenants and models beside a million chunks."""
    return bytes.fromhex(text)


def folder_of(key: bytes) -> str:
    return f"{key[0] % NUM_FOLDERS:02x}"


def folders() -> list[str]:
    return [f"{number:02x}" for number in range(NUM_FOLDERS)]


assert KEY_BYTES == 16  # two of the name's patterns
