"""How well `mneme simulate cluster` predicts: real engines against the simulator, by rate and policy.

    python benchmarks/bench_simulator.py [--quick] [--engines 3]

Sessions of several turns arrive by Poisson at three shares of what the engines could do at best. Each policy plays them
on real engines (a random 31M Llama, one thread; no HTTP, no Ray) with the router's object, and in the simulator, every
step; both give prompts beside streams the time that an engine gives them by default. A real engine's clock is the CPU
time of its own steps, as if each had a core of its own: engines step one after the other in this process, and what else
runs on the machine delays none. The costs, the simulator's and the real engines' own, are fitted to the steps of a run
with other sessions before the first, and scaled by the steps of the run before the one that is compared. Each run
begins with empty caches.

Reported: the mean absolute percentage error of the p50 time to the first token and of the hit ratio over the grid; and
of all pairs of policies at one rate whose real p50 differ by over a tenth, the share that the simulator puts in the
same order. What bounds it: caches and memory that engines share with whatever else runs change what a step takes.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
import random
import statistics
import time
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import torch
from engines import DEVICE_ONLY, MAIN_MODEL, PAGE_SIZE, make_decoder, make_runner, request
from harness import PartResult, Run, at_least, at_most, options_of

from mneme.cachetier.policy.cost_model import Calibration, CostModel, calibrated
from mneme.lab.cache.simulator import rank
from mneme.lab.cluster.play import ClusterShape, Simulation
from mneme.lab.cluster.policies import World
from mneme.lab.cluster.replica import EngineShape, Status
from mneme.lab.cluster.routers import ROUTERS
from mneme.lab.cluster.workload import Turn
from mneme.replicas.config import EngineConfig
from mneme.replicas.engine.engine import Engine
from mneme.replicas.engine.stats import backlog_s, num_queued_tokens
from mneme.replicas.forest.pages import DEVICE, Page
from mneme.replicas.model.runner import Runner
from mneme.replicas.request import TokenEvent

BLOCK_TOKENS, NUM_PAGES = 64, 2048
FIRST_BLOCKS, TURN_BLOCKS, NUM_TURNS, NUM_OUTPUT = 12, 3, 5, 16
THINK_S = 1.0
MAX_BATCH_TOKENS = 512
SHARES = (0.5, 0.7, 0.9)  # of what the engines could do if every turn found its history
POLICIES = ("mneme", "round-robin", "power-of-two", "hash", "ray", "dynamo")
CLEARLY = 1.1  # times as long
TTFT_TARGET, HIT_TARGET, ORDER_TARGET = 0.15, 0.05, 0.9
GUESS = Calibration(prefill=(0, 1e-4, 0), decode=(1e-3, 0, 0), step_rows=MAX_BATCH_TOKENS, kv_bytes_per_token=8192)

Step = tuple[list[tuple[int, int]], float]  # (rows, context) of each sequence, seconds


class TimedEngine:
    """A real engine whose steps take their CPU time; the next one ends at `next_s`, if it has anything to do."""

    def __init__(self, runner: Runner, costs: CostModel, on_block: Callable[[bytes, bool], None]) -> None:
        config = EngineConfig(page_size=PAGE_SIZE, max_batch_tokens=MAX_BATCH_TOKENS, max_waiting=2**20)
        own_costs = CostModel(costs.calibration, lambda: 0.0, scales=scales_of(costs))  # it learns
        self.engine = Engine(runner, None, config, costs=own_costs, clock=time.process_time)
        self.next_s = math.inf
        self.steps: list[Step] = []
        self._costs, self._on_block, self._events = costs, on_block, list[TokenEvent]()
        self._batches = noted_batches(self.engine.scheduler)
        self._changed = self.engine.forest.report_changes()
        self._told: dict[Page, bytes] = {}

    def submit(self, number: int, ids: Sequence[int], now_s: float) -> None:
        self.engine.submit(request(str(number), ids, NUM_OUTPUT))
        if self.next_s == math.inf:
            self._step(now_s)

    def advance(self, now_s: float) -> list[TokenEvent]:
        """The step has ended; return what came of it."""
        events = self._events
        while self._changed:
            page = self._changed.pop()
            is_block = page.filled[DEVICE] == PAGE_SIZE and page.end % BLOCK_TOKENS == 0
            there = page.tokens.tobytes() if is_block else b""
            told = self._told.pop(page, b"")
            if there:
                self._told[page] = there
            for tokens in {told, there} - {b""} if told != there else ():
                self._on_block(tokens, tokens == there)
        self._step(now_s)
        return events

    def _step(self, now_s: float) -> None:
        self.next_s = math.inf
        if self.engine.has_work:
            started_s = time.process_time()
            self._events = self.engine.step()
            took_s = time.process_time() - started_s
            rows = [(part.num_rows, part.end - part.num_rows) for part in self._batches.pop()]
            self.steps.append((rows, took_s))
            self.next_s = now_s + took_s

    def status(self) -> Status:
        """As its reports say."""
        engine, running = self.engine, self.engine.scheduler.running
        num_queued, context = num_queued_tokens(engine), sum(len(each.context) for each in running)
        queue_s = backlog_s(self._costs, num_queued, len(running), context)
        return Status(queue_s, num_queued, len(running), engine.limits.num_requests, context, 1.0)


def noted_batches(scheduler: Any) -> list[Any]:
    """The list to which each step's batch is added."""
    batches: list[Any] = []
    schedule = scheduler.schedule

    def noted() -> Any:
        batches.append(schedule())
        return batches[-1]

    scheduler.schedule = noted
    return batches


