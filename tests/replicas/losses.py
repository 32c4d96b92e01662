"""KV that is lost, as by a fault of a tier."""

from __future__ import annotations

from mneme.replicas.engine.engine import Engine


def lose(engine: Engine, index: int) -> None:
    """Let one of the pages that nobody holds, on the device or on the host, be lost."""
    forest = engine.forest
    pages = [page for root in forest.roots.values() for page in root.below_it() if not page.refs]
    pages = [
        (page, tier) for page in pages for tier in (forest.device, forest.host) if page.ids[tier.index] is not None
    ]
    if pages:
        page, tier = pages[index % len(pages)]
        forest.store.drop(page, tier)
        forest.check()
