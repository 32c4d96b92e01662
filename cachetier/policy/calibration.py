"""What a cost model starts from: edges measured on this machine, or the file that an earlier start has left.

Host: runs of bytes as large as a chunk are hashed, as a read of a chunk is, and copied, to the engine's device where it
has one. Disk: they are read from a scratch file in the tier's folder, which the page cache is asked to forget first.
Peers keep their defaults until they are read. These are first guesses, which soon give way to loads. This is the only
module of the folder that reads or writes files.
"""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from mneme.cachetier.chunk.syscalls import read_private, write_private
from mneme.cachetier.names import CostEdge
from mneme.cachetier.policy.cost_model import CostModel, Point
from mneme.errors import ConfigError

logger = logging.getLogger(__name__)

_MAX_FILES = 64  # in a folder: of models, and of settings that costs depend on
_VERSION = 1  # of the file; raised when the numbers of older files mean something else
_FORMAT = "mneme cost model"
SHARE_CONSTANTS = ("key_many", "head_many", "piece", "merge")  # of kernels for a GPU
# Reads: how many, and the share of all bytes that each has: so that bytes and chunks can be told apart.
_READS = ((1, 1 / 64), (1, 1 / 8), (8, 1 / 8), (1, 1.0), (8, 1 / 64))
_CHUNKS = 8  # that all bytes together are
_MAX_BYTES = 32 << 20  # of them
_HEADER_BYTES = 4096  # of a chunk, read on their own

Bring = Callable[[npt.NDArray[np.uint8]], object]
Read = Callable[[int, int], object]  # start and end, in bytes


class CostFile:
    """Keeps a cost model from one start to the next, for each model on each machine.

    machine     all that costs depend on beside the model, such as processors, devices and threads
    share_cost  the measured constants of `ShareCost`, by name; None: there are none
    """

    def __init__(self, folder: Path, fingerprint: bytes, machine: str) -> None:
        self.share_cost: dict[str, Any] | None = None
        self._whose = {"format": _FORMAT, "version": _VERSION, "model": fingerprint.hex(), "machine": machine}
        named = blake2b(fingerprint + machine.encode(), digest_size=12, person=b"mneme costs").hexdigest()
        self.path = folder / f"costs-{named}.json"

    def read(self, clock: Callable[[], float] = time.monotonic) -> CostModel | None:
        """Return what was learned before; None, with a warning, for a file that is broken or foreign."""
        try:
            found = read_private(self.path)
            if found is None:
                return None
            if not isinstance(found, dict) or any(found.get(key) != value for key, value in self._whose.items()):
                raise ValueError("it is of another model, machine or version")
            share_cost = found.get("share_cost")
            if share_cost is not None:
                share_cost = {str(name): float(value) for name, value in dict(share_cost).items()}
                is_sound = all(0 <= value < 1e12 for value in share_cost.values())
                if share_cost.keys() != set(SHARE_CONSTANTS) or not is_sound:
                    raise ValueError(f"share_cost: {share_cost}")
            self.share_cost = share_cost
            return CostModel.from_mapping(found.get("costs"), clock)
        except (OSError, ValueError, TypeError, ConfigError) as error:
            logger.warning("costs are measured anew, %s cannot be used: %s", self.path, error)
            return None

    def write(self, costs: CostModel) -> None:
        """Keep it if that is possible, and the newest of the others: what is not kept is measured again."""
        try:
            write_private(self.path, {**self._whose, "costs": costs.as_mapping(), "share_cost": self.share_cost})
        except OSError as error:
            logger.warning("costs are not kept, %s cannot be written: %s", self.path, error)
        with suppress(OSError):  # another process removes files, too
            kept = sorted(self.path.parent.glob("costs-*.json"), key=lambda path: path.stat().st_mtime)
            for path in kept[:-_MAX_FILES]:
                path.unlink()


def costs_in(content: Any, clock: Callable[[], float] = time.monotonic) -> CostModel | None:
    """The cost model in a file's JSON, of whatever model and machine; None if it is something else.

    Raises `ConfigError` for one of another version, or broken.
    """
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        return None
    if content.get("version") != _VERSION:
        raise ConfigError(f"cost model: version {content.get('version')!r}; this is version {_VERSION}")
    return CostModel.from_mapping(content.get("costs"), clock)


def measured_edges(
    chunk_bytes: int,
    disk_folder: Path | None = None,
    *,
    bring: Bring | None = None,
    budget_s: float = 1.0,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[CostEdge, list[Point]]:
    """Points with the terms (1, chunks, bytes); an edge that cannot be measured is not there.

    `bring`: takes what was read to the device; None: it is copied within this memory. `budget_s`: nothing is begun
    after it.
    """
    until_s = clock() + budget_s
    content = np.random.default_rng(0).bytes(min(_CHUNKS * chunk_bytes, _MAX_BYTES))
    buffer = memoryview(bytearray(content))

    def read_host(start: int, end: int) -> None:
        if bring is None:
            buffer[start:end] = content[start:end]
        else:
            bring(np.frombuffer(content, np.uint8)[start:end])
        xxhash.xxh3_128_digest(buffer[start:end])

    read_host(0, len(content))
    edges: dict[CostEdge, list[Point]] = {"host": _measure(read_host, len(content), until_s, clock)}
    if disk_folder is not None and clock() < until_s:
        try:
            edges["disk"] = _measured_disk(content, buffer, disk_folder, until_s, clock)
        except OSError as error:
            logger.warning("the disk's speed is a guess, %s cannot be written and read: %s", disk_folder, error)
    return {edge: points for edge, points in edges.items() if points}


def _measured_disk(
    content: bytes, buffer: memoryview, folder: Path, until_s: float, clock: Callable[[], float]
) -> list[Point]:
    """The file has no name, so nothing is left of it whatever happens."""
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        fd, view = file.fileno(), memoryview(content)
        step = max(len(content) // _CHUNKS, 1)
        for start in range(0, len(content), step):
            _write(fd, view[start : start + step])
            if clock() > until_s:  # too slow even to be asked
                return []
        os.fsync(fd)

        def forget() -> None:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

        def read(start: int, end: int) -> None:
            os.preadv(fd, [buffer[start : min(start + _HEADER_BYTES, end)]], start)
            at = start
            while at < end:
                count = os.preadv(fd, [buffer[at:end]], at)
                if not count:
                    raise OSError("the file is shorter than what was written")
                at += count
            xxhash.xxh3_128_digest(buffer[start:end])

        return _measure(read, len(content), until_s, clock, before=forget)


def _write(fd: int, view: memoryview) -> None:
    while view:
        view = view[os.write(fd, view) :]


def _measure(
    read: Read, num_bytes: int, until_s: float, clock: Callable[[], float], before: Callable[[], object] | None = None
) -> list[Point]:
    points: list[Point] = []
    for count, share in _READS:
        if points and clock() > until_s:
            break
        if before is not None:
            before()
        size = max(int(share * num_bytes), 1)
        started_s = clock()
        for index in range(count):
            read(index * size, (index + 1) * size)
        points.append(Point((1, count, count * size), max(clock() - started_s, 1e-9)))
    return points
