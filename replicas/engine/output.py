"""What leaves an engine: events, explanations of recent prompts, and the token streams that carry the events."""

from __future__ import annotations

import logging
import threading
import time
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from mneme.errors import MnemeError
from mneme.replicas.documents import BlendUsage
from mneme.replicas.model.draws import Sampled
from mneme.replicas.queries import ExplainedPrompt, ExplainedRange, ExplainedSampling
from mneme.replicas.report import ReplicaReport
from mneme.replicas.request import (
    PromptUsage,
    SamplingParams,
    StepMessage,
    TokenEvent,
    is_of_request,
)
from mneme.replicas.sequence import End, Sequence, StepRows
from mneme.replicas.sessions.token_log import ClientText, FinishedTurn, VisibleTokens
from mneme.replicas.text.detokenizer import TextStream
from mneme.replicas.text.tokenizer import Tokenizer
from mneme.replicas.text.tool_calls import history_note

logger = logging.getLogger(__name__)

MAX_EXPLANATIONS = 1024  # per engine
MAX_RANGES = 16_384  # in all of them together
_NOTHING_ELSE = (None,) * (len(TokenEvent._fields) - 2)  # is told of most tokens
HOLD_S = 0.05  # no event waits longer for a log: a disk that hangs must not hang clients

Deliver = Callable[[StepMessage], None]
Batches = Mapping[str, list[TokenEvent]]  # by subscriber


class BlendCounts:
    """Counts requests with documents, and the tokens of these."""

    def __init__(self) -> None:
        self.requests: Counter[str] = Counter()  # that reused some in place, by selector
        self.tokens: Counter[str] = Counter()  # as `BlendUsage.token_counts`
        self.declined: Counter[str] = Counter()  # requests that reused none, by reason

    def add(self, blend: BlendUsage) -> None:
        self.tokens.update(blend.token_counts())
        if blend.declined is not None:
            self.declined[blend.declined] += 1
        elif blend.selector is not None:
            self.requests[blend.selector] += 1

    def as_stats(self) -> dict[str, dict[str, int]]:
        return {"requests": dict(self.requests), "tokens": dict(self.tokens), "declined": dict(self.declined)}


