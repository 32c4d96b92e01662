"""What idle sessions cost: bytes of each, and the time of a step and of a turn with 100 and 100,000 of them stored.

    python benchmarks/bench_idle_sessions.py [--quick] [--seed 0]

The whole engine on `mneme-tiny`, one thread. *Bytes*: what Python allocates (tracemalloc) while sessions are added to
an engine whose bounded parts are full: token log, places in tables, claim on a path, a time of its own; not the pool,
nor what there is once per page of it (nodes, candidates for eviction). The log's ids, 4 bytes a token, are taken off.
Sessions have as many marks as a log may have and names of 65 characters; some find their KV still cached, some not.

*Time*: two engines that have answered the same turns and differ in `max_sessions` only, so that one stores the last 100
conversations and the other all. Medians of pairs that take turns: a decode step of 8 sequences; a turn of a new session
and one of the session that was unused for longest, each from `submit` to the end of its only step. No turn finds more
KV than a page in either, so both compute the same. Bound: Python objects that are not in the processor's caches.
"""

from __future__ import annotations

import gc
import os
import random
import statistics
import time
import tracemalloc
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

from harness import Check, Run, at_most, options_of

from mneme.replicas.config import EngineConfig
from mneme.replicas.engine.build import build_engine
from mneme.replicas.engine.output import MAX_EXPLANATIONS
from mneme.replicas.model.directory import model_directory
from mneme.replicas.request import GenerationRequest, SamplingParams
from mneme.replicas.sessions.token_log import MAX_MARKS
from mneme.replicas.text.tokenizer import Tokenizer

MODEL, DTYPE = "mneme-tiny", "bfloat16"
PAGE_SIZE = 16
NUM_FEW, NUM_MANY, NUM_MANY_QUICK = 100, 100_000, 2_000
NUM_DECODING = 8
MAX_BYTES, MAX_GROWTH = 1024, 0.05
BATCH = 64  # turns at once while sessions are stored
SMALL_POOL = 96  # pages: fewer than sessions that each have one
# What is counted by where it was allocated, but for what there is once per page (tokens that are keys of children were
# made where prompts are) and the runner's arrays; what `primitives.py` allocates is its caller's.
_COUNTED = ("/replicas/", "/bench_idle_sessions.py")  # the latter makes the sessions' names
_NOT_COUNTED = ("/replicas/forest/", "/replicas/model/", "/replicas/text/", "/replicas/sessions/prompts.py")


class Case(NamedTuple):
    num_tokens: int  # of a session, about
    num_sessions: int
    is_cached: bool


CASES = [Case(64, 10_000, False), Case(64, 400, True), Case(256, 120, False), Case(256, 120, True),
         Case(1024, 40, False), Case(1024, 40, True)]  # fmt: skip
QUICK_CASES = [Case(64, 200, False), Case(64, 100, True), Case(1024, 8, False), Case(1024, 8, True)]


