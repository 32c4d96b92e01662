"""The application on three hosts behind a network of 1 Gbit/s and 5 ms: peer reads, loss, and a host that is cut off.

    sudo python benchmarks/bench_hosts.py [--quick] [--sessions 12] [--seconds 30] [--out FOLDER]

Linux, as root: hosts are network namespaces, and `hosts/wire.c` (a C compiler is needed) is the switch between them,
with delay, rate and loss; what the clients run on is a fourth port. Each host has a Ray node (jumbo frames, its own
disk) with a replica of mneme-tiny (float32); `mneme serve --address` runs on the first. Parts:

    network    TCP from one host to another: MB/s, and the time that a byte takes to come back
    peers      conversations of one text, each with a salt of its own, so that all must say the same; turns send their
               history and are placed at random, so most go to another host: where their KV came from
    loss       1% of all frames are lost, under clients that stream answers whose text is known
    partition  nothing comes through the third host's port, then it does again and its Ray node is started anew, as
               KubeRay would; the same clients. The ingresses are on the other hosts, and so is the clients' proxy.

Bound: two cores shared by three engines, three Ray nodes, the switch and the clients.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
from bench_chaos import ENVIRONMENT, LIMIT_S, PROMPTS, STORY, Load, plain, stream
from harness import Run, at_least, at_most, options_of

ROOT = Path(__file__).parents[1]
WIRE = ROOT / "benchmarks" / "hosts" / "wire.c"
HOSTS, CLIENT = ("10.77.0.1", "10.77.0.2", "10.77.0.3"), "10.77.0.4"
DELAY_US, MBIT, MTU = 5_000, 1_000, 9_000
LOSS_PPM = 10_000
RAY_PORT, PORT, NUM_CLIENTS = 6379, 8000, 4
PLACES = ("device", "host", "disk", "peer", "recomputed")
SENDER = """
import socket, time
with socket.create_connection(("{address}", 5001)) as to:
    began_s = time.perf_counter()
    for _ in range(20):
        to.sendall(b"x")
        to.recv(1)
    print((time.perf_counter() - began_s) / 20 * 1e3)
    began_s = time.perf_counter()
    for _ in range(200):
        to.sendall(bytes(1 << 20))
    to.shutdown(socket.SHUT_WR)
    to.recv(1)
    print(200 * (1 << 20) / (time.perf_counter() - began_s) / 1e6)
"""
RECEIVER = """
import socket
server = socket.create_server(("{address}", 5001))
print("ready", flush=True)
to, _ = server.accept()
for _ in range(20):
    to.sendall(to.recv(1))
while to.recv(1 << 20):
    pass
