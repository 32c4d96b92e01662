"""Replicas and ingresses that are killed: streams go on where they stopped, from KV that the tier has."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.budget import rarer
from tests.e2e.metrics import await_metric
from tests.e2e.replica_processes import cpu_seconds, replica_pids
from tests.e2e.server_process import SERVE, ServerProcess, free_port
from tests.e2e.test_cache_tier import MODEL, STORY, await_saved

pytestmark = pytest.mark.e2e

NUM_OUTPUT = 200
READY = 'mneme_replicas{state="ready"}'
RECOVERY_LIMIT_S = 300.0
QUESTION = "And then, what did every book remember?"


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder: Path = tmp_path_factory.mktemp("kv")
    settings = (
        *("--set", "engine.dtype=float32"),
        *("--set", "cache.load=always"),
        *("--set", f"cache.disk.folder={folder}"),
        *("--set", f"cache.disk.capacity_bytes={64 * 2**20}"),
    )
    started = ServerProcess([*SERVE, MODEL, "--replicas", "2", "--port", str(free_port()), *settings])
    try:
        started.await_ready()
        yield started
    finally:
        started.discard()


@pytest.fixture
def http(process: ServerProcess) -> Iterator[httpx.Client]:
    """Once both replicas are there."""
    await_metric(process.await_ready(), READY, 2, limit_s=RECOVERY_LIMIT_S)
    with httpx.Client(base_url=process.await_ready(), timeout=RECOVERY_LIMIT_S) as client:
        yield client


def tell(http: httpx.Client, session: str) -> dict[str, Any]:
    """A session's first turn."""
    found: dict[str, Any] = http.post("/v1/chat/completions", json=turn(session, STORY)).raise_for_status().json()
    return found


def turn(session: str, text: str) -> dict[str, Any]:
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": NUM_OUTPUT,
        "min_tokens": NUM_OUTPUT,
        "ignore_eos": True,
        "temperature": 0,
        "session": {"id": session, "append": text != STORY},
        "cache_salt": session,  # what one session left is of no use to another
    }


def stream(
    http: httpx.Client,
    body: dict[str, Any],
    on_piece: Callable[[list[str]], object] = lambda _: None,
    on_part: Callable[[list[str]], object] = lambda _: None,
) -> tuple[list[str], str]:
    """The pieces of text, of which `on_piece` hears as they come, and the completion's id.

    `on_part` hears of chunks without text: of tokens that end within a character.
    """
    pieces: list[str] = []
    with http.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as answer:
        answer.raise_for_status()
        on_piece(pieces)
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                piece = event["choices"][0]["delta"].get("content") if event["choices"] else None
                if piece:
                    pieces.append(piece)
                    on_piece(pieces)
                elif piece == "":
                    on_part(pieces)
    return pieces, event["id"]


@pytest.fixture
def undisturbed(http: httpx.Client) -> list[str]:
    """The pieces of every session's second answer (float32)."""
    session = f"undisturbed-{time.monotonic_ns()}"
    tell(http, session)
    return stream(http, turn(session, QUESTION))[0]


def killed(
    process: ServerProcess,
    http: httpx.Client,
    more: dict[str, Any],
    is_time: Callable[[list[str]], bool],
    *,
    within_character: bool = False,
) -> Iterator[tuple[str, dict[str, int] | None]]:
    """Answers whose replica was killed, as soon as `is_time` says so of the pieces until then.

    With each, how its KV was found after that, and its history's tokens; None where all of the answer was on its way
    before the signal. Ten answers at most.
    """
    for _ in range(10):
        session, home, num_history = begun(process, http)
        victims = [home]

        def kill(pieces: list[str], victims: list[int] = victims) -> None:
            if victims and is_time(pieces):
                os.kill(victims.pop(), signal.SIGKILL)

        hears = {"on_part": kill} if within_character else {"on_piece": kill}
        pieces, completion = stream(http, turn(session, QUESTION) | more, **hears)
        assert not victims
        await_metric(str(http.base_url), READY, 2, limit_s=RECOVERY_LIMIT_S)
        found = explained(http, session, completion)
        if "~1" not in found.get("request_id", ""):
            yield "".join(pieces), None
            continue
        yield "".join(pieces), {**found["kv_details"], "history": num_history}
        return
    pytest.fail("no answer was resumed")


@pytest.mark.parametrize("num_before", [5, *rarer([0])])
def test_a_stream_goes_on_from_the_tiers_kv_when_its_replica_is_killed(
    process: ServerProcess, http: httpx.Client, undisturbed: list[str], num_before: int
) -> None:
    """After so many pieces of text."""
    for text, found in killed(process, http, {}, lambda pieces: len(pieces) >= num_before):
        assert text == "".join(undisturbed)
        if found is not None:
            assert found["host"] + found["disk"] >= 0.99 * (found["history"] - 1)


