"""Layers that compiled code runs whole give the bits of their operations, called one by one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from mneme.kernels.arguments import quantized
from mneme.kernels.attention import PageTable, QueryRows, build_plan, mark_written, new_slot_position
from mneme.replicas.model import decoder as model
from mneme.replicas.model.decoder import Decoder, KvPool, StepInputs
from mneme.replicas.model.timeline import Timeline
from tests.replicas.checkpoints import decoder_of, write_checkpoint

PAGE_SIZE, NUM_PAGES = 16, 8
TABLES = ([1, 2, 3], [1, 2, 4, 5])  # two pages in common
STARTS, ENDS = (32, 32), (41, 60)


def pool_of(decoder: Decoder, kv_dtype: torch.dtype | None = None) -> KvPool:
    """Keys and values of 32 tokens in the pages that both sequences have, nothing in the others."""
    config = decoder.config
    shape = (config.num_layers, config.num_kv_heads, NUM_PAGES, PAGE_SIZE, config.head_dim)
    draw = torch.Generator().manual_seed(1)
    k_pages, v_pages = (torch.randn(shape, generator=draw).to(decoder.dtype) for _ in range(2))
    if kv_dtype == torch.int8:
        k_pages, v_pages = quantized(k_pages), quantized(v_pages)
    pool = KvPool(k_pages=k_pages, v_pages=v_pages, slot_position=new_slot_position(NUM_PAGES * PAGE_SIZE))
    mark_written(pool.slot_position, torch.arange(16, 48), torch.arange(32))
    return pool


def step(decoder: Decoder, pool: KvPool, sampled_rows: list[int], done: list[int] | None) -> Tensor:
    config = decoder.config
    positions = np.concatenate([np.arange(*span) for span in zip(STARTS, ENDS, strict=True)])
    sequence = np.repeat((0, 1), np.subtract(ENDS, STARTS))
    pages = np.array([TABLES[s][p // PAGE_SIZE] for s, p in zip(sequence, positions, strict=True)])
    slots = torch.from_numpy(pages * PAGE_SIZE + positions % PAGE_SIZE)
    mark_written(pool.slot_position, slots, torch.from_numpy(positions))
    plan = build_plan(
        [PageTable.own(pages) for pages in TABLES], QueryRows(sequence, positions), page_size=PAGE_SIZE,
        num_q_heads=config.num_q_heads, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim, share="always",
    )  # fmt: skip
    inputs = StepInputs(
        token_ids=torch.from_numpy(positions * 7 % 320), positions=torch.from_numpy(positions), slots=slots,
        sampled_rows=torch.tensor(sampled_rows, dtype=torch.int64), num_sampled=len(sampled_rows), plan=plan,
        layer_done=None if done is None else done.append,
    )  # fmt: skip
    return decoder.forward(inputs, pool)


@pytest.mark.parametrize("sampled_rows", [[], [36, 8]], ids=str)
@pytest.mark.parametrize("kv_dtype", [None, torch.int8], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["llama-3", "llama-biased", "ministral", "qwen3"])
def test_whole_layers_give_the_bits_of_their_operations(
    name: str,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None,
    sampled_rows: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_checkpoint(name, tmp_path)
    by_operation, whole = decoder_of(tmp_path, dtype), decoder_of(tmp_path, dtype)
    by_operation.record(Timeline())  # parts of layers are looked at
    expected_pool, pool, by_layer_pool = (pool_of(whole, kv_dtype) for _ in range(3))
    expected = step(by_operation, expected_pool, sampled_rows, None)
    monkeypatch.setattr(model, "attend", None)  # not called
    logits, done = step(whole, pool, sampled_rows, None), list[int]()
    by_layer = step(whole, by_layer_pool, sampled_rows, done)
    assert done == list(range(whole.config.num_layers))
    assert torch.equal(logits, expected)
    assert torch.equal(by_layer, expected)
    for written in (pool, by_layer_pool):
        assert torch.equal(written.k_pages, expected_pool.k_pages)
        assert torch.equal(written.v_pages, expected_pool.v_pages)


def test_a_slot_that_does_not_exist_is_refused(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "attend", None)
    pool = pool_of(decoder)
    inputs = StepInputs(
        token_ids=torch.tensor([1]), positions=torch.tensor([0]), slots=torch.tensor([NUM_PAGES * PAGE_SIZE]),
        sampled_rows=torch.tensor([0]), num_sampled=1,
        plan=build_plan(
            [PageTable.own([1])], QueryRows([0], [0]), page_size=PAGE_SIZE, num_q_heads=decoder.config.num_q_heads,
            num_kv_heads=decoder.config.num_kv_heads, head_dim=decoder.config.head_dim,
        ),
    )  # fmt: skip
    with pytest.raises(ValueError, match="row 0 is out of range"):
        decoder.forward(inputs, pool)
