"""What is measured of answers: scores as SQuAD has them, and distributions on the tokens of the full answer."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from mneme.errors import ConfigError
from mneme.lab.quality import first_report
from mneme.lab.quality.measure import Arm, best_scores, measure
from mneme.lab.quality.tasks import read_task
from mneme.replicas.blend import gate
from mneme.replicas.config import EngineConfig
from mneme.replicas.documents import SELECTORS
from mneme.replicas.engine.build import build_engine
from mneme.replicas.engine.engine import Engine
from mneme.replicas.model.directory import model_directory
from mneme.replicas.text.tokenizer import Tokenizer

TASK = read_task("coreference:8x4", 20)


@pytest.fixture(scope="module")
def tokenizer() -> Iterator[Tokenizer]:
    loaded = Tokenizer.load(model_directory("mneme-tiny"))
    yield loaded
    loaded.close()


def engine_of(tokenizer: Tokenizer, **options: bool) -> Engine:
    config = EngineConfig(device="cpu", dtype="float32", num_pages=256, **options)
    return build_engine("mneme-tiny", config, tokenizer=tokenizer)


@pytest.mark.parametrize(
    ("said", "answers", "scores"),
    [
        ("The tea.", ["a Tea"], (1, 1)),
        ("Alice likes milk", ["Alice likes tea"], (2 / 3, 0)),
        ("Alice likes tea", ["milk", "Alice, likes TEA!"], (1, 1)),
        ("tea tea", ["tea"], (2 / 3, 0)),
        ("", ["tea"], (0, 0)),
        ("the", ["an"], (1, 1)),
        ("milk", ["tea"], (0, 0)),
    ],
)
def test_scores_are_those_of_squad(said: str, answers: list[str], scores: tuple[float, float]) -> None:
    assert best_scores(said, answers) == pytest.approx(scores)


def test_arms_are_held_against_full_recompute(tokenizer: Tokenizer) -> None:
    engine = engine_of(tokenizer)
    counted: list[int] = []
    arms = [Arm("none", 0), Arm("query", 0.3), Arm("all", 1), Arm("hkvd", 0.2)]
    rows, num_left_out = measure(engine, tokenizer, TASK, arms, on_progress=counted.append)
    engine.close()
    none, query, everything, hkvd = rows
    assert (sum(counted), num_left_out, {row.num_cases for row in rows}) == (20, 0, {20})
    assert {row.exact_match_full for row in rows} == {1}
    assert everything.kl < 1e-4
    assert (everything.score, everything.exact_match, everything.top1) == (1, 1, 1)
    # Were the documents found as a part of the prompt that was computed in full, nothing would be lost.
    assert none.exact_match < query.exact_match
    assert none.kl > query.kl > 1e-3
    assert none.top1 < 1
    assert hkvd.exact_match >= 0.95, "what its shipped report says"
    assert hkvd.kl < 0.05
    assert 2 / 3 <= none.score < 1, "all but the last of three words is in the question"


def test_cases_that_do_not_fit_are_left_out_and_counted(tokenizer: Tokenizer) -> None:
    engine = engine_of(tokenizer)
    short = TASK.cases_by_layout["8x4"][0]
    long = short._replace(passages=short.passages * 100)
    arms = [Arm("first-k", 0.5)]
    rows, num_left_out = measure(engine, tokenizer, TASK._replace(cases_by_layout={"a": [long, short]}), arms)
    assert (rows[0].num_cases, num_left_out) == (1, 1)
    with pytest.raises(ConfigError, match="no case of b fits"):
        measure(engine, tokenizer, TASK._replace(cases_by_layout={"b": [long]}), arms)
    engine.close()


def test_what_reuses_nothing_is_no_measurement(tokenizer: Tokenizer) -> None:
    engine = engine_of(tokenizer, prefix_sharing=False)
    with pytest.raises(ConfigError, match="computed in full: engine"):
        measure(engine, tokenizer, TASK, [Arm("none", 0)])
    engine.close()


def test_a_first_report_is_of_tasks_that_the_model_can_do_from_the_largest_ratio_down(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What loses at a ratio is not measured below it. mneme-tiny cannot retrieve codes, so that says nothing of it."""
    for name, value in (("_TRIED_CASES", 4), ("MIN_CASES", 8), ("_RATIOS", (0.4, 0.2))):
        monkeypatch.setattr(first_report, name, value)
    monkeypatch.setattr(gate, "MIN_CASES", 8)
    engine, steps = engine_of(tokenizer), list[None]()
    report = first_report.measure_first(engine, tokenizer, lambda: steps.append(None))
    assert len(steps) == engine.num_steps
    assert report.task.startswith("coreference:")
    assert {row.layout for row in report.rows} == {"4x8", "8x4", "16x2"}
    measured = {selector: {row.ratio for row in report.rows if row.selector == selector} for selector in SELECTORS}
    assert measured["hkvd"] == {0.4, 0.2}
    assert report.allowed()["hkvd"] == 0.2
    assert measured["query"] == measured["first-k"] == {0.4}
    assert {"query", "first-k"}.isdisjoint(report.allowed())
    monkeypatch.setattr(first_report, "MIN_SCORE_FULL", 1.1)
    nothing = first_report.measure_first(engine, tokenizer, lambda: None)
    assert {row.num_cases for row in nothing.rows} == {4}
    assert nothing.allowed() == {}
    engine.close()


STEPS = """
from mneme.lab.quality.first_report import Background, OutOfTime
import os, sys
background = Background(float(sys.argv[1]))
try:
    while True:
        background.wait()
        print("step", os.sched_getscheduler(0) == os.SCHED_IDLE, flush=True)
except OutOfTime:
    print("out of time", flush=True)
"""


def in_background(budget_s: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", STEPS, str(budget_s)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)


def test_what_runs_in_the_background_goes_as_long_as_it_is_told_and_ends_with_who_tells_it() -> None:
    with in_background(600) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        print("0011", end="", file=process.stdin, flush=True)
        assert process.stdout.readline() == "step True\n"
        process.stdin.close()
        assert process.stdout.read().split("\n")[0] in ("step True", "")
        assert process.wait() == 1
    with in_background(0) as process:
        assert process.communicate("1")[0] == "out of time\n"
