"""/v1/kv: KV that is kept, on replicas and in the cache tier, is looked up, warmed, pinned, dropped and counted.

A caller reaches what is kept under its own API key, and sums of the rest. The tier is asked through one replica, which
makes the keys of its chunks; every replica is asked for its own pages.

A prompt is warmed on all replicas or on some, and is pinned on each of them or on none. Engines answer between two
steps, so an ingress asks again and again how far they are. Pins belong to the API key, whatever salt they were made
with. A replica that is replaced has those of the configuration only.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import re
import secrets
from collections.abc import Collection, Sequence
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import numpy as np
from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError
from starlette.requests import Request

from mneme.cachetier.names import PUBLIC_SALT, tenant_id
from mneme.cachetier.pin_book import PinName
from mneme.cluster.http.api_state import ApiState, Service
from mneme.cluster.http.stream import FieldNames
from mneme.cluster.serve.engine_client import ask_tier, session_tokens
from mneme.cluster.tenancy import kv_salt, kv_tenant, session_key
from mneme.cluster.wire.answers import (
    Deleted,
    Dropped,
    DroppedOnReplica,
    FoundOnReplica,
    KvStats,
    Lookup,
    Pin,
    PinList,
    TierPin,
)
from mneme.cluster.wire.openai import Conversation, GivenDocument, Int, Text, TokenIds, Ttl, template_variables
from mneme.errors import (
    ContextLengthExceeded,
    InvalidRequest,
    MnemeError,
    PermissionDenied,
    PinNotFound,
    ReplicaUnavailable,
    SessionNotFound,
)
from mneme.replicas import queries
from mneme.replicas.documents import Document
from mneme.replicas.request import SessionKey
from mneme.replicas.text.document_parts import EncodedPrompt, Part

R = TypeVar("R")

_MAX_LISTED_CHUNKS = 10_000
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.01, 0.25
_WARM_TIMEOUT_S = 600.0
_PROMPTS = ("prompt", "prompt_token_ids", "token_ids", "messages", "document")

_PIN_ID = re.compile(r"[A-Za-z0-9._:-]{1,64}")


def _check_pin_id(pin_id: str) -> str:
    if not _PIN_ID.fullmatch(pin_id):
        raise PydanticCustomError("pin_id", "must have from 1 to 64 letters, digits or any of . _ : -")
    return pin_id


PinId = Annotated[str, AfterValidator(_check_pin_id), Field(json_schema_extra={"pattern": f"^{_PIN_ID.pattern}$"})]


class PromptSelector(Conversation):
    """One of `prompt`, `prompt_token_ids` (also called `token_ids`), `messages` and `document` says which tokens.

    `document` means what a text prompt begins with that begins with this document; `tools` are those of a conversation
    that `messages` begin.
    """

    model: str | None = None
    prompt: Text | None = None
    prompt_token_ids: TokenIds | None = None
    token_ids: TokenIds | None = None
    document: Text | GivenDocument | TokenIds | None = None
    add_special_tokens: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: str | None = None
    documents: list[Any] | None = None  # refused, as they would be left out: here they are parts of messages


class SequenceSelector(PromptSelector):
    """Selects tokens as `PromptSelector` does, or a session's."""

    session_id: str | None = None


class WarmRequest(PromptSelector):
    model: str
    ttl_s: Ttl | None = None  # None: until it is deleted
    pin: bool = True
    public: bool = False  # for all tenants; only an admin may
    replicas: Literal["all"] | Int = "all"


class LookupRequest(SequenceSelector):
    chunks: bool = False  # list them one by one


class PinRequest(SequenceSelector):
    ttl_s: Ttl | None = None  # None: until it is released
    pin_id: PinId | None = None  # None: made of the tokens, so the same tokens have one pin


class UnpinRequest(SequenceSelector):
    """Names a pin, or what was pinned."""

    pin_id: PinId | None = None


class DropRequest(SequenceSelector):
    tenant: Literal[True] | None = None  # all of the API key's


async def lookup(api: ApiState, request: Request, body: LookupRequest) -> Lookup:
    """Return how much of a prompt is kept, and where; changes nothing."""
    chosen = await _select(api, request, body, visible=True)
    engines = await api.client.query(queries.LookUpPages(chosen.salt, chosen.token_ids, chosen.session))
    looked = queries.LookUpKv(chosen.salt, chosen.token_ids, chosen.session, chosen.event)
    tier = await ask_tier(api.client, looked)
    if tier is not None:
        chunks = tier.pop("chunks")
        tier |= {"chunks": chunks[:_MAX_LISTED_CHUNKS]} if body.chunks else {}
    replicas: list[FoundOnReplica] = [{"replica": name, **found} for name, found in sorted(engines.items())]
    return {"object": "kv.lookup", "num_tokens": len(chosen.token_ids), "replicas": replicas, "tier": tier}


