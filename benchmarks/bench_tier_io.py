"""What each edge of the cache tier carries: bytes per second, milliseconds per chunk, beside plain copies and reads.

    python benchmarks/bench_tier_io.py [--quick] [--rounds 15] [--shape 8x128] [--folder DIR] [--no-store] [--out DIR]

Chunks of 256 tokens in bfloat16, of 32 layers with 8 KV heads of 128 (33.6 MB) and of the embedded model (0.8 MB):

- device<->host: a chunk's layers into a pool's pages of 16 tokens, in random order, and out of them; on a CPU both are
  host memory. Beside a copy of the same bytes.
- host: out of plain memory into one buffer, with and without checksums; a put makes a chunk. Then the tier that a
  cluster's engines have (`start_cache_tier`): another process of this node has put the chunks; this one locates the
  chain, once (`locate ms`), and reads all layers of each chunk. `read` is all that an engine does before it scatters:
  the checksum of bytes that stay in the object store; `read+copy` copies them into one buffer too, which the arm that
  both are held against does. Puts: as an engine saves, some chunks under way, or each waited for until it can be found.
- peer: the same chunks, put by processes on one or two other nodes of a cluster on this machine, read as engines do
  (`Fetches`): located, then the first layers of all chunks before the second ones. Beside what Ray transfers of the
  same bytes between two nodes, all of it under way at once, as objects of 4 MB (`raw Ray`) or one a chunk; nobody looks
  at those, and where they are is known before.
- disk: chunks through `DiskTier`, checksums on, whole or layer by layer, beside one plain file of the same bytes, read
  from its beginning to its end. Cold: written out, dropped with posix_fadvise, and mincore finds nothing of it.

Chunks of the store are put afresh before each round, so that no object was looked at before. `share` is the rate as a
share of the arm that `of` names, the median over the rounds; arms take turns; `share with locate` counts that too, as
that of peers does. GB/s counts a chunk's payload once. What bounds it: memory bandwidth of one thread, the checksum
(XXH3, one more read), the disk. Asking the kernel for what comes next (POSIX_FADV_WILLNEED) made cold reads slower by
two fifths: what it then allocates are single pages, where its own readahead takes large ones. So the tier gives no
hints.
"""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from harness import PartResult, Run, at_least, options_of
from tier_io.chunks import LARGE, TINY, Chain, Shape, measured, table
from tier_io.disk import Disk, cold_arms, warm_arms, write_arms
from tier_io.memory import Pages, PlainHost, host_arms, page_arms

from mneme.errors import MnemeError

QUICK_ROUNDS = 3
COLD_ROUNDS = 3  # as many times more than elsewhere: a disk is less even than memory
MAX_WRITE_ROUNDS = 5
SHAPES = {shape.name: shape for shape in (LARGE, TINY)}
STORE_BYTES = 1 << 30  # of each node
RAY_ENVIRONMENT = {  # which Ray reads when it is imported
    "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
}  # fmt: skip
TARGETS = {  # shares, of the large shape
    ("host get", "read"): ("host_read_in_place_over_copy_and_checksum", 0.7),
    ("host get", "read+copy"): ("host_read_into_a_buffer_over_copy_and_checksum", 0.7),
    ("host->device", "scatter"): ("scatter_over_copy", 0.5),
    ("peer get", "engine"): ("peer_read_over_raw_ray", 0.6),
    ("peer get", "engine, two peers"): ("read_of_two_peers_over_raw_ray", 0.6),
    ("disk read, cold", "chunk by layer"): ("cold_disk_read_over_raw_read", 0.8),
}


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
        yield from _store_rows(chain, host, cluster, num_rounds, rows_of, seed)
    with closing(Disk(chain, folder)) as disk:
        yield rows_of(write_arms(disk), min(num_rounds, MAX_WRITE_ROUNDS))
        disk.clear()
        disk.fill()
        yield rows_of(cold_arms(disk), num_rounds * COLD_ROUNDS)
        yield rows_of(warm_arms(disk))
        disk.clear()


def _store_rows(
    chain: Chain, host: PlainHost, cluster: Any, num_rounds: int, rows_of: Any, seed: int
) -> Iterator[list[dict[str, Any]]]:
    from tier_io.stores import ClusterTier, peer_arms, put_arms, read_arms

    copy, checked, _ = host_arms(host)
    with closing(ClusterTier(cluster, chain, seed)) as tier:
        found = measured([copy, *read_arms(tier, [checked])], chain.shape.num_chunks, num_rounds)
        rows = table(found, chain.shape.name, chain.shape.chunk_bytes)
        yield _of_store(tier.with_locating(rows, found))
        yield rows_of(peer_arms(tier, chain.shape))
        yield _of_store(rows_of(put_arms(tier, [copy])))


def _of_store(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without the copies, which have rows already: here they only took their turns."""
    return [row for row in rows if row["edge"] != "host"]


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
        from tier_io.stores import TwoNodes
    except ImportError:
        print("no cluster: Ray is not installed")
        return None
    return stack.enter_context(closing(TwoNodes(STORE_BYTES)))


if __name__ == "__main__":
    main()
