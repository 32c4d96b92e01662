"""Tools in chat completions: what the template is given, what an answer's calls become, and what forces them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from starlette.testclient import TestClient

import mneme.replicas.mneme_tiny as tiny
from mneme.errors import InvalidRequest
from mneme.replicas.text.tokenizer import Tokenizer
from tests.cluster.api_fixtures import CHAT, api, chat, post
from tests.cluster.fake_engine_client import FakeEngineClient
from tests.replicas.text.family_templates import QWEN_3
from tests.replicas.tiny_tokenizer import CHATML, IM_END, byte_level_backend, tiny_tokenizer

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
    broken = {**call, "function": {"name": "weather", "arguments": '{"city'}}  # the model's own words, maybe
    assert '"{\\"city"' in asked(messages=[*history[:1], {**history[1], "tool_calls": [broken]}])[1].prompt_text


@pytest.mark.parametrize("how", [{"tool_choice": "none"}, {"tools": [OTHER]}, {"tools": []}])
def test_what_was_not_offered_is_content(how: dict[str, Any]) -> None:
    sentence = CALLS.partition("\n<tool_call>\n{" + '"name": "now"')[0]
    assert whole(sentence, **how)["message"] == {"role": "assistant", "content": sentence, "refusal": None}


def test_tools_stay_in_the_prompt_where_none_may_be_called() -> None:
    assert asked(tool_choice="none")[1].prompt_token_ids == asked()[1].prompt_token_ids


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


def test_auto_is_free_where_no_token_opens_a_call() -> None:
    assert asked()[1].sampling.grammar is None


def test_a_format_holds_for_what_is_no_call() -> None:
    grammar = asked(response_format={"type": "json_schema", "json_schema": {"schema": {"type": "null"}}})[
        1
    ].sampling.grammar
    assert "start: calls | answer" in grammar.text


def _refused(path: str = "/v1/chat/completions", **body: Any) -> tuple[str | None, str]:
    """The field and the message of a refusal."""
    asks = {"model": "tiny", "max_tokens": 50, "tool_choice": "required", **body}
    if path != "/v1/responses":
        asks.setdefault("messages", CHAT["messages"])
    response = post(path, asks, engine=FakeEngineClient(tiny_tokenizer(TEMPLATE)))
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    return error.get("param"), error["message"]


@pytest.mark.parametrize(
    ("parameters", "rule"),
    [
        ({"type": "array", "required": ["a"]}, "must be the schema of an object"),
        ({"type": ["string", "null"]}, "must be the schema of an object"),
        ({"properties": {"a": {"not": {"pattern": "a"}}}}, "not"),
        ({"const": 3}, "incompatible types"),
    ],
)
def test_a_refused_schema_is_named_by_its_tool(parameters: dict[str, Any], rule: str) -> None:
    tools = [OTHER, TOOL, {"type": "function", "function": {"name": "f", "parameters": parameters}}]
    named = {"type": "function", "function": {"name": "f"}}
    schema = {"input_schema": parameters}
    for param, message in (
        _refused(tools=tools),
        _refused(tools=tools, tool_choice=named),
        _refused(
            "/v1/responses",
            input="x",
            tools=[{"type": "function", **tool["function"]} for tool in tools],
        ),
        _refused(
            "/v1/messages",
            tools=[{"name": "now", "input_schema": {}}, {"name": "g", "input_schema": {}}, {"name": "f", **schema}],
            tool_choice={"type": "any"},
        ),
    ):
        field = message.partition(":")[0]
        assert param in (None, field)
        assert field in ("tools[2].function.parameters", "tools[2].parameters", "tools[2].input_schema")
        assert rule in message
        assert "args_" not in message
        assert "whitespace_flexible" not in message


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
        assert _refused(tools=[tool], tool_choice=choice)[0] == "tools[0].function.parameters"


def test_kinds_of_tools_that_are_not_there_are_named_as_such() -> None:
    _, message = _refused(tools=[{"type": "web_search", "name": "web_search"}])
    assert message.startswith("tools[0].type: this kind of tool is not supported")


def test_thoughts_and_references_are_parts_of_a_message() -> None:
    late = {"type": "function", "function": {**TOOL["function"], "name": "late", "defer_loading": True}}
    said = [
        {
            "role": "assistant",
            "content": [{"type": "thinking", "thinking": "Hm."}, {"type": "text", "text": "I look."}],
        },
        {
            "role": "user",
            "content": [{"type": "tool_reference", "name": "late"}, "or", {"type": "tool_reference", "name": "x"}],
        },
    ]
    shows = TEMPLATE.replace("message['content'] }}", "(message['reasoning_content'] or '') + message['content'] }}")
    sentence = CALLS.replace("now", "late")
    answer, request = asked(sentence, shows, messages=[*CHAT["messages"], *said], tools=[TOOL, late])
    defined = json.dumps({"type": "function", "function": {**TOOL["function"], "name": "late"}}, ensure_ascii=False)
    assert "assistant\nHm.I look.<|im_end|>" in request.prompt_text
    assert f"user\n{defined}\nor\nx<|im_end|>" in request.prompt_text
    assert request.prompt_text.count('"late"') == 1  # not in the list at the head
    assert [call["function"]["name"] for call in answer.json()["choices"][0]["message"]["tool_calls"]] == [
        "weather",
        "late",
    ]


def test_a_tool_that_was_not_found_yet_is_not_offered() -> None:
    late = {"type": "function", "function": {**OTHER["function"], "defer_loading": True}}
    assert [call["function"]["name"] for call in whole(tools=[TOOL, late])["message"]["tool_calls"]] == ["weather"]
    assert _refused(tools=[late])[0] == "tool_choice"
    named = {"type": "function", "function": {"name": "now"}}
    assert asked(tools=[TOOL, late], tool_choice=named)[1].sampling.grammar is not None


@pytest.mark.parametrize(
    ("part", "param"),
    [
        ({"type": "thinking", "thinking": "Hm."}, "messages[0].content"),
        ({"type": "thinking", "text": "Hm."}, "messages[0].content[0].thinking"),
        ({"type": "tool_reference"}, "messages[0].content[0].name"),
    ],
)
def test_parts_that_nobody_says_are_refused(part: dict[str, Any], param: str) -> None:
    assert _refused(messages=[{"role": "user", "content": [part]}], tool_choice="none")[0] == param


def test_auto_has_a_grammar_for_schemas_of_several_parts() -> None:
    backend = tokenizers.Tokenizer.from_str(byte_level_backend().to_str())  # its own, as a token is added
    backend.add_tokens(["<tool_call>"])
    tokenizer = Tokenizer(backend, eos_token_ids=(IM_END,), chat_template=TEMPLATE)
    text = {"type": "string"}
    branches = [{"properties": {name: text}, "required": [name]} for name in "ab"]
    for parameters in (
        {"type": "object", "properties": {"kind": text}, "required": ["kind"], "anyOf": branches},
        {"$defs": {"a": branches[0]}, "$ref": "#/$defs/a", "properties": {"b": text}, "required": ["b"]},
        {"properties": {"a": text}, "required": ["a", "b"]},
    ):
        engine = FakeEngineClient(tokenizer, "Hm.")
        tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
        response = post("/v1/chat/completions", {**CHAT, "tools": [tool]}, engine=engine)
        assert response.status_code == 200
        assert engine.requests[0].sampling.grammar is not None


@pytest.mark.parametrize("cut", [{"max_tokens": 12}, {"stop": ["name"]}])
def test_a_forced_call_that_was_cut_off_leaves_no_content(cut: dict[str, Any]) -> None:
    sentence = CALLS.partition("\n")[2]
    assert whole(sentence, tool_choice="required", **cut)["message"] == {
        "role": "assistant",
        "content": "",
        "refusal": None,
    }
    deltas = [choice["delta"] for choice in streamed(sentence, tool_choice="required", **cut)]
    assert not any(delta.get("content") or delta.get("tool_calls") for delta in deltas)
    assert whole(sentence, **cut)["message"]["content"].startswith("<tool_call>")  # a free answer's own words


@pytest.mark.parametrize(
    ("stop", "reason"), [('"K', "stop"), ('"}', "stop"), ("}\n", "tool_calls"), ("</tool_call>", "tool_calls")]
)
@pytest.mark.parametrize("choice", ["required", "auto"])
def test_a_call_that_a_stop_string_cut_is_told_as_cut(stop: str, reason: str, choice: str) -> None:
    sentence = CALLS.partition("\n")[2]
    told = whole(sentence, tool_choice=choice, stop=[stop])
    arguments = told["message"]["tool_calls"][0]["function"]["arguments"]
    assert arguments == '{"city": "Köln"}'.partition(stop)[0]
    assert told["finish_reason"] == reason
    assert streamed(sentence, tool_choice=choice, stop=[stop])[-1]["finish_reason"] == reason


def test_a_whole_call_counts_where_a_later_one_had_not_begun() -> None:
    told = whole(CALLS.partition("\n")[2], tool_choice="required", stop=["now"])
    assert (told["finish_reason"], len(told["message"]["tool_calls"])) == ("tool_calls", 1)


def test_arguments_with_half_a_character_are_told_as_they_were_written() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "\\ud800"}'}}
    history = [*CHAT["messages"], {"role": "assistant", "content": None, "tool_calls": [call]}]
    text = asked(messages=[*history, {"role": "tool", "tool_call_id": "c1", "content": "rain"}])[1].prompt_text
    assert '"arguments": "{\\"city\\": \\"\\\\ud800\\"}"' in text


def test_a_schema_that_no_grammar_takes_is_only_told() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}
    assert asked(tools=[tool])[1].sampling.grammar is None
    strict = {"type": "function", "function": {**tool["function"], "strict": True}}
    response = post(
        "/v1/chat/completions",
        {**CHAT, "tools": [strict], "tool_choice": "required"},
        engine=FakeEngineClient(tiny_tokenizer(TEMPLATE)),
    )
    assert response.status_code == 400
    assert "not" in response.json()["error"]["message"]


def test_a_template_without_tools_takes_forced_calls_only() -> None:
    refused = chat(tools=[TOOL])
    assert refused.status_code == 400
    assert "tool_call_parser" in refused.json()["error"]["message"]
    message = whole('[{"name": "now", "parameters": {"a": 1}}]', CHATML, tool_choice="required")["message"]
    assert [call["function"] for call in message["tool_calls"]] == [{"name": "now", "arguments": '{"a": 1}'}]


def test_every_choice_has_calls_of_its_own() -> None:
    choices = asked(n=3)[0].json()["choices"]
    assert len({call["id"] for choice in choices for call in choice["message"]["tool_calls"]}) == 6


def test_an_answer_that_was_cut_off_says_so() -> None:
    choice = whole(max_tokens=30)
    assert choice["finish_reason"] == "length"


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
    for sentence, changes in (
        ('{"a": 1}', {"tools": [], "response_format": schema}),
        ('{"a": 1}', {"tools": [], "guided_choice": ['{"a": 1}']}),
    ):
        response, request = asked(sentence, OPENS, **changes)
        assert request.sampling.grammar.after is None
        message = response.json()["choices"][0]["message"]
        assert (message["content"], "reasoning" in message) == (sentence, False)
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    message = whole(call, OPENS, tool_choice="required")["message"]
    assert [each["function"]["name"] for each in message["tool_calls"]] == ["now"]


def _told(engine: FakeEngineClient, **body: Any) -> dict[str, Any]:
    response = post("/v1/chat/completions", {**CHAT, **body}, engine=engine, headers={"X-Session-ID": "s"})
    assert response.status_code == 200, response.text
    message: dict[str, Any] = response.json()["choices"][0]["message"]
    return message


@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("history", ["text", "log"])
def test_a_session_knows_what_it_said_however_it_is_resent(drops: bool, history: str) -> None:
    """A model's own blanks in a call do not cost its KV, and its reasoning does not with `history: "log"`."""
    thought = "<think>\nHm, fox.\n</think>\n\n" if drops else ""
    sentence = thought + '<tool_call>{"name":"weather" ,"arguments":{ "city":"Köln" }}</tool_call>'
    engine = FakeEngineClient(tiny_tokenizer(THINKS), sentence)
    body = {"tools": [TOOL], "session": {"id": "s", "history": history}}
    message = _told(engine, **body)
    assert ("reasoning_content" in message) == drops
    for name in ("reasoning_content", "reasoning"):
        message.pop(name, None)
    log = engine.sessions.get(("", "public:s"))
    assert log is not None
    before = list(log.ids)
    message["tool_calls"][0]["function"]["arguments"] = '{"city":"K\\u00f6ln"}'  # another way to write the same
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "rain"}
    _told(engine, **body, messages=[*CHAT["messages"], message, result])
    log = engine.sessions.get(("", "public:s"))
    assert log is not None
    is_found = list(log.ids[: len(before)]) == before
    assert is_found == (history == "log" or not drops)
    text = engine.tokenizer.decode(list(log.ids))
    assert text.count("<|im_start|>tool\nrain<|im_end|>\n<|im_start|>assistant\n") == 1
    assert (thought.strip() in text.partition("rain")[0]) == (is_found or not drops)
    said = {"role": "assistant", "content": "The weather is fine."}  # never said
    other = [*CHAT["messages"], said, {"role": "user", "content": "and now?"}]
    _told(engine, **body, messages=other)
    log = engine.sessions.get(("", "public:s"))
    assert log is not None
    assert "rain" not in engine.tokenizer.decode(list(log.ids))


