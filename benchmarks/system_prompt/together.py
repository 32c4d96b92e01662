"""b requests that share a prompt, at once or while the first computes it: one prefill's time, one copy in memory.

Nobody tells the engine what is shared. Besides the shared part each request has a few tokens of its own, which are
work of their own: `rows` says how many tokens were computed over those of a request alone, and bounds the time.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any, NamedTuple

from harness import Check, PartResult, at_most
from system_prompt.bench import PAGE_SIZE, RELAY, Bench, requests
from system_prompt.serving import serve
from workloads import Workload, make_prompts

SHARED = 2048
_NEW = 64  # more than any request generates before all have their first token: none ends early
MAX_TIME = 1.1  # times one prefill
PROMISED_OWN = (0, 1)  # tokens of its own that a request has in the checks: the same prompt, and one more token each


class Case(NamedTuple):
    own: int  # tokens of each request's own behind the shared ones
    requests: int
    is_staggered: bool  # arrivals spread evenly over the time that one takes alone
    step_rows: int  # limit of query rows per step: a prefill in one step or in several


class Found(NamedTuple):
    first_s: float  # from the first arrival until all have their first token
    num_computed: int  # prompt tokens
    num_pages: int  # in use when all have their first token
    num_allowed: int  # pages of one copy, and of what each has for itself


def run_together(bench: Bench) -> PartResult:
    part = PartResult(
        name="together", title=f"b requests sharing {SHARED} tokens: time until all have a token, over that of one"
    )
    own_lengths = bench.pick(full=(0, 1, 8, 64), quick=(0, 1))
    for step_rows in bench.pick(full=(2048, 512), quick=(2048,)):
        for own in own_lengths:
            cases = [
                Case(own, b, is_staggered, step_rows)
                for b in bench.pick(full=(2, 8, 32), quick=(2, 32))
                for is_staggered in (False, True)
            ]
            part.rows += _measure(bench, cases)
    part.checks = checks(part.rows)
    return part


def _measure(bench: Bench, cases: list[Case]) -> list[dict[str, Any]]:
    """A row for each case; in every round each case, and one request alone, has a turn."""
    alone_case = cases[0]._replace(requests=1, is_staggered=False)
    ratios: dict[Case, list[float]] = {case: [] for case in cases}
    last: dict[Case, Found] = {}
    alone_s = []
    for seed in bench.seeds(bench.pick(full=5, quick=2)):
        alone = _run(bench, alone_case, seed, 0.0)
        alone_s.append(alone.first_s)
        for case in cases if seed % 2 else reversed(cases):
            last[case] = _run(bench, case, seed, alone.first_s)
            ratios[case].append(last[case].first_s / alone.first_s)
    return [_row(case, statistics.median(ratios[case]), last[case], statistics.median(alone_s)) for case in cases]


def _row(case: Case, time: float, found: Found, alone_s: float) -> dict[str, Any]:
    return {
        "rows/step": case.step_rows, "own": case.own, "b": case.requests,
        "arrive": "staggered" if case.is_staggered else "at once", "alone ms": alone_s * 1e3,
        "time": time, "rows": found.num_computed / (SHARED + case.own),
        "pages": found.num_pages, "pages allowed": found.num_allowed,
    }  # fmt: skip


def _run(bench: Bench, case: Case, seed: int, spread_s: float) -> Found:
    prompts = make_prompts(Workload(case.requests, SHARED, case.own, _NEW), seed)
    engine = bench.replica.engine(RELAY, max_batch_tokens=case.step_rows)
    gap_s = spread_s / case.requests if case.is_staggered else 0.0
    arrivals = [index * gap_s for index in range(case.requests)]
    served = serve(engine, requests(prompts, _NEW), arrivals, now_s=bench.now_s, until_first=True)
    counts = engine.num_tokens
    generated = [len(each.token_s) for each in served]
    return Found(
        max(each.token_s[0] for each in served),
        counts["prompt"] - counts["cached"],
        engine.forest.device.num_in_use,
        allowed_pages(SHARED, case.own, generated),
    )


def allowed_pages(shared: int, own: int, generated: Iterable[int]) -> int:
    """One copy of `shared` tokens, which fill their pages, and for each request pages for what is its own.

    The last token of each was not run yet, so it has no slot.
    """
    common = shared // PAGE_SIZE
    private = (-(-(shared + own + count - 1) // PAGE_SIZE) - common for count in generated)
    return common + sum(private)


def checks(rows: list[dict[str, Any]]) -> list[Check]:
    """The worst over all numbers of requests and step sizes."""
    promised = [row for row in rows if row["own"] in PROMISED_OWN]
    times = {
        arrive: max((row["time"] for row in promised if row["arrive"] == arrive), default=None)
        for arrive in ("at once", "staggered")
    }
    copies = max((row["pages"] / row["pages allowed"] for row in rows), default=None)
    return [
        at_most("b_sharing_2048_at_once_over_one_prefill", times["at once"], MAX_TIME),
        at_most("b_sharing_2048_staggered_over_one_prefill", times["staggered"], MAX_TIME),
        at_most("pages_in_use_over_one_copy_and_private", copies, 1.0),
    ]
