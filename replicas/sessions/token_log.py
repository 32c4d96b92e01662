"""One conversation's token log: the exact ids of all turns, and marks by which their text is known again.

A mark says that the first `num_chars` characters of the session's rendered text are the first `num_ids` ids, and holds
a digest of those characters instead of the characters: a log costs four bytes a token and a bounded rest, whatever was
said. An answer's text is what its client got: special tokens that were not shown have no characters there. There is a
mark where a prompt ends and where its answer ends, so a client that changes a message is matched up to the message
before.

Policy only: no tensors.
"""

from __future__ import annotations

import hashlib
import os
import struct
from array import array
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from mneme.cachetier.session_log.rows import SessionState
from mneme.replicas.documents import DocumentSpan, shifted
from mneme.replicas.forest.tree import Owner, Root
from mneme.replicas.request import GenerationRequest, SessionKey
from mneme.replicas.text.tool_calls import HISTORY_NOTE

MAX_MARKS = 8  # per log: of more, every second of the older half is dropped
MAX_HITS = 4  # turns whose hits are remembered

_DIGEST_BYTES = 8  # of a hash that nobody outside can compute, so that none can be made to collide
_MARK_KEY_BYTES = 16
_MARK = struct.Struct(f"<II{_DIGEST_BYTES}s")
_MAX_CHARS = 2**32 - 1


class Mark(NamedTuple):
    num_chars: int
    num_ids: int


class RecalledSession(NamedTuple):
    """Says what the durable log of a session has."""

    key: SessionKey
    state: SessionState | None  # as it was written; None: it could not be read in time
    version: int = 0  # with which the session goes on here


class VisibleTokens(NamedTuple):
    """Holds what a truncated or blended conversation goes on from, in the place of all its ids."""

    ids: array[int]
    root: Root | None  # None: its KV is that of these ids, as anybody's
    stored: bytes = b""  # without a root: the event under which the cache tier may have other KV of them

    @property
    def event(self) -> bytes:
        """Name the KV that it goes on from in the cache tier; empty: that is exact."""
        return self.stored if self.root is None else self.root.event


class TurnPrompt(NamedTuple):
    """Says what a turn runs."""

    ids: list[int]  # all that was said
    context: list[int]  # what is seen of it
    root: Root | None  # as in `VisibleTokens`
    num_history: int  # of `context`, what was there before the turn
    documents: tuple[DocumentSpan, ...] = ()  # of `context`, those of this turn
    event: bytes = b""  # as in `VisibleTokens`

    @property
    def is_blended(self) -> bool:
        """Return whether earlier turns reuse documents in place: it sees all that was said, not as anybody would."""
        is_whole = bool(self.event) and len(self.context) == len(self.ids)
        return is_whole or (self.root is not None and self.root.is_blend)


class ClientText(NamedTuple):
    """Holds an answer as its client got it."""

    text: str
    num_ids: int  # of its ids, how many stand for the text: not what closes it, nor a stop string


class FinishedTurn(NamedTuple):
    """Holds what a turn's first choice leaves behind, or has so far where it is forked while it answers."""

    ids: list[int]  # prompt, then output
    num_prompt: int
    num_cached: int  # prompt tokens that it did not compute
    said: ClientText | None  # None: its text is not known
    seen: VisibleTokens | None = None  # what is seen of `ids`; None: all
    num_unseen: int = 0  # prompt tokens that were truncated
    note: bytes = b""  # `history_note` of the answer


@dataclass(slots=True, eq=False)
class RunningTurn:
    """Holds what is known of a session's turn while that is answering, and the turns that wait behind it."""

    name: str  # `turn_name` of its requests
    num_base: int  # ids that the log had when the turn began
    num_marks: int  # marks of the log that the turn's text begins with
    answering: set[str] = field(default_factory=set)  # its choices that have not ended, by request id
    queue: deque[GenerationRequest] = field(default_factory=deque)  # later turns
    is_deleted: bool = False  # nobody may see it, and nothing of it is kept
    least_version: int = 0  # the log is newer once the turn has ended


