"""Prompts that are warm before traffic, through HTTP, against two replicas, and one."""

from __future__ import annotations

import time
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import WARM_SYSTEM

pytestmark = pytest.mark.e2e

MODEL = "mneme-tiny"


def ask(http: httpx.Client, system: str, question: str) -> dict[str, int]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    body = {"model": MODEL, "messages": messages, "max_tokens": 2, "temperature": 0}
    usage: dict[str, Any] = http.post("/v1/chat/completions", json=body).raise_for_status().json()["usage"]
    return {"prompt": usage["prompt_tokens"], "cached": usage["prompt_tokens_details"]["cached_tokens"]}


def test_a_warm_system_prompt_is_cached_on_every_replica_until_it_is_deleted(each_server: str) -> None:
    system = f"Number {time.monotonic_ns()}. You answer questions about a library in which books remember. " * 4
    with httpx.Client(base_url=each_server, timeout=240) as http:
        body = {"model": MODEL, "messages": [{"role": "system", "content": system}]}
        pin = http.post("/v1/kv/warm", json=body).raise_for_status().json()
        assert pin["pinned"]
        assert len(pin["replicas"]) == http.get("/ready").json()["replicas"]
        for index in range(6):  # whichever replica answers
            usage = ask(http, system, f"{index}. Who reads?")
            assert pin["num_tokens"] <= usage["cached"] < usage["prompt"]
        assert pin["id"] in [each["id"] for each in http.get("/v1/kv/pins").json()["data"]]
        assert http.delete(f"/v1/kv/pins/{pin['id']}").status_code == 200
        assert http.delete(f"/v1/kv/pins/{pin['id']}").status_code == 404
        assert pin["id"] not in [each["id"] for each in http.get("/v1/kv/pins").json()["data"]]


def test_configured_prompts_are_warm_when_the_server_is_ready(each_server: str) -> None:
    """The server of these tests is configured with one."""
    with httpx.Client(base_url=each_server, timeout=240) as http:
        (pin,) = [each for each in http.get("/v1/kv/pins").json()["data"] if each["configured"]]
        assert pin["pinned"]
        assert len(pin["replicas"]) == http.get("/ready").json()["replicas"]
        usage = ask(http, WARM_SYSTEM, "Who reads?")
        assert pin["num_tokens"] <= usage["cached"] < usage["prompt"]
        refused = http.delete(f"/v1/kv/pins/{pin['id']}")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "pin_id")
