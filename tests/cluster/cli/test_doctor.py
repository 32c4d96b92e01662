"""What `mneme doctor` says of a machine, and of a cluster that is running on it."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pynvml
import pytest

from mneme.cluster.cli import doctor as doctor_command
from mneme.cluster.cli.doctor import Finding, doctor

pytestmark = pytest.mark.engine

PAGE = "# TYPE x gauge\nmneme_cuda_graph_replays_total 0\nmneme_cuda_graph_failures_total 3\nmneme_cuda_graphs_off 1\n"


def test_graphs_that_are_off_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    class Metrics(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(PAGE.encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Metrics) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        doctor(port=server.server_port, as_json=True)
        server.shutdown()
        thread.join()
    findings = {each["name"]: each for each in json.loads(capsys.readouterr().out)["findings"]}
    assert findings["cuda graphs"]["value"] == "off in 1 replicas, 3 captures failed, 0 steps replayed"
    assert "logs" in findings["cuda graphs"]["advice"]
    assert findings["port"]["is_ok"] is False


def test_nothing_is_said_of_graphs_where_nobody_serves(capsys: pytest.CaptureFixture[str]) -> None:
    doctor(port=1, as_json=False)
    assert "cuda graphs" not in capsys.readouterr().out


@pytest.mark.parametrize("mode", [None, "disabled", "token"])
def test_ray_without_tokens_is_warned_of(
    mode: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    if mode is not None:
        monkeypatch.setenv("RAY_AUTH_MODE", mode)
    doctor(port=1, as_json=True)
    findings = {each["name"]: each for each in json.loads(capsys.readouterr().out)["findings"]}
    assert findings["RAY_AUTH_MODE"]["value"] == (mode or "not set; `mneme serve` sets token")
    assert ("token" in findings["RAY_AUTH_MODE"]["advice"]) == (mode == "disabled")


def test_what_is_found_is_said_at_once_and_summed_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fine, bad = Finding("first", "[/]", True), Finding("second", "missing", False, "install it")

    def found_later() -> list[Finding]:
        assert capsys.readouterr().out == "ok  first            [/]\n"
        return [bad, bad]

    monkeypatch.setattr(doctor_command, "_examinations", lambda port: [lambda: [fine], found_later])
    assert doctor(port=1, as_json=False) == 1
    assert capsys.readouterr().out.splitlines() == ["BAD second           missing  -> install it"] * 2 + ["2 problems"]
    monkeypatch.setattr(doctor_command, "_examinations", lambda port: [lambda: [fine]])
    assert doctor(port=1, as_json=False) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "all fine"


def test_a_missing_driver_has_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", fail)
    (finding,) = doctor_command._gpus()  # of this machine's devices nothing else can be known
    assert finding.is_ok is None
    assert "install it, or docker run --gpus all" in finding.advice


@pytest.mark.parametrize(
    ("num_gpus", "trouble", "value", "is_ok"),
    [
        (0, None, "2 replicas on the CPU", True),
        (8, None, "8 replicas with 1 GPU each", True),
        (1, "torch is a CPU build", "1 replica with 1 GPU each, but torch is a CPU build", False),
    ],
)
def test_the_doctor_says_which_replica_gets_what(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    num_gpus: int,
    trouble: str | None,
    value: str,
    is_ok: bool,
) -> None:
    monkeypatch.setattr(doctor_command, "count_gpus", lambda: num_gpus)
    monkeypatch.setattr("mneme.replicas.engine.build.cuda_trouble", lambda: trouble)
    doctor(port=1, as_json=True)
    findings = {each["name"]: each for each in json.loads(capsys.readouterr().out)["findings"]}
    assert (findings["placement"]["value"], findings["placement"]["is_ok"]) == (value, is_ok)


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ("mneme.cluster.cli.doctor.importlib.util.find_spec", "triton is not installed"),
        ("mneme.cluster.cli.doctor.shutil.which", "triton finds no C compiler"),
    ],
)
def test_the_doctor_finds_that_triton_cannot_compile(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], missing: str, said: str
) -> None:
    monkeypatch.setattr(doctor_command, "count_gpus", lambda: 1)
    monkeypatch.setattr("mneme.replicas.engine.build.cuda_trouble", lambda: None)
    monkeypatch.setattr(missing, lambda name: None)
    assert doctor(port=1, as_json=True) == 1
    findings = {each["name"]: each for each in json.loads(capsys.readouterr().out)["findings"]}
    assert said in findings["placement"]["value"]
