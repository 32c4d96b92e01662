"""A minimal HTTP API over an `EngineClient`: token ids in, lines of JSON out."""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from mneme.cluster.serve.engine_client import EngineClient
from mneme.replicas.request import GenerationRequest, SamplingParams


def build_fake_api(clients: Sequence[EngineClient], config: object) -> FastAPI:
    (client,), api = clients, FastAPI()
    api.state.end_events = lambda: None  # it has none

    @api.get("/ready")
    async def ready() -> Response:
        num_ready = client.num_ready()
        return JSONResponse({"replicas": num_ready}, 200 if num_ready else 503)

    @api.post("/generate")
    async def generate(request: Request) -> StreamingResponse:
        body = await request.json()
        return StreamingResponse(_lines(client, body), media_type="application/x-ndjson")

    return api


async def _lines(client: EngineClient, body: dict[str, Any]) -> AsyncIterator[str]:
    generation = GenerationRequest(
        request_id=uuid.uuid4().hex,
        prompt_token_ids=tuple(body["prompt"]),
        sampling=SamplingParams(temperature=0.0, max_tokens=body.get("max_tokens", 16), seed=0),
        session_id=body.get("session_id"),
    )
    async with contextlib.aclosing(client.generate([generation])) as events:  # type: ignore[type-var]
        async for event in events:
            yield (json.dumps({"tokens": event.token_ids, "finish": event.finish_reason, "error": event.error}) + "\n")
