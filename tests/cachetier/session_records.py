"""Conversations of known content, as logs have them."""

from __future__ import annotations

import random
from array import array

from mneme.cachetier.sessions.record import SessionState, began, ended, next_version
from mneme.cachetier.sessions.store import LogKey, log_key

KEY = log_key(b"model", "salt", "public:s")


def key_number(number: int) -> LogKey:
    return log_key(b"model", "salt", f"public:{number}")


def ids_of(number: int, count: int) -> array[int]:
    return array("i", (number * 1000 + place for place in range(count)))


def begin_turn(state: SessionState, number: int, num_prompt: int, now_s: float = 1e9) -> tuple[bytes, SessionState]:
    """A turn that goes on from all of `state`: its record, and the state then."""
    running = state._replace(
        version=next_version(state.version, now_s), num_base=len(state.ids), last_turn=1000 + number
    )
    return began(running, state.version, len(state.ids), ids_of(number, num_prompt)), running


def end_turn(running: SessionState, number: int, num_prompt: int, num_output: int) -> tuple[bytes, SessionState]:
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
    )
    return ended(running, state, len(prompt)), state


def conversation(num_turns: int, seed: int = 0) -> list[tuple[bytes, SessionState]]:
    """Records, each with the state behind it."""
    chance, state, steps = random.Random(seed), SessionState(), []
    for number in range(num_turns):
        num_prompt = chance.randrange(1, 9)
        steps.append(begin_turn(state, number, num_prompt))
        steps.append(end_turn(steps[-1][1], number, num_prompt, chance.randrange(9)))
        state = steps[-1][1]
    return steps
