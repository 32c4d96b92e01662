"""/v1/responses through the `openai` client: a tour of one cluster, another replica after a kill, the next cluster."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import pytest
from openai import BadRequestError, NotFoundError, OpenAI
from pydantic import BaseModel, Field

from tests.e2e.replica_processes import cpu_seconds
from tests.e2e.server_process import SERVE, ServerProcess, free_port

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

NUM_TRIES = 20  # with pauses of seconds: until Ray has seen that a replica is gone, sessions are a 503
MODEL = "mneme-tiny"
STORY = "Once upon a time there was a small library in which every book could remember its reader. " * 20
INSTRUCTIONS = "Answer in one sentence."
Promises = dict[str, bool]  # by what they say


class Animal(BaseModel):
    name: Annotated[str, Field(max_length=12)]
    legs: Annotated[int, Field(ge=0, le=100)]


class City(BaseModel):
    name: Annotated[str, Field(max_length=20)]


def strict_client(url: str) -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, _strict_response_validation=True)


def say(client: OpenAI, text: Any, **options: Any) -> Any:
    asked = {"model": MODEL, "instructions": INSTRUCTIONS, "max_output_tokens": 24, "temperature": 0, **options}
    return client.responses.create(input=text, **asked)


def is_missing(client: OpenAI, response_id: str) -> bool:
    try:
        client.responses.retrieve(response_id)
    except NotFoundError as error:
        return error.code == "response_not_found"
    return False


def begin(client: OpenAI) -> tuple[Promises, Any]:
    """Everything that one server promises; a chain's last response."""
    kept: Promises = {}
    first = say(client, STORY, metadata={"chapter": "1"})
    kept["retrieve gives what create gave"] = client.responses.retrieve(first.id) == first
    second = say(client, "And then?", previous_response_id=first.id)
    past = first.usage.total_tokens
    kept["a chain computes only what is new"] = second.usage.input_tokens_details.cached_tokens >= past - 1
    kept["cached and written tokens are the input"] = second.usage.input_tokens == (
        second.usage.input_tokens_details.cached_tokens + second.usage.input_tokens_details.cache_write_tokens
    )
    events = list(say(client, "And who read it?", previous_response_id=second.id, stream=True))
    third = events[-1].response
    kept["a stream's deltas are its answer"] = third.output_text == "".join(
        event.delta for event in events if event.type == "response.output_text.delta"
    )
    kept["events are numbered"] = [event.sequence_number for event in events] == list(range(len(events)))
    again = say(client, "And who read it?", previous_response_id=second.id)
    kept["a branch of the same past says the same"] = again.output_text == third.output_text
    items = list(client.responses.input_items.list(third.id, order="asc", limit=2))
    kept["input_items has the whole past, page by page"] = [item.content[0].text for item in items] == [
        *(STORY, first.output_text, "And then?", second.output_text, "And who read it?"),
    ]
    parsed = client.responses.parse(model=MODEL, input="A cat.", text_format=Animal, temperature=0)
    with client.responses.stream(model=MODEL, input="A cat.", text_format=Animal, temperature=0) as stream:
        final = stream.until_done().get_final_response()
    kept["parse and the stream helper give a pydantic model"] = (
        isinstance(parsed.output_parsed, Animal) and final.output_parsed == parsed.output_parsed
    )
    tool = {"type": "function", "name": "weather", "parameters": City.model_json_schema(), "strict": True}
    question = say(
        client,
        "How warm is it in Oslo?",
        tools=[tool],
        tool_choice={"type": "function", "name": "weather"},
        max_output_tokens=200,
    )
    call = question.output[-1]
    City.model_validate_json(call.arguments)
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "12 degrees"}
    answer = say(client, [output], tools=[tool], tool_choice="none", previous_response_id=question.id)
    kept["a forced call is valid, and its output goes on from it"] = (
        answer.usage.input_tokens_details.cached_tokens >= question.usage.total_tokens - 1
    )
    compared = {"comparison_response_id": question.id}
    changed = say(client, "How warm is it in Rome?", prompt_cache_options=compared).prompt_cache_diagnostics
    kept["diagnostics say that tools changed"] = (changed.type, changed.reason) == ("cache_miss", "tools_changed")
    kept["a limit makes an answer incomplete"] = say(client, "Go on.", max_output_tokens=2).status == "incomplete"
    kept["store: false leaves nothing"] = is_missing(client, say(client, "Forget this.", store=False).id)
    client.responses.delete(first.id)
    kept["a deleted response is gone, those behind it stay"] = is_missing(client, first.id) and not is_missing(
        client, third.id
    )
    for name, call in {
        "background is refused": lambda: say(client, "Later.", background=True),
        "nothing can be cancelled": lambda: client.responses.cancel(third.id),
    }.items():
        try:
            call()
            kept[name] = False
        except BadRequestError:
            kept[name] = True
    return kept, third


def go_on(client: OpenAI, before: Any) -> Promises:
    """What a server promises of a response that another one made."""
    kept: Promises = {}
    kept["after a restart: retrieve"] = client.responses.retrieve(before.id) == before
    items = client.responses.input_items.list(before.id)
    kept["after a restart: input_items"] = len(items.data) == 5
    after = say(client, "Why?", previous_response_id=before.id)
    kept["after a restart: the chain goes on from its tokens"] = (
        after.usage.input_tokens > before.usage.total_tokens
        and after.usage.input_tokens_details.cached_tokens >= 0.95 * before.usage.input_tokens
    )
    client.responses.delete(before.id)
    kept["after a restart: delete"] = is_missing(client, before.id) and not is_missing(client, after.id)
    return kept


def settings(folder: str) -> list[str]:
    disk = (f"cache.disk.folder={folder}", f"cache.disk.capacity_bytes={64 << 20}", "cache.load=always")
    return ["--replicas", "2", *(part for each in disk for part in ("--set", each))]


@contextmanager
def served(folder: Path) -> Iterator[tuple[ServerProcess, OpenAI]]:
    process = ServerProcess([*SERVE, MODEL, "--port", str(free_port()), *settings(str(folder))])
    try:
        with strict_client(process.await_ready()) as client:
            yield process, client
    finally:
        process.discard()


def test_responses_outlive_their_replica_and_their_cluster(tmp_path: Path) -> None:
    with served(tmp_path) as (process, client):
        before = cpu_seconds(process)
        kept, last = begin(client)
        assert all(kept.values()), kept
        busy = cpu_seconds(process)
        os.kill(max(busy, key=lambda pid: busy[pid] - before[pid]), signal.SIGKILL)
        moved = say(client.with_options(max_retries=NUM_TRIES), "Why?", previous_response_id=last.id)
        assert moved.usage.input_tokens > last.usage.total_tokens
        process.stop()
    with served(tmp_path) as (_, client):
        kept = go_on(client, last)
        assert all(kept.values()), kept
        assert client.responses.retrieve(moved.id) == moved
