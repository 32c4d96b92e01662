"""A second engine on the same logs goes on where the first one was: same ids, same marks, same turns."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mneme.cachetier.names import tenant_id
from mneme.cachetier.session_log.log import SessionLogs
from mneme.cachetier.session_log.rows import SessionState
from mneme.errors import InvalidRequest, SessionNotFound
from mneme.replicas.engine.engine import Engine
from mneme.replicas.queries import DeleteSession, DeleteTenantPages, ForkSession, GetSession, LeaveSession
from mneme.replicas.request import SamplingParams, TokenEvent
from mneme.replicas.sessions.durable import DurableSessions
from mneme.replicas.sessions.token_log import TokenLog
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
        self.logs = self._open()
        self._durables: list[DurableSessions] = []

    def engine(self, vocab_size: int = 5, **options: Any) -> Engine:
        durable = DurableSessions(self.logs, MODEL, vocab_size, read_s=10, wall_clock=self.wall)
        self._durables.append(durable)
        return make_engine(tokenizer=LetterTokenizer(), durable=durable, **{"max_batch_tokens": 64, **options})

    def restart(self, **options: Any) -> Engine:
        self.close()
        self.logs = self._open()
        return self.engine(**options)

    def close(self) -> None:
        for durable in self._durables:
            assert durable.writer.flush(10)
            durable.close()
        self._durables = []
        self.logs.close()

    def _open(self) -> SessionLogs:
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
    assert engine.durable is not None
    keys = [None if session is None else (KEY[0], session) for session in sessions]
    engine.sessions.restore_all(engine.durable.recall(keys, engine.sessions.version_of))


def flush(engine: Engine) -> None:
    assert engine.durable is not None
    assert engine.durable.writer.flush(10)


def state_of(engine: Engine, session: str = KEY[1]) -> SessionState:
    """But for the version, which counts how often a session was taken over."""
    log = engine.sessions.get((KEY[0], session))
    assert log is not None
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
    second = cluster.restart()
    recall(second, KEY[1])
    assert state_of(second) == before
    assert (before.num_turns, len(before.marks)) == (6, 16 * 7)
    answered = say(second, "t6", history)
    assert answered == continuation(history, 4, 5)
    log = second.sessions.get(KEY)
    assert log is not None
    assert [mark.num_ids for mark in log.matching_marks(text_of(log.ids.tolist()))][-2:] == [
        len(log.ids) - 4,
        len(log.ids),
    ]


def test_appended_turns_go_on(cluster: Cluster) -> None:
    said = [1, 2, 3]
    engine = cluster.engine()
    for number in range(8):
        added = said if number == 0 else [number % 5, 4]
        answered = say(engine, f"t{number}", added, append=number > 0)
        said = [*(said if number == 0 else said + added), *answered]
        assert state_of(engine).ids.tolist() == said
        assert answered == said[-4:]
        if number % 2:
            engine = cluster.restart()
    assert state_of_stored(cluster) == said


def state_of_stored(cluster: Cluster) -> list[int]:
    engine = cluster.engine()
    recall(engine, KEY[1])
    return state_of(engine).ids.tolist()


def test_nothing_is_appended_to_what_no_log_has(cluster: Cluster) -> None:
    engine = cluster.engine()
    with pytest.raises(SessionNotFound):
        say(engine, "1", [1], append=True)


def test_a_turn_that_was_running_begins_where_it_began(cluster: Cluster) -> None:
    """Its replica dies while it answers; it is sent again with what the client has of it."""
    first = cluster.engine()
    said = [1, 2, 3, *say(first, "a", [1, 2, 3])]
    request = make_request(
        "b.0", [4, 4], SamplingParams(temperature=0, max_tokens=9), salt=KEY[0], session_id=KEY[1], append=True
    )
    first.submit(request)
    emitted = [token for _ in range(4) for event in first.step() for token in event.token_ids]
    flush(first)
    second = cluster.restart()  # the first one never ended it
    resumed = dataclasses.replace(
        request,
        request_id="b~1.0",
        prompt_token_ids=(4, 4, *emitted),
        output_offset=len(emitted),
        sampling=SamplingParams(temperature=0, max_tokens=9 - len(emitted)),
    )
    recall(second, KEY[1])
    assert state_of(second).ids.tolist() == said  # whole turns
    second.submit(resumed)
    answered = emitted + tokens_of(run(second), "b~1.0")
    assert answered == continuation([*said, 4, 4], 9, 5)
    flush(second)
    assert state_of(second).ids.tolist() == [*said, 4, 4, *answered]
    # And once more, on a third: the turn ended, only the word of it was lost.
    third = cluster.restart()
    again = dataclasses.replace(resumed, request_id="b~2.0", prompt_token_ids=(4, 4, *answered[:8]), output_offset=8)
    recall(third, KEY[1])
    third.submit(dataclasses.replace(again, sampling=SamplingParams(temperature=0, max_tokens=1)))
    assert tokens_of(run(third), "b~2.0") == answered[8:]
    assert state_of(third).ids.tolist() == [*said, 4, 4, *answered]


def test_another_turn_after_one_that_was_lost_goes_on_behind_the_last_whole_one(cluster: Cluster) -> None:
    first = cluster.engine()
    said = [1, 2, 3, *say(first, "a", [1, 2, 3])]
    first.submit(make_request("b.0", [4, 4], salt=KEY[0], session_id=KEY[1], append=True))
    first.step()
    flush(first)
    second = cluster.restart()
    assert say(second, "c", [2], append=True) == continuation([*said, 2], 4, 5)


def test_edited_histories_and_forks(cluster: Cluster) -> None:
    first = cluster.engine()
    answered = say(first, "a", [1, 2, 3])
    whole = [1, 2, 3, *answered, 2, 2]
    whole += say(first, "b", whole)
    recall(first, "public:f")
    answer(first, ForkSession(KEY, "public:f"))
    edited = [1, 2, 3, *answered, 4]
    edited += say(first, "c", edited)
    second = cluster.restart()
    recall(second, KEY[1], "public:f")
    assert state_of(second).ids.tolist() == edited
    assert state_of(second, "public:f").ids.tolist() == whole
    assert state_of(second, "public:f").marks == state_of(first, "public:f").marks
    say(second, "d", [1], append=True, session_id="public:f")
    third = cluster.restart()
    recall(third, KEY[1], "public:f")
    assert state_of(third).ids.tolist() == edited
    assert state_of(third, "public:f").ids.tolist()[: len(whole) + 1] == [*whole, 1]
    with pytest.raises(InvalidRequest):
        answer(third, ForkSession(KEY, "public:f"))


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


def test_what_was_deleted_stays_so(cluster: Cluster) -> None:
    first = cluster.engine()
    said = [1, 2, 3, *say(first, "a", [1, 2, 3])]
    assert delete(first)
    assert not delete(first)
    second = cluster.restart()
    with pytest.raises(SessionNotFound):
        say(second, "b", [1], append=True)
    assert not delete(second)
    say(second, "c", said)  # a new one of its name
    assert state_of(second).num_turns == 1
    third = cluster.restart()
    recall(third, KEY[1])
    assert state_of(third) == state_of(second)
    assert delete(third)


def test_a_session_that_only_its_log_has_can_be_deleted(cluster: Cluster) -> None:
    say(cluster.engine(), "a", [1, 2, 3])
    second = cluster.restart()
    assert delete(second)
    assert not delete(second)
    assert answer(cluster.restart(), GetSession(KEY)) is None


def test_a_turn_that_answers_while_its_session_is_deleted_is_not_written(cluster: Cluster) -> None:
    engine = cluster.engine()
    say(engine, "a", [1, 2, 3])
    engine.submit(make_request("b.0", [1, 1], salt=KEY[0], session_id=KEY[1], append=True))
    engine.submit(make_request("c.0", [3, 3], salt=KEY[0], session_id=KEY[1]))  # waits, and finds no history
    engine.step()
    assert delete(engine)
    events = run(engine)
    flush(engine)
    assert state_of_stored(cluster) == [3, 3, *tokens_of(events, "c.0")]
    assert state_of(engine).num_turns == 1


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
    assert usage is not None
    assert usage.kv_details()["recomputed"] == usage.prompt_tokens  # the visible text, exactly
    assert state_of(second).ids.tolist()[:-2] == [*before.ids.tolist(), 3]


def test_a_session_s_own_time_to_live_goes_along(cluster: Cluster) -> None:
    say(cluster.engine(), "a", [1, 2, 3], session_ttl_s=77.0)
    second = cluster.restart()
    recall(second, KEY[1])
    log = second.sessions.get(KEY)
    assert log is not None
    assert log.ttl_s == 77.0
    assert second.sessions.expires_in_s(log) <= 77.0
    cluster.close()
    cluster.wall.now_s += 100
    cluster.logs = cluster._open()
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


def test_several_choices_keep_the_first(cluster: Cluster) -> None:
    engine = cluster.engine()
    for index in range(3):
        params = SamplingParams(temperature=0, max_tokens=4 - index)
        choice = {"choice_index": index, "salt": KEY[0], "session_id": KEY[1]}
        engine.submit(make_request(f"a.{index}", [1, 2], params, **choice))
    events: list[TokenEvent] = run(engine)
    flush(engine)
    assert state_of_stored(cluster) == [1, 2, *tokens_of(events, "a.0")]


def test_a_refused_turn_leaves_the_session_as_it_was(cluster: Cluster) -> None:
    engine = cluster.engine(num_pages=8)
    said = [1, 2, 3, *say(engine, "a", [1, 2, 3])]
    with pytest.raises(InvalidRequest):
        say(engine, "b", [1] * 500, append=True)
    flush(engine)
    assert state_of_stored(cluster) == said
    assert say(engine, "c", [2], append=True) == continuation([*said, 2], 4, 5)


def test_marks_know_their_text_in_another_process_only_with_their_key() -> None:
    log = TokenLog()
    assert log.matching_marks("anything") == []
    assert TokenLog.restored(log.state()).mark_key == b""


def test_a_tenant_s_sessions_go_with_its_kv_on_all_engines_and_from_the_disk(cluster: Cluster) -> None:
    one, two = cluster.engine(), cluster.engine()
    say(one, "a", [1, 2, 3])
    say(one, "b", [1, 2], salt="salt:chosen", session_id="public:other")
    say(two, "c", [2, 1], session_id="public:here")
    say(two, "d", [3, 3], salt="neighbour")
    for engine in (one, two):
        answer(engine, DeleteTenantPages(KEY[0]))
        flush(engine)
    assert (len(one.sessions), len(two.sessions)) == (0, 1)
    assert two.durable is not None
    assert two.durable.delete_tenant(tenant_id(KEY[0])) == 0  # the engines' own deletions are written
    third = cluster.restart()
    recall(third, KEY[1], "public:here")
    assert third.sessions.get(KEY) is None
    with pytest.raises(SessionNotFound):
        say(third, "e", [1], append=True)
    assert third.durable is not None
    third.sessions.restore_all(third.durable.recall([("neighbour", KEY[1])], third.sessions.version_of))
    assert third.sessions.get(("neighbour", KEY[1])) is not None


def test_a_tenant_s_sessions_that_no_engine_knows_go_from_the_disk(cluster: Cluster) -> None:
    say(cluster.engine(), "a", [1, 2, 3])
    second = cluster.restart()
    assert second.durable is not None
    assert second.durable.delete_tenant(tenant_id("neighbour")) == 0
    assert second.durable.delete_tenant(tenant_id(KEY[0])) == 1
    with pytest.raises(SessionNotFound):
        say(second, "b", [1], append=True)
