"""Token logs of conversations: the exact ids of every turn, and one turn at a time (Pensieve 4.3).

A client sends its history as text. Where the text that a session has stored begins the new text, the stored ids
are used for that part, so that generated ids are never tokenized again and a next turn finds its KV to the token;
otherwise the request's own ids stand, and the prefix forest finds the longest common prefix.

A session that is answering keeps its next turns in order of arrival. Policy only: no tensors.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from mneme.errors import Overloaded
from mneme.replicas.request import GenerationRequest

SessionKey = tuple[str, str]  # (tenant salt, session id)

MAX_QUEUED_PER_SESSION = 64  # so that one session cannot fill the engine's queue


@dataclass(slots=True)
class TokenLog:
    """One session. `text` is the rendered text of `ids`, special tokens included."""

    text: str = ""
    ids: array[int] = field(default_factory=lambda: array("i"))
    last_used_s: float = 0.0
    turn: str = ""  # the turn that is answering now
    answering: set[str] = field(default_factory=set)  # its choices that have not ended, by request id
    queue: deque[GenerationRequest] = field(default_factory=deque)

    @property
    def is_busy(self) -> bool:
        return bool(self.answering or self.queue)


class Sessions:
    """All token logs of one engine, bounded in number, tokens and age; busy sessions never expire."""

    def __init__(
        self,
        encode: Callable[[str], list[int]],
        clock: Callable[[], float],
        *,
        ttl_s: float,
        max_sessions: int,
        max_tokens: int,
    ) -> None:
        self._encode = encode
        self._clock = clock
        self._ttl_s = ttl_s
        self._max_sessions = max_sessions
        self._max_tokens = max_tokens
        self._num_tokens = 0  # in all logs
        self._log_by_key: OrderedDict[SessionKey, TokenLog] = OrderedDict()  # least recently used first
        self._queued: dict[str, TokenLog] = {}  # by request id

    def __len__(self) -> int:
        return len(self._log_by_key)

    @property
    def queued_ids(self) -> list[str]:
        """Requests that wait for an earlier turn."""
        return list(self._queued)

    @property
    def num_queued(self) -> int:
        return len(self._queued)

    def is_queued(self, request_id: str) -> bool:
        return request_id in self._queued

    def begin(self, request: GenerationRequest) -> list[int] | None:
        """The prompt ids to run, or None: an earlier turn is answering and this one is queued behind it.

        Raises `Overloaded` if too many turns wait already.
        """
        key = _key(request)
        if key is None or self._max_sessions == 0:
            return list(request.prompt_token_ids)
        self.expire()
        log = self._log_by_key.setdefault(key, TokenLog())
        if log.answering and log.turn != _turn(request):
            if len(log.queue) >= MAX_QUEUED_PER_SESSION:
                raise Overloaded(f"{MAX_QUEUED_PER_SESSION} requests of this session are waiting")
            log.queue.append(request)
            self._queued[request.request_id] = log
            return None
        ids = self._match(log, request)
        log.turn = _turn(request)
        log.answering.add(request.request_id)
        self._touch(key, log)
        return ids

    def end(self, request: GenerationRequest, ids: list[int] | None, text: str) -> list[GenerationRequest]:
        """The request is over; `ids` and `text` are its prompt and answer, None if nothing is to be kept.

        Returns the next turn's requests, if this ended its turn: each must `begin` now, and `end` if it cannot run.
        """
        key = _key(request)
        log = self._log_by_key.get(key) if key is not None else None
        if key is None or log is None or request.request_id not in log.answering:
            return []
        if ids is not None and request.choice_index == 0:
            self._num_tokens += len(ids) - len(log.ids)
            log.ids, log.text = array("i", ids), text
        log.answering.discard(request.request_id)
        self._touch(key, log)
        return [] if log.answering else self._next_turn(log)

    def cancel_queued(self, request_id: str) -> GenerationRequest | None:
        """Take a queued request out; None if it is not queued."""
        log = self._queued.pop(request_id, None)
        if log is None:
            return None
        request = next(request for request in log.queue if request.request_id == request_id)
        log.queue.remove(request)
        return request

    def expire(self) -> None:
        """Drop idle sessions that are too old, and the least recently used while there is too much of them."""
        oldest_s = self._clock() - self._ttl_s
        for _ in range(len(self._log_by_key)):
            key, log = next(iter(self._log_by_key.items()))
            too_many = len(self._log_by_key) > self._max_sessions or self._num_tokens > self._max_tokens
            if not too_many and log.last_used_s >= oldest_s:
                return
            if log.is_busy:
                self._log_by_key.move_to_end(key)
            else:
                del self._log_by_key[key]
                self._num_tokens -= len(log.ids)

    def _match(self, log: TokenLog, request: GenerationRequest) -> list[int]:
        text, given = request.prompt_text, list(request.prompt_token_ids)
        if not log.text or text is None or not text.startswith(log.text):
            return given
        rest = text[len(log.text) :]
        resumed = given[len(given) - request.output_offset :]  # output so far, of a request that was moved here
        return log.ids.tolist() + (self._encode(rest) if rest else []) + resumed

    def _touch(self, key: SessionKey, log: TokenLog) -> None:
        log.last_used_s = self._clock()
        self._log_by_key.move_to_end(key)

    def _next_turn(self, log: TokenLog) -> list[GenerationRequest]:
        turn: list[GenerationRequest] = []
        while log.queue and (not turn or _turn(log.queue[0]) == log.turn):
            request = log.queue.popleft()
            del self._queued[request.request_id]
            log.turn = _turn(request)
            log.answering.add(request.request_id)  # all of them now: the turn ends with its last choice
            turn.append(request)
        return turn


def _key(request: GenerationRequest) -> SessionKey | None:
    return None if request.session_id is None else (request.salt, request.session_id)


def _turn(request: GenerationRequest) -> str:
    """All choices of one HTTP request are one turn; their ids are `<turn>.<choice index>`."""
    return request.request_id.removesuffix(f".{request.choice_index}")
