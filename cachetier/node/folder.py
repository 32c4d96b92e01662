"""The folder of a disk tier: one lock, 256 folders of files, what files are called, and what is found at a start.

Everything lies in a folder of ours inside the one that was given, which nobody else may write to. What does not carry
one of our names is never touched there, nor is a link or another user's file that carries one. A name says all that an
index needs, so that it is rebuilt without opening a file.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from enum import Enum
from functools import lru_cache
from typing import NamedTuple

from mneme.cachetier.chunk.header import ChunkHeader
from mneme.cachetier.chunk.keys import KEY_BYTES, LineageKind
from mneme.cachetier.chunk.syscalls import FileOperations, HeldLock, is_ours
from mneme.cachetier.node.index import MODEL_BYTES
from mneme.errors import ConfigError

OWN_FOLDER = "mneme-kv-1"  # 1: of the names and of what lies where
LOCK = "lock"
NUM_FOLDERS = 256  # by the first byte of the key

_LETTER_BY_KIND = {LineageKind.PREFIX: "p", LineageKind.DOCUMENT: "d", LineageKind.SESSION: "s"}
_KIND_BY_LETTER = {letter: kind for kind, letter in _LETTER_BY_KIND.items()}
_NAME = re.compile(
    r"([0-9a-f]{32})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{16})-([pds])(0|[1-9][0-9]{0,3})-([1-9][0-9]{0,14})\.kv"
)
_TEMPORARY = re.compile(r"[0-9a-f]{32}\.[0-9]{1,19}\.part")
assert KEY_BYTES == 16  # two of the name's patterns


class ChunkName(NamedTuple):
    """A file's name, in parts."""

    key: bytes
    parent: bytes
    tenant: bytes
    model: bytes  # the fingerprint's first bytes: for listings; the header has all of them
    kind: LineageKind
    num_tokens: int
    num_bytes: int  # of the file

    def __str__(self) -> str:
        names = "-".join((self.key.hex(), self.parent.hex(), self.tenant.hex(), self.model.hex()))
        return f"{names}-{_LETTER_BY_KIND[self.kind]}{self.num_tokens}-{self.num_bytes}.kv"


def name_of(header: ChunkHeader, num_bytes: int) -> ChunkName:
    model = header.fingerprint[:MODEL_BYTES]
    return ChunkName(header.key, header.parent, header.tenant, model, header.kind, header.num_tokens, num_bytes)


def temporary_name(key: bytes, number: int) -> str:
    return f"{key.hex()}.{number}.part"


def parse_name(text: str) -> ChunkName | None:
    """Take a name apart; None for one that a tier would not give."""
    match = _NAME.fullmatch(text)
    if match is None:
        return None
    key, parent, tenant, model, kind, num_tokens, num_bytes = match.groups()
    return ChunkName(
        bytes.fromhex(key),
        bytes.fromhex(parent),
        _shared(tenant),
        _shared(model),
        _KIND_BY_LETTER[kind],
        int(num_tokens),
        int(num_bytes),
    )


def is_temporary(text: str) -> bool:
    return _TEMPORARY.fullmatch(text) is not None


@lru_cache(maxsize=4096)
def _shared(text: str) -> bytes:
    """Share one object among names: there are few tenants and models beside a million chunks."""
    return bytes.fromhex(text)


def folder_of(key: bytes) -> str:
    return f"{key[0] % NUM_FOLDERS:02x}"


def folders() -> list[str]:
    return [f"{number:02x}" for number in range(NUM_FOLDERS)]


class Kind(Enum):
    """Says what a folder's entry is; the values are shown."""

    CHUNK = "chunk"
    TORN = "torn"  # a chunk's name on a file of another size, or in a folder where it does not belong
    TEMPORARY = "temporary"  # being written, or left by a crash
    NOT_OURS = "not_ours"  # a link, no plain file, or another user's
    UNKNOWN = "unknown"  # no name that a tier gives


def make_root(path: str) -> None:
    """Make the folder that a tier was given, if there is none. Raises `ConfigError`."""
    try:
        os.makedirs(path, 0o700, exist_ok=True)
    except OSError as error:
        raise _unusable(path, error) from error


def check_usable(path: str) -> None:
    """Make the folder as a tier would. Raises `ConfigError` if a tier could not use it now."""
    make_root(path)
    DiskFolder(path, FileOperations()).close()


def kind_of(folder: str, text: str, status: os.stat_result) -> tuple[Kind, ChunkName | None]:
    """Say what lies under a name in one of the folders; with the name in parts for chunks and torn ones."""
    name = parse_name(text)
    if name is None and not is_temporary(text):
        return Kind.UNKNOWN, None
    if not is_ours(status):
        return Kind.NOT_OURS, name
    if name is None:
        return Kind.TEMPORARY, None
    is_sound = status.st_size == name.num_bytes and folder == folder_of(name.key)
    return (Kind.CHUNK if is_sound else Kind.TORN), name


class DiskFolder:
    """Raises `ConfigError` if the folder cannot be used, or if another tier uses it."""

    def __init__(self, path: str, files: FileOperations) -> None:
        self._files = files
        self._root = os.path.join(path, OWN_FOLDER)
        self._number = 0
        try:
            files.make_folder(self._root)
            self._lock = HeldLock(files, os.path.join(self._root, LOCK))
        except BlockingIOError:
            raise ConfigError(f"disk tier: {path} is in use by another cluster") from None
        except OSError as error:
            raise _unusable(path, error) from error
        try:
            for name in folders():
                files.make_folder(os.path.join(self._root, name))
        except OSError as error:
            self.close()
            raise _unusable(path, error) from error

    def path(self, name: ChunkName) -> str:
        return os.path.join(self._root, folder_of(name.key), str(name))

    def temporary_path(self, key: bytes) -> str:
        """A new path for each call."""
        self._number += 1
        return os.path.join(self._root, folder_of(key), temporary_name(key, self._number))

    def scan(self, counters: Counter[str]) -> Iterator[tuple[float, ChunkName]]:
        """Sound chunks with the times of their files, unsorted; removes what a crash left. Reads no file."""
        for folder in folders():
            path = os.path.join(self._root, folder)
            try:
                listed = self._files.list_folder(path)
            except OSError:
                counters["scan_error"] += 1
                continue
            for text, status in listed:
                kind, name = kind_of(folder, text, status)
                if kind is Kind.CHUNK and name is not None:
                    yield status.st_mtime, name
                else:
                    self._reject(kind, os.path.join(path, text), counters)

    def close(self) -> None:
        """Release the lock. Called twice it does nothing."""
        self._lock.close()

    def _reject(self, kind: Kind, path: str, counters: Counter[str]) -> None:
        """Remove what is no sound chunk, if a crash may have left it."""
        if kind in (Kind.UNKNOWN, Kind.NOT_OURS):
            counters[f"scan_{kind.value}"] += 1
            return
        counters["scan_removed"] += 1
        with suppress(OSError):
            self._files.unlink(path)


def _unusable(path: str, error: OSError) -> ConfigError:
    return ConfigError(f"disk tier: {path} cannot be used ({error.strerror or type(error).__name__})")
