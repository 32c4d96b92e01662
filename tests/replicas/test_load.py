"""What is refused when a model is loaded."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mneme.errors import CheckpointError
from mneme.replicas.load import check_heads
from mneme.replicas.model_config import parse_model_config

SHAPE: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 4128, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 32,
    "num_attention_heads": 129, "num_key_value_heads": 1, "vocab_size": 64, "max_position_embeddings": 64,
}  # fmt: skip


def test_heads_that_no_kernel_takes_are_refused_on_cuda_alone() -> None:
    model = parse_model_config(SHAPE, "config.json")
    with pytest.raises(CheckpointError, match=r"num_attention_heads: on CUDA at most 128 .* \(got 129 for 1\)"):
        check_heads(model, torch.device("cuda"))
    check_heads(model, torch.device("cpu"))
    check_heads(parse_model_config({**SHAPE, "num_attention_heads": 128}, "config.json"), torch.device("cuda"))
