"""The edge to a disk: chunks as the tier writes and reads them, and one plain file of the same bytes."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from tier_io.chunks import Arm, Chain

from mneme.cachetier.config import DiskTierConfig
from mneme.cachetier.names import Miss
from mneme.cachetier.node.disk import DiskTier, Put
from mneme.cachetier.policy.eviction import LruPolicy
from mneme.errors import MnemeError

_READABLE, _SHARED, _FAILED = 1, 1, ctypes.c_void_p(-1).value
_MAX_CACHED = 0.01  # of a file that counts as cold

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_longlong)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)


class Disk:
    """A disk tier in a folder, and a file beside it that holds the same payload and nothing else."""

    def __init__(self, chain: Chain, folder: Path) -> None:
        self._chain, self._folder = chain, folder
        config = DiskTierConfig(folder=str(folder), capacity_bytes=4 * chain.payload.nbytes)
        self._tier = DiskTier(config, LruPolicy())
        self._raw = folder / "raw"
        self._buffer = np.zeros_like(chain.payload[0])

    def close(self) -> None:
        self._tier.close()

    def fill(self) -> None:
        """All chunks, and the plain file."""
        for index in range(len(self._chain.chunks)):
            self.put(index)
            self.write_raw(index)

    def clear(self) -> None:
        self._tier.delete([chunk.header.key for chunk in self._chain.chunks])
        self._raw.unlink(missing_ok=True)

    def cool(self) -> None:
        """Nothing of the files stays in memory."""
        make_cold([self._raw, *self._folder.rglob("*.kv")])

    def put(self, index: int) -> None:
        outcome = self._tier.put(self._chain.chunks[index])
        if outcome is not Put.WRITTEN:
            raise MnemeError(f"a chunk was not written: {outcome.value}")

    def put_synced(self, index: int) -> None:
        self.put(index)
        key = self._chain.chunks[index].header.key.hex()
        (path,) = self._folder.glob(f"*/{key[:2]}/{key}-*.kv")
        _sync(path)

    def write_raw(self, index: int) -> None:
        fd = os.open(self._raw, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            _write(fd, self._chain.payload[index].reshape(-1).data, index * self._chain.shape.chunk_bytes)
        finally:
            os.close(fd)

    def write_raw_synced(self, index: int) -> None:
        self.write_raw(index)
        _sync(self._raw)

    def read_raw(self, index: int) -> None:
        """The file from its beginning to its end, into the buffer that chunks are read into too."""
        if index == 0:
            self._raw_fd = os.open(self._raw, os.O_RDONLY)
        view, offset = self._buffer.reshape(-1).data, index * self._chain.shape.chunk_bytes
        while len(view):
            num_read = os.preadv(self._raw_fd, [view], offset)
            view, offset = view[num_read:], offset + num_read
        if index == len(self._chain.chunks) - 1:
            os.close(self._raw_fd)

    def read(self, index: int) -> None:
        """A chunk at once."""
        self._read(index, self._chain.shape.num_layers)

    def read_layers(self, index: int) -> None:
        """Layer by layer, as an engine does that computes meanwhile."""
        self._read(index, 1)

    def _read(self, index: int, num_layers: int) -> None:
        opened = self._tier.open(self._chain.wanted(index))
        if isinstance(opened, Miss):
            raise MnemeError(f"a chunk could not be opened: {opened.value}")
        with opened:
            for first in range(0, self._chain.shape.num_layers, num_layers):
                miss = opened.read(first, list(self._buffer[first : first + num_layers]))
                if miss is not None:
                    raise MnemeError(f"a chunk could not be read: {miss.value}")


def cold_arms(disk: Disk) -> list[Arm]:
    return [
        Arm("disk read, cold", "raw file", disk.read_raw, before=disk.cool),
        Arm("disk read, cold", "chunk", disk.read, "raw file", before=disk.cool),
        Arm("disk read, cold", "chunk by layer", disk.read_layers, "raw file", before=disk.cool),
    ]


def warm_arms(disk: Disk) -> list[Arm]:
    return [
        Arm("disk read, warm", "raw file", disk.read_raw),
        Arm("disk read, warm", "chunk", disk.read, "raw file"),
        Arm("disk read, warm", "chunk by layer", disk.read_layers, "raw file"),
    ]


def write_arms(disk: Disk) -> list[Arm]:
    """To the page cache, as the tier does, and on to the disk."""
    return [
        Arm("disk write", "raw file", disk.write_raw, before=disk.clear),
        Arm("disk write", "chunk", disk.put, "raw file", before=disk.clear),
        Arm("disk write", "raw file, synced", disk.write_raw_synced, before=disk.clear),
        Arm("disk write", "chunk, synced", disk.put_synced, "raw file, synced", before=disk.clear),
    ]


def _write(fd: int, view: memoryview, offset: int) -> None:
    while len(view):
        num_written = os.pwrite(fd, view, offset)
        view, offset = view[num_written:], offset + num_written


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fdatasync(fd)
    finally:
        os.close(fd)


def make_cold(paths: Iterable[Path]) -> None:
    """Write the files out and have the kernel forget them. Raises MnemeError for one that it still has in memory."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)  # only clean pages can go
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
        share = cached_share(path)
        if share > _MAX_CACHED:
            raise MnemeError(f"{path}: {share:.0%} of it is still in memory: is its folder on a disk?")


def cached_share(path: Path) -> float:
    """How much of a file is in memory, as mincore(2) says; the map it needs is never read."""
    num_bytes, fd = path.stat().st_size, os.open(path, os.O_RDONLY)
    try:
        address = _libc.mmap(None, num_bytes, _READABLE, _SHARED, fd, 0)
    finally:
        os.close(fd)
    if address == _FAILED:
        raise OSError(ctypes.get_errno(), "mmap", str(path))
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    pages = ctypes.create_string_buffer(-(-num_bytes // page_bytes))
    try:
        if _libc.mincore(address, num_bytes, pages):
            raise OSError(ctypes.get_errno(), "mincore", str(path))
    finally:
        _libc.munmap(address, num_bytes)
    return sum(page & 1 for page in pages.raw) / len(pages)
