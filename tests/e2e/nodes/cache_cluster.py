"""Ray nodes on this machine, and engines' processes on them that use the cache tier: no model, known chunks."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pytest
import ray
from ray.cluster_utils import Cluster
from ray.exceptions import ActorUnavailableError
from ray.util import list_named_actors
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mneme.cachetier.chunk.fingerprint import ChunkLayout, ModelFingerprint
from mneme.cachetier.chunk.header import Chunk, ChunkHeader
from mneme.cachetier.chunk.keys import prefix_lineage
from mneme.cachetier.config import CacheConfig
from mneme.cachetier.distributed.lifecycle import (
    of_this_node,
    shutdown_cache_tier,
    start_cache_tier,
    start_session_logs,
)
from mneme.cachetier.distributed.nodes import node_actor_name
from mneme.cachetier.names import Appended, Miss
from mneme.cachetier.session_log.log_store import LogKey
from mneme.cachetier.session_log.rows import LogRows
from mneme.cachetier.store import ChainQuery, ChunkSource
from mneme.cluster.serve.ray_private import single_node
from tests.cachetier.chunks import chunk_of

STORE_BYTES = 80 << 20
START_LIMIT_S = 240.0  # of a process that uses the tier
CALL_LIMIT_S = 240.0  # of any call of a test: what hangs is seen, and nothing that is slow on a busy machine
# Until what must come is there. A node that is made again is left alone for up to 16 s after each try that came too
# early or was answered late, which on a busy machine happens more than once.
EVENTUALLY_S = 300.0
CHUNK_TOKENS = 64
LAYOUT = ChunkLayout(num_layers=5, num_kv_heads=4, head_dim=1024, dtype="float16", chunk_tokens=CHUNK_TOKENS)
LARGE = ModelFingerprint(weights="w", layout=LAYOUT, inv_freq=(1.0,))  # 1 MB a layer: two objects, of 4 layers and 1
LARGE_BYTES = 5 << 20
SMALL = ModelFingerprint(weights="w", layout=replace(LAYOUT, num_kv_heads=1, head_dim=256), inv_freq=(1.0,))
SMALL_BYTES = LARGE_BYTES // 16

MARKS = [
    pytest.mark.e2e,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # Ray's own sockets and files
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

_ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_worker_niceness": "0",
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1",
    "RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1",
    "RAY_enable_metrics_collection": "0",
    "RAY_task_events_report_interval_ms": "0",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_failure_threshold": "3",
    "RAY_health_check_initial_delay_ms": "500",
}

_T = TypeVar("_T")


class ReadChunk(NamedTuple):
    """What came of a source."""

    edge: str
    num_usable: int
    miss: Miss | None
    is_exact: bool  # all layers that were read are those that were put


class EngineProcess:
    """What an engine's process does with its store."""

    def __init__(self, config: CacheConfig, application: str) -> None:
        self.store = start_cache_tier(of_this_node(config), application)
        self.sources: list[ChunkSource] = []
        self.expected: dict[bytes, Chunk] = {}

    def put(self, token_ids: list[int], fingerprint: ModelFingerprint = SMALL) -> list[bool]:
        lineage = prefix_lineage(fingerprint, "tenant")
        return [self.store.put(chunk, lineage) for chunk in chain(token_ids, fingerprint)]

    def locate(
        self, token_ids: list[int], fingerprint: ModelFingerprint = SMALL, timeout_s: float = 2.0
    ) -> list[tuple[str, int]]:
        """Edges and usable tokens; the sources are kept for `read`. Nobody waits, so nothing is brought up."""
        lineage = prefix_lineage(fingerprint, "tenant")
        query = ChainQuery.of(lineage, fingerprint.digest, token_ids, CHUNK_TOKENS)
        self.close_sources()
        self.sources = self.store.locate(query, timeout_s)
        self.expected = {chunk.header.key: chunk for chunk in chain(token_ids, fingerprint)}
        return [(source.edge, source.num_usable) for source in self.sources]

    def read(self, num_layers: int | None = None, *, close: bool = True) -> list[ReadChunk]:
        """The first layers of each source that was located, layer by layer; None: all."""
        done = [_read(source, self.expected.get(source.header.key), num_layers) for source in self.sources]
        if close:
            self.close_sources()
        return done

    def close_sources(self) -> None:
        for source in self.sources:
            source.close()
        self.sources = []

    def stats(self) -> dict[str, int]:
        return self.store.stats()

    def close(self) -> None:
        self.store.close()


class LogProcess:
    """What an engine's process does with its sessions' logs."""

    def __init__(self, config: CacheConfig, application: str) -> None:
        config = of_this_node(config)
        self.chunks = start_cache_tier(config, application)
        logs = start_session_logs(config, application, 3600.0)
        assert logs is not None
        self.logs = logs

    def append(self, key: LogKey, rows: LogRows) -> Appended:
        return self.logs.append(key, rows)

    def read(self, key: LogKey, newer_than: int = 0) -> LogRows | str | None:
        """ "unknown": it cannot be known now."""
        try:
            return self.logs.read(key, newer_than)
        except TimeoutError:
            return "unknown"

    def delete(self, key: LogKey) -> bool | None:
        try:
            return self.logs.delete(key)
        except TimeoutError:
            return None


def chain(token_ids: list[int], fingerprint: ModelFingerprint = SMALL) -> list[Chunk]:
    """Each chunk's payload is a function of its last token."""
    lineage = prefix_lineage(fingerprint, "tenant")
    ranges = lineage.chain(token_ids, CHUNK_TOKENS)
    return [chunk_of(token_ids[r.start : r.end], r.parent, fingerprint, lineage) for r in ranges]


