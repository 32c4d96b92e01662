"""Serving behind a shared system prompt: no sharing, sharing in memory only, and sharing in attention too.

    python benchmarks/bench_system_prompt.py [--quick] [--only PART] [--clock cpu] [--out FOLDER]

| part       | what is measured                                                                                     |
|------------|------------------------------------------------------------------------------------------------------|
| together   | b requests sharing 2,048 tokens, at once and staggered: time over one prefill, pages in use          |
| capacity   | sequences that run at once in a fixed pool, by the part r of their tokens that is shared: 1 / (1 - r) |
|            | (ChunkAttention 3.1); a model of one layer, as nothing that is counted depends on it                 |
| throughput | RelayAttention Fig. 8: a closed batch over the system prompt's length, three shapes; latencies       |

Arms are the engine itself, the same kernels, pool and batch limit: `none` (`prefix_sharing` off: each request computes
and stores its own prompt), `PS` (computed and stored once, `share="never"`: attention reads it for each sequence) and
`relay` (as an engine is by default). The pool holds every batch unshared, so `none` never waits for pages: its growth
in running sequences is a part of its own. The engine is not told what is shared, but finds it at run time.

What bounds it: `none` by its prefills (2 x 26M flops for each token, and a system prompt for each request); `PS` by
attention's passes over the same keys, one for each sequence; `relay` by the projections of a decode step.

One thread, random weights, greedy, end-of-text ignored. Time is that of the engine's steps and submissions. Arms take
turns, forwards and backwards; medians, and ratios of one round's pairs.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: compiled kernels read it once

from engines import DTYPE, MAIN_MODEL, PAGE_SIZE, make_decoder, request
from harness import Check, PartResult, Run, at_least, at_most, median_ratio, options_of, take_turns
from random_models import SHAPES
from workloads import Workload, make_prompts

from mneme.kernels.work import Share
from mneme.replicas.config import EngineConfig
from mneme.replicas.engine.engine import Engine
from mneme.replicas.model.runner import Runner

SHARED = 2048
SYSTEM_LENGTHS = (64, 128, 256, 512, 1024, 2048)
USER_NEW = ((64, 128), (128, 256), (256, 512))  # RelayAttention appendix D
NUM_FIRST = 64  # tokens of each answer in `together`: more than any generates before all have their first
CAPACITY_TOKENS, CAPACITY_NEW, CAPACITY_REQUESTS = 4096, 32, 32  # of each request; and requests that the pool holds
RATIOS = (0.5, 0.75, 0.9)
RELAY_OVER_PS, RELAY_OVER_NONE, MAX_TIME = 1.2, 2.0, 1.1
ONE_LAYER: dict[str, Any] = SHAPES["llama-31m"] | {
    "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1,
}  # fmt: skip


class Arm(NamedTuple):
    name: str
    prefix_sharing: bool
    share: Share


NONE, PS, RELAY = Arm("none", False, "never"), Arm("PS", True, "never"), Arm("relay", True, "auto")
ARMS = (NONE, PS, RELAY)


class Served(NamedTuple):
    """One request, in seconds from the start of the run."""

    arrival_s: float
    token_s: list[float]


class Replica:
    """One model and one page pool, which the arms use in turns; a new engine finds nothing of the last one's."""

    def __init__(self, shape: dict[str, Any], num_pages: int, seed: int, now_s: Callable[[], float]) -> None:
        """The pool is touched here, so that no arm waits for the system's pages."""
        self._decoder, self._now_s = make_decoder(shape, seed), now_s
        self._runner = Runner(self._decoder, num_pages, PAGE_SIZE)
        for pages in (self._runner.pool.k_pages, self._runner.pool.v_pages):
            pages.fill_(0)

    def engine(self, arm: Arm, *, max_running: int = 128, max_batch_tokens: int = 2048) -> Engine:
        """An empty engine; the last one is of no use any more."""
        self._decoder.share = arm.share
        config = EngineConfig(
            prefix_sharing=arm.prefix_sharing,
            max_running=max_running,
            max_batch_tokens=max_batch_tokens,
            max_waiting=8192,
        )
        engine = Engine(self._runner, None, config)
        engine.limits.max_tokens = 2**40
        return engine

    def serve(
        self, engine: Engine, prompts: list[list[int]], num_new: int, *, gap_s: float = 0.0, until_first: bool = False,
        watch: Callable[[], None] = lambda: None,
    ) -> list[Served]:  # fmt: skip
        """Run requests that arrive `gap_s` apart to their end, or first tokens; `watch` is called off the clock."""
        served = {str(index): Served(index * gap_s, []) for index in range(len(prompts))}
        elapsed, num_submitted = 0.0, 0
        while num_submitted < len(prompts) or engine.has_work:
            if not engine.has_work:
                elapsed = max(elapsed, num_submitted * gap_s)
            started = self._now_s()
            while num_submitted < len(prompts) and num_submitted * gap_s <= elapsed:
                engine.submit(request(str(num_submitted), prompts[num_submitted], num_new))
                num_submitted += 1
            events = engine.step()
            elapsed += self._now_s() - started
            for event in events:
                if event.error is not None:
                    raise RuntimeError(f"request {event.request_id} failed: {event.error}")
                served[event.request_id].token_s.extend([elapsed] * len(event.token_ids))
            watch()
            if until_first and all(each.token_s for each in served.values()):
                break
        return list(served.values())


