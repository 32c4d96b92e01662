"""One running choice: its token ids, its pages and how far it has come. Policy only: no tensors."""

from __future__ import annotations

import collections
import collections.abc
import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from mneme.cachetier.chunk.keys import Lineage
from mneme.errors import MnemeError
from mneme.kernels.page_table import IntArray
from mneme.replicas.blend.blend import Blend
from mneme.replicas.blend.selectors import no_rows
from mneme.replicas.documents import TRUNCATED
from mneme.replicas.drawing import Drawing
from mneme.replicas.forest.paths import Path, Rows, Runs, Spans
from mneme.replicas.forest.tree import Owner, Root
from mneme.replicas.load import Load
from mneme.replicas.request import GenerationRequest, PromptUsage, Source
from mneme.replicas.scoring import Scoring
from mneme.replicas.truncation import View

_CACHED: tuple[Source, ...] = ("device", "host", "disk", "peer")


class Origin(NamedTuple):
    """Says where the KV of the positions [start, end) came from."""

    start: int
    end: int
    source: Source


class Origins:
    """Notes where the KV of a prompt came from.

    What nobody noted, up to the last row, was on the device or, under a window, no row sees it.
    """

    __slots__ = ("_noted",)

    def __init__(self) -> None:
        self._noted: list[Origin] = []  # in order, apart

    def add(self, start: int, end: int, source: Source) -> None:
        """Note a source; the latest note counts, as a suspended request may find less than it had."""
        if start >= end:
            return
        low = bisect_left(self._noted, start, key=lambda each: each.end)  # what touches it, and no other
        high = bisect_right(self._noted, end, key=lambda each: each.start)
        before = [_cut(each, 0, start) for each in self._noted[low:high] if each.start < start]
        after = [_cut(each, end, each.end) for each in self._noted[low:high] if each.end > end]
        new = Origin(start, end, source)
        if before and before[-1].end == start and before[-1].source == source:
            new = new._replace(start=before.pop().start)
        if after and after[0].start == end and after[0].source == source:
            new = new._replace(end=after.pop(0).end)
        self._noted[low:high] = [*before, new, *after]

    def ranges(self, num_prompt: int, rest: Source = "recomputed") -> list[Origin]:
        """Cover the whole prompt, in order; what was not begun counts as `rest`."""
        ranges: list[Origin] = []
        position = 0
        for each in self._noted:
            if each.start >= num_prompt:
                break
            if position < each.start:
                ranges.append(Origin(position, each.start, "device"))
            ranges.append(each if each.end <= num_prompt else _cut(each, 0, num_prompt))
            position = ranges[-1].end
        if position < num_prompt:
            ranges.append(Origin(position, num_prompt, rest))
        return ranges


