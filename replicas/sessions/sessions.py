"""The token logs of an engine's conversations, and one turn at a time (Pensieve 4.3).

A client sends its history as text, or only what is new (`append`). Text is matched mark by mark (`token_log.py`): the
stored ids are used up to the last mark that the text agrees with, so that generated ids are never tokenized again and
a next turn finds its KV to the token. Behind that, or where nothing agrees, the request's own ids stand, and the prefix
forest finds the longest common prefix.

A session that is answering keeps its next turns in order of arrival. Policy only: no tensors.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from itertools import islice

from mneme.cachetier.session_log.rows import SessionState
from mneme.errors import InvalidRequest, Overloaded, ReplicaUnavailable, SessionNotFound
from mneme.primitives import LazyHeap
from mneme.replicas.documents import shifted
from mneme.replicas.request import GenerationRequest, SessionKey, session_key
from mneme.replicas.sessions.durable import SessionLogWriter
from mneme.replicas.sessions.token_log import (
    FinishedTurn,
    Mark,
    RecalledSession,
    RunningTurn,
    TokenLog,
    TurnPrompt,
    VisibleTokens,
    root_turn,
    turn_name,
)
from mneme.replicas.text.tool_calls import is_known

MAX_TOKENS = 16_000_000  # in all token logs together: 64 MB
MAX_QUEUED_PER_SESSION = 64  # so that one session cannot fill the engine's queue

_MAX_SEAMS = 3  # marks tried from the end: each costs tokenizing the text behind it

Ids = list[int]


class Sessions:
    """Keeps the token logs of one engine, bounded in number, tokens and age; busy sessions never expire."""

    def __init__(
        self,
        encode: Callable[[str], list[int]],
        clock: Callable[[], float],
        *,
        ttl_s: float,
        max_sessions: int,
        max_tokens: int = MAX_TOKENS,
        end_token_ids: Collection[int] = (),
        decode: Callable[[list[int]], str] | None = None,
        on_drop: Callable[[TokenLog], None] = lambda log: None,
        on_delete: Callable[[SessionKey, TokenLog], None] = lambda key, log: None,
        log_writer: SessionLogWriter | None = None,
    ) -> None:
        """`decode` gives the text of ids, special tokens included; without it a log is known up to its last mark."""
        self._encode, self._decode = encode, decode
        self._end_token_ids = frozenset(end_token_ids)
        self._clock = clock
        self._ttl_s = ttl_s
        self._max_sessions = max_sessions
        self._max_tokens = max_tokens
        self._on_drop = on_drop  # told of every session that is forgotten
        self._on_delete = on_delete  # told before that of those whose owner wants nothing kept, and of their last turn
        self._log_writer = log_writer
        self.num_tokens = 0  # in all logs, and in what is noted with them (`TokenLog.num_kept`)
        self._log_by_key: OrderedDict[SessionKey, TokenLog] = OrderedDict()  # least recently used first
        self.queued = TurnQueue()
        self._deadlines = LazyHeap[SessionKey]()  # of logs with a time of their own

    def __len__(self) -> int:
        return len(self._log_by_key)

    def get(self, key: SessionKey) -> TokenLog | None:
        """Return the session as it is known to its client."""
        self.expire()
        log = self._log_by_key.get(key)
        return log if log is not None and log.is_known else None

    def recent(self, is_meant: Callable[[SessionKey], bool], limit: int) -> list[SessionKey]:
        """Return the keys of sessions that their clients know, those used last first."""
        self.expire()
        known = (key for key, log in reversed(self._log_by_key.items()) if log.is_known and is_meant(key))
        return list(islice(known, limit))

    def owner_of(self, request: GenerationRequest) -> TokenLog | None:
        """Return the session that a request which began is part of."""
        key = session_key(request)
        return None if key is None else self._log_by_key.get(key)

    def begin(self, request: GenerationRequest) -> TurnPrompt | None:
        """Return what to run, or None: an earlier turn is answering and this one is queued behind it.

        Raises `Overloaded` if too many turns wait already, `SessionNotFound` if there is nothing to append to, and
        `ReplicaUnavailable` if a turn that was resumed here began behind more than is known here.
        """
        key = session_key(request)
        if key is None or self._max_sessions == 0:
            return _without_session(request)
        self.expire()
        log = self._log_by_key.get(key) or TokenLog()
        running, turn = log.running, turn_name(request)
        if running is not None and running.answering and running.name != turn:
            self.queued.put(log, running, request)
            return None
        is_again = root_turn(request) == log.last_turn  # its replica's stream broke, and it was sent again
        is_resumed = request.output_offset > 0
        if request.append and not log.ids and not is_resumed:
            raise _not_found(key)
        num_base = log.num_base if is_again else len(log.ids)
        ids, num_marks, num_chars = self._ids(log, request, num_base)
        if request.append and is_resumed and not is_again and len(ids) - request.output_offset != request.num_prompt:
            raise ReplicaUnavailable("what is left of the session's log is older than the turn that was lost")
        if running is None:
            running = log.running = RunningTurn(turn, num_base, num_marks)
        running.name, running.num_base, running.num_marks = turn, num_base, num_marks
        running.answering.add(request.request_id)
        self._log_by_key[key] = log
        self._touch(key, log, request.session_ttl_s)
        if self._log_writer is not None and request.choice_index == 0:
            self._log_writer.began(key, log, running, request)
        new = [each for each in request.documents if each.char_start >= num_chars]
        return log.prompt(ids, shifted(new, len(ids) - len(request.prompt_token_ids)))

    def end(self, request: GenerationRequest, turn: FinishedTurn | None) -> list[GenerationRequest]:
        """End a request; `turn` is None if nothing of it is to be kept.

        Returns the next turn's requests, if this ended its turn: each must `begin` now, and `end` if it cannot run.
        """
        key = session_key(request)
        log = self._log_by_key.get(key) if key is not None else None
        running = log.running if log is not None else None
        if key is None or log is None or running is None or request.request_id not in running.answering:
            return []
        if turn is not None and request.choice_index == 0 and not running.is_deleted:
            before = log.state()
            self.num_tokens += len(turn.ids) - len(log.ids)
            log.keep(turn, request, running.num_marks)
            log.add_hit(turn.num_prompt - turn.num_unseen, turn.num_cached)
            log.num_base, log.last_turn = running.num_base, root_turn(request)
            if self._log_writer is not None:
                self._log_writer.ended(key, log, before)
        running.answering.discard(request.request_id)
        self._touch(key, log)
        return [] if running.answering else self._next_turn(key, log, running)

    def delete(self, key: SessionKey, *, is_elsewhere: bool = False) -> bool:
        """Forget a session; returns whether there was one.

        A turn that is answering goes on, and is not kept; turns that wait behind it find no history.

        is_elsewhere  it goes on on another replica: only what is here is forgotten
        """
        log = self.get(key)
        if log is None:
            return False
        if self._log_writer is not None and not is_elsewhere:
            self._log_writer.deleted(key, log)
        self._on_delete(key, log)
        self._forget_ids(log)
        if log.running is None:
            self._drop(key, log)
        else:
            log.running.is_deleted = True  # dropped when its turn ends
        return True

    def delete_salts(self, is_meant: Callable[[str], bool]) -> None:
        for key in [key for key in self._log_by_key if is_meant(key[0])]:
            self.delete(key)

    def fork(self, key: SessionKey, new_key: SessionKey, so_far: tuple[FinishedTurn, GenerationRequest] | None) -> None:
        """Make a new session with the past of another and, where that is answering, what its turn has so far.

        Raises `SessionNotFound`, `InvalidRequest` if the new one exists, or `ReplicaUnavailable` if nothing is known of
        its first turn yet.
        """
        log = self.get(key)
        if log is None:
            raise _not_found(key)
        existing = self._log_by_key.get(new_key) or TokenLog()
        if existing.ids or existing.running is not None:
            raise InvalidRequest("session_id", _name(new_key), "a session of this name exists")
        forked = log.forked(key[1])
        forked.version = existing.version
        if so_far is not None and log.running is not None:
            turn, asked = so_far
            seen = None if turn.seen is None else VisibleTokens(turn.seen.ids, None)
            forked.keep(turn._replace(seen=seen), asked, log.running.num_marks)
        if not forked.ids:
            raise ReplicaUnavailable("nothing was said in the session yet")
        self._add(new_key, forked)
        if self._log_writer is not None:
            self._log_writer.forked(new_key, forked)
        self.expire()

    def set_note(self, key: SessionKey, note: bytes) -> bool:
        """Keep an API's bytes with a session that is idle, in its log too; whether there is such a session."""
        log = self.get(key)
        if log is None or log.running is not None:
            return False
        before, num_before = log.state(), log.num_kept
        log.note = note
        self.num_tokens += log.num_kept - num_before
        self._touch(key, log)
        if self._log_writer is not None:
            self._log_writer.noted(key, log, before)
        self.expire()
        return True

    def version_of(self, key: SessionKey) -> int:
        """Return the version of a session's durable log, as far as it is known here; 0: not at all. From any thread."""
        return 0 if (log := self._log_by_key.get(key)) is None else log.version

    def restore(self, key: SessionKey, state: SessionState, version: int) -> None:
        """Restore a session as its durable log has it, unless this one is newer or busy; it goes on as `version`.

        One that was deleted is restored as nothing, so that what is written of the next of its name is newer.
        """
        log = self._log_by_key.get(key)
        if self._max_sessions == 0 or (log is not None and (log.running is not None or log.version >= state.version)):
            return
        if log is not None:
            self._drop(key, log)
        self._add(key, TokenLog.restored(state._replace(version=version)))

    def restore_all(self, recalled: Iterable[RecalledSession]) -> frozenset[SessionKey]:
        """Restore what durable logs have; returns sessions of which nothing is known, and whose logs were not read."""
        unread: list[SessionKey] = []
        for key, state, version in recalled:
            if state is not None:
                self.restore(key, state, version)
            elif self.get(key) is None:
                unread.append(key)
        return frozenset(unread)

    def expire(self) -> None:
        """Drop idle sessions that are too old, and the least recently used while there is too much of them."""
        now = self._clock()
        self._expire_own(now)
        for _ in range(len(self._log_by_key)):
            key, log = next(iter(self._log_by_key.items()))
            too_many = len(self._log_by_key) > self._max_sessions or self.num_tokens > self._max_tokens
            if not too_many and log.last_used_s >= now - self._ttl_s:
                return
            if log.running is not None:
                self._log_by_key.move_to_end(key)
            else:
                self._drop(key, log)

    def expires_in_s(self, log: TokenLog) -> float:
        """Return for how many seconds the session will be kept if nobody uses it and there is room."""
        ttl_s = self._ttl_s if log.ttl_s is None else min(log.ttl_s, self._ttl_s)
        return max(log.last_used_s + ttl_s - self._clock(), 0.0)

    def idle_s(self, log: TokenLog) -> float:
        """Return the seconds since the session was used; 0 while it answers."""
        return 0.0 if log.running is not None else self._clock() - log.last_used_s

    def _expire_own(self, now: float) -> None:
        for key in self._deadlines.pop_below(now):
            log = self._log_by_key[key]
            assert log.ttl_s is not None, "it stands in the heap"
            due_s = log.ttl_s + (log.last_used_s if log.running is None else now)
            if due_s < now:
                self._drop(key, log)
            else:
                self._deadlines.push(key, due_s)

    def _next_turn(self, key: SessionKey, log: TokenLog, ended: RunningTurn) -> list[GenerationRequest]:
        log.running = None
        if ended.is_deleted:
            self._on_delete(key, log)
        if not ended.queue:
            if not log.ids:
                self._drop(key, log)
            return []
        log.running = RunningTurn(ended.name, 0, 0, queue=ended.queue)
        return self.queued.start_turn(log.running)

    def _add(self, key: SessionKey, log: TokenLog) -> None:
        """Add a session that has a past."""
        self._log_by_key[key] = log
        self.num_tokens += log.num_kept
        self._touch(key, log)

    def _touch(self, key: SessionKey, log: TokenLog, ttl_s: float | None = None) -> None:
        log.last_used_s = self._clock()
        self._log_by_key.move_to_end(key)
        is_shorter = ttl_s is not None and (log.ttl_s is None or ttl_s < log.ttl_s)
        log.ttl_s = log.ttl_s if ttl_s is None else ttl_s
        if log.ttl_s is not None and (is_shorter or key not in self._deadlines):  # else its entry is early enough
            self._deadlines.push(key, log.last_used_s + log.ttl_s)

    def _drop(self, key: SessionKey, log: TokenLog) -> None:
        del self._log_by_key[key]
        self._deadlines.discard(key)
        self.num_tokens -= log.num_kept
        self._on_drop(log)

    def _forget_ids(self, log: TokenLog) -> None:
        self.num_tokens -= log.num_kept
        log.ids, log.marks, log.hits, log.seen, log.note = array("i"), b"", b"", None, b""
        log.num_turns, log.num_base, log.last_turn = 0, 0, None

    def _ids(self, log: TokenLog, request: GenerationRequest, num_base: int) -> tuple[list[int], int, int]:
        """Return the ids to run, how many of the log's marks they begin with, and how much of the text the log has.

        As many of the log's exact ids as the text agrees with, then its own; appended ids follow the first `num_base`.
        """
        given = request.prompt_token_ids
        own = list(given[: len(given) - request.output_offset])
        resumed = list(given[len(own) :])  # output so far, of a request that was moved here
        if request.append:
            ids = [*log.ids[:num_base], *self._continuation(log, request, own, num_base)]
            return [*ids, *resumed], log.marks_up_to(num_base), 0
        history = request.history
        if history is not None and num_base == len(log.ids) and is_known(log.note, history):
            new = replace(request, prompt_text=history.text, num_closing_chars=history.num_closing_chars)
            ids = [*log.ids, *self._continuation(log, new, own, num_base)]
            return [*ids, *resumed], len(log.matching_marks(request.prompt_text or "")), 0
        ids, num_marks, num_chars = self._matched(log, request, own)
        return [*ids, *resumed], num_marks, num_chars

    def _matched(self, log: TokenLog, request: GenerationRequest, own: list[int]) -> tuple[list[int], int, int]:
        """Return the log's ids up to the last mark that the text agrees with and goes on from, or the request's own."""
        text = request.prompt_text
        if text is None:
            return own, 0, 0
        marks = log.matching_marks(text)
        num_known = len(marks)
        marks += self._end(log, text, marks)
        for num_marks in range(len(marks), max(len(marks) - _MAX_SEAMS, 0), -1):
            num_chars, num_ids = marks[num_marks - 1]
            rest = self._behind(request, own, num_chars)
            if rest is None:
                continue
            # Behind the whole log the stored ids always stand. Elsewhere the text goes on otherwise than it did, maybe
            # in the middle of a word: then only where its own tokens have a seam too.
            if num_ids == len(log.ids) or own[len(own) - len(rest) :] == rest:
                return [*log.ids[:num_ids], *rest], min(num_marks, num_known), num_chars
        return own, 0, 0

    def _behind(self, request: GenerationRequest, own: list[int], num_chars: int) -> list[int] | None:
        """Return the ids of the text behind so many characters, its documents' as they are; None: it begins in one."""
        text = request.prompt_text or ""
        document = next((each for each in request.documents if each.char_end > num_chars), None)
        if document is not None and document.char_start < num_chars:
            return None
        rest = text[num_chars : document and document.char_start]
        return [*(self._encode(rest) if rest else []), *(own[document.start :] if document else [])]

    def _end(self, log: TokenLog, text: str, marks: list[Mark]) -> list[Mark]:
        """Return the end of the log, if the text agrees up to there with what was appended behind the last mark."""
        num_chars, num_ids = marks[-1] if marks else Mark(0, 0)
        if self._decode is None or num_ids == len(log.ids) or len(marks) < log.num_marks:
            return []
        appended = self._decode(log.ids[num_ids:].tolist())
        return [Mark(num_chars + len(appended), len(log.ids))] if text.startswith(appended, num_chars) else []

    def _continuation(self, log: TokenLog, request: GenerationRequest, own: list[int], num_base: int) -> list[int]:
        """Return the ids of what is appended, without those that close an answer and that the log has already."""
        text = request.prompt_text
        if text is None:
            return own
        closing = self._encode(text[: request.num_closing_chars]) if request.num_closing_chars else []
        rest = self._behind(request, own, request.num_closing_chars)
        return closing[self._num_closed(log.ids[:num_base].tolist(), closing) :] + (rest or [])

    def _num_closed(self, ids: list[int], closing: list[int]) -> int:
        """Count the closing ids that the answer has itself: up to the model's end of turn, or what it wrote."""
        if ids[-1] in self._end_token_ids and ids[-1] in closing:
            return closing.index(ids[-1]) + 1
        return next((n for n in range(len(closing), 0, -1) if ids[-n:] == closing[:n]), 0)


