"""Sessions that outgrow their device, with nothing, memory and a disk under it (AttentionStore 4, Fig. 13 to 20, 24).

    python benchmarks/bench_tiers.py [--quick] [--paper] [--sessions N] [--folder DIR] [--seed 0] [--out DIR]

*Tiers*: conversations with ShareGPT's histories, four at a time, none of which waits for a place,
warmed up on their first fifth. `none` keeps nothing, `device` keeps KV in a pool of a fifth of all tokens, `+host` 30%
more in memory, `+disk (page cache)` all in files, which were written moments ago: the kernel has them in memory, so
that this says what is found, not what a disk's speed makes of it. Shares of prompt tokens by where their KV came from,
time to first token, prompt tokens per second of the steps that computed rows of prompts, seconds in steps (`busy`) and
between them while the engine could only wait for the tier (`blocked`), and what both cost on a machine of the paper's
prices and sizes (four A100s at $20 per hour, 128 GB of memory, 10 TB of SSD).

Lengths are ShareGPT's (`conversations.py`) with answers cut to a quarter, so that prompts are most of the work. The
order of turns is drawn once: every arm takes the same turns in the same order. A session's next turn is sent as soon
as there is a place, but never before its last one has ended. Whether requests queue is a matter of the places and the
pool: a pool that has room for as many contexts as there are places never lets one wait.

*Policies*: what goes from memory first, with no disk. Ten of the same sessions at a time on a pool of two contexts, so
that requests wait (`waiting`, on average) and a policy can look ahead to them. A request looks for its KV in memory
when it is sent, behind what is on the device then: what leaves the device while it waits is asked for again, where
that is noticed. Look-ahead eviction is to find no less than LRU and FIFO do.

*Look-ahead fetch*: 16 at a time, of which four run, over a disk of 200 MB/s, with little memory. `seen`: requests
wait in the engine, which reads ahead for them; `hidden`: they wait outside, and the engine hears of one when it has a
place for it. Both are timed from when they were sent, and take turns.

*Read buffer* (Fig. 19): a turn of 100 tokens on a history of 2,048 (8 chunks, 24 layers), on a disk that takes k = 3
times as long to read it as computing those 100 takes (C). Another sequence decodes, so the turn waits until as many
layers as the arm says, b of n, are read; the rest is read while it is computed, which holds the other up. Reading
takes k C whatever the buffer, so a first token comes after

    k C b/n + max(C, k C (n - b)/n + C/n)

With nothing ahead that is k C + C/n, all of it in one step of the other; with all of it C (k + 1), of which C is in
that step. The formula's b = n (k - 1)/k + 1 has k C (1 + 1/n) and C: the first token of the one and the gap of the
other. So over all layers ahead it takes k (1 + 1/n)/(k + 1) = 0.78 of the time at k = 3, and over none 1/k of the gap;
no buffer makes the first token come sooner than the disk has read. `bounded`: a read buffer for a quarter of the
history, which comes in parts then.

*Write overlap*: prompts of 1,024 to 1,600 tokens and 20 steps of decoding, saved beside the steps, or waited for after
each (Fig. 20).

`--paper` runs *tiers* alone, as the paper's headline does, and holds it against that (TTFT -87%, 7.8 times the prefill
throughput, cost -70%; four 13B to 70B models on A100s): conversations of two turns and more, 5.75 on average, answers
uncut; 16 at a time on a device for a fifth of all tokens, and memory for 30% more, so that half is on the disk alone;
`llama-31m` in the dtype that an engine chooses here, and a disk whose files the kernel forgets as they are closed,
which is verified at the end (`+disk (cold)`). Arms take turns; a figure is the median of its rounds.
Cost is (device's price + memory's and disk's) times `busy` + `blocked`: where a device costs 20 dollars an hour, 128 GB
and 10 TB add 10%, so it falls as time does. Time falls by no more than prompts' share of it, p: with h of their tokens
found the rest is 1 - p h of `none`'s, and that by the prices is `predicted cost`. p is `prefill share`: of each step's
time, what the calibrated costs of its rows say is that of prompts.

What bounds it, one thread: computing prompts that were not found, and decode steps, which no tier changes. The models
are small (`llama-5m`, `llama-wide-kv`), so that KV is as heavy beside computing on a CPU as a large model's on a GPU.
"""

from __future__ import annotations

import argparse
import math
import random
import shutil
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch
from cache_engines import (
    CHUNK_TOKENS,
    CachedModel,
    ColdFiles,
    RestartableStore,
    ThrottledFiles,
    answer,
    cache_config,
    make_engine,
    make_model,
    pages_for,
    tell,
    wait_for_saves,
)
from cache_engines import (
    Draw as DrawIds,
)
from conversations import SHAPES as LENGTHS
from conversations import Conversation, Shape, Turn, draw_turns
from engines import DTYPE, PAGE_SIZE, request
from harness import Check, PartResult, Run, at_least, at_most, median_ratio, options_of, rounded, take_turns
from plots import Draw, bars, caption_of, save
from random_models import SHAPES, kv_bytes_per_token
from tier_io.disk import cached_share

