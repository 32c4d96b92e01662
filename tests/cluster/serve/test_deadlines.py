"""`timeout_s` from a body to a replica, and what becomes of a request whose time is up."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
from starlette.testclient import TestClient

from mneme.cluster.http.api import build_api
from mneme.cluster.http.api_state import Backend
from mneme.cluster.serve.ray_client import PlacedChoice, RayEngineClient
from mneme.errors import DeadlineExceeded, MnemeError, Overloaded
from mneme.replicas.request import GenerationRequest, SamplingParams
from tests.cluster.api_fixtures import CHAT, COMPLETION, MODEL, TOKENIZER, post, serving
from tests.cluster.fake_engine_client import FakeEngineClient
from tests.cluster.serve.scenarios import ENDLESS, all_open, expected, over, request, run
from tests.fakes.direct_calls import DirectCalls
from tests.fakes.fake_engine import FakeEngineLoop

PATHS = [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)]


class Clock:
    """Each look at it costs half a second."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 0.5
        return self.now_s


def ask(engine: FakeEngineClient, path: str, body: dict[str, Any], **options: Any) -> httpx.Response:
    return TestClient(build_api([Backend(engine, MODEL, TOKENIZER, **options)], clock=Clock())).post(path, json=body)


@pytest.mark.parametrize(("path", "body"), PATHS)
def test_the_engine_hears_what_is_left_since_the_request_arrived(path: str, body: dict[str, Any]) -> None:
    engine = FakeEngineClient(TOKENIZER)
    assert ask(engine, path, {**body, "timeout_s": 30}).status_code == 200
    assert ask(engine, path, body, default_timeout_s=20.0).status_code == 200
    assert ask(engine, path, {**body, "timeout_s": 0.75}, default_timeout_s=20.0).status_code == 504
    assert ask(engine, path, body).status_code == 200
    left = [request.timeout_s for request in engine.requests]
    assert left == [29.0, 19.0, None]  # it was looked at on arrival, when the body was there, and at the end


@pytest.mark.parametrize(
    ("path", "changes", "param"),
    [
        ("/v1/chat/completions", {"n": 4}, "n"),
        ("/v1/completions", {"n": 4}, "n"),
        ("/v1/completions", {"prompt": ["a", "b"], "n": 2}, "prompt"),
    ],
)
def test_more_choices_than_may_ever_wait_are_a_400(path: str, changes: dict[str, Any], param: str) -> None:
    body = {**dict(PATHS)[path], **changes}
    assert ask(FakeEngineClient(TOKENIZER), path, body, max_waiting=4).status_code == 200
    refused = ask(FakeEngineClient(TOKENIZER), path, body, max_waiting=3)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    assert "may be 3" in refused.json()["error"]["message"]


@pytest.mark.parametrize("num_steps", [0, 3])
@pytest.mark.parametrize(("path", "body"), PATHS)
def test_an_answer_that_is_late_is_a_504(path: str, body: dict[str, Any], num_steps: int) -> None:
    engine = FakeEngineClient(TOKENIZER, fail_after=num_steps, failure=DeadlineExceeded())
    response = post(path, body, engine=engine)
    assert response.status_code == 504
    error = response.json()["error"]
    assert (error["code"], error["type"], error["param"]) == ("deadline_exceeded", "timeout_error", None)
    assert response.headers["x-should-retry"] == "false"


def test_a_stream_that_is_late_ends_with_an_error_and_one_that_has_not_begun_is_a_504() -> None:
    body = {**CHAT, "stream": True}
    with serving(fail_after=5, failure=DeadlineExceeded()) as server:
        response = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
        *_, last, end = response.text.split("\n\n")
        assert (response.status_code, end) == (200, "")
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "deadline_exceeded"
        server.engine.fail_after = 0
        response = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
        assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline_exceeded")
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=2) as client:
            before = len(server.engine.requests)
            with pytest.raises(openai.InternalServerError):
                client.chat.completions.create(**CHAT, extra_body={"timeout_s": 5})
            assert len(server.engine.requests) == before + 1  # it is not tried again by itself


