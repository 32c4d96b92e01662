"""Sessions' logs that cannot be read or written now: no answered turn is lost, nor gives way to an older one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from mneme.cachetier.names import Appended, tenant_id
from mneme.errors import InvalidRequest, ReplicaUnavailable
from mneme.replicas.engine.engine import Engine
from mneme.replicas.queries import LeaveSession
from mneme.replicas.request import SamplingParams
from mneme.replicas.sessions import durable as durable_sessions
from tests.replicas.asked import answer
from tests.replicas.fake_runner import continuation
from tests.replicas.schedule.test_engine_policy import make_request, run
from tests.replicas.sessions.test_durable_sessions import (
    KEY,
    Cluster,
    delete,
    flush,
    recall,
    say,
    state_of,
    state_of_stored,
)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    yield cluster
    cluster.close()


def fail_reads(monkeypatch: pytest.MonkeyPatch, cluster: Cluster) -> None:
    monkeypatch.setattr(cluster.logs, "read", fail)


def fail(*_: object) -> bytes | None:
    raise TimeoutError


def until(holds: Callable[[], bool], limit_s: float = 20.0) -> None:
    ends_s = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < ends_s
        time.sleep(0.01)


def turns(engine: Engine, *names: str, said: list[int]) -> list[int]:
    """Each sends all that was said."""
    for name in names:
        said = [*said, 4, *say(engine, name, [*said, 4])]
    return said


@pytest.mark.parametrize("is_known", [False, True])
def test_a_turn_that_brings_its_history_stays_though_the_log_could_not_be_read(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, is_known: bool
) -> None:
    """The session was taken over before, so its log is in a later epoch than what this engine knows of it."""
    one, two = cluster.engine(), cluster.engine()
    said = turns(two, "c", said=turns(one, "b", said=turns(two, "a", said=[1, 2])))
    said = turns(two, "d", said=said)
    if not is_known:
        answer(one, LeaveSession(KEY))
    with monkeypatch.context() as patched:
        fail_reads(patched, cluster)
        said = turns(one, "e", said=said)
    assert state_of_stored(cluster) == said
    assert say(one, "f", [3], append=True) == continuation([*said, 3], 4, 5)


def test_who_hangs_with_a_log_that_it_could_not_read_does_not_write_over_who_goes_on(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two, three = cluster.engine(), cluster.engine(), cluster.engine()
    said = turns(two, "b", said=turns(one, "a", said=[1, 2]))
    with monkeypatch.context() as patched:
        fail_reads(patched, cluster)
        three.submit(make_request("c.0", [*said, 3], salt=KEY[0], session_id=KEY[1]))
        three.step()
    said = turns(two, "d", said=said)
    run(three)
    flush(three)
    assert state_of_stored(cluster) == said


@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize("ending", ["refused", "lost"])
def test_a_turn_that_leaves_nothing_costs_nothing_of_a_log_that_could_not_be_read(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, is_known: bool, ending: str
) -> None:
    """It is too long, or its replica dies while it answers; nor does who had the session in memory lose it."""
    one, two = cluster.engine(), cluster.engine()
    said = turns(one, "a", said=[1, 2])
    if is_known:
        said = turns(two, "b", said=said)
    said = turns(one, "c", "d", said=said)
    with monkeypatch.context() as patched:
        fail_reads(patched, cluster)
        recall(two, KEY[1])
        more = 4 if ending == "lost" else 100_000
        request = make_request("e.0", [*said, *[3] * more], salt=KEY[0], session_id=KEY[1])
        with nullcontext() if ending == "lost" else pytest.raises(InvalidRequest):
            two.submit(request)
        two.step()
        flush(two)
    assert state_of_stored(cluster) == said
    assert say(one, "f", [3], append=True) == continuation([*said, 3], 4, 5)


def test_a_log_that_was_read_while_a_turn_ran_does_not_replace_what_that_left(cluster: Cluster) -> None:
    """The next request reads the log between the turn's beginning and its end, and is taken after that."""
    one, two = cluster.engine(), cluster.engine()
    assert two.durable is not None
    said = turns(two, "b", said=turns(one, "a", said=[1, 2]))
    version = two.sessions.version_of(KEY)
    params = SamplingParams(temperature=0, max_tokens=4)
    two.submit(make_request("c.0", [3], params, salt=KEY[0], session_id=KEY[1], append=True))
    two.step()
    flush(two)
    recalled = two.durable.recall([KEY], lambda _key: version)
    assert [each.key for each in recalled] == [KEY]
    run(two)
    said += [3, *continuation([*said, 3], 4, 5)]
    two.sessions.restore_all(recalled)
    assert state_of(two).ids.tolist() == said
    assert say(two, "d", [4], append=True) == continuation([*said, 4], 4, 5)


def test_what_could_not_be_written_is_written_later(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if no turn follows, and the last one began and ended while the node's logs were away."""
    monkeypatch.setattr(durable_sessions, "RETRY_S", 0.01)
    one = cluster.engine()
    said = turns(one, "a", said=[1, 2])
    with monkeypatch.context() as patched:
        patched.setattr(cluster.logs, "append", lambda _key, _rows: Appended.FAILED)
        said = turns(one, "b", "c", said=said)
        say(one, "d", [3], session_id="public:other")
    assert one.durable is not None
    until(lambda: one.durable.writer.stats()["later"] == 0)
    assert state_of_stored(cluster) == said


def test_what_was_deleted_is_not_written_later(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the engine still knows the session or not, and also if it could not be deleted at first."""
    monkeypatch.setattr(durable_sessions, "RETRY_S", 0.2)
    one = cluster.engine()
    assert one.durable is not None
    with monkeypatch.context() as patched:
        patched.setattr(cluster.logs, "append", lambda _key, _rows: Appended.FAILED)
        turns(one, "a", said=[1, 2])
        say(one, "b", [3], session_id="public:dropped")
        say(one, "c", [3], salt="tenant")
        assert one.durable.writer.stats()["later"] == 3
    answer(one, LeaveSession((KEY[0], "public:dropped")))
    with monkeypatch.context() as patched:
        patched.setattr(cluster.logs, "delete", fail)
        with pytest.raises(ReplicaUnavailable):
            delete(one)
    delete(one, "public:dropped")
    one.durable.delete_tenant(tenant_id("tenant"))
    until(lambda: one.durable.writer.stats()["later"] == 0)
    assert cluster.logs.stats()["sessions"] == 0
    assert cluster.logs.stats()["tombstones"] == 1


def test_a_last_try_is_made_when_the_engine_ends(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable_sessions, "RETRY_S", 1000.0)
    one = cluster.engine()
    with monkeypatch.context() as patched:
        patched.setattr(cluster.logs, "append", lambda _key, _rows: Appended.FAILED)
        said = turns(one, "a", said=[1, 2])
    cluster.restart()
    assert state_of_stored(cluster) == said


def test_of_sessions_that_could_not_be_written_so_many_are_kept(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable_sessions, "MAX_UNWRITTEN", 2)
    one = cluster.engine()
    monkeypatch.setattr(cluster.logs, "append", lambda _key, _rows: Appended.FAILED)
    for number in range(5):
        say(one, f"{number}", [3], session_id=f"public:{number}")
    assert one.durable is not None
    stats = one.durable.writer.stats()
    assert (stats["later"], stats["lost"]) == (2, 3)
