"""What clients see while replicas, nodes, cache actors, directories and ingresses of a cluster are killed under load.

    python benchmarks/bench_chaos.py [--quick] [--kills 32] [--minutes 10] [--clients 4] [--out FOLDER]

Three Ray nodes on this machine, each with a replica of mneme-tiny (float32), its cache actor and its disk; two
ingresses behind Serve's proxy. Clients stream answers whose text is known from a run without faults, so that a wrong
token is seen; what a fault may not do is fail a request or change a token. Four parts:

    kills    a session's second answer is streamed, and its replica killed (SIGKILL) after 0, 1, 5 or 20 pieces of text
    others   a node is removed at once (its replica, cache actor and raylet), a cache actor, a directory, an ingress is
             killed. Who is answered through the ingress that is killed loses the connection, which nobody can take
             over: connections that break then, and nothing else, are counted apart, as `cut`
    all      all replicas are killed while one answer is streamed: how soon a new request hears 503 with Retry-After,
             when one is answered again, and whether that stream goes on to its end
    random   one of these every few seconds for `--minutes`, with each process's private memory and descriptors, pages
             in use and bytes of the tiers every 10 s: growth is the last quarter's median over that of the third; of
             each kind of process in the longest life that one had, as a killed one begins anew, and fills up at first

The pause is the longest gap between two events of a killed stream. Bound: two cores shared by three engines, clients,
Ray and whatever replica loads again.
"""

from __future__ import annotations

import logging
import math
import os
import random
import re
import signal
import statistics
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import httpx
from harness import Check, Run, at_least, at_most, options_of
from streams import BadStream, Heard, stream

from tests.e2e.nodes.cache_cluster import CacheCluster, cache_cluster
from tests.e2e.server_process import free_port

NODES = ("a", "b")  # that may go; the head has the clients' proxy
STORE_BYTES = 256 << 20
NUM_PIECES = (0, 1, 5, 20)
STORY = "Once upon a time there was a small library in which every book could remember its reader. " * 12
PROMPTS = [f"{number}. {STORY[:400]}" for number in range(12)]
LIMIT_S = 240.0
SAMPLE_S, FAULT_S = 10.0, (4.0, 12.0)
PROCESSES = {"engine": "#engine#", "ingress": "#ingress#", "node": "NodeActor", "directory": "Directory",
             "controller": "ServeController", "proxy": "SERVE_PROXY"}  # fmt: skip
MIN_QUARTER = 2  # samples
# Of the third quarter. Pages rise and fall with the load, and each cache actor that is killed fills its memory anew:
# what leaks at every fault is many times that. Disks keep what they have.
MAX_GROWTH = {"mib": 0.05, "fds": 0.05, "in_use_pages": 1.0, "host_bytes": 1.5, "disk_bytes": 0.1}


@dataclass
class Seen:
    """What clients saw; thread-safe as far as appending is."""

    num_ok: int = 0
    num_wrong: int = 0
    num_cut: int = 0  # whose connection's ingress went
    failures: list[str] = field(default_factory=list)
    pauses_s: list[float] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return {
            "num_ok": self.num_ok, "num_wrong": self.num_wrong, "num_cut": self.num_cut,
            "num_failed": len(self.failures), "failures": Counter(self.failures).most_common(5),
        }  # fmt: skip


