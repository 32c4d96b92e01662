"""Conversations that outgrow their device, with nothing, memory and a disk under it (AttentionStore 4, Fig. 13 to 18).

    python benchmarks/bench_tiers.py [--quick] [--paper] [--sessions N] [--rounds 3] [--folder DIR] [--out DIR]

*Tiers*: conversations with ShareGPT's histories, four at a time, warmed up on their first fifth. `none` keeps nothing,
`device` keeps KV in a pool of a fifth of all tokens, `+host` 30% more in memory, `+disk (page cache)` all in files,
which were written moments ago: the kernel has them in memory, so that this says what is found, not what a disk's speed
makes of it. Shares of prompt tokens by where their KV came from, time to first token, prompt tokens per second of the
steps that computed rows of prompts, seconds in steps (`busy`) and between them while the engine could only wait for the
tier (`blocked`), and what both cost on a machine of the paper's prices and sizes (four A100s at $20 per hour, 128 GB of
memory, 10 TB of SSD).

Lengths are ShareGPT's as in Pensieve's Table 2, with answers cut to a quarter and questions as much longer, so that
prompts are most of the work. The order of turns is drawn once: every arm takes the same turns in the same order. A
session's next turn is sent as soon as there is a place, but never before its last one has ended.

*Look-ahead fetch*: 16 at a time, of which four run, over a disk of 200 MB/s, with little memory. `seen`: requests
wait in the engine, which reads ahead for them; `hidden`: they wait outside, and the engine hears of one when it has a
place for it. Both are timed from when they were sent, and take turns.

`--paper` runs *tiers* alone, as the paper's headline does, and holds it against that (TTFT -87%, 7.8 times the prefill
throughput, cost -70%; four 13B to 70B models on A100s): conversations of two turns and more, 5.75 on average, answers
uncut; 16 at a time on a device for a fifth of all tokens, and memory for 30% more, so that half is on the disk alone;
`llama-31m` in the dtype that an engine chooses here, and a disk whose files the kernel forgets as they are closed,
which is verified at the end (`+disk (cold)`). Arms take turns; a figure is the median of its rounds.

What bounds it, one thread: computing prompts that were not found, and decode steps, which no tier changes. The model
is small (`llama-5m`), so that KV is as heavy beside computing on a CPU as a large model's on a GPU.
"""

from __future__ import annotations

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
from typing import Any, NamedTuple

import torch
from cache_engines import (
    CHUNK_TOKENS,
    CachedModel,
    ColdFiles,
    RestartableStore,
    ThrottledFiles,
    cache_config,
    cached_share,
    make_engine,
    make_model,
    pages_for,
    wait_for_saves,
)
from engines import DTYPE, PAGE_SIZE, request
from harness import Check, PartResult, Run, at_least, at_most, options_of, take_turns
from random_models import SHAPES, kv_bytes_per_token
from workloads import VOCAB_SIZE

from mneme.cachetier.chunk.syscalls import FileOperations
from mneme.cachetier.config import CacheConfig
from mneme.errors import MnemeError
from mneme.lab.cache.costs import Prices
from mneme.replicas.engine.build import choose_dtype
from mneme.replicas.engine.engine import BLOCKED_S, Engine
from mneme.replicas.request import GenerationRequest, PromptUsage
from mneme.replicas.sequence import StepRows

NONE, DEVICE, WITH_HOST, WITH_DISK, COLD_DISK = "none", "device", "+host", "+disk (page cache)", "+disk (cold)"
SEEN, HIDDEN = "seen", "hidden"
DEVICE_SHARE, HOST_SHARE = 0.2, 0.3  # of all sessions' KV
PAPER_HOST_GB, PAPER_DISK_GB = 128.0, 10_000.0
CONTEXT = 2048
WARM_UP_SHARE = 0.2  # of the turns, which do not count
QUICK_SESSIONS = 12
QUEUE_PLACES, QUEUE_RUNNING = 16, 4  # under look-ahead fetch: requests at once, and those that run
QUEUE_DISK_BYTES_PER_S, QUEUE_HOST_SHARE = 200e6, 0.15


class Lengths(NamedTuple):
    """Means to draw from, before cuts; those of what is left are the paper's."""

    more_turns: float  # beyond one less than there are at least
    tokens_in: float
    tokens_out: float
    min_turns: int
    answer_share: float  # of an answer that is kept; the question is as much longer


class Setting(NamedTuple):
    """The conversations, and what there is for them."""

    model: str
    lengths: Lengths
    num_sessions: int
    num_places: int  # requests in the engine at once
    num_contexts: int  # whole ones that the pool has room for at least
    arms: tuple[str, ...]


