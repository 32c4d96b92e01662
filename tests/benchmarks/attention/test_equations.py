"""RelayAttention's Eq. 10 and the models' shapes against published numbers."""

from __future__ import annotations

import pytest
from attention.relay import relay_speedup, relay_speedup_bytes
from random_models import head_weights, kv_bytes_per_token, layer_weights, model_config


@pytest.mark.parametrize(
    ("batch", "shared", "speedup"),
    [(1, 2048, 1.00), (8, 2048, 5.57), (32, 512, 4.25), (32, 2048, 10.94), (32, 8192, 21.3), (64, 2048, 13.0),
     (64, 16384, 42.2), (128, 8192, 41.8)],
)  # fmt: skip
def test_eq_10_with_128_private_tokens(batch: int, shared: int, speedup: float) -> None:
    assert relay_speedup(batch, shared, 128) == pytest.approx(speedup, rel=5e-3)


def test_eq_10_in_bytes() -> None:
    """As printed at two query heads per KV head; fewer bytes are saved by larger groups."""
    assert relay_speedup_bytes(32, 2048, 128, 2) == pytest.approx(relay_speedup(32, 2048, 128))
    # 8 q heads, 2 KV heads: (2 * 2176 + 8) / (2 * (64 + 128) + 28) = 4360 / 412
    assert relay_speedup_bytes(32, 2048, 128, 4) == pytest.approx(4360 / 412)


@pytest.mark.parametrize(("name", "billions"), [("llama-2-7b", 6.738), ("llama-3-8b", 8.030)])
def test_the_shapes_have_the_published_sizes(name: str, billions: float) -> None:
    config = model_config(name)
    assert (layer_weights(config) + 2 * head_weights(config)) / 1e9 == pytest.approx(billions, abs=0.001)


def test_kv_bytes() -> None:
    import torch

    assert kv_bytes_per_token(model_config("llama-2-7b"), torch.bfloat16) == 512 * 1024
    assert kv_bytes_per_token(model_config("llama-3-8b"), torch.bfloat16) == 128 * 1024
