"""Prompts that the configuration names: several applications' system prompts and documents, warmed before traffic.

KV is never shared between API keys, so each has its own copy of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from mneme.errors import ConfigError, InvalidRequest, MnemeError, Overloaded
from mneme.replicas.config import WarmPrompt
from mneme.replicas.engine.pins import PinKey
from mneme.replicas.text.prompt_prefix import conversation_prefix

if TYPE_CHECKING:
    from mneme.replicas.engine.engine import Engine
    from mneme.replicas.text.tokenizer import Tokenizer


class Tenant(NamedTuple):
    name: str
    salt: str


PUBLIC = Tenant("public", "")  # the only one where there are no API keys


def warm_before_traffic(
    engine: Engine, tokenizer: Tokenizer, prompts: Sequence[WarmPrompt], tenants: Sequence[Tenant]
) -> None:
    """Compute and pin all of them for each tenant; raises `ConfigError` if one cannot be, or there is no room."""
    keys: list[tuple[int, PinKey]] = []
    for index, prompt in enumerate(prompts):
        ids = _token_ids(tokenizer, prompt, index)
        for tenant in tenants:
            keys.append((index, PinKey(tenant.name, f"configured-{index}")))
            _begin(engine, keys[-1], tenant.salt, tuple(ids), prompt.ttl_s)
    while engine.has_work:
        engine.step()
    for index, key in keys:
        described = engine.pins.describe(key)
        if described is not None and described["error"] is not None:
            raise ConfigError(f"engine.warm_prompts[{index}]: {described['error']}")


def _begin(engine: Engine, named: tuple[int, PinKey], salt: str, ids: tuple[int, ...], ttl_s: float | None) -> None:
    index, key = named
    while True:
        try:
            return engine.pins.warm(key, salt, ids, ttl_s=ttl_s, is_configured=True)
        except (InvalidRequest, Overloaded) as error:
            if isinstance(error, InvalidRequest) or not engine.has_work:
                raise ConfigError(f"engine.warm_prompts[{index}]: {error}") from None
        engine.step()  # others wait already: their turn first


def _token_ids(tokenizer: Tokenizer, prompt: WarmPrompt, index: int) -> list[int]:
    try:
        if prompt.text:
            return tokenizer.encode(prompt.text, add_special_tokens=True)
        messages = [{"role": "system", "content": prompt.system}]
        return conversation_prefix(tokenizer.render_chat, tokenizer.encode_rendered, messages)
    except MnemeError as error:
        raise ConfigError(f"engine.warm_prompts[{index}]: {error}") from None