@dataclass(slots=True, eq=False)
class ChunkChain:
    """Names the chunks of one sequence in the cache tier, from its root on."""

    lineage: Lineage
    keys: list[bytes] = field(default_factory=list)  # of full chunks, as far as they are known
    num_saved: int = 0  # full chunks that were saved or are not to be
    event: bytes = b""  # of its lineage; empty: that of exact KV
    asked_s: float = 0.0  # when the tier was asked for it, or need not have been, last

    def restart(self) -> None:
        """The sequence sees other tokens."""
        self.keys, self.num_saved = [], 0


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
    view: View = field(default_factory=View)  # how much it may see
    path: Path | None = None  # None while it waits
    row: DecodeRow | None = None  # in every step, as long as it decodes on the path that the row has
    blend: Blend = field(default_factory=Blend)  # how it uses documents
    load: Load | None = None  # of what the cache tier has of it
    chain: ChunkChain | None = None  # its chunks, where there is a cache tier
    num_expected: int = 0  # rows of its prompt, when it was added; where costs are known
    due_s: float = 0.0  # when its prompt would be done, had what is left of it begun as it came; no costs: as it came
    origins: Origins = field(default_factory=Origins)  # of the prompt's KV
    num_reported: int = 0  # output tokens already sent in events
    drawing: Drawing = field(default_factory=Drawing)  # how its tokens are drawn, and with which its output ends
    scoring: Scoring | None = None  # what is asked of its own prompt
    is_only_found: bool = False  # a child, of which nothing is computed that no tier has
    has_ended: bool = False
    suspended_at: list[int] = field(default_factory=list)  # tokens of its answer that there were each time
    num_put_back: int = 0  # times that it went back to the queue because its KV is not what it should be

    def __post_init__(self) -> None:
        self.context = self.context or self.ids
        self.view.num_unseen = self.num_prompt - len(self.context)
        if self.request.reads_prompt:
            self.scoring = Scoring(self.num_prompt, self.request.pooling, self.request.sampling.prompt_logprobs)

    def see(self, context: list[int]) -> None:
        """Replace what the sequence sees; what the cache tier had of it before is of no use then."""
        if self.num_output == 0:
            self.view.num_unseen += len(self.context) - len(context)
        self.context, self.row = context, None
        self.request = replace(self.request, documents=())  # they are elsewhere now, or not there any more
        self.blend = Blend(declined=TRUNCATED, is_history_approximate=self.blend.is_history_approximate)
        self.view.event = b""
        if self.chain is not None:
            self.chain.restart()
        self.drop_load()  # KV of what it saw before

    def drop_load(self) -> None:
        """Load nothing more of what the cache tier has: it is computed."""
        if self.load is not None:
            self.load.close()
            self.load = None

    @property
    def is_probing(self) -> bool:
        """Return whether its next rows are for choosing what of its documents is computed anew, and sample nothing."""
        return self.blend.is_probing

    @property
    def is_found_whole(self) -> bool:
        """Return whether the cache tier has all of its documents where they stand, as an exact prefix."""
        load, spans = self.load, self.blend.spans
        return bool(spans) and load is not None and not load.is_asking and load.end >= spans[-1].end

    @property
    def num_to_come(self) -> int:
        """Tokens that the cache tier has behind the path, and that later steps load."""
        return 0 if self.load is None or self.path is None else max(self.load.end - self.path.num_tokens, 0)

    @property
    def num_output(self) -> int:
        return len(self.ids) - self.num_prompt

    @property
    def output_ids(self) -> list[int]:
        """All output of the request, also what another engine had emitted before it was moved here."""
        return self.ids[self.num_prompt - self.request.output_offset :]

    def append(self, token_id: int) -> None:
        """Add an output token."""
        self.ids.append(token_id)
        if self.context is not self.ids:
            self.context.append(token_id)
        self.drawing.push(token_id)

    def finish_reason(self, token_id: int) -> str | None:
        """Return why the sequence ends with this token, which it has appended; None if it does not."""
        if self.drawing.stops(token_id):
            return "stop"
        return "length" if self.num_output >= self.max_tokens else None

    def add_origin(self, start: int, end: int, source: Source) -> None:
        """Note where the KV of [start, end) comes from, as long as that is the prompt's."""
        if not self.num_output:
            self.origins.add(start, end, source)

    def add_origins(self, rows: Rows) -> None:
        """Note that these rows are computed, as long as they are the prompt's."""
        if self.num_output:
            return
        for start, end in rows.loaded:
            self.add_origin(start, end, "host")
        if len(self.blend.narrowed):
            cached = [each for each in self.origins.ranges(self.num_prompt, rest="device") if each.source in _CACHED]
            self.blend.add_narrowed(rows.spans, cached)
        # Slots of its own between what it reuses were never there before.
        num_refilled = 0 if self.blend.uses else rows.num_refilled
        for start, end in rows.spans:
            middle = min(start + num_refilled, end)
            self.origins.add(start, middle, "dropped")
            self.origins.add(middle, end, "recomputed")
            num_refilled -= middle - start

    def pop_usage(self) -> PromptUsage | None:
        """Return the prompt's usage for the first event, None for later ones."""
        return None if self.num_reported else self.usage

    @property
    def usage(self) -> PromptUsage:
        """Count where the prompt came from, as far as it has been computed; what was not begun counts as computed.

        A token that is computed in the first layers only, and whose KV was there, counts as found by the share of the
        other layers.
        """
        num_seen = self.num_prompt - self.view.num_unseen
        ranges = self.origins.ranges(num_seen)
        counted = collections.Counter[str](self.blend.narrowed_found)
        for start, end, source in ranges:
            counted[source] += end - start
        return PromptUsage(
            prompt_tokens=num_seen,
            cached_tokens=sum(counted[source] for source in _CACHED),
            host_tokens=counted["host"],
            dropped_tokens=counted["dropped"],
            truncated_tokens=self.view.num_unseen,
            disk_tokens=counted["disk"],
            peer_tokens=counted["peer"],
            blend=self.blend.usage(
                self.request,
                self.context if self.num_output == 0 else self.context[: -self.num_output],
                [each for each in ranges if each.source in _CACHED],
                has_history=self.root is not None,
            ),
        )


class End(NamedTuple):
    """Says how a sequence ended, to every party to that (`Engine._finish`)."""

    sequence: Sequence
    reason: str
    error: str | MnemeError | None = None  # a message: the engine failed; a `MnemeError`: the request is sound
    parent: Sequence | None = None  # for whom it computed a prompt; nobody else hears of it

    @property
    def is_sound(self) -> bool:
        """Return whether what was computed may be kept."""
        return self.reason != "error" or isinstance(self.error, MnemeError)