class ChaosCluster:
    """The application on three nodes, and its processes by what they are."""

    def __init__(self, nodes: CacheCluster) -> None:
        from ray import serve

        from mneme.cluster.app import build
        from mneme.cluster.run.local_cluster import APPLICATION

        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        self.nodes, port = nodes, free_port()
        self.url = f"http://127.0.0.1:{port}"
        nodes.restore_nodes()
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
        settings = {
            "model": "mneme-tiny", "replicas": 3, "cpus_per_replica": 1, "ingress": {"replicas": 2},
            "engine": {"dtype": "float32"},
            "cache": {"load": "always", "disk": {"folder": f"{nodes.folder}/kv-%n", "capacity_bytes": 512 << 20}},
        }  # fmt: skip
        serve.run(build(settings), name=APPLICATION, route_prefix="/")
        self.await_replicas()

    def actors(self) -> list[dict[str, Any]]:
        from ray._private.state import state

        return [each for each in state.actor_table(None).values() if each["State"] == "ALIVE"]

    def pids(self, what: str) -> dict[str, int]:
        """Processes by the names of their actors: engine, ingress, NodeActor, Directory."""
        found = {}
        for each in self.actors():
            if what in each["Name"] or what in each["ActorClassName"]:
                found[each["Name"] or each["ActorID"]] = each["Pid"]
        return found

    def ingress_in_use(self) -> int:
        """The process of the ingress on the head's node: the proxy there prefers it."""
        import ray

        head = ray.get_runtime_context().get_node_id()
        found = [each for each in self.actors() if "#ingress#" in each["Name"]]
        return int(max(found, key=lambda each: each["Address"]["NodeID"] == head)["Pid"])

    def node_without_ingress(self) -> str | None:
        """A node that may go without cutting anyone's connection."""
        import ray

        used = {e["Address"]["NodeID"] for e in self.actors() if "#ingress#" in e["Name"]}
        ids = {each["NodeName"]: each["NodeID"] for each in ray.nodes() if each["Alive"]}
        return next((name for name in NODES if name in ids and ids[name] not in used), None)

    def await_replicas(self, count: int = 3) -> None:
        deadline_s = time.monotonic() + LIMIT_S
        while True:
            try:
                if httpx.get(f"{self.url}/ready", timeout=10).json().get("replicas") == count:
                    return
            except (httpx.HTTPError, ValueError):
                pass
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"no {count} replicas after {LIMIT_S:g} s")
            time.sleep(0.1)


@contextmanager
def chaos_cluster() -> Iterator[ChaosCluster]:
    """Everything in a folder of its own, which goes with it."""
    with cache_cluster(STORE_BYTES) as nodes:
        from ray import serve

        try:
            yield ChaosCluster(nodes)
        finally:
            serve.shutdown()


def turn(session: str, text: str, num: int, *, append: bool) -> dict[str, Any]:
    return {
        "model": "mneme-tiny", "messages": [{"role": "user", "content": text}], "max_tokens": num, "min_tokens": num,
        "ignore_eos": True, "temperature": 0, "session": {"id": session, "append": append}, "cache_salt": session,
    }  # fmt: skip


def ask(http: httpx.Client, body: dict[str, Any], on_piece: Callable[[int], object] = lambda _: None) -> Heard:
    return stream(http, "/v1/chat/completions", body, on_piece)


class Load:
    """Clients that stream known answers without a break, until the end of `with`."""

    def __init__(self, url: str, expected: list[str], num_clients: int) -> None:
        self.url, self.expected = url, expected
        self.seen = Seen()
        self.cut_s = -math.inf  # when an ingress was killed last
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._client, args=(n,), daemon=True) for n in range(num_clients)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join(LIMIT_S)

    def take(self) -> Seen:
        """What was seen since the last time."""
        seen, self.seen = self.seen, Seen()
        return seen

    def _client(self, number: int) -> None:
        draw = random.Random(number)
        with httpx.Client(base_url=self.url, timeout=LIMIT_S) as http:
            while not self._is_over.is_set():
                index, began_s = draw.randrange(len(PROMPTS)), time.monotonic()
                try:
                    heard = ask(http, plain(index))
                except (httpx.HTTPError, BadStream) as error:
                    if is_cut(error, began_s, self.cut_s):
                        self.seen.num_cut += 1
                    else:
                        self.seen.failures.append(f"{type(error).__name__}: {error}"[:120])
                    continue
                self.seen.num_ok += 1
                self.seen.num_wrong += heard.text != self.expected[index]
                self.seen.pauses_s.append(heard.pause_s)
                self._is_over.wait(draw.uniform(0, 0.3))


def is_cut(error: Exception, began_s: float, cut_s: float) -> bool:
    """Return whether a connection broke that may have gone with an ingress; an answer that says no is a failure."""
    return began_s < cut_s and isinstance(error, (httpx.NetworkError, httpx.RemoteProtocolError))


def plain(index: int) -> dict[str, Any]:
    body = turn("", PROMPTS[index], 64, append=False)
    return {key: value for key, value in body.items() if key not in ("session", "cache_salt")}


