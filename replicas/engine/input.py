"""Decides whether an engine takes a request, and makes its sequence; limits what may wait. No tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from mneme.errors import ContextLengthExceeded, InvalidRequest, Overloaded
from mneme.replicas.config import MAX_TIMEOUT_S, EngineConfig
from mneme.replicas.documents import check_spans
from mneme.replicas.drawing import Drawing, TokenCounts
from mneme.replicas.forest.tree import Owner
from mneme.replicas.request import GenerationRequest, SamplingParams
from mneme.replicas.schedule.queue import WaitingQueue
from mneme.replicas.sequence import Sequence
from mneme.replicas.sessions.sessions import TurnQueue
from mneme.replicas.sessions.token_log import TurnPrompt
from mneme.replicas.text.detokenizer import TextStream
from mneme.replicas.text.matcher import Grammars
from mneme.replicas.text.tokenizer import Tokenizer
from mneme.replicas.truncation import MAX_WINDOWS, Immovable, View

MIN_RETRY_S, MAX_RETRY_S = 1.0, 60.0
MAX_WAITING_TOKENS = 2**21  # of queued prompts together: 100 MB, at about 50 bytes for a token id in Python
_HALF_LIFE_S = 10.0  # of what was measured, in seconds in which something waited


def check_request(
    request: GenerationRequest, vocab_size: int, window: int, *, immovable: Immovable | None = None
) -> None:
    """Raise `InvalidRequest` for what no engine of this vocabulary and context window could run.

    immovable  why KV of this model cannot be moved
    """
    _check_token_ids(request, vocab_size)
    request.check_prompt_logprobs()
    check_spans(request.documents, len(request.prompt_token_ids) - request.output_offset)
    _check_truncation(request, window, immovable)
    _check_timeout(request)


def _check_token_ids(request: GenerationRequest, vocab_size: int) -> None:
    params = request.sampling
    if not request.prompt_token_ids:
        raise InvalidRequest("prompt", None, "must have at least one token")
    listed = {
        "prompt": request.prompt_token_ids,
        "logit_bias": tuple(params.logit_bias),
        "stop_token_ids": params.stop_token_ids,
        "allowed_token_ids": params.allowed_token_ids or (),
    }
    for name, values in listed.items():
        if values and not 0 <= min(values) <= max(values) < vocab_size:
            worst = max(values) if min(values) >= 0 else min(values)
            raise InvalidRequest(name, worst, f"token ids are from 0 to {vocab_size - 1}")


def _check_truncation(request: GenerationRequest, window: int, immovable: Immovable | None) -> None:
    if request.truncation is None:
        return
    if request.truncation.strategy == "reuse_kv" and request.session_id is None:
        raise InvalidRequest("truncation.strategy", "reuse_kv", "needs a session")
    request.truncation.check_window(window)
    request.truncation.check_model(immovable)


def _check_timeout(request: GenerationRequest) -> None:
    timeout_s = request.timeout_s
    if timeout_s is not None and not 0 < timeout_s <= MAX_TIMEOUT_S:
        raise InvalidRequest("timeout_s", timeout_s, f"must be over 0 and at most {MAX_TIMEOUT_S:g} seconds")


def make_sequence(
    request: GenerationRequest,
    prompt: TurnPrompt,
    tokenizer: Tokenizer | None,
    *,
    owner: Owner | None,
    capacity: int,
    max_context: int,
    max_new_tokens: int | None,
    arrival: int,
    eos_token_ids: tuple[int, ...],
    grammars: Grammars,
) -> Sequence:
    """Make the sequence of a request; raises as `max_output_tokens` does, and `InvalidRequest`."""
    params, truncation = request.sampling, request.truncation
    max_tokens = max_output_tokens(request, len(prompt.context), capacity, max_context)
    if params.max_tokens is None and max_new_tokens is not None:  # the model's wish: never more than there is room for
        max_tokens = min(max_tokens, max(max_new_tokens - request.output_offset, params.min_tokens, 1))
    sequence = Sequence(
        request=replace(request, documents=prompt.documents) if request.documents else request,
        owner=owner,
        ids=prompt.ids,
        num_prompt=len(prompt.ids),
        max_tokens=max_tokens,
        arrival=arrival,
        context=prompt.context,
        root=prompt.root if _goes_on(request, prompt) else None,
        view=View(
            window=None if truncation is None else capacity,
            num_history=prompt.num_history,
            event=prompt.event if _goes_on(request, prompt) else b"",
        ),
        drawing=Drawing(
            end_token_ids=(*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)),
            min_tokens=params.min_tokens,
            bad_words=_bad_words(params, tokenizer),
            allowed=None if params.allowed_token_ids is None else grammars.mask_of(params.allowed_token_ids),
            stop_text=_stop_stream(request, tokenizer),
        ),
    )
    drawing, output_ids = sequence.drawing, sequence.output_ids
    if params.weighing.repetition_penalty != 1.0:
        drawing.seen = TokenCounts(sequence.ids)
    if params.presence_penalty or params.frequency_penalty:
        drawing.drawn = TokenCounts(output_ids)
    if params.grammar is not None:
        drawing.matcher = grammars.matcher(params.grammar, output_ids, request.num_choices)
    drawing.is_greedy = params.is_greedy
    return sequence


def _goes_on(request: GenerationRequest, prompt: TurnPrompt) -> bool:
    """Whether the turn may go on from KV that is approximate."""
    strategy = None if request.truncation is None else request.truncation.strategy
    if prompt.is_blended:
        return strategy in (None, "reuse_kv") and request.blend.mode != "off"
    return strategy == "reuse_kv"


def max_output_tokens(request: GenerationRequest, num_prompt: int, capacity: int, max_context: int) -> int:
    """Output tokens the request may have; raises `ContextLengthExceeded` if what it asks for can never fit.

    As vLLM: one that asks for more than its prompt leaves of the context window gets what is left, so that a client
    with a fixed limit may use all of the window. `capacity`: tokens of the window or the page pool, what is smaller.
    """
    wanted, room, left = request.sampling.max_tokens, capacity - num_prompt, max_context - num_prompt
    has_room = left >= max(request.sampling.min_tokens, 1)
    if request.truncation is None and has_room and wanted is not None and wanted <= max_context:
        wanted = min(wanted, left)
    if request.truncation is not None and (wanted or 1) <= MAX_WINDOWS * capacity:  # makes room when it is needed
        return wanted or max(room, int(request.truncation.ratio * capacity), 1)
    if room >= 1 and (wanted or 1) <= room:
        return wanted or room
    if request.truncation is not None:
        rule = f"at most {MAX_WINDOWS} windows of {capacity} tokens, however often it is truncated"
        raise ContextLengthExceeded("max_tokens", wanted, rule)
    asked = f"{num_prompt} prompt tokens" + (f" and {wanted} more" if wanted else "")
    rule = f"prompt and output must fit {capacity} tokens together; this asks for {asked}"
    raise ContextLengthExceeded("max_tokens" if room >= 1 else "prompt", None, rule)


def _bad_words(params: SamplingParams, tokenizer: Tokenizer | None) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of bad words, as vLLM: also behind a blank, where that makes another first token of as many."""
    if params.bad_words and tokenizer is None:
        raise InvalidRequest("bad_words", params.bad_words, "needs a tokenizer; this engine has none")
    found = []
    for word in params.bad_words:
        assert tokenizer is not None
        plain, behind = (tuple(tokenizer.encode_continuation(blank + word.lstrip())) for blank in ("", " "))
        found.append(plain)
        if len(behind) == len(plain) and behind[0] != plain[0]:
            found.append(behind)
    return tuple(found)


