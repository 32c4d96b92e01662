"""Says why a replica could not start, from what Serve says of it, its notes of progress, and its logs. Uses no Ray."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

_RAISED = re.compile(r"^(?:[\w.]*\.)?(\w*(?:Error|Exception|Unavailable|Interrupt)): (.+)$")
_DIED = "ActorDiedError"  # what Serve says of a process that is gone: not why
_TROUBLE = re.compile(r"^(?!  File |Extension modules).*(?:Fatal Python|terminate called|[Ee]rror|ERROR|out of memory)")
_LOG_BYTES = 64 << 10  # of a log, at its end


class StartNote(NamedTuple):
    """How far a replica has loaded."""

    stage: str
    fraction: float
    pid: int


def reason_of(messages: Iterable[str], notes: Mapping[str, StartNote], logs: Path) -> str | None:
    """Return why a deployment with these messages has not started; None: they name no failure.

    notes  by replica
    logs   Ray's folder of this node
    """
    for message in messages:
        raised = raised_in(message)
        if raised is not None and not raised.startswith(_DIED):
            return raised
        if _DIED in message:
            begun = [(r, note) for r, note in notes.items() if note.stage != "ready"]
            gone = [(r, note) for r, note in begun if not Path(f"/proc/{note.pid}").exists()]
            died = [(note, last_words(r, note.pid, logs)) for r, note in gone]
            if not died:
                return "a replica's process died before it began to load"
            (stage, fraction, _), words = max(died, key=lambda each: each[1] is not None)
            words = words or "its log does not say why, as where memory ran out and the system killed it"
            return f"a replica died while it started, behind {stage} ({fraction:.0%}): {words}"
    return None


def raised_in(message: str) -> str | None:
    """The last `SomeError: text` line of a traceback."""
    for line in reversed(message.splitlines()):
        match = _RAISED.match(line.strip())
        if match is not None and match[1] != "RuntimeError":
            return f"{match[1]}: {match[2]}"
    return None


def last_words(replica_id: str, pid: int, logs: Path) -> str | None:
    """Return the last line of a replica's logs that tells of trouble."""
    files = [*logs.glob(f"serve/replica_*{replica_id}.log"), *logs.glob(f"worker-*-{pid}.err")]
    lines = [line for file in files for line in _ends(file) if _TROUBLE.match(line)]
    return lines[-1].rpartition(" -- ")[2].strip()[:300] if lines else None


def _ends(file: Path) -> Iterator[str]:
    try:
        with file.open("rb") as log:
            log.seek(max(file.stat().st_size - _LOG_BYTES, 0))
            yield from log.read().decode(errors="replace").splitlines()
    except OSError:  # it is gone
        return
