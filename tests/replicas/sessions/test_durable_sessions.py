"""A second engine on the same logs goes on where the first one was: same ids, same marks, same turns.

Where logs cannot be read or written now no answered turn is lost, nor gives way to an older one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from mneme.cachetier.names import Appended, tenant_id
from mneme.cachetier.session_log.log import SessionLogs
from mneme.cachetier.session_log.rows import SessionState
from mneme.errors import InvalidRequest, ReplicaUnavailable, SessionNotFound
from mneme.replicas.engine.engine import Engine
from mneme.replicas.queries import DeleteSession, DeleteTenantPages, ForkSession, GetSession, LeaveSession
from mneme.replicas.request import SamplingParams
from mneme.replicas.sessions import durable as durable_sessions
from mneme.replicas.sessions.durable import DurableSessions
from mneme.replicas.truncation import Truncation
from tests.replicas.asked import answer
from tests.replicas.fake_runner import continuation
from tests.replicas.schedule.test_engine_policy import make_engine, make_request, run, tokens_of
from tests.replicas.sessions.test_session_machine import LETTERS, LetterTokenizer

KEY = ("salt", "public:s")
MODEL = b"letters"


class Wall:
    """Never the same time twice; starts at that of the files, whose ages count at a restart."""

    def __init__(self) -> None:
        self.now_s = time.time()

    def __call__(self) -> float:
        self.now_s += 1e-4
        return self.now_s


class Cluster:
    """Engines of one node, which share its logs; a restart closes the logs and opens them again."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.wall = folder, Wall()
        self.logs = self.open_logs()
        self._durables: list[DurableSessions] = []

    def engine(self, vocab_size: int = 5, **options: Any) -> Engine:
        durable = DurableSessions(self.logs, MODEL, vocab_size, read_s=10, wall_clock=self.wall)
        self._durables.append(durable)
        return make_engine(tokenizer=LetterTokenizer(), durable=durable, **{"max_batch_tokens": 64, **options})

    def restart(self, **options: Any) -> Engine:
        self.close()
        self.logs = self.open_logs()
        return self.engine(**options)

    def close(self) -> None:
        for durable in self._durables:
            assert durable.writer.flush(10)
            durable.close()
        self._durables = []
        self.logs.close()

    def open_logs(self) -> SessionLogs:
        return SessionLogs(str(self.folder), wall_clock=self.wall)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    yield cluster
    cluster.close()


def text_of(ids: list[int]) -> str:
    return "".join(LETTERS[i] for i in ids)


def say(engine: Engine, name: str, ids: list[int], *, max_tokens: int = 4, **more: Any) -> list[int]:
    """What the engine answers, as a replica does it: the log is read first, and written before the client hears."""
    options = {"salt": KEY[0], "session_id": KEY[1], "prompt_text": text_of(ids), **more}
    request = make_request(f"{name}.0", ids, SamplingParams(temperature=0, max_tokens=max_tokens), **options)
    recall(engine, request.session_id)
    engine.submit(request)
    events = run(engine)
    flush(engine)
    return tokens_of(events, f"{name}.0")


def recall(engine: Engine, *sessions: str | None) -> None:
    keys = [None if session is None else (KEY[0], session) for session in sessions]
    engine.sessions.restore_all(engine.durable.recall(keys, engine.sessions.version_of))


def flush(engine: Engine) -> None:
    assert engine.durable.writer.flush(10)


def state_of(engine: Engine, session: str = KEY[1]) -> SessionState:
    """But for the version, which counts how often a session was taken over."""
    log = engine.sessions.get((KEY[0], session))
    return log.state()._replace(version=0)


def delete(engine: Engine, session: str = KEY[1]) -> bool:
    found: bool = answer(engine, DeleteSession((KEY[0], session)))
    return found


def test_a_restart_knows_ids_and_marks(cluster: Cluster) -> None:
    first = cluster.engine()
    history = [1, 2, 3]
    for number in range(6):  # all of it as text, each time
        history += [*say(first, f"t{number}", history), number % 5]
    before = state_of(first)
    assert (before.num_turns, len(before.marks)) == (6, 16 * 7)
    second = cluster.restart()
    recall(second, KEY[1])
    assert state_of(second) == before
    assert say(second, "t6", history) == continuation(history, 4, 5)
    log = second.sessions.get(KEY)
    marks = [mark.num_ids for mark in log.matching_marks(text_of(log.ids.tolist()))]
    assert marks[-2:] == [len(log.ids) - 4, len(log.ids)]


def state_of_stored(cluster: Cluster) -> list[int]:
    engine = cluster.engine()
    recall(engine, KEY[1])
    return state_of(engine).ids.tolist()


