"""OpenAI's Responses API: what it makes of a body, what it answers, what it keeps, and for whom."""

from __future__ import annotations

import json
from typing import Any

import pytest
from starlette.testclient import TestClient

from mneme.errors import Overloaded, ReplicaUnavailable
from tests.cluster.api_fixtures import CHAT, RENDERED, TOKENIZER, api
from tests.cluster.fake_engine_client import SENTENCE, FakeEngineClient
from tests.cluster.http.agents.test_tools import CALLS, OTHER, TEMPLATE, THINKS, TOOL
from tests.cluster.real_engines import KEYS, ONE, TWO
from tests.replicas.tiny_tokenizer import tiny_tokenizer

BODY: dict[str, Any] = {"model": "tiny", "input": "the fox"}
SYSTEM = "<|im_start|>system\nbe brief<|im_end|>\n"
TOOLS = {"tools": [{"type": "function", **each["function"]} for each in (TOOL, OTHER)]}
NUM_PROMPT = len(TOKENIZER.encode_rendered(RENDERED))
NUM_OUTPUT = len(TOKENIZER.encode(SENTENCE, add_special_tokens=False))


def create(client: TestClient, **changes: Any) -> dict[str, Any]:
    response = client.post("/v1/responses", json={**BODY, **changes})
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def streamed(client: TestClient, **changes: Any) -> list[dict[str, Any]]:
    """A stream's events, numbered in order, each named as its data says."""
    response = client.post("/v1/responses", json={**BODY, "stream": True, **changes})
    found = []
    for number, block in enumerate(response.text.strip().split("\n\n")):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
        assert found[-1]["sequence_number"] == number
    return found


def text_of(response: dict[str, Any]) -> str:
    return "".join(part["text"] for item in response["output"] for part in item["content"])


def test_a_whole_response(client: TestClient) -> None:
    found = create(client, instructions="be brief", metadata={"a": "b"}, temperature=0.5)
    assert found["id"].startswith("resp_")
    assert (found["object"], found["status"], found["error"]) == ("response", "completed", None)
    assert text_of(found) == SENTENCE
    assert (found["instructions"], found["metadata"], found["temperature"]) == ("be brief", {"a": "b"}, 0.5)
    num_prompt = len(TOKENIZER.encode_rendered(SYSTEM + RENDERED))
    assert found["usage"] == {
        "input_tokens": num_prompt,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": num_prompt},
        "output_tokens": NUM_OUTPUT,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": num_prompt + NUM_OUTPUT,
    }


def test_a_stream_says_the_same(client: TestClient) -> None:
    told = streamed(client)
    kinds = [each["type"].removeprefix("response.") for each in told]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert "".join(each["delta"] for each in told[4:-4]) == told[-4]["text"] == SENTENCE
    last = told[-1]["response"]
    assert text_of(last) == SENTENCE
    assert client.get(f"/v1/responses/{last['id']}").json() == last
    assert told[0]["response"] == {**last, "status": "in_progress", "output": [], "usage": None, "completed_at": None}


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_at_its_limit_is_incomplete(client: TestClient, stream: bool) -> None:
    options = {"max_output_tokens": 3}
    found = streamed(client, **options)[-1]["response"] if stream else create(client, **options)
    assert (found["status"], found["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert found["output"][0]["status"] == "incomplete"


def test_what_the_engine_is_asked_for(engine: FakeEngineClient, client: TestClient) -> None:
    items = [
        {"role": "developer", "content": "be brief"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "the fox"}]},
    ]
    create(client, input=items, temperature=0.5, top_p=0.9, max_output_tokens=100)
    request = engine.requests[0]
    assert request.prompt_text == SYSTEM + RENDERED
    assert (request.sampling.temperature, request.sampling.top_p, request.sampling.max_tokens) == (0.5, 0.9, 100)
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    create(client, text={"format": {"type": "json_schema", "name": "thing", "schema": schema}})
    create(client, **TOOLS, tool_choice={"type": "function", "name": "weather"})
    assert [each.sampling.grammar.kind for each in engine.requests[1:] if each.sampling.grammar] == [
        *("json_schema", "grammar")
    ]
    long = "fox " * 2000  # more than the context has
    assert client.post("/v1/responses", json={**BODY, "input": long}).status_code == 400
    assert create(client, input=long, truncation="auto", max_output_tokens=4)["truncation"] == "auto"


def test_a_chain_appends_to_the_exact_tokens(engine: FakeEngineClient, client: TestClient) -> None:
    first = create(client, instructions="be brief")
    second = create(client, input="and then?", instructions="be brief", previous_response_id=first["id"])
    assert engine.requests[1].append
    kept = len(TOKENIZER.encode_rendered(SYSTEM + RENDERED)) + NUM_OUTPUT
    assert second["usage"]["input_tokens"] > kept
    assert second["previous_response_id"] == first["id"]
    branch = create(client, input="or so?", instructions="be brief", previous_response_id=first["id"])
    assert branch["usage"]["input_tokens"] < second["usage"]["total_tokens"]  # it began where the first one ended


