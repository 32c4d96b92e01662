"""Tests as async functions over what is set up for them, and a client over replicas in this process."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

from mneme.cluster.serve.ray_client import RayEngineClient
from mneme.replicas.request import GenerationRequest, SamplingParams, TokenEvent
from mneme.router.score import RouterConfig
from tests.fakes.direct_calls import DirectCalls
from tests.fakes.fake_engine import expected_tokens

ENDLESS = 10**6  # tokens: by itself, a request of so many does not end within a test
Scenario = Callable[[DirectCalls, RayEngineClient], Awaitable[None]]


def over(run: Callable[..., object], **options: Any) -> Callable[[Callable[..., Awaitable[None]]], Callable[..., None]]:
    """Decorate a test that `run` awaits with what it has set up; its keyword-only arguments are fixtures."""

    def decorate(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
        parameters = inspect.signature(test).parameters.values()
        fixtures = [each for each in parameters if each.kind is inspect.Parameter.KEYWORD_ONLY]

        @functools.wraps(test)
        def run_it(**given: Any) -> None:
            run(functools.partial(test, **given), **options)

        run_it.__signature__ = inspect.Signature(fixtures)  # type: ignore[attr-defined]
        return run_it

    return decorate


def run(
    scenario: Scenario,
    *,
    replicas: tuple[str, ...] = ("a", "b"),
    step_s: float = 0.001,
    **options: Any,
) -> None:
    """`options`: of the client."""

    async def main() -> None:
        calls = DirectCalls()
        for replica_id in replicas:
            calls.add(replica_id, step_s=step_s)
        client = RayEngineClient(calls, name="ingress", router=RouterConfig(), **options)
        client.set_replicas(replicas)
        try:
            async with asyncio.timeout(60):
                await scenario(calls, client)
        finally:
            await client.close()
            calls.stop_all()

    asyncio.run(main())


def request(
    request_id: str = "r.0", *, num: int = 20, min_tokens: int = 0, session_id: str | None = None
) -> GenerationRequest:
    return GenerationRequest(
        request_id=request_id,
        prompt_token_ids=(1, 2, 3, len(request_id)),
        sampling=SamplingParams(temperature=0.0, max_tokens=num, min_tokens=min_tokens, seed=1),
        session_id=session_id,
    )


async def tokens(client: RayEngineClient, asked: GenerationRequest) -> tuple[list[int], TokenEvent]:
    """All token ids, and the last event."""
    ids: list[int] = []
    async for event in client.generate([asked]):
        ids.extend(event.token_ids)
    return ids, event


def expected(asked: GenerationRequest) -> list[int]:
    return expected_tokens(asked.prompt_token_ids, asked.sampling.max_tokens or 0)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.002)


async def all_open(client: RayEngineClient) -> None:
    await until(lambda: client.num_ready() == len(client.replica_ids()) > 0)


def running(calls: DirectCalls) -> int:
    return sum(engine.stats()["requests"]["running"] for engine in calls.engines.values())
