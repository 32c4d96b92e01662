"""`mneme bench serve` against the HTTP API over a fake engine, and against servers that break."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from mneme.cluster.cli.main import main
from mneme.errors import Overloaded
from mneme.lab.bench.client import ChatClient
from mneme.lab.bench.measure import Answer
from tests.cluster.api_fixtures import serving

COUNTED = {"prompt_tokens": 12, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 3}}


def bench(capsys: pytest.CaptureFixture[str], url: str, *arguments: str, status: int = 0) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["bench", "serve", "--url", url, *arguments, "--json"]) == status
    figures: dict[str, Any] = json.loads(capsys.readouterr().out)
    return figures


@pytest.mark.parametrize("workload", ["sessions", "shared-prefix", "rag", "agent"])
def test_each_workload_is_answered_and_counted(
    workload: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths = ["--words", "4", "--prefix-words", "8", "--document-words", "6", "--turns", "2"]
    with serving(max_context=8192) as server:
        out, report = tmp_path / "all.json", tmp_path / "report.html"
        figures = bench(
            capsys, server.url, "--workload", workload, "--num-requests", "6", "--concurrency", "3", *lengths,
            "--out", str(out), "--report", str(report), "--session-header", "--slo", "ttft=60000,e2e=60000",
        )  # fmt: skip
        requests = server.engine.requests
    assert (figures["num_requests"], figures["num_ok"], figures["num_failed"]) == (6, 6, 0), figures["first_error"]
    assert figures["prompt_tokens"] == sum(len(request.prompt_token_ids) for request in requests)
    assert figures["output_tokens"] > 0
    assert figures["goodput_per_s"] == pytest.approx(figures["requests_per_s"])
    assert {request.session_id is not None for request in requests} == {True}
    assert any(request.documents for request in requests) == (workload == "rag")
    assert len(json.loads(out.read_text())["requests"]) == 6
    assert report.read_text().count("<svg") == 6
    assert "http" not in report.read_text().replace(server.url, "")


def test_a_run_is_held_against_an_earlier_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, report = tmp_path / "before.json", tmp_path / "report.html"
    load = ["bench", "serve", "--num-requests", "4", "--words", "4", "--turns", "2", "--api-key", "a secret"]
    with serving(max_context=8192) as server:
        assert main([*load, "--url", server.url, "--out", str(before)]) == 0
        capsys.readouterr()
        assert main([*load, "--url", server.url, "--against", str(before), "--report", str(report)]) == 0
        page, printed = report.read_text(), capsys.readouterr().out
        before.write_text('{"num_ok": 1}')
        assert main([*load, "--url", server.url, "--against", str(before)]) == 2
        assert "is not what --out" in capsys.readouterr().err
    assert "requests                4 answered" in printed
    assert printed.count("  was  ") > 10
    assert page.count("before.json</text>") == 6  # a line of each plot
    assert "a secret" not in page
    assert "<td></td><td>this run</td><td>before.json</td>" in page


def test_only_json_is_printed_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    with serving() as server:
        assert main(["bench", "serve", "--url", server.url, "--num-requests", "1", "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    wanted = {"ttft_p50_s", "ttft_p99_s", "itl_p99_s", "output_tokens_per_s", "cached_share", "num_failed"}
    assert wanted <= json.loads(line).keys()


def test_a_table_alone_is_printed_otherwise(capsys: pytest.CaptureFixture[str]) -> None:
    with serving() as server:
        assert main(["bench", "serve", "--url", server.url, "--num-requests", "1"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("requests                1 answered, 0 failed")
    assert "{" not in shown


def test_refusals_are_counted_by_kind(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(refusal=Overloaded("full")) as server:
        figures = bench(capsys, server.url, "--num-requests", "5", "--turns", "1", "--rate", "1000", status=1)
    assert figures["errors"] == {"HTTP 429": 5}
    assert "full" in figures["first_error"]
    assert figures["ttft_ms"] is None


def chunk(**delta: Any) -> str:
    return json.dumps({"choices": [{"delta": delta, "finish_reason": delta.pop("finish", None)}]})


STREAMS: dict[str, list[str]] = {
    "good": [chunk(role="assistant", content=""), chunk(content="a"), chunk(content="b", finish="stop"),
             json.dumps({"choices": [], "usage": COUNTED}), "[DONE]"],
    "no usage": [chunk(content="a", finish="stop"), "[DONE]"],
    "ended early": [chunk(content="a")],
    "garbage in the stream": [chunk(content="a"), "{"],
    "error in the stream": [chunk(content="a"), json.dumps({"error": {"message": "gone"}})],
    "no stream": [],
}  # fmt: skip


@contextlib.contextmanager
def streaming(events: list[str]) -> Iterator[str]:
    """A server that says this to everyone."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._say("application/json", json.dumps({"data": [{"id": "other"}]}))

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self._say("text/event-stream", "".join(f"data: {event}\n\n" for event in events))

        def _say(self, kind: str, text: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(text.encode())))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize("kind", STREAMS)
