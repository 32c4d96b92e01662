"""Says how the tokens of one sequence are drawn, and with which its output ends. Policy only: no tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from mneme.replicas.request import Logprobs
from mneme.replicas.text.detokenizer import TextStream
from mneme.replicas.text.matcher import Mask, Matcher, without

_SPARE = 256  # tokens that may come before the arrays of `TokenCounts` have to grow


class TokenCounts:
    """Says how often each token occurs in a growing list, as arrays that the sampler's penalties index with.

    Adding a token costs the same however many there are; counting them anew would cost milliseconds a step.
    """

    def __init__(self, ids: Sequence[int]) -> None:
        distinct, counts = np.unique(np.array(ids, np.int64), return_counts=True)
        self._size = len(distinct)
        self._ids, self._counts = _with_room(distinct), _with_room(counts)
        self._index_by_id = dict(zip(distinct.tolist(), range(self._size), strict=True))

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """The distinct tokens; a view that is good until the next `add`."""
        return self._ids[: self._size]

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        """Parallel to `ids`."""
        return self._counts[: self._size]

    def add(self, token_id: int) -> None:
        index = self._index_by_id.setdefault(token_id, self._size)
        if index == self._size:
            if index == len(self._ids):
                self._ids, self._counts = _with_room(self._ids), _with_room(self._counts)
            self._ids[index], self._counts[index] = token_id, 0
            self._size += 1
        self._counts[index] += 1


@dataclass(slots=True, eq=False, kw_only=True)
class Drawing:
    """Follows the output of one sequence. The plain one allows every token, and none ends it."""

    is_greedy: bool = False  # always the best token, and no log-probabilities
    end_token_ids: tuple[int, ...] = ()  # end the output
    min_tokens: int = 0  # of the output, before which they are not drawn
    bad_words: tuple[tuple[int, ...], ...] = ()  # must not be in the output
    allowed: Mask | None = None  # what may be drawn, where `allowed_token_ids` says so
    matcher: Matcher | None = None  # follows the output where there is a grammar
    stop_text: TextStream | None = None  # follows the output where stop strings are given
    seen: TokenCounts | None = None  # of all ids, where there is a repetition penalty
    drawn: TokenCounts | None = None  # of the output, where there is a presence or frequency penalty
    logprobs: list[Logprobs] = field(default_factory=list)  # of the output tokens not yet sent

    def limits(self, ids: Sequence[int], first: int, num_output: int) -> tuple[Sequence[int], Mask | None]:
        """Return what may not be drawn behind `ids`, or else the mask of what may.

        Barred are ends before `min_tokens`, and what would complete a bad word. `ids[first:]` are the output.
        """
        barred_ids = self.end_token_ids if num_output < self.min_tokens else ()
        if self.bad_words:
            begins = [(len(ids) - len(word) + 1, word) for word in self.bad_words]
            begun = [word for begin, word in begins if begin >= first and tuple(ids[begin:]) == word[:-1]]
            barred_ids = (*barred_ids, *(word[-1] for word in begun))
        if self.matcher is not None and not self.matcher.is_waiting:
            return (), self.matcher.mask(barred_ids)
        return (barred_ids, None) if self.allowed is None else ((), without(self.allowed, barred_ids))

    def push(self, token_id: int) -> None:
        """Follow the output by a token."""
        if self.matcher is not None:
            self.matcher.push(token_id)
        if self.seen is not None:
            self.seen.add(token_id)
        if self.drawn is not None:
            self.drawn.add(token_id)

    def stops(self, token_id: int) -> bool:
        """Return whether the output stops with this token, which was pushed."""
        if self.stop_text is not None:
            self.stop_text.push([token_id])
            if self.stop_text.stopped:
                return True
        return token_id in self.end_token_ids or (self.matcher is not None and self.matcher.is_over)


def _with_room(array: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.concatenate((array, np.empty(len(array) // 2 + _SPARE, np.int64)))
