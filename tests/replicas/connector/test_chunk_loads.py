"""How long the loads of one step may take."""

from __future__ import annotations

from typing import Any

import pytest

from mneme.replicas.connector.fetch import Fetch
from mneme.replicas.connector.loads import ChunkLoad
from mneme.replicas.forest.moves import Graft, GraftPiece
from tests.cachetier.cost_cases import PlayedClock
from tests.replicas.chunk_stores import FakeStore
from tests.replicas.connector.test_chunk_fetches import NUM_LAYERS, Costs, begin, make_fetches


class NoPages:
    """Nothing is copied."""

    num_readers = 1

    def issued(self) -> None:
        return None


def graft_of(fetch: Fetch, num_chunks: int) -> Graft:
    pieces = [GraftPiece(index, *fetch.spans[index], [], ()) for index in range(num_chunks)]
    return Graft(fetch, pieces, is_last=False)


def begin_load(*grafts: Graft) -> None:
    pages: Any = NoPages()
    ChunkLoad(grafts, NUM_LAYERS, pages)


def test_a_small_load_may_take_as_long_as_a_large_one_beside_it() -> None:
    fetches = make_fetches(FakeStore(), Costs(), PlayedClock())
    small, large = begin(fetches), begin(fetches)
    begin_load(graft_of(small, 1))
    alone_s = [small.left_s(layer) for layer in range(NUM_LAYERS)]
    begin_load(graft_of(large, 2), graft_of(small, 1))
    assert large.plan is not None
    large_s = large.plan.predicted_load_s * 2 / large.plan.num_chunks  # as much of it as comes with the step
    assert large_s > 0
    beside_s = [small.left_s(layer) - alone_s[layer] for layer in range(NUM_LAYERS)]
    assert beside_s == pytest.approx([large_s * (layer + 1) / NUM_LAYERS for layer in range(NUM_LAYERS)])
    fetches.abandon()