"""


class Network:
    """Three namespaces and the clients' own, each with a port of the switch."""

    def __init__(self, folder: Path) -> None:
        binary = folder / "wire"
        subprocess.run([os.environ.get("CC", "cc"), "-O2", "-o", str(binary), str(WIRE)], check=True)
        self._wire = subprocess.Popen(
            [str(binary), str(len(HOSTS) + 1), str(DELAY_US), str(MBIT), "0"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._wire.stdin is not None
        assert self._wire.stdout is not None
        self._tell = self._wire.stdin
        if self._wire.stdout.readline() != "ready\n":
            raise SystemExit("no TAP devices can be made here: run as root, with /dev/net/tun")
        for number, address in enumerate(HOSTS):
            subprocess.run(["ip", "netns", "add", name_of(number)], check=True)
            subprocess.run(["ip", "link", "set", f"mnw{number}", "netns", name_of(number)], check=True)
            _up(number, address, ["ip", "netns", "exec", name_of(number)])
        _up(len(HOSTS), CLIENT, [])

    def tell(self, line: str) -> None:
        self._tell.write(line + "\n")
        self._tell.flush()

    def close(self) -> None:
        for number in range(len(HOSTS)):
            subprocess.run(["ip", "netns", "del", name_of(number)], check=False)
        self._tell.close()
        self._wire.wait(10)


def name_of(host: int) -> str:
    return f"mneme-host{host}"


def _up(number: int, address: str, within: list[str]) -> None:
    device = f"mnw{number}"
    subprocess.run([*within, "ip", "addr", "add", f"{address}/24", "dev", device], check=True)
    subprocess.run([*within, "ip", "link", "set", device, "mtu", str(MTU), "up"], check=True)
    if within:
        subprocess.run([*within, "ip", "link", "set", "lo", "up"], check=True)


class Cluster:
    """Ray on all hosts, and the application."""

    def __init__(self, network: Network, folder: Path) -> None:
        self.network, self._folder = network, folder
        self._environment = {
            **os.environ, **ENVIRONMENT, "RAY_TMPDIR": str(folder), "TMPDIR": str(folder),
            "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "MNEME_HOSTS_RUN": folder.name,
        }  # fmt: skip
        self._environment.pop("RAY_ADDRESS", None)
        self._nodes = [self.start_node(host) for host in range(len(HOSTS))]
        self._serve = self._run(
            0, sys.executable, "-m", "mneme.cluster.cli.main", "serve", "mneme-tiny",
            "--address", f"{HOSTS[0]}:{RAY_PORT}", "--host", HOSTS[0], "--port", str(PORT), "--replicas", "3",
            "--set", "cpus_per_replica=1", "--set", "engine.dtype=float32", "--set", "cache.load=always",
            "--set", f"cache.disk.folder={folder}/kv-%n", "--set", f"cache.disk.capacity_bytes={512 << 20}",
            "--set", "router.policy=random", "--set", "ingress.replicas=2",
        )  # fmt: skip
        self.url = f"http://{HOSTS[0]}:{PORT}"
        self.await_replicas(3)

    def start_node(self, host: int) -> subprocess.Popen[bytes]:
        """Start Ray there; the first is the head."""
        where = (
            ["--head", f"--port={RAY_PORT}", "--include-dashboard=false"]
            if host == 0
            else [f"--address={HOSTS[0]}:{RAY_PORT}"]
        )
        num_before = self._num_started(host)
        node = self._run(
            host, str(Path(sys.executable).parent / "ray"), "start", *where, f"--node-ip-address={HOSTS[host]}",
            "--num-cpus=1", f"--object-store-memory={256 << 20}", "--block",
        )  # fmt: skip
        self._await_node(host, num_before)
        return node

    def restart_node(self, host: int) -> None:
        self._end(self._nodes[host])
        self._nodes[host] = self.start_node(host)

    def replicas(self) -> int:
        try:
            return int(httpx.get(f"{self.url}/ready", timeout=5).json().get("replicas", 0))
        except (httpx.HTTPError, ValueError):
            return 0

    def await_replicas(self, number: int) -> float:
        """Return the seconds that it took."""
        began_s = time.monotonic()
        while self.replicas() != number:
            if time.monotonic() - began_s > LIMIT_S:
                raise RuntimeError(f"no {number} replicas after {LIMIT_S:g} s")
            if self._serve.poll() is not None:
                raise RuntimeError(f"mneme serve ended with {self._serve.returncode}")
            time.sleep(0.2)
        return time.monotonic() - began_s

    def close(self) -> None:
        self._serve.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            self._serve.wait(60)
        for entry in Path("/proc").iterdir():  # whatever was started with this run's environment
            with suppress(OSError):
                if f"MNEME_HOSTS_RUN={self._folder.name}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    os.kill(int(entry.name), signal.SIGKILL)

    def _run(self, host: int, *command: str) -> subprocess.Popen[bytes]:
        with self._log(host).open("ab") as log:
            return subprocess.Popen(
                ["ip", "netns", "exec", name_of(host), *command],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._environment, cwd=ROOT,
            )  # fmt: skip

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        process.terminate()
        process.wait(60)

    def _await_node(self, host: int, num_before: int) -> None:
        """Wait until its Ray has started once more: nodes of one file system cannot start at once."""
        deadline_s = time.monotonic() + LIMIT_S
        while self._num_started(host) == num_before:
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"Ray has not started on host {host}: {self._log(host).read_text()[-500:]}")
            time.sleep(0.2)

    def _num_started(self, host: int) -> int:
        return self._log(host).read_text().count("Ray runtime started") if self._log(host).exists() else 0

    def _log(self, host: int) -> Path:
        return self._folder / f"host{host}.log"


@contextmanager
def hosts() -> Iterator[Cluster]:
    """Everything in a folder and namespaces of its own, which go with it."""
    with ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="mh-", dir="/tmp"))  # short: Ray's sockets lie in there
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        network = Network(folder)
        stack.callback(network.close)
        cluster = Cluster(network, folder)
        stack.callback(cluster.close)
        yield cluster


def measure_network() -> dict[str, Any]:
    within = [["ip", "netns", "exec", name_of(host), sys.executable, "-c"] for host in (0, 1)]
    receiver = subprocess.Popen([*within[0], RECEIVER.format(address=HOSTS[0])], stdout=subprocess.PIPE)
    assert receiver.stdout is not None
    receiver.stdout.readline()
    sender = subprocess.run([*within[1], SENDER.format(address=HOSTS[0])], check=True, capture_output=True, text=True)
    receiver.wait(10)
    round_trip_ms, rate = map(float, sender.stdout.split())
    return {"round_trip_ms": round_trip_ms, "tcp_mb_per_s": rate}


