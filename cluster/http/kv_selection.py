"""From a body of /v1/kv to token ids, under the limits of completions."""

from __future__ import annotations

from typing import Any, NamedTuple

from starlette.requests import Request

from mneme.cluster.http.api_state import ApiState, ServedModel
from mneme.cluster.http.kv_protocol import PromptSelector, SequenceSelector
from mneme.cluster.http.protocol import template_variables
from mneme.cluster.http.request_values import check_prompt
from mneme.cluster.serve.engine_client import look_up_session
from mneme.cluster.tenancy import kv_salt, session_key
from mneme.errors import ContextLengthExceeded, InvalidRequest, SessionNotFound
from mneme.replicas.engine.kv_commands import GetTokens
from mneme.replicas.sessions.sessions import SessionKey

_PROMPTS = ("prompt", "prompt_token_ids", "token_ids", "messages")


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


async def select_prompt(api: ApiState, request: Request, body: PromptSelector) -> Selection:
    """The tokens of a prompt, of given ids, or that all conversations begin with that begin with these messages."""
    field = one_given(body)
    return await _prompt(api, request, body, field)


async def select_sequence(
    api: ApiState, request: Request, body: SequenceSelector, *, seen: bool, others: tuple[str, ...] = ()
) -> Selection:
    """Likewise, or a session's: `seen` what its next turn would look for, else all that was said."""
    field = one_given(body, "session_id", *others)
    if field != "session_id":
        return await _prompt(api, request, body, field)
    salt = kv_salt(request.state.tenant, body.cache_salt)
    name = session_key(request.state.tenant, body.session_id)
    assert name is not None
    key = (salt, name)
    found = await look_up_session(api.client, key)
    answer = None if found is None else (await api.client.query(GetTokens(key, seen), replica_id=found[0]))[found[0]]
    if answer is None or not answer.engine:
        raise SessionNotFound("session_id", body.session_id)
    return Selection(field, salt, tuple(answer.engine), key)


async def encoded_text(api: ApiState, field: str, given: Any, model: ServedModel, *, special: bool) -> tuple[int, ...]:
    """A text or token ids as ids."""
    check_prompt(field, given)
    if isinstance(given, str):
        prompt = await api.off_loop(len(given), lambda: api.encode(field, given, model, add_special_tokens=special))
    else:
        prompt = await api.off_loop(len(given), lambda: api.take_ids(field, given, model))
    return _bounded(field, prompt.token_ids, model)


def served_model(api: ApiState, name: str | None) -> ServedModel:
    return api.model(name) if name is not None else next(iter(api.models.values()))


async def _prompt(api: ApiState, request: Request, body: PromptSelector, field: str) -> Selection:
    model, salt = served_model(api, body.model), kv_salt(request.state.tenant, body.cache_salt)
    given = getattr(body, field)
    if body.messages is not None:
        ids = await api.render_prefix(body.messages, template_variables(body.chat_template_kwargs))
        if not ids:
            raise InvalidRequest(field, None, "the chat template writes nothing for them alone")
        return Selection(field, salt, _bounded(field, ids, model))
    if field != "prompt" and not isinstance(given, list):
        raise InvalidRequest(field, given, "must be a list of token ids")
    return Selection(field, salt, await encoded_text(api, field, given, model, special=body.add_special_tokens))


def _bounded(field: str, ids: tuple[int, ...], model: ServedModel) -> tuple[int, ...]:
    """Raises `ContextLengthExceeded` for what no completion could have computed."""
    if len(ids) >= model.max_context:
        raise ContextLengthExceeded(field, f"{len(ids)} tokens", f"may have {model.max_context - 1} tokens")
    return ids
