"""The API's description of itself, held against what the API answers."""

from __future__ import annotations

import json
import re
from typing import Any, cast

import jsonschema
from starlette.applications import Starlette
from starlette.routing import Route
from starlette.testclient import TestClient

from mneme.cluster.http.api_docs import field_meanings
from mneme.cluster.http.guard import PAGE_PATHS
from mneme.cluster.http.window.docs import docs_page
from tests.cluster.api_fixtures import CHAT, COMPLETION, api, get
from tests.cluster.http.test_kv import IDS
from tests.cluster.real_engines import TwoEngines

BROWSER = {"accept": "text/html"}
STREAM = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}


class Described:
    """Compares answers with the description, where a field that has no name there is an error."""

    def __init__(self) -> None:
        self.document: dict[str, Any] = get("/openapi.json").json()
        for schema in self.document["components"]["schemas"].values():
            schema["additionalProperties"] = False
        self.unseen = {
            (method.upper(), path, media_type)
            for path, operations in self.document["paths"].items()
            for method, operation in operations.items()
            for media_type in operation["responses"]["200"]["content"]
        }

    def ask(
        self, client: TestClient, method: str, path: str, body: Any = None, headers: Any = None, **names: str
    ) -> Any:
        """The answer's JSON, or the last event's; `names` are those in the path."""
        response = client.request(method, path.format(**names), json=body, headers=headers)
        assert response.status_code == 200, response.text
        media_type = response.headers["content-type"].partition(";")[0]
        described = self.document["paths"][path][method.lower()]["responses"]["200"]["content"]
        assert media_type in described, (method, path, media_type)
        self.unseen.discard((method, path, media_type))
        if media_type == "application/json":
            answers = [response.json()]
        elif media_type == "text/event-stream":
            answers = [
                json.loads(line[6:])
                for line in response.text.splitlines()
                if line.startswith("data: ") and "[DONE]" not in line
            ]
        else:
            return None
        schema = {**described[media_type]["schema"], "components": self.document["components"]}
        for answer in answers:
            jsonschema.Draft202012Validator(schema).validate(answer)
        return answers[-1]


def test_every_answer_has_the_fields_that_are_described_and_no_other(client: TestClient, engines: TwoEngines) -> None:
    described = Described()
    ask_the_service(described, client)
    ask_for_completions(described, client)
    ask_for_messages(described, client)
    ask_for_responses(described, client)
    ask_of_sessions(described, client)
    ask_of_kv(described, engines)
    assert described.unseen == set()


def ask_the_service(described: Described, client: TestClient) -> None:
    for path in ("/v1/models", "/health", "/ready", "/metrics", "/version", "/", "/openapi.json"):
        described.ask(client, "GET", path)
    for path in ("/v1/sessions", "/v1/requests", "/v1/kv/tree", "/v1/kv/tiers", "/v1/cluster", *PAGE_PATHS):
        described.ask(client, "GET", path)
    described.unseen.remove(("GET", "/v1/events", "text/event-stream"))  # never ends: test_overview.py
    described.ask(client, "GET", "/", headers=BROWSER)
    described.ask(client, "GET", "/v1/models/{model_id}", model_id="tiny")
    found = described.ask(client, "POST", "/tokenize", {"prompt": "a fox", "return_token_strs": True})
    described.ask(client, "POST", "/detokenize", {"tokens": found["tokens"]})


def ask_for_completions(described: Described, client: TestClient) -> None:
    chat = {**CHAT, "session_id": "s", "logprobs": True, "top_logprobs": 2}
    described.ask(client, "POST", "/v1/embeddings", {"model": "tiny", "input": ["a", "b"]})
    for path, body in (("/v1/chat/completions", chat), ("/v1/completions", {**COMPLETION, "logprobs": 2})):
        whole = described.ask(client, "POST", path, body)
        last = described.ask(client, "POST", path, {**body, **STREAM})
        assert "metrics" in whole
        assert "metrics" in last
        described.ask(client, "POST", path, {**body, "n": 2})
        explained = described.ask(client, "GET", "/v1/kv/explain/{request_id}", request_id=whole["id"])
        assert explained["choices"]


def ask_for_messages(described: Described, client: TestClient) -> None:
    body = {**CHAT, "max_tokens": 8}
    whole = described.ask(client, "POST", "/v1/messages", body)
    assert described.ask(client, "POST", "/v1/messages", {**body, "stream": True})["type"] == "message_stop"
    counted = described.ask(client, "POST", "/v1/messages/count_tokens", CHAT)
    assert counted["input_tokens"] == whole["usage"]["input_tokens"] + whole["usage"]["cache_read_input_tokens"]


def ask_for_responses(described: Described, client: TestClient) -> None:
    body = {"model": "tiny", "input": "the fox", "instructions": "be brief"}
    first = described.ask(client, "POST", "/v1/responses", body)
    on = {**body, "previous_response_id": first["id"], "stream": True}
    assert described.ask(client, "POST", "/v1/responses", on)["type"] == "response.completed"
    path = "/v1/responses/{response_id}"
    assert described.ask(client, "GET", path, response_id=first["id"]) == first
    assert described.ask(client, "GET", f"{path}/input_items", response_id=first["id"])["data"]
    described.ask(client, "DELETE", path, response_id=first["id"])


