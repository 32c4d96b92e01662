"""Two models behind one API: each request reaches the one that it names, and an id is found wherever it belongs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from mneme.cluster.http.api import build_api
from mneme.cluster.http.api_state import Backend
from tests.cluster.api_fixtures import CHAT, MODEL, TOKENIZER, body_of, get, post
from tests.cluster.fake_engine_client import FakeEngineClient
from tests.cluster.real_engines import TwoEngines

LARGE, SMALL = "tiny", "small"
SMALL_CONTEXT = 256


@pytest.fixture
def large() -> FakeEngineClient:
    return FakeEngineClient(TOKENIZER)


@pytest.fixture
def small() -> FakeEngineClient:
    return FakeEngineClient(TOKENIZER, sentence="the small one", max_context=SMALL_CONTEXT, names=("c", "d"))


@pytest.fixture
def client(large: FakeEngineClient, small: FakeEngineClient) -> TestClient:
    return over_both(large, small)


def over_both(large: FakeEngineClient, small: FakeEngineClient) -> TestClient:
    other = replace(MODEL, id=SMALL, max_context=SMALL_CONTEXT, root="/models/small")
    return TestClient(build_api([Backend(large, MODEL, TOKENIZER), Backend(small, other, TOKENIZER)], ingress="x1"))


def chat(client: TestClient, model: str, status: int = 200, **more: Any) -> Any:
    return body_of(client.post("/v1/chat/completions", json={**CHAT, "model": model, **more}), status)


def test_figures_carry_the_name_of_their_model(client: TestClient) -> None:
    """Each family stands once on the page, whatever many models there are: else no scraper reads it."""
    chat(client, SMALL)
    families = list(text_string_to_metric_families(client.get("/metrics").text))
    assert len({family.name for family in families}) == len(families)
    samples = {(each.name, each.labels.get("model_name")): each.value for family in families for each in family.samples}
    assert {model for name, model in samples if name == "vllm:num_requests_running"} == {LARGE, SMALL}
    name = "vllm:time_to_first_token_seconds_count"
    assert (samples[name, LARGE], samples[name, SMALL]) == (0, 1)


def test_each_request_runs_on_the_model_that_it_names(
    client: TestClient, large: FakeEngineClient, small: FakeEngineClient
) -> None:
    assert [model["id"] for model in client.get("/v1/models").json()["data"]] == [LARGE, SMALL]
    assert client.get(f"/v1/models/{SMALL}").json()["max_model_len"] == SMALL_CONTEXT
    for name in (SMALL, "/models/small"):
        answer = chat(client, name)
        assert (answer["model"], answer["choices"][0]["message"]["content"]) == (SMALL, "the small one")
    assert (len(large.requests), len(small.requests)) == (0, 2)
    assert chat(client, LARGE)["model"] == LARGE
    assert len(large.requests) == 1
    long = "the fox " * SMALL_CONTEXT
    assert chat(client, SMALL, 400, messages=[{"role": "user", "content": long}])["error"]["code"] == (
        "context_length_exceeded"
    )
    assert chat(client, "none", 404)["error"]["code"] == "model_not_found"


@pytest.mark.parametrize("model", [{}, {"model": None}])
def test_a_model_need_not_be_named_where_there_is_one(client: TestClient, model: dict[str, None]) -> None:
    for path, fields in (
        ("chat/completions", {"messages": CHAT["messages"]}),
        ("completions", {"prompt": "the fox"}),
        ("embeddings", {"input": "the fox"}),
        ("responses", {"input": "the fox"}),
        ("messages", {"messages": CHAT["messages"], "max_tokens": 3}),
    ):
        answer = post(f"/v1/{path}", {**fields, **model})
        assert (answer.status_code, answer.json()["model"]) == (200, LARGE)
        assert "x-mneme-ignored-fields" not in answer.headers
        assert client.post(f"/v1/{path}", json={**fields, **model}).status_code == 400
    error = client.post("/v1/chat/completions", json={"messages": CHAT["messages"], **model}).json()["error"]
    assert error["param"] == "model"
    for described, is_needed in ((get("/openapi.json"), False), (client.get("/openapi.json"), True)):
        schema = described.json()["components"]["schemas"]["ChatRequest"]
        assert ("model" in schema["required"]) == is_needed


def test_a_model_that_has_no_replica_leaves_the_other_alone(client: TestClient, small: FakeEngineClient) -> None:
    assert client.get("/ready").json() == {"ready": True, "replicas": 4, "state": "ready"}
    assert client.get("/").json()["models"] == [LARGE, SMALL]
    small.ready = False
    assert client.get("/ready").status_code == 503
    assert chat(client, LARGE)["model"] == LARGE


@pytest.mark.parametrize("named", ["", f"?model={SMALL}"])
def test_a_session_is_found_with_the_model_that_has_it(client: TestClient, small: FakeEngineClient, named: str) -> None:
    chat(client, SMALL, session_id="s")
    assert client.get(f"/v1/sessions/s{named}").json()["replica"] == "d"
    assert client.get(f"/v1/sessions/s?model={LARGE}").json()["error"]["code"] == "session_not_found"
    assert client.get("/v1/sessions/s?model=none").json()["error"]["code"] == "model_not_found"
    fork = client.post(f"/v1/sessions/s/fork{named}", json={"session_id": "t"}).json()
    assert (fork["id"], small.forks) == ("t", {("", "public:t"): "d"})
    assert client.delete(f"/v1/sessions/s{named}").json()["deleted"] is True
    assert client.get(f"/v1/sessions/s{named}").status_code == 404


def test_one_name_of_a_session_is_two_sessions_for_two_models(
    client: TestClient, large: FakeEngineClient, small: FakeEngineClient
) -> None:
    for model in (LARGE, SMALL):
        chat(client, model, session_id="s")
    found = [client.get(f"/v1/sessions/s?model={model}").json() for model in (LARGE, SMALL)]
    assert [each["replica"] for each in found] == ["b", "d"]
    assert found[0]["tokens"] > found[1]["tokens"]


def test_a_response_goes_on_with_its_own_model(client: TestClient) -> None:
    body = {"model": SMALL, "input": "the fox"}
    first = client.post("/v1/responses", json=body).json()
    assert client.get(f"/v1/responses/{first['id']}").json() == first
    second = client.post("/v1/responses", json={**body, "previous_response_id": first["id"]})
    assert second.json()["model"] == SMALL
    other = client.post("/v1/responses", json={**body, "model": LARGE, "previous_response_id": first["id"]})
    assert other.json()["error"]["code"] == "previous_response_not_found"
    assert client.delete(f"/v1/responses/{first['id']}").json()["deleted"] is True


def test_a_request_of_either_model_is_explained(client: TestClient) -> None:
    for model, replica in ((LARGE, "b"), (SMALL, "d")):
        answer = chat(client, model)
        (choice,) = client.get(f"/v1/kv/explain/{answer['id']}").json()["choices"]
        assert choice["replica"] == replica
    assert client.get("/v1/kv/explain/none").status_code == 404


def test_kv_of_every_model_is_pinned_listed_and_dropped(engines: TwoEngines) -> None:
    others = TwoEngines(names=("c", "d"))
    client = over_both(engines, others)
    made = []
    for model in (LARGE, SMALL):
        body = {"model": model, "prompt_token_ids": list(range(5, 37))}
        made.append(client.post("/v1/kv/warm", json=body).raise_for_status().json())
    assert [each["replicas"] for each in made] == [["a", "b"], ["c", "d"]]
    assert client.get("/v1/kv/pins").json()["data"] == made
    for each in made:
        assert client.delete(f"/v1/kv/pins/{each['id']}").json()["deleted"] is True
    assert client.delete(f"/v1/kv/pins/{made[1]['id']}").status_code == 404
    dropped = client.request("DELETE", "/v1/kv", json={"tenant": True}).json()["replicas"]
    assert [(each["replica"], each["device_pages"] > 0) for each in dropped] == [(name, True) for name in "abcd"]
    others.close()