def _num_computed(history: str) -> int:
    """Tokens of a new question's prompt that a session's log lacks, behind a round of calls that had reasoning."""
    thought = "<think>\nHm, fox.\n</think>\n\n"
    sentence = thought + '<tool_call>\n{"name": "weather", "arguments": {"city": "b"}}\n</tool_call>'
    engine = FakeEngineClient(tiny_tokenizer(QWEN_3), sentence)
    body = {"tools": [TOOL], "session": {"id": "s", "history": history}}
    messages = [*CHAT["messages"]]
    for content in ("the quick brown fox jumps over the lazy dog. " * 30, "rain"):
        message = _told(engine, **body, messages=messages)
        if content == "rain":  # the round's last; its reasoning may go
            break
        message.pop("reasoning")
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": content}
        messages += [message, result]
    log = engine.sessions.get(("", "public:s"))
    assert log is not None
    before = list(log.ids)
    plain = {name: value for name, value in message.items() if "reasoning" not in name}
    result = {"role": "tool", "tool_call_id": plain["tool_calls"][0]["id"], "content": "rain"}
    _told(engine, **body, messages=[*messages, plain, result, {"role": "user", "content": "and now?"}])
    log = engine.sessions.get(("", "public:s"))
    assert log is not None
    after = list(log.ids)
    shared = next((i for i, pair in enumerate(zip(before, after, strict=False)) if pair[0] != pair[1]), len(before))
    num_answer = len(engine.tokenizer.encode(sentence, add_special_tokens=False))
    return len(after) - shared - num_answer


