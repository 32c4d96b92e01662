"""Out of pages in decode, on a real model: who is suspended goes to the host and comes back, and nothing is lost."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mneme.replicas.engine.engine import Engine
from mneme.replicas.model.decoder import Decoder
from mneme.replicas.request import TokenEvent
from tests.replicas.tiered_engine import answers, draw, full_prefill, logits_of, make_engine, run, runner_of, submit

pytestmark = pytest.mark.engine

NUM_NEW = 60
TOLERANCE = 1e-4


@pytest.fixture
def engine(decoder: Decoder) -> Iterator[Engine]:
    engine = make_engine(decoder, num_pages=12)
    yield engine
    runner_of(engine).close()


def test_the_suspended_come_back_from_the_host(decoder: Decoder, engine: Engine) -> None:
    """Five sequences of five or six pages each in a pool of twelve."""
    prompts = {f"r{i}": draw(i, 12 + 5 * i) for i in range(5)}
    for name, ids in prompts.items():
        submit(engine, name, ids, NUM_NEW)
    events: list[TokenEvent] = []
    while engine.has_work:
        running = list(engine.scheduler.running)
        events += engine.step()
        suspended = [each for each in running if each in set(engine.scheduler.waiting)]
        assert suspended == running[len(running) - len(suspended) :], "not the latest arrivals"
    found = answers(events)
    assert engine.scheduler.num_suspensions
    runner = runner_of(engine)
    assert runner.num_saved
    assert runner.num_loaded
    # The last token of an output is never computed, and nothing is computed twice.
    assert runner.num_rows == sum(len(ids) + NUM_NEW - 1 for ids in prompts.values())
    for name, ids in prompts.items():
        tokens, logits = full_prefill(decoder, ids, NUM_NEW)
        assert found[name] == tokens
        assert (logits_of(engine, name) - logits).abs().max() <= TOLERANCE


def test_without_room_on_the_host_the_rest_is_computed_anew(decoder: Decoder) -> None:
    engine = make_engine(decoder, num_pages=12, num_host_pages=2)
    prompts = {f"r{i}": draw(i, 12 + 5 * i) for i in range(5)}
    for name, ids in prompts.items():
        submit(engine, name, ids, NUM_NEW)
    found = answers(run(engine))
    runner = runner_of(engine)
    assert engine.scheduler.num_suspensions
    assert runner.num_loaded
    assert runner.num_rows > sum(len(ids) + NUM_NEW - 1 for ids in prompts.values())
    for name, ids in prompts.items():
        assert found[name] == full_prefill(decoder, ids, NUM_NEW)[0]
    runner.close()
