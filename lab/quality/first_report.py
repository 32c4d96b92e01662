"""The report of a model's first start: made tasks that the model can do, and no more arms than decide what is allowed.

A server has it made (`replicas/blend/first_report.py`). All tasks count that a model answers exactly often enough to
have something to lose, so what is allowed lost nothing in any of them. From the largest ratio down: what loses there is
not measured at a smaller one, which could not be allowed.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from mneme.errors import ConfigError
from mneme.lab.quality.measure import Arm, measure
from mneme.lab.quality.tasks import GENERATED, read_task
from mneme.replicas.blend.gate import MIN_CASES, MIN_SCORE_FULL, Measured, QualityReport
from mneme.replicas.documents import Selector
from mneme.replicas.engine.engine import Engine
from mneme.replicas.text.tokenizer import Tokenizer

_SELECTORS: tuple[Selector, ...] = ("hkvd", "query", "first-k")
_RATIOS = (0.5, 0.3, 0.2, 0.15)
_TRIED_CASES = 20  # of each layout, to see whether a model can do a task
_MAX_TOKENS = 16  # of an answer: made tasks' are shorter


class OutOfTime(Exception):
    """The budget is spent."""


def measure_first(engine: Engine, tokenizer: Tokenizer, before_step: Callable[[], None]) -> QualityReport:
    """Return a report, whose model is for the caller to fill in; of no rows if no task's cases fit the context."""
    name, tried = "", list[Measured]()
    can_do = list[str]()
    for kind in GENERATED:
        try:
            task = read_task(kind, _TRIED_CASES)
            rows, _ = measure(
                engine, tokenizer, task, [Arm("none", 0.0)], max_tokens=_MAX_TOKENS, before_step=before_step
            )
        except ConfigError as error:
            name += f"{kind}: {error}; "
            continue
        tried += rows
        can_do += [kind] if all(row.exact_match_full >= MIN_SCORE_FULL for row in rows) else []
    tasks = [read_task(kind, MIN_CASES) for kind in can_do]
    if not tasks:
        return QualityReport(model={}, task=name + f"of made tasks, {_TRIED_CASES} cases each", rows=tuple(tried))
    rows, left = [], _SELECTORS
    for ratio in _RATIOS:
        arms = [Arm(selector, ratio) for selector in left]
        for task in tasks:
            rows += measure(engine, tokenizer, task, arms, max_tokens=_MAX_TOKENS, before_step=before_step)[0]
        report = QualityReport(model={}, task="; ".join(task.name for task in tasks), rows=tuple(rows))
        left = tuple(selector for selector in left if report.allowed().get(selector) == ratio)
        if not left:
            break
    return report


class Background:
    """Lets an engine step while who started this process says so; gives way to all others on the machine."""

    def __init__(self, budget_s: float) -> None:
        """`budget_s`: of this process's time on processors."""
        self._budget_s, self._goes = budget_s, False
        os.nice(19)
        with suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")  # where memory runs out, this goes and no replica
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # threads that begin later are so too

    def wait(self) -> None:
        """Return when a step may be made: the last byte on standard input is 1. Ends this process at its end.

        Raises `OutOfTime`.
        """
        if time.process_time() > self._budget_s:
            raise OutOfTime
        while select.select([0], [], [], 0.0 if self._goes else None)[0]:
            said = os.read(0, 4096)
            if not said:
                raise SystemExit(1)
            self._goes = said.endswith(b"1")