class Outbox:
    """Turns what is new of a sequence into an event, keeps events until they are taken, and counts what they said."""

    def __init__(self, on_end: Callable[[str], None], clock: Callable[[], float]) -> None:
        self._on_end = on_end  # told of every request that has ended
        self._clock = clock
        self._events: list[TokenEvent] = []
        self._begun_s: dict[Sequence, float] = {}  # when each first had rows, of those that have not ended
        # "prompt", "cached", "generated", as `kv_details`, and what was on the device here and nowhere else ("alone").
        self.num_tokens: Counter[str] = Counter()
        self.num_finished: Counter[str] = Counter()  # by finish_reason
        self.blends = BlendCounts()
        self.explanations = Explanations()

    def __bool__(self) -> bool:
        return bool(self._events)

    def pop_events(self) -> list[TokenEvent]:
        events, self._events = self._events, []
        return events

    def mark_begun(self, batch: Iterable[StepRows]) -> None:
        """Note when sequences first have rows: in the step of this batch."""
        others = [part.sequence for part in batch if not part.is_plain]  # a decode has begun
        begun = [sequence for sequence in others if sequence not in self._begun_s]
        if begun:
            self._begun_s.update(dict.fromkeys(begun, self._clock()))

    def has_begun(self, sequence: Sequence) -> bool:
        """Return whether a sequence has had rows, until it ends."""
        return sequence in self._begun_s

    def ended(self, end: End) -> None:
        """Tell that a request has ended, if it is one that somebody sent."""
        if end.parent is None:
            self.report(end.sequence, end.reason, end.error)
        self._begun_s.pop(end.sequence, None)

    def report(
        self, sequence: Sequence, finish_reason: str | None = None, error: str | MnemeError | None = None
    ) -> None:
        """Tell of its output since the last report and, the first time, of its prompt's usage."""
        if finish_reason is None and sequence.num_reported and sequence.request.sampling.logprobs is None:
            self._report_next(sequence)
            return
        fresh = sequence.ids[sequence.num_prompt + sequence.num_reported :]
        usage, begun_s = sequence.pop_usage(), self._begun_s.get(sequence)
        if usage is not None and begun_s is not None:
            usage = usage._replace(queue_s=begun_s - sequence.request.taken_s, prefill_s=self._clock() - begun_s)
        is_counted = not sequence.request.is_warm_up
        if usage is not None and begun_s is not None and is_counted:
            details = usage.kv_details()
            alone = max(details["device"] - sequence.request.elsewhere_tokens, 0)
            self.num_tokens.update(prompt=usage.prompt_tokens, cached=usage.cached_tokens, alone=alone, **details)
            if usage.blend is not None:
                self.blends.add(usage.blend)
            self.explanations.record(sequence, usage)
        logprobs = tuple(sequence.drawing.logprobs) if sequence.request.sampling.logprobs is not None else None
        sequence.drawing.logprobs.clear()
        sequence.num_reported += len(fresh)
        request_id = sequence.request.request_id
        self.num_tokens["generated"] += len(fresh) * is_counted
        if finish_reason is not None:
            self.num_finished[finish_reason] += is_counted
            self._on_end(request_id)
        refusal = error if isinstance(error, MnemeError) else None
        message = None if error is None else str(error)
        scoring = sequence.scoring if fresh else None
        embedding = None if scoring is None else scoring.pop_embedding()
        of_prompt = None if scoring is None or usage is None else scoring.pop_prompt_logprobs()
        told = (request_id, tuple(fresh), finish_reason, logprobs, usage, message, refusal, embedding, of_prompt)
        self._events.append(TokenEvent(*told))

    def append_next(self, sampling: list[Sequence], sampled: list[Sampled]) -> Iterator[tuple[Sequence, Sampled]]:
        """Append the tokens of decodes from which nothing else follows, and tell of them: all tokens of most answers
        but two. Yields the other sequences in their turn."""
        events, num_appended = self._events, len(sampling)
        for sequence, outcome in zip(sampling, sampled, strict=True):
            row, token_id = sequence.row, outcome.token_id
            if (
                row is None
                or token_id is None
                or len(row.ids) >= row.free_below
                or token_id in row.end_token_ids
                or not sequence.num_reported
            ):
                num_appended -= 1
                yield sequence, outcome
                continue
            row.ids.append(token_id)
            if row.context is not row.ids:
                row.context.append(token_id)
            sequence.num_reported += 1
            # Without the constructor of named tuples, which is Python: 0.09 us instead of 0.24 (Zen 4).
            told = (row.request_id, (token_id,)) + _NOTHING_ELSE  # noqa: RUF005, `*` makes a list first
            events.append(tuple.__new__(TokenEvent, told))
        self.num_tokens["generated"] += num_appended

    def _report_next(self, sequence: Sequence) -> None:
        """Tell of a token of which nothing else is to be told."""
        request = sequence.request
        sequence.num_reported += 1
        self.num_tokens["generated"] += not request.is_warm_up
        told = (request.request_id, (sequence.ids[-1],)) + _NOTHING_ELSE  # noqa: RUF005, `*` makes a list first
        self._events.append(tuple.__new__(TokenEvent, told))

    def report_unstarted(self, request_id: str, reason: str, refusal: MnemeError | None = None) -> None:
        """Tell that a request which waited for its session ends unstarted; "error" without a refusal is our fault."""
        self._on_end(request_id)
        error = str(refusal or "the engine could not take the request") if reason == "error" else None
        self._events.append(TokenEvent(request_id, (), reason, None, None, error, refusal))


def finished_turn(sequence: Sequence, tokenizer: Tokenizer | None) -> FinishedTurn:
    """Return what the sequence leaves to its session if it ends now."""
    said = None
    if tokenizer is not None and sequence.request.prompt_text is not None:
        said = said_to_client(tokenizer, sequence.request.sampling, sequence.output_ids, sequence.drawing.stop_text)
    sees_all = sequence.context is sequence.ids and not (sequence.root is not None and sequence.root.is_blend)
    # An answer without a root has computed all it sees anew.
    stored = b"" if sequence.num_output else sequence.view.event
    seen = None if sees_all else VisibleTokens(array("i", sequence.context), sequence.root, stored)
    history, note = sequence.request.history, b""
    if history is not None and said is not None and tokenizer is not None:
        note = history_note(tokenizer, history, said.text)
    return FinishedTurn(
        sequence.ids, sequence.num_prompt, sequence.usage.cached_tokens, said, seen, sequence.view.num_unseen, note
    )