class CacheCluster:
    """A head, where the test's process is, and nodes that may be removed."""

    def __init__(self, folder: Path, store_bytes: int) -> None:
        self.folder, self._store_bytes = folder, store_bytes
        self._nodes: dict[str, Any] = {}
        self._processes: list[Any] = []
        with single_node():
            self._cluster = Cluster(initialize_head=True, head_node_args=self._node_args("head"))
            ray.init(
                self._cluster.address,
                namespace="test",
                log_to_driver=False,
                logging_level=logging.ERROR,
                _node_ip_address="127.0.0.1",
            )

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def add_node(self, name: str, **settings: str) -> None:
        """`settings` of its raylet, as Ray names them."""
        with single_node(), pytest.MonkeyPatch.context() as environment:
            for setting, value in settings.items():
                environment.setenv(f"RAY_{setting}", value)
            self._nodes[name] = self._cluster.add_node(**self._node_args(name))

    def remove_node(self, name: str) -> None:
        """At once, as if its power had gone."""
        self._cluster.remove_node(self._nodes.pop(name), allow_graceful=False)

    def restore_nodes(self) -> None:
        """Nodes "a" and "b" beside the head, and no others, whatever a test left."""
        for name in self._nodes.keys() - set("ab"):
            self.remove_node(name)
        for name in "ab":
            if name not in self._nodes:
                self.add_node(name)

    def node_id(self, name: str) -> str:
        return next(str(node["NodeID"]) for node in ray.nodes() if node["NodeName"] == name and node["Alive"])

    def engine(self, name: str, config: CacheConfig, application: str) -> Any:
        """An engine's process on a node, started; its methods are called by `call`."""
        made = self.begin(name, EngineProcess, config, application)
        ray.get(made.stats.remote(), timeout=START_LIMIT_S)
        return made

    def begin(self, name: str, process: type, *args: Any) -> Any:
        """A process on a node, that is yet to start."""
        affinity = NodeAffinitySchedulingStrategy(self.node_id(name), soft=False)
        made = ray.remote(process).options(num_cpus=0, scheduling_strategy=affinity).remote(*args)
        self._processes.append(made)
        return made

    def node_actor(self, name: str, application: str) -> Any:
        return ray.get_actor(node_actor_name(self.node_id(name)), f"mneme-cache-{application}")

    def end_applications(self) -> None:
        """All processes that were begun, and the actors of all cache tiers."""
        for process in self._processes:
            ray.kill(process)
        self._processes.clear()
        namespaces = {each["namespace"] for each in list_named_actors(all_namespaces=True)}
        for namespace in namespaces:
            shutdown_cache_tier(namespace.removeprefix("mneme-cache-"), timeout_s=1.0)

    def close(self) -> None:
        ray.shutdown()
        self._cluster.shutdown()

    def _node_args(self, name: str) -> dict[str, Any]:
        return {
            "num_cpus": 1,
            "object_store_memory": self._store_bytes,
            "node_name": name,
            "node_ip_address": "127.0.0.1",
            "include_dashboard": False,
        }


@contextmanager
def cache_cluster(store_bytes: int = STORE_BYTES) -> Iterator[CacheCluster]:
    """Everything in a directory of its own; nothing is left behind."""
    temporary = Path(tempfile.mkdtemp(prefix="mc-", dir="/tmp"))  # short: Ray's sockets lie in there
    root = Path(__file__).parents[3]
    settings = {"RAY_TMPDIR": str(temporary), "PYTHONPATH": os.pathsep.join((str(root / "src"), str(root)))}
    before = dict(os.environ)
    os.environ.update(_ENVIRONMENT | settings)
    os.environ.pop("RAY_ADDRESS", None)
    try:
        cluster = CacheCluster(temporary, store_bytes)
        try:
            yield cluster
        finally:
            cluster.close()
    finally:
        os.environ.clear()
        os.environ.update(before)
        shutil.rmtree(temporary, ignore_errors=True)


def call(method: Any, *args: Any, **kwargs: Any) -> Any:
    """Call an actor, in bounded time; the call is made again while Ray makes the actor again."""
    deadline_s = time.monotonic() + CALL_LIMIT_S
    while True:
        try:
            return ray.get(method.remote(*args, **kwargs), timeout=CALL_LIMIT_S)
        except ActorUnavailableError:
            assert time.monotonic() < deadline_s
            time.sleep(0.05)


def eventually(look: Callable[[], _T], limit_s: float = EVENTUALLY_S) -> _T:
    """What is seen as soon as it is true."""
    deadline_s = time.monotonic() + limit_s
    while not (seen := look()):
        assert time.monotonic() < deadline_s, seen
        time.sleep(0.05)
    return seen


def kill(actor: Any) -> None:
    """The actor's process, as the system would; Ray makes it again."""
    os.kill(call(actor.stats)["pid"], signal.SIGKILL)


def mapped_files_bytes(folder: Path) -> int:
    """Add up files of object stores that stand in for memory: where a store goes when it is full."""
    total = 0
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            lines = maps.read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            if f" {folder}" in line and "plasma" in line:
                first, last = line.split()[0].split("-")
                total += int(last, 16) - int(first, 16)
    return total


def _read(source: ChunkSource, expected: Chunk | None, num_layers: int | None) -> ReadChunk:
    header: ChunkHeader = source.header
    miss, is_exact = None, True
    for layer in range(num_layers or header.layout.num_layers):
        found = source.read(layer)
        if isinstance(found, Miss):
            miss = found
            break
        is_exact = is_exact and expected is not None and np.array_equal(found, expected.layers[layer])
    return ReadChunk(source.edge, source.num_usable, miss, is_exact)
