"""Next turns of sessions whose KV is in a cache tier or is computed anew; what bench_cache_turn.py measures."""

from __future__ import annotations

import random
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Literal, NamedTuple

from cache_engines import (
    Answer,
    CachedModel,
    RestartableStore,
    ThrottledFiles,
    answer,
    answers,
    cache_config,
    make_engine,
    pages_for,
    wait_for_saves,
)
from workloads import VOCAB_SIZE

from mneme.cachetier.policy.cost_model import CostModel
from mneme.errors import MnemeError
from mneme.replicas.engine.engine import Engine

# `disk`: files, in the page cache or not
RECOMPUTE, HOST, COLD, WARM = "recompute", "host", "disk, cold", "disk, warm"
ARMS = (RECOMPUTE, HOST, COLD, WARM)
Row = dict[str, Any]
NUM_SESSIONS = 20  # that go on after a restart
NUM_NEW = 64  # tokens that a turn adds
NUM_ANSWER = 64  # of the history, those that were sampled
MIN_CACHED = 0.99  # of the history, or an arm that loads is not what it says
SLOW = "slow disk"  # warm too, but every read is held back
Source = Literal["host", "disk, cold", "disk, warm", "slow disk"]


class Draw:
    """Random token ids; no question begins as an earlier one did."""

    def __init__(self, seed: int) -> None:
        self._rng, self._first = random.Random(seed), 15

    def ids(self, count: int) -> list[int]:
        return self._rng.choices(range(16, VOCAB_SIZE), k=count)

    def question(self) -> list[int]:
        self._first += 1
        return [self._first, *self.ids(NUM_NEW - 1)]


def tell(model: CachedModel, store: RestartableStore, ids: list[int]) -> list[int]:
    """An engine answers a prompt, saves what it computed, and ends; returns the session so far."""
    engine = make_engine(model, store, cache_config(store.folder), pages_for(len(ids) + NUM_ANSWER))
    with closing(engine):
        told = answer(engine, ids, NUM_ANSWER).token_ids
        wait_for_saves(engine)
    store.flush()
    return ids + told


class NextTurns:
    """One session, whose turns are taken by engines that have nothing of it."""

    def __init__(self, model: CachedModel, num_history: int, folder: Path, seed: int) -> None:
        self._ends = ExitStack()
        self._draw = Draw(seed)
        prompt = self._draw.ids(num_history - NUM_ANSWER)
        self._stores = {name: RestartableStore(cache_config(folder / name)) for name in ("host", "disk")}
        for store in self._stores.values():
            self._ends.callback(store.end)
            self._history = tell(model, store, prompt)
        self._engines = {
            name: self._engine(model, store, num_history) for name, store in {**self._stores, RECOMPUTE: None}.items()
        }

    def close(self) -> None:
        self._ends.close()

    def rounds(self, num_rounds: int) -> dict[str, list[Answer]]:
        """Every arm once per round, forwards and backwards in alternation; a first round does not count."""
        found: dict[str, list[Answer]] = {name: [] for name in ARMS}
        for number in range(num_rounds + 1):
            for name in ARMS if number % 2 else ARMS[::-1]:
                took = self._turn(name)
                if number:
                    found[name].append(took)
        return found

    def _turn(self, name: str) -> Answer:
        engine = self._engines.get(name) or self._engines["disk"]
        engine.forest.clear()
        if name in (COLD, WARM):
            self._stores["disk"].flush()
            self._stores["disk"].restart(is_cold=name == COLD)
        took = answer(engine, self._history + self._draw.question(), 1)
        wait_for_saves(engine)
        self._check(name, took)
        return took

    def _check(self, name: str, took: Answer) -> None:
        """Whether the prompt came from where the arm says."""
        kv = took.usage.kv_details()
        found = {RECOMPUTE: 0, HOST: kv["host"]}.get(name, kv["disk"] + kv["host"])  # a node brings chunks up meanwhile
        is_sound = took.usage.cached_tokens == 0 if name == RECOMPUTE else found >= MIN_CACHED * len(self._history)
        if not is_sound or kv["device"]:
            raise MnemeError(f"arm {name}, {len(self._history)} tokens of history: kv_details say {kv}")

    def _engine(self, model: CachedModel, store: RestartableStore | None, num_history: int) -> Engine:
        config = cache_config(self._stores["disk"].folder if store is None else store.folder)
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
                assert started.chunks is not None
                stats = started.chunks.stats()
            store.flush()
            shares = [turn.usage.cached_tokens / num_history for turn in took]
            rows.append({
                "files": COLD if is_cold else WARM, "sessions": NUM_SESSIONS, "history": num_history,
                "found": statistics.mean(shares), "least": min(shares),
                "ttft ms": statistics.median(turn.ttft_s for turn in took) * 1e3,
                "plans": stats["plans"], "given up": stats["given_up"],
            })  # fmt: skip
    return rows


class Case(NamedTuple):
    """Where the history is, while the controller decides."""

    shape: str
    num_history: int
    source: Source


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