def test_streams_of_other_servers(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    is_good = kind in ("good", "no usage")
    with streaming(STREAMS[kind]) as url:
        figures = bench(capsys, url, "--num-requests", "3", "--turns", "1", status=0 if is_good else 1)
    assert figures["model"] == "other"
    assert figures["errors"] == ({} if is_good else {kind: 3})
    if kind == "good":
        assert (figures["prompt_tokens"], figures["output_tokens"], figures["cached_share"]) == (36, 6, 0.25)
    if kind == "no usage":
        assert figures["num_without_usage"] == 3
        assert figures["output_tokens_per_s"] is figures["cached_share"] is None


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (["--workload", "nothing"], "workload"),
        (["--workload", "trace:/no/such.jsonl"], "no/such"),
        (["--rate", "0"], "rate"),
        (["--rate", "nan"], "rate"),
        (["--concurrency", "0"], "concurrency"),
        (["--slo", "ttft=x"], "slo"),
        (["--out", "/no/such/folder/x.json"], "out"),
        (["--workload", "rag", "--num-documents", "40"], "num-documents"),
        (["--workload", "trace:x.jsonl", "--turns", "3"], "turns"),
    ],
)
def test_bad_options_are_named_before_anything_is_sent(
    arguments: list[str], field: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving() as server:
        assert main(["bench", "serve", "--url", server.url, *arguments]) == 2
        assert not server.engine.requests
    assert field in capsys.readouterr().err


@pytest.mark.parametrize("url", ["http://127.0.0.1:99999", "127.0.0.1:0/v1", "http://127.0.0.1:port"])
def test_a_port_that_no_server_has_is_one_line(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--model", "m", "--url", url, "--num-requests", "2"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert url in line
    assert "port" in line


@pytest.mark.parametrize("error", [OverflowError("port must be 0-65535"), OSError("no route"), ValueError("bad host")])
def test_what_fails_below_http_is_that_request_s_failure(error: Exception) -> None:
    class Failing(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            raise error

    async def ask() -> Answer:
        async with httpx.AsyncClient(base_url="http://x", transport=Failing()) as http:
            return await ChatClient(http, {}, session_header=False, timeout_s=10).ask([], 1, "s")

    answer = asyncio.run(ask())
    assert (answer.error, answer.detail) == ("cannot connect", str(error))


def test_where_nobody_answers_that_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        assert main(["bench", "serve", "--url", url]) == 2
    assert url in capsys.readouterr().err


def test_what_was_measured_before_an_interrupt_is_told() -> None:
    with serving(is_endless=True) as server:
        command = [sys.executable, "-m", "mneme.cluster.cli.main", "bench", "serve", "--json", "--url", server.url]
        more = ["--num-requests", "1000", "--turns", "1", "--max-tokens", "20"]
        process = subprocess.Popen(
            [*command, *more],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
        )
        while len(server.engine.requests) < 50:
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=120)
    figures = json.loads(out.splitlines()[-1])
    assert process.returncode == 130
    assert figures["interrupted"]
    assert 0 < figures["num_ok"] < 1000
