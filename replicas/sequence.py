"""One running choice: its token ids, its pages and how far it has come. Policy only: no tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mneme.replicas.forest.nodes import Owner, Path, Root
from mneme.replicas.forest.paths import Rows
from mneme.replicas.origins import Origins, Source
from mneme.replicas.request import GenerationRequest, Logprobs, PromptUsage

if TYPE_CHECKING:
    from mneme.replicas.connector.fetch import Fetch
    from mneme.replicas.connector.save import ChunkChain
    from mneme.replicas.text.detokenizer import TextStream
    from mneme.replicas.token_counts import TokenCounts


_CACHED: tuple[Source, ...] = ("device", "host", "disk", "peer")


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """State of one `GenerationRequest`. `context[:path.num_tokens]` have KV; the rest is to be computed."""

    request: GenerationRequest
    ids: list[int]  # prompt, then output
    num_prompt: int
    max_tokens: int  # output tokens, resolved against context and pool
    arrival: int  # FCFS order, kept through suspensions
    owner: Owner | None = None  # its session
    context: list[int] = field(default_factory=list)  # what is seen of `ids`: all of them, until a truncation
    root: Root | None = None  # where `context` goes on behind what a truncation kept
    window: int | None = None  # tokens that `context` may have before it is truncated; None: it never outgrows
    num_history: int = 0  # tokens of `context` that the session had before this turn
    num_unseen: int = 0  # of the prompt, when its first token is drawn
    num_counted: int = 0  # tokens that the waiting queue counts for it: `context` may get shorter there
    path: Path | None = None  # None while it waits
    found: Fetch | None = None  # what the cache tier has of it, while that is looked for or loaded
    chain: ChunkChain | None = None  # its chunks, where there is a cache tier
    was_admitted: bool = False
    begun_s: float | None = None  # when it first had rows
    num_retries: int = 0  # steps that failed and were to be computed again
    origins: Origins = field(default_factory=Origins)  # of the prompt's KV
    num_reported: int = 0  # output tokens already sent in events
    stop_text: TextStream | None = None  # follows the output where stop strings are given
    logprobs: list[Logprobs] = field(default_factory=list)  # of the output tokens not yet sent
    seen: TokenCounts | None = None  # of all ids, where there is a repetition penalty
    drawn: TokenCounts | None = None  # of the output, where there is a presence or frequency penalty

    def __post_init__(self) -> None:
        self.context = self.context or self.ids
        self.num_unseen = self.num_prompt - len(self.context)

    @property
    def is_over(self) -> bool:
        """Whether its last token is outside its window."""
        return self.window is not None and len(self.context) > self.window

    def see(self, context: list[int]) -> None:
        """This is all that it sees from now on."""
        if self.num_output == 0:
            self.num_unseen += len(self.context) - len(context)
        self.context = context
        if self.chain is not None:
            self.chain.restart()
        if self.found is not None:  # KV of what it saw before
            self.found.close()
            self.found = None

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
        if self.context is not self.ids:
            self.context.append(token_id)
        for counts in (self.seen, self.drawn):
            if counts is not None:
                counts.add(token_id)

    def note_origin(self, start: int, end: int, source: Source) -> None:
        """Where the KV of [start, end) comes from, as long as that is the prompt's."""
        if not self.num_output:
            self.origins.note(start, end, source)

    def note_rows(self, rows: Rows) -> None:
        """These rows of the prompt are computed, before its first output token."""
        if self.num_output:
            return
        for start, end in rows.loaded:
            self.note_origin(start, end, "host")
        num_refilled = rows.num_refilled
        for start, end in rows.spans:
            middle = min(start + num_refilled, end)
            self.origins.note(start, middle, "dropped")
            self.origins.note(middle, end, "recomputed")
            num_refilled -= middle - start

    def take_usage(self) -> PromptUsage | None:
        """The prompt's usage, for the first event only."""
        return None if self.num_reported else self.usage

    @property
    def usage(self) -> PromptUsage:
        """As far as the prompt has been computed; what was not begun counts as computed."""
        num_seen = self.num_prompt - self.num_unseen
        counted = {source: self.origins.num_tokens(num_seen, source) for source in (*_CACHED, "dropped")}
        return PromptUsage(
            prompt_tokens=num_seen,
            cached_tokens=sum(counted[source] for source in _CACHED),
            host_tokens=counted["host"],
            dropped_tokens=counted["dropped"],
            truncated_tokens=self.num_unseen,
            disk_tokens=counted["disk"],
            peer_tokens=counted["peer"],
        )


@dataclass(frozen=True, slots=True)
class Chunk:
    """Query rows of one sequence in one step, at the positions [start, end) of `spans`, in order.

    `runs` are the slots that their KV is written to: (page id, first offset, count). They cover all rows but perhaps
    the last: one whose KV is already resident and which is computed for its logits.
    """

    sequence: Sequence
    spans: list[tuple[int, int]]
    runs: list[tuple[int, int, int]]

    @property
    def end(self) -> int:
        return self.spans[-1][1]

    @property
    def num_rows(self) -> int:
        if len(self.spans) == 1:
            return self.spans[0][1] - self.spans[0][0]
        return sum(end - start for start, end in self.spans)

    @property
    def num_written(self) -> int:
        return sum(count for _, _, count in self.runs)

    @property
    def samples(self) -> bool:
        """Whether its last row is the sequence's last known token, so that the next one is sampled."""
        return self.end == len(self.sequence.context)

    def with_rows(self, rows: Rows) -> Chunk:
        """The same with more rows behind its last."""
        return Chunk(self.sequence, self.spans + rows.spans, self.runs + rows.runs)
