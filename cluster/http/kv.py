"""POST /v1/kv/lookup, pin, unpin; DELETE /v1/kv; GET /v1/kv/stats: KV that is kept, on replicas and in the cache tier.

A caller reaches what is kept under its own API key, and sums of the rest. The tier is asked through one replica, which
makes the keys of its chunks; every replica is asked for its own pages. `pins.py` has warming and pins on devices.
"""

from __future__ import annotations

import hashlib
import re
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import AfterValidator
from starlette.requests import Request
from starlette.responses import JSONResponse

from mneme.cluster.http.api_state import ApiState, ServedModel
from mneme.cluster.http.protocol import Body, Messages, Ttl, check_prompt, template_variables, validate
from mneme.cluster.serve.engine_client import ask_tier, look_up_session
from mneme.cluster.tenancy import kv_salt, session_key
from mneme.errors import ContextLengthExceeded, InvalidRequest, PinNotFound, SessionNotFound
from mneme.replicas.engine import kv_commands
from mneme.replicas.engine.commands import Query, drop_pin, session_tokens
from mneme.replicas.engine.pins import PinKey
from mneme.replicas.sessions.sessions import SessionKey

_MAX_LISTED_CHUNKS = 10_000
_PIN_ID = re.compile(r"[A-Za-z0-9._:-]{1,64}")
_PROMPTS = ("prompt", "prompt_token_ids", "token_ids", "messages")


def _checked_pin_id(pin_id: str) -> str:
    if not _PIN_ID.fullmatch(pin_id):
        raise ValueError("must have from 1 to 64 letters, digits or any of . _ : -")
    return pin_id


PinId = Annotated[str, AfterValidator(_checked_pin_id)]


class PromptSelector(Body):
    """One of `prompt`, `prompt_token_ids` (also called `token_ids`) and `messages` says which tokens."""

    model: str | None = None
    prompt: str | None = None
    prompt_token_ids: Any = None  # list[int]: see `check_prompt`
    token_ids: Any = None
    messages: Messages | None = None
    add_special_tokens: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: str | None = None


class SequenceSelector(PromptSelector):
    """Or a session's."""

    session_id: str | None = None


class WarmRequest(PromptSelector):
    model: str
    ttl_s: Ttl | None = None  # None: until it is deleted
    pin: bool = True
    replicas: Literal["all"] | int = "all"


class LookupRequest(SequenceSelector):
    chunks: bool = False  # list them one by one


class PinRequest(SequenceSelector):
    ttl_s: Ttl | None = None  # None: until it is released
    pin_id: PinId | None = None  # None: made of the tokens, so the same tokens have one pin


class UnpinRequest(SequenceSelector):
    """By name, or by what was pinned."""

    pin_id: PinId | None = None


class DropRequest(SequenceSelector):
    document: Any = None  # text or token ids of a document, as it was given with requests
    tenant: Literal[True] | None = None  # all of the API key's


async def lookup(api: ApiState, request: Request) -> JSONResponse:
    """How much of a prompt is kept, and where; changes nothing."""
    body = validate(LookupRequest, await api.parsed(request))
    chosen = await select_sequence(api, request, body, seen=True)
    engines = await api.client.query(kv_commands.look_up_pages(chosen.salt, chosen.token_ids))
    tier = await ask_tier(api.client, kv_commands.look_up_kv(chosen.salt, chosen.token_ids))
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
    pinned = await ask_tier(api.client, kv_commands.pin_kv(chosen.salt, pin_id, chosen.token_ids, body.ttl_s))
    return JSONResponse(_tier_pin_object(pinned))


async def unpin(api: ApiState, request: Request) -> JSONResponse:
    """Let go of a pin, in the tier and on devices."""
    body = validate(UnpinRequest, await api.parsed(request))
    if body.pin_id is not None and one_given(body, "session_id", "pin_id"):
        pin_id = body.pin_id
    else:
        pin_id = _pin_id(await select_sequence(api, request, body, seen=True, others=("pin_id",)))
    return JSONResponse(await release_pin(api, request.state.tenant, pin_id))


async def release_pin(api: ApiState, tenant: str, pin_id: str) -> dict[str, Any]:
    """Release the pin of that name wherever there is one; raises `PinNotFound`."""
    answers = await api.client.query(drop_pin(PinKey(tenant, pin_id)))
    was_in_tier = await ask_tier(api.client, kv_commands.unpin_kv(kv_salt(tenant, None), pin_id))
    if not any(answers.values()) and not was_in_tier:
        raise PinNotFound("pin_id", pin_id)
    return {"id": pin_id, "object": "kv.pin.deleted", "deleted": True}


async def tier_pins(api: ApiState, tenant: str) -> list[dict[str, Any]]:
    """List what the API key has pinned in the tier."""
    pins = await ask_tier(api.client, kv_commands.list_kv_pins(kv_salt(tenant, None)))
    return [_tier_pin_object(pin) for pin in pins or ()]


def _tier_pin_object(pin: dict[str, Any]) -> dict[str, Any]:
    return {"id": pin["id"], "object": "kv.pin", "where": "tier", "pinned": True, **pin}


