"""The scheduler and the sessions of an engine, as its configuration says."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from mneme.replicas.config import EngineConfig
from mneme.replicas.engine.decoding import Decoding
from mneme.replicas.forest.forest import PrefixForest
from mneme.replicas.schedule.scheduler import Scheduler
from mneme.replicas.sessions.session_pages import delete_pages, let_go
from mneme.replicas.sessions.sessions import Sessions

if TYPE_CHECKING:
    from mneme.replicas.model.runner import Runner
    from mneme.replicas.sessions.journal import DurableSessions


def make_scheduler(runner: Runner, config: EngineConfig, forest: PrefixForest) -> Scheduler:
    return Scheduler(
        forest,
        max_batch_tokens=config.max_batch_tokens,
        max_running=config.max_running,
        attention_mass=getattr(runner, "attention_mass", None),
    )


def make_sessions(
    config: EngineConfig,
    decoding: Decoding,
    forest: PrefixForest,
    clock: Callable[[], float],
    durable: DurableSessions | None,
) -> Sessions:
    """What they drop, the forest drops too."""
    return Sessions(
        decoding.encode,
        clock,
        ttl_s=config.session_ttl_s,
        max_sessions=config.max_sessions,
        max_tokens=config.max_session_tokens,
        end_token_ids=decoding.eos_token_ids,
        decode=decoding.decode if decoding.has_tokenizer else None,
        on_drop=partial(let_go, forest),
        on_delete=partial(delete_pages, forest),
        journal=None if durable is None else durable.writer,
    )
