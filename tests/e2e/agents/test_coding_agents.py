"""Sessions of two coding agents as they speak now, over two replicas of which one is killed.

Written here from the public formats. `ClaudeCode` (/v1/messages): notes of the system between turns, tools of a server
and of the client by their kinds, deferred ones, marks, `thinking`, more `max_tokens` than there is room for, a count of
each prompt. `Codex` (/v1/responses, nothing stored): tools in a namespace, a custom tool with a grammar, replays.
Both call tools at once, once. The model is random: the script says which tool is called, the model draws the arguments.
What is counted is the share of each prompt that nothing had to compute.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))
import httpx
import pytest
from workloads import write_chat_llama

from mneme.cluster.wire.anthropic import MessagesRequest
from mneme.cluster.wire.responses import ResponsesRequest, chat_messages
from tests.e2e.replica_processes import cpu_seconds, kill_busiest
from tests.e2e.server_process import tiered

pytestmark = pytest.mark.e2e

TARGET = 0.95
SHAPE = {
    **{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "max_position_embeddings": 16_384},
}
WAIT_LIMIT_S = 240.0  # for replicas and for what is being saved, on a machine that is busy with other things
CHUNK_TOKENS = 256  # the tier has whole chunks of what is no session
NUM_TURNS, PARALLEL, KILLED = 9, 3, 5

FOLDERS = ("engine", "router", "cache", "api", "model", "tests")
NOUNS = ("page", "chunk", "session", "segment", "request", "replica", "token", "plan", "row", "pin")
VERBS = ("allocate", "release", "load", "store", "route", "merge", "split", "check", "read", "write")
RULES = [
    f"{i}. Before you {verb} a {noun}, read what {FOLDERS[i % 6]}/{verb}_{noun}.py says of it, and run its tests."
    for i, (verb, noun) in enumerate((verb, noun) for verb in VERBS for noun in NOUNS)
]
FILES = [f"{folder}/{verb}_{noun}.py" for folder in FOLDERS for verb in VERBS[:5] for noun in NOUNS[:6]]
SYSTEM = "\n".join(["You are a coding agent. Work in small steps.", *RULES, "The project's files:", *FILES])
TASK = {"role": "user", "content": "Make the tests of the engine pass."}
PATCH_GRAMMAR = """start: "*** Begin Patch" LF "*** Update File: " /[a-z]{1,8}/ LF line~1..3 "*** End Patch"
line: ("+" | "-" | " ") /[a-z ]{0,12}/ LF
%import common.LF
"""


def tool(name: str, description: str, **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return {"name": name, "description": description, "input_schema": schema}


PATH, TEXT = {"enum": [f"{folder}/load_page.py" for folder in FOLDERS]}, {"type": "string", "maxLength": 16}
TOOLS = [
    tool("read", "Read a file.", path=PATH),
    tool("edit", "Replace a text in a file.", path=PATH, old=TEXT, new=TEXT),
    tool("run", "Run the tests of a folder.", folder={"enum": list(FOLDERS)}),
]


def result_of(turn: int) -> str:
    """What a tool says; little before the kill, as of the last chunk nothing will be found."""
    if turn in (PARALLEL, KILLED - 1):
        return "done"
    words = [(VERBS[(turn + i) % 10], NOUNS[(turn * 3 + i) % 10]) for i in range(8 + turn // 4)]
    return "\n".join(f"{i:4}    {noun}_{i} = {verb}({noun}s, turn={turn})" for i, (verb, noun) in enumerate(words))


@dataclass
class ClaudeCode:
    model: str
    path = "/v1/messages"
    said: list[dict[str, Any]] = field(default_factory=lambda: [TASK, {"role": "system", "content": "Agents: reader."}])

    def body(self, turn: int) -> dict[str, Any]:
        typed = [{"type": "web_search_20250305", "name": "web_search"}, {"type": "bash_20250124", "name": "bash"}]
        deferred = {**tool("late", "Found later.", path=TEXT), "defer_loading": True}
        system = [f"x-anthropic-billing-header: cch={turn};", f"Claude. {SYSTEM}"]
        return {
            "model": self.model,
            "system": [{"type": "text", "text": text} for text in system],
            "messages": self.said,
            "tools": [*TOOLS, *typed, deferred],
            "tool_choice": {"type": "any"} if turn == PARALLEL else {"type": "tool", "name": TOOLS[turn % 3]["name"]},
            "max_tokens": 32_000,
            "thinking": {"type": "enabled", "budget_tokens": 4000},
        }

    def chat(self) -> dict[str, Any]:
        """Return the chat request that its body becomes."""
        return MessagesRequest.model_validate(self.body(0)).placed(folds=False).chat()

    def num_tokens(self, answer: Any) -> tuple[int, int]:
        """Return the tokens of the prompt, and those that were found."""
        usage, parts = answer["usage"], ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
        return sum(usage[part] for part in parts), usage["cache_read_input_tokens"]

    def go_on(self, answer: Any, turn: int) -> None:
        uses = [block for block in answer["content"] if block["type"] == "tool_use"]
        assert uses, answer
        results: list[dict[str, Any]] = [
            {"type": "tool_result", "tool_use_id": use["id"], "content": result_of(turn)} for use in uses
        ]
        for message in self.said:
            if isinstance(message["content"], list):
                message["content"][-1].pop("cache_control", None)
        results[-1]["cache_control"] = {"type": "ephemeral"}
        self.said += [{"role": "assistant", "content": uses}, {"role": "user", "content": results}]
        if turn % 3 == 0:
            self.said.append({"role": "system", "content": "Files on disk changed since they were read."})


@dataclass
class Codex:
    model: str
    path = "/v1/responses"
    said: list[dict[str, Any]] = field(default_factory=lambda: [{"type": "message", **TASK}])

    def body(self, turn: int) -> dict[str, Any]:
        read, edit, run = (
            {"type": "function", "name": each["name"], "parameters": each["input_schema"], "strict": False}
            for each in TOOLS
        )
        grammar = {"type": "grammar", "syntax": "lark", "definition": PATCH_GRAMMAR}
        choice = (
            {"type": "function", "name": "read", "namespace": "mcp__files"},
            {"type": "custom", "name": "apply_patch"},
            {"type": "function", "name": "run"},
        )[turn % 3]
        return {
            "model": self.model,
            "instructions": SYSTEM,
            "input": self.said,
            "tools": [
                run,
                {"type": "namespace", "name": "mcp__files", "description": "Files.", "tools": [read, edit]},
                {"type": "custom", "name": "apply_patch", "description": "Patch files.", "format": grammar},
                {"type": "web_search", "external_web_access": False},
            ],
            "tool_choice": "required" if turn == PARALLEL else choice,
            "parallel_tool_calls": turn == PARALLEL,
            "reasoning": {"effort": "medium", "summary": "auto"},
            "store": False,
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": "7d1f",
        }

    def chat(self) -> dict[str, Any]:
        body = ResponsesRequest.model_validate(self.body(0))
        items = body.items("resp_x")
        return body.chat([{"role": "system", "content": SYSTEM}, *chat_messages(items)], body.offered(items))

    def num_tokens(self, answer: Any) -> tuple[int, int]:
        usage = answer["usage"]
        return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]

    def go_on(self, answer: Any, turn: int) -> None:
        assert answer["output"], answer
        self.said += answer["output"]
        for item in answer["output"]:
            text = result_of(turn)
            output = [{"type": "input_text", "text": text}] if turn % 2 else text
            self.said.append({"type": f"{item['type']}_output", "call_id": item["call_id"], "output": output})


def asked(http: httpx.Client, path: str, body: dict[str, Any]) -> Any:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def await_until(what: str, is_so: Any) -> None:
    deadline = time.monotonic() + WAIT_LIMIT_S
    while not is_so():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def await_saved(agent: ClaudeCode | Codex, http: httpx.Client, num_prompt: int) -> None:
    """Wait until the tier has the last prompt: who is killed takes along what was on its way."""
    chat = agent.chat()
    given = {"model": agent.model, "messages": chat["messages"], "tools": chat["tools"]}
    ids = asked(http, "/tokenize", given)["tokens"]
    lookup, least = {"prompt_token_ids": ids}, num_prompt - CHUNK_TOKENS
    await_until("saved", lambda: asked(http, "/v1/kv/lookup", lookup)["tier"]["tokens"] > least)


def test_nearly_all_of_every_prompt_is_found(tmp_path: Path) -> None:
    """Every answer is a 200, and all but what is new is found, wherever it runs."""
    model = write_chat_llama(tmp_path / "model", **SHAPE)
    memory = ("--set", f"engine.kv_cache_bytes={64 << 20}")
    with tiered(tmp_path / "kv", str(model), *memory) as (process, http):
        name = http.get("/v1/models").raise_for_status().json()["data"][0]["id"]
        for agent in (ClaudeCode(name), Codex(name)):
            await_until("two replicas", lambda: http.get("/ready").json()["replicas"] == 2)
            before, num_prompt = cpu_seconds(process), 0
            for turn in range(NUM_TURNS):
                if turn == KILLED:
                    await_saved(agent, http, num_prompt)
                    kill_busiest(process, before)
                body = agent.body(turn)
                answer = asked(http, agent.path, body)
                num_prompt, num_found = agent.num_tokens(answer)
                assert not turn or num_found >= TARGET * num_prompt, (agent.path, turn, num_found, num_prompt)
                if isinstance(agent, ClaudeCode):
                    assert asked(http, f"{agent.path}/count_tokens", body)["input_tokens"] == num_prompt
                agent.go_on(answer, turn)
            if isinstance(agent, ClaudeCode):  # its marks are pins, of the replica that is left
                pins = http.get("/v1/kv/pins").raise_for_status().json()["data"]
                assert any(pin["id"].startswith("mark-") for pin in pins)
