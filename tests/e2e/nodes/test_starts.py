"""Starts of the cache tier: over an actor of another configuration, and on a disk that cannot be used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ray.util import list_named_actors

from mneme.cachetier.config import CacheConfig, DiskTierConfig
from mneme.cachetier.distributed.lifecycle import shutdown_cache_tier, start_session_logs
from mneme.cachetier.names import Appended
from mneme.cachetier.session_log.rows import SessionState, rows_of
from mneme.errors import ConfigError
from tests.cachetier.session_records import ids_of, key_number
from tests.e2e.nodes.cache_cluster import (
    CALL_LIMIT_S,
    CHUNK_TOKENS,
    MARKS,
    CacheCluster,
    EngineProcess,
    call,
    eventually,
    kill,
)

pytestmark = MARKS

IDS = list(range(1, 2 * CHUNK_TOKENS + 1))


def disk_config(folder: Path, capacity_bytes: int = 100 << 20) -> CacheConfig:
    return CacheConfig(
        chunk_tokens=CHUNK_TOKENS, disk=DiskTierConfig(folder=str(folder), capacity_bytes=capacity_bytes)
    )


def node_figures(cluster: CacheCluster, application: str) -> Any:
    """As `/v1/kv/stats` and `/metrics` have them."""
    (figures,) = call(cluster.node_actor("head", application).manage, "stats")
    return figures


def is_whole(engine: EngineProcess) -> bool:
    return sum(num for _, num in engine.locate(IDS)) == len(IDS)


def node_actors_of(application: str) -> list[str]:
    actors = [each for each in list_named_actors(all_namespaces=True) if each["name"].startswith("node-")]
    return [each["name"] for each in actors if each["namespace"] == f"mneme-cache-{application}"]


def test_a_start_with_another_configuration_has_the_nodes_actor_made_again(
    cluster: CacheCluster, tmp_path: Path
) -> None:
    first = EngineProcess(CacheConfig(chunk_tokens=CHUNK_TOKENS), "edited")
    assert node_figures(cluster, "edited")["disk"] is None
    config = disk_config(tmp_path)
    second = EngineProcess(config, "edited")
    logs = start_session_logs(config, "edited", 3600.0)
    assert logs is not None
    assert logs.append(key_number(1), rows_of(SessionState(version=1, ids=ids_of(1, 1)))) is Appended.WRITTEN
    assert all(second.put(IDS))
    eventually(lambda: is_whole(second))
    eventually(lambda: node_figures(cluster, "edited")["disk"]["chunks"] == 2)
    third = EngineProcess(disk_config(tmp_path, 50 << 20), "edited")
    figures = node_figures(cluster, "edited")
    assert figures["disk"]["capacity_bytes"] == 50 << 20
    assert figures["disk"]["chunks"] == 2
    for engine in (third, second, first):  # the older ones find the new actor
        eventually(lambda engine=engine: is_whole(engine))
    for engine in (first, second, third):
        engine.close()
    shutdown_cache_tier("edited")


@pytest.mark.slow
def test_a_start_on_a_disk_that_cannot_be_used_is_refused_until_it_can(cluster: CacheCluster, tmp_path: Path) -> None:
    folder = tmp_path / "file"
    folder.touch()
    for path in (folder, folder / "below"):
        with pytest.raises(ConfigError, match=f"disk tier: {path} cannot be used"):
            EngineProcess(disk_config(path), "refused")
        eventually(lambda: not node_actors_of("refused"))
    folder.unlink()
    EngineProcess(disk_config(folder / "below"), "refused").close()
    with pytest.raises(ConfigError, match="in use by another cluster"):
        EngineProcess(disk_config(folder / "below"), "another")
    assert node_figures(cluster, "refused")["disk_problem"] == ""
    for application in ("refused", "another"):
        shutdown_cache_tier(application)


def test_a_disk_that_fails_later_is_gone_without_and_said(cluster: CacheCluster, tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    engine = EngineProcess(disk_config(folder), "later")
    folder.rename(tmp_path / "gone")
    folder.touch()
    kill(cluster.node_actor("head", "later"))
    eventually(lambda: "cannot be used" in (node_figures(cluster, "later") or {}).get("disk_problem", ""), CALL_LIMIT_S)
    other = EngineProcess(disk_config(folder), "later")  # a replica that is replaced meanwhile
    assert all(other.put(IDS))
    for each in (engine, other):
        eventually(lambda each=each: is_whole(each))
        each.close()
    shutdown_cache_tier("later")
