"""What is sent, and when: sessions of turns, made of random words or read from a trace. No clock, no network.

Lengths are in words: no tokenizer is needed, and the server's usage says how many tokens they were. The same seed makes
the same texts, so a second run with it finds what the first one left in the server's cache.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from mneme.lab.cache.traces import PacedRequest

_TEXT = (
    "the of and to in is it you that he was for on are with as his they be at one have this from or had by hot but "
    "some what there we can out other were all your when up use word how said an each she which do their time if will "
    "way about many then them would write like so these her long make thing see him two has look more day could go "
    "come did my sound no most number who over know water than call first people may down side been now find any new "
    "work part take get place made live where after back little only round man year came show every good me give our"
)
_WORDS = _TEXT.split()


class Shape(NamedTuple):
    """What sessions of a workload are made of; lengths in words."""

    turns: int = 1
    words: int = 64  # that each turn adds
    prefix_words: int = 0  # of the system message; 0: none
    prefixes: int = 1  # different system messages
    documents: int = 0  # of each turn
    pool: int = 32  # different documents
    document_words: int = 256
    max_tokens: int = 64


SHAPES = {
    "sessions": Shape(turns=5),
    "shared-prefix": Shape(prefix_words=1024, prefixes=4),
    "rag": Shape(words=24, documents=4),
    "agent": Shape(turns=8, words=256, prefix_words=1024, max_tokens=48),
}


class Piece(NamedTuple):
    """A text that is made when it is sent: the same seed and length are the same words."""

    seed: str
    num_words: int
    label: str = ""
    is_document: bool = False

    def text(self) -> str:
        return f"{self.label}{_words(self.seed, self.num_words)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One request: it is due `delay_s` after all that it waits for ended, and not before `at_s`."""

    pieces: tuple[Piece, ...]
    max_tokens: int
    at_s: float = 0.0  # since the run began
    delay_s: float = 0.0
    name: str | None = None
    wait_for: tuple[str, ...] = ()  # names of other sessions' turns, too
    is_whole: bool = False  # has its whole prompt: the session's history is not put before it


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """Turns that are asked one after the other, each behind the history of those before."""

    name: str
    turns: Sequence[Turn]
    system: Piece | None = None


def make_sessions(workload: str, shape: Shape, num_requests: int, seed: int) -> list[Session]:
    """Return sessions of `num_requests` turns in all; the last may be shorter."""
    rng = random.Random(f"{seed} {workload}")
    pool = [Piece(f"{seed} document {index}", shape.document_words, "", True) for index in range(shape.pool)]
    sessions: list[Session] = []
    for first in range(0, num_requests, shape.turns):
        name = f"{workload}-{seed}-{len(sessions)}"
        system = Piece(f"{seed} prefix {rng.randrange(shape.prefixes)}", shape.prefix_words)
        turns = []
        for number in range(min(shape.turns, num_requests - first)):
            is_result = workload == "agent" and number > 0
            # Results of tools are of all lengths: exponential, of the same mean.
            num_words = max(round(rng.expovariate(1 / shape.words)), 1) if is_result else shape.words
            said = Piece(f"{name} {number}", num_words, f"Result of tool call {number}: " if is_result else "")
            turns.append(Turn(pieces=(*rng.sample(pool, shape.documents), said), max_tokens=shape.max_tokens))
        sessions.append(Session(name=name, turns=turns, system=system if shape.prefix_words else None))
    return sessions


def arrive(sessions: Sequence[Session], requests_per_s: float, think_s: float, seed: int) -> list[Session]:
    """Let sessions begin by Poisson, so often that their turns come to `requests_per_s`; think before later turns."""
    rng = random.Random(f"{seed} arrivals")
    per_s = requests_per_s * len(sessions) / max(sum(len(session.turns) for session in sessions), 1)
    times_s = itertools.accumulate(rng.expovariate(per_s) for _ in sessions)
    thoughtful = (think(session, think_s, rng, first=1) for session in sessions)
    return [
        replace(session, turns=[replace(session.turns[0], at_s=at_s), *session.turns[1:]])
        for session, at_s in zip(thoughtful, times_s, strict=True)
    ]


def think(session: Session, think_s: float, rng: random.Random, *, first: int = 0) -> Session:
    """Let the turns from `first` on wait for times with an exponential distribution and this mean."""
    delays_s = (rng.expovariate(1 / think_s) if think_s and i >= first else 0.0 for i in range(len(session.turns)))
    turns = [replace(turn, delay_s=delay_s) for turn, delay_s in zip(session.turns, delays_s, strict=True)]
    return replace(session, turns=turns)


def sessions_of_trace(requests: Sequence[PacedRequest], words_per_token: float, seed: int) -> list[Session]:
    """Return a trace's sessions; a request without a session is one of its own.

    A request that names its blocks has all of its prompt in them: equal blocks are equal words. One that does not adds
    words to its session's history.
    """
    turns_by_session: dict[str, list[Turn]] = {}
    for index, asked in enumerate(requests):
        turn = Turn(
            pieces=tuple(_pieces(asked, f"{seed} line {index}", f"{seed} block", words_per_token)),
            max_tokens=max(asked.output_tokens, 1), at_s=asked.at_s or 0.0, delay_s=asked.delay_s,
            name=asked.request_id, wait_for=asked.wait_for, is_whole=asked.block_ids is not None,
        )  # fmt: skip
        name = f"request-{index}" if asked.session_id is None else f"session-{asked.session_id}"
        turns_by_session.setdefault(name, []).append(turn)
    return [Session(name=name, turns=turns) for name, turns in turns_by_session.items()]


def _pieces(asked: PacedRequest, own: str, block: str, words_per_token: float) -> Iterator[Piece]:
    if asked.block_ids is None:
        yield Piece(own, max(round(asked.input_tokens * words_per_token), 1))
        return
    left = asked.input_tokens
    for block_id in asked.block_ids:
        yield Piece(f"{block} {block_id}", max(round(min(left, asked.block_tokens) * words_per_token), 1))
        left -= asked.block_tokens


def content(turn: Turn, documents: Literal["parts", "text"] = "parts") -> str | list[dict[str, Any]]:
    """Return a message's content; with `parts` documents are `{"type": "document"}`, which not every server takes."""
    if documents == "text" or not any(piece.is_document for piece in turn.pieces):
        return "\n".join(piece.text() for piece in turn.pieces)
    kinds = {True: "document", False: "text"}
    return [{"type": kinds[piece.is_document], "text": piece.text()} for piece in turn.pieces]


@lru_cache(maxsize=4096)
def _words(seed: str, count: int) -> str:
    return " ".join(random.Random(seed).choices(_WORDS, k=count))
