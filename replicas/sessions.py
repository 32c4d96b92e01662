"""Token logs of conversations: the exact ids of every turn, and one turn at a time (Pensieve 4.3).

A client sends its history as text. Where the text that a session has stored begins the new text, the stored ids
are used for that part, so that generated ids are never tokenized again and a next turn finds its KV to the token;
otherwise the request's own ids stand, and the prefix forest finds the longest common prefix.

A session that is answering keeps its next turns in order of arrival. Policy only: no tensors.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from mneme.replicas.request import GenerationRequest

SessionKey = tuple[str, str]  # (tenant salt, session id)


@dataclass(slots=True)
class TokenLog:
    """One session. `text` is the rendered text of `ids`, special tokens included."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    last_used_s: float = 0.0
    turn: str = ""  # the turn that is answering now
    answering: set[str] = field(default_factory=set)  # its choices that have not ended, by request id
    queue: deque[GenerationRequest] = field(default_factory=deque)


class Sessions:
    """All token logs of one engine, bounded in number and age; sessions that are answering never expire."""

    def __init__(
        self,
        encode: Callable[[str], list[int]],
        clock: Callable[[], float],
        *,
        ttl_s: float,
        max_sessions: int,
    ) -> None:
        self._encode = encode
        self._clock = clock
        self._ttl_s = ttl_s
        self._max_sessions = max_sessions
        self._log_by_key: OrderedDict[SessionKey, TokenLog] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._log_by_key)

    def begin(self, request: GenerationRequest) -> list[int] | None:
        """The prompt ids to run, or None: an earlier turn is answering and this one is queued behind it."""
        key = _key(request)
        if key is None or self._max_sessions == 0:
            return list(request.prompt_token_ids)
        log = self._log_by_key.setdefault(key, TokenLog())
        if log.answering and log.turn != _turn(request):
            log.queue.append(request)
            return None
        log.turn = _turn(request)
        log.answering.add(request.request_id)
        self._touch(key, log)
        self._expire()
        return self._match(log, request)

    def end(self, request: GenerationRequest, ids: list[int] | None, text: str) -> list[GenerationRequest]:
        """The turn is over; `ids` and `text` are its prompt and answer, None if nothing is to be kept.

        Returns the requests that may `begin` now: the next turn, all its choices.
        """
        key = _key(request)
        log = self._log_by_key.get(key) if key is not None else None
        if key is None or log is None or request.request_id not in log.answering:
            return []
        if ids is not None and request.choice_index == 0:
            log.ids, log.text = ids, text
        log.answering.discard(request.request_id)
        self._touch(key, log)
        return [] if log.answering else _pop_turn(log.queue)

    def cancel_queued(self, request_id: str) -> GenerationRequest | None:
        """Take a queued request out; None if it is not queued."""
        for log in self._log_by_key.values():
            for request in log.queue:
                if request.request_id == request_id:
                    log.queue.remove(request)
                    return request
        return None

    @property
    def num_queued(self) -> int:
        return sum(len(log.queue) for log in self._log_by_key.values())

    def _match(self, log: TokenLog, request: GenerationRequest) -> list[int]:
        text, given = request.prompt_text, list(request.prompt_token_ids)
        if not log.text or text is None or not text.startswith(log.text):
            return given
        rest = text[len(log.text) :]
        resumed = given[len(given) - request.output_offset :]  # output so far, of a request that was moved here
        return log.ids + (self._encode(rest) if rest else []) + resumed

    def _touch(self, key: SessionKey, log: TokenLog) -> None:
        log.last_used_s = self._clock()
        self._log_by_key.move_to_end(key)

    def _expire(self) -> None:
        oldest_s = self._clock() - self._ttl_s
        excess = len(self._log_by_key) - self._max_sessions
        for key, log in list(self._log_by_key.items()):
            if excess <= 0 and log.last_used_s >= oldest_s:
                return
            if not log.answering:
                del self._log_by_key[key]
                excess -= 1


def _key(request: GenerationRequest) -> SessionKey | None:
    return None if request.session_id is None else (request.salt, request.session_id)


def _turn(request: GenerationRequest) -> str:
    """All choices of one HTTP request are one turn; their ids are `<turn>.<choice index>`."""
    return request.request_id.removesuffix(f".{request.choice_index}")


def _pop_turn(queue: deque[GenerationRequest]) -> list[GenerationRequest]:
    turn = [queue.popleft()] if queue else []
    while queue and _turn(queue[0]) == _turn(turn[0]):
        turn.append(queue.popleft())
    return turn