def ask_of_sessions(described: Described, client: TestClient) -> None:
    client.post("/v1/chat/completions", json={**CHAT, "session_id": "s"})
    path = "/v1/sessions/{session_id}"
    assert described.ask(client, "GET", path, session_id="s")["hit_history"]
    described.ask(client, "POST", f"{path}/fork", {}, session_id="s")
    described.ask(client, "DELETE", path, session_id="s")


def ask_of_kv(described: Described, engines: TwoEngines) -> None:
    client = api(engines)
    engines.save(IDS)
    given = {"token_ids": IDS}
    on_device = described.ask(client, "POST", "/v1/kv/warm", {"model": "tiny", **given})
    in_tier = described.ask(client, "POST", "/v1/kv/pin", given)
    found = described.ask(client, "POST", "/v1/kv/lookup", {**given, "chunks": True})
    assert found["tier"]["chunks"]
    assert found["tier"]["nodes"]
    described.ask(client, "GET", "/v1/kv/stats")
    listed = described.ask(client, "GET", "/v1/kv/pins")
    assert {pin["where"] for pin in listed["data"]} == {"device", "tier"}
    described.ask(client, "DELETE", "/v1/kv/pins/{pin_id}", pin_id=on_device["id"])
    described.ask(client, "POST", "/v1/kv/unpin", {"pin_id": in_tier["id"]})
    dropped = described.ask(client, "DELETE", "/v1/kv", given)
    assert dropped["tier"]["chunks"]


def test_every_route_is_described() -> None:
    document = get("/openapi.json", api_keys=("secret",)).json()
    page = get("/docs", api_keys=("secret",)).text
    assert "://" not in page  # nothing is loaded from elsewhere
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            assert operation["summary"], path
            assert f"{method.upper()} {path}" in page
    described = {(method.upper(), path) for path, operations in document["paths"].items() for method in operations}
    routes = [route for route in cast(Starlette, api().app).routes if isinstance(route, Route)]
    methods = [(route.path.replace(":path", "").rstrip("/") or "/", route.methods or ()) for route in routes]
    offered = {(method, path) for path, of_path in methods for method in of_path}
    assert described == {(method, path) for method, path in offered if method != "HEAD"}
    named = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(document)))
    assert named == {*document["components"]["schemas"]}
    assert {"ChatRequest", "ChatCompletion", "Error"} <= named
    assert not [name for name in named if "__" in name]  # pydantic's, of two types of one name


def test_every_field_is_described_and_no_description_is_of_nothing() -> None:
    schemas = get("/openapi.json").json()["components"]["schemas"]
    meanings = field_meanings()
    fields = {
        f"{kind}.{name}": field for kind, schema in schemas.items() for name, field in schema["properties"].items()
    }
    assert {
        key for key, field in fields.items() if not re.fullmatch(r"[A-Z`].+\.", field["description"], re.DOTALL)
    } == set()
    used = {key if key in meanings else key.partition(".")[2] for key in fields}
    assert set(meanings) - used == set()


def test_every_operation_has_a_tag_and_describes_its_parameters() -> None:
    document = get("/openapi.json").json()
    operations = [operation for each in document["paths"].values() for operation in each.values()]
    tags = [tag["name"] for tag in document["tags"]]
    assert {tag for operation in operations for tag in operation["tags"]} == set(tags)
    assert all(len(operation["tags"]) == 1 for operation in operations)
    assert all(each["description"] for operation in operations for each in operation["parameters"])


def test_every_body_has_an_example_that_is_answered(client: TestClient, engines: TwoEngines) -> None:
    """In the order of the document: the chat makes the session that is forked. Nothing is in the tier to be pinned."""
    statuses = {}
    for path, operations in client.get("/openapi.json").json()["paths"].items():
        for method, operation in operations.items():
            if "requestBody" in operation:
                example = operation["requestBody"]["content"]["application/json"]["example"]
                assert example.get("model", "tiny") == "tiny"
                asked = api(engines) if "/v1/kv" in path else client
                answer = asked.request(method, path.format(session_id="demo"), json=example)
                statuses[path] = answer.status_code
    assert {path: status for path, status in statuses.items() if status != 200} == {
        "/v1/kv/pin": 404,
        "/v1/kv/unpin": 404,
    }


def test_what_the_page_shows_of_the_description_is_text() -> None:
    """A name of a model, a docstring and a path may have what is markup in HTML."""
    name = "<b>\"x\" & 'y'</b>"
    document = get("/openapi.json").json()
    document["info"]["title"] = document["tags"][0]["description"] = name
    operation = document["paths"]["/v1/chat/completions"]["post"]
    operation["summary"] = operation["description"] = operation["operationId"] = name
    operation["requestBody"]["content"]["application/json"]["example"]["model"] = name
    operation["parameters"].append(
        {"name": name, "in": "query", "required": False, "description": name, "example": name}
    )
    document["paths"][f"/{name}"] = {"get": {**document["paths"]["/version"]["get"]}}
    document["components"]["schemas"]["ChatRequest"]["properties"][name] = {"const": name, "description": name}
    page = docs_page(document, needs_key=True)
    assert "<b>" not in page
    assert '"x"' not in page.replace("\\", "")
    assert page.count("&lt;b&gt;") >= 12
