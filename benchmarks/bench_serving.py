"""What the cluster around the engines costs: start, first requests, idle CPU, memory, stop; streamed tokens a second.

    python benchmarks/bench_serving.py [--quick] [--only start|streams] [--streams 128] [--step-ms 20 10 5]

*start*: `mneme serve mneme-tiny --replicas 2`, started several times; medians. Ready means warm: of the first five
requests, one after the other, the first is compared with the fifth. Idle CPU is that of all processes after 10 s
without requests; memory is resident.

*streams*: the same server with engines that compute nothing and give each running request a token a step, as long as a
step takes; tokenizer, router, HTTP and HAProxy are the real ones. Clients are bare sockets in one process: to read an
event takes 20 us of a core, where the load tool of `mneme bench` takes 115 to 135 and would measure itself. They begin
one after the other over a second. Tokens per second is of the time in which all streams run; offered is streams over
the step. The time to the first token is from the request's last byte, so it has a step of the engine in it; what the
gaps of 16 streams are above a step is what Ray, HTTP and HAProxy add. Bound: the cores, of which Ray, HAProxy and
clients take a part; the CPU time of each kind of process stands beside it.
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
import urllib.request
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from harness import PartResult, Run, at_least, at_most, options_of  # noqa: E402

from tests.e2e.server_process import SERVE, ServerProcess, free_port  # noqa: E402
from tests.fakes.fake_engine import FakeEngineLoop  # noqa: E402

STEP_VARIABLE = "MNEME_BENCH_STEP_MS"
PARTS = ("start", "streams")
NUM_FIRST, FIRST_TARGET = 5, 1.5
READY_TARGET_S, IDLE_TARGET_PERCENT, STOP_TARGET_S = 40.0, 5.0, 5.0
RATE_TARGET, TTFT_TARGET_MS, GAP_TARGET_MS = 5000.0, 60.0, 10.0
NUM_FEW = 16  # streams, of which it is promised what is above a step
BEGIN_S = 1.0  # over which streams begin
PROMPT = "Tell me about the library in which every book remembers its reader."


def p(values: Sequence[float], percent: int) -> float:
    """A percentile."""
    return statistics.quantiles(values, n=100)[percent - 1]


def cpu_s(pid: int) -> float:
    """Seconds of CPU time that a process has taken so far."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def cpu_of(processes: dict[int, str]) -> Counter[str]:
    """Seconds of CPU time so far, by kind of process."""
    found = Counter[str]()
    for pid, command in processes.items():
        if Path(f"/proc/{pid}").exists():
            found[kind_of(command)] += cpu_s(pid)
    return found


def kind_of(command: str) -> str:
    kinds = (":engine", ":ingress", "haproxy", "raylet", "gcs")
    return next((kind.strip(":") for kind in kinds if kind in command), "other")


def first_requests_ms(url: str) -> list[float]:
    """How long each of the first requests takes, one after the other, each over a connection of its own."""
    taken = []
    for number in range(NUM_FIRST):
        message = {"role": "user", "content": f"{number}. {PROMPT}"}
        body = {"model": "mneme-tiny", "messages": [message], "max_tokens": 1, "temperature": 0}
        asked = urllib.request.Request(
            f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        began = time.perf_counter()
        with urllib.request.urlopen(asked, timeout=60) as response:
            response.read()
        taken.append((time.perf_counter() - began) * 1e3)
    return taken


def idle_percent(server: ServerProcess, seconds: float) -> dict[str, float]:
    """CPU of a core while nothing happens: all processes, and those that run our code (engines, ingress, serve)."""
    commands = server.processes()
    before = {pid: cpu_s(pid) for pid in commands}
    time.sleep(seconds)
    used = {pid: 100 * (cpu_s(pid) - before[pid]) / seconds for pid in commands}
    ours = [pid for pid, command in commands.items() if "ServeReplica" in command or "--server" in command]
    return {"all": sum(used.values()), "ours": sum(used[pid] for pid in ours)}


def rss_mb(server: ServerProcess) -> dict[str, float]:
    """Resident memory: the mean of the engines, the ingress, everything."""
    sizes = Counter[str]()
    for pid, command in server.processes().items():
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        sizes[f"{pid} {command}"] = pages * os.sysconf("SC_PAGE_SIZE") // 2**20
    engines = [size for command, size in sizes.items() if command.endswith("mneme:engine")]
    ingress = [size for command, size in sizes.items() if command.endswith("mneme:ingress")]
    return {"engine": statistics.mean(engines), "ingress": sum(ingress), "all": sizes.total()}


def measure_starts(num_starts: int, idle_s: float) -> PartResult:
    """Medians over fresh servers; the first is also left idle."""
    rows, idle = list[dict[str, Any]](), dict[str, float]()
    for number in range(num_starts):
        server = ServerProcess([*SERVE, "mneme-tiny", "--replicas", "2", "--port", str(free_port())])
        try:
            first = first_requests_ms(server.await_ready())
            if number == 0:
                time.sleep(10)
                idle = idle_percent(server, idle_s)
            row = {"ready s": server.ready_seconds(), "first ms": first[0], "fifth ms": first[-1]}
            row |= {f"{name} MB": size for name, size in rss_mb(server).items()}
            stopped_s = time.perf_counter()
            server.stop()
            rows.append(row | {"stop s": time.perf_counter() - stopped_s, "left": len(server.left_behind())})
        finally:
            server.discard()
    medians = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    part = PartResult(name="start", title=f"medians of {num_starts} starts", rows=[medians | {"idle %": idle["all"]}])
    part.rows[0]["ours idle %"] = idle["ours"]
    part.checks = [
        at_most("ready", medians["ready s"], READY_TARGET_S, "s"),
        at_most("first_request", medians["first ms"] / medians["fifth ms"], FIRST_TARGET, "times the fifth"),
        at_most("idle_cpu", idle["all"], IDLE_TARGET_PERCENT, "% of a core"),
        at_most("stop", medians["stop s"], STOP_TARGET_S, "s"),
        at_most("left_behind", max(row["left"] for row in rows), 0, "items"),
    ]
    return part


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


def run_server(port: str) -> None:
    """`mneme serve` with paced engines."""
    from mneme.cluster.cli.serve import serve
    from mneme.cluster.config import load_config

    sys.exit(serve(load_config(None, [f"port={port}", "replicas=2"]), build_engine=load_paced_engine))


class Stream(asyncio.Protocol):
    """One streamed request of so many tokens over a bare socket, and when each of its events came."""

    def __init__(self, host: str, i: int, num_tokens: int) -> None:
        body = {"model": "mneme-tiny", "prompt": f"Stream {i}.", "max_tokens": num_tokens, "stream": True}
        text = json.dumps({**body, "temperature": 0, "ignore_eos": True})
        self._request = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(text)}\r\nConnection: close\r\n\r\n{text}"
        )
        self.sent_s, self.times = 0.0, list[float]()
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self._request.encode())
        self.sent_s = time.perf_counter()

    def data_received(self, data: bytes) -> None:
        self.times.extend([time.perf_counter()] * data.count(b"data: {"))

    def connection_lost(self, error: Exception | None) -> None:
        self.done.set_result(None)


