"""Any order of turns, aborts, forks and deletions, as in `test_session_machine.py`, with restarts in between."""

from __future__ import annotations

import tempfile

import pytest
from hypothesis import settings
from hypothesis.stateful import precondition, rule, run_state_machine_as_test

from mneme.cachetier.session_log.log import SessionLogs
from mneme.replicas.engine.engine import Engine
from mneme.replicas.queries import GetSession
from mneme.replicas.sessions.durable import DurableSessions
from tests.budget import examples
from tests.replicas.asked import answer
from tests.replicas.schedule.test_engine_policy import make_engine
from tests.replicas.sessions.test_session_machine import SETTINGS, LetterTokenizer, SessionMachine


class DurableMachine(SessionMachine):
    """Sessions are looked up in their logs once, right after a restart; the rest is the engine's."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.engine = self.open()

    def open(self) -> Engine:
        logs = SessionLogs(self.folder.name)
        options = {"tokenizer": LetterTokenizer(), "max_batch_tokens": 16, "max_running": 4, "max_sessions": 100}
        return make_engine(num_pages=24, page_size=4, durable=DurableSessions(logs, b"m", 5, read_s=10), **options)

    @precondition(lambda self: not any(self.turns.values()))
    @rule()
    def restart(self) -> None:
        self.engine.close()
        self.engine = self.open()
        self.look_up()

    @rule()
    def restart_while_some_turns_run(self) -> None:
        """They are lost, and what was said in whole turns is there."""
        self.restart_lost()

    def restart_lost(self) -> None:
        self.engine.close()
        for turns in self.turns.values():
            turns.clear()
        self.engine = self.open()
        self.look_up()

    def look_up(self) -> None:
        for name in "stu":
            found = answer(self.engine, GetSession(("", f"public:{name}"), restores=True))
            assert (found is not None) == bool(self.said.get(name))

    def teardown(self) -> None:
        while self.engine.has_work:
            self.step()
        self.sessions_are_what_was_said()
        assert self.engine.forest.device.num_in_use == 0
        self.engine.close()
        self.folder.cleanup()


DURABLE = settings(SETTINGS, max_examples=examples(20, at_length=60))


@pytest.mark.hypothesis
@pytest.mark.at_length
def test_sessions_over_restarts_against_a_dictionary() -> None:
    run_state_machine_as_test(DurableMachine, settings=DURABLE)
