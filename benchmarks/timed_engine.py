"""The real engine, with a note of the time at which each step's message leaves it; for bench_serving.py."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from mneme.replicas.engine.load import load_engine_loop
from mneme.replicas.request import StepMessage

TIMES_DIR_VARIABLE = "MNEME_BENCH_TIMES_DIR"


def load_timed_engine(model: str, config: Any, **options: Any) -> Any:
    """In the place of `load_engine_loop`; the times go to a file per process."""
    loop = load_engine_loop(model, config, **options)
    times = open(f"{os.environ[TIMES_DIR_VARIABLE]}/{os.getpid()}.times", "w", buffering=1)  # noqa: SIM115
    subscribe = loop.subscribe

    def subscribe_timed(subscriber: str, deliver: Callable[[StepMessage], None]) -> None:
        def deliver_timed(message: StepMessage) -> None:
            times.write(f"{time.perf_counter()}\n")
            deliver(message)

        subscribe(subscriber, deliver_timed)

    loop.subscribe = subscribe_timed  # type: ignore[method-assign]
    return loop
