"""Prefixes that stay resident until they are let go."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mneme.replicas.forest_nodes import Pin
from mneme.replicas.page_needs import num_queued_tokens

if TYPE_CHECKING:
    from mneme.replicas.engine import Engine


def pin_prefix(engine: Engine, salt: str, ids: list[int]) -> Pin:
    """Keep what is resident of a prefix; raises `PinRefused` if a request that was taken might then never fit."""
    scheduler = engine.scheduler
    started = [*scheduler.waiting, *scheduler.running]
    return scheduler.pin(salt, ids, num_queued=num_queued_tokens(engine.sessions, started, engine.capacity))
