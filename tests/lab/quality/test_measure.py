"""What is measured of answers: scores as SQuAD has them, and distributions on the tokens of the full answer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mneme.errors import ConfigError
from mneme.lab.quality.measure import Arm, best_scores, measure
from mneme.lab.quality.tasks import read_task
from mneme.replicas.config import EngineConfig
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
