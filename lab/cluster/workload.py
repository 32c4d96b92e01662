"""What clients ask of a simulated cluster: turns of sessions, each due at its time and when the one before has ended.

A trace says when requests came, not which were one conversation's. Where it names no sessions they are found: a request
that begins with all full blocks of an earlier one is its next turn. Played at another speed or against a slow cluster,
no turn comes before the answer that it follows.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mneme.lab.cache.synthetic import made_trace
from mneme.lab.cache.traces import BLOCK_TOKENS, PacedRequest, filled, read_paced_trace

_JITTER_S = 60.0  # by which the copies of a trace are apart at most


@dataclass(slots=True, eq=False)
class Turn:
    """One request of a client. `at_s`: not before; `after`: nor before all of these ended, and so long behind them."""

    at_s: float
    block_ids: list[int]
    input_tokens: int
    output_tokens: int
    block_tokens: int
    session: int
    after: tuple[Turn, ...] = ()
    delay_s: float = 0.0


def read_workload(name: str, block_tokens: int | None) -> list[Turn]:
    """Read a trace's file, or make the one that `synthetic[:KEY=VALUE,...]` says. Raises `ConfigError`."""
    made = made_trace(name, block_tokens or BLOCK_TOKENS)
    return turns_of(
        read_paced_trace(Path(name), block_tokens) if made is None else (PacedRequest(*each) for each in made)
    )


def turns_of(trace: Iterable[PacedRequest]) -> list[Turn]:
    """Return a trace's turns, by time, its blocks numbered from 0; in one that names no sessions they are found."""
    requests = filled([*trace])
    has_sessions = any(asked.session_id is not None or asked.wait_for for asked in requests)
    turns = _told(requests) if has_sessions else _found(requests)
    numbers: dict[int, int] = {}
    for turn in turns:
        turn.block_ids = [numbers.setdefault(block_id, len(numbers)) for block_id in turn.block_ids]
    return sorted(turns, key=lambda turn: turn.at_s)


def _told(requests: Iterable[PacedRequest]) -> list[Turn]:
    turns: list[Turn] = []
    turn_by_request: dict[str, Turn] = {}
    last_by_session: dict[str, Turn] = {}
    for number, asked in enumerate(requests):
        before = None if asked.session_id is None else last_by_session.get(asked.session_id)
        after = [turn_by_request[name] for name in asked.wait_for] + ([] if before is None else [before])
        session = number if before is None else before.session
        turn = _turn(asked, session, tuple(dict.fromkeys(after)))
        if asked.request_id is not None:
            turn_by_request[asked.request_id] = turn
        if asked.session_id is not None:
            last_by_session[asked.session_id] = turn
        turns.append(turn)
    return turns


def _found(requests: Iterable[PacedRequest]) -> list[Turn]:
    turns: list[Turn] = []
    last_by_session: dict[int, Turn] = {}
    owner_by_block: dict[int, int] = {}  # the session that brought it
    for number, asked in enumerate(requests):
        ids, size = asked.block_ids or [], asked.block_tokens
        known = next((block_id for block_id in reversed(ids) if block_id in owner_by_block), None)
        session = number if known is None else owner_by_block[known]
        before = last_by_session.get(session)
        if before is not None and not set(before.block_ids[: before.input_tokens // size]) <= set(ids):
            session, before = number, None  # it goes on from an earlier turn, or from what many begin with
        after = () if before is None else (before,)
        turn = _turn(asked, session, after)
        last_by_session[session] = turn
        for block_id in ids:
            owner_by_block.setdefault(block_id, session)
        turns.append(turn)
    return turns


def _turn(asked: PacedRequest, session: int, after: tuple[Turn, ...]) -> Turn:
    """Return what `filled` says of a request, due no sooner than what it waits for."""
    at_s = max(asked.at_s or 0.0, *(each.at_s for each in after), 0.0)
    ids, num_output = asked.block_ids or [], max(asked.output_tokens, 1)
    return Turn(at_s, ids, asked.input_tokens, num_output, asked.block_tokens, session, after, asked.delay_s)


def scaled(turns: Sequence[Turn], copies: int, speed: float, seed: int) -> list[Turn]:
    """So many tenants that ask the same but share nothing, up to a minute apart, all `speed` times as fast."""
    rng = random.Random(seed)
    num_ids = 1 + max((block_id for turn in turns for block_id in turn.block_ids), default=0)
    num_sessions = 1 + max((turn.session for turn in turns), default=0)
    made: list[Turn] = []
    for copy in range(copies):
        offset_s = rng.uniform(0, _JITTER_S) if copy else 0.0
        twin: dict[int, Turn] = {}
        for turn in turns:
            twin[id(turn)] = replace(
                turn,
                at_s=(turn.at_s + offset_s) / speed,
                block_ids=[block_id + copy * num_ids for block_id in turn.block_ids] if copy else turn.block_ids,
                session=turn.session + copy * num_sessions,
                after=tuple(twin[id(each)] for each in turn.after),
                delay_s=turn.delay_s / speed,
            )
        made += twin.values()
    return sorted(made, key=lambda turn: turn.at_s)


def infinite_hit_ratio(turns: Iterable[Turn]) -> float:
    """Leading blocks that were asked for before, of all: what one cache finds that holds everything at once."""
    seen: set[int] = set()
    num_found = num_blocks = 0
    for turn in turns:
        num_found += next((n for n, b in enumerate(turn.block_ids) if b not in seen), len(turn.block_ids))
        num_blocks += len(turn.block_ids)
        seen.update(turn.block_ids)
    return num_found / num_blocks if num_blocks else 0.0
