"""What each edge of the cache tier carries: bytes per second, milliseconds per chunk, beside plain copies and reads.

    python benchmarks/bench_tier_io.py [--quick] [--rounds 15] [--shape 8x128] [--folder DIR] [--no-store] [--out DIR]

Chunks of 256 tokens in bfloat16, of 32 layers with 8 KV heads of 128 (33.6 MB) and of the embedded model (0.8 MB):

- device<->host: a chunk's layers into a pool's pages of 16 tokens, in random order, and out of them; on a CPU both are
  host memory. Beside a copy of the same bytes.
- host: out of plain memory into one buffer, with and without checksums; a put makes a chunk. Then the tier that a
  cluster's engines have (`start_cache_tier`): another process of this node has put the chunks, and they are read as
  engines do (`Loads`): located, then the first layers of all chunks before the second ones. `store`: puts as an
  engine saves, some chunks under way.
- peer: the same chunks, put by processes on one or two other nodes of a cluster on this machine. Beside what Ray
  transfers of the same bytes between two nodes, all of it under way at once, as objects of 4 MB (`raw Ray`).
- disk: chunks through `DiskTier`, checksums on, whole or layer by layer, beside one plain file of the same bytes, read
  from its beginning to its end. Cold: written out, dropped with posix_fadvise, and mincore finds nothing of it.

Chunks of the store are put afresh before each round, so that no object was looked at before. `share` is the rate as a
share of the arm that `of` names, the median over the rounds; arms take turns. GB/s counts a chunk's payload once. What
bounds it: memory bandwidth of one thread, the checksum (XXH3, one more read), the disk. Asking the kernel for what
comes next (POSIX_FADV_WILLNEED) made cold reads slower by two fifths: what it then allocates are single pages, where
its own readahead takes large ones. So the tier gives no hints.
"""

from __future__ import annotations

import os
import secrets
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from cache_engines import make_cold
from harness import PartResult, Run, at_least, median_ratio, options_of, take_turns

from mneme.cachetier.chunk.fingerprint import ChunkLayout, ModelFingerprint
from mneme.cachetier.chunk.header import Chunk, ExpectedChunk, U8Array, checksum, make_chunk
from mneme.cachetier.chunk.keys import Lineage, prefix_lineage
from mneme.cachetier.config import DiskTierConfig
from mneme.cachetier.names import Miss
from mneme.cachetier.node.disk import DiskTier, Put
from mneme.cachetier.policy.eviction import LruPolicy
from mneme.errors import MnemeError
from mneme.kernels.native.kv import IntArray, gather_chunk, scatter_chunk

QUICK_ROUNDS = 3
COLD_ROUNDS = 3  # as many times more than elsewhere: a disk is less even than memory
MAX_WRITE_ROUNDS = 5
STORE_BYTES = 1 << 30  # of each node
RAY_ENVIRONMENT = {  # which Ray reads when it is imported
    "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
}  # fmt: skip
TARGETS = {  # shares, of the large shape
    ("host get", "engine"): ("host_read_over_copy_and_checksum", 0.7),
    ("host->device", "scatter"): ("scatter_over_copy", 0.5),
    ("peer get", "engine"): ("peer_read_over_raw_ray", 0.6),
    ("peer get", "engine, two peers"): ("read_of_two_peers_over_raw_ray", 0.6),
    ("disk read, cold", "chunk by layer"): ("cold_disk_read_over_raw_read", 0.8),
}
POOL_PAGE = 16  # tokens


class Shape(NamedTuple):
    """A model's KV, and how many chunks of it are moved."""

    name: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    num_chunks: int  # together several times as large as a cache of the CPU
    num_tokens: int = 256

    @property
    def layout(self) -> ChunkLayout:
        return ChunkLayout(
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype="bfloat16",
            chunk_tokens=self.num_tokens,
        )

    @property
    def layer_bytes(self) -> int:
        return self.layout.layer_bytes(self.num_tokens)

    @property
    def chunk_bytes(self) -> int:
        return self.num_layers * self.layer_bytes


LARGE = Shape("8x128", 32, 8, 128, 8)
TINY = Shape("2x64", 6, 2, 64, 96)  # of the embedded model
SHAPES = {shape.name: shape for shape in (LARGE, TINY)}