def kill_rows(cluster: ChaosCluster, load: Load, num_kills: int, reference: str) -> list[dict[str, Any]]:
    """Kill the replica that answers, after so many pieces of text."""
    rows = {num: {"after_pieces": num, "kills": 0, "failed": 0, "wrong": 0, "pauses_s": []} for num in NUM_PIECES}
    with httpx.Client(base_url=cluster.url, timeout=LIMIT_S) as http:
        for number in range(num_kills):
            row: dict[str, Any] = rows[NUM_PIECES[number % len(NUM_PIECES)]]
            for attempt in range(5):
                if kill_one(cluster, http, f"kill-{number}-{attempt}", reference, row):
                    break
            cluster.await_replicas()
            print(f"kill {number + 1}/{num_kills}: {load.seen.as_json()} {row}", file=sys.stderr, flush=True)
    return list(rows.values())


def kill_one(cluster: ChaosCluster, http: httpx.Client, session: str, reference: str, row: dict[str, Any]) -> bool:
    """Return whether the replica that was killed was the one that answered."""
    first = ask(http, turn(session, STORY, 32, append=False))
    (choice,) = explained(http, first.completion, session)
    home = next(pid for name, pid in cluster.pids("#engine#").items() if name.endswith(choice["replica"]))
    try:
        heard = ask(
            http,
            turn(session, "And then?", 96, append=True),
            lambda num: os.kill(home, signal.SIGKILL) if num == row["after_pieces"] else None,
        )
    except (httpx.HTTPError, BadStream) as error:
        row["kills"] += 1
        row["failed"] += 1
        row.setdefault("failures", []).append(f"{type(error).__name__}: {error}"[:200])
        return True
    row["wrong"] += heard.text != reference
    was_hit = any("~" in each["request_id"] for each in explained(http, heard.completion, session))
    if was_hit:
        row["kills"] += 1
        row["pauses_s"].append(heard.pause_s)
    return was_hit


def explained(http: httpx.Client, completion: str, session: str) -> list[dict[str, Any]]:
    found = http.get(f"/v1/kv/explain/{completion}", params={"cache_salt": session})
    choices: list[dict[str, Any]] = found.json()["choices"] if found.status_code == 200 else []
    return choices


def cause(cluster: ChaosCluster, load: Load, what: str, draw: random.Random) -> Callable[[], None]:
    """Do it; what is returned makes it whole again."""
    if what == "node":
        name = cluster.node_without_ingress()
        if name is None:
            return lambda: None
        cluster.nodes.remove_node(name)
        return lambda: cluster.nodes.add_node(name)
    if what == "ingress":
        pid = cluster.ingress_in_use()
        os.kill(pid, signal.SIGKILL)
        load.cut_s = time.monotonic()
        return lambda: None
    kinds = {"replica": "#engine#", "cache actor": "NodeActor", "directory": "Directory"}
    pids = sorted(cluster.pids(kinds[what]).values())
    if pids:
        os.kill(draw.choice(pids), signal.SIGKILL)
    return lambda: None


def other_rows(cluster: ChaosCluster, load: Load, repeats: int, draw: random.Random) -> list[dict[str, Any]]:
    """One kind of fault after the other; its row has all requests from it until the cluster is whole again."""
    rows = []
    for what in ("cache actor", "directory", "node", "ingress"):
        load.take()
        began_s = time.monotonic()
        for _ in range(repeats):
            mend = cause(cluster, load, what, draw)
            time.sleep(5.0)
            mend()
            cluster.await_replicas()
        seen = load.take()
        rows.append({"fault": what, "times": repeats, "seconds": time.monotonic() - began_s, **seen.as_json(),
                     "longest_pause_s": max(seen.pauses_s, default=None)})  # fmt: skip
        print(rows[-1], file=sys.stderr, flush=True)
    return rows


