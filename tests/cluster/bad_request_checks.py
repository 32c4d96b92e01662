"""Sends one bad request to a server and checks the answer, the canary, and that every page came back."""

from __future__ import annotations

import json
import socket
import time
from http.client import HTTPResponse
from typing import Any
from urllib.parse import urlsplit

import httpx

from tests.cluster.bad_requests import MESSAGES, BadRequest, RawRequest, Target
from tests.cluster.metric_samples import totals_of

CANARY: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Say something."}],
    "max_tokens": 8,
    "temperature": 0,
    "seed": 1,
}
PAGES_SETTLE_S = 30.0


class BadRequestChecker:
    """One server under test; the canary's answer is taken when it is built."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=60)
        parts = urlsplit(url)
        self._address = (parts.hostname or "", parts.port or 80)
        model = self._http.get("/v1/models").json()["data"][0]
        self.target = Target(model["id"], model["max_model_len"])
        self._canary = self._ask_canary()

    def close(self) -> None:
        self._http.close()

    def check(self, case: BadRequest) -> None:
        headers = {"content-type": "application/json", **case.headers}
        response = self._http.request(case.method, case.path, content=case.encoded(self.target), headers=headers)
        assert response.status_code == case.status, response.text[:500]
        if case.path.startswith(MESSAGES):
            assert (case.param or "") in check_anthropic_error(response), response.text[:500]
        else:
            assert check_error_object(response.content) == case.param, response.text[:500]
        assert response.headers.get("x-should-retry") == "false"
        self.check_unharmed()

    def check_raw(self, case: RawRequest) -> None:
        with socket.create_connection(self._address, timeout=60) as connection:
            connection.sendall(case.encoded(self.target))
            self._check_canary()  # while the connection is open
            if case.statuses:
                with HTTPResponse(connection, method=case.sent.partition(b" ")[0].decode("latin-1")) as answer:
                    answer.begin()
                    assert answer.status in case.statuses
                    if case.is_ours:
                        check_error_object(answer.read())
        self.check_unharmed()

    def check_unharmed(self) -> None:
        """The canary's answer is the same, and no page is lost or, but for pinned ones, stays in use."""
        self._check_canary()
        deadline = time.monotonic() + PAGES_SETTLE_S
        while (pages := self._pages())["in_use"] != pages["pinned"]:
            assert time.monotonic() < deadline, pages
        assert pages["free"] + pages["cached"] + pages["in_use"] == pages["total"], pages

    def _pages(self) -> dict[str, int]:
        found, states = totals_of(self._http.get("/metrics").text), ("free", "cached", "in_use", "pinned", "total")
        return {state: int(found[f'mneme_pages{{state="{state}"}}']) for state in states}

    def _check_canary(self) -> None:
        assert self._ask_canary() == self._canary

    def _ask_canary(self) -> Any:
        response = self._http.post("/v1/chat/completions", json={**CANARY, "model": self.target.model})
        assert response.status_code == 200, response.text
        return response.json()["choices"]


def check_error_object(body: bytes) -> str | None:
    """OpenAI's shape and nothing else; returns `param`."""
    answer = json.loads(body)
    assert set(answer) == {"error"}
    error = answer["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert all(isinstance(error[name], str) for name in ("message", "type", "code"))
    assert 0 < len(error["message"]) < 1000
    param: str | None = error["param"]
    assert param is None or isinstance(param, str)
    return param


def check_anthropic_error(response: httpx.Response) -> str:
    """Anthropic's shape and nothing else; returns the message."""
    answer = response.json()
    assert set(answer) == {"type", "error", "request_id"}
    assert set(answer["error"]) == {"type", "message"}
    assert answer["type"] == "error"
    kinds = {404: "not_found_error", 413: "request_too_large"}
    assert answer["error"]["type"] == kinds.get(response.status_code, "invalid_request_error")
    message: str = answer["error"]["message"]
    assert 0 < len(message) < 1000
    return message
