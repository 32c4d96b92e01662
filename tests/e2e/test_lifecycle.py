"""Starting and stopping: one clear line for what is wrong, and nothing left behind, whatever ends the server."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import httpx
import pytest

from mneme.replicas.config import EMBEDDED_MODEL
from mneme.replicas.model.directory import model_directory
from tests.cluster.bad_request_checks import check_error_object
from tests.e2e.conftest import KEY, PAGE_SIZE, SMALL_PAGES
from tests.e2e.server_process import SERVE, SERVE_FAKE, ServerProcess, free_port, running
from tests.fakes.fake_engine import expected_tokens

pytestmark = pytest.mark.e2e


def fake_server() -> tuple[str, ...]:
    return (*SERVE_FAKE, f"port={free_port()}")


def check_start_lines(lines: list[str]) -> None:
    """A line for each stage, and one for the end: no traceback, no warning."""
    assert lines[0] == "mneme serve: starting Ray"
    assert all(line.startswith("mneme serve: ") for line in lines), lines


def test_what_is_wrong_is_one_line_before_anything_starts(tmp_path: Path) -> None:
    disk = {"folder": str(tmp_path / "file"), "capacity_bytes": 1_000_000}
    (tmp_path / "file").touch()
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = str(holder.getsockname()[1])
        for arguments, reason in (
            (["--port", port], f"cannot listen on 127.0.0.1:{port}"),
            (["--set", "engine.page_size=17"], "engine.page_size"),
            (["--set", f"cache.disk={json.dumps(disk)}"], f"disk tier: {tmp_path / 'file'} cannot be used"),
            ([str(tmp_path / "nowhere")], "no such model directory"),
        ):
            result = subprocess.run([*SERVE, *arguments], capture_output=True, text=True, timeout=240, check=False)
            assert (result.returncode, result.stdout, len(result.stderr.splitlines())) == (2, "", 1), result
            assert reason in result.stderr


@pytest.mark.slow
def test_a_checkpoint_that_only_a_replica_finds_wrong(tmp_path: Path) -> None:
    checkpoint = Path(shutil.copytree(model_directory(EMBEDDED_MODEL), tmp_path / "model"))
    config = json.loads((checkpoint / "config.json").read_text())
    config["intermediate_size"] *= 2
    (checkpoint / "config.json").write_text(json.dumps(config))
    with running(*SERVE, str(checkpoint), "--port", str(free_port())) as process:
        assert process.process.wait(120) == 2
        process.await_nothing_left()
        check_start_lines(process.lines)
        assert "CheckpointError" in process.lines[-1]


def generate(url: str, num: int = 8) -> list[int]:
    with httpx.stream("POST", f"{url}/generate", json={"prompt": [1, 2, 3], "max_tokens": num}) as response:
        return [token for line in response.iter_lines() for token in json.loads(line)["tokens"]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "words"), [("killed", "its log does not say why"), ("crashed", "Fatal Python error: Aborted")]
)
def test_a_replica_that_dies_while_it_starts_says_what_it_can(fault: str, words: str) -> None:
    with running(*fake_server(), MNEME_FAKE_FAULT=fault) as process:
        assert process.process.wait(120) == 2
        process.await_nothing_left()
        begin = "mneme serve: a replica died while it started, behind weights (40%): "
        (line,) = [line for line in process.lines if line.startswith(begin)]  # Ray says that it died, too
        assert words in line


def test_ctrl_c_ends_streams_with_an_error_and_leaves_nothing_behind(small_process: ServerProcess) -> None:
    """Streams of events end at once. The last test that has this server."""
    url, key = f"{small_process.await_ready()}/v1", {"Authorization": f"Bearer {KEY}"}
    body = {
        "model": "mneme-tiny",
        "messages": [{"role": "user", "content": "Hello"}],
        **dict.fromkeys(("max_tokens", "min_tokens"), (SMALL_PAGES - 4) * PAGE_SIZE),
        "stream": True,
    }
    with (
        httpx.stream("GET", f"{url}/events", headers=key, timeout=240) as listened,
        httpx.stream("POST", f"{url}/chat/completions", json=body, headers=key, timeout=240) as response,
    ):
        events = (line for line in response.iter_lines() if line)
        first = next(events)
        small_process.stop(signal.SIGINT, whole_group=True)  # as a terminal does
        *_, last = events
        assert "replica.state" in "".join(listened.iter_text())  # whole: what is cut off raises
    assert "choices" in first
    assert check_error_object(last.removeprefix("data: ").encode()) is None
    assert "the server is stopping" in last
    assert small_process.process.returncode == 0, small_process.lines
    assert small_process.left_behind() == []


@pytest.mark.slow
def test_a_second_server_on_a_machine_may_be_stopped_impatiently(server: str) -> None:
    with running(*fake_server()) as process:
        assert generate(process.await_ready()) == expected_tokens([1, 2, 3], 8)
        process.process.send_signal(signal.SIGTERM)
        process.stop(signal.SIGINT)
        assert process.process.returncode == 130  # in order it would have been 0
        process.await_nothing_left()
    assert httpx.get(f"{server}/ready", timeout=240).status_code == 200


def test_ctrl_c_while_starting() -> None:
    with running(*fake_server()) as process:
        deadline = time.monotonic() + 60
        while not any("gcs_server" in command for command in process.processes().values()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.stop(signal.SIGINT)
        assert process.process.returncode == 130
        process.await_nothing_left()
        check_start_lines(process.lines)
        assert process.lines[-1] == "mneme serve: stopped"
