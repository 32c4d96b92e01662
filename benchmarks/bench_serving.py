"""What the cluster around the engines costs: time to ready, inter-token latency, idle CPU, memory.

    python benchmarks/bench_serving.py [--quick] [--json]

Starts `mneme serve mneme-tiny --replicas 2` (with engines that note when each step's message leaves them) and reads 16
streams of greedy chat. What is compared is the inter-token latency (ITL) at the client with the time between an
engine's messages in the same seconds: the difference of the two p99s is what Ray, HTTP and HAProxy add. Medians over
the rounds. Bound: both cores are busy with the engines' steps, so whatever the cluster does for a token waits for a
core. Ready means warm: of the first five requests, one after the other, the first is compared with the fifth, medians
over several starts. Idle CPU is that of all processes after 10 s without requests.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from harness import Run, at_most, options_of  # noqa: E402

from benchmarks.timed_engine import TIMES_DIR_VARIABLE  # noqa: E402
from tests.e2e.server_process import SERVE, ServerProcess, free_port  # noqa: E402

NUM_STREAMS = 16
NUM_TOKENS = 256
WARM_TOKENS = 40  # of each stream, left out: others still prefill, which is the engine's business
NUM_FIRST, FIRST_TARGET = 5, 1.5
READY_TARGET_S, ITL_TARGET_MS, IDLE_TARGET_PERCENT = 40.0, 10.0, 5.0
PROMPT = "Tell me about the library in which every book remembers its reader."


def p(values: Sequence[float], percent: int) -> float:
    """A percentile."""
    return statistics.quantiles(values, n=100)[percent - 1]


class StreamTimes(asyncio.Protocol):
    """One streamed request over a bare socket, and when each of its events came.

    That takes 20 us of a core for each event; the load tool of `mneme bench`, which reads them, takes 115 to 135: on
    two cores that are both busy with engines it would measure itself.
    """

    def __init__(self, host: str, i: int) -> None:
        body = json.dumps(
            {
                "model": "mneme-tiny",
                "messages": [{"role": "user", "content": f"{i}. {PROMPT}"}],
                "max_tokens": NUM_TOKENS,
                "temperature": 0,
                "min_tokens": NUM_TOKENS,
                "stream": True,
            }
        )
        self._request = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}"
        )
        self.times: list[float] = []
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self._request.encode())

    def data_received(self, data: bytes) -> None:
        self.times.extend([time.perf_counter()] * data.count(b"data: {"))

    def connection_lost(self, error: Exception | None) -> None:
        self.done.set_result(None)


def gaps_ms(times: Sequence[float]) -> list[float]:
    """Milliseconds between events."""
    return [(b - a) * 1e3 for a, b in itertools.pairwise(times)]


async def read_streams(url: str) -> list[float]:
    """The gaps of all streams."""
    host, port = url.removeprefix("http://").split(":")
    loop = asyncio.get_running_loop()
    made = [await loop.create_connection(lambda i=i: StreamTimes(host, i), host, int(port)) for i in range(NUM_STREAMS)]
    await asyncio.gather(*(stream.done for _, stream in made))
    assert all(len(stream.times) > NUM_TOKENS // 2 for _, stream in made), [len(stream.times) for _, stream in made]
    return [gap for _, stream in made for gap in gaps_ms(stream.times[WARM_TOKENS:])]


def run_client(url: str) -> None:
    """Read the streams before all others, where the system lets us: this process's own waits are not measured."""
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text("-10")
    print(json.dumps(asyncio.run(read_streams(url))))


def in_session(*arguments: str) -> list[float]:
    """Run a part of this benchmark in a session of its own, as the server has one: Linux shares cores by session."""
    command = [sys.executable, __file__, *arguments]
    output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, start_new_session=True).stdout
    gaps: list[float] = json.loads(output.splitlines()[-1])
    return gaps


def run_server(port: str) -> None:
    """`mneme serve` with timed engines."""
    from benchmarks.timed_engine import load_timed_engine
    from mneme.cluster.cli.serve import serve
    from mneme.cluster.config import load_config

    sys.exit(serve(load_config(None, [f"port={port}"]), load_engine=load_timed_engine))


def engine_gaps_ms(times_dir: Path, since: float) -> list[float]:
    """Milliseconds between the messages of each engine since a moment, the first ones left out."""
    gaps: list[float] = []
    for file in times_dir.glob("*.times"):
        times = [time_s for line in file.read_text().splitlines() if (time_s := float(line)) > since]
        gaps += gaps_ms(times[WARM_TOKENS:])
    return gaps


def one_round(url: str, times_dir: Path) -> tuple[list[float], list[float]]:
    """(ITL at the client, the engines' own), in milliseconds."""
    since = time.perf_counter()
    client = in_session("--client", url)
    return client, engine_gaps_ms(times_dir, since)


