"""The kernel's page cache of a file: dropped, and looked at."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from pathlib import Path

from mneme.errors import MnemeError

_READABLE, _SHARED, _FAILED = 1, 1, ctypes.c_void_p(-1).value
_MAX_CACHED = 0.01  # of a file that counts as cold

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_longlong)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)


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