async def pin(api: ApiState, request: Request, body: PinRequest) -> TierPin:
    """Keep what the cache tier has of a prompt, wherever it is, for a time."""
    chosen = await _select(api, request, body, visible=True)
    name = PinName(kv_tenant(request.state.tenant), body.pin_id or _pin_id(chosen))
    asked = queries.PinKv(name, chosen.salt, chosen.token_ids, body.ttl_s, chosen.session, chosen.event)
    return _tier_pin(await ask_tier(api.client, asked))


async def unpin(api: ApiState, request: Request, body: UnpinRequest) -> Deleted:
    """Release a pin, in the tier and on devices."""
    if body.pin_id is None:
        chosen = await _select(api, request, body, visible=True, others=("pin_id",))
        return await _release(api, request, _pin_id(chosen))
    _one_given(body, "session_id", "pin_id")
    return await _release(api, request, body.pin_id)


async def delete_pin(api: ApiState, request: Request) -> Deleted:
    """Let go of a prompt on every replica and in the cache tier; what runs goes on."""
    return await _release(api, request, request.path_params["pin_id"])


async def _release(api: ApiState, request: Request, pin_id: str) -> Deleted:
    """Release the pin of that name wherever there is one, an admin's public one too; raises `PinNotFound`."""
    name = PinName(kv_tenant(request.state.tenant), pin_id)
    answers = await api.client.query(queries.DeletePin(name))
    if request.state.is_admin and not any(answers.values()):
        answers = await api.client.query(queries.DeletePin(PinName(tenant_id(PUBLIC_SALT), pin_id)))
    was_in_tier = await ask_tier(api.client, queries.UnpinKv(name))
    if not any(answers.values()) and not was_in_tier:
        raise PinNotFound("pin_id", pin_id)
    return {"id": pin_id, "object": "kv.pin.deleted", "deleted": True}


async def list_pins(service: Service, request: Request) -> PinList:
    """Return what the API key has pinned, and where, and what is public."""
    tenant = kv_tenant(request.state.tenant)
    described_by_id: dict[str, queries.PinnedPrompt] = {}
    replicas_by_id: dict[str, list[str]] = {}
    for owner in (tenant, tenant_id(PUBLIC_SALT)):
        for replica_id, pins in (await _query_all(service, queries.ListPins(owner))).items():
            for each, *_ in pins:
                known = described_by_id.setdefault(each["id"], each)
                known["pinned"] = known["pinned"] and each["pinned"]
                replicas_by_id.setdefault(each["id"], []).append(replica_id)
    on_devices = [_device_pin(known, replicas_by_id[pin_id]) for pin_id, known in described_by_id.items()]
    in_tier = await ask_tier(service.apis[0].client, queries.ListKvPins(tenant)) or ()
    return {"object": "list", "data": [*on_devices, *map(_tier_pin, in_tier)]}


def _tier_pin(described: queries.PinnedChunks) -> TierPin:
    return {"id": described["id"], "object": "kv.pin", "where": "tier", "pinned": True, **described}


def _device_pin(described: queries.PinnedPrompt, replicas: Sequence[str]) -> Pin:
    return {"id": described["id"], "object": "kv.pin", "where": "device", **described, "replicas": sorted(replicas)}


async def drop(service: Service, request: Request, body: DropRequest) -> Dropped:
    """Forget KV; what runs or is pinned on a device stays there until it is let go.

    `tenant` means that of all models.
    """
    field = _one_given(body, "session_id", "tenant")
    if field == "tenant":
        salt = kv_salt(request.state.tenant, None)
        engines = await _query_all(service, queries.DeleteTenantPages(salt))
        tier = await ask_tier(service.apis[0].client, queries.DeleteTenantKv(salt))  # last, as below
    else:
        engines, tier = await service.first(body.model, lambda api: _drop_sequence(api, request, body))
    replicas: list[DroppedOnReplica] = [{"replica": name, **dropped} for name, dropped in sorted(engines.items())]
    return {"object": "kv.deleted", "by": field, "replicas": replicas, "tier": tier}


