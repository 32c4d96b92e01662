"""Tours of real SDKs against a running server: what a program that uses them would do, checked as it would see it.

    python -m tests.e2e.agents.sdk_tours [URL] [PACKAGE...]

To be run by a Python that has the SDKs (`pip install openai anthropic langchain-openai langchain openai-agents
instructor litellm`; `httpx` sends what chat pages send); one that is not installed is skipped and named. OpenAI's and
Anthropic's clients check each answer against their types, but where these do not describe what their own servers send.
Calls are forced where the model need not be good at them, so mneme-tiny serves. Ends in one line of JSON: the steps of
each SDK and version. `test_sdks.py` runs the tour of OpenAI's.
"""

import asyncio
import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from typing import Any, Literal

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": WEATHER}}
NAMED = {"type": "function", "function": {"name": "weather"}}
ONE_CALL = {"tool_choice": "required", "parallel_tool_calls": False}
ASKED = [{"role": "user", "content": "What is the weather in Rome?"}]
MODEL = "mneme-tiny"
MAX_TOKENS = 800  # this model fills structured output with blanks, which JSON allows
STEPS: list[str] = []


def step(name: str, is_right: object, shown: object = "") -> None:
    if not is_right:
        raise AssertionError(f"{name}: {shown!r}")
    STEPS.append(name)


def refused(name: str, kind: type[Exception], call: Callable[[], object]) -> Any:
    """The error of a call that must be refused."""
    try:
        call()
    except kind as error:
        STEPS.append(name)
        return error
    raise AssertionError(f"{name}: it was answered")


def openai_client(url: str, **options: Any) -> Any:
    import openai

    options = {"max_retries": 0, "_strict_response_validation": True, **options}
    return openai.OpenAI(base_url=f"{url}/v1", api_key="x", **options)


def weather_type() -> Any:
    from pydantic import BaseModel, Field

    class Weather(BaseModel, extra="forbid"):
        """The weather."""

        city: str = Field(max_length=12)
        days: int = Field(ge=1, le=9)

    return Weather


def openai_tour(url: str) -> None:
    client = openai_client(url)
    step("models", client.models.list().data[0].id == MODEL)
    _chat(client)
    _chat_parsed(client)
    _completions_and_embeddings(client, openai_client(url, _strict_response_validation=False))
    _responses(client)
    asyncio.run(_openai_async(url))


