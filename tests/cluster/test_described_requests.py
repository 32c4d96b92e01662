"""Requests drawn from the API's own description, right and wrong ones: no 5xx, and each answer is as described."""

from __future__ import annotations

import collections
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from mneme.cluster.http.api import build_api
from mneme.cluster.http.api_state import Backend
from mneme.cluster.http.window import overview
from tests.budget import examples
from tests.cluster.api_fixtures import CHAT, COMPLETION, MODEL, TOKENIZER, get
from tests.cluster.fake_engine_client import FakeEngineClient
from tests.cluster.real_engines import TwoEngines

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    import schemathesis
    from schemathesis import GenerationMode
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import (
        content_type_conformance,
        response_schema_conformance,
        status_code_conformance,
    )

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
DESCRIBED: dict[str, Any] = get("/openapi.json").json()["paths"]
OPERATIONS = sorted(f"{each.upper()} {path}" for path, operations in DESCRIBED.items() for each in operations)
# Answered with 200; gets some of the fields that are drawn: else one wrong field of twenty would hide the others.
RIGHT: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETION,
    "/v1/messages": {**CHAT, "max_tokens": 5},
    "/v1/messages/count_tokens": CHAT,
    "/v1/responses": {"model": "tiny", "input": "the fox"},
    "/v1/embeddings": {"model": "tiny", "input": "the fox"},
    "/tokenize": {"model": "tiny", "prompt": "the fox"},
    "/detokenize": {"model": "tiny", "tokens": [5, 6]},
    "/v1/sessions/{session_id}/fork": {"session_id": "t"},
    "/v1/kv/warm": {"model": "tiny", "prompt": "the fox"},
    "/v1/kv/lookup": {"model": "tiny", "prompt": "the fox"},
    "/v1/kv/pin": {"model": "tiny", "prompt": "the fox", "ttl_s": 5},
    "/v1/kv/unpin": {"model": "tiny", "prompt": "the fox"},
    "/v1/kv": {"model": "tiny", "prompt": "the fox"},
}
MAX_FIELDS = 3
# There is no pin, no response that is still running, and nothing cached that could be pinned.
NEVER_DONE = {
    *("POST /v1/kv/pin", "POST /v1/kv/unpin", "DELETE /v1/kv/pins/{pin_id}"),
    "POST /v1/responses/{response_id}/cancel",
}


class Server:
    """An API over an engine client."""

    def __init__(self, engine: FakeEngineClient) -> None:
        app = build_api([Backend(engine, MODEL, TOKENIZER)])
        self.described = schemathesis.openapi.from_asgi("/openapi.json", app)
        self.client = TestClient(app, "http://api")

    def names(self) -> dict[str, str]:
        """Make a session, a response and a request that can be asked for."""
        said = self.client.post("/v1/chat/completions", json={**CHAT, "session_id": "s"})
        kept = self.client.post("/v1/responses", json=RIGHT["/v1/responses"])
        assert (said.status_code, kept.status_code) == (200, 200)
        names = {"model_id": MODEL.id, "session_id": "s", "response_id": kept.json()["id"]}
        return {**names, "request_id": said.headers["x-request-id"]}

    def play(self, operation: str, num_examples: int) -> collections.Counter[int]:
        """Send so many requests, right and wrong ones; returns how many answers had which status."""
        method, path = operation.split(" ")
        names = self.names()
        found, right = self.described[path][method], RIGHT.get(path)
        statuses: collections.Counter[int] = collections.Counter()
        # Without a body there is nothing wrong to say: a path or a parameter may be any text.
        modes = [GenerationMode.POSITIVE] if right is None else list(GenerationMode)
        for mode in modes:

            @settings(
                max_examples=max(num_examples // len(modes), 1),
                deadline=None,
                database=None,
                derandomize=True,
                phases=(Phase.generate, Phase.shrink),
                suppress_health_check=list(HealthCheck),
            )
            @given(case=found.as_strategy(generation_mode=mode), data=st.data())
            def answers_as_described(case: schemathesis.Case, data: st.DataObject) -> None:
                if data.draw(st.integers(0, 4)):
                    known = {name: names[name] for name in case.path_parameters if name in names}
                    case.path_parameters = {**case.path_parameters, **known}
                if right is not None and isinstance(case.body, dict):
                    if isinstance(case.body.get("model"), str):
                        case.body["model"] = MODEL.id
                    case.body.pop("timeout_s", None)  # what ends too late is a 504
                    if data.draw(st.integers(0, 9)):
                        drawn = data.draw(st.permutations(sorted(case.body)))[:MAX_FIELDS]
                        case.body = {**right, **{name: case.body[name] for name in drawn}}
                response = case.call()
                is_stream = "text/event-stream" in response.headers.get("content-type", [""])[0]
                # The events of streams are held against the description by http/test_api_docs.py.
                checks = [each for each in CHECKS if not is_stream or each is not response_schema_conformance]
                case.validate_response(response, checks=checks)
                statuses[response.status_code] += 1

            answers_as_described()
        return statuses


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[Server, Server]]:
    """One that says something, and one that has KV."""
    engines = TwoEngines()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(overview, "_MAX_EVENTS_S", 0.0)  # whole answers are looked at
        patched.setattr(overview, "_PAUSE_S", 0.01)
        yield Server(FakeEngineClient(TOKENIZER)), Server(engines)
    engines.close()


@pytest.mark.at_length
@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_operation_answers_as_described(servers: tuple[Server, Server], operation: str) -> None:
    has_kv, num_examples = "/v1/kv" in operation and "explain" not in operation, examples(6, at_length=30)
    statuses = servers[has_kv].play(operation, num_examples)
    assert statuses.total() > 0
    assert num_examples < 30 or statuses[200] or operation in NEVER_DONE
