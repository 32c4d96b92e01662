"""Spans of requests: one tree each, in the trace of their client, from the times that were measured."""

from __future__ import annotations

from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from starlette.testclient import TestClient

from mneme.cluster.http.api import build_api
from mneme.cluster.http.api_state import Backend
from mneme.cluster.metrics.spans import Traces
from mneme.errors import Overloaded
from tests.cluster.api_fixtures import CHAT, COMPLETION, MODEL, TOKENIZER
from tests.cluster.fake_engine_client import FakeEngineClient

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}


class Routed(FakeEngineClient):
    """Its requests were moved from a replica that was lost."""

    def routes(self, salt: str, http_id: str) -> list[dict[str, Any]]:
        candidates = [{"replica": name, "ms": {"ttft": ms}} for name, ms in (("a", 1.5), ("b", 4.0))]
        return [{"replica": name, "reason": "score", "candidates": candidates} for name in "ab"]


@pytest.fixture
def spans() -> InMemorySpanExporter:
    return InMemorySpanExporter()


def client_of(engine: FakeEngineClient, spans: InMemorySpanExporter) -> TestClient:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    return TestClient(build_api([Backend(engine, MODEL, TOKENIZER)], traces=Traces(provider)))


def tree(spans: InMemorySpanExporter) -> tuple[ReadableSpan, dict[str, ReadableSpan]]:
    *children, root = spans.get_finished_spans()
    assert root.context is not None
    for child in children:
        assert child.parent is not None
        assert (child.parent.span_id, child.context.trace_id) == (root.context.span_id, root.context.trace_id)  # type: ignore[union-attr]
        assert root.start_time <= child.start_time <= child.end_time <= root.end_time  # type: ignore[operator]
    return root, {child.name: child for child in children}


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_chat_is_a_tree_in_its_client_s_trace(spans: InMemorySpanExporter, is_stream: bool) -> None:
    client = client_of(Routed(TOKENIZER, timing=(0.0005, 0.0001)), spans)
    answer = client.post("/v1/chat/completions", json={**CHAT, "stream": is_stream}, headers=PARENT)
    root, children = tree(spans)
    assert root.name == "chat tiny"
    assert format(root.context.trace_id, "032x") == TRACE  # type: ignore[union-attr]
    assert format(root.parent.span_id, "016x") == "b7ad6b7169203331"  # type: ignore[union-attr]
    assert set(children) == {"route a", "route b", "queue", "prefill", "decode"}
    about = dict(root.attributes or {})
    assert about["gen_ai.response.id"] == answer.headers["x-request-id"]
    assert about["gen_ai.response.finish_reasons"] == ("stop",)
    assert (about["gen_ai.provider.name"], about["gen_ai.operation.name"]) == ("mneme", "chat")
    assert about["gen_ai.usage.output_tokens"] > 1  # type: ignore[operator]
    assert children["route b"].attributes["mneme.route.predicted_ms"] == (1.5, 4.0)  # type: ignore[index]
    prompt = sum(children["prefill"].attributes[f"mneme.kv.{name}_tokens"] for name in ("device", "recomputed"))  # type: ignore[index,misc]
    assert prompt == about["gen_ai.usage.input_tokens"]
    assert children["queue"].end_time == children["prefill"].start_time
    assert children["prefill"].end_time == children["decode"].start_time
    assert "fox" not in "".join(map(str, [about, *(child.attributes for child in children.values())]))  # no text


def test_a_request_that_is_refused_is_a_span_with_its_error(spans: InMemorySpanExporter) -> None:
    client_of(FakeEngineClient(TOKENIZER, refusal=Overloaded("too much")), spans).post(
        "/v1/completions", json=COMPLETION
    )
    root, children = tree(spans)
    assert (root.name, children, root.status.is_ok) == ("text_completion tiny", {}, False)
    assert root.attributes["error.type"] == Overloaded.code  # type: ignore[index]


def test_what_goes_wrong_with_spans_harms_no_request() -> None:
    class Broken:
        def get_tracer(self, *_: Any) -> Any:
            return self

    app = build_api([Backend(FakeEngineClient(TOKENIZER), MODEL, TOKENIZER)], traces=Traces(Broken()))
    assert TestClient(app).post("/v1/completions", json=COMPLETION).status_code == 200
