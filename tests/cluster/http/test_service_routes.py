"""Models, tokenizing, probes and metrics."""

from __future__ import annotations

import itertools

from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from mneme.cluster.http.api import build_api
from mneme.cluster.http.api_state import Backend
from tests.cluster.api_fixtures import CHAT, MODEL, RENDERED, TOKENIZER, get, post
from tests.cluster.fake_engine_client import FakeEngineClient
from tests.cluster.metric_samples import samples_of


def test_models() -> None:
    listed = get("/v1/models").json()
    assert [model["id"] for model in listed["data"]] == ["tiny"]
    assert get("/v1/models/tiny").json() == listed["data"][0]
    assert get("/v1/models/other").json()["error"]["code"] == "model_not_found"


def test_tokenize_and_back() -> None:
    answer = post("/tokenize", {"prompt": "the fox", "return_token_strs": True}).json()
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == 1024
    text = post("/detokenize", {"model": "tiny", "tokens": answer["tokens"]}).json()["prompt"]
    assert text == "<|bos|>the fox"
    chat_ids = post("/tokenize", {"messages": CHAT["messages"]}).json()["tokens"]
    assert chat_ids == TOKENIZER.encode_rendered(RENDERED)


def test_probes_and_metrics() -> None:
    engine = FakeEngineClient(TOKENIZER)
    assert get("/health").status_code == 200
    assert get("/ready", engine=engine).status_code == 200
    engine.ready = False
    unready = get("/ready", engine=engine)
    assert (unready.status_code, unready.headers["retry-after"]) == (503, "1")
    page = get("/metrics", engine=engine)
    assert page.headers["content-type"].startswith("text/plain; version=0.0.4")
    found = samples_of(page.text)
    for name, value in (
        ('mneme_pages{state="free"}', 2000),
        ('mneme_pages{state="in_use"}', 0),
        ('mneme_requests{state="running"}', 0),
        ("mneme_waiting_tokens", 154),
        ('mneme_refused_requests_total{reason="tokens"}', 4),
        ('mneme_refused_requests_total{reason="session"}', 2),
        ("mneme_missed_deadlines_total", 12),
        ("mneme_prompt_tokens_total", 20),
        ('mneme_finished_requests_total{reason="length"}', 4),
        ('mneme_blend_requests_total{selector="hkvd"}', 4),
        ('mneme_blend_requests_total{selector="query"}', 0),
        ('mneme_blend_tokens_total{kind="reused"}', 140),
        ('mneme_blend_declined_total{reason="not_allowed"}', 6),
        ('mneme_cost_predictions_total{kind="prefill"}', 4),
        ('mneme_cost_actual_seconds_total{kind="prefill"}', 4),
        ('mneme_cost_actual_seconds_total{kind="peer_disk"}', 0),
        ("mneme_shared_segments", 10),
        ("mneme_cuda_graph_replays_total", 80),
        ("mneme_cuda_graph_failures_total", 2),
        ("mneme_cuda_graphs_off", 6),
        ('mneme_resident_memory_bytes{replica="a"}', 1048576),
    ):
        assert found[name] == value, name


def test_every_sample_has_a_type_and_only_counters_are_totals(client: TestClient) -> None:
    client.post("/v1/chat/completions", json={**CHAT, "n": 2})
    types = {}
    for line in client.get("/metrics").text.splitlines():
        if line.startswith("# TYPE "):
            name, kind = line.split()[2:]
            types[name] = kind
            assert (kind == "counter") == name.endswith("_total")
        elif not line.startswith("#"):
            name = line.partition("{")[0].partition(" ")[0]
            base = name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count")
            assert name in types or types[base] == "histogram"
            float(line.rpartition(" ")[2])
    assert "mneme_time_to_first_token_seconds" in types


def test_what_an_ingress_measures_has_its_label_and_adds_up() -> None:
    clock = itertools.count()
    app = build_api(
        [Backend(FakeEngineClient(TOKENIZER), MODEL, TOKENIZER)], ingress="x1", clock=lambda: next(clock) * 0.004
    )
    client = TestClient(app)
    for _ in range(3):
        client.post("/v1/chat/completions", json={**CHAT, "n": 2})
    families = {family.name: family for family in text_string_to_metric_families(client.get("/metrics").text)}
    (responses,) = families["mneme_http_responses"].samples
    assert responses.labels == {"ingress": "x1", "path": "/v1/chat/completions", "status": "200"}
    assert responses.value == 3
    for name, num_observed in (("time_to_first_token", 6), ("inter_token_latency", None), ("request", 3)):
        samples = families[f"mneme_{name}_seconds"].samples
        assert {sample.labels["ingress"] for sample in samples} == {"x1"}
        buckets = [(sample.labels["le"], sample.value) for sample in samples if sample.name.endswith("_bucket")]
        (count,) = [sample.value for sample in samples if sample.name.endswith("_count")]
        assert num_observed in (None, count)
        assert [value for _, value in buckets] == sorted(value for _, value in buckets)
        assert buckets[-1] == ("+Inf", count)
        assert count > 0
    assert not any("ingress" in sample.labels for sample in families["mneme_pages"].samples)


def test_who_asks_what_runs_here() -> None:
    browser = get("/", headers={"Accept": "text/html,application/xhtml+xml"}, api_keys=("secret",))
    assert browser.headers["content-type"].startswith("text/html")
    assert "<td>tiny" in browser.text
    assert "curl http://api/v1/chat/completions" in browser.text
    service = get("/", api_keys=("secret",)).json()
    assert (service["model"], service["replicas"], service["kv_capacity_tokens"]) == ("tiny", 2, 32_000)
    assert (service["device"], service["dtype"]) == ("cpu", "float32")
    assert get("/version").json() == {"version": service["version"]}
