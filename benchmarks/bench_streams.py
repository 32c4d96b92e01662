"""How many streamed tokens a second the ingress and its way to the clients carry, whatever the engines could do.

    python benchmarks/bench_streams.py [--quick] [--streams 128] [--step-ms 20 10] [--replicas 2]

`mneme serve mneme-tiny` with engines that compute nothing and give each running request a token a step, as long as a
step takes; tokenizer, router, HTTP and HAProxy are the real ones. Clients are bare sockets in one process, which begin
one after the other over a second and read events; what they take of the cores is theirs, too. Tokens per second is of
the time in which all streams run; offered is streams over the step. The time to the first token is from the request's
last byte, so it has a step of the engine in it. Bound: the cores, of which Ray, HAProxy and clients take a part; the
CPU time of each kind of process stands beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from harness import Run, at_least, at_most, options_of  # noqa: E402

from benchmarks.bench_serving import StreamTimes, cpu_s, p  # noqa: E402
from tests.e2e.server_process import ServerProcess, free_port  # noqa: E402
from tests.fakes.fake_engine import FakeEngineLoop  # noqa: E402

STEP_VARIABLE = "MNEME_BENCH_STEP_MS"
RATE_TARGET, TTFT_TARGET_MS = 5000.0, 60.0
START_S = 1.0  # over which streams begin


class PacedEngine(FakeEngineLoop):
    """Steps begin at a fixed rate, however long they take."""

    def _run(self) -> None:
        next_s = time.monotonic()
        while not self._is_stopped:
            with self._lock:
                self._step()
            next_s = max(next_s + self._step_s, time.monotonic() - self._step_s)
            time.sleep(max(next_s - time.monotonic(), 0.0))


def load_paced_engine(*_: Any, on_progress: Any, **__: Any) -> PacedEngine:
    on_progress("weights", 1.0)
    return PacedEngine(step_s=float(os.environ[STEP_VARIABLE]) / 1e3, max_running=4096)


def run_server(port: str, replicas: str) -> None:
    from mneme.cluster.cli.serve import serve
    from mneme.cluster.config import load_config

    sys.exit(serve(load_config(None, [f"port={port}", f"replicas={replicas}"]), load_engine=load_paced_engine))


class Stream(StreamTimes):
    """One stream of so many tokens."""

    def __init__(self, host: str, i: int, num_tokens: int) -> None:
        super().__init__(host, i)
        body = {"model": "mneme-tiny", "prompt": f"Stream {i}.", "max_tokens": num_tokens, "stream": True}
        text = json.dumps({**body, "temperature": 0, "ignore_eos": True})
        self._request = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(text)}\r\nConnection: close\r\n\r\n{text}"
        )
        self.sent_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.sent_s = time.perf_counter()


async def read_streams(url: str, num_streams: int, num_tokens: int) -> list[Stream]:
    host, port = url.removeprefix("http://").split(":")
    loop = asyncio.get_running_loop()
    streams = []
    for i in range(num_streams):
        _, stream = await loop.create_connection(lambda i=i: Stream(host, i, num_tokens), host, int(port))
        streams.append(stream)
        await asyncio.sleep(START_S / num_streams)
    await asyncio.gather(*(stream.done for stream in streams))
    return streams


def measure(step_ms: float, num_streams: int, num_replicas: int, seconds: float) -> dict[str, Any]:
    """One server, read twice: the first time warms it up."""
    os.environ[STEP_VARIABLE] = str(step_ms)
    server = ServerProcess([sys.executable, __file__, "--server", str(free_port()), str(num_replicas)])
    try:
        url = server.await_ready()
        asyncio.run(read_streams(url, num_streams, 50))
        commands = server.processes()
        before = {pid: cpu_s(pid) for pid in commands}
        began_s, client_s = time.perf_counter(), time.process_time()
        streams = asyncio.run(read_streams(url, num_streams, int((seconds + START_S) * 1e3 / step_ms)))
        wall_s, client_s = time.perf_counter() - began_s, time.process_time() - client_s
        used = Counter[str]()
        for pid, command in commands.items():
            if Path(f"/proc/{pid}").exists():
                used[kind_of(command)] += (cpu_s(pid) - before[pid]) / wall_s
        used["clients"] = client_s / wall_s
    finally:
        server.discard()
    first_s, last_s = max(s.times[0] for s in streams), min(s.times[-1] for s in streams)
    num_events = sum(first_s < at <= last_s for stream in streams for at in stream.times)
    return {
        "step_ms": step_ms,
        "streams": num_streams,
        "offered": num_streams * 1e3 / step_ms,
        "tokens_per_s": num_events / (last_s - first_s),
        "ttft_p50_ms": statistics.median((s.times[0] - s.sent_s) * 1e3 for s in streams),
        "ttft_p99_ms": p([(s.times[0] - s.sent_s) * 1e3 for s in streams], 99),
        "itl_p99_ms": p([(b - a) * 1e3 for s in streams for a, b in itertools.pairwise(s.times)], 99),
        "cores": {name: round(share, 3) for name, share in used.most_common()},
    }


def kind_of(command: str) -> str:
    kinds = {":engine": "engines", ":ingress": "ingress", "haproxy": "haproxy", "raylet": "raylet", "gcs": "gcs"}
    return next((name for part, name in kinds.items() if part in command), "other")


def main() -> None:
    parser = options_of(__doc__, quick="5 s instead of 20", seed=False)
    parser.add_argument("--streams", type=int, default=128)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--step-ms", type=float, nargs="+", default=[20.0, 10.0, 5.0])
    parser.add_argument("--server", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.server:
        run_server(*args.server)
    run = Run("streams", args, cores=os.cpu_count(), model="mneme-tiny, engines that compute nothing")
    rows = [measure(step_ms, args.streams, args.replicas, 5 if args.quick else 20) for step_ms in args.step_ms]
    for row in rows:
        run.say(
            "  ".join(f"{name} {value if isinstance(value, dict) else round(value, 1)}" for name, value in row.items())
        )
    run.check(
        at_least("streamed", max(row["tokens_per_s"] for row in rows), RATE_TARGET, "tokens/s"),
        at_most("ttft_p50", rows[0]["ttft_p50_ms"], TTFT_TARGET_MS, "ms"),
    )
    run.end({"streams": rows})


if __name__ == "__main__":
    main()
