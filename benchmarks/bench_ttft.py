"""Time to the first token of a turn whose history is recomputed, in host memory, or on the device.

    python benchmarks/bench_ttft.py [--quick] [--history N]... [--seed 0] [--out FOLDER] [--timeline FILE]

AttentionStore 4 (Fig. 14, 18, 25, 26): a turn of 64 new tokens on a history of 1k, 4k, 16k and 32k. `recompute` keeps
nothing; `device` has the history in its pool; for `host`, other prompts pass through the whole pool before each turn,
so that the history is in host memory only. Each turn's `kv_details` must say so, or the benchmark fails.

*One turn*: from submission to the first token; arms take turns in rounds; medians, also of the rounds' ratios.
*A batch* of turns at once, each with an answer (Fig. 26): time in engine steps per turn, output tokens per second.
Batches have 32k tokens of history together, and 8 turns at most.

What bounds it, one thread: to recompute, 2 x 26M flops per token, and attention that grows with the square of the
history; for a hit, the same for 64 rows, which read 8 KB of KV per token of history (bfloat16), on the way from host
memory once more.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from attention.report import Check, PartResult, at_least, closing_checks, print_part, rounded, write_closing
from plots import Draw, caption_of, lines, save
from session_engines import DTYPE, make_decoder
from turn_arms import DEVICE, HOST, NUM_NEW, RECOMPUTE, Arm, Took, interleaved
from workloads import MODEL_SHAPE, cpu_name, load_average

from mneme.replicas.model.decoder import Decoder
from mneme.replicas.model.timeline import Timeline

HISTORIES = (1024, 4096, 16384, 32768)
QUICK_HISTORIES = (1024, 4096)
ARMS = (RECOMPUTE, HOST, DEVICE)
NUM_OUT = 32
TARGETS = {DEVICE: 0.95, HOST: 0.90}  # lower than recompute, at 4k
TARGET_HISTORY = 4096
BATCH_TOKENS, MAX_BATCH = 32768, 8
QUICK_BATCH = 2


def measure(decoder: Decoder, num_history: int, num_rounds: int, max_batch: int, seed: int) -> list[dict[str, Any]]:
    """A row per arm."""
    batch = max(min(max_batch, BATCH_TOKENS // num_history), 1)
    arms = [Arm(name, decoder, num_history=num_history, batch=batch, num_out=NUM_OUT, seed=seed) for name in ARMS]
    # All first: a history that no turn uses for many rounds leaves the host tier.
    together = interleaved(arms, batch, max(num_rounds // 3, 1) if batch > 1 else num_rounds)
    alone = interleaved(arms, 1, num_rounds) if batch > 1 else together
    return [_row(name, num_history, batch, alone, together) for name in ARMS]


def _row(
    name: str, num_history: int, batch: int, alone: dict[str, list[Took]], together: dict[str, list[Took]]
) -> dict[str, Any]:
    row: dict[str, Any] = {"history": num_history, "arm": name}
    return row | {
        "rounds": len(alone[name]),
        "ttft ms": statistics.median(took.ttft_s for took in alone[name]) * 1e3,
        "lower by": lower_by([took.ttft_s for took in alone[name]], [took.ttft_s for took in alone[RECOMPUTE]]),
        "batch": batch,
        "busy s/turn": statistics.median(took.busy_s for took in together[name]) / batch,
        "out tokens/s": statistics.median(took.num_out / took.total_s for took in together[name]),
    }


def lower_by(times: Sequence[float], base: Sequence[float]) -> float:
    """The median over the rounds of the share by which a time is below the base's."""
    return statistics.median(1 - time / of for time, of in zip(times, base, strict=True))


def checks_of(rows: Sequence[dict[str, Any]]) -> list[Check]:
    found = {row["arm"]: row.get("lower by") for row in rows if row["history"] == TARGET_HISTORY}
    return [
        at_least(f"{arm}_ttft_lower_at_{TARGET_HISTORY}", found.get(arm), target, "of recompute")
        for arm, target in TARGETS.items()
    ]


def write_timeline(decoder: Decoder, path: Path, seed: int) -> None:
    """The trace events of one turn on a history of 4k in host memory, to the end of its answer."""
    whole, turn = Timeline(), Timeline()
    arm = Arm(HOST, decoder, num_history=TARGET_HISTORY, batch=1, num_out=NUM_OUT, seed=seed, timeline=whole)
    began_s = arm.turns(1).began_s
    for span in whole.spans():
        if span.start_s >= began_s:
            turn.span(span.name, span.start_s, span.end_s, span.track, **span.args)
    turn.write(path)


def main() -> None:
    args = _arguments()
    torch.set_num_threads(1)
    load_before, started = load_average(), time.perf_counter()
    histories = args.history or (QUICK_HISTORIES if args.quick else HISTORIES)
    max_context = max(*histories, TARGET_HISTORY) + NUM_NEW + NUM_OUT
    decoder = make_decoder(max_context, args.seed)
    rows = []
    for num_history in histories:
        num_rounds = 3 if args.quick or num_history > TARGET_HISTORY else 15
        rows += measure(decoder, num_history, num_rounds, QUICK_BATCH if args.quick else MAX_BATCH, args.seed)
    result = PartResult(name="ttft", title=f"a turn of {NUM_NEW} tokens", rows=rows, checks=checks_of(rows))
    print_part(result)
    if args.timeline is not None:
        write_timeline(decoder, args.timeline, args.seed)
    closing = {
        "benchmark": "ttft", "device": cpu_name(), "kind": "cpu", "quick": args.quick, "seed": args.seed, "threads": 1,
        "torch": torch.__version__, "load_average": [load_before, load_average()],
        "elapsed_s": round(time.perf_counter() - started, 1), "dtype": str(DTYPE),
        "model": MODEL_SHAPE | {"max_position_embeddings": max_context},
        "new_tokens": NUM_NEW, "output_tokens": NUM_OUT, "results": rounded(rows),
        **closing_checks(result.checks),
    }  # fmt: skip
    if args.out is not None:
        write_closing(args.out, closing)
        draw(args.out, closing)
    print(json.dumps(closing))


def draw(folder: Path, closing: dict[str, Any]) -> None:
    names = {RECOMPUTE: "computed anew", HOST: "mneme, from host memory", DEVICE: "mneme, on the device"}

    def over_history(column: str, y_label: str) -> Draw:
        series = {
            shown: [(row["history"], row[column]) for row in closing["results"] if row["arm"] == arm]
            for arm, shown in names.items()
        }
        return lambda axes: lines(axes, series, "history, tokens", y_label, log_x=True, log_y=True)

    caption = f"31M Llama with random weights, {caption_of(closing)}"
    turn = f"turn of {closing['new_tokens']} new tokens, by where the KV of its history is"
    save(folder / "ttft.png", f"Time to the first token of a {turn} (lower is better)", caption,
         over_history("ttft ms", "milliseconds"))  # fmt: skip
    save(folder / "ttft_together.png", f"Several turns at once: a {turn}", caption,
         over_history("busy s/turn", "seconds of computing for each turn (lower is better)"),
         over_history("out tokens/s", "output tokens per second (higher is better)"))  # fmt: skip


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="1k and 4k, three rounds; at most 90 s on 2 cores")
    parser.add_argument("--history", type=int, action="append", help="tokens; default: 1k, 4k, 16k, 32k")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder for JSON and plots")
    parser.add_argument("--timeline", type=Path, help="write trace events of one turn from host memory")
    return parser.parse_args()


if __name__ == "__main__":
    main()