def all_row(cluster: ChaosCluster, reference: str) -> dict[str, Any]:
    """Kill all replicas in the middle of an answer, and ask anew until there is one."""
    pids, streamed = list(cluster.pids("#engine#").values()), list[str]()
    is_begun, refused_s, recovered_s, refusal = threading.Event(), None, None, None

    def read() -> None:
        with httpx.Client(base_url=cluster.url, timeout=LIMIT_S) as http:
            ask(http, turn("all", STORY, 32, append=False))
            body = turn("all", "And then?", 96, append=True)
            streamed.append(ask(http, body, lambda num: is_begun.set() if num == 5 else None).text)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    is_begun.wait(LIMIT_S)
    killed_s = time.monotonic()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    with httpx.Client(base_url=cluster.url, timeout=LIMIT_S) as http:
        while recovered_s is None and time.monotonic() < killed_s + LIMIT_S:
            asked_s = time.monotonic()
            answer = http.post("/v1/chat/completions", json=plain(0))
            if answer.status_code == 200:
                recovered_s = time.monotonic() - killed_s
            elif refused_s is None:
                refused_s = time.monotonic() - asked_s
                refusal = [answer.status_code, answer.headers.get("retry-after")]
    reader.join(LIMIT_S)
    cluster.await_replicas()
    row = {"refused_after_s": refused_s, "refusal": refusal, "recovered_after_s": recovered_s,
           "stream_is_whole": streamed == [reference]}  # fmt: skip
    print(row, file=sys.stderr, flush=True)
    return row


def random_faults(cluster: ChaosCluster, load: Load, minutes: float, draw: random.Random) -> dict[str, Any]:
    """Faults of all kinds; samples of what must not grow."""
    load.take()
    until_s, samples, faults, next_sample_s = (
        time.monotonic() + 60 * minutes,
        list[dict[str, Any]](),
        Counter[str](),
        0.0,
    )
    began_s = time.monotonic()
    while time.monotonic() < until_s:
        if time.monotonic() >= next_sample_s:
            samples.append({"at_s": round(time.monotonic() - began_s, 1), **sample(cluster)})
            next_sample_s = time.monotonic() + SAMPLE_S
        what = draw.choices(("replica", "cache actor", "directory", "node", "ingress"), (6, 3, 3, 1, 1))[0]
        mend = cause(cluster, load, what, draw)
        faults[what] += 1
        time.sleep(draw.uniform(*FAULT_S))
        mend()
        cluster.await_replicas()
        print(f"{time.monotonic() - began_s:.0f} s {what} {load.seen.as_json()}", file=sys.stderr, flush=True)
    cluster.await_replicas()
    samples.append({"at_s": round(time.monotonic() - began_s, 1), **sample(cluster)})
    seen = load.take()
    return {"minutes": minutes, "faults": dict(faults), **seen.as_json(), "growth": growth(samples), "samples": samples}


def sample(cluster: ChaosCluster) -> dict[str, Any]:
    """Private memory in MiB and descriptors of each process, by kind and number; pages and bytes of all."""
    processes: dict[str, dict[str, float]] = {}
    for kind, what in PROCESSES.items():
        for pid in {*cluster.pids(what).values()}:
            try:
                smaps = Path(f"/proc/{pid}/smaps_rollup").read_text()
                private = sum(int(kib) for kib in re.findall(r"Private_\w+:\s+(\d+)", smaps)) / 1024
                descriptors = len(os.listdir(f"/proc/{pid}/fd"))
            except OSError:
                continue
            processes[f"{kind} {pid}"] = {"mib": round(private, 1), "fds": descriptors}
    found: dict[str, Any] = {"processes": processes}
    try:
        text = httpx.get(f"{cluster.url}/metrics", timeout=30).text
    except httpx.HTTPError:
        return found
    metrics = {"in_use_pages": ("mneme_pages", "in_use")}
    for tier in ("host", "disk"):
        metrics |= {
            f"{tier}_bytes": ("mneme_cache_bytes", tier),
            f"{tier}_capacity": ("mneme_cache_capacity_bytes", tier),
        }
    for key, (name, label) in metrics.items():
        values = re.findall(rf'^{name}\{{[^}}]*="{label}"[^}}]*\}} (\S+)', text, re.MULTILINE)
        found[key] = sum(map(float, values))
    return found


def growth(samples: list[dict[str, Any]]) -> dict[str, float]:
    """What grew, as a share; of a kind of process, the one that lived longest. What was seen too little is left out."""
    lives = defaultdict[tuple[str, str], list[float]](list)  # of a process, or of all
    for each in samples:
        for process, values in each["processes"].items():
            for unit, value in values.items():
                lives[process, f" {unit}"].append(value)
        for name in each.keys() & MAX_GROWTH.keys():
            lives[name, ""].append(each[name])
    longest: dict[str, list[float]] = {}
    for (what, unit), values in lives.items():
        name = what.split()[0] + unit
        longest[name] = max(longest.get(name, []), values, key=len)
    found = {name: last_quarter_over_third(values) for name, values in sorted(longest.items())}
    return {name: grown for name, grown in found.items() if grown is not None}


