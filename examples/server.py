"""Starts `mneme serve` for the examples, and asks it."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.request
from types import TracebackType
from typing import Any


class Server:
    """A server process; used as a context it is stopped at the end."""

    def __init__(self, model: str, *settings: str, options: tuple[str, ...] = ("--local",)) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{free.getsockname()[1]}"
        self._command = [
            sys.executable,
            "-m",
            "mneme",
            "serve",
            model,
            *options,
            "--port",
            self.url.rpartition(":")[2],
        ]
        for setting in settings:
            self._command += ["--set", setting]
        self.process = self._started()

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.terminate()
        self.process.wait(60)

    def kill_and_restart(self) -> None:
        """End it as `kill -9` does, and start another on the same port."""
        self.process.kill()
        self.process.wait(60)
        self.process = self._started()

    def ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """POST a body; returns the answer."""
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=600) as response:
            answer: dict[str, Any] = json.load(response)
        return answer

    def _started(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        while process.poll() is None:
            try:
                with urllib.request.urlopen(f"{self.url}/ready", timeout=5):
                    return process
            except OSError:
                time.sleep(0.2)
        raise SystemExit(f"the server ended with status {process.returncode}")