def _chat(client: Any) -> None:
    import openai

    how = {"model": MODEL, "messages": ASKED, "max_tokens": 150, "seed": 1}
    said = client.chat.completions.create(**how)
    text = said.choices[0].message.content
    step("chat", text and said.usage.prompt_tokens_details.cached_tokens >= 0)
    chunks = list(client.chat.completions.create(**how, stream=True, stream_options={"include_usage": True}))
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    step("chat, streamed", streamed == text and chunks[-1].usage.total_tokens == said.usage.total_tokens, chunks)
    session = {"extra_headers": {"X-Session-ID": f"tour-{said.id}"}}  # where there are several replicas
    said = client.chat.completions.create(**how, **session, tools=[TOOL], **ONE_CALL)
    (call,) = said.choices[0].message.tool_calls
    step("required", said.choices[0].finish_reason == "tool_calls" and json.loads(call.function.arguments)["days"])
    with client.chat.completions.stream(**how, tools=[TOOL], tool_choice=NAMED) as stream:
        pieces = [event.arguments_delta for event in stream if event.type == "tool_calls.function.arguments.delta"]
        (streamed,) = stream.get_final_completion().choices[0].message.tool_calls
    step("stream of a call", streamed.function.name == "weather" and streamed.id, streamed)
    step("and its arguments", json.loads(streamed.function.arguments).keys() == WEATHER["properties"].keys(), streamed)
    step("and its deltas", "".join(pieces) == streamed.function.arguments and len(pieces) > 2, pieces)
    history = [
        *ASKED,
        {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": "rain"},
    ]
    again = client.chat.completions.create(**{**how, "messages": history}, **session, tools=[TOOL], tool_choice="auto")
    step("a tool's result", again.choices[0].finish_reason in ("stop", "length", "tool_calls"))
    step("and its cache", again.usage.prompt_tokens_details.cached_tokens >= said.usage.total_tokens - 1, again.usage)
    unknown = {**NAMED, "function": {"name": "none"}}
    error = refused(
        "a bad request",
        openai.BadRequestError,
        lambda: client.chat.completions.create(**how, tools=[TOOL], tool_choice=unknown),
    )
    step("and its field", error.param == "tool_choice.function.name", error)


def _chat_parsed(client: Any) -> None:
    import openai

    own = weather_type()
    how = {"model": MODEL, "messages": ASKED, "max_tokens": MAX_TOKENS, "seed": 1}
    parsed = client.chat.completions.parse(**how, response_format=own)
    step("parse", isinstance(parsed.choices[0].message.parsed, own))
    tool = openai.pydantic_function_tool(own)
    parsed = client.chat.completions.parse(**how, tools=[tool], **ONE_CALL)
    step("parse of a call", isinstance(parsed.choices[0].message.tool_calls[0].function.parsed_arguments, own))
    for seed in range(6):
        with client.chat.completions.stream(**{**how, "seed": seed}, tools=[tool], **ONE_CALL) as stream:
            for _ in stream:
                pass
            (call,) = stream.get_final_completion().choices[0].message.tool_calls
        step(f"stream and parse of a call, seed {seed}", isinstance(call.function.parsed_arguments, own), call)
    with client.chat.completions.stream(**how, response_format=own) as stream:
        for _ in stream:
            pass
        step("stream and parse", isinstance(stream.get_final_completion().choices[0].message.parsed, own))


def _completions_and_embeddings(client: Any, loose: Any) -> None:
    """`loose` checks no types: they know no chunk without a finish_reason, and no embedding in base64, its default."""
    how = {"model": MODEL, "prompt": "The", "max_tokens": 5, "seed": 1}
    text = client.completions.create(**how).choices[0].text
    step("completions", text)
    chunks = list(loose.completions.create(**how, stream=True))
    step("completions, streamed", "".join(chunk.choices[0].text for chunk in chunks) == text)
    texts = ["A fox.", "A library."]
    floats = client.embeddings.create(model=MODEL, input=texts, encoding_format="float")
    step("embeddings", [each.index for each in floats.data] == [0, 1] and floats.usage.prompt_tokens > 2)
    decoded = loose.embeddings.create(model=MODEL, input=texts)
    pairs = zip(floats.data[0].embedding, decoded.data[0].embedding, strict=True)
    step("embeddings in base64", all(abs(one - other) < 1e-4 for one, other in pairs))
    step("dimensions", len(loose.embeddings.create(model=MODEL, input=texts, dimensions=16).data[1].embedding) == 16)


def _responses(client: Any) -> None:
    import openai

    own = weather_type()
    first = client.responses.create(model=MODEL, input="Tell me of a fox.", max_output_tokens=24)
    step("responses", first.output_text and client.responses.retrieve(first.id) == first)
    events = list(
        client.responses.create(
            model=MODEL, input="And then?", previous_response_id=first.id, max_output_tokens=24, stream=True
        )
    )
    then = events[-1].response
    deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    step("responses, streamed", deltas == then.output_text)
    step("and gone on from", then.usage.input_tokens_details.cached_tokens >= first.usage.total_tokens - 1, then.usage)
    step("input_items", len(client.responses.input_items.list(then.id).data) == 3)
    how = {"model": MODEL, "input": ASKED[0]["content"], "temperature": 0, "max_output_tokens": MAX_TOKENS}
    step("responses.parse", isinstance(client.responses.parse(**how, text_format=own).output_parsed, own))
    tool = openai.pydantic_function_tool(own)
    tool = {"type": "function", **tool["function"]}
    called = client.responses.parse(**how, tools=[tool], **ONE_CALL)
    call = called.output[-1]
    step("responses.parse of a call", own.model_validate(call.parsed_arguments), call)
    with client.responses.stream(**how, tools=[tool], **ONE_CALL) as stream:
        kinds = {event.type for event in stream}
        streamed = stream.get_final_response().output[-1]
    step("responses.stream of a call", "response.function_call_arguments.delta" in kinds, kinds)
    step("and its arguments", own.model_validate(streamed.parsed_arguments), streamed)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    asked = {**how, "input": [result], "tools": [tool], "max_output_tokens": 24}
    told = client.responses.create(**asked, tool_choice="none", previous_response_id=called.id)
    step("a call's output", told.usage.input_tokens_details.cached_tokens >= called.usage.total_tokens - 1, told.usage)
    _agents_tools(client)
    client.responses.delete(first.id)
    refused("a deleted response", openai.NotFoundError, lambda: client.responses.retrieve(first.id))


def _agents_tools(client: Any) -> None:
    """What Codex has: tools in a namespace, a custom tool with a grammar, others that a server would run."""
    line = 'line: ("+" | "-") /[a-z ]{0,12}/ LF\n%import common.LF\n'
    grammar = f'start: "*** Begin Patch" LF line~1..3 "*** End Patch"\n{line}'
    patch = {
        "type": "custom",
        "name": "apply_patch",
        "description": "Patch files.",
        "format": {"type": "grammar", "syntax": "lark", "definition": grammar},
    }
    read = {"type": "function", **TOOL["function"], "strict": False}
    space = {"type": "namespace", "name": "mcp__sky", "description": "The sky.", "tools": [read]}
    tools = [space, patch, {"type": "web_search"}]
    how = {"model": MODEL, "input": ASKED, "tools": tools, "max_output_tokens": 200, "store": False}
    raw = client.responses.with_raw_response.create(**how, tool_choice={"type": "custom", "name": "apply_patch"})
    said = raw.parse()
    (call,) = said.output
    lines = call.input.split("\n")
    is_patch = (
        lines[0] == "*** Begin Patch" and lines[-1] == "*** End Patch" and {line[0] for line in lines[1:-1]} <= {*"+-"}
    )
    step("a custom tool's grammar", call.type == "custom_tool_call" and is_patch and len(lines) > 2, call)
    step("what is not run", raw.headers["x-mneme-ignored-fields"] == "tools.web_search", raw.headers)
    events = list(client.responses.create(**how, tool_choice="required", parallel_tool_calls=False, stream=True))
    (last,) = events[-1].response.output
    kind = "custom_tool_call_input" if last.type == "custom_tool_call" else "function_call_arguments"
    told = "".join(event.delta for event in events if event.type == f"response.{kind}.delta")
    step("a stream of either", told == (last.input if last.type == "custom_tool_call" else last.arguments), last)
    named = client.responses.create(**how, tool_choice={"type": "function", "name": "mcp__sky__weather"})
    (other,) = named.output
    step("a namespace", (other.namespace, other.name) == ("mcp__sky", "weather"), other)
    results = [
        {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "patched"},
        {"type": "function_call_output", "call_id": other.call_id, "output": [{"type": "input_text", "text": "rain"}]},
    ]
    replayed = [call.model_dump(exclude_none=True), other.model_dump(exclude_none=True)]
    searched = {
        "type": "web_search_call",
        "id": "ws",
        "status": "completed",
        "action": {"type": "search", "query": "Rome"},
    }
    again = client.responses.create(**{**how, "input": [*ASKED, *replayed, *results, searched]}, tool_choice="none")
    step("what was replayed", again.usage.input_tokens > said.usage.input_tokens, again.usage)


async def _openai_async(url: str) -> None:
    import openai

    options: dict[str, Any] = {"max_retries": 0, "_strict_response_validation": True}
    how = {"model": MODEL, "messages": ASKED, "max_tokens": 150, "seed": 1, "tools": [TOOL], **ONE_CALL}
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", **options) as client:
        answers = await asyncio.gather(*(client.chat.completions.create(**how, n=2) for _ in range(3)))
    ids = [call.id for said in answers for choice in said.choices for call in choice.message.tool_calls]
    step("async, n", len(set(ids)) == len(ids) == 6, ids)


def anthropic_tour(url: str) -> None:
    import anthropic

    client = anthropic.Anthropic(base_url=url, api_key="x", max_retries=0, _strict_response_validation=True)
    mark = {"type": "ephemeral", "ttl": "1h"}
    system = [{"type": "text", "text": "Be brief. " * 20, "cache_control": mark}]
    tool = {"name": "weather", "description": "of a city", "input_schema": WEATHER}
    how = {"model": MODEL, "system": system, "tools": [tool], "max_tokens": 150, "messages": ASKED}
    warmed = client.messages.create(**{**how, "max_tokens": 0})
    step("prewarm", warmed.content == [] and warmed.usage.output_tokens == 0)
    forced = {"type": "any", "disable_parallel_tool_use": True}
    said = client.messages.create(**how, tool_choice=forced, diagnostics={"previous_message_id": None})
    (use,) = said.content
    step("any", said.stop_reason == "tool_use" and use.type == "tool_use" and use.input["days"] >= 1, said)
    step("usage", said.usage.cache_read_input_tokens > 50, said.usage)
    with client.messages.stream(**how, tool_choice={"type": "tool", "name": "weather"}) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        (streamed,) = stream.get_final_message().content
    step("stream of a call", streamed.input.keys() == WEATHER["properties"].keys(), streamed)
    step("and its deltas", json.loads("".join(pieces)) == streamed.input and len(pieces) > 2, pieces)
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "rain", "cache_control": {"type": "ephemeral"}}
    history = [
        *ASKED,
        {"role": "assistant", "content": [use.model_dump(exclude_none=True)]},
        {"role": "user", "content": [result]},
    ]
    before = {"previous_message_id": said.id}
    again = client.messages.create(**{**how, "messages": history}, diagnostics=before)
    num_before = said.usage.input_tokens + said.usage.cache_read_input_tokens
    step("a tool's result", again.usage.cache_read_input_tokens >= 0.95 * num_before, again.usage)
    step("diagnostics of a hit", again.diagnostics is None, again)
    other = {**how, "system": "Be long. " * 20, "messages": history}
    missed = client.messages.create(**other, diagnostics=before).diagnostics.cache_miss_reason
    step("diagnostics of a miss", missed.type == "system_changed" and missed.cache_missed_input_tokens > 0, missed)
    count = client.messages.count_tokens(model=MODEL, messages=ASKED, tools=[tool]).input_tokens
    step("count_tokens", count > client.messages.count_tokens(model=MODEL, messages=ASKED).input_tokens)
    with client.messages.stream(model=MODEL, max_tokens=20, messages=ASKED) as stream:
        text = "".join(stream.text_stream)
        step("text_stream", text and stream.get_final_message().content[0].text == text)
    _agents_turn(client, tool)
    _messages_parsed(client)
    _tool_runner(client, forced)
    error = refused(
        "a bad request", anthropic.BadRequestError, lambda: client.messages.create(**{**how, "max_tokens": -1})
    )
    step("and its field", "max_tokens" in str(error))
    refused("no such model", anthropic.NotFoundError, lambda: client.messages.create(**{**how, "model": "none"}))


