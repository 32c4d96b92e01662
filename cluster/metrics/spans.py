"""Spans of requests for OpenTelemetry: one tree per request, in the trace that its client began (`traceparent`).

    chat MODEL            SERVER   from the request's arrival to the end of its answer; `gen_ai.*` attributes
    |- route REPLICA      for each replica that was chosen; its candidates' predicted times as attributes
    |- queue              until the engine began with the prompt
    |- prefill            until its first token; tokens by where their KV came from
    `- decode             until its last token

Spans are made when a request has ended, from the times that were measured anyway, so a request costs nothing while it
runs. The exporter is `mneme[otel]`'s; without an endpoint nothing of OpenTelemetry is imported.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mneme.errors import ConfigError
from mneme.version import __version__

logger = logging.getLogger(__name__)

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}.*")
_OPERATIONS = {"/v1/embeddings": "embeddings", "/v1/completions": "text_completion"}  # others: chat


class Times(NamedTuple):
    """Seconds since 1970; None: it did not come to that."""

    arrived: float
    begun: float | None  # the engine began with the prompt
    first_token: float | None
    last_token: float | None
    ended: float


class Traces:
    """Makes the spans of one ingress, and sends them in the background."""

    def __init__(self, provider: Any) -> None:
        """`provider`: an OpenTelemetry `TracerProvider`."""
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("mneme", __version__)
        self._propagator = TraceContextTextMapPropagator()

    @classmethod
    def to(cls, endpoint: str, ingress: str) -> Traces:
        """Send spans to an OTLP endpoint over HTTP, such as http://127.0.0.1:4318/v1/traces; raises `ConfigError`."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise ConfigError("http.otlp_endpoint: needs pip install mneme[otel]") from error
        about = {"service.name": "mneme", "service.version": __version__, "service.instance.id": ingress}
        provider = TracerProvider(resource=Resource.create(about))
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        return cls(provider)

    def close(self) -> None:
        """Send what waits."""
        self._provider.shutdown()

    def add(
        self,
        request: Mapping[str, Any],
        times: Times,
        routes: Sequence[Mapping[str, Any]],
        headers: Mapping[str, str],
    ) -> str | None:
        """Make the spans of a request that has ended (`ShownRequest`); nothing that goes wrong here reaches it.

        Returns the id of its trace; None: something went wrong.
        """
        try:
            return self._add(request, times, routes, headers)
        except Exception:  # a request has been answered; the edge of another library
            logger.exception("no spans request=%s", request["id"])
            return None

    def _add(
        self, request: Mapping[str, Any], times: Times, routes: Sequence[Mapping[str, Any]], headers: Mapping[str, str]
    ) -> str:
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        operation = _OPERATIONS.get(request["path"], "chat")
        kv = request["kv_details"]
        attributes = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "mneme",
            "gen_ai.request.model": request["model"],
            "gen_ai.response.model": request["model"],
            "gen_ai.response.id": request["id"],
            "gen_ai.response.finish_reasons": [request["outcome"]],
            "gen_ai.usage.input_tokens": request["prompt_tokens"],
            "gen_ai.usage.output_tokens": request["completion_tokens"],
            "gen_ai.usage.cache_read.input_tokens": sum(kv[name] for name in ("device", "host", "disk", "peer")),
            "http.route": request["path"],
        }
        if request["first_token_ms"] is not None:
            attributes["gen_ai.response.time_to_first_chunk"] = request["first_token_ms"] / 1e3
        root = self._tracer.start_span(
            f"{operation} {request['model']}",
            context=self._propagator.extract(headers),
            kind=SpanKind.SERVER,
            attributes=attributes,
            start_time=_ns(times.arrived),
        )
        if request["outcome"] not in ("stop", "length", "tool_calls"):
            root.set_status(Status(StatusCode.ERROR, request["outcome"]))
            root.set_attribute("error.type", request["outcome"])
        within = set_span_in_context(root)

        def child(name: str, start: float, end: float, about: Mapping[str, Any]) -> None:
            span = self._tracer.start_span(name, context=within, attributes=about, start_time=_ns(start))
            span.end(_ns(max(end, start)))

        for route in routes:
            child(f"route {route['replica']}", times.arrived, times.begun or times.arrived, _of_route(route))
        if times.begun is not None:
            child("queue", times.begun - request["queue_ms"] / 1e3, times.begun, {})
        if times.begun is not None and times.first_token is not None:
            sources = {f"mneme.kv.{name}_tokens": count for name, count in kv.items() if isinstance(count, int)}
            child("prefill", times.begun, times.first_token, sources)
        if times.first_token is not None and times.last_token is not None:
            child("decode", times.first_token, times.last_token, {"mneme.tokens": request["completion_tokens"]})
        root.end(_ns(times.ended))
        return f"{root.get_span_context().trace_id:032x}"


def trace_id_of(headers: Mapping[str, str]) -> str | None:
    """Return the id in a W3C `traceparent`, if there is a sound one."""
    found = _TRACEPARENT.fullmatch(headers.get("traceparent", ""))
    return None if found is None else found[1]


def _of_route(route: Mapping[str, Any]) -> dict[str, Any]:
    candidates = route["candidates"]
    return {
        "mneme.route.replica": route["replica"],
        "mneme.route.reason": route["reason"],
        "mneme.route.candidates": [each["replica"] for each in candidates],
        "mneme.route.predicted_ms": [each["ms"].get("ttft", 0.0) for each in candidates],
    }


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