class Talker:
    """An engine and its clients; sessions are numbered, and each says something else."""

    def __init__(self, num_pages: int, max_sessions: int) -> None:
        self._tokenizer = Tokenizer.load(model_directory(MODEL))
        config = EngineConfig(
            device="cpu", dtype=DTYPE, num_pages=num_pages, page_size=PAGE_SIZE, num_threads=1,
            max_sessions=max_sessions, session_ttl_s=1e8, max_batch_tokens=2048,
        )  # fmt: skip
        self.engine = build_engine(MODEL, config, tokenizer=self._tokenizer)
        self._num_turns = 0

    def ask(self, session: int | None, text: str, max_tokens: int = 1) -> str:
        """Submit a turn; returns its name."""
        name = f"{self._num_turns:032x}.0"
        self._num_turns += 1
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, seed=1)
        ids = tuple(self._tokenizer.encode_rendered(text))
        request = GenerationRequest(request_id=name, prompt_token_ids=ids, sampling=params, prompt_text=text)
        if session is not None:
            request = replace(request, salt="t" * 32, session_id=f"{session:065d}", session_ttl_s=1e7)
        self.engine.submit(request)
        return name

    def answers(self) -> dict[str, str]:
        """Run until nothing is left to do; the text of each turn's answer."""
        ids: dict[str, list[int]] = {}
        while self.engine.has_work:
            for event in self.engine.step():
                ids.setdefault(event.request_id, []).extend(event.token_ids)
        return {name: self._tokenizer.decode(each, skip_special_tokens=False) for name, each in ids.items()}

    def store(self, sessions: Iterable[int], num_turns: int = 1, text: str = " fox") -> None:
        """Conversations in which the client sends the whole history each time."""
        waiting = list(sessions)
        while waiting:
            texts = {session: f"{session:x}{text}" for session in waiting[:BATCH]}
            del waiting[:BATCH]
            for _ in range(num_turns):
                names = {session: self.ask(session, said) for session, said in texts.items()}
                answers = self.answers()
                texts = {session: said + answers[names[session]] + " dog" for session, said in texts.items()}

    def turn_us(self, session: int, text: str) -> float:
        started = time.perf_counter()
        self.ask(session, text)
        while self.engine.has_work:
            self.engine.step()
        return (time.perf_counter() - started) * 1e6


