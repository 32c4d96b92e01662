"""Pods as Linux namespaces: each has a network, process ids and /proc of its own, and the container's command,
environment, readiness probe and preStop of the rendered chart.

A node has processors of its own: a pod goes before everything else of this machine until Ray runs in it (which gives
its agent 15 s to start), and has its share of the processors from then on. What Kubernetes does around them is played:
a door is in the service while its probe answers and its pod does not end. A pod that is started anew has its address
and its folder again, as with `kv.type: hostPath`. Needs root and `ip`.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from mneme.cluster.config import ClusterConfig
from mneme.cluster.run.environment import cluster_environment
from mneme.config import parse
from tests.k8s.renders import container, environment, pods, rendered, serve_config

_NETWORK = "10.78.0."
_BRIDGE = "mnpods"
_OBJECT_STORE = 128 * 2**20
_START_S = 300.0  # until something that was begun is there
_GROUPS = next((group for group in (Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")) if group.is_dir()), None)
_HAPROXY_FILES = (
    *("CONFIG_FILE_LOC", "SOCKET_PATH", "METRICS_SOCKET_PATH", "SERVER_STATE_BASE", "SERVER_STATE_FILE"),
)  # fmt: skip
_DEPLOY = """
import json, sys, ray
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema
config = json.load(sys.stdin)
ray.init(address=sys.argv[1], log_to_driver=False)
serve.start(proxy_location=config["proxy_location"], http_options=config["http_options"])
_get_global_client().deploy_apps(ServeDeploySchema.model_validate(config), _blocking=False)
"""  # what KubeRay asks of the head's dashboard


def _run(*command: str, **options: Any) -> subprocess.CompletedProcess[Any]:
    return subprocess.run(command, check=True, **options)


def until(is_so: Callable[[], bool], what: str, limit_s: float = _START_S) -> float:
    """Wait until something is so; returns the seconds that it took."""
    began = time.monotonic()
    while not is_so():
        if time.monotonic() - began > limit_s:
            raise TimeoutError(f"{what}: not within {limit_s:g} s")
        time.sleep(0.5)
    return time.monotonic() - began


class Pod:
    """The head (number 0) or a worker, from `start` to `end`."""

    def __init__(self, owner: Pods, number: int) -> None:
        self.number = number
        self.ip = f"{_NETWORK}{number + 1}"
        self.is_ready = self.is_ending = False
        self._owner = owner
        self._namespace = f"{_BRIDGE}{number}"
        self._folder = owner.folder / f"pod{number}"
        self._folder.mkdir()
        self._group = _GROUPS / self._namespace if _GROUPS is not None and os.access(_GROUPS, os.W_OK) else None
        self._process: subprocess.Popen[bytes] | None = None
        self._init = 0  # process id of the first in its namespace: with it all others end
        self.log = owner.folder / f"pod{number}.log"

    def make(self) -> None:
        if self._group is not None:
            self._group.mkdir(exist_ok=True)
        here, there = f"mnv{self.number}", "eth9"
        _run("ip", "netns", "add", self._namespace)
        _run("ip", "link", "add", here, "type", "veth", "peer", "name", there, "netns", self._namespace)
        _run("ip", "link", "set", here, "master", _BRIDGE, "up")
        for command in (["addr", "add", f"{self.ip}/24", "dev", there], ["link", "set", there, "up"]):
            _run("ip", "netns", "exec", self._namespace, "ip", *command)
        _run("ip", "netns", "exec", self._namespace, "ip", "link", "set", "lo", "up")

    def drop(self) -> None:
        if self._group is not None:
            with suppress(OSError):  # something of it still ends
                self._group.rmdir()
        subprocess.run(["ip", "netns", "del", self._namespace], check=False, stderr=subprocess.DEVNULL)
        subprocess.run(["ip", "link", "del", f"mnv{self.number}"], check=False, stderr=subprocess.DEVNULL)

    def start(self) -> None:
        """Start the container, again where it fails, as on a busy machine; return when it runs."""
        for wait_s in (10, 20, 40):
            with suppress(RuntimeError):
                return self._start()
            time.sleep(wait_s)
        return self._start()

    def _start(self) -> None:
        """Start Ray as KubeRay's command does, and return when it runs."""
        of_head = ["--head", "--port=6379", "--num-cpus=0", "--include-dashboard=false"]
        where = of_head if self.number == 0 else [f"--address={self._owner.gcs}", "--num-cpus=3"]
        ray = [str(Path(self._owner.python).with_name("ray")), "start", *where, f"--node-ip-address={self.ip}"]
        ray += [f"--object-store-memory={_OBJECT_STORE}", "--block"]
        self._weigh(100)
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                ["ip", "netns", "exec", self._namespace, "unshare", "--pid", "--fork", "--mount-proc", *ray],
                stdout=log, stderr=subprocess.STDOUT, env=self._environment(), start_new_session=True,
                preexec_fn=self._join_group,
            )  # fmt: skip
        until(self._is_up, f"Ray in {self.log}")
        self._weigh(3)
        children = subprocess.run(["pgrep", "-P", str(self._process.pid)], capture_output=True, text=True, check=True)
        self._init = int(children.stdout.split()[0])
        self.is_ending = False

    def _join_group(self) -> None:
        if self._group is not None:
            (self._group / "cgroup.procs").write_text(str(os.getpid()))

    def _weigh(self, processors: int) -> None:
        if self._group is not None:
            for name, of_one in (("cpu.shares", 1024), ("cpu.weight", 100)):  # version 1 of cgroups, and 2
                if (self._group / name).exists():
                    (self._group / name).write_text(str(processors * of_one))

    def _is_up(self) -> bool:
        said = self.log.read_text()
        if self._process is None or self._process.poll() is not None:
            raise RuntimeError(f"{self.log}: {said[-500:]}")
        return "Ray runtime started" in said

    def _environment(self) -> dict[str, str]:
        own = {"TMPDIR": str(self._folder), "RAY_TMPDIR": str(self._folder)}
        for name in _HAPROXY_FILES:
            path = Path(self._owner.environment[f"RAY_SERVE_HAPROXY_{name}"])
            own[f"RAY_SERVE_HAPROXY_{name}"] = str(
                self._folder if path == self._owner.folder else self._folder / path.name
            )
        if self.number == 0:
            own["RAY_REDIS_ADDRESS"] = self._owner.redis
        return {**os.environ, **self._owner.environment, **own}

    def inside(self, *command: str, **options: Any) -> subprocess.CompletedProcess[Any]:
        """Run a command in the pod."""
        enter = ["ip", "netns", "exec", self._namespace, "nsenter", "-t", str(self._init), "-p", "-m"]
        environment = {**self._environment(), "RAY_ADDRESS": self._owner.gcs}
        return subprocess.run([*enter, *command], env=environment, check=False, **options)

    def pids(self, title: str) -> list[str]:
        """Process ids, as the pod has them, of those whose title begins so."""
        found = self.inside("pgrep", "-f", f"^{title}", capture_output=True, text=True)
        return found.stdout.split() if isinstance(found.stdout, str) else []

    def look(self) -> None:
        """Ask the readiness probe."""
        try:
            self.is_ready = httpx.get(f"http://{self.ip}:8000/-/healthz", timeout=5).status_code == 200
        except httpx.HTTPError:
            self.is_ready = False

    def end(self) -> None:
        """End the pod as Kubernetes does: out of the service, preStop, SIGTERM, and what is left is killed."""
        self.is_ending = True
        script = container(pods(self._owner.manifests)["worker"])["lifecycle"]["preStop"]["exec"]["command"]
        with (self._owner.folder / f"prestop{self.number}.log").open("ab") as log:
            self.inside(*script, stdout=log, stderr=subprocess.STDOUT)
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
        self.kill()

    def kill(self) -> None:
        """End everything in the pod at once, as a machine that is lost."""
        self.is_ready = False
        if self._init:
            with suppress(ProcessLookupError):
                os.kill(self._init, signal.SIGKILL)
        if self._process is not None:
            self._process.wait(30)
        self._init = 0


