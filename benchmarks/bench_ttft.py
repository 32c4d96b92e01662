"""Time to the first token of a turn whose history is recomputed, in host memory, or on the device.

    python benchmarks/bench_ttft.py [--quick] [--history N]... [--seed 0] [--out FOLDER]

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

import itertools
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from engines import (
    DEVICE_ONLY,
    DTYPE,
    MAIN_MODEL,
    PAGE_SIZE,
    STATELESS,
    TWO_TIER,
    make_decoder,
    make_engine,
    make_runner,
    request,
)
from harness import Check, PartResult, Run, at_least, median_ratio, options_of, take_turns
from plots import caption_of, lines, save
from workloads import MODEL_SHAPE, VOCAB_SIZE

from mneme.errors import MnemeError
from mneme.replicas.model.decoder import Decoder
from mneme.replicas.request import GenerationRequest, TokenEvent

HISTORIES = (1024, 4096, 16384, 32768)
QUICK_HISTORIES = (1024, 4096)
RECOMPUTE, HOST, DEVICE = "recompute", "host", "device"
SYSTEM_BY_ARM = {RECOMPUTE: STATELESS, HOST: TWO_TIER, DEVICE: DEVICE_ONLY}
NUM_NEW = 64  # tokens that a turn adds
_FILLER_TOKENS = 1024  # of a prompt that only takes pages
_SPARE = 1.25  # of the pool: tails of earlier turns, which go first
_HOST_POOLS = 4  # pools that the host tier holds: histories stay while what fills the pool passes through
_MAX_LEFT = 0.02  # of an evicted history that may still be on the device
ARMS = (RECOMPUTE, HOST, DEVICE)
NUM_OUT = 32
TARGETS = {DEVICE: 0.95, HOST: 0.90}  # lower than recompute, at 4k
TARGET_HISTORY = 4096
BATCH_TOKENS, MAX_BATCH = 32768, 8
QUICK_BATCH = 2


class Took(NamedTuple):
    """One turn or a batch of them, submitted at once."""

    began_s: float  # on `time.perf_counter`
    ttft_s: float  # until each has its first token
    total_s: float  # to the last token
    busy_s: float  # of it, inside of steps
    num_out: int


class Arm:
    """`batch` sessions with a history of `num_history` tokens each, on an engine of their own."""

    def __init__(
        self,
        name: str,
        decoder: Decoder,
        *,
        num_history: int,
        batch: int,
        num_out: int,
        seed: int,
    ) -> None:
        self.name = name
        self._num_history = num_history
        self._num_out = num_out
        self._rng = random.Random(seed)
        self._serials = itertools.count()
        self._firsts = itertools.count(1)
        num_tokens = batch * (num_history + NUM_NEW + num_out)
        self._num_pages = int(_SPARE * num_tokens / PAGE_SIZE) + 2 * _FILLER_TOKENS // PAGE_SIZE
        system, num_host_pages = SYSTEM_BY_ARM[name], _HOST_POOLS * self._num_pages
        self._runner = make_runner(decoder, system, num_pages=self._num_pages, num_host_pages=num_host_pages)
        self.engine = make_engine(self._runner, system)
        self._histories = [self._draw(num_history) for _ in range(batch)]
        for index, history in enumerate(self._histories if name != RECOMPUTE else ()):
            self._run([self._request(history, f"history{index}", max_tokens=1)])

    def turns(self, count: int) -> Took:
        """One of each of the first `count` sessions; raises `MnemeError` if KV is not from where the arm says."""
        if self.name == HOST:
            self._fill_pool()
        asked = [
            self._request(history + self._new(), f"history{index}", max_tokens=self._num_out)
            for index, history in enumerate(self._histories[:count])
        ]
        return self._run(asked, is_turn=True)

    def _new(self) -> list[int]:
        """A question that begins as no earlier one did: what those left behind must not be found."""
        return [next(self._firsts), *self._draw(NUM_NEW - 1)]

    def _fill_pool(self) -> None:
        """Other sessions' prompts, as many tokens as the pool has slots: what was there goes to the host tier."""
        for _ in range(-(-self._num_pages * PAGE_SIZE // _FILLER_TOKENS)):
            name = f"filler{next(self._serials)}"
            self._run([self._request(self._draw(_FILLER_TOKENS - 1), name, max_tokens=1)])

    def _run(self, requests: list[GenerationRequest], *, is_turn: bool = False) -> Took:
        """Until each has ended, and then, not timed, until nothing is left to copy: arms leave each other alone."""
        began_s, busy_s, first_s = time.perf_counter(), 0.0, 0.0
        for each in requests:
            self.engine.submit(each)
        unanswered = {each.request_id for each in requests}
        unended = set(unanswered)
        while unended:
            stepped_s = time.perf_counter()
            events = self.engine.step()
            now_s = time.perf_counter()
            busy_s += now_s - stepped_s
            answered = unanswered.intersection(event.request_id for event in events if event.token_ids)
            first_s = now_s - began_s if answered else first_s
            unanswered -= answered
            unended.difference_update(event.request_id for event in events if event.finish_reason)
            self._check(events, is_turn)
        self._finish_copies()
        num_out = sum(each.sampling.max_tokens or 0 for each in requests)
        return Took(began_s, first_s, now_s - began_s, busy_s, num_out)

    def _finish_copies(self) -> None:
        while self._runner.num_host_pages and (self.engine.forest.store.wants_copies or not self._runner.can_copy):
            if self.engine.has_work:
                self.engine.step()
            else:
                time.sleep(0.001)

    def _check(self, events: list[TokenEvent], is_turn: bool) -> None:
        """Whether nothing failed, and a turn's prompt came from where the arm says."""
        for event in events:
            if event.finish_reason == "error":
                raise MnemeError(f"{event.request_id}: {event.error}")
            kv = event.usage.kv_details() if event.usage is not None and is_turn else None
            if kv is not None and not is_from(self.name, kv, self._num_history):
                raise MnemeError(f"arm {self.name}, {self._num_history} tokens of history: kv_details say {kv}")

    def _request(self, ids: list[int], session: str, max_tokens: int) -> GenerationRequest:
        session_id = None if self.name == RECOMPUTE else session
        return request(f"{session}.{next(self._serials)}", ids, max_tokens, session_id=session_id)

    def _draw(self, count: int) -> list[int]:
        return self._rng.choices(range(16, VOCAB_SIZE), k=count)


def is_from(arm: str, kv: dict[str, int], num_history: int) -> bool:
    """Whether the tokens of a turn's prompt were computed and found as the arm means it."""
    num_rows = kv["recomputed"] + kv["dropped"]
    if arm == RECOMPUTE:
        return num_rows == num_history + NUM_NEW
    if num_rows != NUM_NEW or kv["device"] + kv["host"] != num_history:
        return False
    return kv["host"] == 0 if arm == DEVICE else kv["device"] <= _MAX_LEFT * num_history


def measure(decoder: Decoder, num_history: int, num_rounds: int, max_batch: int, seed: int) -> list[dict[str, Any]]:
    """A row per arm."""
    batch = max(min(max_batch, BATCH_TOKENS // num_history), 1)
    arms = {name: Arm(name, decoder, num_history=num_history, batch=batch, num_out=NUM_OUT, seed=seed) for name in ARMS}
    # All first: a history that no turn uses for many rounds leaves the host tier.
    together = take_turns(
        ARMS, lambda name: arms[name].turns(batch), max(num_rounds // 3, 1) if batch > 1 else num_rounds
    )
    alone = take_turns(ARMS, lambda name: arms[name].turns(1), num_rounds) if batch > 1 else together
    return [_row(name, num_history, batch, alone, together) for name in ARMS]


def _row(
    name: str, num_history: int, batch: int, alone: dict[str, list[Took]], together: dict[str, list[Took]]
) -> dict[str, Any]:
    row: dict[str, Any] = {"history": num_history, "arm": name}
    return row | {
        "rounds": len(alone[name]),
        "ttft ms": statistics.median(took.ttft_s for took in alone[name]) * 1e3,
        "lower by": 1 - median_ratio([took.ttft_s for took in alone[name]], [took.ttft_s for took in alone[RECOMPUTE]]),
        "batch": batch,
        "busy s/turn": statistics.median(took.busy_s for took in together[name]) / batch,
        "out tokens/s": statistics.median(took.num_out / took.total_s for took in together[name]),
    }


def checks_of(rows: Sequence[dict[str, Any]]) -> list[Check]:
    found = {row["arm"]: row.get("lower by") for row in rows if row["history"] == TARGET_HISTORY}
    return [
        at_least(f"{arm}_ttft_lower_at_{TARGET_HISTORY}", found.get(arm), target, "of recompute")
        for arm, target in TARGETS.items()
    ]


def main() -> None:
    parser = options_of(__doc__, quick="1k and 4k, three rounds; at most 90 s on 2 cores", out=True)
    parser.add_argument("--history", type=int, action="append", help="tokens; default: 1k, 4k, 16k, 32k")
    args = parser.parse_args()
    histories = args.history or (QUICK_HISTORIES if args.quick else HISTORIES)
    max_context = max(*histories, TARGET_HISTORY) + NUM_NEW + NUM_OUT
    run = Run("ttft", args, threads=1, dtype=str(DTYPE), model=MODEL_SHAPE | {"max_position_embeddings": max_context},
              new_tokens=NUM_NEW, output_tokens=NUM_OUT)  # fmt: skip
    decoder = make_decoder(MAIN_MODEL, args.seed, max_context=max_context)
    rows = []
    for num_history in histories:
        num_rounds = 3 if args.quick or num_history > TARGET_HISTORY else 15
        rows += measure(decoder, num_history, num_rounds, QUICK_BATCH if args.quick else MAX_BATCH, args.seed)
    run.show(PartResult(name="ttft", title=f"a turn of {NUM_NEW} tokens", rows=rows, checks=checks_of(rows)))
    run.end(rows, draw)


def draw(folder: Path, closing: dict[str, Any]) -> None:
    names = {RECOMPUTE: "computed anew", HOST: "mneme, from host memory", DEVICE: "mneme, on the device"}

    series = {
        shown: [(row["history"], row["ttft ms"]) for row in closing["results"] if row["arm"] == arm]
        for arm, shown in names.items()
    }
    caption = f"31M Llama with random weights, {caption_of(closing)}"
    turn = f"turn of {closing['new_tokens']} new tokens, by where the KV of its history is"
    save(folder / "ttft.png", f"Time to the first token of a {turn} (lower is better)", caption,
         lambda axes: lines(axes, series, "history, tokens", "milliseconds", is_log=True))  # fmt: skip


if __name__ == "__main__":
    main()
