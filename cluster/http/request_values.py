"""Values of request bodies that need more than a type: prompts, messages, logit biases, and error paths."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pydantic import ValidationError

from mneme.errors import InvalidRequest

_UNION_BRANCHES = frozenset({"str", "int", "float", "bool", "none"})  # pydantic puts them into error paths


def parse_prompts(prompt: Any) -> list[str | list[int]]:
    """A string, token ids, or a list of either, as a list of prompts; the first element says which.

    Done by hand because a union of four list types would collect an error for each of a million elements.
    """
    if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and _is_int(prompt[0])):
        check_prompt("prompt", prompt)
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise InvalidRequest("prompt", brief(prompt), "must be a non-empty string, list of token ids, or list of these")
    for i, item in enumerate(prompt):
        check_prompt(f"prompt[{i}]", item)
        if type(item) is not type(prompt[0]):
            raise InvalidRequest(f"prompt[{i}]", brief(item), "prompts are all strings or all token ids")
    return prompt


def check_prompt(path: str, prompt: Any) -> None:
    """Raise `InvalidRequest` for what is neither text nor token ids, or empty."""
    if not isinstance(prompt, str | list):
        raise InvalidRequest(path, brief(prompt), "must be a string or a list of token ids")
    if not prompt:
        raise InvalidRequest(path, brief(prompt), "must not be empty")
    if isinstance(prompt, list):
        for i, token_id in enumerate(prompt):
            if not _is_int(token_id):
                raise InvalidRequest(f"{path}[{i}]", brief(token_id), "must be a token id")


def parse_logit_bias(logit_bias: Mapping[str, float]) -> dict[int, float]:
    """JSON object keys to token ids."""
    for key in logit_bias:
        if not (key.isascii() and key.isdecimal() and len(key) <= 10):
            raise InvalidRequest("logit_bias", key, "keys are token ids")
    return {int(key): bias for key, bias in logit_bias.items()}


def template_message(
    index: int, role: str, content: str | list[str] | None, others: Mapping[str, str | None]
) -> dict[str, str]:
    """A message as templates expect it: plain text, and "developer" under its older name."""
    if content is None and role != "assistant":
        raise InvalidRequest(f"messages[{index}].content", None, "may be null only for an assistant")
    text = "\n".join(content) if isinstance(content, list) else content or ""
    message = {"role": "system" if role == "developer" else role, "content": text}
    return message | {name: value for name, value in others.items() if value is not None}


@contextmanager
def fields_named(names: Mapping[str, str]) -> Iterator[None]:
    """Name fields in errors as the caller wrote them."""
    try:
        yield
    except InvalidRequest as error:
        field = names.get(error.field or "", error.field or "")
        raise InvalidRequest(field, error.args[1], error.rule) from None


def first_breach(error: ValidationError) -> InvalidRequest:
    """The first type error as an `InvalidRequest` that names its path in the body."""
    breaches = error.errors(include_url=False, include_context=False)
    # A union reports each of its branches: the longest path is in the branch that was meant.
    first = max(breaches, key=lambda breach: len(_path(breach["loc"])))
    same = [b["msg"] for b in breaches if _path(b["loc"]) == _path(first["loc"])]
    rule = ", or ".join(dict.fromkeys(message[:1].lower() + message[1:] for message in same))
    value = None if first["type"] == "missing" else brief(first["input"])
    return InvalidRequest(_path_text(first["loc"]), value, rule)


def brief(value: Any) -> Any:
    """`value`, or only its size where it is a collection."""
    return f"{type(value).__name__} of {len(value)}" if isinstance(value, list | dict) else value


def _is_int(value: Any) -> bool:
    return type(value) is int  # bool is not


def _path(loc: tuple[int | str, ...]) -> list[int | str]:
    return [p for p in loc if isinstance(p, int) or (p.isidentifier() and p not in _UNION_BRANCHES)]


def _path_text(loc: tuple[int | str, ...]) -> str:
    text = ""
    for part in _path(loc):
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text or "body"
