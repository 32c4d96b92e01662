"""What `mneme doctor` says of a cluster that is running."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from mneme.cluster.doctor_command import doctor

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
