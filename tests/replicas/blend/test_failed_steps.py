"""A step fails whose rows complete the documents of a blend: nothing of them is left, and nothing is saved."""

from __future__ import annotations

from typing import Any

import pytest

from mneme.replicas.engine.engine import Engine
from mneme.replicas.request import SamplingParams
from tests.replicas.blend.test_blended_traffic import A, B, blended, engine_of
from tests.replicas.chunk_stores import FakeStore
from tests.replicas.connector.test_played_loads import Played
from tests.replicas.fake_runner import continuation
from tests.replicas.schedule.test_engine_policy import make_request, run, tokens_of


def fail(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*args: Any) -> Any:
        raise ValueError("device fault")

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "prepare", failing)
        with pytest.raises(ValueError):
            engine.step()
    engine.fail_all("failed")


def test_no_document_is_left_of_a_failed_step(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(max_batch_tokens=64)
    engine.submit(blended("a", [(0, 1), A, B, (2, 2)], num_tokens=2))
    fail(engine, monkeypatch)
    assert not engine.has_work
    engine.submit(make_request("b", [*A, 1], SamplingParams(temperature=0, max_tokens=3)))
    assert tokens_of(run(engine), "b") == continuation([*A, 1], 3, 5)


@pytest.mark.parametrize("max_rows", [64, 24])
def test_no_document_of_a_failed_step_is_saved(monkeypatch: pytest.MonkeyPatch, max_rows: int) -> None:
    store = FakeStore()
    case = Played(store, max_batch_tokens=max_rows)
    case.engine.submit(blended("a", [(0, 1), A * 2, B, (2, 2)], num_tokens=2))
    case.cache.play()
    fail(case.engine, monkeypatch)
    saved = len(store.chunks)
    run(case.engine)
    assert saved == 0
    case.check_rest()


def test_who_was_computed_too_often_ends_alone() -> None:
    engine = engine_of(max_batch_tokens=64)
    runner: Any = engine.runner
    engine.submit(blended("a", [(0, 1), A, B, (2, 2)], num_tokens=2))
    events = []
    for _ in range(20):
        if engine.has_work:
            runner.num_failing_transfers = 1
            events += engine.step()
    assert [event.finish_reason for event in events] == ["error"]
    assert not engine.has_work
