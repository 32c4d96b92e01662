"""One running choice: its token ids, its pages and how far it has come. Policy only: no tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mneme.replicas.forest_nodes import Owner, Path
from mneme.replicas.request import GenerationRequest, Logprobs, PromptUsage

if TYPE_CHECKING:
    from mneme.replicas.detokenizer import TextStream
    from mneme.replicas.token_counts import TokenCounts


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """State of one `GenerationRequest`. `ids[:path.num_tokens]` have KV; the rest is to be computed."""

    request: GenerationRequest
    ids: list[int]  # prompt, then output
    num_prompt: int
    max_tokens: int  # output tokens, resolved against context and pool
    arrival: int  # FCFS order, kept through suspensions
    owner: Owner | None = None  # its session
    path: Path | None = None  # None while it waits
    num_cached: int | None = None  # prompt tokens that others computed; None before the first admission
    computed: list[tuple[int, int]] = field(default_factory=list)  # ranges of the prompt, in order, apart
    num_reported: int = 0  # output tokens already sent in events
    stop_text: TextStream | None = None  # follows the output where stop strings are given
    logprobs: list[Logprobs] = field(default_factory=list)  # of the output tokens not yet sent
    seen: TokenCounts | None = None  # of all ids, where there is a repetition penalty
    drawn: TokenCounts | None = None  # of the output, where there is a presence or frequency penalty

    @property
    def num_output(self) -> int:
        return len(self.ids) - self.num_prompt

    @property
    def output_ids(self) -> list[int]:
        """All output of the request, also what another engine had emitted before it was moved here."""
        return self.ids[self.num_prompt - self.request.output_offset :]

    def append(self, token_id: int) -> None:
        """One more output token."""
        self.ids.append(token_id)
        for counts in (self.seen, self.drawn):
            if counts is not None:
                counts.add(token_id)

    def note_computed(self, start: int, end: int) -> None:
        """Rows [start, end) of the prompt were computed, before its first output token."""
        end = min(end, self.num_prompt)
        if self.num_output or start >= end:
            return
        before = [each for each in self.computed if each[1] < start]
        after = [each for each in self.computed if each[0] > end]  # suspended, and begun again further back
        met = self.computed[len(before) : len(self.computed) - len(after)]
        merged = (min(start, met[0][0]), max(end, met[-1][1])) if met else (start, end)
        self.computed = [*before, merged, *after]

    def take_usage(self) -> PromptUsage | None:
        """The prompt's usage, for the first event only."""
        return None if self.num_reported else self.usage

    @property
    def usage(self) -> PromptUsage:
        """As far as the prompt has been computed; what was not begun counts as computed."""
        num_computed = sum(end - start for start, end in self.computed) if self.computed else self.num_prompt
        return PromptUsage(self.num_prompt, self.num_prompt - num_computed)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Query rows of one sequence in one step: positions [start, end).

    `runs` are the slots that their KV is written to: (page id, first offset, count). They cover the last rows of
    the chunk; a single row without a run is one whose KV is already resident and which is computed for its logits.
    """

    sequence: Sequence
    start: int
    end: int
    runs: list[tuple[int, int, int]]

    @property
    def num_rows(self) -> int:
        return self.end - self.start

    @property
    def samples(self) -> bool:
        """Whether its last row is the sequence's last known token, so that the next one is sampled."""
        return self.end == len(self.sequence.ids)
