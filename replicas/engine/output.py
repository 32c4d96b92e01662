"""The events of an engine until they are taken, and the counts of what they said. Policy only: no tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from mneme.errors import MnemeError
from mneme.replicas.engine.explanations import Explanations
from mneme.replicas.request import TokenEvent
from mneme.replicas.sequence import Chunk, Sequence


class Outbox:
    """Turns what is new of a sequence into an event."""

    def __init__(self, on_end: Callable[[str], None], clock: Callable[[], float]) -> None:
        self._on_end = on_end  # told of every request that has ended
        self._clock = clock
        self._events: list[TokenEvent] = []
        self.num_tokens: Counter[str] = Counter()  # "prompt", "cached", "generated", and as `kv_details`
        self.num_finished: Counter[str] = Counter()  # by finish_reason
        self.explanations = Explanations()

    def __bool__(self) -> bool:
        return bool(self._events)

    def take(self) -> list[TokenEvent]:
        events, self._events = self._events, []
        return events

    def note_begun(self, chunks: Iterable[Chunk]) -> None:
        """These have rows in the step that begins."""
        begun = [chunk.sequence for chunk in chunks if chunk.sequence.begun_s is None]
        if begun:
            now_s = self._clock()
            for sequence in begun:
                sequence.begun_s = now_s

    def report(
        self, sequence: Sequence, finish_reason: str | None = None, error: str | MnemeError | None = None
    ) -> None:
        """Its output since the last report and, the first time, its prompt's usage."""
        fresh = sequence.ids[sequence.num_prompt + sequence.num_reported :]
        usage = sequence.take_usage()
        if usage is not None and sequence.begun_s is not None:
            request = sequence.request
            usage = usage._replace(
                queue_s=sequence.begun_s - request.taken_s, prefill_s=self._clock() - sequence.begun_s
            )
        is_counted = not sequence.request.is_warm_up
        if usage is not None and sequence.was_admitted and is_counted:
            self.num_tokens.update(prompt=usage.prompt_tokens, cached=usage.cached_tokens, **usage.kv_details())
            self.explanations.note(sequence, usage)
        logprobs = tuple(sequence.logprobs) if sequence.request.sampling.logprobs is not None else None
        sequence.logprobs.clear()
        sequence.num_reported += len(fresh)
        request_id = sequence.request.request_id
        self.num_tokens["generated"] += len(fresh) * is_counted
        if finish_reason is not None:
            self.num_finished[finish_reason] += is_counted
            self._on_end(request_id)
        refusal = error if isinstance(error, MnemeError) else None
        message = None if error is None else str(error)
        self._events.append(TokenEvent(request_id, tuple(fresh), finish_reason, logprobs, usage, message, refusal))

    def report_unstarted(self, request_id: str, reason: str, refusal: MnemeError | None = None) -> None:
        """A request that waited for its session ends without having run; "error" without a refusal is our own fault."""
        self._on_end(request_id)
        error = str(refusal or "the engine could not take the request") if reason == "error" else None
        self._events.append(TokenEvent(request_id, (), reason, None, None, error, refusal))
