"""A coding agent's session of nine turns, in OpenAI's and in Anthropic's format, over a kill and a restart.

The session is written here, from the public formats: instructions and tools of some thousand tokens, then in each turn
a call and a result of some hundred tokens, which grow. Two replicas of a random Llama of 16,384 tokens of context, with
mneme-tiny's tokenizer and template, and a cache tier on disk serve it. After a third of the turns the replica that has
the session is killed, after two thirds the server is stopped and started again. What is counted is the share of each
prompt that nothing had to compute. Calls are forced, as the model is random: the script says which tool, the model
draws the arguments.

Chat templates write the list of tools at the head of the prompt, so a tool more in the list changes nearly all of it
(`with_a_tool_more`: the share that is still found). So agents that find their tools as they go declare a few from the
start, one that looks for others and one that calls what was found; the definitions of others come as results, and stay
where they were said. That is what this session does.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))
import httpx
from workloads import write_chat_llama

from tests.e2e.replica_processes import cpu_seconds
from tests.e2e.server_process import SERVE, ServerProcess, free_port

NUM_TURNS = 9
PARTS = (range(0, 3), range(3, 6), range(6, NUM_TURNS))  # before the kill, up to the restart, behind it
TARGET = 0.95
MAX_CONTEXT = 16_384
SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_CONTEXT,
}
WAIT_LIMIT_S = 240.0  # for replicas and for what is being saved, on a machine that is busy with other things
FOLDERS = ("engine", "router", "cache", "api", "model", "tests")
NOUNS = ("page", "chunk", "session", "segment", "request", "replica", "token", "plan", "row", "pin")
VERBS = ("allocate", "release", "load", "store", "route", "merge", "split", "check", "read", "write")


def _instructions() -> str:
    """What an agent is told at first: how to work, and what the project has."""
    pairs = [
        (verb, noun, FOLDERS[(i + j) % len(FOLDERS)]) for i, verb in enumerate(VERBS) for j, noun in enumerate(NOUNS)
    ]
    rules = [
        f"{i}. Before you {verb} a {noun}, read what the {folder} folder says of it, and keep its tests passing."
        for i, (verb, noun, folder) in enumerate(pairs, 1)
    ]
    tree = [f"{folder}/{verb}_{noun}.py" for folder in FOLDERS for verb in VERBS[:5] for noun in NOUNS[:6]]
    return "\n".join(["You are a coding agent. Work in small steps.", *rules, "The project's files:", *tree])


def source(turn: int, num_lines: int) -> str:
    """Lines of a file as a tool shows them."""
    words = [(VERBS[(turn + i) % len(VERBS)], NOUNS[(turn * 3 + i) % len(NOUNS)]) for i in range(num_lines)]
    return "\n".join(f"{i + 1:4}    {noun}_{i} = {verb}({noun}s, turn={turn})" for i, (verb, noun) in enumerate(words))


def _definition(turn: int) -> dict[str, Any]:
    """A tool that is found as the session goes on."""
    verb, noun = VERBS[turn % len(VERBS)], NOUNS[turn % len(NOUNS)]
    path = {"type": "string", "description": f"the file whose {noun}s it is about"}
    return {
        "name": f"{verb}_{noun}s",
        "description": f"{verb.capitalize()} all {noun}s of a file, and say which were changed.",
        "input_schema": {"type": "object", "properties": {"path": path}, "required": ["path"]},
    }


def tool(name: str, description: str, /, **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return {"name": name, "description": description, "input_schema": schema}


_PATH = {"enum": [f"{folder}/load_page.py" for folder in FOLDERS]}
TEXT = {"type": "string", "maxLength": 16}
TOOLS = [
    tool("read", "Read a file.", path=_PATH),
    tool("edit", "Replace a text in a file.", path=_PATH, old=TEXT, new=TEXT),
    tool("run", "Run the tests of a folder.", folder={"enum": list(FOLDERS)}),
    tool("find_tools", "Look for tools by what they do; the result defines them.", query=TEXT),
    tool("use_tool", "Call a tool that find_tools has defined.", name=TEXT, path=_PATH),
]
SYSTEM = _instructions()
TASK = {"role": "user", "content": "Make the tests of the engine pass."}
SCRIPT = ("find_tools", "read", "edit", "run", "use_tool")  # again and again


def result_of(turn: int) -> str:
    """What the tool of a turn answers: from about 170 to 530 tokens."""
    name = SCRIPT[turn % len(SCRIPT)]
    if name == "find_tools":
        return "\n".join(json.dumps(_definition(turn + i)) for i in range(2 + turn // 5))
    return source(turn, 8 + turn)


class ChatAgent:
    """Speaks OpenAI's format: sends all that was said, and what its tools answer."""

    name = "chat"

    def __init__(self, model: str) -> None:
        self.model = model
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}, TASK]
        self.shares: list[float] = []  # of each prompt, what was found
        self.num_prompt: list[int] = []
        self.num_history = 0  # tokens of prompt and answer so far

    def turn(self, http: httpx.Client) -> None:
        turn = len(self.shares)
        named = {"type": "function", "function": {"name": SCRIPT[turn % len(SCRIPT)]}}
        answer = self.asked(http, tool_choice=named)
        usage, message = answer["usage"], answer["choices"][0]["message"]
        self.count(usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"], usage["completion_tokens"])
        (call,) = message["tool_calls"]
        self.messages += [message, {"role": "tool", "tool_call_id": call["id"], "content": result_of(turn)}]

    def asked(self, http: httpx.Client, **more: Any) -> Any:
        functions = [
            {"name": each["name"], "description": each["description"], "parameters": each["input_schema"]}
            for each in self.tools(more)
        ]
        body = {"messages": self.messages, "tools": [{"type": "function", "function": each} for each in functions]}
        return self.answered(http, "/v1/chat/completions", {**body, **more})

    def with_a_tool_more(self, http: httpx.Client) -> float:
        """The share that is found of the next prompt, if the list of tools were to grow."""
        usage = self.asked(http, more_tools=[_definition(0)], max_tokens=1)["usage"]
        return float(usage["prompt_tokens_details"]["cached_tokens"] / usage["prompt_tokens"])

    def tools(self, more: dict[str, Any]) -> list[dict[str, Any]]:
        return [*TOOLS, *more.pop("more_tools", [])]

    def answered(self, http: httpx.Client, path: str, body: dict[str, Any]) -> Any:
        headers = {"X-Session-ID": self.name}
        body = {"model": self.model, "max_tokens": 200, "seed": len(self.shares), **body}
        return http.post(path, json=body, headers=headers).raise_for_status().json()

    def count(self, num_prompt: int, num_found: int, num_answer: int) -> None:
        self.shares.append(num_found / num_prompt)
        self.num_prompt.append(num_prompt)
        self.num_history = num_prompt + num_answer


class AnthropicAgent(ChatAgent):
    """Speaks Anthropic's: a line that changes, a mark that moves along."""

    name = "anthropic"

    def __init__(self, model: str) -> None:
        super().__init__(model)
        self.messages = [TASK]

    def turn(self, http: httpx.Client) -> None:
        turn = len(self.shares)
        answer = self.asked(http, tool_choice={"type": "tool", "name": SCRIPT[turn % len(SCRIPT)]})
        usage, (use,) = answer["usage"], answer["content"]
        self.count(_num_prompt(usage), usage["cache_read_input_tokens"], usage["output_tokens"])
        for message in self.messages[1:]:
            message["content"][0].pop("cache_control", None)
        result = {
            "type": "tool_result",
            "tool_use_id": use["id"],
            "content": result_of(turn),
            "cache_control": {"type": "ephemeral"},
        }
        self.messages += [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]

    def asked(self, http: httpx.Client, **more: Any) -> Any:
        line = f"x-anthropic-billing-header: cch={len(self.messages)};"
        system = [{"type": "text", "text": line}, {"type": "text", "text": f"Claude. {SYSTEM}"}]
        body = {"system": system, "messages": self.messages, "tools": self.tools(more)}
        return self.answered(http, "/v1/messages", {**body, **more})

    def with_a_tool_more(self, http: httpx.Client) -> float:
        usage = self.asked(http, more_tools=[_definition(0)], max_tokens=1)["usage"]
        return float(usage["cache_read_input_tokens"] / _num_prompt(usage))


def _num_prompt(usage: dict[str, int]) -> int:
    parts = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    return sum(usage[part] for part in parts)


@contextmanager
def served(model: Path, disk: Path) -> Iterator[tuple[ServerProcess, httpx.Client]]:
    settings = {
        "engine.dtype": "float32",
        "engine.kv_cache_bytes": 64 << 20,
        "cache.load": "always",  # whatever this machine takes for it: so small a model is computed sooner
        "cache.disk.folder": disk,
        "cache.disk.capacity_bytes": 256 << 20,
    }
    given = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
    process = ServerProcess([*SERVE, str(model), "--replicas", "2", "--port", str(free_port()), *given])
    try:
        with httpx.Client(base_url=process.await_ready(), timeout=120) as http:
            yield process, http
    finally:
        process.discard()


def await_until(what: str, is_so: Any) -> None:
    deadline = time.monotonic() + WAIT_LIMIT_S
    while not is_so():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def kill_busiest(process: ServerProcess, before: dict[int, float]) -> None:
    """Kill the replica that has taken most CPU time since `before`: the one that had the session."""
    busy = {pid: used - before.get(pid, 0.0) for pid, used in cpu_seconds(process).items()}
    os.kill(max(busy, key=lambda pid: busy[pid]), signal.SIGKILL)


def _await_saved(http: httpx.Client, agent: ChatAgent) -> None:
    """Wait until the tier has the session: what is killed right after an answer takes along what was on its way."""

    def is_saved() -> bool:
        tier = http.post("/v1/kv/lookup", json={"session_id": agent.name}).raise_for_status().json()["tier"]
        return bool(tier["tokens"] >= agent.num_history - 1)

    await_until(f"{agent.name} saved", is_saved)


def run(folder: Path) -> dict[str, Any]:
    """Run both agents' sessions; returns each one's shares, and whether marks of the second were pins."""
    model = write_chat_llama(folder / "model", **SHAPE)
    disk, found = folder / "kv", dict[str, Any]()
    with served(model, disk) as (process, http):
        name = http.get("/v1/models").raise_for_status().json()["data"][0]["id"]
        agents = [ChatAgent(name), AnthropicAgent(name)]
        for agent in agents:
            await_until("two replicas", lambda: http.get("/ready").json()["replicas"] == 2)
            before = cpu_seconds(process)
            for _ in PARTS[0]:
                agent.turn(http)
            _await_saved(http, agent)
            kill_busiest(process, before)
            for _ in PARTS[1]:
                agent.turn(http)
            _await_saved(http, agent)
        pins = http.get("/v1/kv/pins").raise_for_status().json()["data"]
        found["marks_are_pins"] = any(pin["id"].startswith("mark-") for pin in pins)
        process.stop()
    with served(model, disk) as (_, http):
        for agent in agents:
            for _ in PARTS[2]:
                agent.turn(http)
            found[agent.name] = {
                "shares": [round(share, 4) for share in agent.shares],
                "num_prompt_tokens": agent.num_prompt,
                "with_a_tool_more": round(agent.with_a_tool_more(http), 4),
            }
    return found


def least_share(shares: list[float]) -> float:
    """The least share from the second turn on: of the first prompt nothing was computed before."""
    return min(shares[1:])