@pytest.mark.slow
@pytest.mark.parametrize("is_met", [True, False], ids=["met", "never met"])
def test_text_that_may_begin_a_stop_string_is_withheld_over_a_kill(
    process: ServerProcess, http: httpx.Client, undisturbed: list[str], is_met: bool
) -> None:
    """The replica is killed while the stop string, or what is like its beginning, is being generated."""
    whole = "".join(undisturbed)
    stop = whole[100:180] + ("" if is_met else "\N{SNOWMAN}")
    first = whole.index(whole[100:180])
    more = {"stop": [stop], "min_tokens": 0}
    for text, _ in killed(process, http, more, lambda pieces: len("".join(pieces)) >= first - 8):
        assert text == (whole[:first] if is_met else whole)


@pytest.mark.slow
def test_a_character_of_several_tokens_is_whole_over_a_kill(process: ServerProcess, http: httpx.Client) -> None:
    """The replica is killed between the tokens of a character; a grammar has the answer be of such characters."""
    whole = "\N{SNOWMAN}\N{GRINNING FACE}" * 30
    more = {"guided_choice": [whole], "min_tokens": 0, "ignore_eos": False, "max_tokens": 1000}
    for text, _ in killed(process, http, more, bool, within_character=True):
        assert text == whole


def begun(process: ServerProcess, http: httpx.Client) -> tuple[str, int, int]:
    """A session of one turn that is in the tier: its name, the pid of its replica, and its tokens."""
    session, busy_before = f"killed-{time.monotonic_ns()}", cpu_seconds_at_rest(process)
    num_history = tell(http, session)["usage"]["total_tokens"]
    busy = cpu_seconds(process)
    home = max(busy, key=lambda pid: busy[pid] - busy_before.get(pid, 0.0))
    await_saved(http, num_history, session_id=session, cache_salt=session)
    return session, home, num_history


def explained(http: httpx.Client, session: str, completion: str) -> dict[str, Any]:
    """How an answer's KV was found, where it ended; nothing if that replica is gone."""
    found = http.get(f"/v1/kv/explain/{completion}", params={"cache_salt": session}).json()
    choices: list[dict[str, Any]] = found.get("choices", [])
    return choices[-1] if choices else {}


def cpu_seconds_at_rest(process: ServerProcess) -> dict[int, float]:
    """CPU time of each replica, once none has work of its own: one that has just started has."""
    deadline, before = time.monotonic() + RECOVERY_LIMIT_S, cpu_seconds(process)
    while True:
        time.sleep(0.5)
        now = cpu_seconds(process)
        if now.keys() == before.keys() and all(now[pid] - before[pid] < 0.1 for pid in now):
            return now
        assert time.monotonic() < deadline
        before = now


@pytest.mark.slow
def test_all_replicas_killed(process: ServerProcess, http: httpx.Client) -> None:
    """Who asks is told to come again, who has begun only waits."""
    whole, _ = stream(http, turn("waits", QUESTION) | {"session": {"id": "first"}})

    def kill_all(pieces: list[str]) -> None:
        if len(pieces) != 3:
            return
        deadline = time.monotonic() + RECOVERY_LIMIT_S
        while True:
            for pid in replica_pids(process, "ray::ServeReplica:mneme:engine"):
                with contextlib.suppress(ProcessLookupError):  # it is on its way
                    os.kill(pid, signal.SIGKILL)
            refused = httpx.post(f"{http.base_url}/v1/chat/completions", json=turn("new", STORY), timeout=240)
            if refused.status_code != 200:
                break
            assert time.monotonic() < deadline  # Ray had not told the ingress yet, and it waited for a replica
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")

    assert stream(http, turn("waits", QUESTION) | {"session": {"id": "second"}}, kill_all)[0] == whole
    await_metric(str(http.base_url), READY, 2, limit_s=RECOVERY_LIMIT_S)


def test_a_killed_ingress_is_replaced_and_sessions_go_on(
    process: ServerProcess, http: httpx.Client, undisturbed: list[str]
) -> None:
    num_history = tell(http, "goes")["usage"]["total_tokens"]
    (victim,) = replica_pids(process, "ray::ServeReplica:mneme:ingress")
    os.kill(victim, signal.SIGKILL)
    deadline = time.monotonic() + RECOVERY_LIMIT_S
    while True:
        assert time.monotonic() < deadline
        try:
            answer = httpx.post(f"{http.base_url}/v1/chat/completions", json=turn("goes", QUESTION), timeout=240)
        except httpx.TransportError:
            continue
        if answer.status_code == 200:
            break
        time.sleep(0.1)
    found = answer.json()
    assert found["choices"][0]["message"]["content"] == "".join(undisturbed)
    assert found["usage"]["prompt_tokens_details"]["cached_tokens"] >= 0.99 * (num_history - 1)
