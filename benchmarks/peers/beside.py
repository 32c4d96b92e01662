"""Peers that take turns with our engine: processes of their own environments that run when they are asked to."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class TurnProcess:
    """A process that says a line of JSON when it is ready, and one for each line that it is sent."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        """`environment` goes before ours."""
        own = {**os.environ, **(environment or {})}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=own)
        self.identity = self._answer()

    def ask(self, line: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        return self._answer()

    def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)

    def _answer(self) -> dict[str, Any]:
        """The next line that is JSON; a peer may print others."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise RuntimeError(f"the peer has ended: status {self._process.wait()}")


class Peer(TurnProcess):
    """`benchmarks/peers/<script>.py --turns`, started with the peer's own Python; idle between its turns."""

    def __init__(self, script: str, python: str, workload: str) -> None:
        path = Path(__file__).with_name(f"{script}.py")
        super().__init__([python, str(path), "--workload", workload, "--turns"])
        self.seconds: dict[str, list[float]] = {"cold_s": [], "warm_s": []}

    def run(self, seed: int, *, is_counted: bool) -> None:
        """One turn: the prompts of this seed, cold, then warm."""
        answer = self.ask(str(seed))
        if is_counted:
            for name, values in self.seconds.items():
                values.append(answer[name])
