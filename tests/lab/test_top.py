"""`mneme top` over a real server with a fake engine."""

from __future__ import annotations

import json
import threading
import time
from contextlib import suppress
from typing import Any

import httpx
import pytest
from rich.text import Text

from mneme.cluster.cli.main import main
from mneme.cluster.config import HttpConfig
from mneme.lab.top import _Events
from tests.cluster.api_fixtures import CHAT, serving

pytestmark = pytest.mark.policy


def test_it_shows_replicas_tiers_and_requests(capsys: pytest.CaptureFixture[str]) -> None:
    with serving() as server:
        ended = httpx.post(f"{server.url}/v1/chat/completions", json=CHAT).headers["x-request-id"]
        assert main(["top", "--once", "--url", server.url]) == 0
        shown = capsys.readouterr().out
        assert main(["top", "--once", "--json", "--url", f"{server.url}/v1"]) == 0
        look = json.loads(capsys.readouterr().out)
    for text in ("tiny ready (2 ready)", "found 8 of 20 prompt tokens", "14 tokens generated", ended[:12], "16,000"):
        assert text in shown
    assert [each["id"] for each in look["requests"]["data"]] == [ended]
    assert look["cluster"]["replicas"][0]["cached_tokens"] == 4


def test_it_looks_again_when_something_happened(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An hour is between two looks; an answer's event comes sooner."""
    looks = list[int]()

    def drawn(look: dict[str, Any], before: dict[str, Any] | None) -> Text:
        looks.append(len(look["requests"]["data"]))
        if looks[-1]:
            raise KeyboardInterrupt
        threading.Thread(target=ask).start()
        return Text("")

    def ask() -> None:
        for _ in range(600):  # who listens may be slow to begin
            with suppress(httpx.HTTPError):  # the server has ended, as top has
                httpx.post(f"{server.url}/v1/chat/completions", json=CHAT)
            if looks[-1]:
                return
            time.sleep(0.05)

    monkeypatch.setattr("mneme.lab.top._drawn", drawn)
    with serving() as server:
        assert main(["top", "--every", "3600", "--url", server.url]) == 0
    assert looks == [0, looks[-1]]


def test_it_listens_again_when_a_stream_of_events_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """They do after five minutes. The second one here is the last: its client is closed then."""
    monkeypatch.setattr("mneme.lab.top._LEAST_S", 0.0)
    num_asked = 0

    def answer(request: httpx.Request) -> httpx.Response:
        nonlocal num_asked
        num_asked += 1
        if num_asked == 2:
            client.close()
        event = {"type": "fault", "at": 0.0, "data": {"number": num_asked}}
        return httpx.Response(200, text=f"data: {json.dumps(event)}\n\n")

    with httpx.Client(transport=httpx.MockTransport(answer), base_url="http://test") as client:
        events = _Events(client)
        events.listen()
    assert [line[10:] for line in events.lines] == ["fault  number 1", "fault  number 2"]


def test_events_of_replicas_and_faults_are_lines() -> None:
    events = _Events(httpx.Client())
    for kind in ("request.ended", "replica.left", "fault"):
        events._take({"type": kind, "at": 0.0, "data": {"model": "tiny", "replica": "a", "reason": None}})
    assert [line[10:] for line in events.lines] == [
        f"{kind}  model tiny, replica a" for kind in ("replica.left", "fault")
    ]
    assert events.has_come.is_set()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--url", "127.0.0.1:9"], "does not answer"),
        (["--url", "127.0.0.1:99999"], "the port must be from 1 to 65535"),
        (["--every", "0"], "--every: must be from 0.1 to 3600 (got 0)"),
    ],
)
def test_what_is_wrong_is_one_line(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--once", *options]) == 1
    said = capsys.readouterr().err
    assert said.startswith("mneme top: ")
    assert message in said
    assert said.count("\n") == 1


def test_a_key_is_needed_where_one_is() -> None:
    with serving(config=HttpConfig(api_keys=("secret",))) as server:
        assert main(["top", "--once", "--url", server.url]) == 1
        assert main(["top", "--once", "--url", server.url, "--api-key", "secret"]) == 0
