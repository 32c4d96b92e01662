"""The disk tier of a server that was told of none: one of its user's numbered folders, which no other server has."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress

from mneme.cache_folder import state_folder
from mneme.cachetier.chunk.syscalls import FileOperations, HeldLock, LockWaitingFiles, is_private_folder
from mneme.cachetier.config import DiskTierConfig
from mneme.cachetier.node.folder import LOCK, DiskFolder
from mneme.errors import ConfigError

_MAX_SERVERS = 16  # of one user on one machine, each with a folder
_FREE_SHARE = 0.1  # of what is free on the disk, for chunks, so that a full tier leaves nine tenths of the rest
_MOST_BYTES, _FEWEST_BYTES = 64 << 30, 512 << 20  # of chunks; on a disk with room for fewer there are none
_KEPT_S = 7 * 86_400.0  # that a folder waits for a server


def take_own_disk(held: ExitStack, say: Callable[[str], object]) -> DiskTierConfig | None:
    """Return a disk tier that no other server has until `held` is closed; None if there can be none.

    It is the first folder that no server has: the next one after this, of this or another model, finds what this one
    wrote. Folders that none has had for a week are removed, as nobody can delete what lies there by a request.

    say  is told why there is none, but of `XDG_STATE_HOME=/dev/null`, which asks for that
    """
    base = None
    try:
        base = str(state_folder())
        os.makedirs(base, 0o700, exist_ok=True)
        if not is_private_folder(os.lstat(base)):
            raise PermissionError(0, f"{base} is a link or another user's, or others may write to it")
        config = _take(base, held)
        _remove_abandoned(base)
    except OSError as error:
        if base is None or not base.startswith(f"{os.devnull}/"):
            say(f"nothing is written to a disk, and a restart starts cold: {error.strerror or error}")
        return None
    return config


def _take(base: str, held: ExitStack) -> DiskTierConfig:
    files: FileOperations = LockWaitingFiles()  # a server that was killed may have the first one for a moment
    why = f"{_MAX_SERVERS} servers of this user have one each"
    for number in range(_MAX_SERVERS):
        path = os.path.join(base, f"kv-{number}")
        with ExitStack() as candidate:
            try:
                os.makedirs(path, 0o700, exist_ok=True)
                candidate.callback(HeldLock(FileOperations(), os.path.join(path, LOCK)).close)
                DiskFolder(path, files).close()
            except BlockingIOError:
                continue
            except ConfigError as error:
                why, files = str(error), FileOperations()
                continue
            os.utime(path)
            there = shutil.disk_usage(base).free + _what_is_in(path)[0]
            capacity = min(int(_FREE_SHARE * there), _MOST_BYTES)
            if capacity < _FEWEST_BYTES:
                raise OSError(0, f"the disk of {base} is nearly full")
            held.push(candidate.pop_all())
            return DiskTierConfig(folder=path, capacity_bytes=capacity)
    raise OSError(0, why)


def _what_is_in(path: str) -> tuple[int, float]:
    """Bytes, and when the newest file was written; the folder itself counts as a file."""
    num_bytes, newest_s = 0, os.lstat(path).st_mtime
    for folder, _, names in os.walk(path):
        for name in names:
            with suppress(OSError):
                status = os.lstat(os.path.join(folder, name))
                num_bytes, newest_s = num_bytes + status.st_size, max(newest_s, status.st_mtime)
    return num_bytes, newest_s


def _remove_abandoned(base: str) -> None:
    for number in range(_MAX_SERVERS):
        path = os.path.join(base, f"kv-{number}")
        with suppress(OSError, ConfigError), ExitStack() as held:
            if time.time() - _what_is_in(path)[1] < _KEPT_S:
                continue
            held.callback(HeldLock(FileOperations(), os.path.join(path, LOCK)).close)
            DiskFolder(path, FileOperations()).close()  # nor has a process that a server left behind
            shutil.rmtree(path)