def test_reasoning_that_qwen_3_drops_costs_no_prefill_with_the_log() -> None:
    """Its template drops the thought of the first call as soon as a user asks again: all behind that is other text."""
    assert _num_computed("text") > 300  # the long result was behind the thought
    new = (
        "<|im_end|>\n<|im_start|>user\n<tool_response>\nrain\n</tool_response><|im_end|>\n"
        "<|im_start|>user\nand now?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert _num_computed("log") <= len(tiny_tokenizer(QWEN_3).encode_rendered(new))


def test_a_session_with_other_tools_is_another_conversation() -> None:
    sentence = '<tool_call>{"name":"weather" ,"arguments":{}}</tool_call>'
    engine = FakeEngineClient(tiny_tokenizer(TEMPLATE), sentence)
    message = _told(engine, tools=[TOOL])
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "rain"}
    _told(engine, tools=[TOOL, OTHER], messages=[*CHAT["messages"], message, result])
    log = engine.sessions.get(("", "public:s"))
    assert log is not None
    assert '"now"' in engine.tokenizer.decode(list(log.ids))


TAGS = "{# <function= #}" + TEMPLATE
TAGGED = "Hm.\n<tool_call>\n<function=weather>\n<parameter=city>\n12\n</parameter>\n</function>\n</tool_call>"


