"""The page pool of an engine, as its configuration says."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from mneme.replicas.config import EngineConfig
from mneme.replicas.eviction_policies import make_policy
from mneme.replicas.forest import PrefixForest

if TYPE_CHECKING:
    from mneme.replicas.runner import Runner


def make_forest(runner: Runner, config: EngineConfig, clock: Callable[[], float]) -> PrefixForest:
    """The forest over the runner's pages."""
    return PrefixForest(
        runner.num_pages,
        runner.page_size,
        sharing=config.prefix_sharing,
        first_page=runner.first_page,
        policy=make_policy(config.eviction, clock, runner.num_pages),
        clock=clock,
        num_host_pages=runner.num_host_pages,
        host_policy=make_policy(config.eviction, clock, runner.num_host_pages),
        copy_out_below=config.copy_out_below,
        window=runner.window,
    )


def page_counts(forest: PrefixForest) -> dict[str, int]:
    """Pages by state; pinned ones are in use too."""
    return {
        "free": forest.num_free,
        "cached": forest.num_cached,
        "in_use": forest.num_in_use,
        "pinned": forest.num_pages - forest.num_unpinned,
        "total": forest.num_pages,
    }
