"""Tours of real SDKs against a running server: what a program that uses them would do, checked as it would see it.

    python benchmarks/clients/sdks.py --url http://127.0.0.1:8000 [--only openai anthropic ...]

To be run by a Python that has the SDKs (`pip install openai anthropic langchain-openai langchain openai-agents
instructor litellm`); one that is not installed is skipped and named. Calls are forced where the model need not be good
at them, so mneme-tiny serves. Bound: nothing is measured. Ends in one line of JSON.
"""

import argparse
import asyncio
import json
import os
import sys
import traceback
from collections.abc import Callable

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
ASKED = [{"role": "user", "content": "What is the weather in Rome?"}]
MODEL = "mneme-tiny"
STEPS: list[str] = []


def step(name: str, is_right: object, shown: object = "") -> None:
    if not is_right:
        raise AssertionError(f"{name}: {shown!r}")
    STEPS.append(name)


def openai_tour(url: str) -> None:
    import openai
    from pydantic import BaseModel, Field

    class Weather(BaseModel, extra="forbid"):
        city: str = Field(max_length=12)
        days: int = Field(ge=1, le=9)

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0)
    how = {"model": MODEL, "messages": ASKED, "max_tokens": 150, "seed": 1}
    step("models", client.models.list().data[0].id == MODEL)
    said = client.chat.completions.create(**how)
    step("chat", said.choices[0].message.content and said.usage.prompt_tokens_details.cached_tokens >= 0)
    said = client.chat.completions.create(**how, tools=[TOOL], tool_choice="required", parallel_tool_calls=False)
    (call,) = said.choices[0].message.tool_calls
    step("required", said.choices[0].finish_reason == "tool_calls" and json.loads(call.function.arguments)["days"])
    named = {"type": "function", "function": {"name": "weather"}}
    with client.chat.completions.stream(**how, tools=[TOOL], tool_choice=named) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion().choices[0].message.tool_calls[0]
    step("stream of a call", "tool_calls.function.arguments.delta" in kinds and final.function.name == "weather", kinds)
    history = [
        *ASKED,
        {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": "rain"},
    ]
    again = client.chat.completions.create(**{**how, "messages": history}, tools=[TOOL], tool_choice="auto")
    step("a tool's result", again.choices[0].finish_reason in ("stop", "length", "tool_calls"))
    step("and its cache", again.usage.prompt_tokens_details.cached_tokens > 50, again.usage)
    parsed = client.chat.completions.parse(**how, response_format=Weather)
    step("parse", isinstance(parsed.choices[0].message.parsed, Weather))
    tool = openai.pydantic_function_tool(Weather)
    parsed = client.chat.completions.parse(**how, tools=[tool], tool_choice="required", parallel_tool_calls=False)
    step("parse of a call", isinstance(parsed.choices[0].message.tool_calls[0].function.parsed_arguments, Weather))
    with client.chat.completions.stream(**how, response_format=Weather) as stream:
        for _ in stream:
            pass
        step("stream and parse", isinstance(stream.get_final_completion().choices[0].message.parsed, Weather))
    step("completions", client.completions.create(model=MODEL, prompt="The", max_tokens=5).choices[0].text)
    try:
        client.chat.completions.create(**how, tools=[TOOL], tool_choice={**named, "function": {"name": "none"}})
    except openai.BadRequestError as error:
        step("a bad request", error.param == "tool_choice.function.name", error)
    asyncio.run(_openai_async(url, how))


async def _openai_async(url: str, how: dict) -> None:
    import openai

    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
        runs = [client.chat.completions.create(**how, tools=[TOOL], tool_choice="required", n=2) for _ in range(3)]
        answers = await asyncio.gather(*runs)
    ids = [call.id for said in answers for choice in said.choices for call in choice.message.tool_calls]
    step("async, n", len(set(ids)) == len(ids) >= 6)


def anthropic_tour(url: str) -> None:
    import anthropic

    client = anthropic.Anthropic(base_url=url, api_key="x", max_retries=0)
    mark = {"type": "ephemeral", "ttl": "1h"}
    system = [{"type": "text", "text": "Be brief. " * 20, "cache_control": mark}]
    tool = {"name": "weather", "description": "of a city", "input_schema": WEATHER}
    how = {"model": MODEL, "system": system, "tools": [tool], "max_tokens": 150, "messages": ASKED}
    warmed = client.messages.create(**{**how, "max_tokens": 0})
    step("prewarm", warmed.content == [] and warmed.usage.output_tokens == 0)
    forced = {"type": "any", "disable_parallel_tool_use": True}
    said = client.messages.create(**how, tool_choice=forced)
    (use,) = said.content
    step("any", said.stop_reason == "tool_use" and use.type == "tool_use" and use.input["days"] >= 1, said)
    step("usage", said.usage.cache_read_input_tokens > 50, said.usage)
    with client.messages.stream(**how, tool_choice={"type": "tool", "name": "weather"}) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_message()
    step("stream of a call", "input_json" in kinds and final.content[0].input["city"] is not None, kinds)
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "rain", "cache_control": {"type": "ephemeral"}}
    history = [
        *ASKED,
        {"role": "assistant", "content": [use.model_dump(exclude_none=True)]},
        {"role": "user", "content": [result]},
    ]
    told = {"previous_message_id": said.id}
    again = client.messages.create(**{**how, "messages": history}, extra_body={"diagnostics": told})
    step(
        "a tool's result",
        again.usage.cache_read_input_tokens >= 0.8 * (said.usage.input_tokens + said.usage.cache_read_input_tokens),
    )
    step("diagnostics", again.diagnostics is not None, again)
    count = client.messages.count_tokens(model=MODEL, messages=ASKED, tools=[tool]).input_tokens
    step("count_tokens", count > client.messages.count_tokens(model=MODEL, messages=ASKED).input_tokens)
    with client.messages.stream(model=MODEL, max_tokens=20, messages=ASKED) as stream:
        text = "".join(stream.text_stream)
        step("text_stream", stream.get_final_message().content[0].text == text)
    try:
        client.messages.create(**{**how, "max_tokens": -1})
    except anthropic.BadRequestError as error:
        step("a bad request", "max_tokens" in str(error))
    try:
        client.messages.create(**{**how, "model": "none"})
    except anthropic.NotFoundError:
        step("no such model", True)


