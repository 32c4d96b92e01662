"""Anthropic's own SDK, strict, with what its agents send."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster.api_fixtures import MODEL, serving

anthropic: Any = pytest.importorskip("anthropic")

HOW: dict[str, Any] = {
    "model": MODEL.id,
    "system": [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": "the fox"},
        {"role": "system", "content": "Agents: reader."},
        {"role": "assistant", "content": [{"type": "text", "text": "A dog."}]},
        {"role": "user", "content": [{"type": "text", "text": "and then?"}]},
        {"role": "system", "content": [{"type": "text", "text": "Be quick."}]},
    ],
    "thinking": {"type": "enabled", "budget_tokens": 1024},
}


@pytest.fixture
def client() -> Iterator[Any]:
    how = {"api_key": "x", "max_retries": 0, "_strict_response_validation": True}
    with serving() as server, anthropic.Anthropic(base_url=server.url, **how) as client:
        yield client


def test_an_agents_turn_is_answered_streamed_and_counted(client: Any) -> None:
    raw = client.messages.with_raw_response.create(**HOW, max_tokens=8192)
    said = raw.parse()
    text = said.content[0].text
    assert text
    assert said.stop_reason == "end_turn"
    usage = said.usage
    num_prompt = usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens
    assert raw.headers["x-mneme-max-tokens"] == str(MODEL.max_context - num_prompt)
    assert "thinking" in raw.headers["x-mneme-ignored-fields"].split(", ")
    with client.messages.stream(**HOW, max_tokens=2000) as stream:
        assert "".join(stream.text_stream) == text
    assert client.messages.count_tokens(**HOW).input_tokens == num_prompt
    beta = client.beta.messages.create(**HOW, max_tokens=100, betas=["mid-conversation-system"])
    assert beta.content[0].text == text


def test_what_is_wrong_is_the_sdks_error(client: Any) -> None:
    messages = [*HOW["messages"], {"role": "system", "content": [{"type": "tool_use"}]}]
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[5\].content\[0\].type"):
        client.messages.create(**{**HOW, "messages": messages}, max_tokens=10)