def test_other_instructions_are_not_carried_over(engine: FakeEngineClient, client: TestClient) -> None:
    first = create(client, instructions="be brief")
    create(client, input="and then?", previous_response_id=first["id"])
    request = engine.requests[1]
    assert not request.append
    assert request.prompt_text is not None
    assert request.prompt_text.startswith(f"{RENDERED}{SENTENCE}<|im_end|>\n")
    assert "and then?" in request.prompt_text


def test_calls_and_reasoning_are_items_of_their_own() -> None:
    for stream in (False, True):
        client = api(FakeEngineClient(tiny_tokenizer(THINKS), f"<think>I should look.</think>{CALLS}"))
        told = streamed(client, **TOOLS) if stream else []
        found = told[-1]["response"] if stream else create(client, **TOOLS)
        thought, said, *calls = found["output"]
        assert thought["content"] == [{"type": "reasoning_text", "text": "I should look."}]
        assert said["content"][0]["text"] == "One moment."
        assert [(call["type"], call["name"], call["arguments"]) for call in calls] == [
            ("function_call", "weather", '{"city": "Köln"}'),
            ("function_call", "now", "{}"),
        ]
        assert {item["status"] for item in found["output"]} == {"completed"}
        assert len({item["id"] for item in found["output"]}) == 4
        assert 0 < found["usage"]["output_tokens_details"]["reasoning_tokens"] < found["usage"]["output_tokens"]
        for index, item in enumerate(found["output"] if stream else ()):
            of_item = [each for each in told if each.get("output_index") == index]
            assert of_item[0]["type"] == "response.output_item.added"
            assert of_item[-1] == {**of_item[-1], "type": "response.output_item.done", "item": item}
            whole = next(each for each in of_item if each["type"].endswith(("text.done", "arguments.done")))
            pieces = "".join(each["delta"] for each in of_item if each["type"].endswith(".delta"))
            assert pieces == whole.get("text", whole.get("arguments"))


def test_an_output_is_given_back_by_the_call_s_id() -> None:
    engine = FakeEngineClient(tiny_tokenizer(TEMPLATE), CALLS)
    client = api(engine)
    first = create(client, **TOOLS)
    outputs = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "12 degrees"}
        for item in first["output"]
        if item["type"] == "function_call"
    ]
    second = create(client, input=outputs, previous_response_id=first["id"], **TOOLS)
    assert engine.requests[1].append
    create(client, input=[{"role": "user", "content": "the fox"}, *first["output"], *outputs], **TOOLS)
    sent_again = engine.requests[2]
    assert not sent_again.append
    for request in engine.requests[1:]:
        assert (request.prompt_text or "").count("12 degrees") == 2
    assert (sent_again.prompt_text or "").count('"name": "weather", "arguments": {"city": "Köln"}') == 1
    assert len(sent_again.prompt_token_ids) <= second["usage"]["input_tokens"] + 2


def diagnosed(client: TestClient, compared: str, **changes: Any) -> dict[str, Any]:
    found = create(client, prompt_cache_options={"comparison_response_id": compared}, **changes)
    diagnostics: dict[str, Any] = found["prompt_cache_diagnostics"]
    return diagnostics


@pytest.mark.parametrize("store", [True, False])
def test_diagnostics_say_what_changed_and_where(store: bool, engine: FakeEngineClient, client: TestClient) -> None:
    first = create(client, instructions="be brief")
    same = {"instructions": "be brief", "store": store}
    assert diagnosed(client, first["id"], **same) == {"type": "cache_hit"}
    on = {"input": "and?", "previous_response_id": first["id"]}
    assert diagnosed(client, first["id"], **on, **same) == {"type": "cache_hit"}
    missed = diagnosed(client, first["id"], **{**same, "instructions": "be quick"})
    old, new = (engine.requests[i].prompt_token_ids for i in (0, -1))
    num_same = next(i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b)
    assert missed["reason"] == "instructions_changed"
    assert diagnosed(client, first["id"], **same, input="the dog")["reason"] == "input_changed"
    assert (missed["comparison_reusable_tokens"], missed["cache_missed_tokens"]) == (num_same, len(new) - num_same)
    difference = missed["first_difference"]
    assert difference["token"] == num_same
    assert "be brief<".find(difference["before"][:2]) > 0
    assert difference["now"][:2] in "be quick"
    assert diagnosed(client, "resp_x") == {"type": "comparison_response_not_found"}
    assert create(client)["prompt_cache_diagnostics"] is None