async def _drop_sequence(
    api: ApiState, request: Request, body: DropRequest
) -> tuple[dict[str, queries.DroppedPages], queries.DroppedChunks | None]:
    """Return what the replicas and the cache tier dropped."""
    chosen = await _select(api, request, body, visible=False, others=("tenant",))
    selected = chosen.salt, chosen.token_ids, chosen.session
    engines = await api.client.query(queries.DeleteSequencePages(*selected))
    return engines, await ask_tier(api.client, queries.DeleteKv(*selected))  # last: a replica may save meanwhile


async def stats(service: Service, request: Request) -> KvStats:
    """Sums of all that is kept, and the caller's own share."""
    tier = await ask_tier(service.apis[0].client, queries.GetKvStats(kv_salt(request.state.tenant, None)))
    replicas = [
        {"replica": replica_id, **{name: figures.get(name) for name in ("pages", "host_pages", "tokens")}}
        for replica_id, figures in (await service.stats()).items()
    ]
    if tier is None:
        return {"object": "kv.stats", "replicas": replicas, "tier": None, "tenant": None}
    return {"object": "kv.stats", "replicas": replicas, "tier": {"nodes": tier["nodes"]}, "tenant": tier["tenant"]}


async def _query_all(service: Service, query: queries.Query[R]) -> dict[str, R]:
    """Ask the replicas of all models."""
    answers = await asyncio.gather(*(api.client.query(query) for api in service.apis))
    return {replica_id: answer for each in answers for replica_id, answer in each.items()}


async def warm(api: ApiState, request: Request, body: WarmRequest) -> Pin:
    """Compute a prompt on replicas, and keep it there."""
    if body.public and not request.state.is_admin:
        raise PermissionDenied
    if body.public and body.cache_salt is not None:
        raise InvalidRequest("cache_salt", None, "cannot be combined with public: true")
    field, salt, ids, *_ = await _select_prompt(api, request, body, _one_given(body))
    owner = kv_tenant(request.state.tenant)
    if body.public:
        salt, owner = PUBLIC_SALT, tenant_id(PUBLIC_SALT)
    if request.state.meter is not None:
        request.state.meter.use(len(ids))
    name = PinName(owner, secrets.token_hex(16))
    chosen = await _replicas(api, body.replicas)
    prompt = queries.ComputePrompt(name, salt, ids, ttl_s=body.ttl_s, pin=body.pin)
    try:
        async with asyncio.timeout(_WARM_TIMEOUT_S):
            described = await _computed(api, name, prompt, chosen)
    except BaseException as error:  # what one refuses is released on the others
        await _delete_pin(api, name, chosen)
        if isinstance(error, TimeoutError):
            raise ReplicaUnavailable(f"the prompt was not computed within {_WARM_TIMEOUT_S:g} s") from None
        if isinstance(error, ContextLengthExceeded):
            raise FieldNames(field, field).worded(error) from None
        raise
    for replica_id in chosen:
        api.client.record_prefix(ids, replica_id, salt=salt)
    if not body.pin:
        await _delete_pin(api, name, chosen)  # only its outcome was kept
    return _device_pin(described.pin, chosen)


async def _replicas(api: ApiState, wanted: str | int) -> list[str]:
    """All, or those with the fewest pages in use."""
    known = api.client.replica_ids()
    if not known:
        raise ReplicaUnavailable("no replica is ready")
    if isinstance(wanted, str):
        return sorted(known)
    if not 1 <= wanted <= len(known):
        raise InvalidRequest("replicas", wanted, f'must be "all" or from 1 to {len(known)}')
    in_use = {replica_id: figures["pages"]["in_use"] for replica_id, figures in (await api.client.stats()).items()}
    return sorted(known, key=lambda replica_id: (in_use.get(replica_id, math.inf), replica_id))[:wanted]


async def _computed(
    api: ApiState, name: PinName, prompt: queries.ComputePrompt, chosen: Sequence[str]
) -> queries.KnownPin:
    """Wait until the prompt is computed on all of them; one of their answers."""
    described = await _ask(api, prompt, chosen)
    pause_s = _FIRST_PAUSE_S
    while any(one.warming for one in described):
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, _LAST_PAUSE_S)
        described = await _ask(api, queries.GetPin(name), chosen)
    return described[0]


async def _ask(
    api: ApiState, query: queries.Query[queries.KnownPin | None], chosen: Sequence[str]
) -> list[queries.KnownPin]:
    """Ask the chosen replicas how far they are; raises what went wrong on one of them, once all have answered."""
    asked = (api.client.query(query, replica_id=each) for each in chosen)
    answers = await asyncio.gather(*asked, return_exceptions=True)
    described = []
    for replica_id, answer in zip(chosen, answers, strict=True):
        if isinstance(answer, BaseException):
            raise answer
        known = answer[replica_id]
        if known is None:
            raise ReplicaUnavailable("a replica was started anew, or the prompt was let go, before it was computed")
        if known.error is not None:
            raise known.error
        described.append(known)
    return described