def make_turns(sessions_per_s: float, span_s: float, seed: int) -> list[Turn]:
    rng, ids, turns, at_s = random.Random(seed), itertools.count(), list[Turn](), 0.0
    for session in itertools.count():
        at_s += rng.expovariate(sessions_per_s)
        if at_s > span_s:
            return turns
        blocks, after = [*itertools.islice(ids, FIRST_BLOCKS)], tuple[Turn, ...]()
        for _ in range(NUM_TURNS):
            delay_s = rng.expovariate(1 / THINK_S)
            size = len(blocks) * BLOCK_TOKENS
            turns.append(Turn(at_s, [*blocks], size, NUM_OUTPUT, BLOCK_TOKENS, session, after, delay_s))
            after = (turns[-1],)
            blocks += itertools.islice(ids, TURN_BLOCKS)
    return turns


def token_ids(turn: Turn) -> list[int]:
    return [
        token for block in turn.block_ids for token in random.Random(block).choices(range(1000, 8000), k=BLOCK_TOKENS)
    ]


def best_s(costs: CostModel) -> float:
    """Seconds of an engine that a session takes at least."""
    blocks = [(FIRST_BLOCKS if number == 0 else TURN_BLOCKS) * BLOCK_TOKENS for number in range(NUM_TURNS)]
    prefill_s = sum(costs.prefill_s(new, sum(blocks[:number])) for number, new in enumerate(blocks))
    return prefill_s + NUM_TURNS * (NUM_OUTPUT - 1) * costs.decode_s(4, 4 * sum(blocks)) / 4


def play(
    turns: Sequence[Turn], policy: str, runners: Sequence[Runner], costs: CostModel, seed: int
) -> tuple[dict[str, float], list[Step]]:
    """Play the turns on real engines, with the simulator's router; return also the steps they made."""
    now_s = 0.0
    router = ROUTERS[policy](random.Random(f"{seed}.0"), World(costs, lambda: now_s, BLOCK_TOKENS, {}))
    prompts = [token_ids(turn) for turn in turns]
    page_bytes, block_by_page = 4 * PAGE_SIZE, dict[bytes, int]()  # by the tokens of the last page of each block
    for turn, ids in zip(turns, prompts, strict=True):
        packed = array("i", ids).tobytes()
        for index, block_id in enumerate(turn.block_ids, 1):
            end = index * 4 * BLOCK_TOKENS
            block_by_page[packed[end - page_bytes : end]] = block_id

    def told(replica: int, tokens: bytes, is_there: bool) -> None:
        if (block_id := block_by_page.get(tokens)) is not None:
            router.placed(replica, block_id, DEVICE if is_there else None)

    engines = [TimedEngine(r, costs, functools.partial(told, number)) for number, r in enumerate(runners)]
    router.set_replicas(range(len(engines)))
    for number, engine in enumerate(engines):
        router.reported(number, engine.status())
    number_by_turn = {id(turn): number for number, turn in enumerate(turns)}
    behind = {id(turn.after[0]): turn for turn in turns if turn.after}
    due = [(turn.at_s, number) for number, turn in enumerate(turns) if not turn.after]
    heapq.heapify(due)
    due_s, ttft_s, num_found, num_done = dict[int, float](), list[float](), 0, 0
    while num_done < len(turns):
        end_s, index = min((engine.next_s, index) for index, engine in enumerate(engines))
        if due and due[0][0] <= end_s:
            now_s, number = heapq.heappop(due)
            due_s[number] = now_s
            engines[router.place(turns[number])].submit(number, prompts[number], now_s)
            continue
        now_s = end_s
        for event in engines[index].advance(now_s):
            number = int(event.request_id)
            turn = turns[number]
            if event.usage is not None:
                cached = event.usage.cached_tokens
                ttft_s.append(now_s - due_s[number])
                found = (cached + (cached == turn.input_tokens - 1)) // BLOCK_TOKENS
                num_found += found
                router.started(turn, found)
            if event.finish_reason is not None:
                assert event.finish_reason == "length", event
                router.ended(turn)
                num_done += 1
                if (following := behind.get(id(turn))) is not None:
                    heapq.heappush(due, (now_s + following.delay_s, number_by_turn[id(following)]))
        router.reported(index, engines[index].status())
    for engine in engines:
        engine.engine.close()
    figures = {"ttft_p50_s": rank(sorted(ttft_s), 50), "hit_ratio": num_found / sum(len(t.block_ids) for t in turns)}
    return figures, [step for engine in engines for step in engine.steps]