# Means after both cuts are those of Pensieve's Table 2, and 5.75 turns (AttentionStore 4.1).
OWN = Setting("llama-5m", Lengths(7.3302, 31.113, 198.608, 5, 0.25), 28, 4, 4, (NONE, DEVICE, WITH_HOST, WITH_DISK))
PAPER = Setting("llama-31m", Lengths(6.3, 31.113, 185.0, 2, 1.0), 60, 16, 4, (NONE, DEVICE, WITH_HOST, COLD_DISK))


class Turn(NamedTuple):
    num_in: int
    num_out: int


class Conversation(NamedTuple):
    turns: list[Turn]
    seed: int

    def question(self, number: int) -> list[int]:
        """Token ids that the turn adds; the same in every run."""
        return random.Random(f"{self.seed}.{number}").choices(range(16, VOCAB_SIZE), k=self.turns[number].num_in)


def make_sessions(lengths: Lengths, num_sessions: int, seed: int) -> list[Conversation]:
    """Whole conversations: turns geometric, tokens exponential; what has too few turns in the context is left out."""
    rng, found = random.Random(f"{seed}.sessions"), list[Conversation]()
    while len(found) < num_sessions:
        turns = list(_fitting(lengths, rng))
        if len(turns) >= lengths.min_turns:
            found.append(Conversation(turns, rng.getrandbits(48)))
    return found


def _fitting(lengths: Lengths, rng: random.Random) -> Iterator[Turn]:
    num, room = lengths.min_turns, CONTEXT
    while rng.random() >= 1 / lengths.more_turns:
        num += 1
    for _ in range(num):
        num_in, num_out = (1 + int(rng.expovariate(1 / mean)) for mean in (lengths.tokens_in, lengths.tokens_out))
        room -= num_in + num_out
        if room < 0:
            return
        kept = max(int(num_out * lengths.answer_share), 1)
        yield Turn(num_in + num_out - kept, kept)


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

    def tokens_from(self, tier: str) -> int:
        return sum(each.usage.kv_details()[tier] for each in self.turns)

    @property
    def prompt_tokens(self) -> int:
        return sum(each.usage.prompt_tokens for each in self.turns)

    @property
    def mean_ttft_s(self) -> float:
        return statistics.mean(each.ttft_s for each in self.turns)


def prompt_rows(part: StepRows) -> int:
    """How many rows of its prompt a sequence computes in a step."""
    num_prompt = len(part.sequence.request.prompt_token_ids)
    return sum(max(min(end, num_prompt) - start, 0) for start, end in part.spans)


class Workload:
    """The turns on one engine, at most so many at once."""

    def __init__(
        self, engine: Engine, sessions: Sequence[Conversation], order: Sequence[int], *, num_places: int,
        num_sent: int | None = None,
    ) -> None:  # fmt: skip
        """`num_sent`: of these the engine knows no more at once."""
        self._engine, self._sessions, self._num_places = engine, sessions, num_places
        self._num_sent = num_sent or num_places
        self._held: deque[GenerationRequest] = deque()  # the engine does not know them yet
        self._unsent = list(enumerate(order))
        self._ids: list[list[int]] = [[] for _ in sessions]
        self._turn = [0] * len(sessions)
        self._running: dict[str, tuple[int, int, int, float]] = {}  # session, number in the order, history, sent
        self._num_warm_up = int(WARM_UP_SHARE * len(order))
        self._num_counted = len(order) - self._num_warm_up
        self._turns: list[Taken] = []
        self._busy_s = self._blocked_s = self._prefill_s = 0.0
        self.scheduled: list[StepRows] = []  # of the last step

    def run(self) -> Ran:
        """Raises `MnemeError` if a turn fails."""
        with self.noted_batches():
            while self._unsent or self._running:
                self._send()
                self._step()
        return Ran(self._turns, self._busy_s, self._blocked_s, self._prefill_s)

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

    def _step(self) -> None:
        began_s = time.perf_counter()
        if self._engine.is_blocked:
            time.sleep(BLOCKED_S)
        stepped_s = time.perf_counter()
        events = self._engine.step()
        ended_s = time.perf_counter()
        if len(self._unsent) <= self._num_counted:
            self._blocked_s += stepped_s - began_s
            self._busy_s += ended_s - stepped_s
            self._prefill_s += ended_s - stepped_s if any(map(prompt_rows, self.scheduled)) else 0.0
        for event in events:
            if event.finish_reason == "error":
                raise MnemeError(f"{event.request_id}: {event.error}")
            session, number, history, sent_s = self._running[event.request_id]
            self._ids[session] += event.token_ids
            if event.usage is not None and number >= self._num_warm_up:
                self._turns.append(Taken(ended_s - sent_s, event.usage, history))
            if event.finish_reason is not None:
                del self._running[event.request_id]

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


