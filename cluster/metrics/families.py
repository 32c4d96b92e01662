"""Families of metrics that are read from reports: of engines, and of the cache tier's nodes. All are declared here.

What an ingress counts and measures by itself is in `metrics_page.py` and `latency.py`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from prometheus_client import Metric

from mneme.cachetier.chunk.misses import Miss
from mneme.cachetier.node.saving import HostPut
from mneme.cachetier.policy.cost_model import COST_EDGES
from mneme.cachetier.sessions.store import Appended
from mneme.cachetier.store import EDGES
from mneme.replicas.connector.fetch import GIVEN_UP

Labels = tuple[tuple[str, str], ...]
Sample = tuple[Labels, tuple[str, ...]]  # the path leads to a number in a report


class Family(NamedTuple):
    """Labels are bounded: they are said here, never by a report. Samples with equal labels add up."""

    name: str
    kind: Literal["counter", "gauge"]
    description: str
    samples: Sequence[Sample]


def metric(name: str, kind: Literal["counter", "gauge"], description: str, samples: Mapping[Labels, float]) -> Metric:
    """A family for the exposition; counters are named `..._total`."""
    assert (kind == "counter") == name.endswith("_total"), name
    found = Metric(name.removesuffix("_total"), description, kind)
    for labels, value in samples.items():
        found.add_sample(name, dict(labels), value)
    return found


def summed(families: Iterable[Family], reports: Sequence[Mapping[str, Any]], labels: Labels = ()) -> Iterator[Metric]:
    """Sums over reports, with `labels` on each sample."""
    for spec in families:
        sums: defaultdict[Labels, float] = defaultdict(float)
        for own, path in spec.samples:
            sums[(*labels, *own)] += sum(number_at(each, path) for each in reports)
        yield metric(spec.name, spec.kind, spec.description, sums)


def each_by(label: str, families: Iterable[Family], reports: Sequence[Mapping[str, Any]]) -> Iterator[Metric]:
    """Each report's own samples, under its name, which it has at `label`: no counter falls where one is missing."""
    for spec in families if reports else ():
        sums: defaultdict[Labels, float] = defaultdict(float)
        for each in reports:
            for labels, path in spec.samples:
                sums[((label, str(each[label])), *labels)] += number_at(each, path)
        yield metric(spec.name, spec.kind, spec.description, sums)


def number_at(report: Any, path: tuple[str, ...]) -> float:
    """0 for what a report does not have: a node without a disk, a replica of an older version."""
    for key in path:
        report = report.get(key) if isinstance(report, Mapping) else None
    return report if isinstance(report, int | float) else 0


def alone(*path: str) -> list[Sample]:
    return [((), path)]


def by(label: str, path: tuple[str, ...], keys: Iterable[str]) -> list[Sample]:
    """A sample for each key below a path."""
    return [(((label, key),), (*path, key)) for key in keys]


def _by_tier(key: str) -> list[Sample]:
    return [((("tier", tier),), (tier, key)) for tier in _TIERS]


