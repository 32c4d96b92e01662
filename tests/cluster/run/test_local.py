"""`mneme serve --local` and `LLM.serve` as processes: refusals by name, signals, a port in use, nothing left behind.

Ray cannot be imported in any of them.
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from mneme.cluster.config import ClusterConfig
from mneme.cluster.local import check_local
from mneme.config import parse
from mneme.errors import ConfigError
from tests.cluster.bad_request_checks import check_error_object
from tests.e2e.server_process import SERVE_LOCAL, free_port, running

pytestmark = pytest.mark.engine

# Serves until it is interrupted; then that has closed it.
SERVE_LLM = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background inherits that it is ignored
from mneme import LLM
from mneme.errors import ConfigError, MnemeError
llm = LLM(dtype="float32", config={"max_running": 4})
try:
    llm.serve(replicas=2)
except ConfigError as error:
    print(error)
print(len(llm.generate("Hello")[0].outputs[0].token_ids) > 0)
llm.serve(port=int(sys.argv[1]), served_name="mine", http={"shutdown_grace_s": 0})
try:
    llm.generate("Hello")
except MnemeError as error:
    print(error)
print("ray" in sys.modules)
"""


def local(*arguments: str) -> tuple[str, ...]:
    return (*SERVE_LOCAL, "--port", str(free_port()), *arguments)


def chat(num: int, **fields: object) -> dict[str, object]:
    body = {"messages": [{"role": "user", "content": "Hello"}], **dict.fromkeys(("max_tokens", "min_tokens"), num)}
    return {"model": "mneme-tiny", **body, **fields}


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"replicas": 2}, "replicas"),
        ({"autoscale": {"min": 1, "max": 2}}, "autoscale"),
        ({"models": [{"model": "other"}]}, "models"),
        ({"gpus_per_replica": 0.5}, "gpus_per_replica"),
        ({"router": {"policy": "hash"}}, "router.policy"),
        ({"ray": {"address": "auto"}}, "ray.address"),
        ({"ingress": {"replicas": 2}}, "ingress.replicas"),
        ({"http": {"max_connections_per_address": 7}}, "http.max_connections_per_address"),
        ({"cache": {"disk": {"folder": "/kv/%n", "capacity_bytes": 1}}}, "cache.disk.folder"),
    ],
)
def test_what_needs_a_cluster_is_refused_by_name(config: dict[str, object], name: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name}: .*needs a cluster"):
        check_local(parse(ClusterConfig, config))


def test_what_one_engine_has_is_taken() -> None:
    disk = {"folder": "/kv", "capacity_bytes": 1}
    check_local(parse(ClusterConfig, {"replicas": 1, "engine": {"max_running": 4}, "cache": {"disk": disk}}))


def test_a_refusal_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        command = [*SERVE_LOCAL, "--port", str(port)]
        for arguments, reason in (
            (("--replicas", "2"), "replicas: needs a cluster"),
            ((), f"cannot listen on 127.0.0.1:{port}"),
        ):
            result = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=240, check=False)
            assert (result.returncode, result.stdout) == (2, "")
            assert len(result.stderr.splitlines()) == 1
            assert reason in result.stderr


def test_sigterm_ends_streams_with_an_error_and_what_was_said_is_there_after_a_restart(tmp_path: Path) -> None:
    """On a disk that no option named; `load` is this machine's, which computes a small model sooner."""
    settings = ("cache.load=always", "engine.dtype=float32", "http.shutdown_grace_s=0")
    arguments = [word for each in settings for word in ("--set", each)]
    with running(*local(*arguments), XDG_STATE_HOME=str(tmp_path)) as process:
        url = process.await_ready()
        said = httpx.post(f"{url}/v1/chat/completions", json=chat(80, session_id="s"), timeout=240).json()
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=chat(1900, stream=True), timeout=240) as response:
            events = (line for line in response.iter_lines() if line)
            first = next(events)
            process.stop(signal.SIGTERM)
            *_, last = events
        assert "choices" in first
        assert check_error_object(last.removeprefix("data: ").encode()) is None
        assert "the server is stopping" in last
        assert process.process.returncode == 0, process.lines
        assert process.lines[-1] == "mneme serve: stopped"
        assert process.left_behind() == []
    with running(*local(*arguments), XDG_STATE_HOME=str(tmp_path)) as process:
        url = process.await_ready()
        more = {"session": {"id": "s", "append": True}}
        usage = httpx.post(f"{url}/v1/chat/completions", json=chat(4, **more), timeout=240).json()["usage"]
        assert usage["kv_details"]["disk"] > 64, usage
        assert usage["prompt_tokens_details"]["cached_tokens"] >= said["usage"]["total_tokens"] - 1, usage
        assert httpx.get(f"{url}/v1/sessions/s").json()["turns"] == 2
        assert f"{tmp_path}/mneme/kv-0, up to " in process.await_line("  KV       on ")


def test_ctrl_c_while_starting_and_twice_while_stopping() -> None:
    with running(*local()) as process:
        process.await_line("mneme serve: ")  # the first stage
        process.stop(signal.SIGINT, whole_group=True)
        assert process.process.returncode == 130
        process.await_nothing_left()
        assert process.lines[-1] == "mneme serve: stopped"
    with running(*local("--set", "http.shutdown_grace_s=600")) as process:
        url = process.await_ready()
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=chat(1900, stream=True), timeout=240) as response:
            next(response.iter_lines())
            process.process.send_signal(signal.SIGTERM)
            process.await_line("mneme serve: stopping")
            process.stop(signal.SIGTERM)
        assert process.process.returncode == 130
        process.await_nothing_left()


def test_an_open_stream_of_events_ends_with_the_server_which_waits_for_nothing() -> None:
    with running(*local()) as process:
        url = process.await_ready()
        with httpx.stream("GET", f"{url}/v1/events", timeout=240) as response:
            events = (line for line in response.iter_lines() if line.startswith("data: "))
            next(events)
            asked = httpx.post(f"{url}/v1/chat/completions", json=chat(2), timeout=240).raise_for_status()
            assert json.loads(next(events).removeprefix("data: "))["data"]["replica"] == "local"
            explained = httpx.get(f"{url}/v1/kv/explain/{asked.json()['id']}").json()
            assert explained["choices"][0]["replica"] == "local"
            process.stop(signal.SIGINT)
            list(events)  # whole: what is cut off raises
        assert process.process.returncode == 0, process.lines
        asked_to, has_stopped = process.lines[-2:]  # and nothing between
        assert asked_to.startswith("mneme serve: stopping")
        assert has_stopped == "mneme serve: stopped"


def test_an_llm_serves_its_own_engine_until_it_is_interrupted() -> None:
    with running(sys.executable, "-c", SERVE_LLM, str(free_port())) as process:
        url = process.await_ready()
        assert [each["id"] for each in httpx.get(f"{url}/v1/models").json()["data"]] == ["mine"]
        body = {**chat(8), "model": "mine"}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=240).raise_for_status().json()
        assert answer["usage"]["completion_tokens"] == 8
        process.stop(signal.SIGINT)
        assert process.process.returncode == 0, process.lines
        assert [process.lines[i] for i in (0, 1, -2, -1)] == [
            "replicas: needs a cluster; one engine in one process (--local) has none",
            "True",
            "this LLM is closed",
            "False",
        ]
