"""The cache tier on /metrics: nodes each, sums over engines, and nothing where there is none."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.testclient import TestClient

from mneme.cluster.metrics import exposition as metrics_page
from mneme.cluster.metrics.exposition import cache_metrics
from mneme.errors import ReplicaUnavailable
from mneme.replicas.queries import Query
from tests.cluster.api_fixtures import TOKENIZER, api, get
from tests.cluster.fake_engine_client import FakeEngineClient
from tests.cluster.http.test_kv import IDS
from tests.cluster.metric_samples import samples, totals_of
from tests.cluster.real_engines import TwoEngines

ENGINE: dict[str, Any] = {
    "lookups": 3,
    "plans": {"load": 1, "split": 2},
    "given_up": {"waiting": 1},
    "store": {
        **{"located": 9, "peer_host_miss_absent": 2, "put_lost": 1, "put_bytes_under_way": 7, "put_taken": 4},
        **{"locate_timeout": 3, "peer_locate_failed": 1, "actors_lost": 1, "node_restarted": 1},
    },
    "read_buffer_bytes": 100,
    "retracted": 0,
    "chunks": {"loaded": 4, "lost": 1, "chunks": 5, "bytes": 500, "refused": 1, "dropped": 2, "void": 0, "failed": 0},
}


@pytest.fixture
def client(engines: TwoEngines) -> TestClient:
    return api(engines)


def page(client: TestClient) -> dict[str, float]:
    return totals_of(client.get("/metrics").raise_for_status().text)


def with_cache(engines: TwoEngines) -> None:
    """As engines say that have a cache tier."""
    plain = engines.stats

    async def stats() -> dict[str, dict[str, Any]]:
        return {name: {**figures, "cache": ENGINE} for name, figures in (await plain()).items()}

    engines.stats = stats  # type: ignore[method-assign]


def test_nodes_are_counted_once_and_engines_each(client: TestClient, engines: TwoEngines) -> None:
    with_cache(engines)
    engines.save(IDS)
    found = page(client)
    for name, value in {
        "mneme_cache_nodes": 1,
        'mneme_cache_chunks{node="node-1",tier="host"}': 4,
        'mneme_cache_capacity_bytes{node="node-1",tier="host"}': 1 << 20,
        'mneme_cache_misses_total{node="node-1",reason="bad_checksum",tier="disk"}': 0,
        "mneme_cache_lookups_total": 6,
        'mneme_cache_unsaved_chunks_total{reason="dropped"}': 4,
        'mneme_cache_plans_total{plan="split"}': 4,
        'mneme_cache_unread_chunks_total{edge="peer_host",reason="absent"}': 4,
        'mneme_cache_failed_calls_total{call="peer_locate",reason="failed"}': 2,
        'mneme_cache_node_faults_total{fault="node_restarted"}': 2,
    }.items():
        assert found[name] == value, name
    assert "mneme_cache_" not in get("/metrics", engine=FakeEngineClient(TOKENIZER)).text  # it has no tier


def test_a_tier_that_is_silent_or_slow_leaves_the_page(
    client: TestClient, engines: TwoEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_page, "_NODES_TIMEOUT_S", 0.01)
    with_cache(engines)

    async def refuse(query: Query[Any], *, replica_id: str | None = None) -> dict[str, Any]:
        raise ReplicaUnavailable("gone")

    async def hang(query: Query[Any], *, replica_id: str | None = None) -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError

    for broken in (refuse, hang):
        engines.query = broken  # type: ignore[method-assign]
        found = page(client)
        assert found["mneme_cache_nodes"] == 0
        assert not any(name.startswith("mneme_cache_puts_total") for name in found)
        assert found["mneme_cache_lookups_total"] == 6
        assert found['mneme_pages{state="total"}'] == 128


def test_a_node_that_does_not_answer_lowers_no_counter() -> None:
    nodes: list[dict[str, Any]] = [
        {"node": name, "host": {"put_bytes": count}} for name, count in (("a", 3), ("b", 4), ("b", 1))
    ]
    both, alone = samples(cache_metrics(nodes, [])), samples(cache_metrics(nodes[:1], []))
    name = "mneme_cache_put_bytes_total"
    assert {key: value for key, value in both.items() if key.startswith(name)} == {
        f'{name}{{node="a"}}': 3,
        f'{name}{{node="b"}}': 5,  # two of one name are one
    }
    assert {key: value for key, value in alone.items() if key.startswith(name)} == {f'{name}{{node="a"}}': 3}


def test_what_is_of_several_figures() -> None:
    disks = [{"written_bytes": 300, "superseded_bytes": 100}, {"written_bytes": 100, "superseded_bytes": 0}]
    nodes = [{"node": str(n), "host": {}, "disk": disk} for n, disk in enumerate(disks)]
    without = {"node": "2", "host": {"chunks": "many"}, "disk": None, "disk_problem": "/kv cannot be used"}
    found = samples(cache_metrics([*nodes, without], []))
    assert found["mneme_cache_write_amplification_ratio"] == 400 / 300  # of what lasts
    assert (found["mneme_cache_nodes"], found["mneme_cache_nodes_without_disk"]) == (3, 1)


def test_faults_of_the_directory_and_of_session_logs_are_of_nodes() -> None:
    logs = {"sessions": 5, "used_bytes": 4096, "counters": {"damaged": 1}, "copies": {"copy_failed": 3}}
    nodes = [{"node": "a", "directory": {"told_all": 2, "lookup_unanswered": 1}, "session_logs": logs}]
    found = samples(cache_metrics(nodes, []))
    assert (
        found.items()
        >= {
            'mneme_cache_directory_faults_total{fault="told_all",node="a"}': 2,
            'mneme_cache_directory_faults_total{fault="lookup_unanswered",node="a"}': 1,
            'mneme_session_logs{node="a"}': 5,
            'mneme_session_log_bytes{node="a"}': 4096,
            'mneme_session_log_faults_total{fault="damaged",node="a"}': 1,
            'mneme_session_log_copies_total{node="a",outcome="copy_failed"}': 3,
        }.items()
    )


def test_every_label_is_bounded() -> None:
    """What a node says beside is no sample: labels come from here, never from a report."""
    nodes = [{"node": "a", "host": {"miss_of_tomorrow": 5, "chunks": 1}, "owners": {"ab" * 8: {"host": 1, "disk": 1}}}]
    text = str(samples(cache_metrics(nodes, [{"replica": "r", "plans": {"of_tomorrow": 1}}])))
    assert "tomorrow" not in text
    assert "abab" not in text