def scales_of(costs: CostModel) -> dict[str, float]:
    return dict(zip(("prefill", "decode"), costs.step_scales, strict=True))


def scaled(costs: CostModel, steps: Sequence[Step]) -> CostModel:
    """Scale costs to what steps with rows of prompts took together, and others."""
    took = {"prefill": [0.0, 0.0], "decode": [0.0, 0.0]}
    for rows, seconds in steps:
        sums = took["prefill" if any(num_rows > 1 for num_rows, _ in rows) else "decode"]
        sums[0], sums[1] = sums[0] + seconds, sums[1] + costs.step_s(rows)
    return CostModel(costs.calibration, lambda: 0.0, scales={kind: a / b for kind, (a, b) in took.items()})


def simulate(turns: Sequence[Turn], policy: str, num_engines: int, costs: CostModel, seed: int) -> dict[str, float]:
    engine = EngineShape(max_batch_tokens=MAX_BATCH_TOKENS, max_running=128, capacity_tokens=NUM_PAGES * PAGE_SIZE)
    shape = ClusterShape(replicas=num_engines, router=policy, engine=engine, seed=seed)
    figures = Simulation(shape, turns, costs).run()
    return {name: figures[name] for name in ("ttft_p50_s", "hit_ratio")}


def errors(rows: Sequence[dict[str, Any]], name: str) -> list[float]:
    """Relative errors of what was simulated."""
    return [abs(row[f"simulated_{name}"] - row[f"real_{name}"]) / max(row[f"real_{name}"], 1e-9) for row in rows]


def same_order(rows: Sequence[dict[str, Any]]) -> float | None:
    """Return the share of pairs of policies at one rate that are in the real order, of those that clearly differ."""
    pairs = [(a, b) for a, b in itertools.permutations(rows, 2) if a["share"] == b["share"]]
    clear = [(a, b) for a, b in pairs if a["real_ttft_p50_s"] > CLEARLY * b["real_ttft_p50_s"]]
    right = sum(a["simulated_ttft_p50_s"] > b["simulated_ttft_p50_s"] for a, b in clear)
    return right / len(clear) if clear else None


def main() -> None:
    parser = options_of(__doc__, quick="two policies at one rate, shortly")
    parser.add_argument("--engines", type=int, default=3)
    parser.add_argument("--span-s", type=float, default=20.0, help="in which sessions begin")
    args = parser.parse_args()
    shares, policies = (SHARES[:1], POLICIES[:2]) if args.quick else (SHARES, POLICIES)
    span_s = 6.0 if args.quick else args.span_s
    run = Run("simulator", args, threads=1, engines=args.engines, span_s=span_s)
    decoder = make_decoder(MAIN_MODEL)
    runners = [make_runner(decoder, DEVICE_ONLY, num_pages=NUM_PAGES, num_host_pages=0) for _ in range(args.engines)]
    part = PartResult(name="grid", title="real engines and the simulator")
    with torch.inference_mode():
        costs = CostModel(GUESS, lambda: 0.0)
        for _ in range(2):  # the first run is a warm-up
            _, steps = play(make_turns(2.0, 4.0, args.seed + 1), "round-robin", runners, costs, args.seed)
        fitted = calibrated(steps, {}, step_rows=MAX_BATCH_TOKENS, kv_bytes_per_token=GUESS.kv_bytes_per_token)
        costs = CostModel(fitted, lambda: 0.0)
        for share in shares:
            turns = make_turns(share * args.engines / best_s(costs), span_s, args.seed)
            for policy in policies:
                learned = scaled(costs, steps)
                real, steps = play(turns, policy, runners, learned, args.seed)
                simulated = simulate(turns, policy, args.engines, learned, args.seed)
                scales = {f"{kind}_scale": scale for kind, scale in scales_of(learned).items()}
                row: dict[str, Any] = {"share": share, "policy": policy, "turns": len(turns), **scales}
                for name in real:
                    row |= {f"real_{name}": real[name], f"simulated_{name}": simulated[name]}
                part.rows.append(row)
                run.say(f"{row}")
    ttft, hits = (statistics.fmean(errors(part.rows, name)) for name in ("ttft_p50_s", "hit_ratio"))
    part.checks = [
        at_most("ttft_p50_mape", ttft, TTFT_TARGET, ""),
        at_most("hit_ratio_mape", hits, HIT_TARGET, ""),
        at_least("policies_in_order", same_order(part.rows), ORDER_TARGET, ""),
    ]
    run.show(part)
    run.end(part.rows, costs=costs.as_mapping())


if __name__ == "__main__":
    main()
