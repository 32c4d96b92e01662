"""What load tools read of answers and of /metrics: `vllm bench serve`, guidellm, aiperf, inference-perf."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from mneme.cluster.backends import load_backend
from mneme.cluster.config import ClusterConfig
from mneme.cluster.http.api import build_api
from mneme.cluster.http.api_state import Backend
from mneme.replicas.choices import MAX_DELTAS, Choice
from mneme.replicas.model.directory import model_directory
from mneme.replicas.request import GenerationRequest, Logprobs, SamplingParams, TokenEvent
from tests.cluster.api_fixtures import CHAT, COMPLETION, MODEL, TOKENIZER, Server, get, post, serving
from tests.cluster.fake_engine_client import SENTENCE, FakeEngineClient
from tests.cluster.metric_samples import totals_of

EMOJI = TOKENIZER.encode("🙂", add_special_tokens=False)  # several tokens: no character before the last


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as running:
        yield running


def chunks_of(server: Server, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    text = httpx.post(server.url + path, json={**body, "stream": True}, timeout=60).raise_for_status().text
    *events, done, rest = text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


@pytest.mark.parametrize(("host", "is_told"), [("127.0.0.1", True), ("localhost", True), ("0.0.0.0", False)])
def test_the_directory_is_told_to_this_machine_alone(host: str, is_told: bool) -> None:
    backend = load_backend(FakeEngineClient(TOKENIZER), ClusterConfig(host=host))
    directory = str(model_directory("mneme-tiny"))
    assert backend.model.root == (directory if is_told else "mneme-tiny")


def test_models_are_those_of_anthropics_clients_too() -> None:
    listed = get("/v1/models").json()
    (model,) = listed["data"]
    assert (listed["first_id"], listed["last_id"], listed["has_more"]) == ("tiny", "tiny", False)
    assert (model["type"], model["display_name"]) == ("model", "tiny")
    assert datetime.fromisoformat(model["created_at"]).timestamp() == model["created"]
    assert model["created_at"].endswith("Z")


def test_models_have_the_directory_of_their_tokenizer() -> None:
    client = TestClient(
        build_api([Backend(FakeEngineClient(TOKENIZER), replace(MODEL, root="/models/tiny"), TOKENIZER)])
    )
    (model,) = client.get("/v1/models").json()["data"]
    body = {"model": model["root"], "prompt": "the fox", "add_special_tokens": False}
    tokens = client.post("/tokenize", json=body).raise_for_status().json()["tokens"]
    assert (model["id"], model["root"], model["max_model_len"]) == ("tiny", "/models/tiny", 1024)
    assert tokens == TOKENIZER.encode("the fox", add_special_tokens=False)


@pytest.mark.parametrize(
    ("path", "body", "num_before"), [("/v1/completions", COMPLETION, 0), ("/v1/chat/completions", CHAT, 1)]
)
def test_each_step_is_a_chunk(server: Server, path: str, body: dict[str, Any], num_before: int) -> None:
    """Tools count chunks with choices as tokens; a chat's role comes before them, alone."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    *told, last = chunks_of(server, path, {**body, "stream_options": options})
    num_tokens = len(TOKENIZER.encode(SENTENCE, add_special_tokens=False))
    choices = [chunk["choices"][0] for chunk in told]
    texts = [choice["text"] if "text" in choice else choice["delta"]["content"] for choice in choices]
    assert "".join(texts) == SENTENCE
    assert texts.count("") - num_before >= len(EMOJI) - 1  # steps that complete no character
    assert [chunk["usage"]["completion_tokens"] for chunk in told[num_before:]] == list(range(1, num_tokens + 1))
    assert [choice["delta"]["role"] for choice in choices[:num_before]] == ["assistant"] * num_before
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == num_tokens


def test_what_a_stop_string_withholds_is_chunks_too(server: Server) -> None:
    *told, last = chunks_of(
        server, "/v1/completions", {**COMPLETION, "stop": ["STOP"], "stream_options": {"include_usage": True}}
    )
    assert len(told) == last["usage"]["completion_tokens"]
    assert "".join(chunk["choices"][0]["text"] for chunk in told) == SENTENCE.partition("STOP")[0]


