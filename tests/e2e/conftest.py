"""The servers of all end-to-end tests, on free ports; they stop in order and leave nothing behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.server_process import SERVE, SERVE_LOCAL, ServerProcess, free_port, running, serving

# A pool smaller than what the tests allow memory to grow by: its pages are touched one after the other.
# In float32 the same tokens come out in any batch but at near ties, which the answers that are compared do not have
# (tests/replicas/engine/test_near_ties.py).
WARM_SYSTEM = "You are the librarian of the end-to-end tests"
SETTINGS = (
    *("--set", f"engine.kv_cache_bytes={16 * 2**20}"),
    *("--set", "engine.dtype=float32"),
    *("--set", f"engine.warm_prompts=[{WARM_SYSTEM}]"),
)
SMALL_PAGES, PAGE_SIZE = 48, 32  # a few conversations
KEY, CONNECTIONS = "door", 100
SMALL_SETTINGS = (
    *("--set", f"engine.num_pages={SMALL_PAGES}"),
    *("--set", f"engine.page_size={PAGE_SIZE}"),
    *("--set", f"engine.host_cache_bytes={64 * 2**20}"),
    *("--set", "engine.dtype=float32"),
    *("--set", f"http.max_connections_per_address={CONNECTIONS}"),
    *("--set", "http.shutdown_grace_s=0"),
    *("--api-key", KEY),
)


@pytest.fixture(scope="session")
def server_process() -> Iterator[ServerProcess]:
    with serving(*SERVE, "mneme-tiny", "--replicas", "2", "--port", str(free_port()), *SETTINGS) as process:
        yield process


@pytest.fixture(scope="session")
def local_process() -> Iterator[ServerProcess]:
    """One engine and its API in one process, without Ray."""
    with serving(*SERVE_LOCAL, "mneme-tiny", "--port", str(free_port()), *SETTINGS) as process:
        yield process


@pytest.fixture(scope="session", params=["server_process", "local_process"], ids=["cluster", "local"])
def each_server(request: pytest.FixtureRequest) -> str:
    """The base URLs of the cluster and of the one process: what is said over HTTP is the same."""
    process: ServerProcess = request.getfixturevalue(request.param)
    return process.await_ready()


@pytest.fixture(scope="session")
def small_process() -> Iterator[ServerProcess]:
    """One replica with few pages, a key, and few connections for an address; the last test that has it stops it."""
    with running(*SERVE, "mneme-tiny", "--replicas", "1", "--port", str(free_port()), *SMALL_SETTINGS) as process:
        process.await_ready()
        yield process


@pytest.fixture(scope="session")
def server(server_process: ServerProcess) -> str:
    """The base URL."""
    return server_process.await_ready()
