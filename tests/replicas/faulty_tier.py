"""Engines over real files that something happens to: what they answer and count, and that nothing of it stays."""

from __future__ import annotations

import gc
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mneme.cachetier.chunk.syscalls import Buffer, FileOperations
from mneme.cachetier.config import CacheConfig, DiskTierConfig
from mneme.cachetier.node.memory import ProcessMemory
from mneme.cachetier.node.offline import FolderView, Verifier
from mneme.cachetier.node.sources import ProcessChunkStore
from mneme.cachetier.policy.cost_model import CostModel
from mneme.replicas.engine.engine import BLOCKED_S, Engine
from mneme.replicas.engine.stats import engine_stats
from mneme.replicas.model.decoder import Decoder
from mneme.replicas.request import TokenEvent
from tests.cachetier.chunks import folder_bytes
from tests.replicas.chunk_stores import CHUNK_TOKENS
from tests.replicas.tiered_engine import answers, make_cached_engine, submit, usages

NUM_NEW = 6
CAPACITY_BYTES = 4 << 20
WAIT_S = 60.0  # that anything may take


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of some prompts."""

    tokens: dict[str, list[int]]
    cached: dict[str, int]  # tokens of the prompts that were not computed
    counters: Counter[str]  # of the engine, of the host tier, and of the disk tier


class HookedFiles(FileOperations):
    """Calls `on_read(path, offset)` before each read, `on_open(path)` before each open of a file to read."""

    def __init__(self) -> None:
        self.on_read: Callable[[str, int], object] = lambda path, offset: None
        self.on_open: Callable[[str], object] = lambda path: None

    def open_to_read(self, path: str) -> int:
        self.on_open(path)
        return super().open_to_read(path)

    def read(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        self.on_read(os.readlink(f"/proc/self/fd/{fd}"), offset)
        return super().read(fd, buffers, offset)


def config_of(folder: Path, *, host_bytes: int, capacity_bytes: int = CAPACITY_BYTES, **more: Any) -> CacheConfig:
    disk = DiskTierConfig(folder=str(folder), capacity_bytes=capacity_bytes)
    return CacheConfig(chunk_tokens=CHUNK_TOKENS, host_bytes=host_bytes, disk=disk, **more)


def run_bounded(engine: Engine) -> list[TokenEvent]:
    """All events until nothing is left to do; in a bounded time."""
    events: list[TokenEvent] = []
    until_s = time.monotonic() + WAIT_S
    while engine.scheduler.has_work:
        assert time.monotonic() < until_s, "the engine does not come to an end"
        if engine.is_blocked:
            time.sleep(BLOCKED_S)
            continue
        events += engine.step()
        engine.forest.check()
    return events


def ask(
    decoder: Decoder,
    folder: Path,
    prompts: dict[str, list[int]],
    *,
    is_reader: bool = False,
    files: FileOperations | None = None,
    memory: ProcessMemory | None = None,
    costs: CostModel | None = None,
    clock: Callable[[], float] = time.monotonic,
    when_open: Callable[[], object] = lambda: None,
    before_close: Callable[[], object] = lambda: None,
    **more: Any,
) -> Outcome:
    """Let an engine of its own answer, one prompt after the other; check that nothing of it stays but sound files.

    is_reader  it keeps nothing in memory and saves nothing: whatever it does not compute, it has from the disk
    when_open  what happens once the folder was listed
    """
    config = config_of(folder, host_bytes=0 if is_reader else 64 << 20, **more)
    with nothing_left_open():
        store = ProcessChunkStore(config, files=files, memory=memory, clock=clock)
        when_open()
        engine = make_cached_engine(decoder, store, costs=costs, config=config)
        events: list[TokenEvent] = []
        for name, ids in prompts.items():
            submit(engine, name, ids, NUM_NEW)
            events += run_bounded(engine)
        before_close()
        engine.close()
        check_rest(engine, folder, config)
        outcome = Outcome(
            tokens=answers(events),
            cached={name: usage.cached_tokens for name, usage in usages(events).items()},
            counters=counters_of(engine, store),
        )
        del engine, store, events
    return outcome


def counters_of(engine: Engine, store: ProcessChunkStore) -> Counter[str]:
    stats, found = store.node.stats(), Counter[str]()
    found.update({f"host_{name}": count for name, count in stats["host"].items()})
    found.update({f"disk_{name}": count for name, count in (stats["disk"] or {}).items()})
    cache = engine_stats(engine)["cache"]
    found.update({f"chunks_{name}": count for name, count in cache["chunks"].items()})
    found["retracted"] = cache["retracted"]
    for part in ("given_up", "plans", "store"):
        found.update({f"{part}_{name}": count for name, count in cache[part].items()})
    found["misses"] = sum(count for name, count in found.items() if name.startswith(("disk_miss", "host_miss")))
    return found


def check_rest(engine: Engine, folder: Path, config: CacheConfig) -> None:
    """Pages, buffers and bytes of an engine that has closed are back where they were."""
    check_engine(engine)
    check_folder(folder, config.disk.capacity_bytes)


def check_engine(engine: Engine) -> None:
    """Nothing of it is under way."""
    engine.forest.check()
    assert (engine.forest.device.num_in_use, engine.in_flight) == (0, {})
    connector = engine.connector
    assert connector.saver.num_bytes == 0
    deadline_s = time.monotonic() + 60.0  # a question that nobody answers ends by its own limit, behind the request
    while connector.loads.num_open and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert (connector.loads.num_open, connector.loads.budget.num_used) == (0, 0)


def check_folder(folder: Path, capacity_bytes: int = CAPACITY_BYTES) -> None:
    assert not list(folder.rglob("*.part"))
    assert folder_bytes(folder) <= capacity_bytes


def faults_in(folder: Path) -> int:
    """Files that are not sound, as `mneme cache verify` finds them; nobody has the folder."""
    view = FolderView(str(folder))
    verifier = Verifier(view)
    return sum(verifier.check(seen) is not None for seen in view.scan() if seen.name is not None)


@contextmanager
def nothing_left_open() -> Iterator[None]:
    """No descriptor is open behind this that was not before."""
    before = set(os.listdir("/proc/self/fd"))
    yield
    after = set(os.listdir("/proc/self/fd"))
    if len(after) > len(before):
        gc.collect()
        after = set(os.listdir("/proc/self/fd"))
    assert len(after) <= len(before), [os.readlink(f"/proc/self/fd/{fd}") for fd in after - before if _is_open(fd)]


def _is_open(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")
