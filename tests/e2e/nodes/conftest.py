"""One Ray cluster for the tests of this folder: its head, where the tests' process is, and nodes "a" and "b"."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.nodes.cache_cluster import CacheCluster, cache_cluster


@pytest.fixture(scope="package")
def nodes_cluster() -> Iterator[CacheCluster]:
    with cache_cluster() as started:
        yield started


@pytest.fixture(scope="module")
def cluster(nodes_cluster: CacheCluster) -> Iterator[CacheCluster]:
    """Both nodes; what a file's tests started of engines' processes and applications ends with them."""
    nodes_cluster.restore_nodes()
    yield nodes_cluster
    nodes_cluster.end_applications()