def _agents_turn(client: Any, tool: dict[str, Any]) -> None:
    """What Claude Code has: notes of the system, found tools, tools by their kinds, more tokens than there are."""
    find = {"name": "find", "input_schema": {"type": "object"}}
    found = [{"type": "tool_reference", "tool_name": "weather"}]
    typed = [{"type": "bash_20250124", "name": "bash"}, {"type": "web_search_20250305", "name": "web_search"}]
    said = [
        *ASKED,
        {"role": "system", "content": "Agents: reader."},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "find", "input": {}}]},
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "t1",
                    "content": found,
                }
            ],
        },
        {"role": "system", "content": [{"type": "text", "text": "Be quick.", "cache_control": {"type": "ephemeral"}}]},
    ]
    how = {"model": MODEL, "messages": said, "tools": [find, *typed, {**tool, "defer_loading": True}]}
    how["thinking"] = {"type": "enabled", "budget_tokens": 1024}
    raw = client.messages.with_raw_response.create(
        **how, max_tokens=16_000, tool_choice={"type": "any", "disable_parallel_tool_use": True}
    )
    (use,) = raw.parse().content
    step("an agent's turn", use.name in ("find", "bash", "weather"), use)
    step("as many tokens as there are", int(raw.headers["x-mneme-max-tokens"]) > 0, raw.headers)
    ignored = raw.headers["x-mneme-ignored-fields"].split(", ")
    step("what is not heeded", {"thinking", "tools.web_search_20250305"} <= set(ignored), ignored)
    usage = raw.parse().usage
    counted = client.messages.count_tokens(**how).input_tokens
    total = usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens
    step("and its count", counted == total, (counted, usage))