def test_breakpoints_and_times_keep_a_prompt_and_change_no_token(engine: FakeEngineClient, client: TestClient) -> None:
    texts = ["a red fox", "a brown fox"]
    parts: list[dict[str, Any]] = [{"type": "input_text", "text": text} for text in texts]
    create(client, input=[{"role": "user", "content": parts}], store=False)
    parts[0]["prompt_cache_breakpoint"] = {"mode": "explicit", "ttl": "12h"}
    create(client, input=[{"role": "user", "content": parts}], prompt_cache_options={"ttl": "30m"}, store=False)
    plain, marked = engine.requests
    assert marked.prompt_token_ids == plain.prompt_token_ids
    assert not plain.pinned
    kept = {ttl_s: marked.prompt_token_ids[:num_tokens] for num_tokens, ttl_s in marked.pinned}
    assert TOKENIZER.decode(list(kept[43200.0]), skip_special_tokens=True).endswith("a red fox")
    assert kept[1800.0] == marked.prompt_token_ids
    create(client, input=[{"role": "user", "content": parts}], prompt_cache_options={"mode": "explicit", "ttl": "30m"})
    assert [ttl_s for _, ttl_s in engine.requests[-1].pinned] == [43200.0]


def test_a_prompt_is_warmed_without_output(engine: FakeEngineClient, client: TestClient) -> None:
    options = {"prompt_cache_options": {"prewarm": True}}
    found = create(client, **options)
    assert (found["status"], found["output"], found["usage"]["output_tokens"]) == ("completed", [], 0)
    assert found["store"] is False
    assert engine.requests[0].sampling.max_tokens == 1
    kinds = [each["type"].removeprefix("response.") for each in streamed(client, **options)]
    assert kinds == ["created", "in_progress", "completed"]
    assert create(client)["usage"]["input_tokens_details"]["cached_tokens"] == NUM_PROMPT - 1


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_not_stored_is_nowhere(engine: FakeEngineClient, client: TestClient, stream: bool) -> None:
    first = create(client)
    for options in ({}, {"previous_response_id": first["id"]}):
        options = {**options, "store": False}
        found = streamed(client, **options)[-1]["response"] if stream else create(client, **options)
        assert found["store"] is False
        assert client.get(f"/v1/responses/{found['id']}").status_code == 404
    assert [request.session_ttl_s for request in engine.requests if request.session_id is not None] == [None, 60.0]


def test_deleting_one_response_leaves_those_behind_it(client: TestClient) -> None:
    first = create(client)
    second = create(client, input="and then?", previous_response_id=first["id"])
    path = f"/v1/responses/{first['id']}"
    assert client.post(f"{path}/cancel").status_code == 400  # it has ended, and is not streamed again
    assert client.get(path, params={"stream": "true"}).json()["error"]["param"] == "stream"
    assert client.delete(path).json() == {"id": first["id"], "object": "response", "deleted": True}
    assert client.get(path).json()["error"]["code"] == "response_not_found"
    assert client.delete(path).status_code == 404
    refused = client.post("/v1/responses", json={**BODY, "previous_response_id": first["id"]})
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "previous_response_not_found")
    assert refused.json()["error"]["param"] == "previous_response_id"
    create(client, input="and now?", previous_response_id=second["id"])
    items = client.get(f"/v1/responses/{second['id']}/input_items", params={"order": "asc"}).json()["data"]
    assert [item["content"][0]["text"] for item in items] == ["the fox", SENTENCE, "and then?"]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/chat/completions", {"session": {"id": "ID", "append": True}}, "session.id"),
        ("/v1/chat/completions", {}, "X-Session-ID"),
        ("/v1/completions", {"prompt": "x", "session_id": "ID"}, "session_id"),
        ("/v1/messages", {"session_id": "ID"}, "session_id"),
        ("/v1/messages", {}, "X-Session-ID"),
        ("/v1/sessions/s/fork", {"session_id": "ID"}, "session_id"),
    ],
)
def test_no_other_api_changes_what_a_response_goes_on_from(
    engine: FakeEngineClient, client: TestClient, path: str, body: dict[str, Any], field: str
) -> None:
    assert client.post("/v1/chat/completions", json={**CHAT, "session_id": "s"}).status_code == 200
    first = create(client)
    known = engine.sessions.get(("", f"public:{first['id']}"))
    assert known is not None
    ids = known.ids.tolist()
    headers = {"X-Session-ID": first["id"]} if field == "X-Session-ID" else {}
    given = json.loads(json.dumps(body).replace("ID", first["id"]))
    refused = client.post(path, json={**CHAT, "max_tokens": 9, **given}, headers=headers)
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith(f"{field}: must not begin with 'resp_'")
    assert known.ids.tolist() == ids
    create(client, input="and then?", previous_response_id=first["id"])
    assert client.get(f"/v1/sessions/{first['id']}").json()["tokens"] == len(ids)