@dataclass(slots=True, eq=False)
class StepRows:
    """Query rows of one sequence in one step, at the positions [start, end) of `spans`, in order.

    `runs` are the slots that their KV is written to: (page id, first offset, count). They cover all rows but perhaps
    the last: one whose KV is already resident and which is computed for its logits.
    """

    sequence: Sequence
    spans: list[tuple[int, int]]
    runs: list[tuple[int, int, int]]
    shifts: list[int] = field(default_factory=list)  # as `Rows.shifts`; empty where none is shifted
    num_compared: int = 0  # of the last rows: of documents, of which no KV is written
    num_rows: int = field(init=False)
    end: int = field(init=False)
    samples: bool = field(init=False)  # the token behind its last row
    is_shifted: bool = field(init=False)  # some key is rotated for another position than its row's
    is_plain: bool = field(init=False)  # a decode: one row, of which nothing is wanted but the token behind it

    def __post_init__(self) -> None:
        start, self.end = self.spans[-1]
        self.num_rows = self.end - start
        for start, end in self.spans[:-1]:
            self.num_rows += end - start
        self.samples = self.end == len(self.sequence.context) and not self.sequence.is_probing
        self.is_shifted = self.shifts != [0] and any(self.shifts)
        is_decode = self.samples and self.num_rows == 1 and len(self.runs) == 1 and self.sequence.num_output > 0
        self.is_plain = is_decode and not (self.is_shifted or self.num_compared) and self.sequence.scoring is None

    @property
    def num_written(self) -> int:
        runs = self.runs
        return runs[0][2] if len(runs) == 1 else sum(count for _, _, count in runs)

    @property
    def is_last(self) -> bool:
        """Return whether its last row is the sequence's last known token."""
        return self.end == len(self.sequence.context)

    @property
    def is_read(self) -> bool:
        """Return whether hidden states of its rows are wanted."""
        scoring = self.sequence.scoring
        return scoring is not None and (scoring.pooling is not None or len(scoring.unscored(self.positions)) > 0)

    @property
    def probes(self) -> bool:
        """Return whether its rows tell what they look at of the sequence's documents."""
        return self.sequence.is_probing and not self.sequence.blend.num_to_compare

    @property
    def is_special(self) -> bool:
        """Return whether its outcome is more than a token: what documents are chosen by, or what a prompt says."""
        sequence = self.sequence
        return sequence.is_probing or (not sequence.num_output and bool(sequence.blend.uses or sequence.scoring))

    @property
    def is_blended(self) -> bool:
        """Return whether its sequence reuses documents in place."""
        return bool(self.sequence.blend.uses)

    @property
    def compared(self) -> IntArray:
        """Return the positions of those that are compared."""
        return self.sequence.blend.next_compared(self.num_compared)

    @property
    def reused(self) -> IntArray:
        """Return the positions of documents' tokens whose KV its sequence reuses, in order."""
        return self.sequence.blend.reused

    @property
    def narrowed(self) -> IntArray:
        """Return which of its rows, as indices, may leave the pass between two layers."""
        narrowed = self.sequence.blend.narrowed
        if not len(narrowed) or self.spans[0][0] > narrowed[-1]:
            return no_rows()
        return np.flatnonzero(np.isin(self.positions, narrowed))

    def num_staying(self, num_narrowed: int) -> dict[int, int]:
        """Return how many of these stay from some layers on."""
        return self.sequence.blend.num_staying(num_narrowed)

    @property
    def positions(self) -> IntArray:
        """The position of each row."""
        return np.concatenate([np.arange(*span) for span in self.spans])

    @property
    def key_positions(self) -> IntArray:
        """The position that each row's key is rotated for."""
        if not self.is_shifted:
            return self.positions
        lengths = np.array([end - start for start, end in self.spans])
        return self.positions - np.repeat(np.array(self.shifts, np.int64), lengths)

    def with_rows(self, rows: Rows) -> StepRows:
        """Add rows behind its last."""
        return StepRows(self.sequence, self.spans + rows.spans, self.runs + rows.runs, self.shifts + rows.shifts)


class DecodeRow(StepRows):
    """The row of a sequence that decodes on one path: one object for all steps until a page is begun.

    Only `end` is another in each step. Where steps are launched ahead, it is the next one's already when a step is
    committed. What a step asks of each of its decodes stands here together: a step of many takes as long as memory
    that is not in the processor's caches.
    """

    __slots__ = ("context", "end_token_ids", "free_below", "ids", "is_greedy", "path", "request_id", "window")

    def __init__(self, sequence: Sequence, path: Path) -> None:
        drawing = sequence.drawing
        self.sequence, self.path = sequence, path
        self.shifts, self.num_compared, self.num_rows, self.end = [0], 0, 1, path.num_tokens
        self.samples, self.is_shifted, self.is_plain = True, False, True
        self.ids, self.context, self.request_id = sequence.ids, sequence.context, sequence.request.request_id
        self.window = math.inf if sequence.view.window is None else sequence.view.window
        self.is_greedy, self.end_token_ids = drawing.is_greedy, drawing.end_token_ids
        rules = (drawing.matcher, drawing.stop_text, drawing.seen, drawing.drawn, sequence.request.sampling.logprobs)
        # A token that comes behind fewer ids is not the last, and no rule looks at it, unless it ends the output.
        self.free_below = sequence.num_prompt + sequence.max_tokens - 1 if rules == (None,) * 5 else 0

    @property
    def spans(self) -> Spans:  # type: ignore[override]
        return [(self.end - 1, self.end)]

    @property
    def runs(self) -> Runs:  # type: ignore[override]
        return [(self.path.page_ids[-1], (self.end - 1) % self.path.store.page_size, 1)]


def _cut(origin: Origin, low: int, high: int) -> Origin:
    return origin._replace(start=max(origin.start, low), end=min(origin.end, high))
