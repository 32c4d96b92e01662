"""POST /tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse

from mneme.cluster.http.api_state import ApiState, Prompt, ServedModel
from mneme.cluster.http.protocol import DetokenizeRequest, TokenizeRequest, validate
from mneme.errors import InvalidRequest


async def tokenize(api: ApiState, request: Request) -> JSONResponse:
    """Ids of a text, or of a conversation as the chat endpoint would render it."""
    body = validate(TokenizeRequest, await api.parsed(request))
    model = _model(api, body.model)
    prompt = await _prompt(api, body, model)
    answer: dict[str, Any] = {
        "count": len(prompt.token_ids),
        "max_model_len": model.max_context,
        "tokens": list(prompt.token_ids),
    }
    if body.return_token_strs:
        answer["token_strs"] = [api.tokenizer.token_text(token_id) for token_id in prompt.token_ids]
    return JSONResponse(answer)


async def detokenize(api: ApiState, request: Request) -> JSONResponse:
    """The text of ids."""
    body = validate(DetokenizeRequest, await api.parsed(request))
    _model(api, body.model)

    def decode() -> str:
        api.check_ids("tokens", body.tokens)
        return api.tokenizer.decode(body.tokens, skip_special_tokens=body.skip_special_tokens)

    return JSONResponse({"prompt": await api.off_loop(len(body.tokens), decode)})


def _model(api: ApiState, name: str | None) -> ServedModel:
    return api.model(name) if name is not None else next(iter(api.models.values()))


async def _prompt(api: ApiState, body: TokenizeRequest, model: ServedModel) -> Prompt:
    text, messages = body.prompt, body.messages
    if (text is None) == (messages is None):
        raise InvalidRequest("prompt", None, "give either a prompt or messages")
    if messages is not None:
        return await api.render(messages, model, add_generation_prompt=body.add_generation_prompt)
    if not text:
        raise InvalidRequest("prompt", text, "must not be empty")
    return await api.off_loop(
        len(text), lambda: api.encode("prompt", text, model, add_special_tokens=body.add_special_tokens)
    )
