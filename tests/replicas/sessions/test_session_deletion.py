"""What becomes of the pages of a session that is deleted: freed at once, but for what others are on."""

from __future__ import annotations

from typing import Any

import pytest

from mneme.replicas.engine.engine import Engine
from mneme.replicas.forest.forest import PrefixForest
from mneme.replicas.forest.tree import Owner
from mneme.replicas.queries import DeleteSession
from mneme.replicas.request import SamplingParams
from tests.replicas.asked import answer
from tests.replicas.fake_runner import FakeRunner
from tests.replicas.schedule.test_engine_policy import make_engine, make_request, run

SHARED = [1, 2, 3, 4] * 4  # four pages
MINE, OTHERS = SHARED + [0] * 12, SHARED + [3] * 12
LONG = SamplingParams(temperature=0, max_tokens=40)


def say(engine: Engine, name: str, session: str | None, ids: list[int], **more: Any) -> None:
    engine.submit(make_request(f"{name}.0", ids, session_id=session, **more))


def delete(engine: Engine, session: str) -> bool:
    deleted: bool = answer(engine, DeleteSession(("", session)))
    engine.forest.check()
    return deleted


def test_a_fork_keeps_its_past_at_once() -> None:
    engine = make_engine()
    say(engine, "1", "s", MINE)
    run(engine)
    engine.fork(("", "s"), ("", "f"))
    assert delete(engine, "s")
    log = engine.sessions.get(("", "f"))
    assert engine.forest.resident("", log.ids).device >= len(log.ids) - 1
    assert delete(engine, "f")
    assert engine.forest.device.num_cached == 0


@pytest.mark.parametrize("num_steps", [1, 4, 50])
def test_without_sharing_a_fork_has_no_pages_and_is_deleted(num_steps: int) -> None:
    engine = make_engine(runner=FakeRunner(64, 4, num_host_pages=16), prefix_sharing=False)
    say(engine, "1", "s", MINE)
    for _ in range(num_steps):
        engine.step()
    engine.fork(("", "s"), ("", "f"))
    assert len(engine.forest.owners) == 0
    assert delete(engine, "f")
    run(engine)
    assert delete(engine, "s")
    assert len(engine.forest.device.free) == 64


def test_a_session_that_was_dropped_for_its_age_leaves_its_pages_cached() -> None:
    engine = make_engine(max_sessions=1)
    say(engine, "1", "s", MINE)
    run(engine)
    say(engine, "2", "t", OTHERS)
    run(engine)
    engine.sessions.expire()
    assert engine.sessions.get(("", "s")) is None
    assert engine.forest.resident("", MINE).device == len(MINE)


def test_a_session_deleted_while_it_answers_leaves_nothing_when_it_ends() -> None:
    engine = make_engine()
    say(engine, "1", "s", MINE)
    run(engine)
    say(engine, "2", "s", MINE, params=LONG)
    for _ in range(6):
        engine.step()
    assert delete(engine, "s")
    assert engine.forest.device.num_in_use > 0
    events = run(engine)
    assert [event.finish_reason for event in events][-1] == "length"
    assert (engine.forest.device.num_cached, len(engine.sessions)) == (0, 0)


def test_a_turn_behind_the_deleted_one_begins_anew_and_is_kept() -> None:
    engine = make_engine()
    say(engine, "1", "s", MINE, params=LONG)
    say(engine, "2", "s", OTHERS)
    engine.step()
    assert delete(engine, "s")
    run(engine)
    log = engine.sessions.get(("", "s"))
    assert log.ids.tolist()[: len(OTHERS)] == OTHERS
    assert engine.forest.resident("", MINE).device == len(SHARED)
    assert delete(engine, "s")
    assert engine.forest.device.num_cached == 0


def test_both_tiers_forget_it() -> None:
    """Pages on both, on the host only, and one whose load is still to be made."""
    forest, owner, other = PrefixForest(8, 4, num_host_pages=16, copy_out_below=1.0), Owner(), Owner()
    spoken(forest, MINE, owner)
    spoken(forest, [4] * 24, other)  # six of eight pages: most of the first session goes to the host
    assert (forest.resident("", MINE).device, forest.resident("", MINE).host) == (8, 20)
    path = forest.open_path("")
    path.extend(MINE, 17)
    path.take_rows(MINE[:17], 8)
    forest.release(path)
    forest.check()
    forest.delete(owner, None)
    forest.check()
    assert forest.resident("", MINE) == (0, 0)
    assert forest.resident("", [4] * 24).device + forest.resident("", [4] * 24).host == 24
    forest.delete(other, None)
    forest.check()
    assert (len(forest.device.free), len(forest.host.free), len(forest.roots)) == (8, 16, 0)


def spoken(forest: PrefixForest, ids: list[int], owner: Owner) -> None:
    path = forest.open_path("")
    path.extend(ids, len(ids))
    path.write(ids, len(ids))
    forest.release(path, owner)
    forest.store.drain_moves()