def _messages_parsed(client: Any) -> None:
    """Its SDK sends no bounds of strings and numbers, so that only a type without any is sure to be met."""
    from pydantic import BaseModel

    class Warmth(BaseModel):
        city: Literal["Rome", "Oslo"]
        is_warm: bool

    how = {"model": MODEL, "max_tokens": MAX_TOKENS, "messages": ASKED, "output_format": Warmth}
    parsed = client.messages.parse(**how)
    step("parse", isinstance(parsed.parsed_output, Warmth), parsed)
    with client.messages.stream(**how) as stream:
        step("stream and parse", isinstance(stream.get_final_message().parsed_output, Warmth))


def _tool_runner(client: Any, forced: dict[str, Any]) -> None:
    """Runs a tool in a loop. By itself it sends only what is new of a thread, and all when it is told to."""
    import anthropic

    if not hasattr(anthropic, "beta_tool"):
        return
    called: list[str] = []

    @anthropic.beta_tool(input_schema=WEATHER)
    def weather(city: str, days: int) -> str:
        """Return the weather."""
        called.append(city)
        return f"rain for {days}"

    how = {"model": MODEL, "max_tokens": 150, "messages": ASKED, "tool_choice": forced, "tools": [weather]}
    turns = list(client.beta.messages.tool_runner(**how, max_iterations=3))
    step("tool_runner", [turn.stop_reason for turn in turns] == ["tool_use"] * 3 and len(called) >= 2, turns)
    sizes = [
        turn.usage.input_tokens + turn.usage.cache_read_input_tokens + turn.usage.cache_creation_input_tokens
        for turn in turns
    ]
    step("and its history", sizes == sorted(set(sizes)), sizes)


