"""What saving KV into the cache tier costs the engine, and what of it reaches the disk.

    python benchmarks/bench_cache_save.py [--quick] [--ray] [--pairs 16] [--folder DIR] [--seed 0] [--out DIR]

*Decodes*: two engines over one set of weights, one with a tier (memory and disk), one without, each decode the same
batch of 16 at the same contexts. Sequences stand 16 tokens apart, so that a stretch of 64 steps completes four chunks
of 256 tokens: as much KV is saved as is made. *Prefills*: four prompts of 512 tokens, one after the other, are eight
full chunks. Stretches take turns, in another order each time; a cost is the median of the pairs' ratios of wall time.
What is left to be saved and written at a stretch's end is waited for, but not counted: a part of the last chunks.

`--ray`: *decodes, served*: the same over the actor of a node in another process of this machine, as an engine that is
served saves: it copies chunks into the object store, and the actor puts them again and writes the files. Without it the
tier is in the engine's process.

*Writes*: sessions take turns of 64 + 64 tokens, all of which end in a tail chunk. Bytes written to files over bytes of
distinct KV, and the number of files, with the delay that tails have (2 s, then superseded ones were never written) and
with every tail written before the next turn: then 256 tokens are written as 127, as 255 (the last token's KV was never
computed) and as 256 tokens, 2.5 times in all.

What bounds it: gathers, checksums and writes are other threads', on another core; they take memory bandwidth and the
interpreter lock between two calls. `engine CPU` is the engine's thread's own processor time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from arguments import cache_arguments
from attention.report import Check, PartResult, at_most, closing_checks, print_part, rounded, write_closing
from bench_tier_io import two_nodes
from cache_engines import CHUNK_TOKENS, DTYPE, CachedModel, make_model
from cache_saving import (
    BATCH,
    NUM_STEPS,
    PROMPT_TOKENS,
    DecodingArm,
    PrefillingArm,
    SavingTier,
    Stretch,
    process_tier,
    write_row,
)
from plots import DIM, caption_of, rows, save
from random_models import SHAPES
from workloads import cpu_name, load_average

MODEL, SMALL_MODEL = "llama-31m", "llama-wide-kv"
PLAIN, SAVING = "no tier", "saving"
MAX_COST = 0.03  # of the time of a decode step
MAX_WRITTEN = 1.1, 2.6  # times the distinct KV: tails delayed, and each of them written; headers included
QUICK_PAIRS = 10


class Part(NamedTuple):
    """What is paired, and how often."""

    name: str
    shape: str
    arm: type[DecodingArm] | type[PrefillingArm]
    share: float  # of the pairs
    is_served: bool = False


PARTS = (
    Part("decodes", MODEL, DecodingArm, 1),
    Part("decodes", SMALL_MODEL, DecodingArm, 1),
    Part("prefills", MODEL, PrefillingArm, 0.7),
    Part("prefills", SMALL_MODEL, PrefillingArm, 1),
)
SERVED_PARTS = (Part("decodes, served", MODEL, DecodingArm, 1, is_served=True),)


def measure(model: CachedModel, part: Part, folder: Path, num_pairs: int, seed: int) -> dict[str, list[Stretch]]:
    """The stretches of each arm, pair by pair; a first pair does not count."""
    with ExitStack() as ends:
        arms = {}
        for name in (PLAIN, SAVING):
            arms[name] = part.arm(model, _tier(part, folder) if name == SAVING else None, num_pairs + 1, seed)
            ends.callback(arms[name].close)
        found: dict[str, list[Stretch]] = {name: [] for name in arms}
        for number in range(num_pairs + 1):
            for name in arms if number % 2 else reversed(arms):
                took = arms[name].stretch()
                if number:
                    found[name].append(took)
    return found


def _tier(part: Part, folder: Path) -> SavingTier:
    if not part.is_served:
        return process_tier(folder)
    from cache_ray_saving import served_tier

    return served_tier(folder)


def row_of(part: Part, name: str, found: dict[str, list[Stretch]]) -> dict[str, Any]:
    took, plain = found[name], found[PLAIN]
    return {
        "part": part.name,
        "model": part.shape,
        "arm": name,
        "stretches": len(took),
        "ms": statistics.median(each.wall_s for each in took) * 1e3,
        "engine CPU ms": statistics.median(each.engine_s for each in took) * 1e3,
        "tokens/s": statistics.median(each.num_tokens / each.wall_s for each in took),
        "cost": cost([each.wall_s for each in took], [each.wall_s for each in plain]),
        "CPU cost": cost([each.engine_s for each in took], [each.engine_s for each in plain]),
        "saved MB": sum(each.num_saved_bytes for each in took) / 1e6,
    }


def cost(times: Sequence[float], base: Sequence[float]) -> float:
    """By which share the times are above the base's, pair by pair, in the median."""
    return statistics.median(time / of - 1 for time, of in zip(times, base, strict=True))


