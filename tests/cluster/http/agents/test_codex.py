"""What agents on OpenAI's Responses API send and read: tools of namespaces, custom and found ones, what they replay."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from starlette.testclient import TestClient

from mneme.cluster.http.api import build_api
from mneme.cluster.http.api_state import Backend
from tests.cluster.api_fixtures import MODEL
from tests.cluster.fake_engine_client import FakeEngineClient
from tests.cluster.http.agents.test_tools import TEMPLATE, THINKS
from tests.replicas.tiny_tokenizer import tiny_tokenizer

PATH = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
READ = {"type": "function", "name": "read", "description": "Reads.", "parameters": PATH, "strict": False}
FILES = {"type": "namespace", "name": "mcp__files", "description": "Files.", "tools": [READ]}
PATCH_GRAMMAR = 'start: "*** Begin" LF line+ "*** End"\nline: "+" /.*/ LF\n%import common.LF\n'
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Patches.",
    "format": {"type": "grammar", "syntax": "lark", "definition": PATCH_GRAMMAR},
}
SEARCH = {"type": "tool_search", "execution": "client", "parameters": {"type": "object", "properties": {}}}
HOSTED = [{"type": "web_search", "external_web_access": False}, {"type": "image_generation", "output_format": "png"}]
BODY: dict[str, Any] = {
    "model": "tiny",
    "input": "the fox",
    "store": False,
    "tools": [READ, FILES, PATCH, SEARCH, *HOSTED],
    "include": ["reasoning.encrypted_content"],
}
INPUT = '*** Begin\n+say "é" \\ 🙂\n*** End'
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def client_of(
    says: str, template: str = TEMPLATE, max_context: int = 16_384, **engine: Any
) -> tuple[TestClient, FakeEngineClient]:
    """An API whose window holds what agents send, and its engine."""
    fake = FakeEngineClient(tiny_tokenizer(template), says, max_context=max_context, **engine)
    return TestClient(build_api([Backend(fake, replace(MODEL, max_context=max_context), fake.tokenizer)])), fake


def call(name: str, arguments: Any) -> str:
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"


SAYS = "\n".join(
    call(name, arguments)
    for name, arguments in (
        *(("mcp__files__read", {"path": "a"}), ("apply_patch", {"input": INPUT})),
        *(("tool_search", {"query": "x"}), ("read", {"path": "b"})),
    )
)


def asked(says: str = SAYS, template: str = TEMPLATE, **changes: Any) -> tuple[Any, Any]:
    """The answer, and what the engine was asked."""
    client, engine = client_of(says, template)
    answer = client.post("/v1/responses", json={**BODY, **changes})
    assert answer.status_code == 200, answer.text
    return answer, engine.requests[0]


def events(*args: Any, **changes: Any) -> list[dict[str, Any]]:
    blocks = asked(*args, stream=True, **changes)[0].text.strip().split("\n\n")
    return [json.loads(block.partition("data: ")[2]) for block in blocks]


def test_calls_come_back_as_what_the_tools_are() -> None:
    answer, _ = asked()
    output = answer.json()["output"]
    assert [item["id"].partition("_")[0] for item in output] == ["fc", "ctc", "tsc", "fc"]
    assert all(item.pop("id") and item.pop("call_id").startswith("call_") for item in output)
    assert {item.pop("status") for item in output} == {"completed"}
    assert output == [
        {"type": "function_call", "name": "read", "namespace": "mcp__files", "arguments": '{"path": "a"}'},
        {"type": "custom_tool_call", "name": "apply_patch", "input": INPUT},
        {"type": "tool_search_call", "execution": "client", "arguments": {"query": "x"}},
        {"type": "function_call", "name": "read", "arguments": '{"path": "b"}'},
    ]
    assert answer.headers["x-mneme-ignored-fields"] == "tools.web_search, tools.image_generation"
    Response.model_validate(answer.json(), strict=False)


def test_a_stream_says_the_same_in_events_of_the_sdk() -> None:
    told = events()
    for event in told:
        EVENTS.validate_python(event)
    deltas = [event for event in told if event["type"] == "response.custom_tool_call_input.delta"]
    assert len(deltas) > 3
    assert "".join(event["delta"] for event in deltas) == INPUT
    (done,) = [event for event in told if event["type"] == "response.custom_tool_call_input.done"]
    assert (done["input"], done["item_id"]) == (INPUT, deltas[0]["item_id"])
    items = [event["item"] for event in told if event["type"] == "response.output_item.done"]
    assert items == told[-1]["response"]["output"]
    whole = asked()[0].json()["output"]
    for item in [*items, *whole]:
        del item["id"], item["call_id"]
    assert items == whole


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ('{"input": "a\\ud83d"}', "a\ufffd"),
        ('{"patch": "a"}', '{"patch": "a"}'),
        ('{"why": 1, "input": "a\\n", "more": "b"}', "a\n"),
    ],
)
def test_a_custom_tool_gets_the_text_however_the_model_wrote_it(arguments: str, told: str) -> None:
    says = f'<tool_call>\n{{"name": "apply_patch", "arguments": {arguments}}}\n</tool_call>'
    (item,) = asked(says)[0].json()["output"]
    assert item["input"] == told
    deltas = [event["delta"] for event in events(says) if event["type"] == "response.custom_tool_call_input.delta"]
    assert "".join(deltas) == told


@pytest.mark.parametrize("named", [{"name": "read", "namespace": "mcp__files"}, {"name": "mcp__files__read"}])
def test_a_tool_can_be_forced_by_its_name(named: dict[str, str]) -> None:
    grammar = asked(tool_choice={"type": "function", **named})[1].sampling.grammar
    assert grammar is not None
    assert '\\"name\\": \\"mcp__files__read\\"' in grammar.text


def test_a_grammar_is_told_and_held_to() -> None:
    request = asked(tool_choice={"type": "custom", "name": "apply_patch"})[1]
    assert "Its input matches this lark grammar:" in request.prompt_text
    (line,) = [line for line in request.sampling.grammar.text.split("\n") if line.startswith("args_0")]
    pattern = json.loads(line.partition("%json ")[2])["properties"]["input"]["pattern"]
    assert pattern == r"^(?:\*\*\* Begin\n(?:\+(?:.*)\n)+\*\*\* End)$"
    around = {**PATCH, "format": {"type": "grammar", "syntax": "lark", "definition": 'start: a\na: "(" a ")" | "x"'}}
    answer, free = asked(tools=[around], tool_choice="required")
    assert "pattern" not in free.sampling.grammar.text  # no regular expression says it: it is only told
    assert "tools.format.definition" in answer.headers["x-mneme-ignored-fields"]
    assert "tools.format.definition" not in asked(tools=[PATCH])[0].headers.get("x-mneme-ignored-fields", "")
    regex = {**PATCH, "format": {"type": "grammar", "syntax": "regex", "definition": "[ab]+"}}
    assert "^(?:[ab]+)$" in asked(tools=[regex], tool_choice="required")[1].sampling.grammar.text


REPLAYED: list[dict[str, Any]] = [
    {"role": "user", "content": "the fox"},
    {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "mneme:SG0u"},
    {"type": "function_call", "call_id": "c1", "name": "read", "namespace": "mcp__files", "arguments": '{"path": "a"}'},
    {"type": "custom_tool_call", "call_id": "c2", "name": "apply_patch", "input": INPUT, "status": "completed"},
    {
        "type": "function_call_output",
        "call_id": "c1",
        "output": [{"type": "input_text", "text": t} for t in ("1", "2")],
    },
    {"type": "custom_tool_call_output", "call_id": "c2", "output": "patched"},
    {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "fox"}},
    {"type": "local_shell_call", "id": "l", "call_id": "c3", "action": {"type": "exec", "command": ["ls"], "env": {}}},
    {"type": "local_shell_call_output", "id": "c3", "output": "listed"},
    {"type": "shell_call", "call_id": "c4", "action": {"commands": ["pwd"]}},
    {"type": "shell_call_output", "call_id": "c4", "output": [{"stdout": "out", "stderr": "err"}]},
    {"type": "apply_patch_call", "call_id": "c5", "operation": {"type": "delete_file", "path": "p"}},
    {"type": "apply_patch_call_output", "call_id": "c5", "status": "completed"},
    {"type": "mcp_call", "id": "mcp_1", "server_label": "s", "name": "look", "arguments": "{}", "output": "seen"},
    {"type": "compaction", "encrypted_content": "x"},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "So."}], "phase": "final"},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "go on"}]},
]
SHOWS = THINKS.replace("message['content'] }}", "(message['reasoning_content'] or '') + message['content'] }}")


def test_all_that_an_agent_replays_is_read() -> None:
    answer, request = asked("Hm.", SHOWS, input=REPLAYED)
    text = request.prompt_text.partition("user\nthe fox")[2]
    assert "assistant\nHm." in text
    assert '{"name": "mcp__files__read", "arguments": {"path": "a"}}' in text
    written = json.dumps(INPUT, ensure_ascii=False)
    assert f'{{"name": "apply_patch", "arguments": {{"input": {written}}}}}' in text
    results = [part.partition("<|im_end|>")[0] for part in text.split("<|im_start|>tool\n")[1:]]
    assert results == ["12", "patched", "listed", "outerr", "", "seen"]
    for called in ("local_shell", "shell", "look"):
        assert f'{{"name": "{called}", "arguments": {{' in text
    assert text.endswith("assistant\nSo.<|im_end|>\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n")
    named = answer.headers["x-mneme-ignored-fields"].split(", ")
    assert {"input.web_search_call", "input.compaction"} <= set(named)
    assert "input.action" not in named


def test_tools_that_a_search_found_are_defined_there_and_called_from_there_on() -> None:
    late = {**READ, "name": "late", "defer_loading": True}
    space = {**FILES, "name": "mcp__late", "tools": [{**READ, "name": "list"}]}
    search = {"call_id": "s1", "execution": "client", "status": "completed"}
    found = [
        {"role": "user", "content": "go"},
        {"type": "tool_search_call", **search, "arguments": {"query": "x"}},
        {"type": "tool_search_output", **search, "tools": [late, space]},
    ]
    says = call("mcp__late__list", {"path": "a"}) + "\n" + call("late", {"path": "b"})
    body = {"tools": [SEARCH, {**READ, "defer_loading": True}]}
    answer, request = asked(says, input=found, **body)
    calls = [(item.get("namespace"), item["name"]) for item in answer.json()["output"]]
    assert calls == [("mcp__late", "list"), (None, "late")]
    head, _, rest = request.prompt_text.partition("</tools>")
    assert "late" not in head
    assert '"read"' not in head
    assert '"name": "mcp__late__list"' in rest
    before = asked("Hm.", input=found[:1], **body)[1].prompt_text
    assert request.prompt_text.startswith(before)
    given = [{"type": "additional_tools", "role": "developer", "tools": [late]}, found[0]]
    answer, request = asked(call("late", {"path": "b"}), input=given, **body)
    assert answer.json()["output"][0]["name"] == "late"
    assert 'system\n{"type": "function", "function": {"name": "late"' in request.prompt_text


def test_deferred_tools_are_there_where_no_client_searches() -> None:
    hosted = {"type": "tool_search"}
    answer, request = asked("Hm.", tools=[hosted, {**READ, "defer_loading": True}])
    assert '"read"' in request.prompt_text
    assert answer.headers["x-mneme-ignored-fields"] == "tools.tool_search"


def test_reasoning_goes_back_and_forth_without_being_stored() -> None:
    first = asked("<think>Hm.</think>So.", THINKS)[0].json()["output"]
    assert first[0]["encrypted_content"]
    summary = [{"type": "summary_text", "text": "Short."}]
    foreign = {"type": "reasoning", "id": "r", "summary": summary, "encrypted_content": "gAAA"}
    for thought, shown in (({**first[0], "content": None}, "Hm."), (foreign, "Short.")):
        text = asked("Hm.", SHOWS, input=[REPLAYED[0], thought, first[1], REPLAYED[-1]])[1].prompt_text
        assert f"assistant\n{shown}So.<|im_end|>" in text
    assert "encrypted_content" not in asked("<think>Hm.</think>So.", THINKS, include=[])[0].json()["output"][0]


def test_an_item_of_a_stored_response_is_named_by_its_id() -> None:
    client, _ = client_of(call("read", {"path": "b"}))
    body = {**BODY, "store": True}
    first = client.post("/v1/responses", json=body).json()
    (called,) = first["output"]
    (given,) = client.get(f"/v1/responses/{first['id']}/input_items").json()["data"]
    result = {"type": "function_call_output", "call_id": called["call_id"], "output": "text"}
    told = [{"type": "item_reference", "id": given["id"]}, {"id": called["id"]}, result]
    again = client.post("/v1/responses", json={**body, "input": told}).json()
    plain = client.post("/v1/responses", json={**body, "input": [REPLAYED[0], called, result]}).json()
    assert again["usage"]["input_tokens"] == plain["usage"]["input_tokens"]
    on = {**body, "input": [*told[1:]], "previous_response_id": first["id"]}
    assert client.post("/v1/responses", json=on).json()["usage"]["input_tokens"] > plain["usage"]["input_tokens"] - 8
    kinds = [item["type"] for item in client.get(f"/v1/responses/{again['id']}/input_items").json()["data"]]
    assert kinds == ["function_call_output", "function_call", "message"]


def test_long_names_of_namespaces_are_cut_and_come_back_whole() -> None:
    space = {**FILES, "name": "mcp__" + "x" * 70}
    forced = asked("Hm.", tools=[space], tool_choice="required")[1]
    flat = forced.sampling.grammar.text.partition('\\"name\\": \\"')[2].partition("\\")[0]
    assert len(flat) == 64
    (item,) = asked(call(flat, {"path": "a"}), tools=[space])[0].json()["output"]
    assert (item["namespace"], item["name"]) == (space["name"], "read")


def test_an_answer_without_a_limit_leaves_room_for_the_next_turn() -> None:
    client, _ = client_of("So it goes. ", max_context=1024, is_endless=True)
    body = {"model": "tiny", "input": "the fox"}
    before, sizes = None, []
    for _ in range(3):
        response = client.post("/v1/responses", json={**body, "previous_response_id": before}).json()
        before, usage = response["id"], response["usage"]
        sizes.append(usage["total_tokens"])
        assert response["incomplete_details"] == {"reason": "max_output_tokens"}
        assert usage["output_tokens"] == (1024 - usage["input_tokens"]) // 2
    assert sizes == sorted(sizes)
    refused = client.post("/v1/responses", json={"model": "tiny", "input": "fox " * 20_000}).json()["error"]
    assert refused["code"] == "context_length_exceeded"
    assert 'truncation: "auto"' in refused["message"]  # how it may be shortened
