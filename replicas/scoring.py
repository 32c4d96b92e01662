"""Gathers what a request asks of its own prompt: an embedding, or its tokens' log-probabilities. No tensors."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from mneme.kernels.page_table import IntArray
from mneme.replicas.blend.selectors import FloatArray, no_rows
from mneme.replicas.request import Pooling, PromptLogprobs


@dataclass(slots=True, eq=False)
class Scoring:
    """Reads the hidden states of one prompt, in order; a row that is computed once more counts once."""

    num_prompt: int
    pooling: Pooling | None  # of an embedding; None: not asked for
    num_top: int | None  # most likely tokens of which log-probabilities are given too; None: none are asked for
    pooled: FloatArray | None = None  # the sum of the first `num_pooled` hidden states, or the last one
    num_pooled: int = 0
    pieces: list[PromptLogprobs] = field(default_factory=list)  # of the prompt's tokens behind the first
    num_scored: int = 0  # of these

    def pool(self, positions: IntArray, hidden: FloatArray) -> None:
        """Take the hidden states [rows, H] at these positions, in order."""
        is_new = (positions >= self.num_pooled) & (positions < self.num_prompt)
        if self.pooling == "last":
            self.pooled = hidden[-1]
        elif is_new.any():
            self.pooled = hidden[is_new].sum(axis=0) + (0 if self.pooled is None else self.pooled)
        self.num_pooled += int(is_new.sum())

    def unscored(self, positions: IntArray) -> IntArray:
        """Find which of these rows, as indices, tell something new of the prompt's next token."""
        if self.num_top is None:
            return no_rows()
        return np.flatnonzero((positions >= self.num_scored) & (positions < self.num_prompt - 1))

    def add(self, piece: PromptLogprobs, num_tokens: int) -> None:
        """Take the log-probabilities of the next tokens."""
        self.pieces.append(piece)
        self.num_scored += num_tokens

    def pop_embedding(self) -> tuple[float, ...] | None:
        """Return the embedding, once the output has begun."""
        pooled, self.pooled = self.pooled, None
        if pooled is None:
            return None
        assert self.num_pooled == self.num_prompt
        return tuple((pooled / (1 if self.pooling == "last" else self.num_pooled)).tolist())

    def pop_prompt_logprobs(self) -> PromptLogprobs | None:
        """Return those of the prompt, once the output has begun; None: not asked for."""
        if self.num_top is None:
            return None
        assert self.num_scored == self.num_prompt - 1
        pieces, self.pieces = self.pieces, []
        return PromptLogprobs.joined(pieces, self.num_top)
