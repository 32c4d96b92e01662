"""A coding agent's session of twenty turns, in both wire formats: all but what is new is found, wherever it runs."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.replica_processes import cpu_seconds
from tests.e2e.test_cache_tier import MODEL, await_saved, served

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

NUM_TURNS = 20
SYSTEM = "You are a coding agent. Read files before you change them, and say at the end what was done. " * 31
PATH = {"type": "object", "properties": {"path": {"enum": ["a.py", "b.py"]}}, "required": ["path"]}
NAMES = ("read", "edit")
TASK = {"role": "user", "content": "Make the tests pass."}


class ChatAgent:
    """Speaks OpenAI's format: sends all that was said, and what its tools answer."""

    name = "chat"

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}, TASK]
        self.shares: list[float] = []  # of each prompt, what was found
        self.num_history = 0

    def turn(self, http: httpx.Client) -> None:
        tools = [{"type": "function", "function": {"name": name, "parameters": PATH}} for name in NAMES]
        how = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 50}
        answer = self.asked(http, "/v1/chat/completions", {**how, "messages": self.messages})
        usage, message = answer["usage"], answer["choices"][0]["message"]
        self.shares.append(usage["prompt_tokens_details"]["cached_tokens"] / usage["prompt_tokens"])
        self.num_history = usage["total_tokens"]
        (call,) = message["tool_calls"]
        self.messages += [message, {"role": "tool", "tool_call_id": call["id"], "content": "ok"}]

    def asked(self, http: httpx.Client, path: str, body: dict[str, Any]) -> Any:
        headers = {"X-Session-ID": self.name}
        return http.post(path, json={"model": MODEL, **body}, headers=headers).raise_for_status().json()


class AnthropicAgent(ChatAgent):
    """Speaks Anthropic's: a line that changes, a mark that moves along."""

    name = "anthropic"

    def __init__(self) -> None:
        super().__init__()
        self.messages = [TASK]

    def turn(self, http: httpx.Client) -> None:
        line = f"x-anthropic-billing-header: cch={len(self.messages)};"
        body = {
            "system": [{"type": "text", "text": line}, {"type": "text", "text": f"Claude. {SYSTEM}"}],
            "messages": self.messages,
            "tools": [{"name": name, "input_schema": PATH} for name in NAMES],
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
            "max_tokens": 50,
        }
        answer = self.asked(http, "/v1/messages", body)
        usage, (use,) = answer["usage"], answer["content"]
        read = usage["cache_read_input_tokens"]
        num_prompt = read + usage["cache_creation_input_tokens"] + usage["input_tokens"]
        self.shares.append(read / num_prompt)
        self.num_history = num_prompt + usage["output_tokens"]
        for message in self.messages[1:]:
            message["content"][0].pop("cache_control", None)
        result = {
            "type": "tool_result",
            "tool_use_id": use["id"],
            "content": "ok",
            "cache_control": {"type": "ephemeral"},
        }
        self.messages += [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]


def test_nearly_all_of_every_prompt_is_found(tmp_path: Path) -> None:
    chat, anthropic = ChatAgent(), AnthropicAgent()
    with served(tmp_path) as (process, http):
        busy_before = cpu_seconds(process)
        for _ in range(NUM_TURNS // 2):
            chat.turn(http)
        await_saved(http, chat.num_history, session_id=chat.name)
        busy = cpu_seconds(process)
        os.kill(max(busy, key=lambda pid: busy[pid] - busy_before[pid]), signal.SIGKILL)
        for _ in range(NUM_TURNS // 2):
            chat.turn(http)
            anthropic.turn(http)
        await_saved(http, anthropic.num_history, session_id=anthropic.name)
        pins = http.get("/v1/kv/pins").raise_for_status().json()["data"]
        assert any(pin["id"].startswith("mark-") for pin in pins)
        process.stop()
    with served(tmp_path) as (_, http):
        for _ in range(NUM_TURNS // 2):
            anthropic.turn(http)
    for agent in (chat, anthropic):
        assert len(agent.shares) == NUM_TURNS
        assert min(agent.shares[1:]) >= 0.95, (agent.name, agent.shares)