@dataclass(slots=True, eq=False)
class TokenLog(Owner):
    """Keeps one session; its marks are of the text that the chat template makes of the client's messages."""

    ids: array[int] = field(default_factory=lambda: array("i"))
    marks: bytes = b""
    mark_key: bytes = b""  # of their digests; it goes where the log goes
    hits: bytes = b""  # (prompt, cached) tokens of the last turns, packed
    num_turns: int = 0
    num_base: int = 0  # ids before the last turn
    last_turn: int | None = None  # `root_turn` of the last turn
    last_used_s: float = 0.0
    ttl_s: float | None = None  # its own, where it has one
    version: int = 0  # of the durable log, as of the last record that was made for it
    running: RunningTurn | None = None
    seen: VisibleTokens | None = None  # None: all ids
    note: bytes = b""  # what an API keeps with it; a fork has none
    forked_from: bytes | None = None  # id of the session whose past it began with

    @property
    def is_known(self) -> bool:
        """Return whether there is a conversation: one that failed before its first token, or was deleted, is none."""
        return bool(self.ids) or (self.running is not None and not self.running.is_deleted)

    @property
    def root(self) -> Root | None:
        """Return where it goes on behind what its truncation kept."""
        return None if self.seen is None else self.seen.root

    @property
    def num_kept(self) -> int:
        """Count what it takes in memory, in tokens of four bytes."""
        return len(self.ids) + len(self.note) // 4

    @property
    def num_marks(self) -> int:
        return len(self.marks) // _MARK.size

    def matching_marks(self, text: str) -> list[Mark]:
        """Find the marks whose text `text` begins with, shortest first."""
        hasher = hashlib.blake2b(digest_size=_DIGEST_BYTES, key=self.mark_key)
        position, found = 0, []
        for num_chars, num_ids, digest in _MARK.iter_unpack(self.marks):
            if num_chars > len(text):
                break
            hasher.update(_encoded(text[position:num_chars]))
            position = num_chars
            if hasher.copy().digest() != digest:
                break  # the later ones begin with the same characters
            found.append(Mark(num_chars, num_ids))
        return found

    def marks_up_to(self, num_ids: int) -> int:
        """Count the marks that the first `num_ids` ids begin with."""
        return sum(mark[1] <= num_ids for mark in _MARK.iter_unpack(self.marks))

    def keep(self, turn: FinishedTurn, request: GenerationRequest, num_marks: int) -> None:
        """Take over what a turn leaves, which began with `num_marks` of the marks."""
        marks = self.marks[: num_marks * _MARK.size]
        if not request.append and request.prompt_text is not None and turn.said is not None:
            num_prompt = turn.num_prompt - request.output_offset
            text = request.prompt_text + turn.said.text
            ends = [(len(request.prompt_text), num_prompt), (len(text), num_prompt + turn.said.num_ids)]
            self.mark_key = self.mark_key or os.urandom(_MARK_KEY_BYTES)
            marks += _packed(text, ends, self.mark_key)
        if turn.note or self.note.startswith(HISTORY_NOTE):
            self.note = turn.note
        self.marks = _thinned(marks)
        self.ids, self.seen = array("i", turn.ids), turn.seen
        self.num_turns += 1

    def prompt(self, ids: list[int], documents: tuple[DocumentSpan, ...] = ()) -> TurnPrompt:
        """Return what a turn of these ids sees: if they go on from all of the log, what that saw."""
        num_known = len(self.ids)
        if self.seen is None or array("i", ids[:num_known]) != self.ids:
            return TurnPrompt(ids, ids, None, min(num_known, len(ids)), documents)
        context = [*self.seen.ids, *ids[num_known:]]
        new = shifted([each for each in documents if each.start >= num_known], len(context) - len(ids))
        return TurnPrompt(ids, context, self.seen.root, len(self.seen.ids), new, self.seen.event)

    def add_hit(self, num_prompt: int, num_cached: int) -> None:
        self.hits = (self.hits + struct.pack("<II", num_prompt, num_cached))[-8 * MAX_HITS :]

    def hit_history(self) -> list[tuple[int, int]]:
        """(prompt, cached) tokens of the last turns, the latest last."""
        return [(prompt, cached) for prompt, cached in struct.iter_unpack("<II", self.hits)]

    def forked(self, session_id: str) -> TokenLog:
        """Make a session of its own with the past of this one, which has that id."""
        # Approximate KV stays in its session.
        seen = None if self.seen is None else VisibleTokens(self.seen.ids[:], None)
        return TokenLog(
            ids=self.ids[:],
            marks=self.marks,
            mark_key=self.mark_key,
            hits=self.hits,
            num_turns=self.num_turns,
            ttl_s=self.ttl_s,
            seen=seen,
            forked_from=_encoded(session_id),
        )

    def state(self) -> SessionState:
        """Return what a durable log says of it. Shares the ids, which are replaced and never changed."""
        return SessionState(
            version=self.version,
            ids=self.ids,
            seen_ids=None if self.seen is None or self.seen.ids == self.ids else self.seen.ids,
            marks=self.marks,
            mark_key=self.mark_key,
            hits=self.hits,
            num_turns=self.num_turns,
            num_base=self.num_base,
            last_turn=self.last_turn,
            ttl_s=self.ttl_s,
            event=b"" if self.seen is None else self.seen.event,
            note=self.note,
            forked_from=self.forked_from,
        )

    @staticmethod
    def restored(state: SessionState) -> TokenLog:
        """Make the session of a durable log; if it was truncated or blended, the cache tier may have what it sees."""
        is_exact = state.seen_ids is None and not state.event
        return TokenLog(
            ids=state.ids,
            marks=state.marks,
            mark_key=state.mark_key,
            hits=state.hits,
            num_turns=state.num_turns,
            num_base=state.num_base,
            last_turn=state.last_turn,
            ttl_s=state.ttl_s,
            version=state.version,
            seen=None
            if is_exact
            else VisibleTokens(state.ids if state.seen_ids is None else state.seen_ids, None, state.event),
            note=state.note,
            forked_from=state.forked_from,
        )


