"""Metrics of the cache tier: what its nodes hold and count, once for each node, and what engines make of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from mneme.cachetier.cost_model import COST_EDGES
from mneme.cachetier.misses import Miss
from mneme.cluster.prometheus import Labels, family

_TIERS = ("host", "disk")
_COST_KINDS = ("prefill", "decode", "mixed", *COST_EDGES)


class _Family(NamedTuple):
    """Samples are sums over what is reported; `path` leads to a number in a report."""

    name: str
    kind: Literal["counter", "gauge"]
    description: str
    samples: Sequence[tuple[Labels, tuple[str, ...]]]


def _by_tier(key: str) -> list[tuple[Labels, tuple[str, ...]]]:
    return [((("tier", tier),), (tier, key)) for tier in _TIERS]


def _by(label: str, path: tuple[str, ...], keys: Iterable[str]) -> list[tuple[Labels, tuple[str, ...]]]:
    return [(((label, key),), (*path, key)) for key in keys]


_LOCATED = [((("tier", "host"),), ("host", "hit")), ((("tier", "disk"),), ("host", "located_on_disk"))]
_MISSES = [((("tier", tier), ("reason", miss.value)), (tier, f"miss_{miss.value}")) for tier in _TIERS for miss in Miss]
_NODES = (
    _Family("mneme_cache_chunks", "gauge", "Chunks in the cache tier.", _by_tier("chunks")),
    _Family("mneme_cache_bytes", "gauge", "Bytes of the cache tier in use.", _by_tier("bytes")),
    _Family("mneme_cache_capacity_bytes", "gauge", "Bytes that it may use.", _by_tier("capacity_bytes")),
    _Family("mneme_cache_located_chunks_total", "counter", "Chunks that were found for requests.", _LOCATED),
    _Family("mneme_cache_misses_total", "counter", "Chunks that could not be had, by reason.", _MISSES),
    _Family("mneme_cache_evicted_chunks_total", "counter", "Chunks that made room.", _by_tier("evicted")),
    _Family("mneme_cache_expired_chunks_total", "counter", "Chunks that were not used in time.", _by_tier("expired")),
    _Family(
        "mneme_cache_puts_total",
        "counter",
        "Chunks given to nodes, by what became of them.",
        _by("outcome", ("host",), ("taken", "kept", "to_disk", "refused")),
    ),
    _Family(
        "mneme_cache_promotions_total",
        "counter",
        "Chunks read from disk into memory: for a reader, or ahead of a waiting request.",
        _by("cause", ("host",), ("promoted", "prefetched")),
    ),
    _Family("mneme_cache_put_bytes_total", "counter", "Bytes given to nodes.", [((), ("host", "put_bytes"))]),
    _Family("mneme_cache_written_bytes_total", "counter", "Bytes of files.", [((), ("disk", "written_bytes"))]),
    _Family(
        "mneme_cache_superseded_bytes_total",
        "counter",
        "Bytes of files that a longer tail replaced.",
        [((), ("disk", "superseded_bytes"))],
    ),
    _Family(
        "mneme_cache_disk_writes_total",
        "counter",
        "Chunks for the disk, by what became of them.",
        _by("outcome", ("disk",), ("written", "kept", "no_room", "write_failed", "write_paused")),
    ),
    _Family(
        "mneme_cache_unwritten_chunks_total",
        "counter",
        "Chunks that never went to the disk: the queue was full, or they were replaced or deleted in time.",
        _by("reason", ("writer",), ("dropped", "cancelled")),
    ),
    _Family("mneme_cache_write_queue_bytes", "gauge", "Bytes that wait to be written.", [((), ("writer", "bytes"))]),
    _Family(
        "mneme_cache_pinned_bytes",
        "gauge",
        "Bytes that pins keep.",
        [((("tier", tier),), ("pins", f"{tier}_bytes")) for tier in _TIERS],
    ),
    _Family("mneme_cache_waiting_requests", "gauge", "Requests that nodes look ahead for.", [((), ("waiting",))]),
)
_ENGINES = (
    _Family("mneme_cache_lookups_total", "counter", "Prompts that engines looked for.", [((), ("lookups",))]),
    _Family(
        "mneme_cache_loaded_chunks_total",
        "counter",
        "Chunks that engines loaded, and those that did not come.",
        [((("outcome", outcome),), ("chunks", outcome)) for outcome in ("loaded", "lost")],
    ),
    _Family("mneme_cache_saved_chunks_total", "counter", "Chunks that engines saved.", [((), ("chunks", "chunks"))]),
    _Family("mneme_cache_saved_bytes_total", "counter", "Bytes that engines saved.", [((), ("chunks", "bytes"))]),
    _Family(
        "mneme_cache_unsaved_chunks_total",
        "counter",
        "Chunks that engines did not save.",
        _by("reason", ("chunks",), ("dropped", "refused", "void", "failed")),
    ),
    _Family("mneme_cache_read_buffer_bytes", "gauge", "Bytes read ahead.", [((), ("read_buffer_bytes",))]),
    *(
        _Family(
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
    """`nodes`: `NodeCache.stats()` of each; `engines`: what each engine's statistics have under "cache"."""
    if not nodes and not engines:
        return []
    lines = family("mneme_cache_nodes", "Nodes of the cache tier that answered.", "gauge", {(): len(nodes)})
    num_without = sum(bool(node.get("disk_problem")) for node in nodes)
    text = "Nodes that go without the disk they should have; /v1/kv/stats says why."
    lines += family("mneme_cache_nodes_without_disk", text, "gauge", {(): num_without})
    lines += _lines(_NODES, nodes) + _lines(_ENGINES, engines)
    written = sum(_number(node, ("disk", "written_bytes")) for node in nodes)
    lasting = written - sum(_number(node, ("disk", "superseded_bytes")) for node in nodes)
    if lasting > 0:
        text = "Bytes of files for each byte that no longer tail has replaced."
        lines += family("mneme_cache_write_amplification_ratio", text, "gauge", {(): written / lasting})
    return lines


def _lines(families: Iterable[_Family], reports: Sequence[Mapping[str, Any]]) -> list[str]:
    lines: list[str] = []
    for spec in families:
        sums = {labels: sum(_number(each, path) for each in reports) for labels, path in spec.samples}
        lines += family(spec.name, spec.description, spec.kind, sums)
    return lines


def _number(report: Any, path: tuple[str, ...]) -> float:
    """0 for what a report does not have: a node without a disk, a replica of an older version."""
    for key in path:
        report = report.get(key) if isinstance(report, Mapping) else None
    return report if isinstance(report, int | float) else 0
