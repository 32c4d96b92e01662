"""Tools in chat completions: what the template is given, what an answer's calls become, and what forces them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

import mneme.replicas.mneme_tiny as tiny
from mneme.errors import InvalidRequest
from tests.cluster.api_fixtures import CHAT, api, chat, post
from tests.cluster.fake_engine_client import FakeEngineClient
from tests.replicas.tiny_tokenizer import CHATML, tiny_tokenizer

TEMPLATE = (Path(next(iter(tiny.__path__))) / "chat_template.jinja").read_text()
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
OTHER = {"type": "function", "function": {"name": "now"}}
CALLS = (
    'One moment.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
THINKS = "{% set t = '<think>' %}" + TEMPLATE
OPENS = TEMPLATE.replace("assistant\\n' }}{% endif %}", "assistant\\n<think>\\n' }}{% endif %}")


def asked(sentence: str = CALLS, template: str = TEMPLATE, **changes: Any) -> tuple[Any, Any]:
    """The answer, and what the engine was asked."""
    engine = FakeEngineClient(tiny_tokenizer(template), sentence)
    response = post("/v1/chat/completions", {**CHAT, "tools": [TOOL, OTHER], **changes}, engine=engine)
    assert response.status_code == 200, response.text
    return response, engine.requests[0]


def whole(*args: Any, **changes: Any) -> dict[str, Any]:
    (choice,) = asked(*args, **changes)[0].json()["choices"]
    return choice


def streamed(*args: Any, **changes: Any) -> list[dict[str, Any]]:
    lines = asked(*args, stream=True, **changes)[0].text.strip().split("\n\n")
    return [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines[:-1]]


def test_calls_of_a_whole_answer() -> None:
    choice = whole()
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert message["content"] == "One moment."
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "weather", "arguments": '{"city": "Köln"}'},
        {"name": "now", "arguments": "{}"},
    ]
    assert all(call["type"] == "function" and call["id"].startswith("call_") for call in message["tool_calls"])
    assert whole(CALLS.partition("\n")[2])["message"]["content"] is None


def test_a_stream_brings_id_and_name_first_and_arguments_as_they_come() -> None:
    choices = streamed()
    assert choices[-1]["finish_reason"] == "tool_calls"
    assert "".join(each["delta"].get("content", "") for each in choices) == "One moment."
    indices = [[piece["index"] for piece in each["delta"].get("tool_calls", [])] for each in choices]
    assert all(len(set(each)) == len(each) for each in indices)
    pieces = [piece for each in choices for piece in each["delta"].get("tool_calls", [])]
    for index, (name, arguments) in enumerate([("weather", '{"city": "Köln"}'), ("now", "{}")]):
        first, *others = [piece for piece in pieces if piece["index"] == index]
        assert first["function"]["name"] == name
        assert first["type"] == "function"
        assert all("id" not in piece and "name" not in piece["function"] for piece in others)
        assert "".join(piece["function"]["arguments"] for piece in [first, *others]) == arguments


def test_the_template_gets_tools_calls_and_results() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Köln"}'}}
    history = [
        *CHAT["messages"],
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "rain"}]},
    ]
    text = asked(messages=history)[1].prompt_text
    assert json.dumps(TOOL) in text
    assert (
        '<|im_start|>assistant\n<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>' in text
    )
    assert "<|im_start|>tool\nrain<|im_end|>" in text
    for written in ('{"city', '{"city": "\\ud800"}'):  # the model's own words, maybe
        own = {**call, "function": {"name": "weather", "arguments": written}}
        text = asked(messages=[*history[:1], {**history[1], "tool_calls": [own]}])[1].prompt_text
        assert f'"arguments": {json.dumps(written)}' in text
    assert asked(tool_choice="none")[1].prompt_token_ids == asked()[1].prompt_token_ids


@pytest.mark.parametrize("how", [{"tool_choice": "none"}, {"tools": [OTHER]}, {"tools": []}])
def test_what_was_not_offered_is_content(how: dict[str, Any]) -> None:
    sentence = CALLS.partition("\n<tool_call>\n{" + '"name": "now"')[0]
    assert whole(sentence, **how)["message"] == {"role": "assistant", "content": sentence, "refusal": None}


@pytest.mark.parametrize(
    ("choice", "parallel", "names", "is_one"),
    [
        ("required", None, ["weather", "now"], False),
        ("required", False, ["weather", "now"], True),
        ({"type": "function", "function": {"name": "now"}}, True, ["now"], True),
    ],
)
def test_a_forced_call_has_a_grammar(choice: Any, parallel: Any, names: list[str], is_one: bool) -> None:
    grammar = asked(tool_choice=choice, parallel_tool_calls=parallel)[1].sampling.grammar
    assert grammar.after is None
    assert [name for name in ("weather", "now") if f'"{name}\\"' in grammar.text.replace('\\"name\\": \\', "")] == names
    assert ("call (" not in grammar.text) == is_one


def test_a_format_holds_for_what_is_no_call() -> None:
    grammar = asked(response_format={"type": "json_schema", "json_schema": {"schema": {"type": "null"}}})[
        1
    ].sampling.grammar
    assert "start: calls | answer" in grammar.text


def _refused(**body: Any) -> str:
    """The field that is refused."""
    engine = FakeEngineClient(tiny_tokenizer(TEMPLATE))
    response = post("/v1/chat/completions", {**CHAT, "tool_choice": "required", **body}, engine=engine)
    assert response.status_code == 400, response.text
    param: str = response.json()["error"]["param"]
    return param


@pytest.mark.parametrize(("num_steps", "named"), [(5, ""), (50, " (in the arguments of weather)")])
def test_a_grammar_that_ends_a_call_is_named_by_its_tool(num_steps: int, named: str) -> None:
    failure = InvalidRequest("tools", None, "it lets nothing follow")
    engine = FakeEngineClient(tiny_tokenizer(TEMPLATE), CALLS.partition("\n")[2], fail_after=num_steps, failure=failure)
    refused = post("/v1/chat/completions", {**CHAT, "tools": [OTHER, TOOL], "tool_choice": "required"}, engine=engine)
    assert refused.status_code == 400
    assert refused.json()["error"]["message"] == f"tools: it lets nothing follow{named}"


def test_no_answer_would_heed_a_schema_of_no_object() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}
    for choice in ("auto", "none"):
        assert _refused(tools=[tool], tool_choice=choice) == "tools[0].function.parameters"


def test_thoughts_and_references_are_parts_of_a_message() -> None:
    late = {"type": "function", "function": {**TOOL["function"], "name": "late", "defer_loading": True}}
    thought = [{"type": "thinking", "thinking": "Hm."}, {"type": "text", "text": "I look."}]
    found = [{"type": "tool_reference", "name": "late"}, "or", {"type": "tool_reference", "name": "x"}]
    said = [{"role": "assistant", "content": thought}, {"role": "user", "content": found}]
    shows = TEMPLATE.replace("message['content'] }}", "(message['reasoning_content'] or '') + message['content'] }}")
    sentence = CALLS.replace("now", "late")
    answer, request = asked(sentence, shows, messages=[*CHAT["messages"], *said], tools=[TOOL, late])
    defined = json.dumps({"type": "function", "function": {**TOOL["function"], "name": "late"}}, ensure_ascii=False)
    assert "assistant\nHm.I look.<|im_end|>" in request.prompt_text
    assert f"user\n{defined}\nor\nx<|im_end|>" in request.prompt_text
    assert request.prompt_text.count('"late"') == 1  # not in the list at the head
    calls = answer.json()["choices"][0]["message"]["tool_calls"]
    assert [call["function"]["name"] for call in calls] == ["weather", "late"]


def test_a_tool_that_was_not_found_yet_is_not_offered() -> None:
    late = {"type": "function", "function": {**OTHER["function"], "defer_loading": True}}
    assert [call["function"]["name"] for call in whole(tools=[TOOL, late])["message"]["tool_calls"]] == ["weather"]
    assert _refused(tools=[late]) == "tool_choice"
    named = {"type": "function", "function": {"name": "now"}}
    assert asked(tools=[TOOL, late], tool_choice=named)[1].sampling.grammar is not None


@pytest.mark.parametrize(("stop", "reason"), [('"K', "stop"), ("}\n", "tool_calls"), ("now", "tool_calls")])
@pytest.mark.parametrize("choice", ["required", "auto"])
def test_a_call_that_a_stop_string_cut_is_told_as_cut(stop: str, reason: str, choice: str) -> None:
    sentence = CALLS.partition("\n")[2]
    told = whole(sentence, tool_choice=choice, stop=[stop])
    arguments = told["message"]["tool_calls"][0]["function"]["arguments"]
    assert arguments == '{"city": "Köln"}'.partition(stop)[0]
    assert told["finish_reason"] == reason
    assert streamed(sentence, tool_choice=choice, stop=[stop])[-1]["finish_reason"] == reason


def test_a_schema_that_no_grammar_takes_is_only_told() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}
    assert asked(tools=[tool])[1].sampling.grammar is None
    strict = {"type": "function", "function": {**tool["function"], "strict": True}}
    assert _refused(tools=[strict]) == "tools[0].function.parameters"


def test_a_template_without_tools_takes_forced_calls_only() -> None:
    refused = chat(tools=[TOOL])
    assert refused.status_code == 400
    assert "tool_call_parser" in refused.json()["error"]["message"]
    message = whole('[{"name": "now", "parameters": {"a": 1}}]', CHATML, tool_choice="required")["message"]
    assert [call["function"] for call in message["tool_calls"]] == [{"name": "now", "arguments": '{"a": 1}'}]


def test_every_choice_has_calls_of_its_own() -> None:
    choices = asked(n=3)[0].json()["choices"]
    assert len({call["id"] for choice in choices for call in choice["message"]["tool_calls"]}) == 6


@pytest.mark.parametrize(("template", "begin"), [(THINKS, "<think>\n"), (OPENS, "")])
def test_reasoning_stands_by_itself(template: str, begin: str) -> None:
    sentence = f"{begin}Hm, 世界.\n</think>\n\nThe fox"
    message = whole(sentence, template, tools=[])["message"]
    assert message == {
        "role": "assistant",
        "content": "The fox",
        "refusal": None,
        "reasoning_content": "Hm, 世界.",
        "reasoning": "Hm, 世界.",
    }
    deltas = [choice["delta"] for choice in streamed(sentence, template, tools=[])]
    for name, said in [("reasoning_content", "Hm, 世界."), ("reasoning", "Hm, 世界."), ("content", "The fox")]:
        assert "".join(delta.get(name, "") for delta in deltas) == said
    assert "reasoning" not in whole(sentence, template, tools=[], include_reasoning=False)["message"]


def test_a_grammar_holds_from_the_beginning_where_no_single_token_ends_the_reasoning() -> None:
    """The template opened it, but what the grammar lets an answer say is no reasoning."""
    assert tiny_tokenizer(OPENS).token_id("</think>") is None
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
    response, request = asked('{"a": 1}', OPENS, tools=[], response_format=schema)
    assert request.sampling.grammar.after is None
    message = response.json()["choices"][0]["message"]
    assert (message["content"], "reasoning" in message) == ('{"a": 1}', False)
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    message = whole(call, OPENS, tool_choice="required")["message"]
    assert [each["function"]["name"] for each in message["tool_calls"]] == ["now"]


def _told(engine: FakeEngineClient, **body: Any) -> tuple[dict[str, Any], list[int]]:
    """The answer of a session, and the session's tokens behind it."""
    response = post("/v1/chat/completions", {**CHAT, **body}, engine=engine, headers={"X-Session-ID": "s"})
    assert response.status_code == 200, response.text
    log = engine.sessions.get(("", "public:s"))
    assert log is not None
    return response.json()["choices"][0]["message"], list(log.ids)


