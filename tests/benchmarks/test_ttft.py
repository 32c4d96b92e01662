"""Arms of bench_ttft.py are what they say, or fail."""

from __future__ import annotations

import pytest
import torch
from bench_ttft import DEVICE, HOST, NUM_NEW, RECOMPUTE, Arm, is_from
from engines import MAIN_MODEL, make_decoder

from mneme.errors import MnemeError
from mneme.replicas.model.decoder import Decoder

HISTORY = 96


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    torch.set_num_threads(1)
    return make_decoder(MAIN_MODEL, max_context=2048)


def arm(name: str, decoder: Decoder) -> Arm:
    return Arm(name, decoder, num_history=HISTORY, batch=2, num_out=2, seed=0)


@pytest.mark.parametrize("name", [RECOMPUTE, HOST, DEVICE])
def test_a_turn_of_each_arm(name: str, decoder: Decoder) -> None:
    turns = arm(name, decoder)
    for count in (1, 2, 2):
        took = turns.turns(count)
        assert 0 < took.ttft_s < took.total_s
        assert took.busy_s <= took.total_s
        assert took.num_out == 2 * count


def test_an_arm_whose_kv_is_elsewhere_fails(decoder: Decoder) -> None:
    device = arm(DEVICE, decoder)
    device.engine.forest.clear()
    with pytest.raises(MnemeError, match="arm device, 96 tokens of history: kv_details say"):
        device.turns(1)


def test_where_kv_came_from_is_held_against_the_arm() -> None:
    def kv(device: int, host: int, recomputed: int, dropped: int = 0) -> dict[str, int]:
        return {"device": device, "host": host, "recomputed": recomputed, "dropped": dropped}

    whole = 1000 + NUM_NEW
    assert is_from(RECOMPUTE, kv(0, 0, whole), 1000)
    assert not is_from(RECOMPUTE, kv(1, 0, whole - 1), 1000)
    assert is_from(DEVICE, kv(1000, 0, NUM_NEW), 1000)
    assert not is_from(DEVICE, kv(900, 100, NUM_NEW), 1000)
    assert not is_from(DEVICE, kv(999, 0, NUM_NEW + 1), 1000)
    assert is_from(HOST, kv(0, 1000, NUM_NEW), 1000)
    assert is_from(HOST, kv(20, 980, NUM_NEW), 1000)
    assert not is_from(HOST, kv(21, 979, NUM_NEW), 1000)
    assert not is_from(HOST, kv(0, 999, NUM_NEW + 1), 1000)
    assert not is_from(HOST, kv(0, 999, NUM_NEW, 1), 1000)