def _name(key: SessionKey) -> str:
    """Return the session's id as its client calls it: without the tenant."""
    return key[1].partition(":")[2]


def _not_found(key: SessionKey) -> SessionNotFound:
    return SessionNotFound("session_id", _name(key))


def _without_session(request: GenerationRequest) -> TurnPrompt:
    if request.append:
        raise SessionNotFound("session_id", None)
    ids = list(request.prompt_token_ids)
    return TurnPrompt(ids, ids, None, 0, request.documents)


class TurnQueue:
    """Finds the turns that wait for an earlier turn of their session; the queues themselves are in the token logs."""

    def __init__(self) -> None:
        self._log_by_request: dict[str, TokenLog] = {}
        self.num_tokens = 0  # of their prompts

    def __len__(self) -> int:
        return len(self._log_by_request)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._log_by_request

    @property
    def request_ids(self) -> list[str]:
        return list(self._log_by_request)

    @property
    def logs(self) -> list[TokenLog]:
        """Return each session behind whose turn something waits, once."""
        return list({id(log): log for log in self._log_by_request.values()}.values())

    def put(self, log: TokenLog, running: RunningTurn, request: GenerationRequest) -> None:
        """Let a request wait behind the log's turn that is answering; raises `Overloaded` if too many do."""
        if len(running.queue) >= MAX_QUEUED_PER_SESSION:
            raise Overloaded(f"{MAX_QUEUED_PER_SESSION} requests of this session are waiting")
        running.queue.append(request)
        self.num_tokens += len(request.prompt_token_ids)
        self._log_by_request[request.request_id] = log

    def cancel(self, request_id: str) -> GenerationRequest | None:
        """Take a request out; None if it does not wait."""
        log = self._log_by_request.pop(request_id, None)
        if log is None or log.running is None:
            return None
        queue = log.running.queue
        request = next(request for request in queue if request.request_id == request_id)
        queue.remove(request)
        self.num_tokens -= len(request.prompt_token_ids)
        return request

    def start_turn(self, running: RunningTurn) -> list[GenerationRequest]:
        """Return the requests of the next turn behind this one, which are answering from now on."""
        running.name = turn_name(running.queue[0])
        turn: list[GenerationRequest] = []
        while running.queue and turn_name(running.queue[0]) == running.name:
            request = running.queue.popleft()
            del self._log_by_request[request.request_id]
            self.num_tokens -= len(request.prompt_token_ids)
            running.answering.add(request.request_id)  # all of them now: the turn ends with its last choice
            turn.append(request)
        return turn