@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("history", ["text", "log"])
def test_a_session_knows_what_it_said_however_it_is_resent(drops: bool, history: str) -> None:
    """A model's own blanks in a call do not cost its KV, and its reasoning does not with `history: "log"`."""
    thought = "<think>\nHm, fox.\n</think>\n\n" if drops else ""
    sentence = thought + '<tool_call>{"name":"weather" ,"arguments":{ "city":"Köln" }}</tool_call>'
    engine = FakeEngineClient(tiny_tokenizer(THINKS), sentence)
    body = {"tools": [TOOL], "session": {"id": "s", "history": history}}
    message, before = _told(engine, **body)
    assert ("reasoning_content" in message) == drops
    for name in ("reasoning_content", "reasoning"):
        message.pop(name, None)
    message["tool_calls"][0]["function"]["arguments"] = '{"city":"K\\u00f6ln"}'  # another way to write the same
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "rain"}
    _, after = _told(engine, **body, messages=[*CHAT["messages"], message, result])
    is_found = after[: len(before)] == before
    assert is_found == (history == "log" or not drops)
    text = engine.tokenizer.decode(after)
    assert text.count("<|im_start|>tool\nrain<|im_end|>\n<|im_start|>assistant\n") == 1
    assert (thought.strip() in text.partition("rain")[0]) == (is_found or not drops)
    said = {"role": "assistant", "content": "The weather is fine."}  # never said
    _, other = _told(engine, **body, messages=[*CHAT["messages"], said, {"role": "user", "content": "and now?"}])
    assert "rain" not in engine.tokenizer.decode(other)