def langchain_tour(url: str) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    own = weather_type()
    called: list[str] = []

    @tool(args_schema=own)
    def weather(city: str, days: int) -> str:
        """Return the weather."""
        called.append(city)
        return f"rain in {city} for {days}"

    model = ChatOpenAI(base_url=f"{url}/v1", api_key="x", model=MODEL, max_tokens=MAX_TOKENS, max_retries=0, seed=1)
    text = model.invoke("Hello").content
    step("invoke", text)
    step("stream", "".join(chunk.content for chunk in model.stream("Hello")) == text)
    forced = model.bind_tools([weather], tool_choice="any", parallel_tool_calls=False)
    said = forced.invoke("Weather in Rome?")
    step("bind_tools", said.tool_calls[0]["name"] == "weather" and not said.invalid_tool_calls, said)
    pieces = list(forced.stream("Weather in Rome?"))
    whole = pieces[0]
    for piece in pieces[1:]:
        whole = whole + piece
    (call,) = whole.tool_calls
    step("stream of a call", own.model_validate(call["args"]) and not whole.invalid_tool_calls, whole)
    message = weather.invoke(said.tool_calls[0])
    step("the tool", isinstance(message, ToolMessage))
    told = model.bind_tools([weather], tool_choice="none").invoke([HumanMessage("Weather in Rome?"), said, message])
    step("a tool's result", told.content and not told.tool_calls, told)
    for method in ("function_calling", "json_schema"):
        parsed = model.with_structured_output(own, method=method).invoke("Weather in Rome?")
        step(f"structured output by {method}", isinstance(parsed, own), parsed)
    responses = ChatOpenAI(
        base_url=f"{url}/v1", api_key="x", model=MODEL, max_tokens=150, max_retries=0, use_responses_api=True
    )
    said = responses.bind_tools([weather], tool_choice="any", parallel_tool_calls=False).invoke("Weather in Rome?")
    step("bind_tools by responses", said.tool_calls[0]["name"] == "weather" and not said.invalid_tool_calls, said)
    _langchain_agent(model, weather, called)