class Tiers:
    """The workload, and engines under which there is more and more."""

    def __init__(self, setting: Setting, model: CachedModel, folder: Path, num_sessions: int, seed: int) -> None:
        self._model, self._folder, self._num_places = model, folder, setting.num_places
        self._sessions = make_sessions(setting.lengths, num_sessions, seed)
        self._order = make_order(self._sessions, seed)
        num_tokens = sum(sum(turn) for each in self._sessions for turn in each.turns)
        self._num_pages = max(int(DEVICE_SHARE * num_tokens), setting.num_contexts * CONTEXT) // PAGE_SIZE
        self._kv_bytes = num_tokens * kv_bytes_per_token(model.decoder.config, model.decoder.dtype)
        self.cached_share = 0.0  # of the cold disk's files, the part that the kernel has; the most of all rounds
        self.facts = {
            "turns": len(self._order), "tokens": num_tokens, "device_tokens": self._num_pages * PAGE_SIZE,
            "turns_per_session": len(self._order) / num_sessions,
        }  # fmt: skip

    def run(self, arm: str) -> Ran:
        """On an engine and a store of their own."""
        files = ColdFiles() if arm == COLD_DISK else FileOperations()
        return self._run(self._config(arm), files, self._num_pages, self._num_places, share_prefixes=arm != NONE)

    def run_ahead(self, queue: str) -> Ran:
        """Likewise, with a slow disk; the queue is `SEEN` by the engine or `HIDDEN` from it."""
        files = ThrottledFiles()
        files.bytes_per_s = QUEUE_DISK_BYTES_PER_S
        config = self._config(WITH_DISK)
        assert config is not None
        config = replace(config, host_bytes=int(QUEUE_HOST_SHARE * self._kv_bytes))
        return self._run(
            config, files, pages_for(QUEUE_RUNNING * CONTEXT), QUEUE_PLACES,
            num_sent=QUEUE_RUNNING if queue == HIDDEN else None, max_running=QUEUE_RUNNING,
        )  # fmt: skip

    def _run(
        self, config: CacheConfig | None, files: FileOperations, num_pages: int, num_places: int, *,
        num_sent: int | None = None, **more: Any,
    ) -> Ran:  # fmt: skip
        with ExitStack() as ends:
            store = None if config is None else RestartableStore(config, files)
            if store is not None:
                ends.callback(store.end)
            engine = make_engine(self._model, store, config or CacheConfig(), num_pages, **more)
            ends.callback(engine.close)
            ran = Workload(engine, self._sessions, self._order, num_places=num_places, num_sent=num_sent).run()
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
        config = cache_config(folder, host_bytes=int(HOST_SHARE * self._kv_bytes))
        return config if arm in (WITH_DISK, COLD_DISK) else replace(config, disk=None)


def cost(arm: str, ran: Ran) -> float:
    """Dollars: the device while it is busy or waits for the tier, and for as long what is under it."""
    host_gb = PAPER_HOST_GB if arm in (WITH_HOST, WITH_DISK, COLD_DISK) else 0.0
    disk_gb = PAPER_DISK_GB if arm in (WITH_DISK, COLD_DISK) else 0.0
    return Prices().hourly(1.0, host_gb, disk_gb) * (ran.busy_s + ran.blocked_s) / 3600


def row_of(name: str, ran: Ran) -> dict[str, Any]:
    """Make the row of one run."""
    ttfts = sorted(each.ttft_s for each in ran.turns)
    shares = {tier: ran.tokens_from(tier) / ran.prompt_tokens for tier in ("device", "host", "disk")}
    return {
        "arm": name,
        "turns": len(ran.turns),
        **shares,
        "hit rate": sum(shares.values()),
        "ttft mean ms": ran.mean_ttft_s * 1e3,
        "ttft p90 ms": ttfts[int(0.9 * len(ttfts))] * 1e3,
        "prompt tokens/s": ran.prompt_tokens / ran.prefill_s,
        "busy s": ran.busy_s,
        "blocked s": ran.blocked_s,
    }


def median_row(name: str, rounds: Sequence[Ran], **ratios: Sequence[float]) -> dict[str, Any]:
    """Make the row of an arm that ran several times: the median of each column. `ratios`: further columns."""
    rows = [row_of(name, ran) for ran in rounds]
    medians = {column: statistics.median(row[column] for row in rows) for column in rows[0] if column != "arm"}
    return {"arm": name, "rounds": len(rows), **medians, **{of: statistics.median(all_) for of, all_ in ratios.items()}}


def tier_rows(taken: dict[str, list[Ran]]) -> list[dict[str, Any]]:
    base = [cost(NONE, ran) for ran in taken[NONE]]
    return [
        median_row(arm, rounds, cost_of_none=[cost(arm, ran) / of for ran, of in zip(rounds, base, strict=True)])
        for arm, rounds in taken.items()
    ]