def test_a_session_with_other_tools_is_another_conversation() -> None:
    sentence = '<tool_call>{"name":"weather" ,"arguments":{}}</tool_call>'
    engine = FakeEngineClient(tiny_tokenizer(TEMPLATE), sentence)
    message, _ = _told(engine, tools=[TOOL])
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "rain"}
    _, after = _told(engine, tools=[TOOL, OTHER], messages=[*CHAT["messages"], message, result])
    assert '"now"' in engine.tokenizer.decode(after)


TAGS = "{# <function= #}" + TEMPLATE
TAGGED = "Hm.\n<tool_call>\n<function=weather>\n<parameter=city>\n12\n</parameter>\n</function>\n</tool_call>"


def test_a_session_knows_values_by_their_types() -> None:
    engine = FakeEngineClient(tiny_tokenizer(TAGS), TAGGED)
    body = {"tools": [TOOL], "session": {"id": "s"}}
    message, before = _told(engine, **body)
    assert message["tool_calls"][0]["function"]["arguments"] == '{"city": "12"}'  # though it is written without quotes
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "rain"}
    _, after = _told(engine, **body, messages=[*CHAT["messages"], message, result])  # the template writes it as JSON
    assert after[: len(before)] == before


FUNCTION = {"name": "f", "parameters": "SCHEMA"}
FORMAT = {"type": "json_schema", "name": "n", "schema": "SCHEMA"}
DOORS: list[tuple[str, str, dict[str, Any]]] = [  # path, what the schema is called there, and the body around it
    ("chat/completions", "response_format.json_schema.schema", {"response_format": FORMAT | {"json_schema": FORMAT}}),
    ("chat/completions", "structured_outputs.json", {"structured_outputs": {"json": "SCHEMA"}}),
    ("chat/completions", "guided_json", {"guided_json": "SCHEMA"}),
    ("completions", "guided_json", {"guided_json": "TEXT"}),
    (
        "chat/completions",
        "tools[1].function.parameters",
        {"tools": [OTHER, {"type": "function", "function": FUNCTION}]},
    ),
    ("messages", "output_config.format.schema", {"output_config": {"format": FORMAT}}),
    ("messages", "tools[0].input_schema", {"tools": [{"name": "f", "input_schema": "SCHEMA"}]}),
    ("responses", "text.format.schema", {"text": {"format": FORMAT}}),
    ("responses", "tools[0].parameters", {"tools": [{"type": "function"} | FUNCTION]}),
]