def _langchain_agent(model: Any, weather: Any, called: list[str]) -> None:
    from langchain.agents import create_agent
    from langchain.agents.middleware import wrap_model_call

    @wrap_model_call
    def calls_once(request: Any, handler: Any) -> Any:
        has_called = any(message.type == "tool" for message in request.messages)
        return handler(request.override(tool_choice="none" if has_called else "any"))

    called.clear()
    agent = create_agent(model, [weather], middleware=[calls_once])
    said = agent.invoke({"messages": [("user", "Weather in Rome?")]})["messages"]
    kinds = [message.type for message in said]
    step("an agent calls its tool, then answers", called and kinds[:2] == ["human", "ai"], kinds)
    step("and has its result", "tool" in kinds and kinds[-1] == "ai" and not said[-1].tool_calls, kinds)


def agents_tour(url: str) -> None:
    import openai
    from agents import (
        Agent,
        ModelSettings,
        OpenAIChatCompletionsModel,
        OpenAIResponsesModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )
    from pydantic import BaseModel, Field

    set_tracing_disabled(True)
    called: list[str] = []

    class City(BaseModel):
        name: str = Field(max_length=12)

    @function_tool(is_enabled=lambda *_: not called)  # this model would call it on and on
    def weather(city: City) -> str:
        """Return the weather of a city."""
        called.append(city.name)
        return "rain"

    class Answer(BaseModel):
        days: int = Field(ge=1, le=9)

    async def by(kind: Any, client: Any) -> None:
        model, name = kind(model=MODEL, openai_client=client), kind.__name__
        how = ModelSettings(max_tokens=MAX_TOKENS, temperature=0)
        once = replace(how, tool_choice="required", parallel_tool_calls=False)
        asked = {"instructions": "Be brief.", "model": model}
        typed = Agent(name="b", **asked, output_type=Answer, model_settings=how)
        agent = Agent(name="a", **asked, tools=[weather], model_settings=once)
        called.clear()
        result = await Runner.run(agent, "Weather in Rome?", max_turns=2)
        step(f"{name}: an agent calls its tool", len(called) == 1 and "rain" in map(_output, result.new_items), result)
        step(f"{name}: then answers", result.final_output, result)
        called.clear()
        run = Runner.run_streamed(agent, "Weather in Rome?", max_turns=2)
        kinds = [event.type async for event in run.stream_events()]
        step(f"{name}: the same, streamed", len(called) == 1 and run.final_output, kinds)
        step(f"{name}: event by event", kinds.count("raw_response_event") > 10, kinds)
        result = await Runner.run(typed, "For how many days?", max_turns=1)
        step(f"{name}: an answer of a type", isinstance(result.final_output, Answer), result.final_output)
        run = Runner.run_streamed(typed, "For how many days?", max_turns=1)
        async for _ in run.stream_events():
            pass
        step(f"{name}: an answer of a type, streamed", isinstance(run.final_output, Answer), run.final_output)

    async def tour() -> None:
        options: dict[str, Any] = {"max_retries": 0, "_strict_response_validation": True}
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", **options) as client:
            for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
                await by(kind, client)

    asyncio.run(tour())


def _output(item: Any) -> Any:
    """What a tool returned, of an item of a run."""
    return getattr(item, "output", None)


def instructor_tour(url: str) -> None:
    import instructor

    own, plain = weather_type(), openai_client(url)
    how = {"model": MODEL, "messages": ASKED, "response_model": own, "max_retries": 0, "max_tokens": MAX_TOKENS}
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS_STRICT):
        found = instructor.from_openai(plain, mode=mode).chat.completions.create(**how)
        step(f"{mode}", isinstance(found, own), found)
    parts = list(instructor.from_openai(plain, mode=instructor.Mode.TOOLS).chat.completions.create_partial(**how))
    step("partial", len(parts) > 1 and own.model_validate(parts[-1].model_dump()), parts)