def measure_peers(cluster: Cluster, num_sessions: int, num_turns: int = 4) -> dict[str, Any]:
    """Turns of all conversations, one after the other, which send their history; where the KV of later ones was."""
    told: Counter[str] = Counter(failed=0, wrong=0)
    tokens: Counter[str] = Counter()
    histories: list[list[dict[str, str]]] = [[] for _ in range(num_sessions)]
    with httpx.Client(base_url=cluster.url, timeout=LIMIT_S) as http:
        for number in range(num_turns):
            texts = set()
            for session, history in enumerate(histories):
                history.append({"role": "user", "content": STORY if number == 0 else f"And then, {number}?"})
                asked = {
                    "model": "mneme-tiny", "messages": history, "max_tokens": 32, "min_tokens": 32, "ignore_eos": True,
                    "temperature": 0, "cache_salt": f"s{session}",
                }  # fmt: skip
                answer = http.post("/v1/chat/completions", json=asked)
                if answer.status_code != 200:
                    told["failed"] += 1
                    continue
                found = answer.json()
                history.append({"role": "assistant", "content": found["choices"][0]["message"]["content"]})
                texts.add(history[-1]["content"])
                if number:
                    tokens.update({name: found["usage"]["kv_details"][name] for name in PLACES})
                    tokens["prompt"] += found["usage"]["prompt_tokens"]
            told["wrong"] += len(texts) - 1
    return {"turns": num_sessions * num_turns, **told, **tokens}


def under(cluster: Cluster, load: Load, seconds: float) -> dict[str, Any]:
    """What clients see for so long."""
    load.take()
    time.sleep(seconds)
    seen = load.take()
    return {"seconds": seconds, **seen.as_json(), "longest_pause_s": max(seen.pauses_s, default=None)}


def measure_partition(cluster: Cluster, load: Load, seconds: float) -> dict[str, Any]:
    load.take()
    began_s = time.monotonic()
    cluster.network.tell(f"cut {len(HOSTS) - 1}")
    without_s = cluster.await_replicas(len(HOSTS) - 1)
    time.sleep(max(seconds - without_s, 0))
    cluster.network.tell(f"heal {len(HOSTS) - 1}")
    cluster.restart_node(len(HOSTS) - 1)
    whole_s = cluster.await_replicas(len(HOSTS))
    seen = load.take()
    return {
        "seconds": time.monotonic() - began_s, "noticed_s": without_s, "whole_again_s": whole_s, **seen.as_json(),
        "longest_pause_s": max(seen.pauses_s, default=None),
    }  # fmt: skip


def main() -> None:
    parser = options_of(__doc__, quick="4 sessions, 10 s of each fault; at most 3 minutes", out=True)
    parser.add_argument("--sessions", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each fault")
    args = parser.parse_args()
    num_sessions, seconds = (4, 10.0) if args.quick else (args.sessions, args.seconds)
    run = Run("hosts", args, hosts=len(HOSTS), delay_ms=DELAY_US / 1e3, mbit=MBIT, mtu=MTU)
    with hosts() as cluster:
        network = measure_network()
        print(network, file=sys.stderr, flush=True)
        peers = measure_peers(cluster, num_sessions)
        print(peers, file=sys.stderr, flush=True)
        with httpx.Client(base_url=cluster.url, timeout=LIMIT_S) as http:
            expected = [stream(http, plain(index))[0] for index in range(len(PROMPTS))]
        with Load(cluster.url, expected, NUM_CLIENTS) as load:
            quiet = under(cluster, load, seconds)
            cluster.network.tell(f"loss {LOSS_PPM}")
            lossy = under(cluster, load, seconds)
            cluster.network.tell("loss 0")
            print(quiet, lossy, file=sys.stderr, flush=True)
            partition = measure_partition(cluster, load, seconds)
            print(partition, file=sys.stderr, flush=True)
    faults = [
        {"fault": "none", **quiet},
        {"fault": "1% of frames lost", **lossy},
        {"fault": "a host is cut off", **partition},
    ]
    moved = peers["prompt"] - peers["device"]
    run.check(
        at_least("peers' share of what was not on the device", peers["peer"] / max(moved, 1), 0.5, "of tokens"),
        *(at_most(f"{name}, sessions that move", peers[name], 0, "turns") for name in ("failed", "wrong")),
        *(
            at_most(f"{name}, {each['fault']}", each[f"num_{name}"], 0, "requests")
            for each in faults
            for name in ("failed", "wrong")
        ),
    )
    run.end({"network": network, "peers": peers, "faults": faults})


if __name__ == "__main__":
    main()
