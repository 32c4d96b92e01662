"""Arms of the cache tier's benchmarks are what they say, or fail."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from bench_cache_turn import ARMS, COLD, HOST, RECOMPUTE, NextTurns
from cache_engines import (
    CachedModel,
    bare_model,
)

from mneme.cachetier.policy.cost_model import Calibration
from mneme.errors import MnemeError

ROW_S = 1.0  # loading is always worth it, however busy the machine is


@pytest.fixture(scope="module")
def model() -> CachedModel:
    torch.set_num_threads(1)
    terms = (0.0, ROW_S, 0.0)
    costs = Calibration(prefill=terms, decode=terms, step_rows=2048, kv_bytes_per_token=4096)
    return bare_model("llama-wide-kv", 2048, 0)._replace(calibration=costs)


@pytest.fixture
def turns(model: CachedModel, tmp_path: Path) -> Iterator[NextTurns]:
    with closing(NextTurns(model, 300, tmp_path, 0)) as found:
        yield found


def test_turns_come_from_where_their_arms_say(turns: NextTurns) -> None:
    found = turns.rounds(2)
    assert list(found) == list(ARMS)
    for name, took in found.items():
        assert len(took) == 2
        assert all(each.usage.cached_tokens >= 299 for each in took) == (name != RECOMPUTE)
        assert all(each.ttft_s > 0 for each in took)


@pytest.mark.parametrize("name", [HOST, COLD])
def test_an_arm_whose_kv_is_gone_fails(turns: NextTurns, name: str) -> None:
    for store in turns.stores.values():
        store.inner.node.delete([change.key for change in store.inner.node.snapshot()])
    with pytest.raises(MnemeError, match=f"arm {name}, 300 tokens of history: kv_details say"):
        turns.turn(name)