def test_a_session_of_another_api_is_no_response(client: TestClient) -> None:
    """Neither one with a note of its own nor the fork of a response, which a turn may change."""
    first = create(client)
    assert client.post(f"/v1/sessions/{first['id']}/fork", json={"session_id": "branch"}).status_code == 200
    assert client.post("/v1/chat/completions", json={**CHAT, "tools": [], "session": {"id": "s", "history": "log"}})
    for name in ("branch", "s"):
        refused = client.post("/v1/responses", json={**BODY, "previous_response_id": name})
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "previous_response_not_found")
        assert client.get(f"/v1/responses/{name}").status_code == 404


def test_input_items_come_in_pages(client: TestClient) -> None:
    said = [{"role": "user", "content": f"line {i}"} for i in range(7)]
    path = f"/v1/responses/{create(client, input=said)['id']}/input_items"
    found: list[str] = []
    after: dict[str, Any] = {}
    while True:
        page = client.get(path, params={"order": "asc", "limit": 3, **after}).json()
        assert page["first_id"] == page["data"][0]["id"]
        found += [item["content"][0]["text"] for item in page["data"]]
        if not page["has_more"]:
            break
        after = {"after": page["last_id"]}
    assert found == [f"line {i}" for i in range(7)]
    assert client.get(path).json()["data"][0]["content"][0]["text"] == "line 6"
    for wrong in ({"limit": "101"}, {"after": "nothing"}):
        response = client.get(path, params=wrong)
        assert (response.status_code, response.json()["error"]["param"]) == (400, next(iter(wrong)))


def test_no_item_has_the_id_of_an_earlier_response_s(client: TestClient) -> None:
    said = [{"role": "user", "content": "the fox", "id": "i"}]
    first = create(client, input=said)
    for repeated in (said, first["output"]):
        body = {**BODY, "input": repeated, "previous_response_id": first["id"]}
        refused = client.post("/v1/responses", json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input[0].id")
        create(client, input=repeated)


def test_another_key_knows_nothing_of_it(engine: FakeEngineClient) -> None:
    client = api(engine, **KEYS)
    found = client.post("/v1/responses", json=BODY, headers=ONE).json()
    path = f"/v1/responses/{found['id']}"
    assert client.get(path, headers=ONE).status_code == 200
    for method, where in (("GET", path), ("DELETE", path), ("GET", f"{path}/input_items"), ("POST", f"{path}/cancel")):
        assert client.request(method, where, headers=TWO).status_code == 404
    on = {**BODY, "previous_response_id": found["id"]}
    assert client.post("/v1/responses", json=on, headers=TWO).status_code == 404
    assert client.post("/v1/responses", json=on, headers=ONE).status_code == 200


def test_a_stream_that_breaks_ends_in_a_failed_response() -> None:
    client = api(FakeEngineClient(TOKENIZER, fail_after=2))
    last = streamed(client)[-1]
    assert last["type"] == "response.failed"
    assert (last["response"]["status"], last["response"]["error"]["code"]) == ("failed", "server_error")
    assert client.get(f"/v1/responses/{last['response']['id']}").status_code == 404


def test_a_refused_turn_leaves_no_fork(engine: FakeEngineClient, client: TestClient) -> None:
    first = create(client)
    engine.refusal = Overloaded("full")
    refused = client.post("/v1/responses", json={**BODY, "previous_response_id": first["id"]})
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "overloaded")
    assert len(engine.sessions) == 1


@pytest.mark.parametrize("asks", [{"top_logprobs": 2}, {"include": ["message.output_text.logprobs"]}])
def test_logprobs_are_told_of_each_piece_and_of_the_whole(client: TestClient, asks: dict[str, Any]) -> None:
    told = streamed(client, **asks)
    pieces = [entry for each in told if each["type"] == "response.output_text.delta" for entry in each["logprobs"]]
    (part,) = told[-1]["response"]["output"][0]["content"]
    assert part["logprobs"] == pieces
    assert {len(entry["top_logprobs"]) for entry in pieces} == {asks.get("top_logprobs", 0)}
    assert create(client, **asks)["output"][0]["content"] == [part]
    assert create(client)["output"][0]["content"][0]["logprobs"] == []


def test_what_cannot_be_kept_says_so(engine: FakeEngineClient, client: TestClient) -> None:
    engine.query_failure = ReplicaUnavailable("a replica did not answer")
    assert create(client)["store"] is False
    assert client.get("/v1/responses/resp_x").status_code == 503