def last_quarter_over_third(values: list[float]) -> float | None:
    """Return the growth of medians, as a share of the third quarter's; None: too few values to tell."""
    quarter = len(values) // 4
    if quarter < MIN_QUARTER:
        return None
    third, last = (statistics.median(part) for part in (values[-2 * quarter : -quarter], values[-quarter:]))
    return (last - third) / max(third, 1.0)


def fullest(samples: list[dict[str, Any]], tier: str) -> float | None:
    """Return the most bytes in a tier, as a share of what it may have; None: there was no such tier."""
    shares = [each[f"{tier}_bytes"] / each[f"{tier}_capacity"] for each in samples if each.get(f"{tier}_capacity")]
    return max(shares, default=None)


def checks_of(results: dict[str, Any], num_kills: int) -> list[Check]:
    """Return what is promised; what never came counts as late as one waits for it."""
    kills, alone, random_part = results["kills"], results["all"], results.get("random", {})
    parts = [*kills, results["load_beside_kills"], *results["others"], random_part]
    pauses_s = sorted(pause_s for row in kills for pause_s in row["pauses_s"])
    p95_s = pauses_s[min(int(0.95 * len(pauses_s)), len(pauses_s) - 1)] if pauses_s else None
    failed = sum(part.get("failed", 0) + part.get("num_failed", 0) for part in parts)
    wrong = sum(part.get("wrong", 0) + part.get("num_wrong", 0) for part in parts)
    refused_s = alone["refused_after_s"] if alone["refusal"] == [503, "1"] else LIMIT_S
    grown, samples = random_part.get("growth", {}), random_part.get("samples", [])
    names = [(f"{kind} {unit}", unit) for kind in PROCESSES for unit in ("mib", "fds")]
    names += [(name, name) for name in ("in_use_pages", "host_bytes", "disk_bytes")]
    return [
        at_least("replicas killed that were answering", sum(row["kills"] for row in kills), num_kills, "replicas"),
        at_most("requests that failed", failed, 0, "requests"),
        at_most("answers with a wrong token", wrong, 0, "answers"),
        at_most("pause p95 of killed streams", p95_s, 1.0, "s"),
        at_most("all killed: refused after", refused_s, 1.0, "s"),
        at_most("all killed: answered again", alone["recovered_after_s"] or LIMIT_S, 30.0, "s"),
        at_most("all killed: streams that are not whole", 0 if alone["stream_is_whole"] else 1, 0, "streams"),
        *(at_most(f"growth of {name}", grown.get(name), MAX_GROWTH[unit], "of it") for name, unit in names),
        *(at_most(f"fullest {tier}", fullest(samples, tier), 1.0, "of its capacity") for tier in ("host", "disk")),
    ]


def main() -> None:
    parser = options_of(__doc__, quick="4 kills, one of each other fault, no random ones", out=True)
    parser.add_argument("--kills", type=int, default=32)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=4)
    args = parser.parse_args()
    if args.quick:
        args.kills, args.minutes = 4, 0.0
    run, draw = Run("chaos", args, clients=args.clients), random.Random(args.seed)
    results: dict[str, Any] = {}
    with chaos_cluster() as cluster:
        with httpx.Client(base_url=cluster.url, timeout=LIMIT_S) as http:
            ask(http, turn("undisturbed", STORY, 32, append=False))
            reference = ask(http, turn("undisturbed", "And then?", 96, append=True)).text
            expected = [ask(http, plain(index)).text for index in range(len(PROMPTS))]
        results["all"] = all_row(cluster, reference)
        run.keep(results)
        with Load(cluster.url, expected, args.clients) as load:
            kills = results["kills"] = kill_rows(cluster, load, args.kills, reference)
            results["load_beside_kills"] = load.take().as_json()
            run.keep(results)
            results["others"] = other_rows(cluster, load, 1 if args.quick else 3, draw)
            run.keep(results)
            if args.minutes:
                results["random"] = random_faults(cluster, load, args.minutes, draw)
    pauses_s = [pause_s for row in kills for pause_s in row["pauses_s"]]
    results["pause_p50_s"] = statistics.median(pauses_s) if pauses_s else None
    run.check(*checks_of(results, args.kills))
    run.end(results)


if __name__ == "__main__":
    main()
