"""POST /v1/kv/lookup, pin, unpin; DELETE /v1/kv; GET /v1/kv/stats: KV that is kept, on replicas and in the cache tier.

A caller reaches what is kept under its own API key, and sums of the rest. The tier is asked through one replica, which
makes the keys of its chunks; every replica is asked for its own pages. `pin_routes.py` has warming and pins on devices.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse

from mneme.cluster.http.api_state import ApiState
from mneme.cluster.http.kv_protocol import DropRequest, LookupRequest, PinRequest, UnpinRequest
from mneme.cluster.http.kv_selection import Selection, encoded_text, one_given, select_sequence, served_model
from mneme.cluster.http.protocol import validate
from mneme.cluster.serve.engine_client import ask_tier
from mneme.cluster.tenancy import kv_salt
from mneme.errors import PinNotFound
from mneme.replicas.engine.commands import DropPin
from mneme.replicas.engine.kv_commands import (
    DropKv,
    DropTenantKv,
    KvAnswer,
    KvStats,
    ListKvPins,
    LookUpKv,
    PinKv,
    UnpinKv,
)
from mneme.replicas.engine.pins import PinKey

_MAX_LISTED_CHUNKS = 10_000


async def lookup(api: ApiState, request: Request) -> JSONResponse:
    """How much of a prompt is kept, and where; changes nothing."""
    body = validate(LookupRequest, await api.parsed(request))
    chosen = await select_sequence(api, request, body, seen=True)
    engines, tier = await _ask_all(api, LookUpKv(chosen.salt, chosen.token_ids, in_tier=False))
    replicas = [{"replica": replica_id, **found} for replica_id, found in sorted(engines.items())]
    if tier is not None:
        chunks = tier.pop("chunks")
        tier |= {"chunks": chunks[:_MAX_LISTED_CHUNKS]} if body.chunks else {}
    found = {"object": "kv.lookup", "num_tokens": len(chosen.token_ids), "replicas": replicas, "tier": tier}
    return JSONResponse(found)


async def pin(api: ApiState, request: Request) -> JSONResponse:
    """Keep what the cache tier has of a prompt, wherever it is, for a time."""
    body = validate(PinRequest, await api.parsed(request))
    chosen = await select_sequence(api, request, body, seen=True)
    pin_id = body.pin_id or _pin_id(chosen)
    pinned = await ask_tier(api.client, PinKv(chosen.salt, pin_id, chosen.token_ids, body.ttl_s))
    return JSONResponse(tier_pin_object(pinned))


async def unpin(api: ApiState, request: Request) -> JSONResponse:
    """Let go of a pin, in the tier and on devices."""
    body = validate(UnpinRequest, await api.parsed(request))
    if body.pin_id is not None and one_given(body, "session_id", "pin_id"):
        pin_id = body.pin_id
    else:
        pin_id = _pin_id(await select_sequence(api, request, body, seen=True, others=("pin_id",)))
    return JSONResponse(await let_go(api, request.state.tenant, pin_id))


async def let_go(api: ApiState, tenant: str, pin_id: str) -> dict[str, Any]:
    """Of a pin of that name wherever there is one; raises `PinNotFound`."""
    answers = await api.client.query(DropPin(PinKey(tenant, pin_id)))
    was_in_tier = await ask_tier(api.client, UnpinKv(kv_salt(tenant, None), pin_id))
    if not any(answers.values()) and not was_in_tier:
        raise PinNotFound("pin_id", pin_id)
    return {"id": pin_id, "object": "kv.pin.deleted", "deleted": True}


async def tier_pins(api: ApiState, tenant: str) -> list[dict[str, Any]]:
    """What the API key has pinned in the tier."""
    pins = await ask_tier(api.client, ListKvPins(kv_salt(tenant, None)))
    return [tier_pin_object(pin) for pin in pins or ()]


def tier_pin_object(pin: dict[str, Any]) -> dict[str, Any]:
    return {"id": pin["id"], "object": "kv.pin", "where": "tier", "pinned": True, **pin}


async def drop(api: ApiState, request: Request) -> JSONResponse:
    """Forget KV; what runs or is pinned on a device stays there until it is let go."""
    body = validate(DropRequest, await api.parsed(request))
    field = one_given(body, "session_id", "document", "tenant")
    query: DropKv | DropTenantKv
    if field == "tenant":
        query = DropTenantKv(kv_salt(request.state.tenant, None), in_tier=False)
    elif field == "document":
        query = await _drop_document(api, request, body)
    else:
        others = ("document", "tenant")
        chosen = await select_sequence(api, request, body, seen=False, others=others)
        query = DropKv(chosen.salt, chosen.token_ids, in_tier=False, session=chosen.session)
    engines, tier = await _ask_all(api, query)
    replicas = [{"replica": replica_id, **gone} for replica_id, gone in sorted(engines.items()) if gone is not None]
    return JSONResponse({"object": "kv.deleted", "by": field, "replicas": replicas, "tier": tier})


async def stats(api: ApiState, request: Request) -> JSONResponse:
    """Sums of all that is kept, and the caller's own share."""
    tier = await ask_tier(api.client, KvStats(kv_salt(request.state.tenant, None), in_tier=True))
    replicas = [
        {"replica": each.replica_id, "pages": each.metrics.get("pages"), "host_pages": each.metrics.get("host_pages")}
        for each in await api.client.stats()
    ]
    own = None if tier is None else tier.pop("tenant")
    return JSONResponse({"object": "kv.stats", "replicas": replicas, "tier": tier, "tenant": own})


async def _ask_all(api: ApiState, query: LookUpKv | DropKv | DropTenantKv) -> tuple[dict[str, Any], Any]:
    """Every replica for its own part, by replica id, and then the tier: what a replica saves meanwhile goes too."""
    answers: dict[str, KvAnswer] = await api.client.query(query)
    return {replica_id: answer.engine for replica_id, answer in answers.items()}, await ask_tier(api.client, query)


async def _drop_document(api: ApiState, request: Request, body: DropRequest) -> DropKv:
    """A document is encoded on its own, behind the model's BOS alone."""
    ids = await encoded_text(api, "document", body.document, served_model(api, body.model), special=False)
    bos = api.tokenizer.bos_token_id
    sink_ids = () if bos is None else (bos,)
    return DropKv(kv_salt(request.state.tenant, body.cache_salt), ids, in_tier=False, sink_ids=sink_ids)


def _pin_id(chosen: Selection) -> str:
    """The same for the same tokens under the same salt; a session's is the same whatever was said since."""
    hasher = hashlib.blake2b(chosen.salt.encode(), digest_size=16, person=b"mneme pin")
    if chosen.session is not None:
        hasher.update(b"session:" + chosen.session[1].encode())
    else:
        hasher.update(b"tokens:" + np.asarray(chosen.token_ids, "<u4").tobytes())
    return hasher.hexdigest()
