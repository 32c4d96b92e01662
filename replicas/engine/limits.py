"""How much may wait in an engine, and when to come again if it is too much. Policy only: no tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from mneme.errors import Overloaded
from mneme.replicas.config import EngineConfig
from mneme.replicas.request import GenerationRequest
from mneme.replicas.schedule.queue import WaitingQueue
from mneme.replicas.sessions.queue import TurnQueue

MIN_RETRY_S, MAX_RETRY_S = 1.0, 60.0
_HALF_LIFE_S = 10.0  # of what was measured, in seconds in which something waited


class QueueLimits:
    """Judges requests by what waits: for pages, and turns behind their own session."""

    def __init__(
        self, waiting: WaitingQueue, queued: TurnQueue, config: EngineConfig, clock: Callable[[], float]
    ) -> None:
        self._waiting = waiting
        self._queued = queued
        self._max_requests = config.max_waiting
        self._max_tokens = config.max_waiting_tokens
        self._rate = DrainRate(clock)
        self.num_refused: Counter[str] = Counter({"requests": 0, "tokens": 0, "session": 0})  # by what was full

    @property
    def num_requests(self) -> int:
        return len(self._waiting) + len(self._queued)

    @property
    def num_tokens(self) -> int:
        """Of the prompts that wait; a queued turn's without the history that it may be appended to."""
        return self._waiting.num_tokens + self._queued.num_tokens

    def has_room(self, request: GenerationRequest) -> bool:
        """Whether it may wait too."""
        return self._excess(request) is None

    def check(self, request: GenerationRequest) -> None:
        """Raise `Overloaded` if there is no room for it."""
        excess = self._excess(request)
        if excess is not None:
            raise self.refusal(*excess)

    def refusal(self, full: str, message: str) -> Overloaded:
        """The answer to one more request, and a count of it; `full` says what is."""
        self.num_refused[full] += 1
        return Overloaded(message, retry_after_s=self._rate.drain_s(self.num_tokens))

    def note_step(self) -> None:
        """A step begins."""
        self._rate.note(self._waiting.num_taken_tokens, is_waiting=len(self._waiting) > 0)

    def _excess(self, request: GenerationRequest) -> tuple[str, str] | None:
        if self.num_requests >= self._max_requests:
            return "requests", f"{self._max_requests} requests are waiting"
        # Where nothing waits it is taken whatever its size: else it could never run. So are the other choices of what
        # was taken, which have the same prompt.
        waiting = self.num_tokens
        if self._max_tokens is None or not waiting or request.choice_index > 0:
            return None
        if waiting + len(request.prompt_token_ids) > self._max_tokens:
            return "tokens", f"{waiting} prompt tokens are waiting, of at most {self._max_tokens}"
        return None


class DrainRate:
    """Tokens per second that leave the queue while something waits there, recent seconds first."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._tokens = 0.0
        self._waited_s = 0.0
        self._num_taken = 0
        self._noted_s: float | None = None  # None: nothing waited at the last note

    def note(self, num_taken: int, *, is_waiting: bool) -> None:
        """`num_taken`: tokens that ever left the queue."""
        now_s = self._clock()
        if self._noted_s is not None:
            elapsed_s = now_s - self._noted_s
            kept = 0.5 ** (elapsed_s / _HALF_LIFE_S)
            self._tokens = self._tokens * kept + num_taken - self._num_taken
            self._waited_s = self._waited_s * kept + elapsed_s
        self._num_taken, self._noted_s = num_taken, now_s if is_waiting else None

    def drain_s(self, num_tokens: int) -> float:
        """Seconds until so many tokens have left, from `MIN_RETRY_S` to `MAX_RETRY_S`.

        Where none has left for long it is the time in which none did; the least where nothing was measured.
        """
        share = num_tokens / self._tokens if self._tokens >= 1 else 1.0
        return min(max(share * self._waited_s, MIN_RETRY_S), MAX_RETRY_S)
