"""OpenAI's and Anthropic's own SDKs, strict, against a cluster, as a program uses them.

Calls are forced where the model need not be good at them. What single fields mean is tested in tests/cluster/http.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import openai
import pytest
from pydantic import BaseModel, Field

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

MODEL = "mneme-tiny"
ASKED: Any = [{"role": "user", "content": "What is the weather in Rome?"}]
ONE_CALL: Any = {"tool_choice": "required", "parallel_tool_calls": False}
STRICT: Any = {"api_key": "x", "max_retries": 0, "_strict_response_validation": True}
MAX_TOKENS = 800  # this model fills structured output with blanks, which JSON allows


class Weather(BaseModel, extra="forbid"):
    """The weather."""

    city: str = Field(max_length=12)
    days: int = Field(ge=1, le=9)


class Warmth(BaseModel):
    """Anthropic's SDK sends no bounds of strings and numbers, so that only a type without any is sure to be met."""

    city: Literal["Rome", "Oslo"]
    is_warm: bool


SCHEMA = {**Weather.model_json_schema(), "additionalProperties": False}


@pytest.fixture
def client(server: str) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server}/v1", **STRICT) as client:
        yield client


@pytest.fixture
def theirs(server: str) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=server, **STRICT) as client:
        yield client


def test_openai_chats_call_tools_and_go_on(client: Any, server: str) -> None:
    tool = {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": SCHEMA}}
    how = {"model": MODEL, "messages": ASKED, "max_tokens": 150, "seed": 1, "tools": [tool]}
    how["extra_headers"] = {"X-Session-ID": "sdk"}  # where there are several replicas
    said = client.chat.completions.create(**how, **ONE_CALL)
    (call,) = said.choices[0].message.tool_calls
    with client.chat.completions.stream(**how, **ONE_CALL) as stream:
        pieces = [event.arguments_delta for event in stream if event.type == "tool_calls.function.arguments.delta"]
        (streamed,) = stream.get_final_completion().choices[0].message.tool_calls
    assert "".join(pieces) == streamed.function.arguments == call.function.arguments
    assert Weather.model_validate_json(call.function.arguments)
    called = {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]}
    history = [*ASKED, called, {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
    again = client.chat.completions.create(**{**how, "messages": history})
    assert again.usage.prompt_tokens_details.cached_tokens >= said.usage.total_tokens - 1

    async def at_once() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=f"{server}/v1", **STRICT) as several:
            return await asyncio.gather(*(several.chat.completions.create(**how, **ONE_CALL, n=2) for _ in range(3)))

    ids = [call.id for each in asyncio.run(at_once()) for choice in each.choices for call in choice.message.tool_calls]
    assert len(set(ids)) == 6


def test_openai_parses_chats_and_responses(client: Any) -> None:
    chat: Any = {"model": MODEL, "messages": ASKED, "max_tokens": MAX_TOKENS, "seed": 1}
    parsed = client.chat.completions.parse(**chat, response_format=Weather)
    assert isinstance(parsed.choices[0].message.parsed, Weather)
    tool = openai.pydantic_function_tool(Weather)
    for seed in range(6):
        with client.chat.completions.stream(**{**chat, "seed": seed}, tools=[tool], **ONE_CALL) as stream:
            (call,) = stream.get_final_completion().choices[0].message.tool_calls
        assert isinstance(call.function.parsed_arguments, Weather)
    how: Any = {"model": MODEL, "input": ASKED, "temperature": 0, "max_output_tokens": MAX_TOKENS}
    assert isinstance(client.responses.parse(**how, text_format=Weather).output_parsed, Weather)
    own = {"type": "function", **tool["function"]}
    called = client.responses.parse(**how, tools=[own], **ONE_CALL)
    result = {"type": "function_call_output", "call_id": called.output[-1].call_id, "output": "rain"}
    asked = {**how, "input": [result], "tools": [own], "max_output_tokens": 24}
    told = client.responses.create(**asked, tool_choice="none", previous_response_id=called.id)
    assert told.usage.input_tokens_details.cached_tokens >= called.usage.total_tokens - 1


def test_openai_embeds_in_floats_and_in_base64(client: Any, server: str) -> None:
    texts = ["A fox.", "A library."]
    floats = client.embeddings.create(model=MODEL, input=texts, encoding_format="float")
    loose = openai.OpenAI(base_url=f"{server}/v1", api_key="x")  # its types know no embedding in base64, its default
    decoded = loose.embeddings.create(model=MODEL, input=texts)
    assert decoded.data[0].embedding == pytest.approx(floats.data[0].embedding, abs=1e-4)
    loose.close()


def test_a_custom_tool_s_grammar_is_held_to(client: Any) -> None:
    line = 'line: ("+" | "-") /[a-z ]{0,12}/ LF\n%import common.LF\n'
    grammar = f'start: "*** Begin Patch" LF line~1..3 "*** End Patch"\n{line}'
    patch = {"type": "custom", "name": "apply_patch", "description": "Patch files."}
    patch["format"] = {"type": "grammar", "syntax": "lark", "definition": grammar}
    how: Any = {"model": MODEL, "input": ASKED, "tools": [patch], "max_output_tokens": 200, "store": False}
    (call,) = client.responses.create(**how, tool_choice="required", parallel_tool_calls=False).output
    first, *lines, last = call.input.split("\n")
    assert (call.type, first, last) == ("custom_tool_call", "*** Begin Patch", "*** End Patch")
    assert {line[0] for line in lines} <= {*"+-"}
    assert lines


def test_anthropic_calls_tools_and_goes_on(theirs: Any) -> None:
    system = [{"type": "text", "text": "Be brief. " * 20, "cache_control": {"type": "ephemeral", "ttl": "1h"}}]
    tool = {"name": "weather", "description": "of a city", "input_schema": SCHEMA}
    how = {"model": MODEL, "system": system, "tools": [tool], "max_tokens": 150, "messages": ASKED}
    assert theirs.messages.create(**{**how, "max_tokens": 0}).content == []  # it warms
    forced = {"type": "any", "disable_parallel_tool_use": True}
    said = theirs.messages.create(**how, tool_choice=forced, diagnostics={"previous_message_id": None})
    (use,) = said.content
    assert Weather.model_validate(use.input)
    assert said.usage.cache_read_input_tokens > 50
    with theirs.messages.stream(**how, tool_choice={"type": "tool", "name": "weather"}) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        (streamed,) = stream.get_final_message().content
    assert json.loads("".join(pieces)) == streamed.input
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "rain", "cache_control": {"type": "ephemeral"}}
    called = {"role": "assistant", "content": [use.model_dump(exclude_none=True)]}
    history = [*ASKED, called, {"role": "user", "content": [result]}]
    before = {"previous_message_id": said.id}
    again = theirs.messages.create(**{**how, "messages": history}, diagnostics=before)
    num_before = said.usage.input_tokens + said.usage.cache_read_input_tokens
    assert again.usage.cache_read_input_tokens >= 0.95 * num_before
    assert again.diagnostics is None
    other = {**how, "system": "Be long. " * 20, "messages": history}
    missed = theirs.messages.create(**other, diagnostics=before).diagnostics.cache_miss_reason
    assert missed.type == "system_changed"


def test_anthropic_parses_and_runs_tools_in_a_loop(theirs: Any) -> None:
    """The loop by itself sends only what is new of a thread, and all when it is told to."""
    how: Any = {"model": MODEL, "max_tokens": MAX_TOKENS, "messages": ASKED}
    assert isinstance(theirs.messages.parse(**how, output_format=Warmth).parsed_output, Warmth)
    called: list[str] = []

    @anthropic.beta_tool(input_schema=SCHEMA)
    def weather(city: str, days: int) -> str:
        """Return the weather."""
        called.append(city)
        return f"rain for {days}"

    forced = {"type": "any", "disable_parallel_tool_use": True}
    runner = theirs.beta.messages.tool_runner(**how, tool_choice=forced, tools=[weather], max_iterations=3)
    turns = list(runner)
    assert [turn.stop_reason for turn in turns] == ["tool_use"] * 3
    assert len(called) >= 2
    parts = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    sizes = [sum(getattr(turn.usage, part) for part in parts) for turn in turns]
    assert sizes == sorted(set(sizes))
