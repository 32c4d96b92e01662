"""Sessions' logs that cannot be read now, or are read while a turn runs: no answered turn gives way to an older one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mneme.cachetier.session_log_store import LogKey
from mneme.replicas.durable_sessions import take_over
from mneme.replicas.engine import Engine
from mneme.replicas.queries import LeaveSession, answer
from mneme.replicas.request import SamplingParams
from tests.replicas.fake_runner import continuation
from tests.replicas.test_durable_sessions import KEY, Cluster, flush, say, state_of, state_of_stored
from tests.replicas.test_engine_policy import make_request, run


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    yield cluster
    cluster.close()


def fail_reads(monkeypatch: pytest.MonkeyPatch, cluster: Cluster) -> None:
    def read(key: LogKey, newer_than: int = 0) -> bytes | None:
        raise TimeoutError

    monkeypatch.setattr(cluster.logs, "read", read)


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
    take_over(two.sessions, recalled)
    assert state_of(two).ids.tolist() == said
    assert say(two, "d", [4], append=True) == continuation([*said, 4], 4, 5)