def test_a_client_that_is_behind_gets_what_it_missed_in_one_chunk() -> None:
    sampling = SamplingParams(logprobs=0)
    request = GenerationRequest(request_id="r.0", prompt_token_ids=(1,), sampling=sampling)
    choice = Choice(index=0, prompt_index=0, request=request, tokenizer=TOKENIZER)
    said = TOKENIZER.encode("the fox " * MAX_DELTAS, add_special_tokens=False)
    for token_id in said:
        choice.add(TokenEvent("r.0", (token_id,), None, (Logprobs(token_id, -0.5, ()),), None))
    choice.add(TokenEvent("r.0", (), "length", None, None))
    deltas = list(choice.pop_deltas())
    assert len(said) > 2 * MAX_DELTAS >= 2 * len(deltas)
    assert "".join(delta.text for delta in deltas) == TOKENIZER.decode(said, skip_special_tokens=False)
    assert [item.token_id for delta in deltas for item in delta.logprobs or ()] == said
    assert [delta.finish_reason for delta in deltas][-1] == "length"
    assert [delta.is_first for delta in deltas] == [True] + [False] * (len(deltas) - 1)
    assert choice.num_told == sum(delta.num_tokens for delta in deltas) == len(said)


def test_the_end_of_an_answer_says_how_long_the_engine_took() -> None:
    names = {"queue_time_ms", "time_to_first_token_ms", "generation_time_ms", "mean_itl_ms", "tokens_per_second"}
    engine = FakeEngineClient(TOKENIZER, timing=(0.25, 0.5))
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)):
        whole = post(path, body, engine=engine).json()
        stream = post(path, {**body, "stream": True, "stream_options": {"include_usage": True}}, engine=engine).text
        *_, last, done, _ = stream.split("\n\n")
        assert done == "data: [DONE]"
        for answer in (whole, json.loads(last.removeprefix("data: "))):
            assert answer["metrics"].keys() <= names
            assert answer["metrics"]["queue_time_ms"] == 250
            assert answer["metrics"]["time_to_first_token_ms"] == 500
            assert answer["metrics"]["tokens_per_second"] > 0
            details = answer["usage"]["prompt_tokens_details"]
            assert details["cached_tokens"] + details["cache_write_tokens"] == answer["usage"]["prompt_tokens"]
    assert "metrics" not in post("/v1/chat/completions", {**CHAT, "n": 2}, engine=engine).json()  # of which choice?


def test_metrics_have_vllm_s_names_and_the_model_s() -> None:
    engine = FakeEngineClient(TOKENIZER, timing=(0.25, 0.5))
    client = TestClient(build_api([Backend(engine, MODEL, TOKENIZER)], ingress="x1"))
    for _ in range(3):
        client.post("/v1/chat/completions", json={**CHAT, "n": 2}).raise_for_status()
    found = totals_of(client.get("/metrics").text)
    for name in (
        *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total"),
        *("prefix_cache_queries_total", "prefix_cache_hits_total", "external_prefix_cache_hits_total"),
        *("prompt_tokens_total", "prompt_tokens_cached_total", "generation_tokens_total"),
    ):
        assert f'vllm:{name}{{model_name="tiny"}}' in found, name
    for reason in ("stop", "length", "abort", "error"):
        assert f'vllm:request_success_total{{finished_reason="{reason}",model_name="tiny"}}' in found
    for name, count in (
        *(("time_to_first_token_seconds", 6), ("e2e_request_latency_seconds", 3)),
        *((f"request_{name}_time_seconds", 6) for name in ("queue", "prefill", "decode", "inference")),
        *((f"request_{name}", 6) for name in ("time_per_output_token_seconds", "prompt_tokens", "generation_tokens")),
    ):
        assert found[f'vllm:{name}_count{{ingress="x1",model_name="tiny"}}'] == count, name
    num_generated = len(TOKENIZER.encode(SENTENCE, add_special_tokens=False))
    sums = {"queue_time_seconds": 0.25, "prefill_time_seconds": 0.5, "generation_tokens": num_generated}
    for name, value in sums.items():
        assert found[f'vllm:request_{name}_sum{{ingress="x1",model_name="tiny"}}'] == 6 * value
    ours, theirs = (found[f'{who}inter_token_latency_seconds_sum{{ingress="x1",model_name="tiny"}}'] for who in (
        "mneme_", "vllm:"
    ))  # fmt: skip
    assert ours == theirs
