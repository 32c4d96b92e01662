"""`mneme serve --address`: the whole application on the nodes of a Ray cluster that was there before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import ray
from ray import serve

from tests.e2e.metrics import read_metrics
from tests.e2e.nodes.cache_cluster import MARKS, CacheCluster, eventually
from tests.e2e.server_process import SERVE, ServerProcess, free_port
from tests.e2e.test_cache_tier import MODEL, STORY, answer, await_saved, say

pytestmark = MARKS


@contextmanager
def joined(cluster: CacheCluster, port: int, *more: str) -> Iterator[tuple[ServerProcess, httpx.Client]]:
    """As on a machine where `ray start` left the cluster's address."""
    (cluster.folder / "ray" / "ray_current_cluster").write_text(cluster.address)
    command = [*SERVE, MODEL, "--address", "auto", "--port", str(port), *more]
    process = ServerProcess(command, RAY_AUTH_MODE="disabled", RAY_TMPDIR=str(cluster.folder))
    try:
        with httpx.Client(base_url=process.await_ready(), timeout=240) as http:
            yield process, http
    finally:
        process.discard()


def test_sessions_on_three_nodes_move_when_one_goes(cluster: CacheCluster, tmp_path: Path) -> None:
    """A replica on each; what a session said on the node that is removed another goes on with, to the token."""
    cluster.restore_nodes()
    port = free_port()
    # All nodes of this cluster have one address, and so one port: only the head's proxy listens.
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    settings = (
        *("--replicas", "3", "--set", "cpus_per_replica=1"),
        *("--set", "engine.dtype=float32"),
        *("--set", "cache.load=always"),
        *("--set", f"cache.disk.folder={tmp_path}/%n"),
        *("--set", f"cache.disk.capacity_bytes={64 * 2**20}"),
    )
    try:
        with joined(cluster, port, *settings) as (process, http):
            assert read_metrics(str(http.base_url))["mneme_cache_nodes"] == 3
            sessions = [f"session-{number}" for number in range(6)]
            first = [say(http, STORY, session) for session in sessions]
            for session, found in zip(sessions, first, strict=True):
                await_saved(http, found["usage"]["total_tokens"], session_id=session)
            # A turn's log is copied to another node behind the answer: what is lost at once with its node is lost.
            eventually(lambda: num_logs(str(http.base_url)) == 2 * len(sessions))
            stayed = say(http, "And then?", sessions[0], append=True)
            cluster.remove_node("b")
            moved = [say_again(http, session) for session in sessions[1:]]
            num_tokens = stayed["usage"]["prompt_tokens"]
            # Whose answer was lost with the ingress has asked twice: the session may have kept the first time.
            once = [each for each, is_cut in moved if not is_cut or each["usage"]["prompt_tokens"] == num_tokens]
            assert len(once) >= len(moved) - 1
            assert [answer(each) for each in once] == [answer(stayed)] * len(once)
            cluster.restore_nodes()
            eventually(lambda: http.get("/ready").json()["replicas"] == 3)
            process.stop()
            assert process.process.returncode == 0, process.lines
        eventually(lambda: not serve.status().applications)
        assert ray.is_initialized()  # the cluster is as it was
    finally:
        serve.shutdown()


def num_logs(server: str) -> float:
    """Session logs of all nodes, copies too."""
    values = read_metrics(server).values
    return sum(value for name, value in values.items() if name.startswith("mneme_session_logs"))


def say_again(http: httpx.Client, session: str) -> tuple[dict[str, Any], bool]:
    """A client that comes again when it is told to, or when the only ingress has gone with the node: Serve says 500.

    Also returns whether that was so.
    """
    is_cut = False

    def try_once() -> dict[str, Any] | None:
        nonlocal is_cut
        try:
            return say(http, "And then?", session, append=True)
        except httpx.HTTPStatusError as error:
            if error.response.status_code not in (500, 503):
                raise
            is_cut |= error.response.status_code == 500
            return None

    found = eventually(try_once)
    assert found is not None
    return found, is_cut
