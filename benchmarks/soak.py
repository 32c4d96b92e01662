"""What an hour of everything at once does to memory: does each process come to a plateau?

    python benchmarks/soak.py [--minutes 60] [--out FILE] [--quick]

Starts `mneme serve mneme-tiny --replicas 2` with three API keys, sends it to 127.0.0.1 only, and reads
each process's memory every 30 s: resident (RSS), and what is its own (USS: private pages, without libraries and the
object store, which all processes map). The load: turns of sessions, streamed and whole, half of them new; streams that
are cut off; forks, lookups, deletes; the corpus of malformed requests, bodies of 9 MiB, bytes that are not HTTP;
unknown API keys. A pause between requests bounds the rate. Bounded stores (the index of prefixes, sessions' homes, page
pools, the host tier) fill up first. Target: of each process, what is its own has a median in the last quarter of the
time at most 2 MiB over that in the third quarter; no process ends, and no answer is a 5xx or breaks. A leak of 8 MiB an
hour fails that in an hour; what an allocator does with its pages does not. A shorter run is less strict: under 40
minutes nothing is said of growth.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import statistics
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from harness import Run, at_most, options_of  # noqa: E402

from tests.cluster.bad_requests import BAD_REQUESTS, RAW_REQUESTS, Target  # noqa: E402
from tests.e2e.server_process import SERVE, ServerProcess, free_port  # noqa: E402

MODEL = Target(model="mneme-tiny", max_context=2048)
KEYS = ("soak-a", "soak-b", "soak-c")
SAMPLE_S = 30.0
NUM_CLIENTS, PAUSE_S = 4, 0.25
MAX_REQUESTS = 100_000
PLATEAU_MIB = 2.0  # of private memory, of one process: the last quarter's median over the third's
MIN_SAMPLES = 80  # 40 minutes
WATCHED = ("engine", "ingress", "NodeActor", "Directory", "ServeController", "HAProxyManager", "haproxy")
GOOD_OUTCOME = re.compile(  # sessions are deleted meanwhile, and some bytes end no request
    r"(turn|cut_stream) 200|(fork|look_up|delete) (200|404)"
    r"|(bad_request|unknown_key) 4\d\d|bad_bytes (HTTP/1.1 4\d\d|no answer)"
)
WORDS = ("book", "reader", "shelf", "lamp", "river", "stone", "winter", "letter", "garden", "bridge", "clock", "window")


class Load:
    """One client: a random operation, a pause, and so on."""

    def __init__(self, url: str, seed: int, outcomes: Counter[str]) -> None:
        self._url = url
        self._draw = random.Random(seed)
        self._outcomes = outcomes
        self._sessions: list[tuple[str, str]] = []  # (API key, session)
        self._client = httpx.AsyncClient(base_url=url, timeout=60.0)

    async def run(self, until: float) -> None:
        operations = {
            self.turn: 10,
            self.cut_stream: 3,
            self.fork: 2,
            self.look_up: 2,
            self.delete: 2,
            self.bad_request: 6,
            self.bad_bytes: 2,
            self.unknown_key: 1,
        }
        async with self._client:
            while time.monotonic() < until and self._outcomes.total() < MAX_REQUESTS:
                operation = self._draw.choices(list(operations), list(operations.values()))[0]
                try:
                    outcome = str(await operation())
                except (httpx.HTTPError, OSError) as error:
                    outcome = type(error).__name__
                self._outcomes[f"{operation.__name__} {outcome}"] += 1
                await asyncio.sleep(self._draw.uniform(0, 2 * PAUSE_S))

    async def turn(self) -> int:
        key, session = self._session()
        body = {**self._chat(64), "stream": self._draw.random() < 0.5}
        response = await self._client.post("/v1/chat/completions", json=body, headers=_headers(key, session))
        if response.status_code != 200 and (key, session) in self._sessions:  # full: another one next time
            self._sessions.remove((key, session))
        return response.status_code

    async def cut_stream(self) -> int:
        key, session = self._session()
        body = {**self._chat(400), "stream": True, "min_tokens": 400}
        request = self._client.stream("POST", "/v1/chat/completions", json=body, headers=_headers(key, session))
        async with request as response:
            async for _ in response.aiter_raw():
                break
        return response.status_code

    async def fork(self) -> int:
        key, session = self._session()
        path = f"/v1/sessions/{session}/fork"
        response = await self._client.post(path, json={}, headers=_headers(key))
        if response.status_code == 200:
            self._sessions.append((key, response.json()["id"]))
        return response.status_code

    async def look_up(self) -> int:
        key, session = self._session()
        body = {"model": MODEL.model, "session_id": session}
        return (await self._client.post("/v1/kv/lookup", json=body, headers=_headers(key))).status_code

    async def delete(self) -> int:
        key, session = self._session()
        if (key, session) in self._sessions:
            self._sessions.remove((key, session))
        return (await self._client.delete(f"/v1/sessions/{session}", headers=_headers(key))).status_code

    async def bad_request(self) -> int:
        case = self._draw.choice(BAD_REQUESTS)
        headers = {**_headers(self._draw.choice(KEYS)), "content-type": "application/json", **case.headers}
        content = case.encoded(MODEL)
        return (await self._client.request(case.method, case.path, content=content, headers=headers)).status_code

    async def bad_bytes(self) -> str:
        host, port = self._url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        with contextlib.closing(writer), contextlib.suppress(TimeoutError):
            writer.write(self._draw.choice(RAW_REQUESTS).encoded(MODEL))
            async with asyncio.timeout(1.0):
                return (await reader.read(12)).decode("latin-1") or "closed"
        return "no answer"

    async def unknown_key(self) -> int:
        headers = _headers(f"unknown-{self._draw.random()}")
        return (await self._client.post("/v1/chat/completions", json=self._chat(4), headers=headers)).status_code

    def _session(self) -> tuple[str, str]:
        if len(self._sessions) > 50 or (self._sessions and self._draw.random() < 0.5):
            return self._draw.choice(self._sessions)
        self._sessions.append((self._draw.choice(KEYS), f"soak-{self._draw.getrandbits(64):x}"))
        return self._sessions[-1]

    def _chat(self, max_tokens: int) -> dict[str, Any]:
        text = " ".join(self._draw.choices(WORDS, k=self._draw.randint(5, 200)))
        return {"model": MODEL.model, "messages": [{"role": "user", "content": text}], "max_tokens": max_tokens}


def _headers(key: str, session: str | None = None) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} | ({} if session is None else {"x-session-id": session})


def memory_mib(server: ServerProcess) -> dict[str, tuple[float, float]]:
    """(RSS, USS) in MiB of each watched process, by its name and pid."""
    found = {}
    for pid, command in server.processes().items():
        name = next((name for name in WATCHED if name in command.split(" -")[0]), None)
        if name is None:
            continue
        with contextlib.suppress(OSError):
            lines = (line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
            kib = {line[0].rstrip(":"): int(line[1]) for line in lines}
            found[f"{name} {pid}"] = (kib["Rss"] / 1024, (kib["Private_Clean"] + kib["Private_Dirty"]) / 1024)
    return found


async def soak(server: ServerProcess, url: str, minutes: float) -> tuple[dict[str, list[list[float]]], Counter[str]]:
    """Samples `[seconds, RSS, USS]` by process, and how often each operation ended in which way."""
    outcomes: Counter[str] = Counter()
    samples: dict[str, list[list[float]]] = defaultdict(list)
    started = time.monotonic()
    until = started + 60 * minutes
    clients = [asyncio.create_task(Load(url, seed, outcomes).run(until)) for seed in range(NUM_CLIENTS)]
    while time.monotonic() < until:
        at_s = time.monotonic() - started
        sample = await asyncio.to_thread(memory_mib, server)
        for name, (rss, uss) in sample.items():
            samples[name].append([round(at_s), round(rss, 1), round(uss, 1)])
        own = ", ".join(f"{name.split()[0]} {uss:.0f}" for name, (_, uss) in sample.items())
        print(f"{at_s:5.0f} s  {outcomes.total():6} requests  MiB: {own}", file=sys.stderr, flush=True)
        await asyncio.sleep(min(SAMPLE_S, max(0.0, until - time.monotonic())))
    await asyncio.gather(*clients)
    return dict(samples), outcomes


def growth(samples: list[list[float]]) -> float:
    """MiB of private memory by which the median of the last quarter is over that of the third."""
    quarter = len(samples) // 4
    third, last = samples[-2 * quarter : -quarter], samples[-quarter:]
    return statistics.median(s[2] for s in last) - statistics.median(s[2] for s in third)


def main() -> None:
    parser = options_of(__doc__, quick="one minute; nothing can be said of growth", seed=False)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--out", dest="json", type=Path, help="file for the samples, JSON")
    args = parser.parse_args()
    minutes = 1.0 if args.quick else min(args.minutes, 120.0)
    run = Run("soak", args, minutes=minutes, model=MODEL.model)
    keys = f"http.api_keys=[{','.join(KEYS)}]"
    server = ServerProcess([*SERVE, MODEL.model, "--replicas", "2", "--port", str(free_port()), "--set", keys])
    try:
        samples, outcomes = asyncio.run(soak(server, server.await_ready(), minutes))
        server.stop()
        left_behind = server.left_behind()
    finally:
        server.discard()
    for name, found in samples.items():
        (_, rss, uss), (_, last_rss, last_uss) = found[0], found[-1]
        print(f"{name}: RSS {rss:.0f} -> {last_rss:.0f} MiB, own {uss:.0f} -> {last_uss:.0f} MiB")
        grown = round(growth(found), 1) if not args.quick and len(found) >= MIN_SAMPLES else None
        run.check(at_most(f"growth of {name}", grown, PLATEAU_MIB, "MiB"))
    broken = {name: count for name, count in outcomes.items() if not GOOD_OUTCOME.fullmatch(name)}
    run.check(at_most("answers that should be others", sum(broken.values()), 0, "requests"))
    lasts = {name: found[-1][0] for name, found in samples.items()}
    ended = [name for name, at_s in lasts.items() if at_s < max(lasts.values())]
    run.check(at_most("processes that ended", len(ended), 0, "processes"))
    run.check(at_most("left_behind", len(left_behind), 0, "items"))
    run.end({"requests": outcomes.total(), "outcomes": dict(sorted(outcomes.items())), "samples": samples})


if __name__ == "__main__":
    main()
