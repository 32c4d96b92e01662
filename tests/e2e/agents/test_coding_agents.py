"""Sessions of two coding agents as they speak now, of twenty turns each, over two replicas of which one is killed.

Written here from the public formats. `ClaudeCode` (/v1/messages): notes of the system between turns, tools that are
found as it goes on, tools of a server and of the client by their kinds, `thinking`, more `max_tokens` than there is
room for, and a count of each prompt. `Codex` (/v1/responses, nothing stored): tools in a namespace, a custom tool with
a grammar, a client's search for tools, replayed calls of all kinds. Both call tools at once, are interrupted, and
compact their history once. Every answer must be a 200. What is counted is the share of each prompt that nothing had to
compute; where the history was compacted there is none. Server, model and results of tools are `coding_agent.py`'s.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.e2e.agents.coding_agent import (
    NOUNS,
    SCRIPT,
    SHAPE,
    SYSTEM,
    TARGET,
    TASK,
    TEXT,
    TOOLS,
    VERBS,
    await_until,
    kill_busiest,
    served,
    source,
    tool,
    write_chat_llama,
)  # fmt: skip

from mneme.cluster.wire.anthropic import MessagesRequest
from mneme.cluster.wire.responses import ResponsesRequest, chat_messages
from tests.e2e.replica_processes import cpu_seconds

pytestmark = pytest.mark.e2e

CHUNK_TOKENS = 256  # the tier has whole chunks of what is no session
NUM_TURNS = 20
KILLED, PARALLEL, INTERRUPTED, COMPACTED = 6, (4, 11), 9, 14
SUMMARY = "The tests of the engine fail in load_page; pages are read before they are written. Next: mend the order."
NOTE = "Files on disk changed since they were read."
PATCH_GRAMMAR = """start: "*** Begin Patch" LF "*** Update File: " /[a-z]{1,8}/ LF line~1..3 "*** End Patch"
line: ("+" | "-" | " ") /[a-z ]{0,12}/ LF
%import common.LF
"""


def _late(index: int) -> dict[str, Any]:
    """A tool that is found as a session goes on."""
    verb, noun = VERBS[index % 10], NOUNS[(index + index // 10) % 10]
    return tool(f"{verb}_{noun}s", f"{verb.capitalize()} all {noun}s of a file, and say which were changed.", path=TEXT)


class Agent:
    """Sends all that was said, and what its tools answer."""

    name, path = "", ""

    def __init__(self, model: str) -> None:
        self.model = model
        self.shares: list[float | None] = []  # of each prompt, what was found; None: there is nothing to find
        self.num_found_tools = 0
        self.num_prompt = 0  # tokens of the last one

    def turn(self, http: httpx.Client) -> None:
        turn = len(self.shares)
        if turn == COMPACTED:
            self.compact()
        if turn == INTERRUPTED:
            with http.stream(
                "POST", self.path, json=self.body(turn) | {"stream": True}, headers=self.headers()
            ) as answer:
                assert answer.status_code == 200, answer.read()
                next(answer.iter_bytes())
            self.interrupted()
        answer = self.asked(http, self.path, self.body(turn))
        self.num_prompt, num_found = self.usage(answer)
        self.shares.append(None if turn in (0, COMPACTED) else num_found / self.num_prompt)
        self.go_on(answer, turn)

    def asked(self, http: httpx.Client, path: str, body: dict[str, Any]) -> Any:
        answer = http.post(path, json=body, headers=self.headers())
        assert answer.status_code == 200, (self.name, len(self.shares), answer.text)
        return answer.json()

    def await_saved(self, http: httpx.Client) -> None:
        """Wait until the tier has the last prompt: who is killed takes along what was on its way."""
        chat = self.chat()
        given = {"messages": chat["messages"], "tools": chat["tools"]}
        ids = self.asked(http, "/tokenize", {"model": self.model, **given})["tokens"]

        def is_saved() -> bool:
            tier = self.asked(http, "/v1/kv/lookup", {"prompt_token_ids": ids})["tier"]
            return bool(tier["tokens"] > self.num_prompt - CHUNK_TOKENS)

        await_until(f"{self.name} saved", is_saved)

    def headers(self) -> dict[str, str]:
        return {}

    def chat(self) -> dict[str, Any]:
        """Return the chat request that its last body became."""
        raise NotImplementedError

    def body(self, turn: int) -> dict[str, Any]:
        raise NotImplementedError

    def usage(self, answer: Any) -> tuple[int, int]:
        """Return the tokens of the prompt, and those that were found."""
        raise NotImplementedError

    def go_on(self, answer: Any, turn: int) -> None:
        raise NotImplementedError

    def interrupted(self) -> None:
        raise NotImplementedError

    def compact(self) -> None:
        raise NotImplementedError

    def result(self, turn: int) -> str:
        """Return what a tool says; little before the kill, as of the last chunk nothing will be found."""
        return "done" if turn == KILLED - 1 else source(turn, 8 + turn // 4)

    def found(self, turn: int) -> list[dict[str, Any]]:
        """Tools that a search brings."""
        found = [_late(self.num_found_tools + i) for i in range(2)]
        self.num_found_tools += 2
        return found


class ClaudeCode(Agent):
    name, path = "claude-code", "/v1/messages"

    def __init__(self, model: str) -> None:
        super().__init__(model)
        self.messages: list[dict[str, Any]] = [
            TASK,
            {"role": "system", "content": "Agents that may be called: reader."},
        ]

    def body(self, turn: int) -> dict[str, Any]:
        deferred = [{**_late(i), "defer_loading": True} for i in range(30)]
        typed = [
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
            {"type": "bash_20250124", "name": "bash"},
        ]
        named = {"type": "tool", "name": SCRIPT[turn % len(SCRIPT)]}
        line = f"x-anthropic-billing-header: cch={turn};"
        return {
            "model": self.model,
            "system": [{"type": "text", "text": line}, {"type": "text", "text": f"Claude. {SYSTEM}"}],
            "messages": self.messages,
            "tools": [*TOOLS, *typed, *deferred],
            "tool_choice": {"type": "any"} if turn in PARALLEL else named,
            "max_tokens": 32_000,
            "thinking": {"type": "enabled", "budget_tokens": 4000},
            "metadata": {"user_id": "u"},
            "temperature": 1,
        }

    def chat(self) -> dict[str, Any]:
        return MessagesRequest.model_validate(self.body(0)).placed(folds=False).chat()

    def asked(self, http: httpx.Client, path: str, body: dict[str, Any]) -> Any:
        answer = super().asked(http, path, body)
        if path == self.path:
            counted = super().asked(http, f"{path}/count_tokens", body)["input_tokens"]
            assert counted == self.usage(answer)[0], (counted, answer["usage"])
        return answer

    def usage(self, answer: Any) -> tuple[int, int]:
        usage = answer["usage"]
        parts = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
        return sum(usage[part] for part in parts), usage["cache_read_input_tokens"]

    def go_on(self, answer: Any, turn: int) -> None:
        uses = [block for block in answer["content"] if block["type"] == "tool_use"]
        assert uses, answer
        results = []
        for use in uses:
            content: Any = self.result(turn) if len(uses) == 1 else "done"
            if use["name"] == "find_tools" and len(uses) == 1:
                content = [{"type": "tool_reference", "tool_name": tool["name"]} for tool in self.found(turn)]
            results.append({"type": "tool_result", "tool_use_id": use["id"], "content": content})
        for message in self.messages:
            if isinstance(message["content"], list):
                message["content"][-1].pop("cache_control", None)
        results[-1]["cache_control"] = {"type": "ephemeral"}
        self.messages += [{"role": "assistant", "content": uses}, {"role": "user", "content": results}]
        if turn % 3 == 0:
            self.messages.append({"role": "system", "content": NOTE})

    def interrupted(self) -> None:
        self.messages.append({"role": "user", "content": [{"type": "text", "text": "[Request interrupted by user]"}]})

    def compact(self) -> None:
        self.messages = [{"role": "user", "content": SUMMARY}, {"role": "system", "content": NOTE}]


class Codex(Agent):
    name, path = "codex", "/v1/responses"

    def __init__(self, model: str) -> None:
        super().__init__(model)
        self.items: list[dict[str, Any]] = [{"type": "message", **TASK}]

    def body(self, turn: int) -> dict[str, Any]:
        functions = [
            {
                "type": "function",
                "name": each["name"],
                "description": each["description"],
                "parameters": each["input_schema"],
            }
            for each in TOOLS
        ]
        read, edit, run, _, use = ({**each, "strict": False} for each in functions)
        grammar = {"type": "grammar", "syntax": "lark", "definition": PATCH_GRAMMAR}
        names = ("tool_search", "read", "apply_patch", "run", "use_tool")
        kinds = ("function", "function", "custom", "function", "function")
        space = {"namespace": "mcp__files"} if names[turn % 5] == "read" else {}
        choice = {"type": kinds[turn % 5], "name": names[turn % 5], **space}
        return {
            "model": self.model,
            "instructions": SYSTEM,
            "input": self.items,
            "tools": [
                run,
                use,
                {"type": "namespace", "name": "mcp__files", "description": "Files.", "tools": [read, edit]},
                {"type": "custom", "name": "apply_patch", "description": "Patch files.", "format": grammar},
                {
                    "type": "tool_search",
                    "execution": "client",
                    "description": "Find tools.",
                    "parameters": TOOLS[3]["input_schema"],
                },
                {"type": "web_search", "external_web_access": False},
            ],
            "tool_choice": "required" if turn in PARALLEL else choice,
            "parallel_tool_calls": turn in PARALLEL,
            "reasoning": {"effort": "medium", "summary": "auto"},
            "store": False,
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": "7d1f",
            "client_metadata": {"installation": "1"},
        }

    def chat(self) -> dict[str, Any]:
        body = ResponsesRequest.model_validate(self.body(0))
        items = body.items("resp_x")
        return body.chat([{"role": "system", "content": SYSTEM}, *chat_messages(items)], body.offered(items))

    def usage(self, answer: Any) -> tuple[int, int]:
        usage = answer["usage"]
        return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]

    def go_on(self, answer: Any, turn: int) -> None:
        assert answer["output"], answer
        self.items += answer["output"]
        is_one = len(answer["output"]) == 1
        for item in answer["output"]:
            about = {"call_id": item["call_id"], "type": f"{item['type']}_output"}
            if item["type"] == "tool_search_call":
                found = [
                    {
                        "type": "function",
                        "name": each["name"],
                        "description": each["description"],
                        "parameters": each["input_schema"],
                    }
                    for each in (self.found(turn) if is_one else ())
                ]
                about |= {"type": "tool_search_output", "execution": "client", "status": "completed"}
                self.items.append(
                    {**about, "tools": [{"type": "namespace", "name": "mcp__late", "description": "", "tools": found}]}
                )
            else:
                text = self.result(turn) if is_one and item["type"] == "function_call" else "done"
                output = [{"type": "input_text", "text": text}] if turn % 2 else text
                self.items.append({**about, "output": output})
        if turn == 7:
            self.items += [
                {
                    "type": "local_shell_call",
                    "call_id": "l1",
                    "status": "completed",
                    "action": {"type": "exec", "command": ["ls"], "env": {}},
                },
                {"type": "function_call_output", "call_id": "l1", "output": "engine router"},
                {
                    "type": "web_search_call",
                    "id": "ws_1",
                    "status": "completed",
                    "action": {"type": "search", "query": "pages"},
                },
            ]

    def interrupted(self) -> None:
        told = {"type": "input_text", "text": "<turn_aborted>The user interrupted the turn.</turn_aborted>"}
        self.items.append({"type": "message", "role": "user", "content": [told]})

    def compact(self) -> None:
        told = {"type": "input_text", "text": SUMMARY}
        self.items = [
            {"type": "message", "role": "user", "content": [told]},
            {"type": "compaction", "encrypted_content": "x"},
        ]


def run(folder: Path) -> dict[str, list[float | None]]:
    """Play both sessions; returns the shares of each, of which the later ones are found by another replica."""
    model = write_chat_llama(folder / "model", **SHAPE)
    with served(model, folder / "kv") as (process, http):
        name = http.get("/v1/models").raise_for_status().json()["data"][0]["id"]
        agents = [ClaudeCode(name), Codex(name)]
        for agent in agents:
            await_until("two replicas", lambda: http.get("/ready").json()["replicas"] == 2)
            before = cpu_seconds(process)
            for turn in range(NUM_TURNS):
                if turn == KILLED:
                    agent.await_saved(http)
                    kill_busiest(process, before)
                agent.turn(http)
    return {agent.name: agent.shares for agent in agents}


def least_share(shares: list[float | None]) -> float:
    return min(share for share in shares if share is not None)


def test_nearly_all_of_every_prompt_is_found(tmp_path: Path) -> None:
    """Every answer is a 200, and all but what is new is found, wherever it runs."""
    found = run(tmp_path)
    assert found.keys() == {"claude-code", "codex"}
    for name, shares in found.items():
        assert len(shares) == NUM_TURNS
        assert shares.count(None) == 2  # the first, and where the history was compacted
        assert least_share(shares) >= TARGET, (name, shares)