def test_a_turn_that_was_running_begins_where_it_began(cluster: Cluster) -> None:
    """Its replica dies while it answers; it is sent again with what the client has of it, and then once more: the
    turn ended, only the word of it was lost."""
    engine = cluster.engine()
    said = [1, 2, 3, *say(engine, "a", [1, 2, 3])]
    expected = continuation([*said, 4, 4], 9, 5)
    more = {"salt": KEY[0], "session_id": KEY[1], "append": True}
    for attempt, num_emitted in enumerate((0, 4, 8)):
        recall(engine, KEY[1])
        assert state_of(engine).ids.tolist() == [*said, *([4, 4, *expected] if attempt == 2 else [])]  # whole turns
        sampling = SamplingParams(temperature=0, max_tokens=9 - num_emitted)
        sent = [4, 4, *expected[:num_emitted]]
        engine.submit(make_request(f"b~{attempt}.0", sent, sampling, output_offset=num_emitted, **more))
        events = [event for _ in range(4) for event in engine.step()] if attempt == 0 else run(engine)
        emitted = tokens_of(events, f"b~{attempt}.0")
        assert emitted == expected[num_emitted : num_emitted + len(emitted)]
        flush(engine)
        if attempt:
            assert state_of(engine).ids.tolist() == [*said, 4, 4, *expected]
        engine = cluster.restart()


def test_a_session_that_moves_is_taken_over_in_its_newest_state(cluster: Cluster) -> None:
    one, two = cluster.engine(), cluster.engine()
    said = [1, 2, 3, *say(one, "a", [1, 2, 3])]
    for number, engine in enumerate((two, one, one, two, two, one)):
        said = [*said, 4, *say(engine, f"m{number}", [4], append=True)]
        assert state_of(engine).ids.tolist() == said
    assert answer(two, LeaveSession(KEY))  # the ingress tells who was left
    flush(two)
    three = cluster.restart()
    recall(three, KEY[1])
    assert state_of(three).ids.tolist() == said


def test_who_was_left_while_it_answered_does_not_write_over_who_goes_on(cluster: Cluster) -> None:
    """A replica that hangs, is taken for dead, and ends its turn long after the session went on elsewhere."""
    one, two = cluster.engine(), cluster.engine()
    say(one, "a", [1, 2, 3])
    one.submit(make_request("b.0", [4, 4], salt=KEY[0], session_id=KEY[1], append=True))
    one.step()
    flush(one)
    say(two, "b~1", [4, 4], append=True)
    said = state_of(two).ids.tolist()
    one.abort("b.0")
    run(one)
    flush(one)
    assert state_of_stored(cluster) == said
    assert say(one, "c", [2], append=True) == continuation([*said, 2], 4, 5)


def test_a_session_that_only_its_log_has_can_be_deleted(cluster: Cluster) -> None:
    say(cluster.engine(), "a", [1, 2, 3])
    second = cluster.restart()
    assert delete(second)
    assert not delete(second)
    assert answer(cluster.restart(), GetSession(KEY)) is None


def test_what_is_noted_with_a_session_outlives_a_restart_and_stays_with_it_alone(cluster: Cluster) -> None:
    engine = cluster.engine()
    assert not engine.sessions.set_note(KEY, b"of nobody")
    num_tokens = len(say(engine, "t0", [1, 2, 3])) + 3
    for note in (b"first" * 1000, b"second" * 100):
        assert engine.sessions.set_note(KEY, note)
        assert engine.sessions.num_tokens == num_tokens + len(note) // 4
    engine = cluster.restart()
    recall(engine, KEY[1])
    assert state_of(engine).note == b"second" * 100
    assert engine.sessions.num_tokens == num_tokens + 150
    answer(engine, ForkSession(KEY, "public:f"))
    assert state_of(engine, "public:f").note == b""
    say(engine, "t1", [4], append=True)
    assert state_of(engine).note == b"second" * 100
    delete(engine)
    assert engine.sessions.num_tokens == num_tokens
    assert not engine.sessions.set_note(KEY, b"of nobody")


def test_a_stale_copy_of_a_deleted_session_goes_too(cluster: Cluster) -> None:
    one, two = cluster.engine(), cluster.engine()
    say(one, "a", [1, 2, 3])
    say(two, "b", [1], append=True)
    assert delete(two)
    with pytest.raises(SessionNotFound):
        say(one, "c", [1], append=True)