from mneme.cachetier.chunk.syscalls import FileOperations
from mneme.cachetier.config import CacheConfig
from mneme.cachetier.names import PolicyName
from mneme.cachetier.policy.cost_model import CostModel
from mneme.cachetier.policy.load_controller import LoadPlan
from mneme.errors import MnemeError
from mneme.lab.cache.costs import Prices
from mneme.replicas.engine.engine import BLOCKED_S, Engine
from mneme.replicas.engine.load import choose_dtype
from mneme.replicas.request import GenerationRequest, PromptUsage
from mneme.replicas.sequence import StepRows

MODEL, SMALL_MODEL, PAPER_MODEL, DEEP_MODEL = "llama-5m", "llama-wide-kv", "llama-31m", "llama-24l"
NONE, DEVICE, WITH_HOST, WITH_DISK = "none", "device", "+host", "+disk (page cache)"
COLD_DISK = "+disk (cold)"
ARMS = (NONE, DEVICE, WITH_HOST, WITH_DISK)
POLICIES: tuple[PolicyName, ...] = ("fifo", "lru", "lookahead", "returning")
DEVICE_SHARE, HOST_SHARE = 0.2, 0.3  # of all sessions' KV
PAPER_HOST_GB, PAPER_DISK_GB = 128.0, 10_000.0
QUEUE_PLACES, QUEUE_CONTEXTS = 16, 2  # of the policies' part: requests at once, and contexts that the pool holds
QUICK_SESSIONS = 12
assert set(POLICIES) <= set(get_args(PolicyName))
CONTEXT = 2048
WARM_UP_SHARE = 0.2  # of the turns, which do not count
ANSWER_SHARE = 0.25
NUM_PLACES = 4  # requests in the engine at once; all of them run if the pool holds as many contexts
NUM_SESSIONS, PAPER_SESSIONS = 28, 60
PAPER_PLACES, PAPER_CONTEXTS = 16, 4  # requests at once, and whole contexts that a pool has room for at least
PAPER_LENGTHS = Shape(6.3, 31.113, 185.0, (5.75, 31.1, 173.0))  # 4.1: turns; tokens are Pensieve's of the same dataset
QUEUE_RUNNING = 4  # of them, with whole contexts, under look-ahead fetch
QUEUE_DISK_BYTES_PER_S, QUEUE_HOST_SHARE = 200e6, 0.15  # under look-ahead fetch
SEEN, HIDDEN = "seen", "hidden"
FIG19_HISTORY, FIG19_NEW = 2048, 100  # Fig. 19's
NUM_OTHER, MAX_OTHER = 64, 512  # tokens of a prompt that decodes meanwhile, and of its answer
LOAD_OVER_COMPUTE = 3.0  # as long as the new tokens' computing times this, loading the history takes
FORMULA, BOUNDED, ANEW = "formula", "bounded", "recompute"
BOUND_SHARE = 0.25  # of the history, that the read buffer of `bounded` has room for
PROMPTS = (1024, 1280, 1600)  # Fig. 20's
NUM_OUT = 20
NO_SAVING, BESIDE, WAITED_FOR = "no saving", "beside", "waited for"