def litellm_tour(url: str) -> None:
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    import litellm

    own = weather_type()
    how = {"messages": ASKED, "max_tokens": 150, "num_retries": 0, "api_key": "x"}
    for provider, base in (("openai", f"{url}/v1"), ("hosted_vllm", f"{url}/v1"), ("anthropic", url)):
        asked = {"model": f"{provider}/{MODEL}", "api_base": base, **how, "tools": [TOOL], **ONE_CALL}
        said = litellm.completion(**asked)
        (call,) = said.choices[0].message.tool_calls
        step(f"{provider}: required", own.model_validate_json(call.function.arguments), said)
        whole = litellm.stream_chunk_builder(list(litellm.completion(**asked, stream=True)))
        (call,) = whole.choices[0].message.tool_calls
        step(f"{provider}: stream of a call", own.model_validate_json(call.function.arguments), whole)
        history = [
            *ASKED,
            {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]},
            {"role": "tool", "tool_call_id": call.id, "content": "rain"},
        ]
        again = litellm.completion(**{**asked, "messages": history, "tool_choice": "auto"})
        step(f"{provider}: a tool's result", again.usage.prompt_tokens > said.usage.prompt_tokens, again.usage)
    found = litellm.embedding(
        model=f"hosted_vllm/{MODEL}", api_base=f"{url}/v1", input=["A fox."], api_key="x", encoding_format="float"
    )
    step("embedding", len(found.data[0]["embedding"]) > 16)


def pages_tour(url: str) -> None:
    """Bodies as chat pages send them, by their public sources: Open WebUI's and LibreChat's."""
    import httpx

    session = {"session_id": "s", "chat_id": "c", "id": "m", "background_tasks": {"title_generation": True}}
    webui = {"stream": True, "model": MODEL, "messages": ASKED, "stream_options": {"include_usage": True}}
    pages = {
        "Open WebUI": {**webui, "params": {}, "features": {"web_search": False}, "variables": {}, **session},
        "Open WebUI with tools": {**webui, "tools": [TOOL], "metadata": {"chat_id": "c"}},
        "LibreChat": {
            **{"model": MODEL, "messages": ASKED, "stream": True, "user": "65f0"},
            **{"temperature": 1, "top_p": 1, "presence_penalty": 0, "frequency_penalty": 0, "max_tokens": 40},
        },
        "LibreChat's agent": {
            **{"model": MODEL, "messages": [{"role": "system", "content": "Today is Friday."}, *ASKED], "stream": True},
            **{
                "tools": [TOOL],
                "parallel_tool_calls": True,
                "max_completion_tokens": 40,
                "stream_options": {"include_usage": True},
            },
        },
    }
    with httpx.Client(base_url=f"{url}/v1", headers={"Authorization": "Bearer x"}, timeout=120) as http:
        step("models", http.get("/models").json()["data"][0]["id"] == MODEL)
        for name, body in pages.items():
            answer = http.post("/chat/completions", json={"max_tokens": 40, **body})
            step(name, answer.status_code == 200, answer.text)
            lines = answer.text.strip().split("\n\n")
            chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
            step("and its events", lines[-1] == "data: [DONE]" and chunks[0]["choices"][0]["delta"], lines[-1])
        title = {"model": MODEL, "messages": ASKED, "stream": False, "max_completion_tokens": 40}
        said = http.post("/chat/completions", json={**title, "metadata": {"task": "title_generation"}})
        step("a title", said.json()["choices"][0]["message"]["content"], said.text)


TOURS: dict[str, Callable[[str], None]] = {  # by package
    "openai": openai_tour,
    "anthropic": anthropic_tour,
    "langchain-openai": langchain_tour,
    "openai-agents": agents_tour,
    "instructor": instructor_tour,
    "litellm": litellm_tour,
    "httpx": pages_tour,
}


def main(url: str = "http://127.0.0.1:8000", *packages: str) -> int:
    report: dict[str, Any] = {}
    for name in packages or TOURS:
        STEPS.clear()
        try:
            TOURS[name](url.rstrip("/"))
            report[f"{name} {version(name)}"] = {"ok": True, "steps": list(STEPS)}
        except ModuleNotFoundError as error:
            report[name] = {"ok": None, "not_installed": error.name}
        except Exception as error:
            traceback.print_exc()
            found = {"ok": False, "steps": list(STEPS), "error": f"{type(error).__name__}: {error}"[:500]}
            report[f"{name} {version(name)}"] = found
    sys.stdout.write(f"{json.dumps(report)}\n")
    return any(each["ok"] is False for each in report.values())


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
