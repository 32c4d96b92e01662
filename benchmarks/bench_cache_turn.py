"""Time to the first token of a session's next turn on an engine that has nothing of it: computed anew, or loaded.

    python benchmarks/bench_cache_turn.py [--quick] [--rounds 10] [--pairs 10] [--folder DIR] [--seed 0] [--out DIR]

*Next turn*: 64 new tokens behind a history of 4,096, of which 64 were sampled. `recompute` has no cache tier; `host`
finds the history in the node's memory; `disk` after a restart of the node, whose memory is empty: cold (files dropped
from the page cache, mincore finds nothing of them) or warm. Each turn's `kv_details` must say so.

*After a restart*: the next turns of 20 sessions of 1,600 tokens come at once, to an engine and a node that were just
started, over cold and warm files in alternation; costs are those that the engine before learned.

*Never slower*: pairs of the same turn with the tier, where the controller decides from measured rates, and without it:
short histories, a model that computes a token about as fast as a slow disk reads its KV (`llama-wide-kv`), files that
are in the page cache (`disk, warm`) or are not (`disk, cold`), and disks that become slow without notice (`slow disk`:
files in the page cache, all reads together held to 50 MB/s). `split`: the head was loaded, the rest computed; `given
up`: what came too late was computed after all. A figure is the median of the pairs' ratios; `first` is the first
pair's. A disk that became slow without notice is noticed by its first layer: by 0.05 C + C / n of n layers that a load
of C, what computing takes, was given, and then the step that was begun for it is computed to its end, and taken back.

*Asking*: pairs of prompts of 320 tokens of which the tier has nothing, with an engine that asks it and one that does
not; both save. What asking in vain costs is an answer's time (two changes of threads) or, where answers are slow (20 ms
in the row `late ms`), the constant part of one more step: 1% of 10 ms is an answer in 0.1 ms. After some 20 of these
prompts a question is worth less than that, and one prompt in 16 asks.

What bounds it, one thread: to recompute, 2 x 26M flops per token and attention; to load, 8 KB per token of history:
a checksum, a copy into pages, and on a disk a read, on a thread beside the engine's.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from cache_engines import (
    CHUNK_TOKENS,
    NUM_ANSWER,
    NUM_NEW,
    Answer,
    CachedModel,
    Draw,
    RestartableStore,
    ThrottledFiles,
    answer,
    answers,
    cache_config,
    make_engine,
    make_model,
    pages_for,
    tell,
    wait_for_saves,
)
from engines import DTYPE
from harness import Check, PartResult, Run, at_least, at_most, median_ratio, options_of, rounded, take_turns
from random_models import SHAPES

from mneme.cachetier.config import CacheConfig
from mneme.cachetier.policy.cost_model import CostModel
from mneme.cachetier.store import ChainQuery, ChunkSource
from mneme.errors import MnemeError
from mneme.replicas.engine.engine import Engine

Row = dict[str, Any]
Source = Literal["host", "disk, cold", "disk, warm", "slow disk"]  # `disk`: files, in the page cache or not
RECOMPUTE, HOST, COLD, WARM = "recompute", "host", "disk, cold", "disk, warm"
SLOW = "slow disk"  # warm too, but every read is held back
ARMS = (RECOMPUTE, HOST, COLD, WARM)
NUM_SESSIONS = 20  # that go on after a restart
ASKING_TOKENS, NUM_ASKED_OVER_PAIRS = 320, 8
LATE_S = 0.02  # of answers that are late
MIN_CACHED = 0.99  # of the history, or an arm that loads is not what it says


class Case(NamedTuple):
    """Where the history is, while the controller decides."""

    shape: str
    num_history: int
    source: Source


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
            "lower by": 1 - median_ratio([took.ttft_s for took in found[name]], base),
            "cached share": min(took.usage.cached_tokens for took in found[name]) / num_history,
        }
        for name in ARMS
    ]


def checks_of(
    turns: Sequence[dict[str, Any]],
    restarted: Sequence[dict[str, Any]],
    pairs: Sequence[dict[str, Any]],
    asking: Sequence[dict[str, Any]],
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
    cached = [found[arm]["cached share"] for arm in (HOST, COLD, WARM) if arm in found]
    checks.append(at_least("cached_share_of_history", min(cached, default=None), 0.99, "of its tokens"))
    found_again = [row["found"] for row in restarted]
    checks.append(at_least("found_after_restart", min(found_again, default=None), 0.99, "of the history"))
    for name, sources in (("tier", (HOST, WARM, COLD)), ("slow_disk", (SLOW,))):
        ratios = [row["ratio"] for row in pairs if row["source"] in sources]
        checks.append(at_most(f"{name}_over_recompute_worst_case", max(ratios, default=None), TOLERANCE))
    checks.append(at_most("asking_in_vain_over_not_asking", max(row["ratio"] for row in asking), 1.01))
    return checks


def main() -> None:
    parser = options_of(__doc__, quick="1k of history, 3 rounds, the small model's pairs", out=True, folder=True)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--pairs", type=int, default=10)
    args = parser.parse_args()
    run = Run("cache_turn", args, threads=1, cpu=torch.backends.cpu.get_cpu_capability(), dtype=str(DTYPE),
              models={shape: SHAPES[shape] for shape in (MODEL, SMALL_MODEL)}, chunk_tokens=CHUNK_TOKENS,
              new_tokens=NUM_NEW, slow_disk_bytes_per_s=SLOW_BYTES_PER_S)  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="mneme-", dir=args.folder) as name:
        folder = Path(name)
        models = {s: make_model(s, MAX_CONTEXT, folder / "calibration", args.seed) for s in (MODEL, SMALL_MODEL)}
        num_history = QUICK_HISTORY if args.quick else HISTORY
        turns = turn_rows(models[MODEL], num_history, folder / "turns", 3 if args.quick else args.rounds, args.seed)
        run.show(PartResult(name="cache_turn", title=f"a turn of {NUM_NEW} tokens on another replica", rows=turns))
        num_restarts, place = 2 if args.quick else args.rounds, folder / "restarted"
        restarted = restarted_rows(models[MODEL], RESTARTED_HISTORY, place, num_restarts, args.seed)
        run.show(PartResult(name="restarted", title="the first turns after a restart", rows=restarted))
        pairs = []
        for index, case in enumerate(QUICK_CASES if args.quick else CASES):
            place = folder / f"case{index}"
            found = measure_pairs(models[case.shape], case, place, args.pairs, SLOW_BYTES_PER_S, args.seed)
            pairs.append(found.row())
        num_asked = args.pairs if args.quick else NUM_ASKED_OVER_PAIRS * args.pairs
        asking = [
            asking_row(models[shape], shape, folder / f"asking-{shape}-{late_s}", num_asked, args.seed, late_s)
            for shape, late_s in ((SMALL_MODEL, 0.0), (MODEL, 0.0), (MODEL, LATE_S))
        ]
        run.show(PartResult(name="asking", title="a prompt of which the tier has nothing", rows=asking))
    checks = checks_of(turns, restarted, pairs, asking)
    run.show(PartResult(name="never slower", title="with a tier over without", rows=pairs, checks=checks))
    run.end(turns, restarted=rounded(restarted), pairs=rounded(pairs), asking=rounded(asking),
            calibration={shape: _costs(model) for shape, model in models.items()})  # fmt: skip


def _costs(model: CachedModel) -> dict[str, Any]:
    """Seconds: per step, per row, per row and token of its context; per load, chunk, byte."""
    measured = model.calibration
    return rounded({"prefill": measured.prefill, **measured.edges})


class NextTurns:
    """One session, whose turns are taken by engines that have nothing of it."""

    def __init__(self, model: CachedModel, num_history: int, folder: Path, seed: int) -> None:
        self._ends = ExitStack()
        self._draw = Draw(seed)
        prompt = self._draw.ids(num_history - NUM_ANSWER)
        self.stores = {name: RestartableStore(cache_config(folder / name)) for name in ("host", "disk")}
        for store in self.stores.values():
            self._ends.callback(store.end)
            self._history = tell(model, store, prompt)
        self._engines = {
            name: self._engine(model, store, num_history) for name, store in {**self.stores, RECOMPUTE: None}.items()
        }

    def close(self) -> None:
        self._ends.close()

    def rounds(self, num_rounds: int) -> dict[str, list[Answer]]:
        """Every arm once per round, forwards and backwards in alternation; a first round does not count."""
        return take_turns(ARMS, self.turn, num_rounds)

    def turn(self, name: str) -> Answer:
        engine = self._engines.get(name) or self._engines["disk"]
        engine.forest.clear()
        if name in (COLD, WARM):
            self.stores["disk"].flush()
            self.stores["disk"].restart(is_cold=name == COLD)
        took = answer(engine, self._history + self._draw.question(), 1)
        wait_for_saves(engine)
        self._check(name, took)
        return took

    def _check(self, name: str, took: Answer) -> None:
        """Whether the prompt came from where the arm says."""
        kv = took.usage.kv_details()
        found = {RECOMPUTE: 0, HOST: kv["host"]}.get(name, kv["disk"] + kv["host"])  # a node brings chunks up meanwhile
        # A chunk may be computed while an answer is late: that is the arm's figure, not a fault of it.
        is_sound = took.usage.cached_tokens == 0 if name == RECOMPUTE else found >= len(self._history) - CHUNK_TOKENS
        if not is_sound or kv["device"]:
            raise MnemeError(f"arm {name}, {len(self._history)} tokens of history: kv_details say {kv}")

    def _engine(self, model: CachedModel, store: RestartableStore | None, num_history: int) -> Engine:
        config = cache_config(self.stores["disk"].folder if store is None else store.folder)
        engine = make_engine(model, store, config, pages_for(num_history + 2 * NUM_NEW))
        self._ends.callback(engine.close)
        return engine


def restarted_rows(model: CachedModel, num_history: int, folder: Path, num_restarts: int, seed: int) -> list[Row]:
    """A row per restart: the next turns of all sessions come at once, to an engine and a node that were just started.

    What costs were learned before it is kept, as an engine keeps it. The files are cold after every other restart.
    """
    draw, config = Draw(seed), cache_config(folder)
    store = RestartableStore(config)
    num_pages = pages_for(NUM_SESSIONS * (num_history + 2 * NUM_NEW))
    costs, rows = CostModel(model.calibration), list[Row]()
    with closing(make_engine(model, store, config, num_pages, costs=costs)) as engine, ExitStack() as ends:
        ends.callback(store.end)
        prompts = [draw.ids(num_history - NUM_ANSWER) for _ in range(NUM_SESSIONS)]
        told = answers(engine, prompts, NUM_ANSWER)
        histories = [ids + took.token_ids for ids, took in zip(prompts, told, strict=True)]
        wait_for_saves(engine)
        store.flush()
        for number in range(num_restarts):
            is_cold = number % 2 == 0
            store.restart(is_cold=is_cold)
            costs = CostModel.from_mapping(costs.as_mapping())
            with closing(make_engine(model, store, config, num_pages, costs=costs, is_warm=True)) as started:
                took = answers(started, [ids + draw.question() for ids in histories], 1)
                wait_for_saves(started)
                assert started.connector is not None
                stats = started.connector.stats()
            store.flush()
            shares = [turn.usage.cached_tokens / num_history for turn in took]
            rows.append({
                "files": COLD if is_cold else WARM, "sessions": NUM_SESSIONS, "history": num_history,
                "found": statistics.mean(shares), "least": min(shares),
                "ttft ms": statistics.median(turn.ttft_s for turn in took) * 1e3,
                "plans": stats["plans"], "given up": stats["given_up"],
            })  # fmt: skip
    return rows


class Pairs(NamedTuple):
    """The same turns with a tier and without one."""

    case: Case
    with_s: list[float]
    without_s: list[float]
    outcomes: Counter[str]  # "loaded", "split", "recomputed", "given up"

    @property
    def ratios(self) -> list[float]:
        return [a / b for a, b in zip(self.with_s, self.without_s, strict=True)]

    def row(self) -> dict[str, Any]:
        return {
            "model": self.case.shape, "history": self.case.num_history, "source": self.case.source,
            "pairs": len(self.with_s), "with ms": statistics.median(self.with_s) * 1e3,
            "without ms": statistics.median(self.without_s) * 1e3, "ratio": statistics.median(self.ratios),
            "worst": max(self.ratios), "first": self.ratios[0],
            **{name: self.outcomes[name] for name in ("loaded", "split", "recomputed", "given up")},
        }  # fmt: skip


def measure_pairs(
    model: CachedModel, case: Case, folder: Path, num_pairs: int, slow_bytes_per_s: float, seed: int
) -> Pairs:
    """A first pair does not count; the disk becomes slow after it, which the controller is not told."""
    draw, files = Draw(seed), ThrottledFiles()
    store = RestartableStore(cache_config(folder), files)
    num_pages = pages_for(case.num_history + 2 * NUM_NEW)
    with closing(make_engine(model, None, cache_config(folder), num_pages)) as plain, ExitStack() as ends:
        ends.callback(store.end)
        history = tell(model, store, draw.ids(case.num_history - NUM_ANSWER))
        tiered = make_engine(model, store, cache_config(folder), num_pages)
        ends.callback(tiered.close)
        pairs = Pairs(case, [], [], Counter())
        for number in range(num_pairs + 1):
            if case.source != HOST:
                store.flush()
                store.restart(is_cold=case.source == COLD)
            is_counted = number > 0
            if is_counted and case.source == SLOW:
                files.bytes_per_s = slow_bytes_per_s
            question, num_retracted = history + draw.question(), tiered.scheduler.num_retracted
            took = dict(_took(number, {"with": tiered, "without": plain}, question))
            if is_counted:
                pairs.with_s.append(took["with"].ttft_s)
                pairs.without_s.append(took["without"].ttft_s)
                pairs.outcomes[_outcome(took["with"], len(history))] += 1
                pairs.outcomes["given up"] += tiered.scheduler.num_retracted > num_retracted
    return pairs


def _took(number: int, engines: dict[str, Engine], ids: Sequence[int]) -> Iterator[tuple[str, Answer]]:
    for name in engines if number % 2 else reversed(engines):
        engines[name].forest.clear()
        yield name, answer(engines[name], ids, 1)
        wait_for_saves(engines[name])


def _outcome(took: Answer, num_history: int) -> str:
    if not took.usage.cached_tokens:
        return "recomputed"
    return "loaded" if took.usage.cached_tokens >= MIN_CACHED * num_history else "split"


class LateStore(RestartableStore):
    """Answers later."""

    def __init__(self, config: CacheConfig, late_s: float) -> None:
        super().__init__(config)
        self._late_s = late_s

    def locate(self, query: ChainQuery, timeout_s: float) -> list[ChunkSource]:
        time.sleep(self._late_s)
        return self.inner.locate(query, timeout_s)


def asking_row(model: CachedModel, shape: str, folder: Path, num_pairs: int, seed: int, late_s: float) -> Row:
    """The same prompts, each new, to an engine that asks the tier and to one that does not."""
    draw = Draw(seed)
    with ExitStack() as ends:
        engines = {}
        for load in ("auto", "never"):
            config = cache_config(folder / load, load=load)
            store = LateStore(config, late_s)
            ends.callback(store.end)
            engines[load] = make_engine(model, store, config, pages_for(ASKING_TOKENS + NUM_NEW))
            ends.callback(engines[load].close)
        prompts = [draw.ids(ASKING_TOKENS) for _ in range(num_pairs + 1)]
        counts = dict.fromkeys(engines, 0)

        def ask(load: str) -> float:
            engines[load].forest.clear()
            took = answer(engines[load], prompts[counts[load]], 1)
            counts[load] += 1
            wait_for_saves(engines[load])
            if took.usage.cached_tokens:
                raise MnemeError(f"a prompt that is new was found: {took.usage.kv_details()}")
            return took.ttft_s

        found = take_turns(engines, ask, num_pairs)
    return {
        "model": shape, "late ms": late_s * 1e3, "prompt": ASKING_TOKENS, "pairs": num_pairs,
        "asking ms": statistics.median(found["auto"]) * 1e3, "not asking ms": statistics.median(found["never"]) * 1e3,
        "ratio": median_ratio(found["auto"], found["never"]),
    }  # fmt: skip


if __name__ == "__main__":
    main()
