"""Replicas and ingresses that are killed: streams go on where they stopped, from KV that the tier has."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.budget import rarer
from tests.e2e.metrics import await_metric
from tests.e2e.replica_processes import INGRESSES, busiest, cpu_seconds, replica_pids
from tests.e2e.server_process import ServerProcess, tiered
from tests.e2e.test_cache_tier import MODEL, STORY, await_saved

pytestmark = pytest.mark.e2e

NUM_OUTPUT = 200
READY = 'mneme_replicas{state="ready"}'
RECOVERY_LIMIT_S = 300.0
QUESTION = "And then, what did every book remember?"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServerProcess, httpx.Client]]:
    with tiered(tmp_path_factory.mktemp("kv")) as started:
        yield started


@pytest.fixture
def process(served: tuple[ServerProcess, httpx.Client]) -> ServerProcess:
    """Once both replicas are there."""
    await_metric(served[0].await_ready(), READY, 2, limit_s=RECOVERY_LIMIT_S)
    return served[0]


@pytest.fixture
def http(process: ServerProcess, served: tuple[ServerProcess, httpx.Client]) -> httpx.Client:
    return served[1]


def tell(http: httpx.Client, session: str) -> int:
    """A session's first turn; returns its tokens."""
    found = http.post("/v1/chat/completions", json=turn(session, STORY)).raise_for_status().json()
    return int(found["usage"]["total_tokens"])


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
    http: httpx.Client, body: dict[str, Any], on_piece: Callable[[list[str]], object] = lambda _: None
) -> tuple[list[str], str]:
    """The pieces of text, of which `on_piece` hears as they come, and the completion's id."""
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
    return pieces, event["id"]


@pytest.fixture
def undisturbed(http: httpx.Client) -> list[str]:
    """The pieces of every session's second answer (float32)."""
    session = f"undisturbed-{time.monotonic_ns()}"
    tell(http, session)
    return stream(http, turn(session, QUESTION))[0]


def killed(
    process: ServerProcess, http: httpx.Client, more: dict[str, Any], is_time: Callable[[list[str]], bool]
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

        pieces, completion = stream(http, turn(session, QUESTION) | more, kill)
        assert not victims
        await_metric(str(http.base_url), READY, 2, limit_s=RECOVERY_LIMIT_S)
        told = http.get(f"/v1/kv/explain/{completion}", params={"cache_salt": session}).json()
        found = told["choices"][-1] if told.get("choices") else {}  # nothing if the replica where it ended is gone
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
def test_a_grammar_is_held_to_over_a_kill(process: ServerProcess, http: httpx.Client) -> None:
    """Its state is made anew from the tokens that the client has; characters of several tokens stay whole."""
    whole = "\N{SNOWMAN}\N{GRINNING FACE}" * 30
    more = {"guided_choice": [whole], "min_tokens": 0, "ignore_eos": False, "max_tokens": 1000}
    for text, _ in killed(process, http, more, lambda pieces: len(pieces) > 2):
        assert text == whole


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


def begun(process: ServerProcess, http: httpx.Client) -> tuple[str, int, int]:
    """A session of one turn that is in the tier: its name, the pid of its replica, and its tokens."""
    session, busy_before = f"killed-{time.monotonic_ns()}", cpu_seconds_at_rest(process)
    num_history = tell(http, session)
    home = busiest(process, busy_before)
    await_saved(http, num_history, session_id=session, cache_salt=session)
    return session, home, num_history


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


def test_a_killed_ingress_is_replaced_and_sessions_go_on(
    process: ServerProcess, http: httpx.Client, undisturbed: list[str]
) -> None:
    num_history = tell(http, "goes")
    (victim,) = replica_pids(process, INGRESSES)
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
