"""Says turns into session logs until it is killed, and tells what is written: `kill_log_writer FOLDER SEED`."""

from __future__ import annotations

import random
import sys

from mneme.cachetier.names import Appended
from mneme.cachetier.session_log.log import SessionLogs
from mneme.cachetier.session_log.rows import SessionState, rows_of
from tests.cachetier.session_records import begin_turn, end_turn, ids_of, key_number

NUM_SESSIONS = 4
NUM_PROMPT, NUM_OUTPUT = 700, 500  # long turns, which a kill can hit
MAX_TURNS = 40


def open_logs(folder: str) -> SessionLogs:
    return SessionLogs(folder)


def read(logs: SessionLogs, number: int) -> SessionState:
    rows = logs.read(key_number(number))
    return SessionState() if rows is None else rows.state()


def expected_ids(num_turns: int) -> list[int]:
    """After so many turns, in any session."""
    return [i for n in range(num_turns) for i in (*ids_of(n, NUM_PROMPT), *ids_of(500 + n, NUM_OUTPUT))]


def tell(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(folder: str, seed: int) -> None:
    chance, logs = random.Random(seed), open_logs(folder)
    states = [read(logs, number) for number in range(NUM_SESSIONS)]
    tell("ready")
    while True:
        number = chance.randrange(NUM_SESSIONS)
        key, turn = key_number(number), states[number].num_turns
        if turn >= MAX_TURNS:
            logs.delete(key)
            states[number] = SessionState()._replace(version=read(logs, number).version)
            tell(f"{number} 0")
            continue
        rows, running = begin_turn(states[number], turn)
        outcomes = [logs.append(key, rows)]
        rows, states[number] = end_turn(running, turn, NUM_PROMPT, NUM_OUTPUT)
        outcomes.append(logs.append(key, rows))
        if Appended.NEEDS_WHOLE in outcomes:
            outcomes.append(logs.append(key, rows_of(states[number])))
        if outcomes[-1] is Appended.WRITTEN:
            tell(f"{number} {turn + 1}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
