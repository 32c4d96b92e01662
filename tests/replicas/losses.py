"""KV that is lost, as by a fault of a tier."""

from __future__ import annotations

from mneme.replicas.engine.engine import Engine


def lose(engine: Engine, index: int) -> None:
    """Let one of the pages that nobody holds, on the device or on the host, be lost."""
    forest = engine.forest
    nodes = [node for root in forest._roots.values() for node in root.below_it() if not node.refs]
    pages = [(node, tier) for node in nodes for tier in (forest.device, forest.host) if tier.has(node)]
    if pages:
        node, tier = pages[index % len(pages)]
        forest._pages.drop(node, tier.index)
        forest.check()
