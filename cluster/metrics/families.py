"""Declares every family of metrics that is read from reports: of engines, and of the cache tier's nodes.

What an ingress counts and measures by itself is in `exposition.py` and `latency.py`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple, get_args

from prometheus_client import Metric

from mneme.cachetier.names import COST_EDGES, EDGES, Appended, HostPut, Miss
from mneme.replicas.documents import SELECTORS, Reason
from mneme.replicas.report import GIVEN_UP

Labels = tuple[tuple[str, str], ...]


class Family(NamedTuple):
    """Labels are bounded: they are said here, never by a report. Samples with equal labels add up."""

    name: str
    description: str
    samples: Sequence[tuple[Labels, tuple[str, ...]]]  # the path leads to a number in a report


def family(name: str, description: str, paths: str, **labels: Iterable[str]) -> Family:
    """One row of the tables below, with a sample for each combination of its labels' values.

    paths  keys of a report, joined by dots, with labels' values in braces; several, between spaces, add up
    """
    cases = [tuple(zip(labels, values, strict=True)) for values in product(*labels.values())]
    found = [(case, tuple(path.format_map(dict(case)).split("."))) for case in cases for path in paths.split()]
    return Family(name, description, found)


def metric(name: str, description: str, samples: Mapping[Labels, float]) -> Metric:
    """A family for the exposition: counters are named `..._total`, the others are gauges."""
    found = Metric(name.removesuffix("_total"), description, "counter" if name.endswith("_total") else "gauge")
    for labels, value in samples.items():
        found.add_sample(name, dict(labels), value)
    return found


def summed(
    families: Iterable[Family], reports: Sequence[Mapping[str, Any]], labels: Labels = (), *, by: Sequence[str] = ()
) -> Iterator[Metric]:
    """Sums over reports, with `labels` on each sample.

    by  sums over reports with equal values there, which are labels too: no counter falls where a report is missing.
        Nor where one is old, as another ingress may have said more already: that one says gauges alone
    """
    for name, description, samples in families:
        sums = defaultdict[Labels, float](float, {} if by else {(*labels, *case): 0.0 for case, _ in samples})
        for report in reports:
            if name.endswith("_total") and report.get("age_s"):
                continue
            own = (*labels, *((label, str(report[label])) for label in by))
            for case, path in samples:
                sums[(*own, *case)] += number_at(report, path)
        yield metric(name, description, sums)


def number_at(report: Any, path: tuple[str, ...]) -> float:
    """0 for what a report does not have: a node without a disk, a replica of an older version."""
    for key in path:
        report = report.get(key) if isinstance(report, Mapping) else None
    return report if isinstance(report, int | float) else 0


_STATES = ("free", "cached", "in_use", "total")
_REASONS = ("stop", "length", "abort", "error")
_TIERS = ("host", "disk")
_MISSES = [miss.value for miss in Miss]
ENGINES = (
    family(
        "mneme_pages",
        "KV pages; pinned ones are in use too, reclaimable ones cached.",
        "pages.{state}",
        state=(*_STATES, "pinned", "reclaimable"),
    ),
    family("mneme_host_pages", "Pages of the host tier.", "host_pages.{state}", state=_STATES),
    family(
        "mneme_moved_pages_total",
        "KV pages saved to the host, loaded from it, dropped from the last tier.",
        "moved_pages.{move}",
        move=("saved", "loaded", "dropped"),
    ),
    family("mneme_requests", "Requests in engines.", "requests.{state}", state=("running", "waiting")),
    family("mneme_waiting_tokens", "Prompt tokens of waiting requests.", "waiting_tokens"),
    family(
        "mneme_refused_requests_total",
        "Requests that engines answered 429, by what was full.",
        "refused.{reason}",
        reason=("requests", "tokens", "session"),
    ),
    family("mneme_missed_deadlines_total", "Requests whose deadline passed.", "missed_deadlines"),
    family("mneme_prompt_tokens_total", "Tokens of admitted prompts.", "tokens.prompt"),
    family("mneme_cached_tokens_total", "Prompt tokens not computed.", "tokens.cached"),
    family("mneme_host_tokens_total", "Cached tokens that came from the host.", "tokens.host"),
    family("mneme_dropped_tokens_total", "Tokens computed again.", "tokens.dropped"),
    family("mneme_truncated_tokens_total", "Prompt tokens dropped to fit.", "tokens.truncated"),
    family("mneme_generated_tokens_total", "Output tokens.", "tokens.generated"),
    family(
        "mneme_blend_requests_total",
        "Requests that reused documents behind other text.",
        "blend.requests.{selector}",
        selector=SELECTORS,
    ),
    family(
        "mneme_blend_tokens_total",
        "Tokens of documents: reused behind other text, found as an exact prefix, and computed.",
        "blend.tokens.{kind}",
        kind=("reused", "exact", "recomputed"),
    ),
    family(
        "mneme_blend_declined_total",
        "Requests with documents that reused none behind other text, by reason.",
        "blend.declined.{reason}",
        reason=get_args(Reason),
    ),
    family(
        "mneme_finished_requests_total",
        "Ended requests; an abort is one whose client left.",
        "finished.{reason}",
        reason=_REASONS,
    ),
    family("mneme_engine_steps_total", "Engine steps.", "steps"),
    family(
        "mneme_weight_bytes",
        "Bytes of engines' matrices, by what they are multiplied as.",
        "weight_bytes.{format}",
        format=("float32", "bfloat16", "float16", "int8", "int4", "fp8"),
    ),
    family(
        "mneme_kv_bytes",
        "Bytes of engines' pools of KV, by what it is stored as.",
        "kv_bytes.{format}",
        format=("float32", "bfloat16", "float16", "int8"),
    ),
    *(
        family(
            f"mneme_cost_{name}_total",
            description,
            f"accuracy.{{kind}}.{key}",
            kind=("prefill", "decode", "mixed", *COST_EDGES),
        )
        for name, key, description in (
            ("predictions", "count", "Steps and loads whose duration was predicted and measured."),
            ("predicted_seconds", "predicted_s", "Predicted seconds of steps and loads."),
            ("actual_seconds", "actual_s", "Measured seconds of steps and loads that had a prediction."),
            (
                "relative_error",
                "relative_error_sum",
                "Sum of |predicted - measured| / measured; divide by the predictions.",
            ),
        )
    ),
    family("mneme_sessions", "Sessions whose token log is kept.", "sessions"),
    family(
        "mneme_session_log_records_total",
        "What engines wrote to sessions' logs, by what became of it.",
        "session_logs.write.{outcome}",
        outcome=(*(each.value for each in Appended), "deleted", "raised", "lost"),
    ),
    family(
        "mneme_session_log_waiting_records",
        "What is still to be written to sessions' logs.",
        "session_logs.write.waiting",
    ),
    family(
        "mneme_session_log_failing_sessions",
        "Sessions whose last record could not be written and is tried again.",
        "session_logs.write.later",
    ),
    family(
        "mneme_session_log_reads_total",
        "Sessions that engines took from their logs, and those that they could not.",
        "session_logs.read.{outcome}",
        outcome=("restored", "unusable", "failed"),
    ),
    family("mneme_shared_segments", "Segments that two or more sequences read at once.", "shared_segments"),
    family("mneme_cuda_graph_replays_total", "Engine steps that replayed a CUDA graph.", "graphs.replays"),
    family("mneme_cuda_graph_failures_total", "CUDA graph captures that failed.", "graphs.failed"),
    family("mneme_cuda_graphs_off", "Whether the replica has stopped capturing CUDA graphs.", "graphs.off"),
    family("mneme_resident_memory_bytes", "Resident memory of the replica's process.", "rss_bytes"),
    family("mneme_report_age_seconds", "Seconds since the replica last said its figures.", "age_s"),
)
# The names under which dashboards, autoscalers and load tools know the same figures of vLLM, with its labels
# `model_name` and `engine`, a replica.
VLLM = (
    family("vllm:num_requests_running", "Requests that run.", "requests.running"),
    family("vllm:num_requests_waiting", "Requests that wait.", "requests.waiting"),
    family(
        "vllm:num_preemptions_total", "Suspensions of running requests for want of pages.", "requests.suspended_total"
    ),
    family("vllm:prompt_tokens_total", "Tokens of admitted prompts.", "tokens.prompt"),
    family(
        "vllm:prompt_tokens_cached_total",
        "Prompt tokens that were not computed: of the device and of all tiers.",
        "tokens.cached",
    ),
    family("vllm:generation_tokens_total", "Output tokens.", "tokens.generated"),
    family(
        "vllm:request_success_total",
        "Ended requests; an abort is one whose client left.",
        "finished.{finished_reason}",
        finished_reason=_REASONS,
    ),
    family("vllm:prefix_cache_queries_total", "Prompt tokens looked for.", "tokens.prompt"),
    family("vllm:prefix_cache_hits_total", "Prompt tokens found on the device.", "tokens.device"),
    family(
        "vllm:external_prefix_cache_queries_total",
        "Prompt tokens that were not on the device.",
        "tokens.host tokens.disk tokens.peer tokens.recomputed tokens.dropped",
    ),
    family(
        "vllm:external_prefix_cache_hits_total",
        "Prompt tokens that came from the host, a disk or another node.",
        "tokens.host tokens.disk tokens.peer",
    ),
)
STARTS = (  # by label `replica`; a phase's labels are the engine's
    ("mneme_start_seconds", "What each phase of a replica's start took.", "seconds"),
    ("mneme_start_bytes", "Memory that each phase took: the device's, on a CPU the process's.", "bytes"),
)
GPUS = (  # by label `gpu`
    family("mneme_gpu_memory_bytes", "Memory of GPUs.", "memory.{state}", state=("used", "total")),
    family("mneme_gpu_utilization_ratio", "Share of time in which a kernel ran.", "utilization"),
    family("mneme_gpu_ecc_uncorrected_errors", "Since the driver was loaded.", "ecc_uncorrected"),
    family(
        "mneme_gpu_xid_errors_total",
        "Xids since the replica began: of the device, which is not used any more then, or of programs.",
        "xids.{of}",
        of=("device", "program"),
    ),
)
ROUTING = (
    family(
        "mneme_route_decisions_total",
        "Choices of replicas: for a session that was answering, by price, by hash, of two by load, by another's rule.",
        "decisions.{reason}",
        reason=("session", "score", "ring", "p2c", "policy"),
    ),
    *(
        family(f"mneme_route_{name}_total", description, f"accuracy.{key}")
        for name, key, description in (
            ("predictions", "count", "Requests whose time to the first token was predicted and measured."),
            ("predicted_ttft_seconds", "predicted_s", "Predicted seconds to their first token."),
            (
                "actual_ttft_seconds",
                "actual_s",
                "Measured seconds to the first token of requests that had a prediction.",
            ),
            ("ttft_later", "later", "Requests that took longer than predicted: half of them if the median is right."),
            (
                "ttft_relative_error",
                "relative_error",
                "Sum of |predicted - measured| / measured; divide by the predictions.",
            ),
        )
    ),
    family(
        "mneme_route_cached_tokens_total",
        "Prompt tokens not computed: as predicted, as found, predicted but not found, and found but not predicted.",
        "accuracy.{kind}_tokens",
        kind=("predicted", "found", "missing", "surplus"),
    ),
)
CACHE_NODES = (
    family("mneme_cache_chunks", "Chunks in the cache tier.", "{tier}.chunks", tier=_TIERS),
    family("mneme_cache_bytes", "Bytes of the cache tier in use.", "{tier}.bytes", tier=_TIERS),
    family("mneme_cache_capacity_bytes", "Bytes that the cache tier may use.", "{tier}.capacity_bytes", tier=_TIERS),
    Family(
        "mneme_cache_located_chunks_total",
        "Chunks that were found for requests.",
        [((("tier", "host"),), ("host", "hit")), ((("tier", "disk"),), ("host", "located_on_disk"))],
    ),
    family(
        "mneme_cache_misses_total",
        "Chunks that could not be had, by reason.",
        "{tier}.miss_{reason}",
        tier=_TIERS,
        reason=_MISSES,
    ),
    family("mneme_cache_evicted_chunks_total", "Chunks that made room.", "{tier}.evicted", tier=_TIERS),
    family("mneme_cache_expired_chunks_total", "Chunks that were not used in time.", "{tier}.expired", tier=_TIERS),
    family(
        "mneme_cache_puts_total",
        "Chunks given to nodes, by what became of them.",
        "host.{outcome}",
        outcome=("taken", "kept", "to_disk", "refused"),
    ),
    family(
        "mneme_cache_refused_chunks_total",
        "Chunks that nodes refused as memory could not take their bytes, or as what they follow is gone.",
        "host.{reason}",
        reason=("memory_refused", "orphan"),
    ),
    family(
        "mneme_cache_promotions_total",
        "Chunks read from disk into memory: for a reader, or ahead of a waiting request.",
        "host.{cause}",
        cause=("promoted", "prefetched"),
    ),
    family("mneme_cache_put_bytes_total", "Bytes given to nodes.", "host.put_bytes"),
    family("mneme_cache_written_bytes_total", "Bytes of files.", "disk.written_bytes"),
    family(
        "mneme_cache_superseded_bytes_total", "Bytes of files that a longer tail replaced.", "disk.superseded_bytes"
    ),
    family(
        "mneme_cache_disk_writes_total",
        "Chunks for the disk, by what became of them.",
        "disk.{outcome}",
        outcome=("written", "kept", "no_room", "write_blocked", "write_failed", "write_paused"),
    ),
    family(
        "mneme_cache_unwritten_chunks_total",
        "Chunks that never went to the disk: the queue was full, or they were replaced or deleted in time.",
        "writer.{reason}",
        reason=("dropped", "cancelled"),
    ),
    family("mneme_cache_write_queue_bytes", "Bytes that wait to be written.", "writer.bytes"),
    family("mneme_cache_pinned_bytes", "Bytes that pins keep.", "pins.{tier}_bytes", tier=_TIERS),
    family("mneme_cache_waiting_requests", "Requests that nodes look ahead for.", "waiting"),
    family(
        "mneme_cache_directory_faults_total",
        "Calls of nodes to the directory that were in vain or not made, and how often it had to be told all.",
        "directory.{fault}",
        fault=("lookup_unanswered", "lookup_not_asked", "announce_unanswered", "shard_lost", "told_all"),
    ),
    family("mneme_session_logs", "Session logs of nodes, copies too.", "session_logs.sessions"),
    family("mneme_session_log_bytes", "Bytes of session logs.", "session_logs.used_bytes"),
    family(
        "mneme_session_log_faults_total",
        "Session logs that could not be read, written or removed, and those that made room.",
        "session_logs.counters.{fault}",
        fault=(
            *("append_failed", "read_failed", "tombstone_failed", "disk_full"),
            *("damaged", "lost", "evicted", "expired"),
        ),
    ),
    family(
        "mneme_session_log_copies_total",
        "Copies of session logs for another node, by what became of them.",
        "session_logs.copies.{outcome}",
        outcome=("copied", "copied_whole", "copy_failed", "copy_dropped", "copy_alone", "copy_gone", "peer_failed"),
    ),
    family(
        "mneme_session_log_waiting_copies",
        "Session logs whose copies are still to be made.",
        "session_logs.copies_waiting",
    ),
)
CACHE_ENGINES = (
    family("mneme_cache_lookups_total", "Prompts that engines looked for.", "lookups"),
    family(
        "mneme_cache_loaded_chunks_total",
        "Chunks that engines loaded, and those that did not come.",
        "chunks.{outcome}",
        outcome=("loaded", "lost"),
    ),
    family("mneme_cache_saved_chunks_total", "Chunks that engines saved.", "chunks.chunks"),
    family("mneme_cache_saved_bytes_total", "Bytes that engines saved.", "chunks.bytes"),
    family(
        "mneme_cache_unsaved_chunks_total",
        "Chunks that engines did not save.",
        "chunks.{reason}",
        reason=("dropped", "refused", "void", "failed"),
    ),
    family(
        "mneme_cache_plans_total",
        "Prompts of which the tier had something, by how much of that was to be loaded.",
        "plans.{plan}",
        plan=("load", "split", "compute"),
    ),
    family(
        "mneme_cache_given_up_total",
        "Prompts whose chunks took too long: to be found, to come before a step, to come within one.",
        "given_up.{while}",
        **{"while": GIVEN_UP},
    ),
    family("mneme_cache_found_chunks_total", "Chunks that engines found.", "store.located"),
    family(
        "mneme_cache_unread_chunks_total",
        "Chunks that engines found and could not read, by where from and why.",
        "store.{edge}_miss_{reason}",
        edge=EDGES,
        reason=_MISSES,
    ),
    family(
        "mneme_cache_put_chunks_total",
        "Chunks that engines put, by what became of them; of lost ones nothing is known.",
        "store.put_{outcome}",
        outcome=(*(each.value for each in HostPut), "dropped", "failed", "lost"),
    ),
    family("mneme_cache_put_bytes_under_way", "Bytes on their way to nodes.", "store.put_bytes_under_way"),
    family(
        "mneme_cache_failed_calls_total",
        "Calls of engines to nodes that were not answered, or not in time.",
        "store.{call}_{reason}",
        call=("locate", "peer_locate"),
        reason=("timeout", "failed"),
    ),
    family(
        "mneme_cache_node_faults_total",
        "What engines saw: nodes not asked as they did not answer, gone or made again, and chunks wrongly said of one.",
        "store.{fault}",
        fault=("not_asked", "actors_lost", "node_restarted", "directory_ghosts"),
    ),
    family("mneme_cache_read_buffer_bytes", "Bytes read ahead.", "read_buffer_bytes"),
)
# What is worth telling as it happens: chunks that could not be read as their bytes are wrong, nodes that are gone.
FAULTS = tuple(
    Family(
        each.name,
        each.description,
        [case for case in each.samples if dict(case[0]).get("reason") not in ("absent", "busy")],
    )
    for each in (*ENGINES, *CACHE_ENGINES)
    if each.name
    in (
        "mneme_cache_unread_chunks_total",
        "mneme_cache_failed_calls_total",
        "mneme_cache_node_faults_total",
        "mneme_cuda_graph_failures_total",
    )
)