class Tiers:
    """The workload, and engines under which there is more and more."""

    def __init__(
        self, model: CachedModel, folder: Path, sessions: list[Conversation], seed: int, *,
        num_places: int = NUM_PLACES, num_contexts: int = NUM_PLACES,
    ) -> None:  # fmt: skip
        """`num_contexts`: whole ones that the device has room for at least."""
        self._model, self._folder, self._num_places = model, folder, num_places
        self._sessions, self._order = sessions, make_order(sessions, seed)
        num_tokens = sum(turn.num_in + turn.num_out for each in sessions for turn in each.turns)
        self.num_turns, self.num_tokens = len(self._order), num_tokens
        self.num_pages = max(int(DEVICE_SHARE * num_tokens), num_contexts * CONTEXT) // PAGE_SIZE
        self.cached_share = 0.0  # of the cold disk's files, the part that the kernel has; the most of all rounds
        self._token_bytes = kv_bytes_per_token(model.decoder.config, model.decoder.dtype)
        self.host_bytes = int(HOST_SHARE * num_tokens) * self._token_bytes

    def run(self, arm: str) -> Ran:
        """On an engine and a store of their own."""
        files = ColdFiles() if arm == COLD_DISK else FileOperations()
        return self._run(self._config(arm), files, self.num_pages, self._num_places, shares=arm != NONE)

    def run_queued(self, eviction: PolicyName) -> Ran:
        """Likewise, with memory under a pool that most requests wait for."""
        config = CacheConfig(host_bytes=self.host_bytes, eviction=eviction)
        return self._run(config, FileOperations(), pages_for(QUEUE_CONTEXTS * CONTEXT), QUEUE_PLACES)

    def run_ahead(self, queue: str) -> Ran:
        """Likewise, with a slow disk; the queue is `SEEN` by the engine or `HIDDEN` from it."""
        files = ThrottledFiles()
        files.bytes_per_s = QUEUE_DISK_BYTES_PER_S
        host_bytes = int(QUEUE_HOST_SHARE * self.num_tokens) * self._token_bytes
        config = replace(self._config(WITH_DISK), host_bytes=host_bytes)
        return self._run(
            config, files, pages_for(QUEUE_RUNNING * CONTEXT), QUEUE_PLACES,
            num_sent=QUEUE_RUNNING if queue == HIDDEN else None, max_running=QUEUE_RUNNING,
        )  # fmt: skip

    def _run(
        self, config: CacheConfig | None, files: FileOperations, num_pages: int, num_places: int, *,
        shares: bool = True, num_sent: int | None = None, **more: Any,
    ) -> Ran:  # fmt: skip
        with ExitStack() as ends:
            store = None if config is None else RestartableStore(config, files)
            if store is not None:
                ends.callback(store.end)
            engine = make_engine(self._model, store, config or CacheConfig(), num_pages, share_prefixes=shares, **more)
            ends.callback(engine.close)
            ran = Workload(
                engine, self._sessions, self._order,
                num_places=num_places, num_sent=num_sent, costs=CostModel(self._model.calibration),
            ).run()  # fmt: skip
            if store is not None and isinstance(files, ColdFiles):
                wait_for_saves(engine)
                store.flush()
                self.cached_share = max(self.cached_share, statistics.mean(map(cached_share, store.paths())))
        if config is not None and config.disk is not None:
            shutil.rmtree(config.disk.folder)
        return ran

    def _config(self, arm: str) -> CacheConfig | None:
        """With a folder of its own: another run's files are not to be found."""
        if arm in (NONE, DEVICE):
            return None
        folder = Path(tempfile.mkdtemp(prefix="tiers-", dir=self._folder))
        config = cache_config(folder, host_bytes=self.host_bytes)
        return config if arm in (WITH_DISK, COLD_DISK) else replace(config, disk=None)


def row_of(name: str, ran: Ran) -> dict[str, Any]:
    """Make the row of one arm."""
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
        "prefill share": ran.prompts_s / ran.busy_s,
        "busy s": ran.busy_s,
        "blocked s": ran.blocked_s,
        "waiting": ran.num_waiting,
    }


def cost(name: str, ran: Ran) -> float:
    """Dollars: the device while it is busy or waits for the tier, and for as long what is under it."""
    return hourly(name) * ran.device_s / 3600


def hourly(name: str) -> float:
    """Dollars per hour of a device and what is under it."""
    host_gb = PAPER_HOST_GB if name in (WITH_HOST, WITH_DISK, COLD_DISK) else 0.0
    disk_gb = PAPER_DISK_GB if name in (WITH_DISK, COLD_DISK) else 0.0
    return Prices().hourly(1.0, host_gb, disk_gb)


def median_row(name: str, rounds: Sequence[Ran], **ratios: Sequence[float]) -> dict[str, Any]:
    """Make the row of an arm that ran several times: the median of each column. `ratios`: further columns."""
    rows = [row_of(name, ran) for ran in rounds]
    medians = {column: statistics.median(row[column] for row in rows) for column in rows[0] if column != "arm"}
    more = {column: statistics.median(found) for column, found in ratios.items()}
    return {"arm": name, "rounds": len(rows), **medians, **more}