def checks_of(rows: Sequence[dict[str, Any]], writes: Sequence[dict[str, Any]]) -> list[Check]:
    found = {(row["part"], row["model"]): row["cost"] for row in rows if row["arm"] == SAVING}
    checks = [
        at_most(f"saving_cost_{model}", found.get(("decodes", model)), MAX_COST, "of a decode step")
        for model in (MODEL, SMALL_MODEL)
    ]
    served = found.get(("decodes, served", MODEL))
    checks.append(at_most("served_saving_cost", served, MAX_COST, "of a decode step"))
    written = {row["tails"]: row["written over distinct"] for row in writes}
    for name, most in zip(("delayed", "each written"), MAX_WRITTEN, strict=True):
        checks.append(at_most(f"written_over_distinct_{name.replace(' ', '_')}", written.get(name), most))
    files = [row["files over fewest"] for row in writes]
    checks.append(at_most("files_over_fewest", max(files, default=None), 1.0))
    return checks


def main() -> None:
    args = _arguments()
    torch.set_num_threads(1)
    load_before, started = load_average(), time.perf_counter()
    num_pairs = min(args.pairs, QUICK_PAIRS) if args.quick else args.pairs
    parts = [part for part in PARTS if part.shape == MODEL or not args.quick]
    parts = [part for part in parts if part.arm is DecodingArm or not args.quick]
    rows: list[dict[str, Any]] = []
    with ExitStack() as ends:
        folder = Path(ends.enter_context(tempfile.TemporaryDirectory(prefix="mneme-", dir=args.folder)))
        if args.ray and two_nodes(ends) is not None:
            parts += SERVED_PARTS
        models = {s: make_model(s, 8192, folder / "calibration", args.seed) for s in (MODEL, SMALL_MODEL)}
        for index, part in enumerate(parts):
            found = measure(models[part.shape], part, folder / f"part{index}", int(part.share * num_pairs), args.seed)
            rows += [row_of(part, arm, found) for arm in found]
            print_part(PartResult(name=part.name, title="with a tier and without", rows=rows[-2:]))
        num_turns = 6 if args.quick else 16
        writes = [
            write_row(models[SMALL_MODEL], folder / f"writes{delayed}", num_turns, args.seed, is_delayed=delayed)
            for delayed in (True, False)
        ]
    result = PartResult(
        name="writes", title="turns of 64 + 64 tokens on the disk", rows=writes, checks=checks_of(rows, writes)
    )
    print_part(result)
    line = {
        "benchmark": "cache_save", "device": cpu_name(), "kind": "cpu", "quick": args.quick, "seed": args.seed,
        "threads": 1, "torch": torch.__version__, "cpu": torch.backends.cpu.get_cpu_capability(),
        "load_average": [load_before, load_average()], "elapsed_s": round(time.perf_counter() - started, 1),
        "dtype": str(DTYPE), "models": {shape: SHAPES[shape] for shape in models}, "chunk_tokens": CHUNK_TOKENS,
        "batch": BATCH, "steps": NUM_STEPS, "prompt_tokens": PROMPT_TOKENS, "pairs": num_pairs,
        "results": rounded(rows), "writes": rounded(writes), **closing_checks(result.checks),
    }  # fmt: skip
    if args.out is not None:
        write_closing(args.out, line)
        draw(args.out, line)
    print(json.dumps(line))


def draw(folder: Path, closing: dict[str, Any]) -> None:
    saving = [row for row in closing["results"] if row["arm"] == SAVING]
    costs = {f"{row['part']}, {row['model']}": 100 * row["cost"] for row in saving}

    def percent(axes: Any) -> None:
        rows(axes, list(costs), {"mneme": costs}, "% slower with saving than without")
        axes.axvline(100 * MAX_COST, linestyle="--", color=DIM, linewidth=1, label="promised of decodes: at most 3%")

    title = "What saving KV to the cache tier costs the engine (lower is better)"
    save(folder / "cache_save_cost.png", title, caption_of(closing), percent)


def _arguments() -> argparse.Namespace:
    parser = cache_arguments(__doc__, quick="10 pairs of decodes, 6 turns; at most 90 s on 2 cores")
    parser.add_argument("--pairs", type=int, default=16)
    parser.add_argument("--ray", action="store_true", help="decodes over a node's actor in another process too")
    return parser.parse_args()


if __name__ == "__main__":
    main()
