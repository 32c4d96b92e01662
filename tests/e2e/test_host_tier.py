"""A server whose device pool is small: sessions come back from host memory, and the answers say so."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import KEY, PAGE_SIZE, SMALL_PAGES
from tests.e2e.server_process import ServerProcess

pytestmark = pytest.mark.e2e

MODEL = "mneme-tiny"
STORY = "Once upon a time there was a small library in which every book could remember its reader. " * 6


@pytest.fixture(scope="module")
def http(small_process: ServerProcess) -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=small_process.await_ready(), headers=headers, timeout=240) as http:
        yield http


def say(http: httpx.Client, messages: list[dict[str, str]], **options: Any) -> dict[str, Any]:
    body = {"model": MODEL, "messages": messages, "max_tokens": 16, "temperature": 0, "min_tokens": 16, **options}
    found: dict[str, Any] = http.post("/v1/chat/completions", json=body).raise_for_status().json()
    return found


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_a_session_comes_back_from_the_host(http: httpx.Client) -> None:
    first = say(http, user(STORY), session={"id": "reader"})
    num_history = first["usage"]["total_tokens"] - 1  # the last token of an answer is not computed
    for index in range(SMALL_PAGES * PAGE_SIZE // num_history + 2):
        say(http, user(f"{index}. {STORY}"), session={"id": f"other/{index}"})
    kept = http.get("/v1/sessions/reader").raise_for_status().json()["kv"]
    assert kept["device"] + kept["host"] == num_history
    assert kept["host"] >= num_history / 2
    second = say(http, user("And then?"), session={"id": "reader", "append": True})
    details = second["usage"]["kv_details"]
    assert sum(details.values()) - details["truncated"] == second["usage"]["prompt_tokens"]
    assert (details["device"], details["host"]) == (kept["device"], kept["host"])
    assert details["dropped"] == 0
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == num_history
    after = http.get("/v1/sessions/reader").raise_for_status().json()
    assert after["tokens"] == second["usage"]["total_tokens"]
    assert after["kv"]["device"] == after["tokens"] - 1
    assert after["kv"] == {"device": after["tokens"] - 1, "host": 0, "absent": 1}
