"""Models, tokenizing, probes and metrics."""

from __future__ import annotations

import asyncio

from tests.cluster.api_fixtures import CHAT, RENDERED, TOKENIZER, api_client, get, post
from tests.cluster.fake_engine_client import FakeEngineClient


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
    lines = page.text.splitlines()
    for line in (
        'mneme_pages{state="free"} 2000',
        'mneme_pages{state="in_use"} 0',
        'mneme_requests{state="running"} 0',
        "mneme_prompt_tokens_total 20",
        'mneme_finished_requests_total{reason="length"} 4',
        "mneme_shared_segments 10",
        'mneme_resident_memory_bytes{replica="a"} 1048576',
        "# TYPE mneme_time_to_first_token_seconds histogram",
        "# TYPE mneme_generated_tokens_total counter",
    ):
        assert line in lines


def test_every_sample_has_a_type_and_only_counters_are_totals() -> None:
    async def run() -> str:
        async with api_client(FakeEngineClient(TOKENIZER)) as client:
            await client.post("/v1/chat/completions", json={**CHAT, "n": 2})
            return (await client.get("/metrics")).text

    types = {}
    for line in asyncio.run(run()).splitlines():
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