def test_a_truncated_session_sees_what_it_saw(cluster: Cluster) -> None:
    truncation = Truncation(strategy="reuse_kv")
    options = {"num_pages": 8, "page_size": 4, "max_batch_tokens": 64}
    first = cluster.engine(**options)
    say(first, "0", [1, 2, 3], truncation=truncation)
    for number in range(8):
        say(first, f"a{number}", [number % 5, 2], append=True, truncation=truncation)
    before = state_of(first)
    assert before.seen_ids is not None
    assert len(before.seen_ids) < len(before.ids)
    second = cluster.restart(**options)
    recall(second, KEY[1])
    assert state_of(second) == before
    more = {"salt": KEY[0], "session_id": KEY[1], "append": True, "truncation": truncation}
    request = make_request("b.0", [3], SamplingParams(temperature=0, max_tokens=2), **more)
    second.submit(request)
    events = run(second)
    usage = next(event.usage for event in events if event.usage)
    assert usage.kv_details()["recomputed"] == usage.prompt_tokens  # the visible text, exactly
    assert state_of(second).ids.tolist()[:-2] == [*before.ids.tolist(), 3]


def test_a_session_s_own_time_to_live_goes_along(cluster: Cluster) -> None:
    say(cluster.engine(), "a", [1, 2, 3], session_ttl_s=77.0)
    second = cluster.restart()
    recall(second, KEY[1])
    log = second.sessions.get(KEY)
    assert log.ttl_s == 77.0
    assert second.sessions.expires_in_s(log) <= 77.0
    cluster.close()
    cluster.wall.now_s += 100
    cluster.logs = cluster.open_logs()
    assert answer_restored(cluster.engine()) is None


def answer_restored(engine: Engine) -> Any:
    recall(engine, KEY[1])
    return answer(engine, GetSession(KEY))


@pytest.mark.parametrize("vocab_size", [3, 5])
def test_ids_that_are_no_tokens_here_are_no_session(cluster: Cluster, vocab_size: int) -> None:
    said = [1, 4, 3, *say(cluster.engine(), "a", [1, 4, 3])]
    second = cluster.restart(vocab_size=vocab_size)
    recall(second, KEY[1])
    assert (second.sessions.get(KEY) is None) == (vocab_size == 3)
    if vocab_size == 3:
        say(second, "b", [1, 1])
        assert state_of_stored(cluster) == state_of(second).ids.tolist() != said


def test_a_tenant_s_sessions_go_with_its_kv_on_all_engines_and_from_the_disk(cluster: Cluster) -> None:
    say(cluster.engine(), "0", [1, 2], session_id="public:known to no engine")
    one, two = cluster.restart(), cluster.engine()
    say(one, "a", [1, 2, 3])
    say(one, "b", [1, 2], salt="salt:chosen", session_id="public:other")
    say(two, "c", [2, 1], session_id="public:here")
    say(two, "d", [3, 3], salt="neighbour")
    for engine in (one, two):
        answer(engine, DeleteTenantPages(KEY[0]))
        flush(engine)
    assert (len(one.sessions), len(two.sessions)) == (0, 1)
    assert two.durable.delete_tenant(tenant_id("nobody")) == 0
    assert two.durable.delete_tenant(tenant_id(KEY[0])) == 1  # the engines' own deletions are written
    third = cluster.restart()
    names = (KEY[1], "public:here", "public:known to no engine")
    recall(third, *names)
    assert [third.sessions.get((KEY[0], name)) for name in names] == [None] * 3
    with pytest.raises(SessionNotFound):
        say(third, "e", [1], append=True)
    third.sessions.restore_all(third.durable.recall([("neighbour", KEY[1])], third.sessions.version_of))
    assert third.sessions.get(("neighbour", KEY[1])) is not None


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


@pytest.mark.parametrize("retry_s", [0.01, 1000.0])
def test_what_could_not_be_written_is_written_later(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, retry_s: float
) -> None:
    """Also if no turn follows, and the last one began and ended while the node's logs were away; at the latest when the
    engine ends."""
    monkeypatch.setattr(durable_sessions, "RETRY_S", retry_s)
    one = cluster.engine()
    said = turns(one, "a", said=[1, 2])
    with monkeypatch.context() as patched:
        patched.setattr(cluster.logs, "append", lambda _key, _rows: Appended.FAILED)
        said = turns(one, "b", "c", said=said)
        say(one, "d", [3], session_id="public:other")
    if retry_s < 1:
        until(lambda: one.durable.writer.stats()["later"] == 0)
    else:
        cluster.restart()
    assert state_of_stored(cluster) == said


def test_what_was_deleted_is_not_written_later(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the engine still knows the session or not, and also if it could not be deleted at first."""
    monkeypatch.setattr(durable_sessions, "RETRY_S", 0.2)
    one = cluster.engine()
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


def test_of_sessions_that_could_not_be_written_so_many_are_kept(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable_sessions, "MAX_UNWRITTEN", 2)
    one = cluster.engine()
    monkeypatch.setattr(cluster.logs, "append", lambda _key, _rows: Appended.FAILED)
    for number in range(5):
        say(one, f"{number}", [3], session_id=f"public:{number}")
    stats = one.durable.writer.stats()
    assert (stats["later"], stats["lost"]) == (2, 3)