def _stop_stream(request: GenerationRequest, tokenizer: Tokenizer | None) -> TextStream | None:
    """Make what follows the output to find stop strings; it has read what was emitted before a resumption."""
    params, offset = request.sampling, request.output_offset
    if not params.stop:
        return None
    if tokenizer is None:
        raise InvalidRequest("stop", params.stop, "needs a tokenizer; this engine has none")
    emitted = request.prompt_token_ids[len(request.prompt_token_ids) - offset :]
    stream = TextStream.of(tokenizer, params, min_tokens=params.min_tokens + offset if params.min_tokens else 0)
    stream.push(emitted)
    if stream.stopped:  # in what was emitted under `min_tokens` that are used up: passed over again
        stream = TextStream.of(tokenizer, params, min_tokens=offset)
        stream.push(emitted)
    return stream


class QueueLimits:
    """Judges requests by what waits: for pages, and turns behind their own session."""

    def __init__(
        self, waiting: WaitingQueue, queued: TurnQueue, config: EngineConfig, clock: Callable[[], float]
    ) -> None:
        self._waiting = waiting
        self._queued = queued
        self._max_requests, self.max_tokens = config.max_waiting, MAX_WAITING_TOKENS
        self._rate = DrainRate(clock)
        self.num_refused: Counter[str] = Counter({"requests": 0, "tokens": 0, "session": 0})  # by what was full

    @property
    def num_requests(self) -> int:
        return len(self._waiting) + len(self._queued)

    @property
    def num_tokens(self) -> int:
        """Count tokens of prompts that wait; a queued turn's without the history that it may be appended to."""
        return self._waiting.num_tokens + self._queued.num_tokens

    def has_room(self, request: GenerationRequest) -> bool:
        """Return whether the request may wait too."""
        return self._excess(request) is None

    def check(self, request: GenerationRequest) -> None:
        """Raise `Overloaded` if there is no room for it."""
        excess = self._excess(request)
        if excess is not None:
            raise self.refusal(*excess)

    def refusal(self, full: str, message: str) -> Overloaded:
        """Count one more refused request and make its answer; `full` names what is full."""
        self.num_refused[full] += 1
        return Overloaded(message, retry_after_s=self.drain_s())

    def drain_s(self) -> float:
        """Return in how many seconds what waits will have left the queue, as far as that was measured."""
        return self._rate.drain_s(self.num_tokens)

    def measure_queue(self) -> None:
        """Measure how the queue drains; called when a step begins."""
        self._rate.measure(self._waiting.num_taken_tokens, is_waiting=len(self._waiting) > 0)

    def _excess(self, request: GenerationRequest) -> tuple[str, str] | None:
        if request.output_offset:  # another replica took it, and its client reads the answer
            return None
        if self.num_requests >= self._max_requests:
            return "requests", f"{self._max_requests} requests are waiting"
        # Where nothing waits it is taken whatever its size: else it could never run. So are the other choices of what
        # was taken, which have the same prompt.
        waiting = self.num_tokens
        if not waiting or request.choice_index > 0:
            return None
        if waiting + len(request.prompt_token_ids) > self.max_tokens:
            return "tokens", f"{waiting} prompt tokens are waiting, of at most {self.max_tokens}"
        return None


class DrainRate:
    """Tokens per second that leave the queue while something waits there, recent seconds first."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._tokens = 0.0
        self._waited_s = 0.0
        self._num_taken = 0
        self._noted_s: float | None = None  # None: nothing waited at the last note

    def measure(self, num_taken: int, *, is_waiting: bool) -> None:
        """Measure until now; `num_taken` tokens have ever left the queue."""
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
