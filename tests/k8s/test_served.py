"""The chart's render serves: its serveConfigV2, with its pods' environment, in a Ray instance on this machine."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import httpx
import pytest

from tests.e2e.server_process import START_LIMIT_S, free_port, running

pytestmark = pytest.mark.e2e
CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}


def test_the_application_of_the_rendered_manifest_answers(tmp_path: Path) -> None:
    command = (sys.executable, "-m", "tests.fakes.serve_rendered", "cpu", str(free_port()), str(tmp_path))
    with running(*command) as process:
        url = process.await_line("deployed:").split()[1]
        with httpx.Client(base_url=url, timeout=60) as http:
            deadline = time.monotonic() + START_LIMIT_S
            while num_ready(http) < 2:
                assert time.monotonic() < deadline, process.lines
                time.sleep(0.2)
            answer = http.post("/v1/chat/completions", json=CHAT).raise_for_status().json()
            assert answer["choices"][0]["message"]["content"]
            with http.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True}) as stream:
                assert list(stream.iter_lines())[-2] == "data: [DONE]"
        assert list(tmp_path.glob("mneme-*"))  # its folder
        process.stop()
        assert process.process.returncode == 0, process.lines


def num_ready(http: httpx.Client) -> int:
    """Return how many replicas are ready; none while nobody listens."""
    try:
        found = http.get("/ready")
    except httpx.TransportError:
        return 0
    count: int = found.json()["replicas"] if found.status_code == 200 else 0
    return count
