"""What an engine and a sampler tell each other: how a row's token is drawn, and what was drawn. No tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from mneme.replicas.drawing import TokenCounts
from mneme.replicas.request import Logprobs, SamplingParams


class SampleRow(NamedTuple):
    """Holds what the sampler needs to know of one sequence."""

    params: SamplingParams
    seed: int
    choice_index: int
    position: int  # of the token to draw: 0 is the first output token
    barred_ids: Sequence[int] = ()  # may not be drawn now
    mask: npt.NDArray[np.int32] | None = None  # bit i of word j: token 32 j + i may be drawn; of all tokens; None: any
    seen: TokenCounts | None = None  # prompt and output; needed where there is a repetition penalty
    drawn: TokenCounts | None = None  # output; needed where there is a presence or frequency penalty


# Draws the best token, whatever was drawn before: the row of all sequences that want no more.
GREEDY = SampleRow(SamplingParams(temperature=0), 0, 0, 0)


class Sampled(NamedTuple):
    token_id: int | None  # None: the model's logits are not finite, nothing can be drawn
    logprobs: Logprobs | None


class Draws(Protocol):
    """Holds the tokens that a step drew. They may be on their way from the device still."""

    tokens: Any  # int32 [rows], on the device; -1 where nothing could be drawn

    def __len__(self) -> int: ...

    def wait(self) -> list[Sampled]:
        """Return what was drawn, in the order of the rows, once it is on the host."""


class Expected(NamedTuple):
    """Tells which placeholders stand for the tokens of a step, in ids on the host, until these are known there."""

    draws: Draws
    first: int  # the placeholder of its first row, below -1; the next row's is one less, and so on

    def placeholder(self, row: int) -> int:
        return self.first - row

    def sources(self, token_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the row that each of these ids stands for; -1 where it is a token's."""
        return np.where(token_ids < -1, self.first - token_ids, -1)
