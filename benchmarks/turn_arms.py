"""Arms of bench_ttft.py: an engine whose sessions' histories are recomputed, in host memory, or on the device."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator
from typing import NamedTuple

from session_engines import DEVICE_ONLY, PAGE_SIZE, STATELESS, TWO_TIER, make_engine, make_runner
from workloads import VOCAB_SIZE

from mneme.errors import MnemeError
from mneme.replicas.model.decoder import Decoder
from mneme.replicas.model.timeline import Timeline
from mneme.replicas.request import GenerationRequest, SamplingParams, TokenEvent

RECOMPUTE, HOST, DEVICE = "recompute", "host", "device"
SYSTEM_BY_ARM = {RECOMPUTE: STATELESS, HOST: TWO_TIER, DEVICE: DEVICE_ONLY}
NUM_NEW = 64  # tokens that a turn adds
_FILLER_TOKENS = 1024  # of a prompt that only takes pages
_SPARE = 1.25  # of the pool: tails of earlier turns, which go first
_HOST_POOLS = 4  # pools that the host tier holds: histories stay while what fills the pool passes through
_MAX_LEFT = 0.02  # of an evicted history that may still be on the device


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
        timeline: Timeline | None = None,
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
        self._runner = make_runner(
            decoder, system, num_pages=self._num_pages, num_host_pages=num_host_pages, timeline=timeline
        )
        self._engine = make_engine(self._runner, system)
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
        for request in requests:
            self._engine.submit(request)
        unanswered = {request.request_id for request in requests}
        unended = set(unanswered)
        while unended:
            stepped_s = time.perf_counter()
            events = self._engine.step()
            now_s = time.perf_counter()
            busy_s += now_s - stepped_s
            answered = unanswered.intersection(event.request_id for event in events if event.token_ids)
            first_s = now_s - began_s if answered else first_s
            unanswered -= answered
            unended.difference_update(event.request_id for event in events if event.finish_reason)
            self._check(events, is_turn)
        self._finish_copies()
        num_out = sum(request.sampling.max_tokens or 0 for request in requests)
        return Took(began_s, first_s, now_s - began_s, busy_s, num_out)

    def _finish_copies(self) -> None:
        while self._runner.num_host_pages and (self._engine.forest.wants_copies or not self._runner.can_copy):
            if self._engine.has_work:
                self._engine.step()
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
        return GenerationRequest(
            request_id=f"{session}.{next(self._serials)}",
            prompt_token_ids=tuple(ids),
            sampling=SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, seed=0),
            session_id=None if self.name == RECOMPUTE else session,
        )

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


def interleaved(arms: list[Arm], count: int, num_rounds: int) -> dict[str, list[Took]]:
    """Every arm once per round, forwards and backwards in alternation; a first round that does not count."""
    took: dict[str, list[Took]] = {arm.name: [] for arm in arms}
    for number, order in enumerate(_orders(arms, num_rounds + 1)):
        for arm in order:
            found = arm.turns(count)
            if number:
                took[arm.name].append(found)
    return took


def _orders(arms: list[Arm], num_rounds: int) -> Iterator[list[Arm]]:
    for number in range(num_rounds):
        yield arms if number % 2 else arms[::-1]
