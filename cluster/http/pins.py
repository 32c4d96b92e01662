"""POST /v1/kv/warm, GET /v1/kv/pins, DELETE /v1/kv/pins/{id}: prompts that are computed before traffic and stay.

A prompt is warmed on all replicas or on some, and is pinned on each of them or on none. Engines answer between two
steps, so an ingress asks again and again how far they are. Pins belong to the API key, whatever salt they were made
with. A replica that is replaced has those of the configuration only.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
from collections.abc import Collection, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse

from mneme.cluster.http.answers import FieldNames
from mneme.cluster.http.api_state import ApiState
from mneme.cluster.http.kv import WarmRequest, one_given, release_pin, select_prompt, tier_pins
from mneme.cluster.http.protocol import validate
from mneme.errors import ContextLengthExceeded, InvalidRequest, MnemeError, ReplicaUnavailable
from mneme.replicas.engine import commands
from mneme.replicas.engine.commands import Query
from mneme.replicas.engine.pins import PinKey

_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.01, 0.25
_WARM_TIMEOUT_S = 600.0


async def warm(api: ApiState, request: Request) -> JSONResponse:
    """Compute a prompt on replicas, and keep it there."""
    body = validate(WarmRequest, await api.parsed(request))
    field, salt, ids, _ = await select_prompt(api, request, body, one_given(body))
    key = PinKey(request.state.tenant, secrets.token_hex(16))
    chosen = await _replicas(api, body.replicas)
    try:
        described = await _warm(api, key, commands.warm_prompt(key, salt, ids, ttl_s=body.ttl_s, pin=body.pin), chosen)
    except ContextLengthExceeded as error:
        raise FieldNames(field, field).worded(error) from None
    for replica_id in chosen:
        api.client.note_prefix(ids, replica_id, salt=salt)
    if not body.pin:
        await _drop(api, key, chosen)  # only its outcome was kept
    return JSONResponse(_pin_object(described, chosen))


async def list_pins(api: ApiState, request: Request) -> JSONResponse:
    """What the API key has pinned, and where."""
    answers = await api.client.query(commands.list_pins(request.state.tenant))
    described_by_id: dict[str, dict[str, Any]] = {}
    replicas_by_id: dict[str, list[str]] = {}
    for replica_id, pins in answers.items():
        for pin in pins:
            known = described_by_id.setdefault(pin["id"], pin)
            known["pinned"] = known["pinned"] and pin["pinned"]
            replicas_by_id.setdefault(pin["id"], []).append(replica_id)
    pins = [_pin_object(pin, replicas_by_id[pin_id]) for pin_id, pin in described_by_id.items()]
    return JSONResponse({"object": "list", "data": pins + await tier_pins(api, request.state.tenant)})


async def delete_pin(api: ApiState, request: Request) -> JSONResponse:
    """Let go of a prompt on every replica and in the cache tier; what runs goes on."""
    return JSONResponse(await release_pin(api, request.state.tenant, request.path_params["pin_id"]))


async def _replicas(api: ApiState, wanted: str | int) -> list[str]:
    """All, or those with the fewest pages in use."""
    known = api.client.replica_ids()
    if not known:
        raise ReplicaUnavailable("no replica is ready")
    if isinstance(wanted, str):
        return sorted(known)
    if not 1 <= wanted <= len(known):
        raise InvalidRequest("replicas", wanted, f'must be "all" or from 1 to {len(known)}')
    in_use = {stats.replica_id: stats.metrics["pages"]["in_use"] for stats in await api.client.stats()}
    return sorted(known, key=lambda replica_id: (in_use.get(replica_id, math.inf), replica_id))[:wanted]


async def _warm(api: ApiState, key: PinKey, prompt: Query, chosen: Sequence[str]) -> dict[str, Any]:
    """Wait until the prompt is computed on all of them; what one refuses is released on the others."""
    try:
        async with asyncio.timeout(_WARM_TIMEOUT_S):
            described = await _ask(api, prompt, chosen)
            pause_s = _FIRST_PAUSE_S
            while any(one["warming"] for one in described):
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LAST_PAUSE_S)
                described = await _ask(api, commands.get_pin(key), chosen)
    except BaseException as error:
        await _drop(api, key, chosen)
        if isinstance(error, TimeoutError):
            raise ReplicaUnavailable(f"the prompt was not computed within {_WARM_TIMEOUT_S:g} s") from None
        raise
    return described[0]


async def _ask(api: ApiState, query: Query, chosen: Sequence[str]) -> list[dict[str, Any]]:
    """Ask the chosen replicas how far they are; raises what went wrong on one of them, once all have answered."""
    asked = (api.client.query(query, replica_id=each) for each in chosen)
    answers = await asyncio.gather(*asked, return_exceptions=True)
    return [_described(answer, replica_id) for answer, replica_id in zip(answers, chosen, strict=True)]


def _described(answer: dict[str, Any] | BaseException, replica_id: str) -> dict[str, Any]:
    if isinstance(answer, BaseException):
        raise answer
    described: dict[str, Any] | None = answer[replica_id]
    if described is None:
        raise ReplicaUnavailable("a replica was started anew, or the prompt was let go, before it was computed")
    error: MnemeError | None = described["error"]
    if error is not None:
        raise error
    return described


async def _drop(api: ApiState, key: PinKey, chosen: Collection[str]) -> None:
    async def drop(replica_id: str) -> None:
        with contextlib.suppress(MnemeError):
            await api.client.query(commands.drop_pin(key), replica_id=replica_id)

    await asyncio.gather(*map(drop, chosen))


def _pin_object(described: dict[str, Any], replicas: Sequence[str]) -> dict[str, Any]:
    shown = {name: value for name, value in described.items() if name not in ("warming", "error")}
    return {"id": shown.pop("id"), "object": "kv.pin", "where": "device", **shown, "replicas": sorted(replicas)}
