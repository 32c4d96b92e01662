"""Sends one bad request to a server and checks the answer, the canary, and that every page came back."""

from __future__ import annotations

import json
import re
import socket
import sys
import time
from typing import Any
from urllib.parse import urlsplit

import httpx

from tests.cluster.bad_requests import BadRequest, RawRequest, Target

CANARY: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Say something."}],
    "max_tokens": 8,
    "temperature": 0,
    "seed": 1,
}
PAGES_SETTLE_S = 30.0
_PAGES = re.compile(r'^mneme_pages\{state="(\w+)"\} (\S+)$', re.MULTILINE)


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
        if case.method != "HEAD":
            is_anthropic = case.path.startswith("/v1/messages")
            param = check_anthropic_error(response) if is_anthropic else check_error_object(response.content)
            assert (None if is_anthropic else case.param) == param, f"param is {param!r}: {response.text[:500]}"
        assert response.headers.get("x-should-retry") == "false"
        self.check_unharmed()

    def check_raw(self, case: RawRequest) -> None:
        with socket.create_connection(self._address, timeout=60) as connection:
            connection.sendall(case.encoded(self.target))
            self.check_canary()  # while the connection is open
            if case.statuses:
                answer = _read_answer(connection, has_body=not case.sent.startswith(b"HEAD"))
                assert _status(answer) in case.statuses, answer[:500]
                if case.is_ours:
                    check_error_object(answer.partition(b"\r\n\r\n")[2])
        self.check_unharmed()

    def check_unharmed(self) -> None:
        self.check_canary()
        self.check_pages()

    def check_canary(self) -> None:
        assert self._ask_canary() == self._canary

    def check_pages(self) -> None:
        """No page but pinned ones stays in use, and none is lost, once what was asked has ended."""
        deadline = time.monotonic() + PAGES_SETTLE_S
        while True:
            asked = time.monotonic()
            pages = self.pages()
            if pages["in_use"] == pages["pinned"]:
                break
            assert asked < deadline, pages
        assert pages["free"] + pages["cached"] + pages["in_use"] == pages["total"], pages

    def pages(self) -> dict[str, int]:
        found = _PAGES.findall(self._http.get("/metrics").text)
        return {state: int(float(count)) for state, count in found}

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
    assert isinstance(error["message"], str)
    assert error["message"]
    assert len(error["message"]) < 1000
    assert isinstance(error["type"], str)
    assert isinstance(error["code"], str)
    param: str | None = error["param"]
    assert param is None or isinstance(param, str)
    return param


def check_anthropic_error(response: httpx.Response) -> None:
    """Anthropic's shape and nothing else; it names no field."""
    answer = response.json()
    assert set(answer) == {"type", "error", "request_id"}
    assert set(answer["error"]) == {"type", "message"}
    assert answer["type"] == "error"
    kinds = {404: "not_found_error", 413: "request_too_large"}
    assert answer["error"]["type"] == kinds.get(response.status_code, "invalid_request_error")
    assert 0 < len(answer["error"]["message"]) < 1000


def _read_answer(connection: socket.socket, *, has_body: bool) -> bytes:
    """The head of the first answer, and its body by Content-Length, or else all until the connection ends."""
    received = b""
    while b"\r\n\r\n" not in received:
        part = connection.recv(65536)
        if not part:
            return received
        received += part
    head = received.partition(b"\r\n\r\n")[0]
    match = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
    size = len(head) + 4 + (0 if not has_body else int(match[1]) if match else sys.maxsize)
    while len(received) < size:
        part = connection.recv(65536)
        if not part:
            break
        received += part
    return received[:size]


def _status(answer: bytes) -> int | None:
    match = re.match(rb"HTTP/1\.[01] (\d{3})", answer)
    return int(match[1]) if match else None