async def _delete_pin(api: ApiState, name: PinName, chosen: Collection[str]) -> None:
    async def drop(replica_id: str) -> None:
        with contextlib.suppress(MnemeError):
            await api.client.query(queries.DeletePin(name), replica_id=replica_id)

    await asyncio.gather(*map(drop, chosen))


class Selection(NamedTuple):
    field: str  # what the client calls it
    salt: str
    token_ids: tuple[int, ...]
    session: SessionKey | None = None
    event: bytes = b""  # see `queries.SessionTokens`


def _pin_id(chosen: Selection) -> str:
    """The same for the same tokens under the same salt; a session's is the same whatever was said since."""
    hasher = hashlib.blake2b(chosen.salt.encode(), digest_size=16, person=b"mneme pin")
    if chosen.session is not None:
        hasher.update(b"session:" + chosen.session[1].encode())
    else:
        hasher.update(b"tokens:" + np.asarray(chosen.token_ids, "<u4").tobytes())
    return hasher.hexdigest()


def _one_given(body: PromptSelector, *others: str) -> str:
    """The one selector that is given; raises `InvalidRequest` for none and for two."""
    names = [*_PROMPTS, *others]
    given = [name for name in names if getattr(body, name) is not None]
    if len(given) != 1:
        raise InvalidRequest("prompt", " and ".join(given), f"give exactly one of {', '.join(names)}")
    return given[0]


async def _select(
    api: ApiState, request: Request, body: SequenceSelector, *, visible: bool, others: tuple[str, ...] = ()
) -> Selection:
    """A prompt's tokens, or a session's: the `visible` ones its next turn would look for, else all that was said."""
    field = _one_given(body, "session_id", *others)
    if body.session_id is None:
        return await _select_prompt(api, request, body, field)
    tenant: str = request.state.tenant
    key = (kv_salt(tenant, body.cache_salt), session_key(tenant, body.session_id))
    known = await session_tokens(api.client, key, visible=visible)
    if known is None or not known.ids:
        raise SessionNotFound("session_id", body.session_id)
    return Selection(field, key[0], known.ids, key, known.event)


async def _select_prompt(api: ApiState, request: Request, body: PromptSelector, field: str) -> Selection:
    """The tokens of a prompt, given ids, or what all conversations begin with that begin with these messages."""
    salt = kv_salt(request.state.tenant, body.cache_salt)
    if body.documents is not None:
        raise InvalidRequest("documents", len(body.documents), "not taken here: make them parts of the messages")
    if body.document is not None:
        ids = await _token_ids(api, field, _document_prompt(body.document, field), special=False)
        return Selection(field, salt, _bounded(api, field, (*api.tokenizer.sink_ids, *ids)))
    if body.messages is None:
        ids = await _token_ids(api, field, getattr(body, field), special=body.add_special_tokens)
        return Selection(field, salt, ids)
    ids = await api.render_prefix(body.messages, template_variables(body.chat_template_kwargs, body.tools))
    if not ids:
        raise InvalidRequest(field, None, "the chat template writes nothing for them alone")
    return Selection(field, salt, _bounded(api, field, ids))


async def _token_ids(
    api: ApiState, field: str, given: str | tuple[Part, ...] | list[int], *, special: bool
) -> tuple[int, ...]:
    """Ids of a text or of parts, or those that were given."""

    def take() -> EncodedPrompt:
        if isinstance(given, list):
            return api.encoded_ids(field, given)
        return api.encode(field, given, add_special_tokens=special)

    size = sum(len(part.text) for part in given) if isinstance(given, tuple) else len(given)
    return _bounded(api, field, (await api.off_loop(size, take)).token_ids)


def _document_prompt(given: str | GivenDocument | list[int], field: str) -> tuple[Part, ...] | list[int]:
    """A document as it stands behind other text."""
    if isinstance(given, list):
        return given
    document = Document.of(given if isinstance(given, str) else given.model_dump(), field, index=0)
    return Part(""), Part(document.text, document)


def _bounded(api: ApiState, field: str, ids: tuple[int, ...]) -> tuple[int, ...]:
    """Raises `ContextLengthExceeded` for what no completion could have computed."""
    if len(ids) >= api.model.max_context:
        raise ContextLengthExceeded(field, f"{len(ids)} tokens", f"may have {api.model.max_context - 1} tokens")
    return ids
