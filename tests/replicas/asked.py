"""An engine that is asked on its own thread: commands without an `EngineLoop`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from mneme.replicas.engine import commands
from mneme.replicas.engine.commands import ManagedChunks
from mneme.replicas.queries import Query
from mneme.replicas.request import SessionKey

if TYPE_CHECKING:
    from mneme.replicas.engine.engine import Engine

T = TypeVar("T")


class Asked:
    def __init__(self, engine: Engine, chunk_tier: ManagedChunks | None = None) -> None:
        self.engine, self.chunk_tier = engine, chunk_tier
        self.durable = getattr(engine, "durable", None)

    def between_steps(self, question: Callable[[Engine], T], recalled: Iterable[SessionKey] = ()) -> T:
        if self.durable is not None:
            sessions = self.engine.sessions
            sessions.restore_all(self.durable.recall(recalled, sessions.version_of))
        return question(self.engine)


def answer(engine: Engine, query: Query[Any], chunk_tier: ManagedChunks | None = None) -> Any:
    """What a command answers, or raises."""
    return commands.answer(Asked(engine, chunk_tier), query)
