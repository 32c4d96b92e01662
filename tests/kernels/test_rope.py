"""Rotation tables and the rotation."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mneme.kernels.rope import RopeTable
from tests.budget import examples


@given(m=st.integers(0, 199), n=st.integers(0, 199), delta=st.integers(-199, 199))
@settings(max_examples=examples(50))
def test_turning_the_query_back_replaces_turning_the_key_forward(m: int, n: int, delta: int) -> None:
    """<R(m) q, R(n) k> = <R(m - d) q, R(n - d) k>, the identity that everything here rests on."""
    rope = RopeTable.from_theta(100.0, 16, 400)
    q, k = torch.randn(2, 1, 1, 16, generator=torch.Generator().manual_seed(m))
    shift = max(delta, -199)
    apart = [rope.rotate(x, torch.tensor([200 + at])) for x, at in ((q, m), (k, n))]
    moved = [rope.rotate(x, torch.tensor([200 + at - shift])) for x, at in ((q, m), (k, n))]
    torch.testing.assert_close((apart[0] * apart[1]).sum(), (moved[0] * moved[1]).sum(), atol=1e-5, rtol=0)


def test_tables_are_exact_at_far_positions() -> None:
    """Angles in float32 would be off by 4e-3 here."""
    rope = RopeTable.from_theta(10_000.0, 64, 65_536)
    position = 131_071
    angle = position * 10_000.0 ** (-2 / 64)
    assert rope.cos[position, 1].item() == pytest.approx(math.cos(angle), abs=1e-7)
    assert rope.sin[position, 1].item() == pytest.approx(math.sin(angle), abs=1e-7)


@pytest.mark.parametrize("rope_type", ["default", "linear", "llama3", "yarn"])
def test_the_rotation_is_that_of_transformers(rope_type: str) -> None:
    """Every supported variant, against the Llama implementation, with its frequencies and attention factor."""
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    rope_parameters = {"rope_type": rope_type, "rope_theta": 10_000.0}
    if rope_type != "default":
        rope_parameters["factor"] = 4.0
    if rope_type == "llama3":
        rope_parameters |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    if rope_type == "yarn":
        rope_parameters["original_max_position_embeddings"] = 64
    config = llama.LlamaConfig(
        hidden_size=64, num_attention_heads=4, max_position_embeddings=256, rope_parameters=rope_parameters
    )
    embedding = llama.LlamaRotaryEmbedding(config)
    q, k, positions = torch.randn(1, 4, 9, 16), torch.randn(1, 2, 9, 16), torch.arange(9)[None] * 20
    wanted = llama.apply_rotary_pos_emb(q, k, *embedding(q, positions))
    rope = RopeTable.from_inv_freq(embedding.inv_freq, 256, embedding.attention_scaling)
    for x, rotated in zip((q, k), wanted, strict=True):
        ours = rope.rotate(x[0].transpose(0, 1), positions[0]).transpose(0, 1)
        torch.testing.assert_close(ours, rotated[0], atol=2e-5, rtol=0)
