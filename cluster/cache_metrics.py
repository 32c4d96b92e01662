"""Metrics of the cache tier: what each of its nodes holds and counts, and what engines make of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mneme.cachetier.chunk_store import EDGES
from mneme.cachetier.cost_model import COST_EDGES
from mneme.cachetier.misses import Miss
from mneme.cachetier.saving import HostPut
from mneme.cluster.metric_families import Family, Sample, alone, by, lines_by, number_at, summed_lines
from mneme.cluster.prometheus import family
from mneme.replicas.chunk_fetch import GIVEN_UP

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


def _by_tier(key: str) -> list[Sample]:
    return [((("tier", tier),), (tier, key)) for tier in _TIERS]


_LOCATED = [((("tier", "host"),), ("host", "hit")), ((("tier", "disk"),), ("host", "located_on_disk"))]
_MISSES = [((("tier", tier), ("reason", miss.value)), (tier, f"miss_{miss.value}")) for tier in _TIERS for miss in Miss]
_NODES = (
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
_ENGINES = (
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


def cache_lines(nodes: Sequence[Mapping[str, Any]], engines: Sequence[Mapping[str, Any]]) -> list[str]:
    """`nodes`: what `CacheAdmin.stats` says; `engines`: what each engine's statistics have under "cache"."""
    if not nodes and not engines:
        return []
    lines = family("mneme_cache_nodes", "Nodes of the cache tier that answered.", "gauge", {(): len(nodes)})
    num_without = sum(bool(node.get("disk_problem")) for node in nodes)
    text = "Nodes that go without the disk they should have; /v1/kv/stats says why."
    lines += family("mneme_cache_nodes_without_disk", text, "gauge", {(): num_without})
    lines += lines_by("node", _NODES, nodes) + summed_lines(_ENGINES, engines)
    written = sum(number_at(node, ("disk", "written_bytes")) for node in nodes)
    lasting = written - sum(number_at(node, ("disk", "superseded_bytes")) for node in nodes)
    if lasting > 0:
        text = "Bytes of files for each byte that no longer tail has replaced."
        lines += family("mneme_cache_write_amplification_ratio", text, "gauge", {(): written / lasting})
    return lines