async def read_streams(url: str, num_streams: int, num_tokens: int) -> list[Stream]:
    host, port = url.removeprefix("http://").split(":")
    loop = asyncio.get_running_loop()
    streams = []
    for i in range(num_streams):
        _, stream = await loop.create_connection(lambda i=i: Stream(host, i, num_tokens), host, int(port))
        streams.append(stream)
        await asyncio.sleep(BEGIN_S / num_streams)
    await asyncio.gather(*(stream.done for stream in streams))
    return streams


def measure_streams(step_ms: float, num_streams: int, seconds: float) -> dict[str, Any]:
    """One server, read twice: the first time warms it up."""
    os.environ[STEP_VARIABLE] = str(step_ms)
    server = ServerProcess([sys.executable, __file__, "--server", str(free_port())])
    try:
        url = server.await_ready()
        asyncio.run(read_streams(url, num_streams, 50))
        commands = server.processes()
        before = cpu_of(commands)
        began_s, client_s = time.perf_counter(), time.process_time()
        streams = asyncio.run(read_streams(url, num_streams, int((seconds + BEGIN_S) * 1e3 / step_ms)))
        wall_s, client_s = time.perf_counter() - began_s, time.process_time() - client_s
        used = cpu_of(commands)
    finally:
        server.discard()
    first_s, last_s = max(s.times[0] for s in streams), min(s.times[-1] for s in streams)
    num_events = sum(first_s < at <= last_s for stream in streams for at in stream.times)
    ttft_ms = [(s.times[0] - s.sent_s) * 1e3 for s in streams]
    cores = {kind: round((used[kind] - before[kind]) / wall_s, 3) for kind in used}
    return {
        "step ms": step_ms,
        "streams": num_streams,
        "offered/s": num_streams * 1e3 / step_ms,
        "tokens/s": num_events / (last_s - first_s),
        "TTFT p50 ms": statistics.median(ttft_ms),
        "TTFT p99 ms": p(ttft_ms, 99),
        "ITL p99 ms": p([(b - a) * 1e3 for s in streams for a, b in itertools.pairwise(s.times)], 99),
        "cores": {**cores, "clients": round(client_s / wall_s, 3)},
    }


def streams_part(steps_ms: Sequence[float], num_streams: int, seconds: float, *, has_few: bool) -> PartResult:
    rows = [measure_streams(step_ms, num_streams, seconds) for step_ms in steps_ms]
    few = measure_streams(steps_ms[0], NUM_FEW, seconds) if has_few else None
    checks = [
        at_least("streamed", max(row["tokens/s"] for row in rows), RATE_TARGET, "tokens/s"),
        at_most("ttft_p50", rows[0]["TTFT p50 ms"], TTFT_TARGET_MS, "ms"),
        at_most("itl_p99_above_step", few and few["ITL p99 ms"] - few["step ms"], GAP_TARGET_MS, "ms"),
    ]
    rows += [few] if few else []
    return PartResult(name="streams", title="engines that compute nothing", rows=rows, checks=checks)


def main() -> None:
    parser = options_of(__doc__, quick="one start, 5 s of streams instead of 20", seed=False, out=True)
    parser.add_argument("--only", choices=PARTS)
    parser.add_argument("--streams", type=int, default=128)
    parser.add_argument("--step-ms", type=float, nargs="+", default=[20.0, 10.0, 5.0])
    parser.add_argument("--server", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.server:
        run_server(args.server)
    run = Run("serving", args, cores=os.cpu_count(), model="mneme-tiny")
    parts = []
    if args.only != "streams":
        parts.append(run.show(measure_starts(1 if args.quick else 5, 10.0 if args.quick else 30.0)))
    if args.only != "start":
        steps_ms = args.step_ms[:1] if args.quick else args.step_ms
        parts.append(
            run.show(streams_part(steps_ms, args.streams, 5.0 if args.quick else 20.0, has_few=not args.quick))
        )
    run.end({part.name: part.rows for part in parts})


if __name__ == "__main__":
    main()
