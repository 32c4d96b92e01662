"""CacheBlend Fig. 13: a question over four passages, beside map-reduce and map-rerank.

`full` computes all passages in one prompt, `query 0.15` reuses their KV, *map-reduce* has each passage summed up for a
question, then answers from what was said of them, *map-rerank* answers from each passage alone and takes the answer
whose tokens were likeliest. The passages hide codes in real text (`lab/quality/retrieval.py`); a point is five cases,
and an answer that has the code in it is right. What bounds it, one thread: prompts, and what is generated before the
answer begins.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, NamedTuple

import httpx
from plots import Points
from servers import start

from mneme.lab.quality.retrieval import Hidden, hidden_codes
from papers.conversations import REAL, TINY
from papers.documents import BLENDS, OFF
from papers.experiment import Experiment, Found, Ours, Point, percent, times

FULL, BLEND, REDUCE, RERANK = "full", "query 0.15", "map-reduce", "map-rerank"
SUMMARY_TOKENS, ANSWER_TOKENS, PART_CASES = 32, 24, 5


class Said(NamedTuple):
    text: str
    logprob: float  # mean of its tokens


class MapReduce(Experiment):
    name, title, minutes = "cache-blend-map-reduce", "CacheBlend Fig. 13: map-reduce and map-rerank", 5
    rows = ("B22",)
    axes = ("ms until the answer begins", "right")
    model, is_served = REAL, True
    arms = (FULL, BLEND, REDUCE, RERANK)

    def points(self) -> Iterable[Point]:
        return [{"part": part} for part in range(1 if self.is_quick else 12)]

    def open(self, stack: ExitStack) -> None:
        (server,) = start(stack, TINY if self.is_quick else self.model, {"only": {}}).values()
        self._http = stack.enter_context(httpx.Client(base_url=server.url, timeout=3600))
        self._model = server.model
        self._threads = stack.enter_context(ThreadPoolExecutor(4))

    def measure(self, point: Point) -> Point:
        first = point["part"] * PART_CASES
        cases = [*hidden_codes(self.seed, num_cases=first + PART_CASES, num_passages=4, num_words=60)][first:]
        found = Point()
        for arm in self.arms:
            took = [self._answer(arm, f"{first + number} {arm}", case) for number, case in enumerate(cases)]
            right = [case.code in said for (said, _), case in zip(took, cases, strict=True)]
            found |= {f"{arm} right": statistics.fmean(right), f"{arm} ms": 1e3 * statistics.median(s for _, s in took)}
        return found

    def _answer(self, arm: str, salt: str, case: Hidden) -> tuple[str, float]:
        """What is said, and the seconds until the answer begins; an arm's own documents are known before."""
        question = f"\n\nWhat is the code of the {case.place}? Say the code alone."
        blend = BLENDS.get(arm, OFF)
        if arm == BLEND:
            self._ask(case.passages, "\n\nSay yes.", 1, salt, blend)
        began_s, passages = time.perf_counter(), list(case.passages)
        if arm == REDUCE:
            summed = f"\n\nWhat does this say of the code of the {case.place}?"
            passages = [each.text for each in self._each(passages, summed, SUMMARY_TOKENS, salt)]
        if arm == RERANK:
            best = max(self._each(passages, question, ANSWER_TOKENS, salt), key=lambda each: each.logprob)
            return best.text, time.perf_counter() - began_s
        self._ask(passages, question, 1, salt, blend)
        seconds = time.perf_counter() - began_s
        return self._ask(passages, question, ANSWER_TOKENS, salt, blend).text, seconds

    def _each(self, passages: Sequence[str], question: str, num_tokens: int, salt: str) -> list[Said]:
        """All passages at once, each alone."""
        return [*self._threads.map(lambda text: self._ask([text], question, num_tokens, salt, OFF), passages)]

    def _ask(self, passages: Sequence[str], question: str, num_tokens: int, salt: str, blend: dict[str, Any]) -> Said:
        parts = [{"type": "document", "text": text} for text in passages] + [{"type": "text", "text": question}]
        body = {
            "model": self._model, "messages": [{"role": "user", "content": parts}], "max_tokens": num_tokens,
            "temperature": 0, "logprobs": True, "cache_salt": salt, "blend": blend,
        }  # fmt: skip
        answer = self._http.post("/v1/chat/completions", json=body).raise_for_status().json()["choices"][0]
        tokens = answer["logprobs"]["content"] or [{"logprob": -1e9}]
        return Said(answer["message"]["content"] or "", statistics.fmean(each["logprob"] for each in tokens))

    def ours(self, found: Found) -> dict[str, Ours]:
        ms = {arm: statistics.median(row[f"{arm} ms"] for row in found) for arm in self.arms}
        right = {arm: statistics.fmean(row[f"{arm} right"] for row in found) for arm in self.arms}
        told = ", ".join(f"{times(ms[arm] / ms[BLEND])} sooner than {arm}" for arm in (REDUCE, RERANK, FULL))
        shown = ", ".join(f"{arm} {percent(share)}" for arm, share in right.items())
        return {"B22": Ours(f"{told}; right {shown}", note="codes in four passages of real text, SmolLM2")}

    def series(self, found: Found) -> Mapping[str, Points]:
        def middle(arm: str) -> tuple[float, float]:
            ms, right = ([row[f"{arm} {what}"] for row in found] for what in ("ms", "right"))
            return statistics.median(ms), statistics.fmean(right)

        return {("mneme, query 0.15" if arm == BLEND else arm): [middle(arm)] for arm in self.arms}


EXPERIMENTS = (MapReduce,)
