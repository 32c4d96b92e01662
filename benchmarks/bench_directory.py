"""The directory and the index of a disk at a million chunks: bytes, lookups, and how soon they are whole again.

    python benchmarks/bench_directory.py [--quick] [--chunks 1000000] [--folder DIR] [--seed 0] [--out DIR]

*Directory*: one shard that a node has told of all its chunks, in announcements of 1,000. Bytes of a chunk are the
growth of the process. A lookup asks for 1, 16 or 256 keys at once, neighbours in a sequence, in this process. Rebuilt:
an empty shard is told everything by the node's announcer.

*Disk*: a tier that starts over a folder of so many files with valid names and sizes and no content, which is not read;
made by this run, so the system may have their names in memory. All of them must be found.

What bounds it, one thread: Python dictionaries and integers; for the disk one `stat` for each file.
"""

from __future__ import annotations

import gc
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

from harness import PartResult, Run, at_most, options_of

from mneme.cachetier.chunk.keys import LineageKind
from mneme.cachetier.config import CacheConfig, DiskTierConfig
from mneme.cachetier.distributed.announcer import BATCH_CHANGES, Announcer
from mneme.cachetier.distributed.directory import Announcement, Directory, Reply
from mneme.cachetier.node.disk import make_disk_tier
from mneme.cachetier.node.folder import OWN_FOLDER, ChunkName, folder_of, folders
from mneme.cachetier.node.index import Change

NUM_CHUNKS, QUICK_CHUNKS = 1_000_000, 100_000
BATCHES = (1, 16, 256)  # keys of a lookup
CHAIN = 16  # chunks of one sequence
CHUNK_BYTES = 1 << 20
NODE = "n" * 56  # as long as Ray's names of nodes
MAX_BYTES, MAX_REBUILD_S = 200, 30.0


def key(number: int) -> bytes:
    return blake2b(number.to_bytes(8, "little"), digest_size=16).digest()


def changes(num_chunks: int) -> Iterator[Change]:
    return (Change(key(number), "disk", CHUNK_BYTES, True) for number in range(num_chunks))


def rss_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def measured_bytes(num_chunks: int) -> float:
    """Measure how this process grows for each chunk that a shard knows."""
    before, directory = rss_bytes(), Directory()
    told = changes(num_chunks)
    for seq, start in enumerate(range(0, num_chunks, BATCH_CHANGES)):
        part = [next(told) for _ in range(min(BATCH_CHANGES, num_chunks - start))]
        is_last = start + BATCH_CHANGES >= num_chunks
        directory.announce(Announcement(node=NODE, epoch=1, seq=seq, changes=part, is_first=not seq, is_last=is_last))
    assert directory.stats()["num_keys"] == num_chunks
    return (rss_bytes() - before) / num_chunks


def rebuilt_s(num_chunks: int, send: Callable[[int, Announcement], Reply | None]) -> float:
    """Until a shard that knew nothing was told everything."""
    announcer = Announcer(NODE, 1, lambda: changes(num_chunks), send, epoch=1)
    started_s = time.perf_counter()
    announcer.shards[0].step()
    return time.perf_counter() - started_s


def lookup_rows(directory: Directory, num_chunks: int, num_lookups: int, seed: int) -> list[dict[str, Any]]:
    """Batches of all sizes take turns."""
    rng = random.Random(seed)
    times: dict[int, list[float]] = {batch: [] for batch in BATCHES}
    for _ in range(num_lookups):
        for batch, taken in times.items():
            first = rng.randrange(num_chunks - batch)
            keys = [key(number) for number in range(first, first + batch)]
            started_s = time.perf_counter()
            found = directory.lookup(keys)
            taken.append((time.perf_counter() - started_s) * 1e3)
            assert sum(map(bool, found)) == batch, "a key was not found"
    return [
        {"keys": batch, "p50 ms": statistics.median(taken), "p99 ms": statistics.quantiles(taken, n=100)[98]}
        for batch, taken in times.items()
    ]


def make_files(folder: Path, num_chunks: int) -> None:
    """Chunks' names on files without blocks."""
    root = folder / OWN_FOLDER
    for name in ("", *folders()):
        (root / name).mkdir(mode=0o700)
    for number in range(num_chunks):
        parent = key(number - 1) if number % CHAIN else bytes(16)
        name = ChunkName(key(number), parent, bytes(8), bytes(8), LineageKind.PREFIX, 256, CHUNK_BYTES)
        with (root / folder_of(name.key) / str(name)).open("wb") as file:
            file.truncate(CHUNK_BYTES)


def disk_row(folder: Path, num_chunks: int) -> dict[str, Any]:
    """A tier's start over these files."""
    made_s = time.perf_counter()
    make_files(folder, num_chunks)
    disk = DiskTierConfig(folder=str(folder), capacity_bytes=2 * num_chunks * CHUNK_BYTES, max_files=2 * num_chunks)
    before, started_s, cpu_started_s = rss_bytes(), time.perf_counter(), time.process_time()
    tier = make_disk_tier(CacheConfig(disk=disk))
    seconds, cpu_s = time.perf_counter() - started_s, time.process_time() - cpu_started_s
    assert tier is not None
    found = tier.stats()
    assert (found["chunks"], found.get("scan_removed", 0)) == (num_chunks, 0)
    used = (rss_bytes() - before) / num_chunks
    tier.close()
    return {
        "what": "disk, files",
        "chunks": num_chunks,
        "s": seconds,
        "cpu s": cpu_s,  # of other processes nothing
        "bytes": used,
        "made in s": started_s - made_s,
    }


def main() -> None:
    parser = options_of(__doc__, quick=f"{QUICK_CHUNKS:,} chunks; at most 90 s on 2 cores", out=True, folder=True)
    parser.add_argument("--chunks", type=int, default=NUM_CHUNKS)
    args = parser.parse_args()
    num_chunks, num_lookups = (min(args.chunks, QUICK_CHUNKS), 500) if args.quick else (args.chunks, 5000)
    run = Run("directory", args, chunks=num_chunks)
    num_bytes = measured_bytes(num_chunks)
    directory = Directory(clock=lambda: 0.0)
    own_s = rebuilt_s(num_chunks, lambda _number, said: directory.announce(said))
    rows = lookup_rows(directory, num_chunks, num_lookups, args.seed)
    rebuilds = [{"what": "directory", "chunks": num_chunks, "s": own_s, "bytes": num_bytes}]
    with tempfile.TemporaryDirectory(prefix="mneme-", dir=args.folder) as folder:
        rebuilds.append(disk_row(Path(folder), num_chunks))
    checks = [
        at_most("directory_bytes_per_chunk", num_bytes, MAX_BYTES, "bytes"),
        at_most("disk_index_s_per_million_files", rebuilds[-1]["s"] * 1_000_000 / num_chunks, MAX_REBUILD_S, "s"),
    ]
    parts = [
        PartResult(name="lookups", title=f"one shard, {num_chunks:,} keys", rows=rows),
        PartResult(
            name="rebuilt", title="whole again, and bytes of memory for each chunk", rows=rebuilds, checks=checks
        ),
    ]
    run.end({run.show(part).name: part.rows for part in parts})


if __name__ == "__main__":
    main()