def session_bytes(case: Case) -> float:
    """Measure one idle session, without its ids."""
    num_turns, num_warm = MAX_MARKS // 2 + 1, max(case.num_sessions // 8, 8)
    pages = (case.num_sessions + 2 * num_warm) * (case.num_tokens // PAGE_SIZE + 3)
    talker = Talker(pages if case.is_cached else 2 * BATCH * (case.num_tokens // PAGE_SIZE + 3), 10**6)
    tracemalloc.start(2)
    text = " fox" * (case.num_tokens - 2 * num_turns)
    for _ in range(MAX_EXPLANATIONS // BATCH):  # what is remembered of prompts is bounded, and full from here on
        for _ in range(BATCH):
            talker.ask(None, text)
        talker.answers()
    talker.store(range(num_warm), num_turns, text)
    num_tokens, before = talker.engine.sessions.num_tokens, _traced_bytes()
    talker.store(range(num_warm, num_warm + case.num_sessions), num_turns, text)
    used = _traced_bytes() - before
    tracemalloc.stop()
    assert len(talker.engine.sessions) == num_warm + case.num_sessions
    return (used - 4 * (talker.engine.sessions.num_tokens - num_tokens)) / case.num_sessions


def _traced_bytes() -> int:
    gc.collect()
    return sum(trace.size for trace in tracemalloc.take_snapshot().traces if _is_counted(trace.traceback))


def _is_counted(frames: tracemalloc.Traceback) -> bool:
    """The two innermost frames, the outer one first."""
    name = frames[0 if frames[-1].filename.endswith("/primitives.py") else -1].filename
    return any(each in name for each in _COUNTED) and not any(each in name for each in _NOT_COUNTED)


class Times(NamedTuple):
    """Medians, microseconds; the turns' 99th percentile too."""

    step_us: float
    new_us: float
    stored_us: float
    p99_us: float


class Stored:
    """An engine with so many conversations of one turn each, as the last of `num_turns` that it answered."""

    def __init__(self, num_sessions: int, num_turns: int) -> None:
        self.talker = Talker(SMALL_POOL, num_sessions)
        gc.collect()
        gc.freeze()  # as a replica does at its start
        self.talker.store(range(num_turns))
        self._next_new = num_turns

    def new_us(self) -> float:
        self._next_new += 1
        return self.talker.turn_us(self._next_new, f"{self._next_new:x} fox")

    def stored_us(self) -> float:
        _, name = next(iter(self.talker.engine.sessions._log_by_key))
        return self.talker.turn_us(int(name), f"{int(name):x} fox")

    def begin_decoding(self, num_steps: int) -> None:
        for index in range(NUM_DECODING):
            self.talker.ask(index - 10 * NUM_DECODING, f"{index} fox", max_tokens=num_steps + 2)
        self.talker.engine.step()

    def step_us(self) -> float:
        started = time.perf_counter()
        self.talker.engine.step()
        return (time.perf_counter() - started) * 1e6


def times(num_many: int, num_rounds: int, seed: int) -> dict[int, Times]:
    """By number of stored sessions."""
    stores = {size: Stored(size, num_many) for size in (NUM_FEW, num_many)}
    rng = random.Random(seed)
    samples: dict[int, dict[str, list[float]]] = {size: {"new": [], "stored": [], "step": []} for size in stores}
    for _ in range(num_rounds):
        for size in rng.sample(list(stores), len(stores)):
            samples[size]["new"].append(stores[size].new_us())
            samples[size]["stored"].append(stores[size].stored_us())
    steps_each = 100  # at most, as sequences may not outgrow the pool
    for _ in range(max(num_rounds // steps_each, 1)):
        for store in stores.values():
            store.begin_decoding(steps_each)
        for _ in range(steps_each):
            for size in rng.sample(list(stores), len(stores)):
                samples[size]["step"].append(stores[size].step_us())
        for store in stores.values():
            store.talker.answers()
    return {size: _times(each) for size, each in samples.items()}


def _times(samples: dict[str, list[float]]) -> Times:
    step, new, stored = (statistics.median(samples[name]) for name in ("step", "new", "stored"))
    return Times(step, new, stored, statistics.quantiles(samples["new"] + samples["stored"], n=100)[98])


def checks_of(bytes_by_case: dict[Case, float], by_size: dict[int, Times]) -> list[Check]:
    """What is promised of 100,000 sessions; of fewer, what was measured goes by their number."""
    worst = max(bytes_by_case.values())
    found = [at_most("idle_session_bytes", worst, MAX_BYTES, "bytes besides KV and 4 a token")]
    few = by_size[NUM_FEW]
    for num_many in sorted({NUM_MANY, max(by_size)}):
        for name in ("step", "new", "stored"):
            many = by_size.get(num_many)
            growth = getattr(many, f"{name}_us") / getattr(few, f"{name}_us") - 1 if many else None
            found.append(at_most(f"{name}_growth_{NUM_FEW}_to_{num_many}", growth, MAX_GROWTH, "of the time"))
    return found


def main() -> None:
    args = options_of(__doc__, quick="2,000 sessions for the times; at most 90 s on 2 cores").parse_args()
    run = Run("idle_sessions", args, threads=1, model=MODEL, dtype=DTYPE)
    bytes_by_case = {case: session_bytes(case) for case in (QUICK_CASES if args.quick else CASES)}
    print(f"{'tokens':>7} {'sessions':>9} {'KV':>7} {'bytes each':>11}   besides KV and 4 a token")
    for case, size in bytes_by_case.items():
        kept = "cached" if case.is_cached else "gone"
        print(f"{case.num_tokens:7,} {case.num_sessions:9,} {kept:>7} {size:11.0f}")
    num_many = NUM_MANY_QUICK if args.quick else NUM_MANY
    by_size = times(num_many, 300 if args.quick else 2000, args.seed)
    print(f"\n{'stored':>7} {'decode step':>12} {'new turn':>10} {'stored turn':>12} {'p99':>8}   microseconds")
    for stored, each in by_size.items():
        print(f"{stored:7,} {each.step_us:12.0f} {each.new_us:10.0f} {each.stored_us:12.0f} {each.p99_us:8.0f}")
    run.check(*checks_of(bytes_by_case, by_size))
    run.end({
        "bytes": [{**case._asdict(), "bytes": round(size)} for case, size in bytes_by_case.items()],
        "times_us": {size: each._asdict() for size, each in by_size.items()},
    })  # fmt: skip


if __name__ == "__main__":
    main()
