"""An event loop whose time jumps to what is due next."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any


class PlayedLoop(asyncio.SelectorEventLoop):
    """Waits for nothing: where it would sleep, it is later."""

    def __init__(self) -> None:
        self.now_s = 100.0
        super().__init__(_Selector(self))

    def time(self) -> float:
        return self.now_s


class _Selector(selectors.SelectSelector):
    def __init__(self, loop: PlayedLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._loop.now_s += timeout or 0.0
        return super().select(0)


def play(work: Coroutine[Any, Any, None], loop: PlayedLoop | None = None) -> None:
    with asyncio.Runner(loop_factory=lambda: loop or PlayedLoop()) as runner:
        runner.run(work)