class Chain:
    """Chunks of random bytes, one behind the other; also as plain memory."""

    def __init__(self, shape: Shape, seed: int) -> None:
        generator = np.random.default_rng(seed)
        self.shape = shape
        self.fingerprint = ModelFingerprint(weights="random", layout=shape.layout, inv_freq=(1.0,))
        self.lineage: Lineage = prefix_lineage(self.fingerprint, "tenant")
        self.payload: U8Array = generator.integers(
            0, 256, (shape.num_chunks, shape.num_layers, shape.layer_bytes), dtype=np.uint8
        )
        self.token_ids = generator.integers(0, 2**31, (shape.num_chunks, shape.num_tokens)).astype(np.uint32)
        self.chunks = list(self._chunks())

    def make(self, index: int, parent: bytes, layers: U8Array) -> Chunk:
        """The chunk at an index, its checksums computed of these layers."""
        positions = np.arange(index * self.shape.num_tokens, (index + 1) * self.shape.num_tokens, dtype=np.int32)
        return make_chunk(self.lineage, self.fingerprint, parent, self.token_ids[index], positions, list(layers))

    def wanted(self, index: int) -> ExpectedChunk:
        key = self.chunks[index].header.key
        return ExpectedChunk(key=key, fingerprint=self.fingerprint, token_ids=self.token_ids[index])

    def _chunks(self) -> Iterator[Chunk]:
        parent = self.lineage.root
        for index, layers in enumerate(self.payload):
            yield (chunk := self.make(index, parent, layers))
            parent = chunk.header.key


def copy_checked(source: U8Array, target: U8Array, checksums: tuple[bytes, ...]) -> None:
    """Layer by layer: the checksum of the bytes that are then used, as every read of the tier does it."""
    for layer, copy, expected in zip(source, target, checksums, strict=True):
        np.copyto(copy, layer)
        if checksum(copy.data) != expected:
            raise ValueError("a checksum does not fit")


def nothing() -> None:
    """Before or after an arm that needs no preparation."""


class Arm(NamedTuple):
    """One way to move chunks across an edge. `before` and `after` a round's chunks are not timed."""

    edge: str
    name: str
    call: Callable[[int], Any]  # index of a chunk
    base: str | None = None  # the arm that it is held against
    before: Callable[[], None] = nothing
    after: Callable[[], None] = nothing


class Samples(NamedTuple):
    """What one arm took: seconds by round and chunk."""

    arm: Arm
    rounds: list[list[float]]

    def total_s(self) -> list[float]:
        """Add up each round's chunks."""
        return [sum(chunks) for chunks in self.rounds]

    def per_chunk_s(self) -> list[float]:
        return sorted(second for chunks in self.rounds for second in chunks)


def measured(arms: Sequence[Arm], num_chunks: int, num_rounds: int) -> dict[str, Samples]:
    """By the arm's name; all arms move all chunks in every round."""
    by_name = {arm.name: arm for arm in arms}
    found = take_turns(by_name, lambda name: _one_round(by_name[name], num_chunks), num_rounds)
    return {name: Samples(by_name[name], rounds) for name, rounds in found.items()}


def _one_round(arm: Arm, num_chunks: int) -> list[float]:
    arm.before()
    seconds = []
    for index in range(num_chunks):
        started = time.perf_counter()
        arm.call(index)
        seconds.append(time.perf_counter() - started)
    arm.after()
    return seconds