async def drop(api: ApiState, request: Request) -> JSONResponse:
    """Forget KV; what runs or is pinned on a device stays there until it is let go."""
    body = validate(DropRequest, await api.parsed(request))
    field = one_given(body, "session_id", "document", "tenant")
    if field == "tenant":
        salt = kv_salt(request.state.tenant, None)
        of_engines, of_tier = kv_commands.drop_tenant_pages(salt), kv_commands.drop_tenant_kv(salt)
    elif field == "document":
        of_engines, of_tier = kv_commands.settle_saves(), await _drop_document(api, request, body)
    else:
        others = ("document", "tenant")
        chosen = await select_sequence(api, request, body, seen=False, others=others)
        is_session = chosen.session is not None
        of_engines = kv_commands.drop_pages(chosen.salt, chosen.token_ids, chosen.session)
        of_tier = kv_commands.drop_kv(chosen.salt, chosen.token_ids, spares_longer=is_session)
    engines = await api.client.query(of_engines)
    tier = await ask_tier(api.client, of_tier)  # last: what a replica saves meanwhile goes too
    replicas = [{"replica": replica_id, **gone} for replica_id, gone in sorted(engines.items()) if gone is not None]
    return JSONResponse({"object": "kv.deleted", "by": field, "replicas": replicas, "tier": tier})


async def stats(api: ApiState, request: Request) -> JSONResponse:
    """Sums of all that is kept, and the caller's own share."""
    tier = await ask_tier(api.client, kv_commands.kv_stats(kv_salt(request.state.tenant, None)))
    replicas = [
        {"replica": each.replica_id, "pages": each.metrics.get("pages"), "host_pages": each.metrics.get("host_pages")}
        for each in await api.client.stats()
    ]
    own = None if tier is None else tier.pop("tenant")
    return JSONResponse({"object": "kv.stats", "replicas": replicas, "tier": tier, "tenant": own})


async def _drop_document(api: ApiState, request: Request, body: DropRequest) -> Query:
    """Drop a document, which is encoded on its own, behind the model's BOS alone."""
    ids = await _encoded_text(api, "document", body.document, api.model(body.model), special=False)
    bos = api.tokenizer.bos_token_id
    sink_ids = () if bos is None else (bos,)
    return kv_commands.drop_kv(kv_salt(request.state.tenant, body.cache_salt), ids, sink_ids=sink_ids)


def _pin_id(chosen: Selection) -> str:
    """The same for the same tokens under the same salt; a session's is the same whatever was said since."""
    hasher = hashlib.blake2b(chosen.salt.encode(), digest_size=16, person=b"mneme pin")
    if chosen.session is not None:
        hasher.update(b"session:" + chosen.session[1].encode())
    else:
        hasher.update(b"tokens:" + np.asarray(chosen.token_ids, "<u4").tobytes())
    return hasher.hexdigest()


class Selection(NamedTuple):
    field: str  # what the client calls it
    salt: str
    token_ids: tuple[int, ...]
    session: SessionKey | None = None


def one_given(body: PromptSelector, *others: str) -> str:
    """The one selector that is given; raises `InvalidRequest` for none and for two."""
    names = [*_PROMPTS, *others]
    given = [name for name in names if getattr(body, name) is not None]
    if len(given) != 1:
        rule = f"give exactly one of {', '.join(names)}"
        raise InvalidRequest("prompt", " and ".join(given), rule)
    return given[0]


async def select_sequence(
    api: ApiState, request: Request, body: SequenceSelector, *, seen: bool, others: tuple[str, ...] = ()
) -> Selection:
    """Select as `select_prompt`, or a session's: `seen` what its next turn would look for, else all that was said."""
    field = one_given(body, "session_id", *others)
    if field != "session_id":
        return await select_prompt(api, request, body, field)
    salt = kv_salt(request.state.tenant, body.cache_salt)
    name = session_key(request.state.tenant, body.session_id)
    assert name is not None
    key = (salt, name)
    found = await look_up_session(api.client, key)
    query = session_tokens(key, visible=seen)
    ids = None if found is None else (await api.client.query(query, replica_id=found[0]))[found[0]]
    if not ids:
        raise SessionNotFound("session_id", body.session_id)
    return Selection(field, salt, tuple(ids), key)


async def _encoded_text(api: ApiState, field: str, given: Any, model: ServedModel, *, special: bool) -> tuple[int, ...]:
    """A text or token ids as ids."""
    check_prompt(field, given)
    if isinstance(given, str):
        prompt = await api.off_loop(len(given), lambda: api.encode(field, given, model, add_special_tokens=special))
    else:
        prompt = await api.off_loop(len(given), lambda: api.take_ids(field, given, model))
    return _bounded(field, prompt.token_ids, model)


async def select_prompt(api: ApiState, request: Request, body: PromptSelector, field: str) -> Selection:
    """Select the tokens of a prompt, given ids, or what all conversations begin with that begin with these messages."""
    model, salt = api.model(body.model), kv_salt(request.state.tenant, body.cache_salt)
    given = getattr(body, field)
    if body.messages is not None:
        ids = await api.render_prefix(body.messages, template_variables(body.chat_template_kwargs))
        if not ids:
            raise InvalidRequest(field, None, "the chat template writes nothing for them alone")
        return Selection(field, salt, _bounded(field, ids, model))
    if field != "prompt" and not isinstance(given, list):
        raise InvalidRequest(field, given, "must be a list of token ids")
    return Selection(field, salt, await _encoded_text(api, field, given, model, special=body.add_special_tokens))


def _bounded(field: str, ids: tuple[int, ...], model: ServedModel) -> tuple[int, ...]:
    """Raises `ContextLengthExceeded` for what no completion could have computed."""
    if len(ids) >= model.max_context:
        raise ContextLengthExceeded(field, f"{len(ids)} tokens", f"may have {model.max_context - 1} tokens")
    return ids
