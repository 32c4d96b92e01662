"""`mneme simulate cache | cluster`: what a trace would do to a cache or a cluster, without a model."""

from __future__ import annotations

import argparse

from mneme.lab.cache.command import add_cache_simulation, simulate_cache
from mneme.lab.cluster.command import add_cluster_simulation, simulate_cluster


def add_arguments(parser: argparse.ArgumentParser) -> None:
    whats = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    cache = whats.add_parser("cache", help="hit rates, bytes moved and costs of a cache under a trace")
    add_cache_simulation(cache)
    cache.set_defaults(run=simulate_cache)
    cluster = whats.add_parser("cluster", help="times, hit rates and load of a cluster under a trace, by router")
    add_cluster_simulation(cluster)
    cluster.set_defaults(run=simulate_cluster)