def langchain_tour(url: str) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from pydantic import BaseModel, Field

    class Weather(BaseModel, extra="forbid"):
        """The weather."""

        city: str = Field(max_length=12)
        days: int = Field(ge=1, le=9)

    @tool(args_schema=Weather)
    def weather(city: str, days: int) -> str:
        """Return the weather."""
        return f"rain in {city} for {days}"

    model = ChatOpenAI(base_url=f"{url}/v1", api_key="x", model=MODEL, max_tokens=600, max_retries=0, seed=1)
    step("invoke", model.invoke("Hello").content is not None)
    step("stream", "".join(chunk.content for chunk in model.stream("Hello")) is not None)
    forced = model.bind_tools([weather], tool_choice="any", parallel_tool_calls=False)
    said = forced.invoke("Weather in Rome?")
    step("bind_tools", said.tool_calls[0]["name"] == "weather" and not said.invalid_tool_calls, said)
    pieces = list(forced.stream("Weather in Rome?"))
    whole = pieces[0]
    for piece in pieces[1:]:
        whole = whole + piece
    step("stream of a call", whole.tool_calls[0]["args"]["days"] >= 1, whole)
    message = weather.invoke(said.tool_calls[0])
    step("the tool", isinstance(message, ToolMessage))
    model.bind_tools([weather]).invoke([HumanMessage("Weather in Rome?"), said, message])
    for method in ("function_calling", "json_schema"):
        parsed = model.with_structured_output(Weather, method=method).invoke("Weather in Rome?")
        step(f"structured output by {method}", isinstance(parsed, Weather), parsed)
    try:
        from langchain.agents import create_agent
    except ImportError:
        return
    agent = create_agent(model, [weather])
    answer = agent.invoke({"messages": [("user", "Weather in Rome?")]})
    step("an agent", answer["messages"][-1].type == "ai")


