"""Time to the first token of a session's next turn on an engine that has nothing of it: computed anew, or loaded.

    python benchmarks/bench_cache_turn.py [--quick] [--rounds 10] [--pairs 10] [--ray]
           [--folder DIR] [--seed 0] [--out DIR]

*Next turn*: 64 new tokens behind a history of 4,096, of which 64 were sampled. `recompute` has no cache tier; `host`
finds the history in the node's memory; `disk` after a restart of the node, whose memory is empty: cold (files dropped
from the page cache, mincore finds nothing of them) or warm. Each turn's `kv_details` must say so.

*After a restart*: the next turns of 20 sessions of 1,600 tokens come at once, to an engine and a node that were just
started, over cold and warm files in alternation; costs are those that the engine before learned.

`--ray`: the same turn on replicas in other processes over the cluster's tier: on the node whose actor has the history
in its object store, and on another node of a cluster on this machine.

*Never slower*: pairs of the same turn with the tier, where the controller decides from measured rates, and without it:
short histories, a model that computes a token about as fast as a slow disk reads its KV (`llama-wide-kv`), files that
are in the page cache (`disk, warm`) or are not (`disk, cold`), and disks that become slow without notice (`slow disk`:
files in the page cache, all reads together held to 50 MB/s). `split`: the head was loaded, the rest computed; `given
up`: what came too late was computed after all. A figure is the median of the pairs' ratios; `first` is the first
pair's.

What bounds it, one thread: to recompute, 2 x 26M flops per token and attention; to load, 8 KB per token of history:
a checksum, a copy into pages, and on a disk a read, on a thread beside the engine's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch
from arguments import cache_arguments
from attention.report import Check, PartResult, at_least, at_most, closing_checks, print_part, rounded, write_closing
from bench_tier_io import two_nodes
from cache_engines import CHUNK_TOKENS, DTYPE, CachedModel, make_model
from cache_turns import (
    ARMS,
    COLD,
    HOST,
    NUM_NEW,
    RECOMPUTE,
    SLOW,
    WARM,
    Case,
    NextTurns,
    measure_pairs,
    restarted_rows,
)
from plots import DIM, caption_of, rows, save
from random_models import SHAPES
from workloads import cpu_name, load_average

MODEL, SMALL_MODEL = "llama-31m", "llama-wide-kv"
HISTORY, QUICK_HISTORY, RESTARTED_HISTORY = 4096, 1024, 1600
SLOW_BYTES_PER_S = 50e6
TOLERANCE = 1.05
CASES = (
    Case(MODEL, 256, HOST),
    Case(MODEL, 1024, HOST),
    Case(MODEL, 256, WARM),
    Case(MODEL, 1024, COLD),
    Case(MODEL, 1024, SLOW),
    Case(MODEL, 4096, SLOW),
    Case(SMALL_MODEL, 256, HOST),
    Case(SMALL_MODEL, 1024, WARM),
    Case(SMALL_MODEL, 256, SLOW),
    Case(SMALL_MODEL, 1024, SLOW),
    Case(SMALL_MODEL, 4096, SLOW),
)
QUICK_CASES = tuple(case for case in CASES if case.shape == SMALL_MODEL and case.num_history <= 1024)
TARGETS = {HOST: 0.85, COLD: 0.80}  # lower than recompute
MAX_CONTEXT = 4096 + 4 * NUM_NEW


def turn_rows(model: CachedModel, num_history: int, folder: Path, num_rounds: int, seed: int) -> list[dict[str, Any]]:
    """A row per arm."""
    with closing(NextTurns(model, num_history, folder, seed)) as turns:
        found = turns.rounds(num_rounds)
    base = [took.ttft_s for took in found[RECOMPUTE]]
    return [
        {
            "history": num_history,
            "arm": name,
            "rounds": len(found[name]),
            "ttft ms": statistics.median(took.ttft_s for took in found[name]) * 1e3,
            "lower by": statistics.median(1 - a.ttft_s / b for a, b in zip(found[name], base, strict=True)),
            "cached share": min(took.usage.cached_tokens for took in found[name]) / num_history,
        }
        for name in ARMS
    ]


def cluster_rows(model: CachedModel, num_history: int, num_rounds: int, seed: int) -> list[dict[str, Any]]:
    """A row per place of the other replica."""
    with ExitStack() as stack:
        cluster = two_nodes(stack)
        from cache_ray_turns import ray_rows

        return ray_rows(cluster, model, MODEL, num_history, num_rounds, seed)


def checks_of(
    turns: Sequence[dict[str, Any]],
    restarted: Sequence[dict[str, Any]],
    pairs: Sequence[dict[str, Any]],
    cluster: Sequence[dict[str, Any]],
) -> list[Check]:
    found = {row["arm"]: row for row in turns if row["history"] == HISTORY}
    checks = [
        at_least(
            f"{arm.replace(', ', '_')}_ttft_lower_at_{HISTORY}",
            found[arm]["lower by"] if arm in found else None,
            target,
            "of recompute",
        )
        for arm, target in TARGETS.items()
    ]
    lower = next((row["lower by"] for row in cluster if row["history"] == HISTORY), None)
    checks.append(at_least(f"cluster_host_ttft_lower_at_{HISTORY}", lower, TARGETS[HOST], "of recompute"))
    cached = [found[arm]["cached share"] for arm in (HOST, COLD, WARM) if arm in found]
    cached += [row["cached share"] for row in cluster if row["history"] == HISTORY]
    checks.append(at_least("cached_share_of_history", min(cached, default=None), 0.99, "of its tokens"))
    found_again = [row["found"] for row in restarted]
    checks.append(at_least("found_after_restart", statistics.median(found_again), 0.99, "of the history"))
    for name, sources in (("tier", (HOST, WARM, COLD)), ("slow_disk", (SLOW,))):
        ratios = [row["ratio"] for row in pairs if row["source"] in sources]
        checks.append(at_most(f"{name}_over_recompute_worst_case", max(ratios, default=None), TOLERANCE))
    return checks


def main() -> None:
    args = _arguments()
    torch.set_num_threads(1)
    load_before, started = load_average(), time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="mneme-", dir=args.folder) as name:
        folder = Path(name)
        models = {s: make_model(s, MAX_CONTEXT, folder / "calibration", args.seed) for s in (MODEL, SMALL_MODEL)}
        num_history = QUICK_HISTORY if args.quick else HISTORY
        turns = turn_rows(models[MODEL], num_history, folder / "turns", 3 if args.quick else args.rounds, args.seed)
        print_part(PartResult(name="cache_turn", title=f"a turn of {NUM_NEW} tokens on another replica", rows=turns))
        num_restarts, place = 2 if args.quick else args.rounds, folder / "restarted"
        restarted = restarted_rows(models[MODEL], RESTARTED_HISTORY, place, num_restarts, args.seed)
        print_part(PartResult(name="restarted", title="the first turns after a restart", rows=restarted))
        pairs = []
        for index, case in enumerate(QUICK_CASES if args.quick else CASES):
            place = folder / f"case{index}"
            found = measure_pairs(models[case.shape], case, place, args.pairs, SLOW_BYTES_PER_S, args.seed)
            pairs.append(found.row())
    num_rounds = 3 if args.quick else max(args.rounds // 2, 1)
    cluster = cluster_rows(models[MODEL], num_history, num_rounds, args.seed) if args.ray else []
    print_part(PartResult(name="cluster", title="the same in a cluster", rows=cluster))
    last = PartResult(name="never slower", title="with a tier over without", rows=pairs)
    last.checks = checks_of(turns, restarted, pairs, cluster)
    print_part(last)
    line = {
        "benchmark": "cache_turn", "device": cpu_name(), "kind": "cpu", "quick": args.quick, "seed": args.seed,
        "threads": 1, "torch": torch.__version__, "cpu": torch.backends.cpu.get_cpu_capability(),
        "load_average": [load_before, load_average()], "elapsed_s": round(time.perf_counter() - started, 1),
        "dtype": str(DTYPE), "models": {shape: SHAPES[shape] for shape in models}, "chunk_tokens": CHUNK_TOKENS,
        "new_tokens": NUM_NEW, "slow_disk_bytes_per_s": SLOW_BYTES_PER_S,
        "calibration": {shape: _costs(model) for shape, model in models.items()},
        "results": rounded(turns), "restarted": rounded(restarted), "pairs": rounded(pairs),
        "cluster": rounded(cluster),
        **closing_checks(last.checks),
    }  # fmt: skip
    if args.out is not None:
        write_closing(args.out, line)
        draw(args.out, line)
    print(json.dumps(line))


def _costs(model: CachedModel) -> dict[str, Any]:
    """Seconds: per step, per row, per row and token of its context; per load, chunk, byte."""
    measured = model.calibration
    return rounded({"prefill": measured.prefill, **measured.edges})


def draw(folder: Path, closing: dict[str, Any]) -> None:
    turns, pairs = closing["results"], closing["pairs"]
    names = {
        RECOMPUTE: "computed anew",
        HOST: "mneme, node's memory",
        COLD: "mneme, cold disk",
        WARM: "mneme, disk in page cache",
    }
    alone = {names[row["arm"]]: row["ttft ms"] for row in turns}
    title = f"First token of a turn on another replica, {turns[0]['history']:,} tokens of history (lower is better)"
    caption = f"{MODEL}, {caption_of(closing)}"
    save(folder / "cache_turn_ttft.png", title, caption,
         lambda axes: rows(axes, list(alone), {"": alone}, "milliseconds"))  # fmt: skip
    cases = {
        f"{row['model'].removeprefix('llama-')}, {row['history']:,} tokens, {names.get(row['source'], row['source'])}"
        .replace("mneme, ", ""): row["ratio"]
        for row in pairs
    }  # fmt: skip

    def ratios(axes: Any) -> None:
        rows(axes, list(cases), {"mneme": cases}, "time to the first token, with the tier over without")
        axes.axvline(TOLERANCE, linestyle="--", color=DIM, linewidth=1, label=f"promised: at most {TOLERANCE:g}")

    title = "A turn with the cache tier against computing (lower is better)"
    save(folder / "cache_turn_pairs.png", title, caption, ratios)


def _arguments() -> argparse.Namespace:
    parser = cache_arguments(__doc__, quick="1k of history, 3 rounds, the small model's pairs")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--ray", action="store_true", help="replicas in other processes too")
    return parser.parse_args()


if __name__ == "__main__":
    main()
