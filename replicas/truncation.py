"""Which tokens a session keeps when it outgrows the context window (AttentionStore 3.4).

The oldest go first: at least the overflow, and a share of the window so that it does not overflow again at once. What
stays is a few ranges, each of which moves to lower positions as a whole. The first tokens may stay as attention sinks
or as the system prompt; `important` keeps, of what would go, the runs that attention has looked at most.

Policy only: no tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from mneme.errors import ContextLengthExceeded, InvalidRequest

Strategy = Literal["reuse_kv", "recompute", "error"]
Keep = Literal["system", "important"]
# Why a model's KV cannot be moved to other positions.
Immovable = Literal["sliding_window", "learned_positions"]

SINKS = 4  # first tokens that attention leans on whatever they say; StreamingLLM 3.2 keeps as many
MIN_RUN_TOKENS = 16  # of what `important` keeps: shorter runs say little, and each costs a delta of its own
MAX_WINDOWS = 16  # tokens of a prompt, or of an answer, that is truncated, in windows
MAX_RUNS = 32  # of what `important` keeps: longer runs instead of more


@dataclass(slots=True, eq=False, kw_only=True)
class View:
    """Says how much of its tokens one sequence may see. The plain one has no window: all of them fit.

    `Sequence.context` are those that it sees.
    """

    window: int | None = None  # tokens that it may see before it is truncated
    num_history: int = 0  # tokens that it saw when its turn came, and that its session had before
    num_unseen: int = 0  # of the prompt, when its first token is drawn
    event: bytes = b""  # under which the cache tier may have what its session saw, where its engine lacks that

    def is_over(self, num_tokens: int) -> bool:
        """Return whether the last of so many tokens is outside."""
        return self.window is not None and num_tokens > self.window

    def num_fitting(self, num_tokens: int) -> int:
        """Count those of so many tokens that are inside."""
        return num_tokens if self.window is None else min(num_tokens, self.window)

    def kept(
        self,
        num_tokens: int,
        num_present: int,
        truncation: Truncation,
        num_system: int,
        masses: Callable[[int], list[float] | None],
    ) -> list[tuple[int, int]]:
        """Return the ranges of so many tokens that stay: of the present ones if possible, and all that follow them.

        masses  gives the attention mass of so many tokens; None: not known
        """
        assert self.window is not None
        num_new = num_tokens - num_present + 1
        if num_new > self.window or num_present == 0:
            num_present, num_new = num_tokens, 1
        ranges = plan_truncation(num_present, self.window, num_new, truncation, num_system, masses(num_present))
        return _ranges([*ranges, (num_present, num_tokens)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Truncation:
    """Says what happens to a request that does not fit the window.

    strategy    "reuse_kv" drops tokens and keeps the KV of the others as it is (needs a session); "recompute" drops
                the same tokens and computes the others anew; "error" refuses the request
    ratio       the share of the window that is dropped at least
    keep_first  how many of the first tokens stay; None: with "reuse_kv" `SINKS`, else none, as a text that is computed
                anew has sinks of its own
    keep        "system": the system prompt stays too; "important": half of what stays is what attention chose

    Raises `InvalidRequest` with the field, the value and the rule.
    """

    strategy: Strategy = "reuse_kv"
    ratio: float = 0.5
    keep_first: int | None = None
    keep: Keep | None = None

    def __post_init__(self) -> None:
        if self.strategy not in get_args(Strategy):
            raise InvalidRequest("strategy", self.strategy, f"must be one of {', '.join(get_args(Strategy))}")
        is_number = isinstance(self.ratio, int | float) and not isinstance(self.ratio, bool)
        if not is_number or not 0 < self.ratio < 1:  # NaN fails every comparison
            raise InvalidRequest("ratio", self.ratio, "must be a number over 0 and under 1")
        is_count = isinstance(self.keep_first, int) and not isinstance(self.keep_first, bool)
        if self.keep_first is not None and (not is_count or self.keep_first < 0):
            raise InvalidRequest("keep_first", self.keep_first, "must be null or an integer from 0")
        if self.keep is not None and self.keep not in get_args(Keep):
            raise InvalidRequest("keep", self.keep, f"must be null or one of {', '.join(get_args(Keep))}")

    @property
    def num_first(self) -> int:
        """How many of the first tokens stay."""
        if self.keep_first is None:
            return SINKS if self.strategy == "reuse_kv" else 0
        return self.keep_first

    def check_window(self, window: int) -> None:
        """Raise `InvalidRequest` if `keep_first` is more than a truncation leaves of `window` tokens."""
        most = int(window * (1 - self.ratio))
        if self.strategy != "error" and self.keep_first is not None and self.keep_first > most:
            rule = f"at most {most} tokens: what a ratio of {self.ratio:g} leaves of a window of {window}"
            raise InvalidRequest("truncation.keep_first", self.keep_first, rule)

    def check_model(self, immovable: Immovable | None) -> None:
        """Raise `InvalidRequest` if KV were to be moved that only serves its own position.

        With learned positions that is all KV, with sliding windows that of the first tokens, which they would hide.
        `recompute` may keep what it likes: what is seen is then an ordinary text, however far a layer looks back.
        """
        if self.strategy != "reuse_kv" or immovable is None:
            return
        if immovable == "learned_positions":
            rule = "not on a model with learned positions, whose KV serves its own position alone; recompute works"
            raise InvalidRequest("truncation.strategy", self.strategy, rule)
        rule = "not with reuse_kv on a model with sliding-window layers, which would hide what is kept of the beginning"
        if self.num_first:
            raise InvalidRequest("truncation.keep_first", self.keep_first, rule)
        if self.keep is not None:
            raise InvalidRequest("truncation.keep", self.keep, rule)


def default_for(configured: Truncation, immovable: Immovable | None) -> Truncation:
    """Return the default of a model, which is what is configured and, where nothing is, what its KV allows.

    Where all KV serves its own position that is "recompute"; behind sliding windows no first tokens stay.
    """
    if configured == Truncation() and immovable == "learned_positions":
        return replace(configured, strategy="recompute")
    if configured.keep_first is None and immovable == "sliding_window":
        return replace(configured, keep_first=0)
    return configured


def resolved(given: Mapping[str, Any] | None, default: Truncation, *, has_session: bool) -> Truncation | None:
    """Return what a request asks for, and `default` where it says nothing; None: it is refused when it is too long.

    Without a session nothing is truncated unless the request says how. Raises `InvalidRequest`.
    """
    base = default if has_session else replace(default, strategy="error")
    try:
        truncation = replace(base, **(given or {}))
    except InvalidRequest as error:
        raise InvalidRequest(f"truncation.{error.field}", error.value, error.rule) from None
    if truncation.keep_first is None:  # of a request that says null: nothing, as one that leaves it out
        truncation = replace(truncation, keep_first=base.keep_first)
    if truncation.strategy == "reuse_kv" and not has_session:
        raise InvalidRequest("truncation.strategy", "reuse_kv", "needs a session: without one there is no KV to keep")
    return None if truncation.strategy == "error" else truncation


def plan_truncation(
    num_tokens: int,
    window: int,
    num_new: int,
    truncation: Truncation,
    num_system: int = 0,
    important: Sequence[float] | None = None,
) -> list[tuple[int, int]]:
    """The ranges [start, end) of the present tokens that stay: in order, apart, none empty; all of them if all fit.

    num_tokens  tokens that are present
    num_new     tokens that must fit behind them: what is appended, and an output token at least
    num_system  how many of the first are the system prompt
    important   attention mass of each present token; None: not known, and the oldest go

    What goes is at least the overflow, and `ratio * window` as far as that spares what is to be kept first. Raises
    `ContextLengthExceeded` if what is new does not fit the window alone.
    """
    if num_new > window:
        raise ContextLengthExceeded("prompt", num_new, f"what is new must fit the window of {window} tokens alone")
    overflow = num_tokens + num_new - window
    if overflow <= 0:
        return _ranges([(0, num_tokens)])
    wanted = max(truncation.num_first, num_system if truncation.keep == "system" else 0)
    spared = max(num_tokens - wanted, 0)
    num_dropped = max(overflow, min(math.ceil(truncation.ratio * window), spared))
    if num_tokens > window:  # not the overflow alone: it would be over again at once
        num_dropped = max(num_dropped, num_tokens - max(int((1 - truncation.ratio) * window), wanted))
    num_kept = num_tokens - num_dropped
    head = min(wanted, num_kept)
    chosen: list[tuple[int, int]] = []
    num_recent = num_kept - head
    if truncation.keep == "important" and important is not None:
        chosen = _important_runs(head, num_tokens, num_recent, important)
        num_recent -= sum(end - start for start, end in chosen)
    return _ranges([(0, head), *chosen, (num_tokens - num_recent, num_tokens)])


def _important_runs(start: int, end: int, room: int, important: Sequence[float]) -> list[tuple[int, int]]:
    """Choose the runs in [start, end) with the most mass, in order: at most half of `room`, which the recent share."""
    if len(important) != end:
        raise ValueError(f"{len(important)} attention masses for {end} tokens")
    size = max(MIN_RUN_TOKENS, -(-(room // 2) // MAX_RUNS))
    num_runs = room // 2 // size
    recent = end - (room - num_runs * size)
    starts = range(recent - size, start - 1, -size)
    ranked = sorted(starts, key=lambda first: (-_mass(important[first : first + size]), -first))
    return [(first, first + size) for first in sorted(ranked[:num_runs])]


def _mass(masses: Sequence[float]) -> float:
    return math.fsum(mass for mass in masses if math.isfinite(mass))


def _ranges(parts: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Drop empty ranges, and join those that touch."""
    joined: list[tuple[int, int]] = []
    for start, end in parts:
        if start == end:
            continue
        if joined and joined[-1][1] == start:
            start = joined.pop()[0]
        joined.append((start, end))
    return joined