def is_usable(state: SessionState, vocab_size: int) -> bool:
    """Return whether a state that was read can be a session: its ids are tokens, its marks in order within them."""
    for ids in (state.ids, state.seen_ids):
        values = np.frombuffer(ids, np.int32) if ids else np.zeros(1, np.int32)
        if not 0 <= values.min() <= values.max() < vocab_size:
            return False
    before = Mark(0, 0)
    for num_chars, num_ids, _ in _MARK.iter_unpack(state.marks):
        if num_chars < before.num_chars or not before.num_ids <= num_ids <= len(state.ids):
            return False
        before = Mark(num_chars, num_ids)
    return True


def turn_name(request: GenerationRequest) -> str:
    """Name the turn of a request: all choices of one HTTP request are one; their ids are `<turn>.<choice index>`."""
    return request.request_id.removesuffix(f".{request.choice_index}")


def root_turn(request: GenerationRequest) -> int:
    """Hash the turn's name without the number of the attempt: alike for a request that was moved or sent again."""
    name = turn_name(request).partition("~")[0].encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little", signed=True)  # names are random


def _packed(text: str, ends: list[tuple[int, int]], key: bytes) -> bytes:
    return b"".join(_MARK.pack(*end, digest) for end, digest in zip(ends, _digests(text, ends, key), strict=False))


def _digests(text: str, ends: list[tuple[int, int]], key: bytes) -> Iterator[bytes]:
    hasher = hashlib.blake2b(digest_size=_DIGEST_BYTES, key=key)
    position = 0
    for num_chars, _ in ends:
        if num_chars > _MAX_CHARS:
            return
        hasher.update(_encoded(text[position:num_chars]))
        position = num_chars
        yield hasher.copy().digest()


def _thinned(marks: bytes) -> bytes:
    """Thin marks out, the older the sparser: an edit of the latest messages is what clients do."""
    if len(marks) <= MAX_MARKS * _MARK.size:
        return marks
    each = [marks[i : i + _MARK.size] for i in range(0, len(marks), _MARK.size)]
    half = len(each) // 2
    return b"".join(each[1:half:2] + each[half:])


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