def placed(timeout_s: float | None, clock: Any) -> PlacedChoice:
    asked = GenerationRequest(
        request_id="r.0", prompt_token_ids=(1,), sampling=SamplingParams(seed=1), timeout_s=timeout_s
    )
    return PlacedChoice(asked, clock=clock)


def test_each_attempt_is_given_what_is_left() -> None:
    now_s = [100.0]
    choice = placed(10.0, lambda: now_s[0])
    assert choice.remaining().timeout_s == 10.0
    now_s[0] = 107.0
    assert choice.remaining().timeout_s == 3.0
    now_s[0] = 110.0
    with pytest.raises(DeadlineExceeded):
        choice.remaining()
    assert placed(None, lambda: now_s[0]).remaining().timeout_s is None


@over(run, replicas=())
async def test_a_request_without_a_replica_waits_no_longer_than_its_time(
    calls: DirectCalls, client: RayEngineClient
) -> None:
    started_s = asyncio.get_running_loop().time()
    with pytest.raises(DeadlineExceeded):
        await anext(client.generate([_with_timeout(request(), 0.05)]))
    assert asyncio.get_running_loop().time() - started_s < 10  # a replica is waited for longer


@over(run)
async def test_a_lost_replica_does_not_give_a_request_more_time(calls: DirectCalls, client: RayEngineClient) -> None:
    await all_open(client)
    asked = _with_timeout(request(num=ENDLESS), 60)
    async with contextlib.aclosing(client.generate([asked])) as events:
        first = await anext(events)
        (busy,) = [name for name, engine in calls.engines.items() if engine.admitted]
        calls.kill(busy)
        ids = list(first.token_ids)
        (other,) = {"a", "b"} - {busy}
        while not calls.engines[other].admitted:
            ids += (await anext(events)).token_ids
    assert ids == expected(asked)[: len(ids)]
    given = [engine.admitted[0].timeout_s or 0 for engine in (calls.engines[busy], calls.engines[other])]
    assert 60 > given[0] > given[1] > 0


@over(run, replicas=("a",))
async def test_a_request_whose_time_is_up_when_its_replica_is_lost_ends_with_that(
    calls: DirectCalls, client: RayEngineClient
) -> None:
    await all_open(client)
    events = client.generate([_with_timeout(request(num=ENDLESS), 0.1)])
    await anext(events)
    await asyncio.sleep(0.1)
    calls.kill("a")
    last = [event async for event in events][-1]
    assert isinstance(last.refusal, DeadlineExceeded)


class FullEngine(FakeEngineLoop):
    """Refuses everything."""

    def __init__(self, retry_after_s: float) -> None:
        super().__init__()
        self._retry_after_s = retry_after_s

    def submit_many(self, requests: Sequence[GenerationRequest]) -> list[MnemeError | None]:
        return [Overloaded("full", retry_after_s=self._retry_after_s) for _ in requests]


@pytest.mark.parametrize("times", [(30.0, 4.0), (4.0, 30.0)])
@over(run)
async def test_where_all_are_full_the_time_is_of_the_one_that_has_room_first(
    calls: DirectCalls, client: RayEngineClient, *, times: tuple[float, float]
) -> None:
    await all_open(client)
    for name, retry_after_s in zip("ab", times, strict=True):
        full = FullEngine(retry_after_s)
        calls.engines[name].submit_many = full.submit_many  # type: ignore[method-assign]
    with pytest.raises(Overloaded) as refused:
        await anext(client.generate([request()]))
    assert refused.value.retry_after_s == 4.0


def _with_timeout(asked: GenerationRequest, timeout_s: float) -> GenerationRequest:
    return replace(asked, timeout_s=timeout_s)
