"""Bodies of /v1/kv: which tokens are meant, and what is to become of their KV."""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import field_validator

from mneme.cluster.http.protocol import Body, Messages, checked_ttl

_PIN_ID = re.compile(r"[A-Za-z0-9._:-]{1,64}")


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
    ttl_s: float | None = None  # None: until it is deleted
    pin: bool = True
    replicas: Literal["all"] | int = "all"

    @field_validator("ttl_s")
    @classmethod
    def _in_range(cls, ttl_s: float | None) -> float | None:
        return checked_ttl(ttl_s)


class LookupRequest(SequenceSelector):
    chunks: bool = False  # list them one by one


class PinRequest(SequenceSelector):
    ttl_s: float | None = None  # None: until it is let go
    pin_id: str | None = None  # None: made of the tokens, so the same tokens have one pin

    @field_validator("ttl_s")
    @classmethod
    def _in_range(cls, ttl_s: float | None) -> float | None:
        return checked_ttl(ttl_s)

    @field_validator("pin_id")
    @classmethod
    def _is_a_name(cls, pin_id: str | None) -> str | None:
        return _checked_pin_id(pin_id)


class UnpinRequest(SequenceSelector):
    """By name, or by what was pinned."""

    pin_id: str | None = None

    @field_validator("pin_id")
    @classmethod
    def _is_a_name(cls, pin_id: str | None) -> str | None:
        return _checked_pin_id(pin_id)


class DropRequest(SequenceSelector):
    document: Any = None  # text or token ids of a document, as it was given with requests
    tenant: Literal[True] | None = None  # all of the API key's


def _checked_pin_id(pin_id: str | None) -> str | None:
    if pin_id is not None and not _PIN_ID.fullmatch(pin_id):
        raise ValueError("must have from 1 to 64 letters, digits or any of . _ : -")
    return pin_id
