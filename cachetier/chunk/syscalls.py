"""Every call of the disk tier to the file system, of which tests make the k-th fail; and small private files.

In private files a process remembers what it measured: they are believed only if nobody else may have written them.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a FIFO in a file's place must not block us
_CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_LOCK_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
_LOCK_PAUSE_S = 0.05
_MAX_BYTES = 1 << 20  # of a private file

Buffer = bytearray | memoryview


class FileOperations:
    """Thin: each method is one call, raises OSError, and follows no link in the last part of a path."""

    lock_wait_s = 0.0  # for somebody to release a lock

    def open_to_read(self, path: str) -> int:
        return os.open(path, _READ_FLAGS)

    def create(self, path: str) -> int:
        """A new file, for the owner alone; it must not be there."""
        return os.open(path, _CREATE_FLAGS, 0o600)

    def close(self, fd: int) -> None:
        os.close(fd)

    def status(self, fd: int) -> os.stat_result:
        return os.fstat(fd)

    def read(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        """Into the buffers, one after the other; how many bytes, 0 at the file's end."""
        return os.preadv(fd, list(buffers), offset)

    def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.pwritev(fd, list(buffers), offset)

    def rename(self, source: str, target: str) -> None:
        os.rename(source, target)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def touch(self, path: str) -> None:
        """Set the time of the last change to now."""
        os.utime(path, follow_symlinks=False)

    def make_folder(self, path: str) -> None:
        """Make a folder for its owner alone; one of ours that nobody else may write to may be there."""
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            if not is_private_folder(os.lstat(path)):
                raise PermissionError(0, "must be a folder of this user that nobody else may write to", path) from None

    def list_folder(self, path: str) -> list[tuple[str, os.stat_result]]:
        """Names and what is known of each without following links; what vanishes meanwhile is left out."""
        return list(self.walk_folder(path))

    def walk_folder(self, path: str) -> Iterator[tuple[str, os.stat_result]]:
        """The same, one by one: a folder may hold more than fits into memory."""
        fd = os.open(path, _FOLDER_FLAGS)
        try:
            with os.scandir(fd) as entries:
                for entry in entries:
                    try:
                        yield entry.name, entry.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue
        finally:
            os.close(fd)

    def status_of(self, path: str) -> os.stat_result:
        """Status of a file, a folder or a link itself."""
        return os.lstat(path)

    def lock(self, path: str) -> int:
        """A descriptor that holds the lock until it is closed or its process ends; BlockingIOError: someone has it."""
        fd = os.open(path, _LOCK_FLAGS, 0o600)
        try:
            self._await_lock(fd, time.monotonic() + self.lock_wait_s)
        except OSError:
            os.close(fd)
            raise
        return fd

    def _await_lock(self, fd: int, deadline_s: float) -> None:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline_s:
                    raise
                time.sleep(_LOCK_PAUSE_S)
            else:
                return


class HeldLock:
    """A lock of a folder, until it is closed; raises as `FileOperations.lock` does."""

    def __init__(self, files: FileOperations, path: str) -> None:
        self._files = files
        self._fd: int | None = files.lock(path)

    def close(self) -> None:
        """Release the lock. Called twice it does nothing: its descriptor may be another's by then."""
        fd, self._fd = self._fd, None
        if fd is not None:
            with suppress(OSError):
                self._files.close(fd)


class LockWaitingFiles(FileOperations):
    """Waits for locks a while: a process that was ended may hold its own for another moment."""

    lock_wait_s = 10.0


def is_ours(status: os.stat_result) -> bool:
    """A plain file of this user."""
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()


def is_private_folder(status: os.stat_result) -> bool:
    """A folder of this user that nobody else may write to."""
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o022


class NotPrivate(ValueError):
    """The file is a link or another user's, or others may write to it."""


def read_private(path: Path) -> Any:
    """The JSON in a file; None if there is no such file. Raises OSError, or ValueError (`NotPrivate`)."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    with open(fd, "rb") as file:
        status = os.fstat(fd)
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o022 or not stat.S_ISREG(status.st_mode):
            raise NotPrivate(f"{path}: another user's, or others may write to it")
        try:
            return json.loads(file.read(_MAX_BYTES))
        except RecursionError as error:
            raise ValueError(f"{path}: nested too deeply") from error


def write_private(path: Path, content: Any) -> None:
    """Put JSON in the place of the file, whole or not at all. Raises OSError."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with open(fd, "w") as file:
            json.dump(content, file)
        os.replace(temporary, path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise
