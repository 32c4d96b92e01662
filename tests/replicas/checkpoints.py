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
from mneme.replicas.model.decoder import Decoder, StepInputs
from mneme.replicas.model.directory import load_model_config
from mneme.replicas.model.draws import Expected
from mneme.replicas.model.runner import Runner
from mneme.replicas.model.weights import load_weights
from mneme.replicas.sequence import StepRows

FLOAT32_TOLERANCE = 2e-4  # of logits, against `transformers`
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
_YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 128}
_LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 3.0}

_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "decoder_sparse_step": 1}
_CHOSEN = {"num_local_experts": 6, "num_experts_per_tok": 2}
_GEMMA = {"sliding_window": 24, "head_dim": 24, "query_pre_attn_scalar": 20, "attn_implementation": "eager"}
_LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0 + 0.1 * i for i in range(6)],
    "long_factor": [2.0 + 0.5 * i for i in range(6)],
}

CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-2": ("Llama", {"num_key_value_heads": 4}),
    "llama-3": ("Llama", {"rope_parameters": _LLAMA3_ROPE, "tie_word_embeddings": True}),
    "llama-biased": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-linear": ("Llama", {"rope_parameters": _LINEAR_ROPE}),
    "llama-blocks": ("Llama", {"intermediate_size": 192}),  # rows that quantized files cut into blocks of 32 or 64
    "llama-yarn": ("Llama", {"rope_parameters": _YARN_ROPE}),
    "ministral": (
        "Ministral",
        {
            "sliding_window": 40,
            "head_dim": 24,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "mistral": ("Mistral", {"sliding_window": 40, "head_dim": 24}),
    "mistral-no-window": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen2-moe": (
        "Qwen2Moe",
        {**_EXPERTS, "shared_expert_intermediate_size": 80, "mlp_only_layers": [1], "norm_topk_prob": False},
    ),
    "qwen3-moe": ("Qwen3Moe", {**_EXPERTS, "head_dim": 32, "norm_topk_prob": True}),
    "qwen2-moe-blocks": (
        "Qwen2Moe",
        {
            **_EXPERTS,
            "shared_expert_intermediate_size": 128,
            "mlp_only_layers": [1],
            "norm_topk_prob": False,
            "moe_intermediate_size": 64,
            "intermediate_size": 128,
        },
    ),
    "qwen3-moe-blocks": (
        "Qwen3Moe",
        {**_EXPERTS, "head_dim": 32, "norm_topk_prob": True, "moe_intermediate_size": 64},
    ),
    "mixtral": ("Mixtral", {**_CHOSEN, "sliding_window": None}),
    "mixtral-blocks": ("Mixtral", {**_CHOSEN, "sliding_window": None, "intermediate_size": 128}),
    "gpt-oss": (
        "GptOss",
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "sliding_window": 24,
            "head_dim": 32,
            "attn_implementation": "eager",
        },
    ),
    "gemma-2": (
        "Gemma2",
        {**_GEMMA, "sliding_window": 24, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 8.0},
    ),
    "gemma-3": ("Gemma3Text", {**_GEMMA, "num_hidden_layers": 4, "sliding_window_pattern": 3}),
    "phi-3": ("Phi3", {"sliding_window": 40}),
    "phi-4-mini": ("Phi3", {"rope_parameters": _LONG_ROPE, "original_max_position_embeddings": 256}),
    "opt": (
        "OPT",
        {"ffn_dim": 96, "activation_function": "relu", "word_embed_proj_dim": 64, "dropout": 0.0, "init_std": 0.15},
    ),
    "falcon-7b": ("Falcon", {"multi_query": True, "new_decoder_architecture": False}),
    "falcon-40b": ("Falcon", {"num_kv_heads": 2, "new_decoder_architecture": True}),
}


def make_model(name: str) -> Any:
    """A `transformers` model in float32 with seeded weights."""
    family, options = CHECKPOINTS[name]
    config = getattr(transformers, f"{family}Config")(**{**_SMALL, **options})
    torch.manual_seed(7)
    model = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")(config)
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


def teacher_forced(model: Any, prompt: list[int], output: list[int]) -> torch.Tensor:
    """Logits that `transformers` would sample each output token from, float32 [output, vocab]."""
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([prompt + output])).logits[0].float()
    return logits[len(prompt) - 1 : -1]


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
        self, batch: list[StepRows], moves: Moves, saves: Sequence[SaveJob] = (), expected: Expected | None = None
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