def idle_percent(server: ServerProcess, seconds: float) -> dict[str, float]:
    """CPU of a core while nothing happens: all processes, and those that run our code (engines, ingress, serve)."""
    commands = server.processes()
    before = {pid: cpu_s(pid) for pid in commands}
    time.sleep(seconds)
    used = {pid: 100 * (cpu_s(pid) - before[pid]) / seconds for pid in commands}
    ours = [pid for pid, command in commands.items() if "ServeReplica" in command or "--server" in command]
    return {"all": sum(used.values()), "ours": sum(used[pid] for pid in ours)}


def cpu_s(pid: int) -> float:
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def rss_mb(server: ServerProcess) -> dict[str, float]:
    """Resident memory: the mean of the engines, the ingress, everything."""
    sizes = {
        command: int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
        for pid, command in ((pid, f"{pid} {command}") for pid, command in server.processes().items())
    }
    engines = [size for command, size in sizes.items() if command.endswith("mneme:engine")]
    ingress = [size for command, size in sizes.items() if command.endswith("mneme:ingress")]
    return {"engine": statistics.mean(engines), "ingress": sum(ingress), "all": sum(sizes.values())}


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


def measure_starts(num_starts: int) -> dict[str, Any]:
    """Medians over fresh servers."""
    rounds = []
    for _ in range(num_starts):
        server = ServerProcess([*SERVE, "mneme-tiny", "--replicas", "2", "--port", str(free_port())])
        try:
            rounds.append(first_requests_ms(server.await_ready()))
        finally:
            server.discard()
    medians = [statistics.median(taken) for taken in zip(*rounds, strict=True)]
    return {"first_requests_ms": medians, "first_over_fifth": medians[0] / medians[-1]}


def measure(num_rounds: int, idle_s: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as times_dir:
        os.environ[TIMES_DIR_VARIABLE] = times_dir
        server = ServerProcess([sys.executable, __file__, "--server", str(free_port())])
        try:
            return measure_server(server, Path(times_dir), num_rounds, idle_s)
        finally:
            server.discard()


def measure_server(server: ServerProcess, times_dir: Path, num_rounds: int, idle_s: float) -> dict[str, Any]:
    url = server.await_ready()
    with urllib.request.urlopen(url, timeout=60) as response:
        dtype = json.load(response)["dtype"]
    time.sleep(10)
    idle = idle_percent(server, idle_s)
    one_round(url, times_dir)  # warms up
    rounds = [one_round(url, times_dir) for _ in range(num_rounds)]
    memory, stopped_s = rss_mb(server), time.perf_counter()
    server.stop()
    stop_s = time.perf_counter() - stopped_s
    return {
        "dtype": dtype,
        "ready_s": server.ready_seconds(),
        "idle_percent": idle,
        "rss_mb": memory,
        "client_itl_ms": summary([client for client, _ in rounds]),
        "engine_itl_ms": summary([engine for _, engine in rounds]),
        "itl_p99_above_engine_ms": statistics.median(p(client, 99) - p(engine, 99) for client, engine in rounds),
        "stop_s": stop_s,
        "left_behind": server.left_behind(),
    }


def summary(rounds: Sequence[Sequence[float]]) -> dict[str, float]:
    """Medians over the rounds."""
    return {f"p{percent}": statistics.median(p(values, percent) for values in rounds) for percent in (50, 99)}


PARTS = {"--client": run_client, "--server": run_server}


def main() -> None:
    parser = options_of(__doc__, quick="fewer rounds; at most 90 s on 2 cores", seed=False)
    parser.add_argument("--json", action="store_true", help="only the JSON line")
    for part in PARTS:
        parser.add_argument(part, nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_args()
    for part, start in PARTS.items():
        given = getattr(args, part.removeprefix("--"))
        if given is not None:
            start(*given)
            return
    run = Run("serving", args, cores=os.cpu_count(), model="mneme-tiny", streams=NUM_STREAMS, tokens=NUM_TOKENS)
    figures = measure(num_rounds=3 if args.quick else 9, idle_s=10 if args.quick else 30)
    figures |= measure_starts(3 if args.quick else 5)  # of one start, a request against a request
    for key, value in figures.items():
        run.say(f"{key:16} {value}")
    run.check(
        at_most("ready", figures["ready_s"], READY_TARGET_S, "s"),
        at_most("first_request", figures["first_over_fifth"], FIRST_TARGET, "times the fifth"),
        at_most("itl_p99_above_engine", figures["itl_p99_above_engine_ms"], ITL_TARGET_MS, "ms"),
        at_most("idle_cpu", figures["idle_percent"]["all"], IDLE_TARGET_PERCENT, "% of a core"),
        at_most("stop", figures["stop_s"], 5.0, "s"),
        at_most("left_behind", len(figures["left_behind"]), 0, "items"),
    )
    run.end(figures, dtype=figures.pop("dtype"))


if __name__ == "__main__":
    main()