def agents_tour(url: str) -> None:
    import openai
    from agents import (
        Agent,
        MaxTurnsExceeded,
        ModelSettings,
        OpenAIChatCompletionsModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )
    from pydantic import BaseModel, Field

    set_tracing_disabled(True)
    called: list[str] = []

    class City(BaseModel):
        name: str = Field(max_length=12)

    @function_tool
    def weather(city: City) -> str:
        """Return the weather of a city."""
        called.append(city.name)
        return "rain"

    class Answer(BaseModel):
        days: int = Field(ge=1, le=9)

    async def tour() -> None:
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0)
        model = OpenAIChatCompletionsModel(model=MODEL, openai_client=client)
        settings = ModelSettings(tool_choice="required", parallel_tool_calls=False, max_tokens=150)
        agent = Agent(name="a", instructions="Be brief.", tools=[weather], model=model, model_settings=settings)
        result = await Runner.run(agent, "Weather in Rome?", max_turns=4)
        step("an agent calls its tool, then answers", called and result.final_output is not None, result)
        of_type = Agent(
            name="b", tools=[weather], output_type=Answer, model=model, model_settings=ModelSettings(max_tokens=150)
        )
        run = Runner.run_streamed(of_type, "Weather in Rome?", max_turns=6)
        try:
            async for _ in run.stream_events():
                pass
        except MaxTurnsExceeded:  # this model may call on and on
            return
        step("an answer of a type, streamed", isinstance(run.final_output, Answer), run.final_output)

    asyncio.run(tour())


def instructor_tour(url: str) -> None:
    import instructor
    import openai
    from pydantic import BaseModel, Field

    class Weather(BaseModel, extra="forbid"):
        city: str = Field(max_length=12)
        days: int = Field(ge=1, le=9)

    plain = openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0)
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS_STRICT):
        client = instructor.from_openai(plain, mode=mode)
        found = client.chat.completions.create(
            model=MODEL, messages=ASKED, response_model=Weather, max_retries=0, max_tokens=150
        )
        step(f"{mode}", isinstance(found, Weather), found)
    client = instructor.from_openai(plain, mode=instructor.Mode.TOOLS)
    found = client.chat.completions.create_partial(
        model=MODEL, messages=ASKED, response_model=Weather, max_retries=0, max_tokens=150
    )
    parts = [each for each in found if isinstance(each, BaseModel)]
    step("partial", parts, found)


def litellm_tour(url: str) -> None:
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    import litellm

    how = {"messages": ASKED, "max_tokens": 150, "num_retries": 0, "api_key": "x"}
    for provider, base in (("openai", f"{url}/v1"), ("hosted_vllm", f"{url}/v1"), ("anthropic", url)):
        forced = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
        said = litellm.completion(model=f"{provider}/{MODEL}", api_base=base, **how, **forced)
        (call,) = said.choices[0].message.tool_calls
        step(f"{provider}: required", json.loads(call.function.arguments)["days"] >= 1, said)
        chunks = list(litellm.completion(model=f"{provider}/{MODEL}", api_base=base, stream=True, **how, **forced))
        whole = litellm.stream_chunk_builder(chunks)
        step(
            f"{provider}: stream",
            json.loads(whole.choices[0].message.tool_calls[0].function.arguments)["city"] is not None,
        )


TOURS: dict[str, Callable[[str], None]] = {
    "openai": openai_tour,
    "anthropic": anthropic_tour,
    "langchain-openai": langchain_tour,
    "openai-agents": agents_tour,
    "instructor": instructor_tour,
    "litellm": litellm_tour,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--only", nargs="*", choices=list(TOURS), default=list(TOURS))
    arguments = parser.parse_args()
    report: dict[str, object] = {}
    for name in arguments.only:
        STEPS.clear()
        try:
            TOURS[name](arguments.url.rstrip("/"))
            report[name] = {"ok": True, "steps": list(STEPS)}
        except ModuleNotFoundError as error:
            report[name] = {"ok": None, "not_installed": error.name}
        except Exception as error:
            traceback.print_exc()
            report[name] = {"ok": False, "steps": list(STEPS), "error": f"{type(error).__name__}: {error}"[:500]}
    print(json.dumps(report))
    return any(each["ok"] is False for each in report.values())


if __name__ == "__main__":
    sys.exit(main())
