"""A disk tier's folder as an administrator sees it, beside a running tier and without its lock (`mneme cache`).

Nothing here trusts a name or follows a link. What a running tier does meanwhile is seen or not: a file may be gone when
it is opened. Memory does not grow with the number of files.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from mneme.cachetier.chunk.file import ChunkReader, open_chunk
from mneme.cachetier.chunk.syscalls import FileOperations, is_private_folder
from mneme.cachetier.names import Miss
from mneme.cachetier.node.folder import LOCK, OWN_FOLDER, ChunkName, Kind, folders, kind_of, name_of
from mneme.cachetier.node.index import BLOCK_BYTES, blocks_of
from mneme.errors import ConfigError

MAX_GROUPS = 1000  # tenants or models that are told apart; more are one group
AGES_S = {"1m": 60.0, "1h": 3600.0, "1d": 86400.0, "7d": 7 * 86400.0}
_OTHERS = "others"
_BUFFER_BYTES = 4 << 20
_MAX_HEADER_TRIES = 8  # per model, until a sound one says how long its full chunks are


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
        """Return whether it is gone. Only of files that bear one of our names and are ours, and under the lock."""
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


@dataclass(slots=True)
class Sum:
    """Counts some chunks and their bytes."""

    num_chunks: int = 0
    num_tokens: int = 0
    num_bytes: int = 0  # of files

    def add(self, name: ChunkName) -> None:
        self.num_chunks += 1
        self.num_tokens += name.num_tokens
        self.num_bytes += name.num_bytes

    def shown(self) -> dict[str, int]:
        return {"chunks": self.num_chunks, "tokens": self.num_tokens, "bytes": self.num_bytes}


class Totals:
    """Sums by lineage, tenant, model and age."""

    def __init__(self, view: FolderView) -> None:
        self._view = view
        self._total = Sum()
        self._groups: dict[str, dict[str, Sum]] = {"lineages": {}, "tenants": {}, "models": {}}
        self._ages = dict.fromkeys((*AGES_S, "older"), 0)
        self._num_blocks = self._num_tails = self._num_unknown = 0
        self._full: dict[bytes, int] = {}  # tokens of a model's full chunks
        self._tries: Counter[bytes] = Counter()

    def add(self, seen: SeenFile, now_s: float) -> None:
        name = seen.name
        assert name is not None
        self._total.add(name)
        self._num_blocks += blocks_of(name.num_bytes)
        self._sum("lineages", name.kind.name.lower()).add(name)
        self._sum("tenants", name.tenant.hex()).add(name)
        self._sum("models", name.model.hex()).add(name)
        age_s = max(0.0, now_s - seen.time_s)  # a clock that jumped makes nothing younger than now
        self._ages[next((text for text, bound in AGES_S.items() if age_s < bound), "older")] += 1
        full = self._full_tokens(seen, name)
        self._num_unknown += full is None
        self._num_tails += full is not None and name.num_tokens < full

    def shown(self) -> dict[str, Any]:
        models = {text: group.shown() for text, group in self._groups["models"].items()}
        for model, num_tokens in self._full.items():
            if model.hex() in models:
                models[model.hex()]["chunk_tokens"] = num_tokens
        return {
            **self._total.shown(),
            "disk_bytes": self._num_blocks * BLOCK_BYTES,
            "tail_chunks": self._num_tails,
            "unreadable_chunks": self._num_unknown,  # of models whose headers could not be read
            "lineages": {text: group.shown() for text, group in self._groups["lineages"].items()},
            "tenants": {text: group.shown() for text, group in self._groups["tenants"].items()},
            "models": models,
            "ages": self._ages,
        }

    def _sum(self, group: str, text: str) -> Sum:
        sums = self._groups[group]
        if text not in sums and len(sums) >= MAX_GROUPS:
            text = _OTHERS
        return sums.setdefault(text, Sum())

    def _full_tokens(self, seen: SeenFile, name: ChunkName) -> int | None:
        """Read the tokens of a full chunk from one sound header of each model."""
        full = self._full.get(name.model)
        if full is not None or len(self._tries) > MAX_GROUPS or self._tries[name.model] >= _MAX_HEADER_TRIES:
            return full
        self._tries[name.model] += 1
        reader = self._view.open(seen)
        if isinstance(reader, Miss):
            return None
        with reader:
            return self._full.setdefault(name.model, reader.header.layout.chunk_tokens)


class Verifier:
    """Reads whole files, and says what is wrong with each."""

    def __init__(self, view: FolderView) -> None:
        self.checked = Sum()
        self.num_gone = 0  # evicted before they were read
        self.faults: Counter[str] = Counter()
        self._view, self._buffer = view, memoryview(bytearray(_BUFFER_BYTES))

    def check(self, seen: SeenFile) -> Miss | None:
        """None: every checksum is right, or the file is gone."""
        miss = self._read(seen) if seen.kind is Kind.CHUNK else _fault_of_kind(seen)
        if miss is Miss.ABSENT:
            self.num_gone += 1
            return None
        if seen.name is not None and miss is None:
            self.checked.add(seen.name)
        if miss is not None:
            self.faults[miss.value] += 1
        return miss

    def _read(self, seen: SeenFile) -> Miss | None:
        reader = self._view.open(seen)
        if isinstance(reader, Miss):
            return reader
        with reader:
            return reader.check(self._buffer)


def _fault_of_kind(seen: SeenFile) -> Miss:
    if seen.kind is Kind.NOT_OURS or seen.name is None:
        return Miss.NOT_OURS
    return Miss.SHORT if seen.num_bytes != seen.name.num_bytes else Miss.OTHER_KEY
