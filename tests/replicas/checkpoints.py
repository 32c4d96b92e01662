"""Small random checkpoints, one for each kind of model that is supported, and what runs them here and records it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from mneme.kernels.work import Share
from mneme.replicas.connector.save import SaveJob
from mneme.replicas.forest.moves import Moves
from mneme.replicas.model.config import load_model_config
from mneme.replicas.model.decoder import Decoder, StepInputs
from mneme.replicas.model.draws import Expected
from mneme.replicas.model.runner import Runner
from mneme.replicas.model.weights import load_weights
from mneme.replicas.sequence import StepRows

_SMALL = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,  # so that logits differ by whole units
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
_LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 3.0}

CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-2": ("Llama", {"num_key_value_heads": 4}),
    "llama-3": ("Llama", {"rope_parameters": _LLAMA3_ROPE, "tie_word_embeddings": True}),
    "llama-biased": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-linear": ("Llama", {"rope_parameters": _LINEAR_ROPE}),
    "llama-yarn": ("Llama", {"rope_parameters": _YARN_ROPE}),
    "mistral": ("Mistral", {"sliding_window": 40, "head_dim": 24}),
    "mistral-no-window": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
}


def make_model(name: str) -> Any:
    """A `transformers` model in float32 with seeded weights."""
    family, options = CHECKPOINTS[name]
    config = getattr(transformers, f"{family}Config")(**{**_SMALL, **options})
    torch.manual_seed(7)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms too, so that leaving one out is seen
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def write_checkpoint(name: str, directory: Path, **save_options: Any) -> Any:
    """Save `make_model(name)` as a Hugging Face directory and return the model."""
    model = make_model(name)
    model.save_pretrained(directory, **save_options)
    return model


def decoder_of(
    directory: Path,
    dtype: torch.dtype = torch.float32,
    *,
    device: str = "cpu",
    share: Share = "always",
    max_context: int | None = None,
) -> Decoder:
    """The decoder of a checkpoint, on a CPU unless a device is named."""
    config = load_model_config(directory)
    weights = load_weights(directory, config, torch.device(device), dtype)
    return Decoder(config, weights, share=share, max_context=max_context)


class RecordingRunner(Runner):
    """Keeps the logits that each request's tokens were chosen from, and counts rows and pages that moved."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.logits_by_request: dict[str, list[torch.Tensor]] = {}
        self.num_rows = self.num_saved = self.num_loaded = 0
        self._sampling: list[str] = []

    def prepare(
        self,
        batch: list[StepRows],
        moves: Moves,
        saves: Sequence[SaveJob] = (),
        expected: Expected | None = None,
    ) -> StepInputs | None:
        self._sampling = [part.sequence.request.request_id for part in batch if part.samples]
        self.num_rows += sum(part.num_rows for part in batch)
        self.num_saved += len(moves.saves)
        self.num_loaded += len(moves.loads)
        return super().prepare(batch, moves, saves, expected)

    def forward(self, inputs: StepInputs | None) -> torch.Tensor:
        logits = super().forward(inputs)
        for request_id, row in zip(self._sampling, logits, strict=True):
            self.logits_by_request.setdefault(request_id, []).append(row.clone())
        return logits

    def logits_of(self, request_id: str) -> torch.Tensor:
        """float32 [rows that were sampled from, vocab]"""
        return torch.stack(self.logits_by_request[request_id])
