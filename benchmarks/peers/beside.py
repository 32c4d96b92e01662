"""A peer that takes turns with our engine: a process of its own environment that runs when it is asked to."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any


class Peer:
    """`benchmarks/peers/<script>.py --turns`, started with the peer's own Python; idle between its turns."""

    def __init__(self, script: str, python: str, workload: str) -> None:
        path = Path(__file__).with_name(f"{script}.py")
        command = [python, str(path), "--workload", workload, "--turns"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.identity = self._answer()
        self.seconds: dict[str, list[float]] = {"cold_s": [], "warm_s": []}

    def run(self, seed: int, *, is_counted: bool) -> None:
        """One turn: the prompts of this seed, cold, then warm."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{seed}\n")
        self._process.stdin.flush()
        answer = self._answer()
        if is_counted:
            for name, values in self.seconds.items():
                values.append(answer[name])

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
