"""The files of session logs: one folder, one lock, a file for each session.

The folder is ours, beside the disk tier's inside the one that was given. What does not carry one of our names is never
touched, nor is a link or another user's file that carries one.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
from collections import Counter
from contextlib import suppress
from typing import NamedTuple

from mneme.cachetier.chunk.syscalls import FileOperations, HeldLock, is_ours
from mneme.cachetier.sessions.store import MAX_LOG_BYTES, LogKey
from mneme.errors import ConfigError

_OWN_FOLDER = "mneme-sessions-1"  # 1: of the names
_LOCK = "lock"
_NAME = re.compile(r"([0-9a-f]{32})-([0-9a-f]{16})\.log")
_TEMPORARY = re.compile(r"[0-9a-f]{32}\.[0-9]{1,19}\.part")


class FoundLog(NamedTuple):
    written_s: float  # wall clock
    key: LogKey
    num_bytes: int


class SessionLogFolder:
    """Raises `ConfigError` if the folder cannot be used, or if somebody else uses it."""

    def __init__(self, path: str, files: FileOperations, *, sync: bool) -> None:
        self._files, self._sync = files, sync
        self._root = os.path.join(path, _OWN_FOLDER)
        self._numbers = itertools.count()
        try:
            files.make_folder(self._root)
            self._lock = HeldLock(files, os.path.join(self._root, _LOCK))
        except BlockingIOError:
            raise ConfigError(f"session logs: {path} is in use by another cluster") from None
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise ConfigError(f"session logs: {path} cannot be used ({reason})") from error

    def scan(self, counters: Counter[str]) -> list[FoundLog]:
        """Logs by when they were written; removes what a crash left. Reads no file."""
        found: list[FoundLog] = []
        try:
            listed = self._files.list_folder(self._root)
        except OSError:
            counters["scan_error"] += 1
            return []
        for text, status in listed:
            key = _parsed(text)
            if key is None and not _TEMPORARY.fullmatch(text):
                counters["scan_unknown"] += text != _LOCK
            elif not is_ours(status):
                counters["scan_not_ours"] += 1
            elif key is not None:
                found.append(FoundLog(status.st_mtime, key, status.st_size))
            else:
                counters["scan_removed"] += 1
                with suppress(OSError):
                    self._files.unlink(os.path.join(self._root, text))
        return sorted(found)

    def read(self, key: LogKey) -> bytes | None:
        """All of a log; None if there is none that is ours. Raises OSError."""
        try:
            fd = self._files.open_to_read(self._path(key))
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno == errno.ELOOP:  # a link
                return None
            raise
        try:
            status = self._files.status(fd)
            if not is_ours(status) or status.st_size > MAX_LOG_BYTES:
                return None
            content = bytearray(status.st_size)
            at = 0
            while at < len(content) and (count := self._files.read(fd, [memoryview(content)[at:]], at)):
                at += count
            return bytes(memoryview(content)[:at])
        finally:
            with suppress(OSError):
                self._files.close(fd)

    def append(self, key: LogKey, content: bytes, at: int) -> None:
        """Behind the first `at` bytes of a log; raises OSError, also if it is not ours or shorter than that."""
        fd = self._files.open_to_write(self._path(key))
        try:
            status = self._files.status(fd)
            if not is_ours(status) or status.st_size < at:
                raise FileNotFoundError(0, "is not the log that it was")
            try:
                self._write(fd, content, at)
            except OSError:
                with suppress(OSError):
                    self._files.truncate(fd, at)
                raise
        finally:
            self._files.close(fd)

    def cut(self, key: LogKey, num_bytes: int) -> None:
        """What lies behind the first bytes of a log goes, if it can; the log is as old as before."""
        with suppress(OSError):
            fd = self._files.open_to_write(self._path(key))
            try:
                status = self._files.status(fd)
                if is_ours(status) and status.st_size > num_bytes:
                    self._files.truncate(fd, num_bytes)
                    self._files.set_time(fd, status.st_mtime_ns)
            finally:
                self._files.close(fd)

    def write_new(self, key: LogKey, content: bytes) -> str:
        """All of a log, to be renamed to it or discarded; its path. Raises OSError, and there is nothing then."""
        temporary = os.path.join(self._root, f"{key.name.hex()}.{next(self._numbers)}.part")
        try:
            fd = self._files.create(temporary)
            try:
                self._write(fd, content, 0)
            finally:
                self._files.close(fd)
        except OSError:
            self.discard(temporary)
            raise
        return temporary

    def rename(self, temporary: str, key: LogKey) -> None:
        """Raises OSError, and the log is as before then."""
        try:
            self._files.rename(temporary, self._path(key))
        except OSError:
            self.discard(temporary)
            raise

    def discard(self, temporary: str) -> None:
        with suppress(OSError):
            self._files.unlink(temporary)

    def sync_names(self) -> None:
        """Without this a log that is new or replaced may be as before when the power fails. Raises OSError."""
        if self._sync:
            self._files.sync_folder(self._root)

    def remove(self, key: LogKey) -> None:
        """Raises OSError, but not if there is none."""
        with suppress(FileNotFoundError):
            self._files.unlink(self._path(key))

    def close(self) -> None:
        """Let the lock go; twice is as once."""
        self._lock.close()

    def _write(self, fd: int, content: bytes, at: int) -> None:
        view = memoryview(content)
        while view:
            count = self._files.write(fd, [view], at)
            if not count:
                raise OSError("nothing was written")
            view, at = view[count:], at + count
        if self._sync:
            self._files.sync(fd)

    def _path(self, key: LogKey) -> str:
        return os.path.join(self._root, f"{key.name.hex()}-{key.owner.hex()}.log")


def _parsed(text: str) -> LogKey | None:
    match = _NAME.fullmatch(text)
    return None if match is None else LogKey(*(bytes.fromhex(part) for part in match.groups()))
