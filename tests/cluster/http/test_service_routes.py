"""Models, tokenizing, probes and metrics."""

from __future__ import annotations

import itertools

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from mneme.cluster.http.api import build_api
from mneme.cluster.http.api_state import Backend
from mneme.cluster.serve.engine_client import STATES, Condition, State
from mneme.version import __version__, revision
from tests.cluster.api_fixtures import CHAT, MODEL, RENDERED, TOKENIZER, get, post
from tests.cluster.fake_engine_client import FakeEngineClient
from tests.cluster.metric_samples import samples_of, totals_of


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


def test_probes_and_metrics(engine: FakeEngineClient) -> None:
    assert get("/health").status_code == 200
    assert get("/ready", engine=engine).status_code == 200
    engine.ready = False
    unready = get("/ready", engine=engine)
    assert (unready.status_code, unready.headers["retry-after"]) == (503, "1")
    page = get("/metrics", engine=engine)
    assert page.headers["content-type"].startswith("text/plain; version=0.0.4")
    found = totals_of(page.text)
    for name, value in (
        ('mneme_pages{state="free"}', 2000),
        ("mneme_waiting_tokens", 154),
        ('mneme_refused_requests_total{reason="session"}', 2),
        ("mneme_missed_deadlines_total", 12),
        ('mneme_finished_requests_total{reason="length"}', 4),
        ('mneme_blend_requests_total{selector="hkvd"}', 4),
        ('mneme_blend_requests_total{selector="query"}', 0),
        ('mneme_cost_actual_seconds_total{kind="peer_disk"}', 0),
        ("mneme_cuda_graphs_off", 6),
        (f'mneme_build_info{{revision="{revision()}",version="{__version__}"}}', 1),
    ):
        assert found[name] == value, name


@pytest.mark.parametrize(
    ("condition", "health"),
    [("loading", 200), ("idle", 200), ("stalled", 503), ("failed", 503)],
)
def test_probes_tell_loading_from_dead(condition: State, health: int) -> None:
    """A load balancer sends nothing to either; who restarts what is dead lets one load that loads."""
    reason = "CheckpointError: model.safetensors: is cut off" if condition == "failed" else ""
    engine = FakeEngineClient(TOKENIZER, ready=False, unready=Condition(condition, reason))
    said = {"state": condition, **({"reason": reason} if reason else {})}
    answer = get("/health", engine=engine)
    assert (answer.status_code, answer.json()) == (health, {"status": "ok" if health == 200 else "failed", **said})
    unready = get("/ready", engine=engine)
    assert (unready.status_code, unready.headers["retry-after"]) == (503, "1")
    assert unready.json() == {"ready": False, "replicas": 0, **said}
    states = {state: float(state == condition) for state in STATES}
    found = samples_of(get("/metrics", engine=engine).text)
    assert {state: found[f'mneme_state{{model_name="tiny",state="{state}"}}'] for state in STATES} == states


def test_a_path_may_end_with_a_slash() -> None:
    """As vLLM's do; a name at the end of one may have its own, and who needs a key needs it there too."""
    keys = {"api_keys": ("secret-1234567890",)}
    for path in ("/metrics", "/ready", "/health", "/version"):
        assert get(f"{path}/", **keys).status_code == get(path, **keys).status_code == 200
    assert get("/v1/models/").json() == get("/v1/models").json()
    assert get("/v1/models/", **keys).status_code == 401
    assert post("/v1/chat/completions/", CHAT).json()["object"] == "chat.completion"
    assert get("/v1/models/tiny/").status_code == 404
    assert get("/nowhere/").status_code == 404
    assert get("/v1/chat/completions/").status_code == 405


def test_who_asks_what_runs_here() -> None:
    browser = get("/", headers={"Accept": "text/html,application/xhtml+xml"}, api_keys=("secret",))
    assert browser.headers["content-type"].startswith("text/html")
    assert "<td>tiny" in browser.text
    assert "curl http://api/v1/chat/completions" in browser.text
    service = get("/", api_keys=("secret",)).json()
    assert (service["model"], service["replicas"], service["kv_capacity_tokens"]) == ("tiny", 2, 32_000)
    assert (service["device"], service["dtype"], service["kv_dtype"]) == ("cpu", "float32", "float32")
    documents = ["the quality report allows hkvd from 0.2"]
    assert get("/version").json() == {"version": service["version"], "kernels": [], "documents": documents}


def test_what_an_ingress_measures_has_its_label_and_every_sample_its_type() -> None:
    clock = itertools.count()
    backends = [Backend(FakeEngineClient(TOKENIZER), MODEL, TOKENIZER)]
    client = TestClient(build_api(backends, ingress="x1", clock=lambda: next(clock) * 0.004))
    for _ in range(3):
        client.post("/v1/chat/completions", json={**CHAT, "n": 2})
    families = {family.name: family for family in text_string_to_metric_families(client.get("/metrics").text)}
    (responses,) = families["mneme_http_responses"].samples
    assert responses.labels == {"ingress": "x1", "path": "/v1/chat/completions", "status": "200"}
    assert responses.value == 3
    for name, num_observed in (("time_to_first_token", 6), ("request", 3)):
        samples = families[f"mneme_{name}_seconds"].samples
        assert {sample.labels["ingress"] for sample in samples} == {"x1"}
        assert [sample.value for sample in samples if sample.name.endswith("_count")] == [num_observed]
    assert not any("ingress" in sample.labels for sample in families["mneme_pages"].samples)
    assert {family.type for family in families.values()} == {"counter", "gauge", "histogram"}