class Pods:
    """A head with a Redis behind it, and two workers; a context in which all of it runs."""

    def __init__(self, change: Callable[[dict[str, Any]], None]) -> None:
        """`change` alters the application's arguments in place."""
        self.python = sys.executable
        self.folder = Path(tempfile.mkdtemp(prefix="mp-"))
        self.gcs, self.redis = f"{_NETWORK}1:6379", f"{_NETWORK}254:6379"
        self.manifests = rendered("cpu")
        self.config = serve_config(self.manifests)
        self.args = self.config["applications"][0]["args"]
        self.args["cache"]["disk"]["folder"] = str(self.folder / "kv-%n")
        change(self.args)
        own = cluster_environment(parse(ClusterConfig, self.args), "", self.folder)
        of_image = {name: own[name] for name in ("RAY_SERVE_HAPROXY_BINARY_PATH", "MNEME_HAPROXY")}
        of_pod = {f"RAY_SERVE_HAPROXY_{name}": own[f"RAY_SERVE_HAPROXY_{name}"] for name in _HAPROXY_FILES}
        by_kuberay = {
            "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_external_storage_namespace": self.folder.name, "RAY_gcs_rpc_server_reconnect_timeout_s": "600",
        }  # fmt: skip
        self.environment = {
            **environment(pods(self.manifests)["worker"]), **of_image, **of_pod, **by_kuberay,
            "OMP_NUM_THREADS": "1", "PATH": f"{Path(self.python).parent}:{os.environ['PATH']}",
        }  # fmt: skip
        self.pods = [Pod(self, number) for number in range(3)]
        self._redis: subprocess.Popen[bytes] | None = None
        self._is_over = threading.Event()

    @property
    def workers(self) -> list[Pod]:
        return self.pods[1:]

    def doors(self) -> list[str]:
        """Addresses that the service sends new connections to."""
        return [pod.ip for pod in self.workers if pod.is_ready and not pod.is_ending]

    def deploy(self) -> None:
        """Send the application as it is configured now to the head."""
        self.pods[0].inside(
            self.python, "-c", _DEPLOY, self.gcs, input=json.dumps(self.config).encode(),
            stdout=(self.folder / "deploy.log").open("ab"), stderr=subprocess.STDOUT,
        )  # fmt: skip

    def replicas(self) -> set[str]:
        """Ids of the engine replicas that requests may go to, by any door; none where no door answers."""
        for door in self.doors():
            with suppress(httpx.HTTPError, KeyError, ValueError):
                health = httpx.get(f"http://{door}:8000/v1/cluster", timeout=5).json()
                if sum(model["ready"] for model in health["models"]) == len(health["replicas"]):
                    return {each["replica"] for each in health["replicas"]}
        return set()

    def __enter__(self) -> Pods:
        for tool in ("ip", "unshare", "nsenter", "pgrep", "redis-server"):
            if shutil.which(tool) is None:
                raise SystemExit(f"bench_pods: needs {tool}")
        try:
            _run("ip", "link", "add", _BRIDGE, "type", "bridge")
            _run("ip", "addr", "add", f"{_NETWORK}254/24", "dev", _BRIDGE)
            _run("ip", "link", "set", _BRIDGE, "up")
            self._redis = subprocess.Popen(
                ["redis-server", "--bind", f"{_NETWORK}254", "--port", "6379", "--protected-mode", "no", "--save", ""],
                stdout=subprocess.DEVNULL, cwd=self.folder,
            )  # fmt: skip
            for pod in self.pods:
                pod.make()
            threading.Thread(target=self._probe, daemon=True).start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _probe(self) -> None:
        period = container(pods(self.manifests)["worker"])["readinessProbe"]["periodSeconds"]
        while not self._is_over.wait(period):
            for pod in self.workers:
                pod.look()

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for pod in self.pods:
            pod.kill()
            pod.drop()
        if self._redis is not None:
            self._redis.terminate()
        subprocess.run(["ip", "link", "del", _BRIDGE], check=False, stderr=subprocess.DEVNULL)
