"""Fields of the OpenAI and vLLM APIs that this server does not act on, and which of them it refuses.

A field is refused when leaving it out would change what the answer means: a caller who asks for JSON by a
schema, or for a tool call, must hear that none will come. Its harmless values (null, the default, "off")
are accepted.

Everything else that is unknown is accepted and ignored, as clients of vLLM and SGLang expect; that includes
`user`, `store`, `metadata`, `service_tier`, `safety_identifier`, `parallel_tool_calls`, `prediction`,
`prompt_cache_retention`, `prompt_cache_options`, `moderation`, `reasoning_effort`, `verbosity`, `priority`
and `kv_transfer_params`, none of which changes what the tokens mean.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mneme.errors import InvalidRequest

Accepts = Callable[[Any], bool]


def _is_off(value: Any) -> bool:
    return value is None or value is False or value == [] or value == {}


def _is_text_format(value: Any) -> bool:
    return value is None or (isinstance(value, Mapping) and value.get("type") == "text")


def _one_of(*accepted: Any) -> Accepts:
    return lambda value: any(value == other and type(value) is type(other) for other in accepted)


_STRUCTURED = "structured output is not supported"
_TOOLS = "tool calling is not supported; leave it out"
_REFUSED: dict[str, tuple[Accepts, str]] = {
    "tool_choice": (_one_of(None, "none", "auto"), _TOOLS),
    "functions": (_is_off, _TOOLS),
    "function_call": (_one_of(None, "none", "auto"), _TOOLS),
    "response_format": (_is_text_format, f'{_STRUCTURED}: only {{"type": "text"}}'),
    "structured_outputs": (_is_off, _STRUCTURED),
    "guided_json": (_is_off, _STRUCTURED),
    "guided_regex": (_is_off, _STRUCTURED),
    "guided_choice": (_is_off, _STRUCTURED),
    "guided_grammar": (_is_off, _STRUCTURED),
    "json_schema": (_is_off, _STRUCTURED),
    "regex": (_is_off, _STRUCTURED),
    "ebnf": (_is_off, _STRUCTURED),
    "audio": (_is_off, "audio is not supported"),
    "modalities": (_one_of(None, ["text"]), 'only ["text"] is supported'),
    "web_search_options": (_is_off, "web search is not supported"),
    "logits_processors": (_is_off, "logits processors are not supported"),
    "custom_logit_processor": (_is_off, "logits processors are not supported"),
    "allowed_token_ids": (_is_off, "not supported"),
    "bad_words": (_is_off, "not supported"),
    "use_beam_search": (_is_off, "beam search is not supported"),
    "prompt_embeds": (_is_off, "prompt embeddings are not supported"),
    "prompt_logprobs": (_is_off, "log-probabilities of the prompt are not supported"),
    "truncate_prompt_tokens": (_is_off, "not supported; `truncation` says what happens to a prompt that is too long"),
    "continue_final_message": (_is_off, "not supported"),
    "chat_template": (_is_off, "the model's own template is used"),
    "documents": (_is_off, "documents are not supported"),
    "suffix": (_one_of(None, ""), "suffixes are not supported"),
}


def refuse_unsupported(body: Mapping[str, Any]) -> None:
    """Raise `InvalidRequest` if the body asks for something that would not happen."""
    for field, (accepts, rule) in _REFUSED.items():
        if field in body and not accepts(body[field]):
            raise InvalidRequest(field, body[field], rule)
    tools = body.get("tools")
    if not _is_off(tools) and body.get("tool_choice") != "none":
        raise InvalidRequest("tools", None, _TOOLS)
