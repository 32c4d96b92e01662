"""A disk tier's folder as an administrator sees it: read beside a running tier, without its lock.

Nothing here trusts a name or follows a link, and nothing is kept of what was seen, so memory does not grow with the
number of files. What a running tier does meanwhile is seen or not: a file may be gone when it is opened.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import NamedTuple

from mneme.cachetier.chunk.file import ChunkReader, open_chunk
from mneme.cachetier.chunk.misses import Miss
from mneme.cachetier.chunk.syscalls import FileOperations, is_private_folder
from mneme.cachetier.node.disk_folder import LOCK, OWN_FOLDER, Kind, kind_of
from mneme.cachetier.node.disk_names import ChunkName, folders, name_of
from mneme.errors import ConfigError


class SeenFile(NamedTuple):
    """An entry of the folder; of a chunk it has the name in parts."""

    kind: Kind
    path: str
    num_bytes: int
    time_s: float  # wall clock: of the last use, to about a minute
    name: ChunkName | None  # of chunks and torn ones


class FolderView:
    """Raises `ConfigError` if there is no tier's folder in `path`, or if others may write to it."""

    def __init__(self, path: str, files: FileOperations | None = None) -> None:
        self.files = files or FileOperations()
        self._path, self._root = path, os.path.join(path, OWN_FOLDER)
        try:
            status = self.files.status_of(self._root)
        except OSError as error:
            raise ConfigError(f"folder: {path} holds no disk tier ({error.strerror})") from None
        if not is_private_folder(status):
            raise ConfigError(f"folder: {self._root} must be a folder of this user that nobody else may write to")

    def scan(self) -> Iterator[SeenFile]:
        """Every file that lies where chunks do, in no order. Opens none."""
        for folder in folders():
            path = os.path.join(self._root, folder)
            try:
                for text, status in self.files.walk_folder(path):
                    kind, name = kind_of(folder, text, status)
                    yield SeenFile(kind, os.path.join(path, text), status.st_size, status.st_mtime, name)
            except FileNotFoundError:
                continue
            except NotADirectoryError:  # a link in a folder's place, too
                yield SeenFile(Kind.NOT_OURS, path, 0, 0.0, None)
            except OSError as error:
                raise ConfigError(f"folder: {path} cannot be read ({error.strerror})") from error

    def open(self, seen: SeenFile) -> ChunkReader | Miss:
        """The chunk's header, which says the same as its name; to be closed."""
        reader = open_chunk(self.files, seen.path)
        if isinstance(reader, Miss) or name_of(reader.header, seen.num_bytes) == seen.name:
            return reader
        reader.close()
        return Miss.OTHER_KEY

    def remove(self, seen: SeenFile) -> bool:
        """Whether it is gone. Only of files that bear one of our names and are ours, and under the lock."""
        assert seen.kind in (Kind.CHUNK, Kind.TORN, Kind.TEMPORARY)
        try:
            self.files.unlink(seen.path)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Nobody else may use the folder meanwhile; raises `ConfigError` if somebody does."""
        try:
            lock = self.files.lock(os.path.join(self._root, LOCK))
        except BlockingIOError:
            rule = "a running cluster uses it; stop that first, or ask it with DELETE /v1/kv"
            raise ConfigError(f"folder: {self._path} is locked: {rule}") from None
        except OSError as error:
            raise ConfigError(f"folder: {self._path} cannot be locked ({error.strerror})") from error
        try:
            yield
        finally:
            self.files.close(lock)
