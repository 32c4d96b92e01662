"""Plays sessions: each turn is sent when it is due, whatever the others do. Time is the running event loop's."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from mneme.lab.bench.measure import Answer
from mneme.lab.bench.workloads import Session, Turn, content

Ask = Callable[[list[dict[str, Any]], int, str], Awaitable[Answer]]  # messages, max_tokens, session


class SessionPlayer:
    """Asks what sessions ask, and keeps the answers: `answers` grows in the order in which they end.

    say  a turn as the content of a message
    """

    def __init__(self, ask: Ask, say: Callable[[Turn], Any] = content) -> None:
        self._ask, self._say = ask, say
        self._began_s = 0.0
        self._ended: dict[str, asyncio.Event] = {}
        self.answers: list[Answer] = []
        self.num_running = self.num_failed = 0
        self.num_unsent = 0  # turns behind one that failed: their history is not known

    async def play(self, sessions: Sequence[Session], num_users: int | None = None) -> None:
        """Ask all: each session when its turns are due, or one after the other by `num_users` at once."""
        self._began_s = asyncio.get_running_loop().time()
        self._ended = {turn.name: asyncio.Event() for each in sessions for turn in each.turns if turn.name is not None}
        waiting = iter(sessions)

        async def user() -> None:
            for session in waiting:
                await self._play(session)

        async with asyncio.TaskGroup() as tasks:
            if num_users is None:
                for session in sessions:
                    tasks.create_task(self._play(session))
            else:
                for _ in range(num_users):
                    tasks.create_task(user())

    async def _play(self, session: Session) -> None:
        loop = asyncio.get_running_loop()
        history: list[dict[str, Any]] = []
        if session.system is not None:
            history.append({"role": "system", "content": session.system.text()})
        has_failed = False
        for turn in session.turns:
            if has_failed:
                self.num_unsent += 1
            else:
                for name in turn.wait_for:
                    await self._ended[name].wait()
                due_s = max(self._began_s + turn.at_s, loop.time() + turn.delay_s)
                await asyncio.sleep(due_s - loop.time())
                said = {"role": "user", "content": self._say(turn)}
                asked = [said] if turn.is_whole else [*history, said]
                self.num_running += 1
                try:
                    answer = await self._ask(asked, turn.max_tokens, session.name)
                finally:
                    self.num_running -= 1
                answer.due_s = due_s
                self.answers.append(answer)
                history = [*asked, {"role": "assistant", "content": answer.text}]
                has_failed = answer.error is not None
                self.num_failed += has_failed
            if turn.name is not None:  # one that failed has ended too
                self._ended[turn.name].set()