_NOT_APPENDED = ("deleted", "dropped", "raised", "lost")  # of session logs' records
_REASONS = ("stop", "length", "abort", "error")
_STATES = ("free", "cached", "in_use", "total")
ENGINES = (
    Family(
        "mneme_pages",
        "gauge",
        "KV pages; pinned ones are in use too, reclaimable ones cached.",
        by("state", ("pages",), (*_STATES, "pinned", "reclaimable")),
    ),
    Family("mneme_host_pages", "gauge", "Pages of the host tier.", by("state", ("host_pages",), _STATES)),
    Family(
        "mneme_moved_pages_total",
        "counter",
        "KV pages saved to the host, loaded from it, dropped from the last tier.",
        by("move", ("moved_pages",), ("saved", "loaded", "dropped")),
    ),
    Family("mneme_requests", "gauge", "Requests in engines.", by("state", ("requests",), ("running", "waiting"))),
    Family("mneme_waiting_tokens", "gauge", "Prompt tokens of waiting requests.", alone("waiting_tokens")),
    Family(
        "mneme_refused_requests_total",
        "counter",
        "Requests that engines answered 429, by what was full.",
        by("reason", ("refused",), ("requests", "tokens", "session")),
    ),
    Family("mneme_missed_deadlines_total", "counter", "Requests whose deadline passed.", alone("missed_deadlines")),
    Family("mneme_prompt_tokens_total", "counter", "Tokens of admitted prompts.", alone("tokens", "prompt")),
    Family("mneme_cached_tokens_total", "counter", "Prompt tokens not computed.", alone("tokens", "cached")),
    Family("mneme_host_tokens_total", "counter", "Cached tokens that came from the host.", alone("tokens", "host")),
    Family("mneme_dropped_tokens_total", "counter", "Tokens computed again.", alone("tokens", "dropped")),
    Family("mneme_truncated_tokens_total", "counter", "Prompt tokens dropped to fit.", alone("tokens", "truncated")),
    Family("mneme_generated_tokens_total", "counter", "Output tokens.", alone("tokens", "generated")),
    Family(
        "mneme_finished_requests_total",
        "counter",
        "Ended requests; an abort is one whose client left.",
        by("reason", ("finished",), _REASONS),
    ),
    Family("mneme_engine_steps_total", "counter", "Engine steps.", alone("steps")),
    Family("mneme_sessions", "gauge", "Sessions whose token log is kept.", alone("sessions")),
    Family(
        "mneme_session_log_records_total",
        "counter",
        "What engines wrote to sessions' logs, by what became of it.",
        by("outcome", ("session_logs", "write"), (*(each.value for each in Appended), *_NOT_APPENDED)),
    ),
    Family(
        "mneme_session_log_waiting_records",
        "gauge",
        "What is still to be written to sessions' logs.",
        alone("session_logs", "write", "waiting"),
    ),
    Family(
        "mneme_session_log_failing_sessions",
        "gauge",
        "Sessions whose last record could not be written and is tried again.",
        alone("session_logs", "write", "later"),
    ),
    Family(
        "mneme_session_log_reads_total",
        "counter",
        "Sessions that engines took from their logs, and those that they could not.",
        by("outcome", ("session_logs", "read"), ("restored", "unusable", "failed")),
    ),
    Family(
        "mneme_shared_segments",
        "gauge",
        "Segments that two or more sequences read at once.",
        alone("shared_segments"),
    ),
    Family("mneme_cuda_graph_replays_total", "counter", "Decode steps that were replayed.", alone("graphs", "replays")),
    Family("mneme_cuda_graph_failures_total", "counter", "Captures that failed.", alone("graphs", "failed")),
    Family("mneme_cuda_graphs_off", "gauge", "Replicas that capture no more steps.", alone("graphs", "off")),
)
_FROM_TIERS = tuple(((), ("tokens", source)) for source in ("host", "disk", "peer"))
_COMPUTED = tuple(((), ("tokens", source)) for source in ("recomputed", "dropped"))
# The names under which dashboards, autoscalers and load tools know the same figures of vLLM, with label `model_name`.
VLLM = (
    Family("vllm:num_requests_running", "gauge", "Requests that run.", alone("requests", "running")),
    Family("vllm:num_requests_waiting", "gauge", "Requests that wait.", alone("requests", "waiting")),
    Family(
        "vllm:num_preemptions_total",
        "counter",
        "Suspensions of running requests for want of pages.",
        alone("requests", "suspended_total"),
    ),
    Family("vllm:prompt_tokens_total", "counter", "Tokens of admitted prompts.", alone("tokens", "prompt")),
    Family(
        "vllm:prompt_tokens_cached_total",
        "counter",
        "Prompt tokens that were not computed: of the device and of all tiers.",
        alone("tokens", "cached"),
    ),
    Family("vllm:generation_tokens_total", "counter", "Output tokens.", alone("tokens", "generated")),
    Family(
        "vllm:request_success_total",
        "counter",
        "Ended requests; an abort is one whose client left.",
        by("finished_reason", ("finished",), _REASONS),
    ),
    Family("vllm:prefix_cache_queries_total", "counter", "Prompt tokens looked for.", alone("tokens", "prompt")),
    Family("vllm:prefix_cache_hits_total", "counter", "Those found on the device.", alone("tokens", "device")),
    Family(
        "vllm:external_prefix_cache_queries_total",
        "counter",
        "Prompt tokens that were not on the device.",
        (*_FROM_TIERS, *_COMPUTED),
    ),
    Family(
        "vllm:external_prefix_cache_hits_total",
        "counter",
        "Those that came from the host, a disk or another node.",
        _FROM_TIERS,
    ),
)
_TIERS = ("host", "disk")
_CALLS = ("locate", "peer_locate")
_PUTS = (*(outcome.value for outcome in HostPut), "dropped", "failed", "lost")
_DIRECTORY_FAULTS = ("lookup_unanswered", "lookup_not_asked", "announce_unanswered", "shard_lost", "told_all")
_LOG_FAULTS = (
    *("append_failed", "read_failed", "remove_failed", "tombstone_failed", "disk_full"),
    *("damaged", "torn", "lost", "evicted", "expired"),
)
_LOG_COPIES = ("copied", "copied_whole", "copy_failed", "copy_dropped", "copy_alone", "copy_gone", "peer_failed")
_COST_KINDS = ("prefill", "decode", "mixed", *COST_EDGES)


