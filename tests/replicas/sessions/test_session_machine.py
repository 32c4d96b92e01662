"""Turns, appended turns, aborts, deletions and forks in any order, against a dictionary of what was said."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from mneme.errors import ContextLengthExceeded, InvalidRequest, SessionNotFound
from mneme.replicas.queries import DeleteSession, ForkSession, GetSession
from mneme.replicas.request import SamplingParams, TokenEvent
from tests.budget import examples
from tests.replicas.asked import answer
from tests.replicas.fake_runner import continuation
from tests.replicas.schedule.test_engine_policy import make_engine, make_request

NAMES = st.sampled_from("stu")
LETTERS = "abcde"


class LetterTokenizer:
    """A letter is a token."""

    special_token_ids: frozenset[int] = frozenset()

    def encode_continuation(self, text: str) -> list[int]:
        return [LETTERS.index(letter) for letter in text]

    def decode(self, ids: list[int], *, skip_special_tokens: bool = False) -> str:
        return "".join(LETTERS[i] for i in ids)


@dataclass(eq=False)
class Turn:
    name: str
    appends: bool
    ids: list[int]
    max_tokens: int
    prompt: list[int] | None = None  # None: it has not begun, or cannot
    output: list[int] = field(default_factory=list)
    is_deleted: bool = False


class SessionMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.engine = make_engine(
            num_pages=24, page_size=4, tokenizer=LetterTokenizer(), max_batch_tokens=16, max_running=4, max_sessions=100
        )
        self.said: dict[str, list[int]] = {}
        self.turns: dict[str, deque[Turn]] = {name: deque() for name in "stu"}  # the first one is answering
        self.num_turns = 0

    @rule(
        name=NAMES,
        appends=st.booleans(),
        ids=st.lists(st.integers(0, 4), min_size=1, max_size=9),
        goes_on=st.booleans(),
        max_tokens=st.integers(1, 6),
    )
    def submit(self, name: str, appends: bool, ids: list[int], goes_on: bool, max_tokens: int) -> None:
        if goes_on and not appends:  # a client that has the history, maybe an older one
            ids = self.said.get(name, [])[: 3 * len(ids)] + ids
        turn = Turn(f"{self.num_turns}x", appends, ids, max_tokens)
        self.num_turns += 1
        request = make_request(
            f"{turn.name}.0",
            ids,
            SamplingParams(temperature=0, max_tokens=max_tokens),
            session_id=f"public:{name}",
            append=appends,
            prompt_text="".join(LETTERS[i] for i in ids),
        )
        refusal = None if self.turns[name] else self.begin(name, turn)
        if refusal is not None:
            with pytest.raises(refusal):
                self.engine.submit(request)
            return
        self.engine.submit(request)
        self.turns[name].append(turn)
        self.drain([])

    @rule()
    def step(self) -> None:
        self.drain(self.engine.step() if self.engine.has_work else [])

    @rule(name=NAMES, index=st.integers(0, 2))
    def abort(self, name: str, index: int) -> None:
        if index < len(self.turns[name]):
            self.engine.abort(f"{self.turns[name][index].name}.0")
            self.drain([])

    @rule(name=NAMES)
    def delete(self, name: str) -> None:
        assert answer(self.engine, DeleteSession(("", f"public:{name}"))) is self.is_known(name)
        self.said.pop(name, None)
        if self.turns[name]:
            self.turns[name][0].is_deleted = True

    @rule(name=NAMES, new=NAMES)
    def fork(self, name: str, new: str) -> None:
        query = ForkSession(("", f"public:{name}"), f"public:{new}")
        if not self.is_known(name) or self.turns[new] or new in self.said:
            with pytest.raises(InvalidRequest):
                answer(self.engine, query)
            return
        self.said[new] = list(self.so_far(name))
        assert answer(self.engine, query)["tokens"] == len(self.said[new])

    @invariant()
    def sessions_are_what_was_said(self) -> None:
        self.engine.forest.check()
        for name in "stu":
            found: dict[str, Any] | None = answer(self.engine, GetSession(("", f"public:{name}")))
            assert (found is not None) == self.is_known(name)
            if found is not None:
                assert found["tokens"] == len(self.so_far(name)) == sum(found["kv"].values())
        assert self.engine.sessions.num_tokens == sum(map(len, self.said.values()))
        assert len(self.engine.sessions.queued) == sum(max(len(turns) - 1, 0) for turns in self.turns.values())

    def teardown(self) -> None:
        while self.engine.has_work:
            self.step()
        self.sessions_are_what_was_said()
        assert not any(self.turns.values())
        assert self.engine.forest.device.num_in_use == 0
        for name in list(self.said):
            self.delete(name)
        assert len(self.engine.sessions) == 0
        assert len(self.engine.forest.owners) == 0

    def is_known(self, name: str) -> bool:
        turns = self.turns[name]
        return bool(self.said.get(name)) or bool(turns and not turns[0].is_deleted)

    def so_far(self, name: str) -> list[int]:
        turns = self.turns[name]
        if turns and not turns[0].is_deleted and turns[0].prompt is not None:
            return turns[0].prompt + turns[0].output
        return self.said[name]

    def begin(self, name: str, turn: Turn) -> type[InvalidRequest] | None:
        """Set the turn's prompt; what it is refused with, if it is."""
        said = self.said.get(name, [])
        if turn.appends and not said:
            return SessionNotFound
        prompt = [*said, *turn.ids] if turn.appends else turn.ids
        if len(prompt) + turn.max_tokens > self.engine.capacity:
            return ContextLengthExceeded
        turn.prompt = prompt
        return None

    def drain(self, events: list[TokenEvent]) -> None:
        for event in [*events, *self.engine.pop_events()]:
            name, turn = next(
                (name, turn)
                for name, turns in self.turns.items()
                for turn in turns
                if event.request_id == f"{turn.name}.0"
            )
            turn.output.extend(event.token_ids)
            if event.finish_reason is not None:
                self.finish(name, turn, event.finish_reason)

    def finish(self, name: str, turn: Turn, reason: str) -> None:
        turns = self.turns[name]
        was_first = turn is turns[0]
        turns.remove(turn)
        assert (reason == "error") == (was_first and turn.prompt is None)
        if not was_first:
            assert (reason, turn.output) == ("abort", [])
            return
        if turn.prompt is not None:
            assert turn.output == continuation(turn.prompt, len(turn.output), 5)
            assert reason == "abort" or len(turn.output) == turn.max_tokens
            if not turn.is_deleted:
                self.said[name] = turn.prompt + turn.output
        if turns:
            self.begin(name, turns[0])


SETTINGS = settings(max_examples=examples(60, at_length=200), stateful_step_count=40)


@pytest.mark.hypothesis
@pytest.mark.at_length
def test_sessions_against_a_dictionary() -> None:
    run_state_machine_as_test(SessionMachine, settings=SETTINGS)