def table(found: dict[str, Samples], shape: str, chunk_bytes: int) -> list[dict[str, Any]]:
    """A row for each arm, in order."""
    rows = []
    for samples in found.values():
        arm, per_chunk = samples.arm, samples.per_chunk_s()
        num_chunks = len(samples.rounds[0])
        rows.append({
            "shape": shape, "edge": arm.edge, "arm": arm.name, "rounds": len(samples.rounds),
            "GB/s": num_chunks * chunk_bytes / statistics.median(samples.total_s()) / 1e9,
            "chunk ms": statistics.median(per_chunk) * 1e3,
            "p99 ms": per_chunk[min(len(per_chunk) - 1, len(per_chunk) * 99 // 100)] * 1e3,
            "of": arm.base,
            "share": median_ratio(found[arm.base].total_s(), samples.total_s()) if arm.base else None,
        })  # fmt: skip
    return rows


class Pages:
    """A pool in which the chunks' pages lie in a random order."""

    def __init__(self, chain: Chain, seed: int) -> None:
        shape = chain.shape
        num_each = shape.num_tokens // POOL_PAGE
        pool = (2, shape.num_layers, shape.num_kv_heads, shape.num_chunks * num_each, POOL_PAGE, shape.head_dim)
        self._k_pages, self._v_pages = torch.zeros(pool, dtype=torch.bfloat16).unbind(0)
        self._chain, self._copies = chain, np.zeros_like(chain.payload)
        order = np.random.default_rng(seed).permutation(shape.num_chunks * num_each).reshape(-1, num_each)
        self._runs = [_runs(page_ids) for page_ids in order]

    def scatter(self, index: int) -> None:
        for layer, payload in enumerate(self._chain.payload[index]):
            pages = self._k_pages[layer], self._v_pages[layer]
            scatter_chunk(payload, self._chain.shape.num_tokens, self._runs[index], *pages)

    def gather(self, index: int) -> None:
        for layer, copy in enumerate(self._copies[index]):
            pages = self._k_pages[layer], self._v_pages[layer]
            gather_chunk(*pages, self._runs[index], self._chain.shape.num_tokens, copy)

    def copy(self, index: int) -> None:
        for payload, copy in zip(self._chain.payload[index], self._copies[index], strict=True):
            np.copyto(copy, payload)

    def is_whole(self) -> bool:
        """Whether what was scattered and gathered again is what it was."""
        return bool(np.array_equal(self._copies, self._chain.payload))


def page_arms(pages: Pages) -> list[Arm]:
    return [
        Arm("device<->host", "raw copy", pages.copy),
        Arm("host->device", "scatter", pages.scatter, "raw copy"),
        Arm("device->host", "gather", pages.gather, "raw copy"),
    ]


class PlainHost:
    """A host tier without a store: what a chunk costs beyond its bytes."""

    def __init__(self, chain: Chain) -> None:
        self._chain, self._kept = chain, np.zeros_like(chain.payload)
        self.buffer = np.zeros_like(chain.payload[0])

    def copy(self, index: int) -> None:
        np.copyto(self.buffer, self._chain.payload[index])

    def copy_checked(self, index: int) -> None:
        copy_checked(self._chain.payload[index], self.buffer, self._chain.chunks[index].header.checksums)

    def put(self, index: int) -> None:
        for payload, kept in zip(self._chain.payload[index], self._kept[index], strict=True):
            np.copyto(kept, payload)
        self._chain.make(index, self._chain.chunks[index].header.parent, self._kept[index])


def host_arms(host: PlainHost) -> list[Arm]:
    return [
        Arm("host", "copy", host.copy),
        Arm("host", "copy+checksum", host.copy_checked, "copy"),
        Arm("host put", "make chunk", host.put, "copy"),
    ]


def _runs(page_ids: IntArray) -> IntArray:
    count = np.full_like(page_ids, POOL_PAGE)
    return np.stack([page_ids, np.zeros_like(page_ids), count, np.arange(len(page_ids)) * POOL_PAGE], axis=1)


class Disk:
    """A disk tier in a folder, and a file beside it that holds the same payload and nothing else."""

    def __init__(self, chain: Chain, folder: Path) -> None:
        self._chain, self._folder = chain, folder
        config = DiskTierConfig(folder=str(folder), capacity_bytes=4 * chain.payload.nbytes)
        self._tier = DiskTier(config, LruPolicy())
        self._raw = folder / "raw"
        self._buffer = np.zeros_like(chain.payload[0])

    def close(self) -> None:
        self._tier.close()

    def fill(self) -> None:
        """All chunks, and the plain file."""
        for index in range(len(self._chain.chunks)):
            self.put(index)
            self.write_raw(index)

    def clear(self) -> None:
        self._tier.delete([chunk.header.key for chunk in self._chain.chunks])
        self._raw.unlink(missing_ok=True)

    def cool(self) -> None:
        """Nothing of the files stays in memory."""
        make_cold([self._raw, *self._folder.rglob("*.kv")])

    def put(self, index: int) -> None:
        outcome = self._tier.put(self._chain.chunks[index])
        if outcome is not Put.WRITTEN:
            raise MnemeError(f"a chunk was not written: {outcome.value}")

    def write_raw(self, index: int) -> None:
        fd = os.open(self._raw, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            view, offset = self._chain.payload[index].reshape(-1).data, index * self._chain.shape.chunk_bytes
            while len(view):
                num_written = os.pwrite(fd, view, offset)
                view, offset = view[num_written:], offset + num_written
        finally:
            os.close(fd)

    def read_raw(self, index: int) -> None:
        """The file from its beginning to its end, into the buffer that chunks are read into too."""
        if index == 0:
            self._raw_fd = os.open(self._raw, os.O_RDONLY)
        view, offset = self._buffer.reshape(-1).data, index * self._chain.shape.chunk_bytes
        while len(view):
            num_read = os.preadv(self._raw_fd, [view], offset)
            view, offset = view[num_read:], offset + num_read
        if index == len(self._chain.chunks) - 1:
            os.close(self._raw_fd)

    def read(self, index: int) -> None:
        """A chunk at once."""
        self._read(index, self._chain.shape.num_layers)

    def read_layers(self, index: int) -> None:
        """Layer by layer, as an engine does that computes meanwhile."""
        self._read(index, 1)

    def _read(self, index: int, num_layers: int) -> None:
        opened = self._tier.open(self._chain.wanted(index))
        if isinstance(opened, Miss):
            raise MnemeError(f"a chunk could not be opened: {opened.value}")
        with opened:
            for first in range(0, self._chain.shape.num_layers, num_layers):
                miss = opened.read(first, list(self._buffer[first : first + num_layers]))
                if miss is not None:
                    raise MnemeError(f"a chunk could not be read: {miss.value}")


def cold_arms(disk: Disk) -> list[Arm]:
    return [
        Arm("disk read, cold", "raw file", disk.read_raw, before=disk.cool),
        Arm("disk read, cold", "chunk", disk.read, "raw file", before=disk.cool),
        Arm("disk read, cold", "chunk by layer", disk.read_layers, "raw file", before=disk.cool),
    ]


def warm_arms(disk: Disk) -> list[Arm]:
    return [
        Arm("disk read, warm", "raw file", disk.read_raw),
        Arm("disk read, warm", "chunk", disk.read, "raw file"),
        Arm("disk read, warm", "chunk by layer", disk.read_layers, "raw file"),
    ]


def write_arms(disk: Disk) -> list[Arm]:
    """To the page cache, as the tier does."""
    return [
        Arm("disk write", "raw file", disk.write_raw, before=disk.clear),
        Arm("disk write", "chunk", disk.put, "raw file", before=disk.clear),
    ]


def measure(shape: Shape, folder: Path, cluster: Any, num_rounds: int, seed: int) -> Iterator[list[dict[str, Any]]]:
    """The rows of one edge after the other."""
    chain = Chain(shape, seed)

    def rows_of(arms: Sequence[Any], rounds: int = num_rounds) -> list[dict[str, Any]]:
        return table(measured(arms, shape.num_chunks, rounds), shape.name, shape.chunk_bytes)

    pages, host = Pages(chain, seed), PlainHost(chain)
    yield rows_of(page_arms(pages))
    if not pages.is_whole():
        raise MnemeError("pages: what came out is not what went in")
    del pages
    yield rows_of(host_arms(host))
    if cluster is not None:
        yield from _store_rows(chain, host, cluster, rows_of, seed)
    with closing(Disk(chain, folder)) as disk:
        yield rows_of(write_arms(disk), min(num_rounds, MAX_WRITE_ROUNDS))
        disk.clear()
        disk.fill()
        yield rows_of(cold_arms(disk), num_rounds * COLD_ROUNDS)
        yield rows_of(warm_arms(disk))
        disk.clear()


def _store_rows(chain: Chain, host: PlainHost, cluster: Any, rows_of: Any, seed: int) -> Iterator[list[dict[str, Any]]]:
    from tier_cluster import ClusterTier, peer_arms, put_arms, read_arms

    copy, checked, _ = host_arms(host)
    with closing(ClusterTier(cluster, chain, seed)) as tier:
        yield rows_of(read_arms(tier, checked._replace(base=None)))[
            1:
        ]  # the copies have rows already: here they only took their turns
        yield rows_of(peer_arms(tier, chain.shape))
        yield rows_of(put_arms(tier, copy))[1:]


def main() -> None:
    parser = options_of(__doc__, quick="3 rounds; at most 90 s on 2 cores", out=True, folder=True)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--shape", action="append", choices=SHAPES, help="default: all")
    parser.add_argument("--no-store", action="store_true", help="without the cluster's tier")
    args = parser.parse_args()
    num_rounds = min(args.rounds, QUICK_ROUNDS) if args.quick else args.rounds
    run = Run("tier_io", args, threads=1, dtype="bfloat16", tokens=LARGE.num_tokens, rounds=num_rounds,
              shapes=[shape._asdict() for shape in SHAPES.values()])  # fmt: skip
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mneme-", dir=args.folder)))
        cluster = None if args.no_store else two_nodes(stack)
        for name in args.shape or SHAPES:
            for found in measure(SHAPES[name], folder, cluster, num_rounds, args.seed):
                rows += found
    share = {(row["edge"], row["arm"]): row["share"] for row in rows if row["shape"] == LARGE.name}
    checks = [at_least(name, share.get(arm), target) for arm, (name, target) in TARGETS.items()]
    run.show(PartResult(name="tier_io", title="edges of the cache tier", rows=rows, checks=checks))
    run.end(rows)


def two_nodes(stack: ExitStack) -> Any:
    """Two nodes on this machine; None without Ray, which reads its environment when it is imported."""
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="mneme-", dir="/tmp", ignore_cleanup_errors=True))
    os.environ.pop("RAY_ADDRESS", None)
    os.environ.update(RAY_ENVIRONMENT, RAY_TMPDIR=folder)
    try:
        from tier_cluster import TwoNodes
    except ImportError:
        print("no cluster: Ray is not installed")
        return None
    return stack.enter_context(closing(TwoNodes(STORE_BYTES)))


if __name__ == "__main__":
    main()
