"""Conversations of known content, as logs have them."""

from __future__ import annotations

import random
from array import array

from mneme.cachetier.session_log.log_store import LogKey, log_key
from mneme.cachetier.session_log.rows import LogRows, SessionState, next_version, rows_of

KEY = log_key(b"model", "salt", "public:s")


def key_number(number: int) -> LogKey:
    return log_key(b"model", "salt", f"public:{number}")


def ids_of(number: int, count: int) -> array[int]:
    return array("i", (number * 1000 + place for place in range(count)))


def begin_turn(state: SessionState, number: int) -> tuple[LogRows, SessionState]:
    """A turn that goes on from all of `state`: what is written of it, and the state then."""
    running = state._replace(version=next_version(state.version, 1e9), num_base=len(state.ids), last_turn=1000 + number)
    return rows_of(running, state), running


def end_turn(running: SessionState, number: int, num_prompt: int, num_output: int) -> tuple[LogRows, SessionState]:
    """What follows `begin_turn`."""
    prompt = running.ids + ids_of(number, num_prompt)
    state = running._replace(
        version=next_version(running.version, 1e9),
        ids=prompt + ids_of(500 + number, num_output),
        marks=bytes([number % 256]) * 16 * min(number + 1, 8),
        mark_key=b"k" * 16,
        hits=bytes([number % 256]) * 8,
        num_turns=running.num_turns + 1,
        seen_ids=None if number % 3 else ids_of(number, 5),
        ttl_s=None if number % 2 else 60.0 + number,
        forked_from=None if number % 4 else b"t:%d" % number,
    )
    return rows_of(state, running), state


def conversation(num_turns: int, seed: int = 0) -> list[tuple[LogRows, SessionState]]:
    """What is written, each with the state behind it."""
    chance, state, steps = random.Random(seed), SessionState(), []
    for number in range(num_turns):
        steps.append(begin_turn(state, number))
        steps.append(end_turn(steps[-1][1], number, chance.randrange(1, 9), chance.randrange(9)))
        state = steps[-1][1]
    return steps
