"""`mneme top` over a real server with a fake engine."""

from __future__ import annotations

import json

import httpx
import pytest

from mneme.cluster.cli.main import main
from mneme.cluster.config import HttpConfig
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