def found_of_history(ran: Ran) -> float:
    """The share found of what the conversations said before, in whole chunks: all of it was computed once.

    The last token of an answer is never computed.
    """
    whole = [max(each.history - 1, 0) // CHUNK_TOKENS * CHUNK_TOKENS for each in ran.turns]
    found = [min(each.usage.cached_tokens, most) for each, most in zip(ran.turns, whole, strict=True)]
    return sum(found) / sum(whole)


def own_checks(disk: Ran, rows: Sequence[dict[str, Any]], *, is_quick: bool) -> list[Check]:
    """With a disk for all of it everything is found, and what is under a device pays."""
    row = {each["arm"]: each for each in rows}
    ttft = None if is_quick else row[WITH_HOST]["ttft mean ms"] / row[DEVICE]["ttft mean ms"]  # few turns, once each
    spent = None if is_quick else row[WITH_DISK]["cost_of_none"] / row[DEVICE]["cost_of_none"]
    return [
        at_least("disk_found_of_history", found_of_history(disk), 0.99, "of whole chunks"),
        at_most("ttft_mean_host_over_device", ttft, 1.0),
        at_most("cost_disk_over_device", spent, 1.0),
    ]


def paper_checks(rows: Sequence[dict[str, Any]], cached: float) -> list[Check]:
    first, last = rows[0], rows[-1]
    return [
        at_most("ttft_mean_disk_over_none", last["ttft mean ms"] / first["ttft mean ms"], 0.13),
        at_least("prefill_rate_disk_over_none", last["prompt tokens/s"] / first["prompt tokens/s"], 7.8),
        at_most("cost_disk_over_none", last["cost_of_none"], 0.3),
        at_most("disk_in_page_cache", cached, 0.01, "of its files"),
    ]


def queue_part(tiers: Tiers | None, num_rounds: int) -> PartResult:
    """The queue that is seen ahead or is not; None: not run."""
    part = PartResult(name="look-ahead fetch", title="a queue that is seen, over a slow disk")
    over = None
    if tiers is not None:
        taken = take_turns((HIDDEN, SEEN), tiers.run_ahead, num_rounds, num_warm=0)
        ratios = [a.mean_ttft_s / b.mean_ttft_s for a, b in zip(taken[SEEN], taken[HIDDEN], strict=True)]
        part.rows, over = [median_row(name, rounds) for name, rounds in taken.items()], statistics.median(ratios)
    part.checks = [at_most("lookahead_fetch_ttft_over_hidden_queue", over, 1.0)]
    return part


def main() -> None:
    parser = options_of(__doc__, quick="12 sessions once, no queue; at most 90 s on 2 cores", out=True, folder=True)
    parser.add_argument("--sessions", type=int, help=f"default: {OWN.num_sessions}, {PAPER.num_sessions} with --paper")
    parser.add_argument("--rounds", type=int, default=3, help="of the queue, and of --paper's arms")
    parser.add_argument("--paper", action="store_true", help="the paper's headline on its workload, and nothing else")
    args = parser.parse_args()
    setting = PAPER if args.paper else OWN
    dtype = choose_dtype("auto", torch.device("cpu"), "bfloat16") if args.paper else DTYPE
    run = Run("tiers_paper" if args.paper else "tiers", args, threads=1, cpu=torch.backends.cpu.get_cpu_capability(),
              dtype=str(dtype), model=SHAPES[setting.model], chunk_tokens=CHUNK_TOKENS, warm_up=WARM_UP_SHARE,
              places=setting.num_places)  # fmt: skip
    num_sessions = args.sessions or (QUICK_SESSIONS if args.quick else setting.num_sessions)
    num_rounds = args.rounds if args.paper and not args.quick else 1
    with tempfile.TemporaryDirectory(prefix="mneme-", dir=args.folder) as name:
        model = make_model(setting.model, 2 * CONTEXT, Path(name) / "calibration", args.seed, dtype=dtype)
        tiers = Tiers(setting, model, Path(name), num_sessions, args.seed)
        taken = take_turns(setting.arms, tiers.run, num_rounds, num_warm=0)
        rows = tier_rows(taken)
        title = f"{tiers.facts['turns']} turns, {tiers.facts['tokens']} tokens, {dtype}"
        part = PartResult(name="tiers", title=title, rows=rows)
        part.checks = (
            paper_checks(rows, tiers.cached_share)
            if args.paper
            else own_checks(taken[WITH_DISK][-1], rows, is_quick=args.quick)
        )
        run.show(part)
        queue = None if args.paper else run.show(queue_part(None if args.quick else tiers, args.rounds))
    run.end({"tiers": rows, **({} if queue is None else {"queue": queue.rows})}, **tiers.facts)


if __name__ == "__main__":
    main()
