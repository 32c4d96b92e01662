"""The page pool of an engine, as its configuration says."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from mneme.cachetier.policy.eviction_policies import make_policy
from mneme.replicas.config import EngineConfig
from mneme.replicas.forest.forest import PrefixForest
from mneme.replicas.forest.tier import Tier

if TYPE_CHECKING:
    from mneme.replicas.model.runner import Runner


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
    """Pages by state; pinned ones are in use too, reclaimable ones are cached, with a copy on the host."""
    pinned = {"pinned": forest.num_pages - forest.num_unpinned, "reclaimable": forest.num_reclaimable}
    return {**_by_state(forest.device), **pinned}


def host_page_counts(forest: PrefixForest) -> dict[str, int]:
    """Host pages by state; those in use have a copy on the device that sequences hold."""
    return _by_state(forest.host)


def _by_state(tier: Tier) -> dict[str, int]:
    return {
        "free": len(tier.free),
        "cached": tier.num_cached,
        "in_use": tier.num_in_use,
        "total": tier.num_pages,
    }
