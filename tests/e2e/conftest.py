"""One server for all end-to-end tests, on a free port; it must stop within 5 s and leave nothing behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.server_process import SERVE, ServerProcess, free_port

# A pool smaller than what the tests allow memory to grow by: its pages are touched one after the other.
# In float32 the same tokens come out whatever the batch, so answers can be compared.
WARM_SYSTEM = "You are the librarian of the end-to-end tests"
SETTINGS = (
    *("--set", f"engine.kv_cache_bytes={16 * 2**20}"),
    *("--set", "engine.dtype=float32"),
    *("--set", f"engine.warm_prompts=[{{system: {WARM_SYSTEM}}}]"),
)


@pytest.fixture(scope="session")
def server_process() -> Iterator[ServerProcess]:
    process = ServerProcess([*SERVE, "mneme-tiny", "--replicas", "2", "--port", str(free_port()), *SETTINGS])
    try:
        process.await_ready()
        yield process
        process.stop()
        assert process.process.returncode == 0, process.lines
        assert process.left_behind() == []
    finally:
        process.discard()


@pytest.fixture(scope="session")
def server(server_process: ServerProcess) -> str:
    """The base URL."""
    return server_process.await_ready()