@pytest.fixture(scope="module")
def each_door() -> TestClient:
    return api(FakeEngineClient(tiny_tokenizer(TEMPLATE)))


@pytest.mark.parametrize(
    ("value", "is_taken"),
    [
        ('{"propertyNames": {"type": "string"}, "additionalProperties": {"uniqueItems": false}}', True),
        ('{"const": 9007199254740994}', True),
        ('{"type": "integer", "maximum": 9223372036854775807}', True),
        ('{"const": 1234567890123456789}', False),
        ('{"const": 0.12345678901234567890}', False),
        ('{"patternProperties": {"(?!a)": {}}}', False),
    ],
)
def test_a_schema_is_read_alike_at_each_door(each_door: TestClient, value: str, is_taken: bool) -> None:
    schema = f'{{"type": "object", "properties": {{"v": {value}}}}}'
    for path, field, around in DOORS:
        asked = {"completions": {"prompt": "x"}, "responses": {"input": "x"}}.get(path, {"messages": CHAT["messages"]})
        forced = {"tool_choice": {"type": "any"} if path == "messages" else "required"} if "tools" in around else {}
        limit = {"max_output_tokens" if path == "responses" else "max_tokens": 100}
        body = json.dumps({"model": "tiny", **asked, **forced, **limit, **around})
        body = body.replace('"SCHEMA"', schema).replace('"TEXT"', json.dumps(schema))
        response = each_door.post(f"/v1/{path}", content=body, headers={"content-type": "application/json"})
        assert response.status_code == (200 if is_taken else 400), (field, response.text)
        if not is_taken:
            message = response.json()["error"]["message"]
            assert message.startswith(f"{field}: ")
            assert "#/properties/v/" in message
