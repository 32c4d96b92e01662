"""Documents that are reused in place outlive replicas and clusters, and so does what is said behind them."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.replica_processes import busiest, cpu_seconds
from tests.e2e.server_process import tiered
from tests.e2e.test_cache_tier import MODEL, answer, await_saved, say

pytestmark = pytest.mark.e2e

TEXTS = [f"The {colour} house has {number} doors and a garden. " * 12 for colour, number in (("red", 2), ("grey", 7))]
BLEND = {"mode": "selective", "selector": "hkvd", "ratio": 0.2}


def ask(http: httpx.Client, order: Sequence[int], session: str, **more: Any) -> dict[str, Any]:
    parts = [{"type": "document", "text": TEXTS[index], "id": str(index)} for index in order]
    content = [*parts, {"type": "text", "text": "\n\nHow many doors has the red house?"}]
    fields = dict.fromkeys(("max_tokens", "min_tokens"), 8) | {"temperature": 0, "session": {"id": session}, **more}
    body = {"model": MODEL, "messages": [{"role": "user", "content": content}], "blend": BLEND, **fields}
    found: dict[str, Any] = http.post("/v1/chat/completions", json=body).raise_for_status().json()
    return found


def check_documents(found: dict[str, Any], *sources: str) -> None:
    """All were reused, and their KV came from there."""
    told = found["usage"]["kv_details"]["blend"]["documents"]
    assert {each["outcome"] for each in told} == {"blended"}, told
    assert {each["source"] for each in told} <= set(sources), told


@pytest.mark.slow
def test_documents_and_a_turn_behind_them_outlive_their_replica_and_their_cluster(tmp_path: Path) -> None:
    with tiered(tmp_path) as (process, http):
        first = ask(http, [0, 1], "stays")
        check_documents(first, "computed")
        stayed = [answer(first), answer(say(http, "Why?", "stays", append=True))]
        busy_before = cpu_seconds(process)
        told = ask(http, [0, 1], "moves", cache_salt="other")
        assert answer(told) == stayed[0]
        await_saved(http, told["usage"]["total_tokens"], session_id="moves", cache_salt="other")
        for text in TEXTS:
            num_tokens = told["usage"]["kv_details"]["blend"]["documents"][TEXTS.index(text)]["tokens"]
            await_saved(http, num_tokens, model=MODEL, document=text, cache_salt="other")
        os.kill(busiest(process, busy_before), signal.SIGKILL)
        moved = say(http, "Why?", "moves", append=True, cache_salt="other")
        assert answer(moved) == stayed[1]
        assert moved["usage"]["kv_details"]["blend"]["history"] == "approximate"
        check_documents(ask(http, [1, 0], "others", cache_salt="other"), "host", "disk", "device")
        process.stop()
        assert process.process.returncode == 0, process.lines
    with tiered(tmp_path) as (process, http):
        check_documents(ask(http, [1, 0], "later", cache_salt="other"), "disk")