_LOCATED = [((("tier", "host"),), ("host", "hit")), ((("tier", "disk"),), ("host", "located_on_disk"))]
_MISSES = [((("tier", tier), ("reason", miss.value)), (tier, f"miss_{miss.value}")) for tier in _TIERS for miss in Miss]
CACHE_NODES = (
    Family("mneme_cache_chunks", "gauge", "Chunks in the cache tier.", _by_tier("chunks")),
    Family("mneme_cache_bytes", "gauge", "Bytes of the cache tier in use.", _by_tier("bytes")),
    Family("mneme_cache_capacity_bytes", "gauge", "Bytes that it may use.", _by_tier("capacity_bytes")),
    Family("mneme_cache_located_chunks_total", "counter", "Chunks that were found for requests.", _LOCATED),
    Family("mneme_cache_misses_total", "counter", "Chunks that could not be had, by reason.", _MISSES),
    Family("mneme_cache_evicted_chunks_total", "counter", "Chunks that made room.", _by_tier("evicted")),
    Family("mneme_cache_expired_chunks_total", "counter", "Chunks that were not used in time.", _by_tier("expired")),
    Family(
        "mneme_cache_puts_total",
        "counter",
        "Chunks given to nodes, by what became of them.",
        by("outcome", ("host",), ("taken", "kept", "to_disk", "refused")),
    ),
    Family(
        "mneme_cache_refused_chunks_total",
        "counter",
        "Chunks that nodes refused as memory could not take their bytes, or as what they follow is gone.",
        by("reason", ("host",), ("memory_refused", "orphan")),
    ),
    Family(
        "mneme_cache_promotions_total",
        "counter",
        "Chunks read from disk into memory: for a reader, or ahead of a waiting request.",
        by("cause", ("host",), ("promoted", "prefetched")),
    ),
    Family("mneme_cache_put_bytes_total", "counter", "Bytes given to nodes.", alone("host", "put_bytes")),
    Family("mneme_cache_written_bytes_total", "counter", "Bytes of files.", alone("disk", "written_bytes")),
    Family(
        "mneme_cache_superseded_bytes_total",
        "counter",
        "Bytes of files that a longer tail replaced.",
        alone("disk", "superseded_bytes"),
    ),
    Family(
        "mneme_cache_disk_writes_total",
        "counter",
        "Chunks for the disk, by what became of them.",
        by("outcome", ("disk",), ("written", "kept", "no_room", "write_blocked", "write_failed", "write_paused")),
    ),
    Family(
        "mneme_cache_unwritten_chunks_total",
        "counter",
        "Chunks that never went to the disk: the queue was full, or they were replaced or deleted in time.",
        by("reason", ("writer",), ("dropped", "cancelled")),
    ),
    Family("mneme_cache_write_queue_bytes", "gauge", "Bytes that wait to be written.", alone("writer", "bytes")),
    Family(
        "mneme_cache_pinned_bytes",
        "gauge",
        "Bytes that pins keep.",
        [((("tier", tier),), ("pins", f"{tier}_bytes")) for tier in _TIERS],
    ),
    Family("mneme_cache_waiting_requests", "gauge", "Requests that nodes look ahead for.", alone("waiting")),
    Family(
        "mneme_cache_directory_faults_total",
        "counter",
        "Calls of nodes to the directory that were in vain or not made, and how often a shard had to be told all.",
        by("fault", ("directory",), _DIRECTORY_FAULTS),
    ),
    Family("mneme_session_logs", "gauge", "Session logs of nodes, copies too.", alone("session_logs", "sessions")),
    Family("mneme_session_log_bytes", "gauge", "Bytes of session logs.", alone("session_logs", "used_bytes")),
    Family(
        "mneme_session_log_faults_total",
        "counter",
        "Session logs that could not be read, written or removed, and those that made room.",
        by("fault", ("session_logs", "counters"), _LOG_FAULTS),
    ),
    Family(
        "mneme_session_log_copies_total",
        "counter",
        "Copies of session logs for another node, by what became of them.",
        by("outcome", ("session_logs", "copies"), _LOG_COPIES),
    ),
    Family(
        "mneme_session_log_waiting_copies",
        "gauge",
        "Session logs whose copies are still to be made.",
        alone("session_logs", "copies_waiting"),
    ),
)
CACHE_ENGINES = (
    Family("mneme_cache_lookups_total", "counter", "Prompts that engines looked for.", alone("lookups")),
    Family(
        "mneme_cache_loaded_chunks_total",
        "counter",
        "Chunks that engines loaded, and those that did not come.",
        [((("outcome", outcome),), ("chunks", outcome)) for outcome in ("loaded", "lost")],
    ),
    Family("mneme_cache_saved_chunks_total", "counter", "Chunks that engines saved.", alone("chunks", "chunks")),
    Family("mneme_cache_saved_bytes_total", "counter", "Bytes that engines saved.", alone("chunks", "bytes")),
    Family(
        "mneme_cache_unsaved_chunks_total",
        "counter",
        "Chunks that engines did not save.",
        by("reason", ("chunks",), ("dropped", "refused", "void", "failed")),
    ),
    Family(
        "mneme_cache_plans_total",
        "counter",
        "Prompts of which the tier had something, by how much of that was to be loaded.",
        by("plan", ("plans",), ("load", "split", "compute", "probe")),
    ),
    Family(
        "mneme_cache_given_up_total",
        "counter",
        "Prompts whose chunks took too long: to be found, to come before a step, to come within one.",
        by("while", ("given_up",), GIVEN_UP),
    ),
    Family("mneme_cache_found_chunks_total", "counter", "Chunks that engines found.", alone("store", "located")),
    Family(
        "mneme_cache_unread_chunks_total",
        "counter",
        "Chunks that engines found and could not read, by where from and why.",
        [((("edge", e), ("reason", m.value)), ("store", f"{e}_miss_{m.value}")) for e in EDGES for m in Miss],
    ),
    Family(
        "mneme_cache_put_chunks_total",
        "counter",
        "Chunks that engines put, by what became of them; of lost ones nothing is known.",
        [((("outcome", outcome),), ("store", f"put_{outcome}")) for outcome in _PUTS],
    ),
    Family(
        "mneme_cache_put_bytes_under_way",
        "gauge",
        "Bytes on their way to nodes.",
        alone("store", "put_bytes_under_way"),
    ),
    Family(
        "mneme_cache_failed_calls_total",
        "counter",
        "Calls of engines to nodes that were not answered, or not in time.",
        [((("call", c), ("reason", r)), ("store", f"{c}_{r}")) for c in _CALLS for r in ("timeout", "failed")],
    ),
    Family(
        "mneme_cache_node_faults_total",
        "counter",
        "What engines saw: nodes not asked as they did not answer, gone or made again, and chunks wrongly said of one.",
        by("fault", ("store",), ("not_asked", "actors_lost", "node_restarted", "directory_ghosts")),
    ),
    Family("mneme_cache_read_buffer_bytes", "gauge", "Bytes read ahead.", alone("read_buffer_bytes")),
    *(
        Family(
            f"mneme_cost_{name}_total",
            "counter",
            text,
            [((("kind", kind),), ("accuracy", kind, key)) for kind in _COST_KINDS],
        )
        for name, key, text in (
            ("predictions", "count", "Steps and loads whose duration was predicted and measured."),
            ("predicted_seconds", "predicted_s", "What they were predicted to take."),
            ("actual_seconds", "actual_s", "What they took."),
            ("relative_error", "relative_error_sum", "Sums of |predicted - actual| / actual."),
        )
    ),
)