def queue_rows(tiers: Tiers, num_rounds: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows of what goes from memory first, and of the queue that is seen ahead or is not; arms take turns."""
    policies = take_turns(POLICIES, tiers.run_queued, num_rounds, num_warm=0)
    queues = take_turns((HIDDEN, SEEN), tiers.run_ahead, num_rounds, num_warm=0)
    found = []
    for arms, base in ((policies, "lru"), (queues, HIDDEN)):
        base_s = [_mean_ttft_s(ran) for ran in arms[base]]
        rows = []
        for name, rounds in arms.items():
            over = [_mean_ttft_s(ran) / of for ran, of in zip(rounds, base_s, strict=True)]
            rows.append(median_row(name, rounds, **{f"ttft over {base}": over}))
        found.append(rows)
    return found[0], found[1]


def _mean_ttft_s(ran: Ran) -> float:
    return statistics.mean(each.ttft_s for each in ran.turns)


def found_of_history(ran: Ran) -> float:
    """The share found of what the conversations said before, in whole chunks: all of it was computed once.

    The last token of an answer is never computed.
    """
    whole = [max(each.history - 1, 0) // CHUNK_TOKENS * CHUNK_TOKENS for each in ran.turns]
    found = [min(each.usage.cached_tokens, most) for each, most in zip(ran.turns, whole, strict=True)]
    return sum(found) / sum(whole)


def checks_of(
    found: float,
    tiers: Sequence[dict[str, Any]],
    policies: Sequence[dict[str, Any]],
    queues: Sequence[dict[str, Any]],
    buffers: Sequence[dict[str, Any]],
    overlap: Sequence[dict[str, Any]],
    *,
    is_quick: bool,
) -> list[Check]:
    """With a disk for all of it everything is found, what is under a device pays, looking ahead does not cost,
    a read buffer spares the others, and steps do not wait for saving."""
    row = {each["arm"]: each for each in tiers}
    ttft = None if is_quick else row[WITH_HOST]["ttft mean ms"] / row[DEVICE]["ttft mean ms"]  # few turns, once each
    cost = None if is_quick else row[WITH_DISK]["cost of none"] / row[DEVICE]["cost of none"]
    hits = {each["arm"]: each["hit rate"] for each in policies}
    ahead = hits["lookahead"] / max(hits["lru"], hits["fifo"]) if hits else None
    fetch = next((each[f"ttft over {HIDDEN}"] for each in queues if each["arm"] == SEEN), None)
    buffer = {each["read buffer"]: each for each in buffers}
    none, most = buffer["0 layers"], buffers[-3]
    gap, over = "other's longest gap ms", buffer[FORMULA]["ttft ms"] / most["ttft ms"]
    return [
        at_least("disk_found_of_history", found, 0.99, "of whole chunks"),
        at_most("ttft_mean_host_over_device", ttft, 1.0),
        at_most("cost_disk_over_device", cost, 1.0),
        at_least("lookahead_eviction_hit_rate_over_lru_and_fifo", ahead, 1.0),
        at_most("lookahead_fetch_ttft_over_hidden_queue", fetch, 1.0),
        at_most("read_buffer_formula_ttft_over_all_layers", None if is_quick else over, 0.9),
        at_most("read_buffer_formula_gap_over_none", buffer[FORMULA][gap] / none[gap], 0.5),
        at_most("read_buffer_bounded_gap_over_none", buffer[BOUNDED][gap] / none[gap], 0.8),
        at_least(
            "saving_beside_below_waited_for",
            min(row["below waited for"] for row in overlap if row["saving"] == "beside"),
            0.0,
            "of the time",
        ),
    ]


def main() -> None:
    parser = options_of(
        __doc__, quick="12 sessions, no policies, 3 rounds; at most 90 s on 2 cores", out=True, folder=True
    )
    parser.add_argument("--sessions", type=int, help=f"default: {NUM_SESSIONS}, {PAPER_SESSIONS} with --paper")
    parser.add_argument("--rounds", type=int, default=3, help="of arms with a queue; two thirds with --paper")
    parser.add_argument("--paper", action="store_true", help="the paper's headline on its workload, and nothing else")
    args = parser.parse_args()
    if args.paper:
        against_paper(args)
        return
    run = Run("tiers", args, threads=1, cpu=torch.backends.cpu.get_cpu_capability(), dtype=str(DTYPE),
              models={shape: SHAPES[shape] for shape in (MODEL, SMALL_MODEL, DEEP_MODEL)}, chunk_tokens=CHUNK_TOKENS,
              warm_up=WARM_UP_SHARE, places=NUM_PLACES, queue_places=QUEUE_PLACES,
              queue_device_tokens=pages_for(QUEUE_CONTEXTS * CONTEXT) * PAGE_SIZE,
              queue_disk_bytes_per_s=QUEUE_DISK_BYTES_PER_S)  # fmt: skip
    num_sessions = args.sessions or (QUICK_SESSIONS if args.quick else NUM_SESSIONS)
    num_rounds = 3 if args.quick else 9
    with tempfile.TemporaryDirectory(prefix="mneme-", dir=args.folder) as name:
        folder = Path(name)
        models = {
            s: make_model(s, CONTEXT + FIG19_HISTORY, folder / "calibration", args.seed)
            for s in (MODEL, SMALL_MODEL, *([] if args.quick else [DEEP_MODEL]))
        }
        tiers = Tiers(models[MODEL], folder, make_sessions(num_sessions, args.seed), args.seed)
        ran = {arm: tiers.run(arm) for arm in ARMS}
        base = cost(NONE, ran[NONE])
        rows = [row_of(arm, each) | {"cost of none": cost(arm, each) / base} for arm, each in ran.items()]
        policies, queues = ([], []) if args.quick else queue_rows(tiers, args.rounds)
        deep = models[SMALL_MODEL if args.quick else DEEP_MODEL]
        buffers = read_buffer_rows(deep, folder / "buffers", num_rounds, args.seed)
        overlap = write_overlap_rows(models[SMALL_MODEL], num_rounds, args.seed)
    run.show(PartResult(name="tiers", title=f"{tiers.num_turns} turns, {tiers.num_tokens} tokens", rows=rows))
    run.show(PartResult(name="policies", title="what goes from memory first, with a queue, no disk", rows=policies))
    run.show(PartResult(name="look-ahead fetch", title="a queue that is seen, over a slow disk", rows=queues))
    run.show(PartResult(name="read buffer", title="layers read ahead", rows=buffers))
    checks = checks_of(found_of_history(ran[WITH_DISK]), rows, policies, queues, buffers, overlap, is_quick=args.quick)
    run.show(PartResult(name="write overlap", title="saving", rows=overlap, checks=checks))
    run.end(rows, draw, turns=tiers.num_turns, tokens=tiers.num_tokens, device_tokens=tiers.num_pages * PAGE_SIZE,
            host_bytes=tiers.host_bytes, policies=rounded(policies), queues=rounded(queues),
            read_buffers=rounded(buffers), write_overlap=rounded(overlap))  # fmt: skip


def against_paper(args: argparse.Namespace) -> None:
    dtype = choose_dtype("auto", torch.device("cpu"), "bfloat16")
    run = Run("tiers_paper", args, threads=1, cpu=torch.backends.cpu.get_cpu_capability(), dtype=str(dtype),
              model=PAPER_MODEL, chunk_tokens=CHUNK_TOKENS, warm_up=WARM_UP_SHARE, places=PAPER_PLACES)  # fmt: skip
    num_sessions = args.sessions or (QUICK_SESSIONS if args.quick else PAPER_SESSIONS)
    num_rounds = 1 if args.quick else max(2 * args.rounds // 3, 1)
    arms = (NONE, DEVICE, WITH_HOST, COLD_DISK)
    with tempfile.TemporaryDirectory(prefix="mneme-", dir=args.folder) as name:
        folder = Path(name)
        model = make_model(PAPER_MODEL, CONTEXT, folder / "calibration", args.seed, dtype=dtype)
        sessions = paper_sessions(num_sessions, args.seed)
        tiers = Tiers(model, folder, sessions, args.seed, num_places=PAPER_PLACES, num_contexts=PAPER_CONTEXTS)
        facts = {"turns": tiers.num_turns, "tokens": tiers.num_tokens, "host_bytes": tiers.host_bytes,
                 "device_tokens": tiers.num_pages * PAGE_SIZE,
                 "turns_per_session": tiers.num_turns / num_sessions}  # fmt: skip
        taken: dict[str, list[Ran]] = {arm: [] for arm in arms}

        def take(arm: str) -> None:
            taken[arm].append(tiers.run(arm))
            run.keep([row_of(each, ran) for each, rounds in taken.items() for ran in rounds], **facts)

        take_turns(arms, take, num_rounds, num_warm=0)
    base = taken[NONE]
    rows = []
    for arm, rounds in taken.items():
        over = [cost(arm, ran) / cost(NONE, of) for ran, of in zip(rounds, base, strict=True)]
        predicted = [predicted_cost(arm, ran, of) for ran, of in zip(rounds, base, strict=True)]
        rows.append(median_row(arm, rounds, **{"cost of none": over, "predicted cost": predicted}))
    first, last = rows[0], rows[-1]
    checks = [
        at_most("ttft_mean_disk_over_none", last["ttft mean ms"] / first["ttft mean ms"], 0.13),
        at_least("prefill_rate_disk_over_none", last["prompt tokens/s"] / first["prompt tokens/s"], 7.8),
        at_most("cost_disk_over_none", last["cost of none"], 0.3),
        at_most("disk_in_page_cache", tiers.cached_share, 0.01, "of its files"),
    ]
    title = f"{tiers.num_turns} turns, {tiers.num_tokens} tokens, {dtype}"
    run.show(PartResult(name="paper", title=title, rows=rows, checks=checks))
    run.end(rows, **facts)


def predicted_cost(arm: str, ran: Ran, none: Ran) -> float:
    """Predict the cost in `none`'s, from prompts' share of its time and the share of them that is found."""
    found = sum(ran.tokens_from(tier) for tier in ("device", "host", "disk")) / ran.prompt_tokens
    return (1 - none.prompts_s / none.device_s * found) * hourly(arm) / hourly(NONE)


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
    model = SMALL_MODEL if closing["quick"] else DEEP_MODEL
    save(folder / "tiers_read_buffer.png", title, f"{model}, {caption_of(closing)}",
         lambda axes: bars(axes, groups, times, "", "milliseconds"))  # fmt: skip


class Taken(NamedTuple):
    """One turn."""

    ttft_s: float  # from when it was sent
    usage: PromptUsage
    history: int  # tokens of its prompt that its conversation has said before


class Ran(NamedTuple):
    """The turns that count."""

    turns: list[Taken]
    busy_s: float  # inside of steps
    blocked_s: float  # between them, while all there was to do waited for the cache tier
    prefill_s: float  # inside of steps that computed rows of prompts
    prompts_s: float  # of these, what their rows of prompts take by the calibrated costs
    num_waiting: float  # requests that were not admitted yet, on average over steps

    @property
    def device_s(self) -> float:
        """For which nobody else could have had the device."""
        return self.busy_s + self.blocked_s

    def tokens_from(self, tier: str) -> int:
        return sum(each.usage.kv_details()[tier] for each in self.turns)

    @property
    def prompt_tokens(self) -> int:
        return sum(each.usage.prompt_tokens for each in self.turns)


def make_sessions(num_sessions: int, seed: int, answer_share: float = ANSWER_SHARE) -> list[Conversation]:
    """Whole conversations, cut answers."""
    rng = random.Random(f"{seed}.sessions")
    found = []
    for _ in range(num_sessions):
        turns = [Turn(t.num_in, max(int(t.num_out * answer_share), 1)) for t in _turns(rng, answer_share)]
        found.append(Conversation(0.0, turns, 0, rng.getrandbits(48)))
    return found


def _turns(rng: random.Random, answer_share: float) -> list[Turn]:
    """With questions as much longer as answers are shorter: histories are as long as ShareGPT's."""
    return [
        Turn(turn.num_in + turn.num_out - int(turn.num_out * answer_share), turn.num_out)
        for turn in draw_turns(LENGTHS["sharegpt"], CONTEXT, rng)
    ]


def paper_sessions(num_sessions: int, seed: int) -> list[Conversation]:
    """Conversations of two turns and more with the mean of AttentionStore's, uncut answers."""
    rng = random.Random(f"{seed}.paper")
    found: list[Conversation] = []
    while len(found) < num_sessions:
        turns = draw_turns(PAPER_LENGTHS, CONTEXT, rng, min_turns=2)
        found.append(Conversation(0.0, turns, 0, rng.getrandbits(48)))
    return found


def make_order(sessions: Sequence[Conversation], seed: int) -> list[int]:
    """Which session takes the next turn: drawn from those that have turns left."""
    rng = random.Random(f"{seed}.order")
    left = {index: len(each.turns) for index, each in enumerate(sessions)}
    order = []
    while left:
        index = rng.choice(sorted(left))
        order.append(index)
        left[index] -= 1
        if not left[index]:
            del left[index]
    return order


def prompt_rows(part: StepRows) -> int:
    """How many rows of its prompt a sequence computes in a step."""
    num_prompt = len(part.sequence.request.prompt_token_ids)
    return sum(max(min(end, num_prompt) - start, 0) for start, end in part.spans)


class Workload:
    """The turns on one engine, at most so many at once."""

    def __init__(
        self,
        engine: Engine,
        sessions: Sequence[Conversation],
        order: Sequence[int],
        *,
        num_places: int = NUM_PLACES,
        num_sent: int | None = None,
        costs: CostModel | None = None,
    ) -> None:
        """`num_sent`: of these the engine knows no more at once; `costs` part a step into prompts and decodes."""
        self._engine, self._sessions, self._num_places = engine, sessions, num_places
        self._num_sent, self._costs = num_sent or num_places, costs
        self._held: deque[GenerationRequest] = deque()  # the engine does not know them yet
        self._unsent = list(enumerate(order))
        self._ids: list[list[int]] = [[] for _ in sessions]
        self._turn = [0] * len(sessions)
        self._running: dict[str, tuple[int, int, int, float]] = {}  # session, number in the order, history, sent
        self._num_warm_up = int(WARM_UP_SHARE * len(order))
        self._turns: list[Taken] = []
        self._busy_s = self._blocked_s = self._prefill_s = self._prompts_s = 0.0
        self._num_steps = self._num_waited = 0
        self.scheduled: list[StepRows] = []  # of the last step

    def run(self) -> Ran:
        """Raises `MnemeError` if a turn fails."""
        with self.noted_batches():
            while self._unsent or self._running:
                self._send()
                self._step()
        mean_waiting = self._num_waited / max(self._num_steps, 1)
        return Ran(self._turns, self._busy_s, self._blocked_s, self._prefill_s, self._prompts_s, mean_waiting)

    def _step(self) -> None:
        blocked_s = self._wait() if self._engine.is_blocked else 0.0
        stepped_s = time.perf_counter()
        events = self._engine.step()
        ended_s = time.perf_counter()
        if self._is_warm:
            self._blocked_s += blocked_s
            self._busy_s += ended_s - stepped_s
            self._prefill_s += ended_s - stepped_s if any(map(prompt_rows, self.scheduled)) else 0.0
            self._prompts_s += (ended_s - stepped_s) * self._prompt_share()
            self._num_steps += 1
            self._num_waited += len(self._engine.scheduler.waiting)
        for event in events:
            if event.finish_reason == "error":
                raise MnemeError(f"{event.request_id}: {event.error}")
            self._take(event.request_id, event.token_ids, event.usage, ended_s)
            if event.finish_reason is not None:
                del self._running[event.request_id]

    def _prompt_share(self) -> float:
        """The part of the last step's time that its rows of prompts took, as calibrated."""
        if self._costs is None or not any(map(prompt_rows, self.scheduled)):
            return 0.0
        rows = [(part.num_rows, part.end - part.num_rows) for part in self.scheduled]
        of_prompts = [each for each, part in zip(rows, self.scheduled, strict=True) if prompt_rows(part)]
        return self._costs.step_s(of_prompts) / self._costs.step_s(rows)

    def _wait(self) -> float:
        """For the cache tier, a little; how long."""
        began_s = time.perf_counter()
        time.sleep(BLOCKED_S)
        return time.perf_counter() - began_s

    @contextmanager
    def noted_batches(self) -> Iterator[None]:
        """What steps compute is noted as it is scheduled."""
        scheduler = self._engine.scheduler
        schedule = scheduler.schedule

        def noted() -> list[StepRows]:
            self.scheduled = schedule()
            return self.scheduled

        scheduler.schedule = noted  # type: ignore[method-assign]
        try:
            yield
        finally:
            scheduler.schedule = schedule  # type: ignore[method-assign]

    @property
    def _is_warm(self) -> bool:
        return len(self._unsent) <= self._num_turns - self._num_warm_up

    @property
    def _num_turns(self) -> int:
        return sum(len(each.turns) for each in self._sessions)

    def _send(self) -> None:
        busy = {session for session, *_ in self._running.values()}
        while len(self._running) < self._num_places:
            place = next((p for p, (_, session) in enumerate(self._unsent) if session not in busy), None)
            if place is None:
                break
            number, session = self._unsent.pop(place)
            busy.add(session)
            history = len(self._ids[session])
            self._ids[session] += self._sessions[session].question(self._turn[session])
            num_out = self._sessions[session].turns[self._turn[session]].num_out
            self._turn[session] += 1
            name = f"{session}.{self._turn[session]}"
            self._running[name] = (session, number, history, time.perf_counter())
            self._held.append(request(name, self._ids[session], num_out))
        while self._held and len(self._engine.in_flight) < self._num_sent:
            self._engine.submit(self._held.popleft())

    def _take(self, name: str, token_ids: Sequence[int], usage: PromptUsage | None, now_s: float) -> None:
        session, number, history, sent_s = self._running[name]
        self._ids[session] += token_ids
        if usage is not None and number >= self._num_warm_up:
            self._turns.append(Taken(now_s - sent_s, usage, history))


class _Took(NamedTuple):
    ttft_s: float
    longest_s: float  # between two tokens of the other
    num_cached: int


class _Turns:
    """A turn whose history is on a disk, beside another that decodes, on engines that read ahead more or less."""

    def __init__(self, model: CachedModel, folder: Path, seed: int) -> None:
        self._ends, self._draw, self._files = ExitStack(), DrawIds(seed), ThrottledFiles()
        self._history_bytes = FIG19_HISTORY * kv_bytes_per_token(model.decoder.config, model.decoder.dtype)
        self.num_layers = model.decoder.config.num_layers
        costs = model.calibration
        compute_s = CostModel(costs).prefill_s(FIG19_NEW, FIG19_HISTORY)
        self.bytes_per_s = self._history_bytes / (LOAD_OVER_COMPUTE * compute_s)
        edges = {**costs.edges, "disk": (0.0, 0.0, 1 / self.bytes_per_s)}  # as if calibrated on that disk
        self._model = model._replace(calibration=replace(costs, edges=edges))
        self._config = cache_config(folder, load="always")  # however slow the disk is
        self._store = RestartableStore(self._config, self._files)
        self._ends.callback(self._store.end)
        self._history = tell(model, self._store, self._draw.ids(FIG19_HISTORY - 64))

    def close(self) -> None:
        self._ends.close()

    def engine(self, buffer: str | int) -> Engine:
        """With a read buffer of so many layers, or as the arm says."""
        store = None if buffer == ANEW else self._store
        room = BOUND_SHARE if buffer == BOUNDED else 2
        config = replace(self._config, read_buffer_bytes=int(room * self._history_bytes))
        engine = make_engine(self._model, store, config, pages_for(FIG19_HISTORY + FIG19_NEW + NUM_OTHER + MAX_OTHER))
        self._ends.callback(engine.close)
        if isinstance(buffer, int):
            num_bytes = math.inf if buffer == self.num_layers else self._history_bytes / self.num_layers * buffer
            _fix_buffer(engine, num_bytes)
        return engine

    def take(self, engine: Engine) -> _Took:
        """Raises `MnemeError` if the other ends first: then nothing was to be held up."""
        self._files.bytes_per_s = None
        self._store.restart(is_cold=False)
        self._files.bytes_per_s = self.bytes_per_s
        engine.forest.clear()
        engine.submit(request("other", self._draw.ids(NUM_OTHER), MAX_OTHER))
        for _ in range(4):
            engine.step()
        sent_s = other_s = time.perf_counter()
        engine.submit(request("turn", self._history + self._draw.ids(FIG19_NEW), 1))
        longest_s = 0.0
        took_s, num_cached = 0.0, 0
        while "turn" in engine.in_flight:
            for event in engine.step():
                now_s = time.perf_counter()
                if event.request_id == "turn" and event.usage is not None:
                    took_s, num_cached = now_s - sent_s, event.usage.cached_tokens
                elif event.request_id == "other":
                    longest_s, other_s = max(longest_s, now_s - other_s), now_s
        if "other" not in engine.in_flight:
            raise MnemeError(f"the turn takes longer than {MAX_OTHER} tokens of another")
        engine.abort("other")
        engine.take_events()
        wait_for_saves(engine)
        return _Took(took_s, longest_s, num_cached)


def _fix_buffer(engine: Engine, num_bytes: float) -> None:
    """Let plans have this read buffer in the place of the formula's. No option: nobody else wants another."""
    assert engine.connector is not None
    controller = engine.connector.loads._controller
    plan = controller.plan

    def fixed(*args: Any, **options: Any) -> LoadPlan:
        return replace(plan(*args, **options), buffer_bytes=num_bytes)

    controller.plan = fixed  # type: ignore[method-assign]


def read_buffer_rows(model: CachedModel, folder: Path, num_rounds: int, seed: int) -> list[dict[str, Any]]:
    """A row per size of the read buffer, in layers of the history: an eighth of them more each; then by name."""
    turns = _Turns(model, folder, seed)
    try:
        steps = range(0, turns.num_layers + 1, max(turns.num_layers // 8, 1))
        arms: list[str | int] = [ANEW, *steps, FORMULA, BOUNDED]
        engines = {arm: turns.engine(arm) for arm in arms}
        found = take_turns(arms, lambda arm: turns.take(engines[arm]), num_rounds)
    finally:
        turns.close()
    return [
        {
            "read buffer": f"{arm} layers" if isinstance(arm, int) else arm,
            "rounds": num_rounds,
            "ttft ms": statistics.median(each.ttft_s for each in found[arm]) * 1e3,
            "other's longest gap ms": statistics.median(each.longest_s for each in found[arm]) * 1e3,
            "found share": statistics.mean(each.num_cached for each in found[arm]) / FIG19_HISTORY,
            "disk MB/s": turns.bytes_per_s / 1e6,
        }
        for arm in arms
    ]


def write_overlap_rows(model: CachedModel, num_rounds: int, seed: int) -> list[dict[str, Any]]:
    """A row per length of the prompt and way of saving, all to memory."""
    draw, arms = DrawIds(seed), (NO_SAVING, BESIDE, WAITED_FOR)
    config = CacheConfig(host_bytes=256 << 20)
    with ExitStack() as ends:
        engines = {}
        for name in arms:
            store = None if name == NO_SAVING else RestartableStore(config)
            engines[name] = make_engine(model, store, config, pages_for(max(PROMPTS) + NUM_OUT))
            ends.callback(engines[name].close)
            if store is not None:
                ends.callback(store.end)
        return [row for length in PROMPTS for row in _overlap_rows(engines, draw, length, num_rounds)]


def _overlap_rows(engines: dict[str, Engine], draw: DrawIds, length: int, num_rounds: int) -> list[dict[str, Any]]:
    def saved_s(name: str) -> float:
        took_s = _saved(engines[name], draw.ids(length), is_waited_for=name == WAITED_FOR)
        wait_for_saves(engines[name])
        return took_s

    found = take_turns(engines, saved_s, num_rounds)
    return [
        {
            "prompt": length,
            "saving": name,
            "rounds": num_rounds,
            "ms": statistics.median(took) * 1e3,
            "below waited for": 1 - median_ratio(took, found[WAITED_FOR]),
        }
        for name, took in found.items()
    ]


def _saved(engine: Engine, ids: Sequence[int], *, is_waited_for: bool) -> float:
    """Seconds until the answer has ended and, if that is waited for after each step, all of it is saved."""
    engine.forest.clear()
    if not is_waited_for:
        return answer(engine, ids, NUM_OUT).total_s
    began_s = time.perf_counter()
    engine.submit(request("turn", ids, NUM_OUT))
    while engine.has_work:
        if engine.is_blocked:
            time.sleep(BLOCKED_S)
        if any(event.finish_reason == "error" for event in engine.step()):
            raise MnemeError("a prompt failed")
        wait_for_saves(engine)
    return time.perf_counter() - began_s


if __name__ == "__main__":
    main()