def said_to_client(
    tokenizer: Tokenizer, params: SamplingParams, ids: list[int], stream: TextStream | None
) -> ClientText:
    """Return the text of an answer of these ids as its client got it, and how many of the ids stand for it.

    A last token that is not shown is not counted: it closes the answer, the next prompt's template writes it again, and
    its KV was never computed. Where a stop string cut the text, the ids are counted whose text lies wholly before it.

    stream  was pushed the same ids; None if there are no stop strings
    """

    def text(num_ids: int) -> str:
        return tokenizer.decode(ids[:num_ids], skip_special_tokens=params.skip_special_tokens)

    if stream is not None and stream.stopped:
        return ClientText(text(stream.num_whole_tokens), stream.num_whole_tokens)
    is_closed = params.skip_special_tokens and bool(ids) and ids[-1] in tokenizer.special_token_ids
    return ClientText(text(len(ids)), len(ids) - is_closed)


class Explanations:
    """Says where the KV of recent prompts came from, range by range (`GET /v1/kv/explain`); bounded."""

    def __init__(self) -> None:
        self._entries: deque[tuple[str, ExplainedPrompt]] = deque()  # (tenant salt, explanation), oldest first
        self._num_ranges = 0

    def __len__(self) -> int:
        return len(self._entries)

    def record(self, sequence: Sequence, usage: PromptUsage) -> None:
        """Keep where the KV of a computed prompt came from."""
        request = sequence.request
        ranges: list[ExplainedRange] = [
            {"start": origin.start, "end": origin.end, "source": origin.source}
            for origin in sequence.origins.ranges(usage.prompt_tokens)
        ]
        weighing = request.sampling.weighing
        sampling: ExplainedSampling = {
            "temperature": weighing.temperature,
            "top_p": weighing.top_p,
            "top_k": weighing.top_k,
            "min_p": weighing.min_p,
            "repetition_penalty": weighing.repetition_penalty,
            "max_tokens": sequence.max_tokens,
        }
        explanation: ExplainedPrompt = {
            "request_id": request.request_id,
            "choice": request.choice_index,
            "has_session": request.session_id is not None,
            "prompt_tokens": usage.prompt_tokens,
            "kv_details": usage.kv_details(),
            "ranges": ranges,
            "sampling": sampling,
            "resumed_at": request.output_offset,
            "suspended_at": sequence.suspended_at,  # grows on
        }
        if usage.blend is not None:
            explanation["blend"] = usage.blend.as_json()
        self._entries.append((request.salt, explanation))
        self._num_ranges += len(ranges)
        while len(self._entries) > MAX_EXPLANATIONS or self._num_ranges > MAX_RANGES:
            _, oldest = self._entries.popleft()
            self._num_ranges -= len(oldest["ranges"])

    def of(self, salt: str, http_id: str) -> list[ExplainedPrompt]:
        """List an entry for each choice of the HTTP request that ran here, also of those that were moved on."""
        return [e for of_salt, e in self._entries if of_salt == salt and is_of_request(e["request_id"], http_id)]


class Subscriber:
    """Counts the messages of one token stream. Thread-safe."""

    def __init__(self, deliver: Deliver) -> None:
        self._deliver = deliver
        self._seq = 0
        self._lock = threading.Lock()

    def send(self, epoch: str, events: tuple[TokenEvent, ...], report: ReplicaReport | None = None) -> None:
        with self._lock:
            message = StepMessage(epoch, self._seq, events, report)
            self._seq += 1
            try:
                self._deliver(message)
            except Exception:  # a subscriber's fault must not reach the engine or the others
                logger.exception("a token stream could not take its message seq=%s", message.seq)


@dataclass(slots=True, eq=False)
class _Held:
    batches: Batches
    until_s: float


class WithheldEvents:
    """Holds the last events of sessions' turns until the logs have them; who wrote sends them. Thread-safe."""

    def __init__(
        self,
        send: Callable[[Batches], None],
        after: Callable[[Callable[[], None]], bool] | None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`after` is `SessionLogWriter.after`; None: there are no logs, and nothing is held back."""
        self._send, self._after, self._clock = send, after, clock
        self._held: deque[_Held] = deque()  # oldest first
        self._lock = threading.Lock()

    def __bool__(self) -> bool:
        return bool(self._held)

    def send(self, batches: Batches) -> None:
        """Send as soon as all that was said until now is written."""
        held = _Held(batches, self._clock() + HOLD_S)
        with self._lock:
            self._held.append(held)
        if self._after is None or self._after(lambda: self._release(held)):
            self._release(held)

    def release(self, *, everything: bool = False) -> None:
        """Send what has waited too long."""
        if not self._held:
            return
        now_s = self._clock()
        with self._lock:
            late = [held for held in self._held if everything or held.until_s <= now_s]
        for held in late:
            self._release(held)

    def _release(self, held: _Held) -> None:
        with self._lock:
            if held not in self._held:
                return  # somebody else was faster
            self._held.remove(held)
        self._send(held.batches)
