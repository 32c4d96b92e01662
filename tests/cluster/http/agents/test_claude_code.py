"""What agents on Anthropic's API send beside plain turns: notes of the system, found tools, blocks of servers."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest

from tests.cluster.api_fixtures import CHAT, MODEL, post
from tests.cluster.fake_engine_client import FakeEngineClient
from tests.cluster.http.agents.test_tools import TEMPLATE, THINKS
from tests.replicas.tiny_tokenizer import tiny_tokenizer

BODY: dict[str, Any] = {**CHAT, "max_tokens": 100}
# As templates do that take turns by turns: users and assistants alternate, the system speaks first or never.
STRICT = (
    "{% if tools %}{{ '<tool_call>' + tools | tojson }}{% endif %}"
    "{% for m in messages %}{% if m['role'] == 'system' and not loop.first %}{{ raise_exception('first') }}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] }}"
    "{% for c in m['tool_calls'] or [] %}{{ c['function']['name'] }}{% endfor %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
ONE = {"type": "tool_use", "id": "c1", "name": "find", "input": {"query": "tests"}}
RESULT = {"type": "tool_result", "tool_use_id": "c1", "content": "none"}
FIND = {"name": "find", "input_schema": {"type": "object", "properties": {"query": {"type": "string"}}}}
READ = {"name": "read", "description": "Reads.", "input_schema": {"type": "object"}, "defer_loading": True}
SESSION: list[dict[str, Any]] = [
    {"role": "user", "content": "the fox"},
    {"role": "system", "content": "Agents: reader."},
    {"role": "assistant", "content": [{"type": "text", "text": "I look."}, ONE]},
    {"role": "user", "content": [RESULT]},
    {"role": "system", "content": [{"type": "text", "text": "Be quick."}]},
    {"role": "assistant", "content": "Done."},
    {"role": "system", "content": "One left."},
    {"role": "user", "content": [{"type": "text", "text": "Go on."}]},
    {"role": "system", "content": "The last."},
]


def asked(template: str = TEMPLATE, path: str = "/v1/messages", **changes: Any) -> tuple[Any, str]:
    """The answer, and the prompt that the engine was given."""
    engine = FakeEngineClient(tiny_tokenizer(template))
    answer = post(path, {**BODY, **changes}, engine=engine)
    assert answer.status_code == 200, answer.text
    return answer, (engine.requests[0].prompt_text or "") if engine.requests else ""


def test_a_note_of_the_system_stands_where_it_was_said() -> None:
    text = asked(messages=SESSION)[1]
    assert text.startswith("<|im_start|>user\nthe fox<|im_end|>\n<|im_start|>system\nAgents: reader.<|im_end|>\n")
    assert "<|im_start|>tool\nnone<|im_end|>\n<|im_start|>system\nBe quick.<|im_end|>\n" in text
    assert text.endswith("<|im_start|>system\nThe last.<|im_end|>\n<|im_start|>assistant\n")


def test_a_template_without_a_place_for_it_has_it_within_the_turns_beside_it() -> None:
    text = asked(STRICT, messages=SESSION)[1]
    assert text.startswith("<|im_start|>user\nthe fox\nAgents: reader.<|im_end|>\n")
    assert "<|im_start|>tool\nnone\nBe quick.<|im_end|>\n<|im_start|>assistant\nDone.<|im_end|>\n" in text
    assert text.endswith("<|im_start|>user\nOne left.\nGo on.\nThe last.<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize("template", [TEMPLATE, STRICT])
def test_what_is_said_later_leaves_the_beginning_as_it_was(template: str) -> None:
    """A turn's prompt begins as the one before it, up to where its answer was: so its KV is found."""
    texts = [asked(template, messages=SESSION[:end])[1] for end in (2, 5, 9)]  # behind them the assistant speaks
    assert all(after.startswith(before) for before, after in itertools.pairwise(texts))


def test_notes_at_the_head_belong_to_the_system_prompt() -> None:
    notes = [{"role": "system", "content": "be kind"}, *SESSION[:1]]
    line = "x-anthropic-billing-header: cch=1;"
    for system in ("be brief", [{"type": "text", "text": line}, {"type": "text", "text": "be brief"}]):
        text = asked(system=system, messages=notes)[1]
        assert text.startswith("<|im_start|>system\nbe brief\nbe kind<|im_end|>\n<|im_start|>user\n")
    assert asked(messages=notes)[1].startswith("<|im_start|>system\nbe kind<|im_end|>\n")


def test_a_note_between_a_call_and_its_result_comes_behind_the_result() -> None:
    said = [SESSION[0], SESSION[2], SESSION[4], SESSION[3]]
    assert "<|im_start|>tool\nnone<|im_end|>\n<|im_start|>system\nBe quick.<|im_end|>" in asked(messages=said)[1]
    assert "<|im_start|>tool\nnone\nBe quick.<|im_end|>" in asked(STRICT, messages=said)[1]


@pytest.mark.parametrize("template", [TEMPLATE, STRICT])
def test_a_mark_on_a_note_keeps_the_prompt_up_to_it(template: str) -> None:
    text = {"type": "text", "text": "Be quick.", "cache_control": {"type": "ephemeral"}}
    marked = {"role": "system", "content": [text]}
    engine = FakeEngineClient(tiny_tokenizer(template))
    post("/v1/messages", {**BODY, "messages": [*SESSION[:4], marked, *SESSION[5:]]}, engine=engine)
    ((num_tokens, _),) = engine.requests[0].pinned
    kept = engine.tokenizer.decode(engine.requests[0].prompt_token_ids[:num_tokens])
    assert "Be quick." in kept
    assert "Done." not in kept