def test_values_without_quotes_are_of_their_schemas_types() -> None:
    for choice in (whole(TAGGED, TAGS), {"message": {"tool_calls": [_joined(streamed(TAGGED, TAGS))]}}):
        assert choice["message"]["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "12"}'}
    assert whole(TAGGED, TAGS)["message"]["content"] == "Hm."


def _joined(choices: list[dict[str, Any]]) -> dict[str, Any]:
    pieces = [piece["function"] for each in choices for piece in each["delta"].get("tool_calls", [])]
    arguments = "".join(piece["arguments"] for piece in pieces)
    return {"function": {"name": pieces[0]["name"], "arguments": arguments}}


def test_a_session_knows_values_by_their_types() -> None:
    engine = FakeEngineClient(tiny_tokenizer(TAGS), TAGGED)
    body = {"tools": [TOOL], "session": {"id": "s"}}
    message = _told(engine, **body)
    log = engine.sessions.get(("", "public:s"))
    assert log is not None
    before = list(log.ids)
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "rain"}
    _told(engine, **body, messages=[*CHAT["messages"], message, result])  # the template writes the call as JSON
    log = engine.sessions.get(("", "public:s"))
    assert log is not None
    assert list(log.ids[: len(before)]) == before


@pytest.mark.parametrize("has_tools", [True, False])
def test_channels_are_read_though_their_marks_are_special_tokens(has_tools: bool) -> None:
    backend = tokenizers.Tokenizer.from_str(byte_level_backend().to_str())
    backend.add_special_tokens(["<|channel|>", "<|message|>", "<|constrain|>", "<|start|>", "<|end|>", "<|call|>"])
    template = "{# <|channel|>analysis<|message|> #}" + TEMPLATE
    call = '<|channel|>commentary to=functions.now <|constrain|>json<|message|>{"a": "b"}' if has_tools else ""
    sentence = f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant{call or '<|channel|>final<|message|>Hi'}"
    engine = FakeEngineClient(Tokenizer(backend, eos_token_ids=(IM_END,), chat_template=template), sentence)
    response = post("/v1/chat/completions", {**CHAT, "tools": [OTHER] if has_tools else []}, engine=engine)
    message = response.json()["choices"][0]["message"]
    assert message["reasoning_content"] == "Hm."
    assert message["content"] == (None if has_tools else "Hi")
    assert [each["function"]["arguments"] for each in message.get("tool_calls", ())] == ['{"a": "b"}'] * has_tools
    assert engine.requests[0].sampling.skip_special_tokens is False


FUNCTION = {"name": "f", "parameters": "SCHEMA"}
FORMAT = {"type": "json_schema", "name": "n", "schema": "SCHEMA"}
DOORS: list[tuple[str, str, dict[str, Any]]] = [  # path, what the schema is called there, and the body around it
    ("chat/completions", "response_format.json_schema.schema", {"response_format": FORMAT | {"json_schema": FORMAT}}),
    ("chat/completions", "structured_outputs.json", {"structured_outputs": {"json": "SCHEMA"}}),
    ("chat/completions", "guided_json", {"guided_json": "SCHEMA"}),
    ("completions", "guided_json", {"guided_json": "TEXT"}),
    ("chat/completions", "tools[0].function.parameters", {"tools": [{"type": "function", "function": FUNCTION}]}),
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
