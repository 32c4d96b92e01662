"""Sessions that outgrow their device, with nothing, memory and a disk under it (AttentionStore 4, Fig. 13 to 20, 24).

    python benchmarks/bench_tiers.py [--quick] [--sessions 28] [--folder DIR] [--seed 0] [--out DIR]

*Tiers*: conversations with ShareGPT's histories (`cache_workload.py`), four at a time, none of which waits for a place,
warmed up on their first fifth. `none` keeps nothing, `device` keeps KV in a pool of a fifth of all tokens, `+host` 30%
more in memory, `+disk (page cache)` all in files, which were written moments ago: the kernel has them in memory, so
that this says what is found, not what a disk's speed makes of it. Shares of prompt tokens by where their KV came from,
time to first token, prompt tokens per second of the steps that computed rows of prompts, seconds in steps (`busy`) and
between them while the engine could only wait for the tier (`blocked`), and what both cost on a machine of the paper's
prices and sizes (four A100s at $20 per hour, 128 GB of memory, 10 TB of SSD).

*Policies*: what goes from memory first, with no disk. Ten of the same sessions at a time on a pool of two contexts, so
that requests wait (`waiting`, on average) and a policy can look ahead to them. A request looks for its KV in memory
when it is sent, behind what is on the device then: what leaves the device while it waits is computed again.

*Read buffer*: a turn of 100 tokens on a history of 1,024, on a disk that takes twice as long to read it as computing
those 100 takes. Another sequence decodes, so the turn waits until the read buffer, of 0 to all layers, is full, and
reads the rest while it is computed, which holds the other up (Fig. 19).

*Write overlap*: prompts of 1,024 to 1,600 tokens and 20 steps of decoding, saved beside the steps, or waited for after
each (Fig. 20).

What bounds it, one thread: computing prompts that were not found, and decode steps, which no tier changes. The models
are small (`llama-5m`, `llama-wide-kv`), so that KV is as heavy beside computing on a CPU as a large model's on a GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import torch
from arguments import cache_arguments
from attention.report import Check, PartResult, at_least, at_most, closing_checks, print_part, rounded, write_closing
from cache_engines import (
    CHUNK_TOKENS,
    DTYPE,
    PAGE_SIZE,
    CachedModel,
    RestartableStore,
    cache_config,
    make_engine,
    make_model,
    pages_for,
)
from cache_overlap import read_buffer_rows, write_overlap_rows
from cache_workload import CONTEXT, NUM_PLACES, WARM_UP_SHARE, Ran, Workload, make_order, make_sessions
from conversations import Conversation
from plots import Draw, bars, caption_of, save
from random_models import SHAPES, kv_bytes_per_token
from workloads import cpu_name, load_average

from mneme.cachetier.config import CacheConfig
from mneme.cachetier.policy.eviction import PolicyName
from mneme.cachetier.simulate.costs import Prices

MODEL, SMALL_MODEL = "llama-5m", "llama-wide-kv"
NONE, DEVICE, WITH_HOST, WITH_DISK = "none", "device", "+host", "+disk (page cache)"
ARMS = (NONE, DEVICE, WITH_HOST, WITH_DISK)
POLICIES: tuple[PolicyName, ...] = ("fifo", "lru", "lookahead", "returning")
DEVICE_SHARE, HOST_SHARE = 0.2, 0.3  # of all sessions' KV
PAPER_HOST_GB, PAPER_DISK_GB = 128.0, 10_000.0
QUEUE_PLACES, QUEUE_CONTEXTS = 10, 2  # of the policies' part: requests at once, and contexts that the pool holds
QUICK_SESSIONS = 12
assert set(POLICIES) <= set(get_args(PolicyName))


class Tiers:
    """The workload, and engines under which there is more and more."""

    def __init__(self, model: CachedModel, folder: Path, num_sessions: int, seed: int) -> None:
        self._model, self._folder = model, folder
        self._sessions: list[Conversation] = make_sessions(num_sessions, seed)
        self._order = make_order(self._sessions, seed)
        num_tokens = sum(turn.num_in + turn.num_out for each in self._sessions for turn in each.turns)
        self.num_turns, self.num_tokens = len(self._order), num_tokens
        self.num_pages = max(int(DEVICE_SHARE * num_tokens), NUM_PLACES * CONTEXT) // PAGE_SIZE
        self.host_bytes = int(HOST_SHARE * num_tokens) * kv_bytes_per_token(model.decoder.config, DTYPE)

    def run(self, arm: str) -> Ran:
        """On an engine and a store of their own."""
        return self._run(arm, "returning", self.num_pages, NUM_PLACES)

    def run_queued(self, eviction: PolicyName) -> Ran:
        """Likewise, with memory under a pool that most requests wait for."""
        return self._run(WITH_HOST, eviction, pages_for(QUEUE_CONTEXTS * CONTEXT), QUEUE_PLACES)

    def _run(self, arm: str, eviction: PolicyName, num_pages: int, num_places: int) -> Ran:
        with ExitStack() as ends:
            config = self._config(arm, eviction)
            store = None if config is None else RestartableStore(config)
            if store is not None:
                ends.callback(store.end)
            engine = make_engine(self._model, store, config or CacheConfig(), num_pages, share_prefixes=arm != NONE)
            ends.callback(engine.close)
            return Workload(engine, self._sessions, self._order, num_places=num_places).run()

    def _config(self, arm: str, eviction: PolicyName) -> CacheConfig | None:
        if arm in (NONE, DEVICE):
            return None
        config = cache_config(self._folder / f"tiers-{eviction}", host_bytes=self.host_bytes, eviction=eviction)
        return config if arm == WITH_DISK else replace(config, disk=None)


def row_of(name: str, ran: Ran) -> dict[str, Any]:
    """Of one arm."""
    ttfts = sorted(each.ttft_s for each in ran.turns)
    shares = {tier: ran.tokens_from(tier) / ran.prompt_tokens for tier in ("device", "host", "disk")}
    return {
        "arm": name,
        "turns": len(ran.turns),
        **shares,
        "hit rate": sum(shares.values()),
        "ttft mean ms": statistics.mean(ttfts) * 1e3,
        "ttft p90 ms": ttfts[int(0.9 * len(ttfts))] * 1e3,
        "prompt tokens/s": ran.prompt_tokens / ran.prefill_s,
        "busy s": ran.busy_s,
        "blocked s": ran.blocked_s,
        "waiting": ran.num_waiting,
    }


def cost(name: str, ran: Ran) -> float:
    """Dollars: the device while it is busy or waits for the tier, and for as long what is under it."""
    host_gb = PAPER_HOST_GB if name in (WITH_HOST, WITH_DISK) else 0.0
    disk_gb = PAPER_DISK_GB if name == WITH_DISK else 0.0
    return Prices().hourly(1.0, host_gb, disk_gb) * ran.device_s / 3600


def found_of_history(ran: Ran) -> float:
    """The share found of what the conversations said before, in whole chunks: all of it was computed once.

    The last token of an answer is never computed.
    """
    whole = [max(each.history - 1, 0) // CHUNK_TOKENS * CHUNK_TOKENS for each in ran.turns]
    found = [min(each.usage.cached_tokens, most) for each, most in zip(ran.turns, whole, strict=True)]
    return sum(found) / sum(whole)


def checks_of(
    found: float, tiers: Sequence[dict[str, Any]], overlap: Sequence[dict[str, Any]], *, is_quick: bool
) -> list[Check]:
    """With a disk for all of it everything is found, what is under a device pays, and steps do not wait for saving."""
    row = {each["arm"]: each for each in tiers}
    ttft = None if is_quick else row[WITH_HOST]["ttft mean ms"] / row[DEVICE]["ttft mean ms"]  # few turns, once each
    cost = None if is_quick else row[WITH_DISK]["cost of none"] / row[DEVICE]["cost of none"]
    return [
        at_least("disk_found_of_history", found, 0.99, "of whole chunks"),
        at_most("ttft_mean_host_over_device", ttft, 1.0),
        at_most("cost_disk_over_device", cost, 1.0),
        at_least(
            "saving_beside_below_waited_for",
            min(row["below waited for"] for row in overlap if row["saving"] == "beside"),
            0.0,
            "of the time",
        ),
    ]


def main() -> None:
    args = _arguments()
    torch.set_num_threads(1)
    load_before, started = load_average(), time.perf_counter()
    num_rounds = 3 if args.quick else 9
    with tempfile.TemporaryDirectory(prefix="mneme-", dir=args.folder) as name:
        folder = Path(name)
        models = {s: make_model(s, CONTEXT, folder / "calibration", args.seed) for s in (MODEL, SMALL_MODEL)}
        tiers = Tiers(
            models[MODEL], folder, min(args.sessions, QUICK_SESSIONS) if args.quick else args.sessions, args.seed
        )
        ran = {arm: tiers.run(arm) for arm in ARMS}
        base = cost(NONE, ran[NONE])
        rows = [row_of(arm, each) | {"cost of none": cost(arm, each) / base} for arm, each in ran.items()]
        policies = [row_of(policy, tiers.run_queued(policy)) for policy in POLICIES if not args.quick]
        buffers = read_buffer_rows(models[SMALL_MODEL], folder / "buffers", num_rounds, args.seed)
        overlap = write_overlap_rows(models[SMALL_MODEL], num_rounds, args.seed)
    print_part(PartResult(name="tiers", title=f"{tiers.num_turns} turns, {tiers.num_tokens} tokens", rows=rows))
    print_part(PartResult(name="policies", title="what goes from memory first, with a queue, no disk", rows=policies))
    print_part(PartResult(name="read buffer", title="layers read ahead", rows=buffers))
    checks = checks_of(found_of_history(ran[WITH_DISK]), rows, overlap, is_quick=args.quick)
    last = PartResult(name="write overlap", title="saving", rows=overlap, checks=checks)
    print_part(last)
    line = {
        "benchmark": "tiers", "device": cpu_name(), "kind": "cpu", "quick": args.quick, "seed": args.seed,
        "threads": 1, "torch": torch.__version__, "cpu": torch.backends.cpu.get_cpu_capability(),
        "load_average": [load_before, load_average()], "elapsed_s": round(time.perf_counter() - started, 1),
        "dtype": str(DTYPE), "models": {shape: SHAPES[shape] for shape in models}, "chunk_tokens": CHUNK_TOKENS,
        "turns": tiers.num_turns, "tokens": tiers.num_tokens, "warm_up": WARM_UP_SHARE, "places": NUM_PLACES,
        "queue_places": QUEUE_PLACES, "queue_device_tokens": pages_for(QUEUE_CONTEXTS * CONTEXT) * PAGE_SIZE,
        "device_tokens": tiers.num_pages * PAGE_SIZE, "host_bytes": tiers.host_bytes,
        "results": rounded(rows), "policies": rounded(policies), "read_buffers": rounded(buffers),
        "write_overlap": rounded(overlap), **closing_checks(last.checks),
    }  # fmt: skip
    if args.out is not None:
        write_closing(args.out, line)
        draw(args.out, line)
    print(json.dumps(line))


def draw(folder: Path, closing: dict[str, Any]) -> None:
    found, buffers = closing["results"], closing["read_buffers"]
    names = ["nothing\nkept", "mneme,\ndevice", "mneme,\n+ host", "mneme,\n+ disk"]
    caption = f"{MODEL}, {closing['turns']} turns, {caption_of(closing)}"

    def panel(column: str, y_label: str) -> Draw:
        return lambda axes: bars(axes, names, {"": [row[column] for row in found]}, "", y_label)

    title = "Conversations over a device pool for a part of them: what each tier under it brings"
    save(folder / "tiers.png", title, caption,
         panel("ttft mean ms", "mean ms to the first token (lower is better)"),
         panel("prompt tokens/s", "prompt tokens per second (higher is better)"),
         panel("cost of none", "cost, of keeping nothing (lower is better)"))  # fmt: skip
    tiers = {f"mneme, {tier}": [100 * row[tier] for row in found] for tier in ("device", "host", "disk")}
    title = "Where the tokens of prompts were found (higher is better)"
    save(folder / "tiers_hits.png", title, caption,
         lambda axes: bars(axes, names, tiers, "", "% of prompt tokens", is_stacked=True))  # fmt: skip
    times = {"": [row["ttft ms"] for row in buffers]}
    groups = ["computed\nanew", *(f"mneme,\n{row['read buffer']}" for row in buffers[1:])]
    title = "First token of a turn whose history is read from a slow disk, by layers read ahead (lower is better)"
    save(folder / "tiers_read_buffer.png", title, f"{SMALL_MODEL}, {caption_of(closing)}",
         lambda axes: bars(axes, groups, times, "", "milliseconds"))  # fmt: skip


def _arguments() -> argparse.Namespace:
    parser = cache_arguments(__doc__, quick="12 sessions, no policies, 3 rounds; at most 90 s on 2 cores")
    parser.add_argument("--sessions", type=int, default=28)
    return parser.parse_args()


if __name__ == "__main__":
    main()
