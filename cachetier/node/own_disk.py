"""The disk tier of a server that was told of none: one of its user's numbered folders, which no other server has."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress

from mneme.cache_folder import state_folder
from mneme.cachetier.chunk.syscalls import FileOperations, HeldLock, LockWaitingFiles, is_private_folder
from mneme.cachetier.config import DiskTierConfig
from mneme.cachetier.node.folder import LOCK, OWN_FOLDER, DiskFolder
from mneme.errors import ConfigError

_MAX_SERVERS = 16  # of one user on one machine, each with a folder
_FREE_SHARE = 0.1  # of what is free on the disk, for chunks, so that a full tier leaves nine tenths of the rest
_MOST_BYTES, _FEWEST_BYTES = 64 << 30, 512 << 20  # of chunks; on a disk with room for fewer there are none
_KEPT_S = 7 * 86_400.0  # that a folder waits for a server
_GONE = re.compile(r"kv-\d+\.gone-\d+")


def take_own_disk(held: ExitStack, say: Callable[[str], object]) -> DiskTierConfig | None:
    """Return a disk tier that no other server has until `held` is closed; None if there can be none.

    It is the first folder that no server has: the next one after this, of this or another model, finds what this one
    wrote. Folders that none has had for a week are removed, as nobody can delete what lies there by a request.

    say  is told why there is none, but of `XDG_STATE_HOME=/dev/null`, which asks for that
    """
    base = ""
    try:
        base = str(state_folder())
        os.makedirs(base, 0o700, exist_ok=True)
        if not is_private_folder(os.lstat(base)):
            raise PermissionError(0, "it is a link or another user's, or others may write to it")
        try:
            return _take(base, held)
        finally:
            _remove_abandoned(base)
    except OSError as error:
        if not base.startswith(f"{os.devnull}/"):
            say(
                f"nothing is written to a disk, and a restart starts cold: {base}: {error.strerror or error}"
                " (--set cache.disk.folder=FOLDER names another, cache.disk=null none)"
            )
        return None


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
            capacity = min(int(_FREE_SHARE * (shutil.disk_usage(base).free + _num_bytes(path))), _MOST_BYTES)
            if capacity < _FEWEST_BYTES:
                raise OSError(0, "the disk is nearly full")
            candidate.callback(_touch, path)  # its week begins when it is given back, or was taken
            _touch(path)
            held.push(candidate.pop_all())
            return DiskTierConfig(folder=path, capacity_bytes=capacity)
    raise OSError(0, why)


def _touch(path: str) -> None:
    with suppress(OSError):
        os.utime(path)


def _num_bytes(path: str) -> int:
    found = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with suppress(OSError):
                found += os.lstat(os.path.join(folder, name)).st_size
    return found


def _newest_s(path: str) -> float:
    """When it was last taken, given back or written to: a file that comes or goes is seen at its folder."""
    with os.scandir(path) as outer, os.scandir(os.path.join(path, OWN_FOLDER)) as inner:
        return max(os.lstat(each).st_mtime for each in (path, *outer, *inner))


def _remove_abandoned(base: str) -> None:
    """Remove what no server has had for a week, and what was left of such a folder.

    It gets another name under its locks, so that a server which starts meanwhile makes a folder of its own. A clock
    that was put forward by more than the week makes all but this server's look abandoned.
    """
    with suppress(OSError), os.scandir(base) as entries:
        names = [entry.name for entry in entries]
        for name in names:
            path = os.path.join(base, name)
            if _GONE.fullmatch(name):
                shutil.rmtree(path, ignore_errors=True)
            elif re.fullmatch(r"kv-\d+", name) and is_private_folder(os.lstat(path)):  # what a link leads to stays
                with suppress(OSError, ConfigError), ExitStack() as locks:
                    if time.time() - _newest_s(path) < _KEPT_S:
                        continue
                    locks.callback(HeldLock(FileOperations(), os.path.join(path, LOCK)).close)
                    locks.callback(HeldLock(FileOperations(), os.path.join(path, OWN_FOLDER, LOCK)).close)
                    gone = f"{path}.gone-{os.getpid()}"
                    os.rename(path, gone)
                    shutil.rmtree(gone, ignore_errors=True)