def test_a_tool_is_defined_where_it_was_found() -> None:
    found = {**RESULT, "content": [{"type": "text", "text": "one:"}, {"type": "tool_reference", "tool_name": "read"}]}
    said = [*SESSION[:1], SESSION[2], {"role": "user", "content": [found]}]
    before, after = (asked(messages=messages, tools=[FIND, READ])[1] for messages in (SESSION[:1], said))
    assert after.startswith(before)  # the list at the head has not grown
    assert '<|im_start|>tool\none:\n{"type": "function", "function": {"name": "read", "description": "Reads."' in after
    failed = asked(messages=[*said[:2], {"role": "user", "content": [{**found, "is_error": True}]}])[1]
    assert "<|im_start|>tool\nError: one:\nread<|im_end|>" in failed


def test_tools_that_their_server_would_search_are_there_from_the_start() -> None:
    search = {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}
    answer, text = asked(tools=[search, FIND, READ])
    assert '"name": "read"' in text.partition("</tools>")[0]
    assert answer.headers["x-mneme-ignored-fields"] == "tools.tool_search_tool_regex_20251119"


@pytest.mark.parametrize(
    ("kind", "name", "takes"),
    [
        ("bash_20250124", "bash", ["command", "restart"]),
        ("text_editor_20250728", "str_replace_based_edit_tool", ["old_str", "view_range"]),
        ("memory_20250818", "memory", ["old_path", "insert_line"]),
    ],
)
def test_tools_that_clients_run_are_offered_by_what_they_take(kind: str, name: str, takes: list[str]) -> None:
    engine = FakeEngineClient(tiny_tokenizer(TEMPLATE))
    body = {**BODY, "tools": [{"type": kind, "name": name}], "tool_choice": {"type": "any"}}
    answer = post("/v1/messages", body, engine=engine)
    assert "x-mneme-ignored-fields" not in answer.headers
    grammar = engine.requests[0].sampling.grammar
    assert grammar is not None
    assert all(f'"{each}"' in grammar.text for each in [name.replace('"', ""), *takes] if each != name)


def test_what_their_servers_ran_is_left_out_and_named() -> None:
    tools = [FIND, {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}]
    results = [{"type": "web_search_result", "url": "https://example.org", "encrypted_content": "x"}]
    ran = [
        {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "fox"}},
        {"type": "web_search_tool_result", "tool_use_id": "s1", "content": results},
        {"type": "compaction", "content": "They spoke of a fox."},
        {"type": "text", "text": "Done."},
    ]
    found = {"type": "search_result", "title": "A", "source": "b", "content": [{"type": "text", "text": "c"}]}
    said = [*SESSION[:1], {"role": "assistant", "content": ran}, {"role": "user", "content": [found]}]
    answer, text = asked(messages=said, tools=tools)
    assert "assistant\nThey spoke of a fox.\nDone.<|im_end|>\n<|im_start|>user\nA\nb\nc<|im_end|>" in text
    assert answer.headers["x-mneme-ignored-fields"] == (
        "messages.content.server_tool_use, messages.content.web_search_tool_result, tools.web_search_20250305"
    )


@pytest.mark.parametrize("kind", ["adaptive", "between_tools", "disabled"])
def test_a_model_that_does_not_think_says_so(kind: str) -> None:
    given = {"thinking": {"type": kind}}
    ignored = asked(**given)[0].headers.get("x-mneme-ignored-fields", "")
    assert ("thinking" in ignored.split(", ")) == (kind != "disabled")
    assert "thinking" not in asked(THINKS, **given)[0].headers.get("x-mneme-ignored-fields", "").split(", ")


def test_an_answer_may_be_as_long_as_the_window_leaves() -> None:
    engine = FakeEngineClient(tiny_tokenizer(TEMPLATE), is_endless=True)
    answer = post("/v1/messages", {**BODY, "max_tokens": 64_000}, engine=engine)
    left = MODEL.max_context - len(engine.requests[0].prompt_token_ids)
    assert answer.headers["x-mneme-max-tokens"] == str(left)
    assert answer.json()["usage"]["output_tokens"] == left
    assert "x-mneme-max-tokens" not in asked(max_tokens=left)[0].headers


def test_what_is_longer_than_the_window_is_told_in_words_that_agents_know() -> None:
    """They compact when they read them; no limit is told with a refusal."""
    answer = post("/v1/messages", {**BODY, "messages": [{"role": "user", "content": "the fox " * MODEL.max_context}]})
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert re.search(rf"prompt is too long: \d+ tokens > {MODEL.max_context} maximum", message)
    assert "x-mneme-max-tokens" not in answer.headers


@pytest.mark.parametrize("field", ["output_format", "output_config"])
def test_an_answer_matches_its_schema_in_either_spelling(field: str) -> None:
    schema = {"type": "json_schema", "schema": {"const": "yes"}}
    given = {"output_format": schema} if field == "output_format" else {"output_config": {"format": schema}}
    engine = FakeEngineClient(tiny_tokenizer(TEMPLATE))
    assert post("/v1/messages", {**BODY, **given}, engine=engine).status_code == 200
    grammar = engine.requests[0].sampling.grammar
    assert grammar is not None
    assert "yes" in grammar.text


def test_names_of_tools_may_be_as_long_as_servers_of_mcp_make_them() -> None:
    name = "mcp__claude_ai_Atlassian_Rovo__getConfluencePageInlineCommentReplies"
    tool = {"name": name, "input_schema": {"type": "object", "properties": {}}}
    assert asked(tools=[tool])[0].status_code == 200
    assert post("/v1/messages", {**BODY, "tools": [{**tool, "name": "a" * 129}]}).status_code == 400