def pool_pages(num_tokens: int, num_running: int) -> int:
    """A pool in which so many requests run even if they share nothing, beside the tenth that admission leaves."""
    return -(-(-(-num_tokens // PAGE_SIZE) * num_running) * 10 // 9) + num_running


class Case(NamedTuple):
    own: int  # tokens of each request's own behind the shared ones
    b: int  # requests
    is_staggered: bool  # arrivals spread evenly over the time that one takes alone
    step_rows: int  # limit of query rows per step: a prefill in one step or in several


class First(NamedTuple):
    seconds: float  # from the first arrival until all have their first token
    num_computed: int  # prompt tokens
    num_pages: int  # in use when all have their first token
    num_allowed: int  # pages of one copy, and of what each has for itself


def together(replica: Replica, args: Any) -> PartResult:
    """Besides the shared part each request has a few tokens of its own, which are work of their own: `rows`."""
    owns, bs, steps = ((0, 1), (2, 32), (2048,)) if args.quick else ((0, 1, 8, 64), (2, 8, 32), (2048, 512))
    rows = []
    for rows_per_step in steps:
        for own in owns:
            cases = [Case(own, b, late, rows_per_step) for b in bs for late in (False, True)]
            rows += _together_rows(replica, cases, args.rounds or (2 if args.quick else 5), args.seed)
    return PartResult(name="together", title="time until all have a token, over one's", rows=rows,
                      checks=together_checks(rows))  # fmt: skip


def _together_rows(replica: Replica, cases: list[Case], num_rounds: int, seed: int) -> list[dict[str, Any]]:
    """A row for each case; in every round each case, behind one request alone, has a turn."""
    ratios, last, alone_s = {case: list[float]() for case in cases}, dict[Case, First](), list[float]()
    for round_seed in range(seed + 1, seed + 1 + num_rounds):
        alone = first_tokens(replica, cases[0]._replace(b=1, is_staggered=False), round_seed, 0.0)
        alone_s.append(alone.seconds)
        for case in cases if round_seed % 2 else reversed(cases):
            last[case] = first_tokens(replica, case, round_seed, alone.seconds)
            ratios[case].append(last[case].seconds / alone.seconds)
    return [
        {"rows/step": case.step_rows, "own": case.own, "b": case.b,
         "arrive": "staggered" if case.is_staggered else "at once", "alone ms": statistics.median(alone_s) * 1e3,
         "time": statistics.median(ratios[case]), "rows": last[case].num_computed / (SHARED + case.own),
         "pages": last[case].num_pages, "pages allowed": last[case].num_allowed}
        for case in cases
    ]  # fmt: skip


def first_tokens(replica: Replica, case: Case, seed: int, spread_s: float) -> First:
    prompts = make_prompts(Workload(case.b, SHARED, case.own, NUM_FIRST), seed)
    engine = replica.engine(RELAY, max_batch_tokens=case.step_rows)
    gap_s = spread_s / case.b if case.is_staggered else 0.0
    served = replica.serve(engine, prompts, NUM_FIRST, gap_s=gap_s, until_first=True)
    counts = engine.num_tokens
    allowed = allowed_pages(case.own, [len(each.token_s) for each in served])
    seconds = max(each.token_s[0] for each in served)
    return First(seconds, counts["prompt"] - counts["cached"], engine.forest.device.num_in_use, allowed)


def allowed_pages(own: int, generated: Iterable[int]) -> int:
    """One copy of the shared tokens, which fill their pages, and for each request pages for what is its own.

    The last token of each was not run yet, so it has no slot.
    """
    common = SHARED // PAGE_SIZE
    return common + sum(-(-(SHARED + own + count - 1) // PAGE_SIZE) - common for count in generated)


def together_checks(rows: Sequence[dict[str, Any]]) -> list[Check]:
    """The worst over all numbers of requests and step sizes, with at most one token of a request's own."""
    worst = {
        arrive: max((row["time"] for row in rows if row["arrive"] == arrive and row["own"] <= 1), default=None)
        for arrive in ("at once", "staggered")
    }
    copies = max((row["pages"] / row["pages allowed"] for row in rows), default=None)
    return [
        at_most("b_sharing_2048_at_once_over_one_prefill", worst["at once"], MAX_TIME),
        at_most("b_sharing_2048_staggered_over_one_prefill", worst["staggered"], MAX_TIME),
        at_most("pages_in_use_over_one_copy_and_private", copies, 1.0),
    ]


def capacity(_replica: Replica, args: Any) -> PartResult:
    num_pages = CAPACITY_REQUESTS * CAPACITY_TOKENS // PAGE_SIZE
    replica = Replica(ONE_LAYER, num_pages, args.seed, time.perf_counter)
    part = PartResult(name="capacity", title=f"running sequences of {CAPACITY_TOKENS} tokens in {num_pages} pages")
    for r in RATIOS:
        if args.quick and r > RATIOS[0]:  # twice and five times as many sequences
            part.checks.append(at_least(f"running_growth_r_{r:g}", None, round(0.9 / (1 - r), 4)))
            continue
        apart, shared = (running(replica, arm, r, args.seed) for arm in (NONE, RELAY))
        growth = statistics.median(shared) / statistics.median(apart)
        part.rows.append({"r": r, "apart": statistics.median(apart), "running": statistics.median(shared),
                          "peak": max(shared), "growth": growth, "1/(1-r)": 1 / (1 - r)})  # fmt: skip
        part.checks.append(at_least(f"running_growth_r_{r:g}", growth, round(0.9 / (1 - r), 4)))
    return part


def running(replica: Replica, arm: Arm, r: float, seed: int) -> list[int]:
    """Sequences that run at the end of each step in which others wait; twice as many arrive as fit."""
    fitting = CAPACITY_REQUESTS / (1 - r) if arm.prefix_sharing else CAPACITY_REQUESTS
    shared = round(r * CAPACITY_TOKENS)
    work = Workload(round(2 * fitting), shared, CAPACITY_TOKENS - shared - CAPACITY_NEW, CAPACITY_NEW)
    engine, counts = replica.engine(arm, max_running=2048, max_batch_tokens=8192), list[int]()

    def count() -> None:
        if engine.scheduler.waiting:
            counts.append(len(engine.scheduler.running))

    replica.serve(engine, make_prompts(work, seed), CAPACITY_NEW, watch=count)
    return counts


class Batch(NamedTuple):
    """What one closed batch came to."""

    tokens_per_s: float  # output tokens, over the time to the last one
    normalized_ms: float  # latency per output token, mean
    ttft_ms: float  # median
    decode_per_s: float  # output tokens once all have their first


def throughput(replica: Replica, args: Any) -> PartResult:
    num_requests = 16 if args.quick else 32
    part = PartResult(name="throughput", title=f"closed batch of {num_requests}: tokens/s, latency, first token")
    for index, (user, new) in enumerate(USER_NEW[: 1 if args.quick else None]):
        for system in (64, SHARED) if args.quick else SYSTEM_LENGTHS:
            work, num_rounds = Workload(num_requests, system, user, new), args.rounds or max(1, 3 - index)
            found = batches(replica, work, 1 if args.quick else num_rounds, args.seed)
            row: dict[str, Any] = {"system": system, "user": user, "new": new}
            for name, unit in zip(Batch._fields, ("tok/s", "ms/tok", "TTFT ms", "decode tok/s"), strict=True):
                row |= {f"{arm.name} {unit}": statistics.median(getattr(b, name) for b in found[arm]) for arm in ARMS}
            rates = {arm: [each.tokens_per_s for each in found[arm]] for arm in ARMS}
            row |= {f"relay/{arm.name}": median_ratio(rates[RELAY], rates[arm]) for arm in (PS, NONE)}
            part.rows.append(row)
    promised = next((r for r in part.rows if (r["system"], r["user"], num_requests) == (SHARED, 64, 32)), {})
    part.checks = [
        at_least("relay_over_PS_2048_64_128", promised.get("relay/PS"), RELAY_OVER_PS),
        at_least("relay_over_none_2048_64_128", promised.get("relay/none"), RELAY_OVER_NONE),
    ]
    return part


def batches(replica: Replica, work: Workload, num_rounds: int, seed: int) -> dict[Arm, list[Batch]]:
    """All requests at once, from an empty cache; checks that each arm did what its name says."""
    rounds = dict.fromkeys(ARMS, seed)

    def take(arm: Arm) -> Batch:
        rounds[arm] += 1  # all arms have this round's prompts
        engine = replica.engine(arm, max_running=work.num_requests)
        served = replica.serve(engine, make_prompts(work, rounds[arm]), work.num_new)
        found = engine.num_tokens["cached"]
        assert found == 0 if arm is NONE else found >= (work.num_requests - 1) * work.num_shared
        end_s, all_first_s = max(each.token_s[-1] for each in served), max(each.token_s[0] for each in served)
        later = sum(at > all_first_s for each in served for at in each.token_s)
        normalized = statistics.mean((each.token_s[-1] - each.arrival_s) / len(each.token_s) for each in served)
        ttft = statistics.median(each.token_s[0] - each.arrival_s for each in served)
        return Batch(work.output_tokens / end_s, normalized * 1e3, ttft * 1e3, later / (end_s - all_first_s))

    return take_turns(ARMS, take, num_rounds, num_warm=0)


PARTS = {"together": together, "capacity": capacity, "throughput": throughput}


def main() -> None:
    parser = options_of(__doc__, quick="few points: at most 90 s on two CPU cores", out=True)
    parser.add_argument("--only", choices=PARTS, action="append", help="this part; may be repeated")
    parser.add_argument("--rounds", type=int, help="of every point; default: as many as each part takes")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall",
                        help="cpu: the process's CPU time, on a machine that others use")  # fmt: skip
    args = parser.parse_args()
    run = Run("system_prompt", args, threads=1, clock=args.clock, model=SHAPES[MAIN_MODEL], dtype=str(DTYPE),
              page_size=PAGE_SIZE)  # fmt: skip
    now_s = time.process_time if args.clock == "cpu" else time.perf_counter
    num_pages = pool_pages(max(SHARED + sum(each) for each in USER_NEW), 32)
    replica = Replica(SHAPES[MAIN_MODEL], num_pages, args.seed, now_s)
    for arm in ARMS:  # compiles what is compiled on first use
        replica.serve(replica.engine(arm), make_prompts(Workload(4, 96, 16, 4), args.seed), 4)
    results: dict[str, Any] = {}
    for name in args.only or PARTS:
        results[name] = run.show(PARTS[name](replica, args)).rows
        run.keep(results)  # a run that is cut short leaves what it has
    run.end(results)


if __name__ == "__main__":
    main()
