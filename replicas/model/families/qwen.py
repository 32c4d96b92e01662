"""Qwen 2, 2.5 and 3, dense and with experts. Qwen 2 has biases on queries, keys and values, Qwen 3 norms of heads."""

from __future__ import annotations

from typing import Any

from mneme.replicas.model.decoder_config import DecoderConfig, ExpertsConfig, read_decoder, read_windows
from mneme.replicas.model.families.family import Family
from mneme.replicas.model.fields import Fields


def read_qwen2(fields: Fields) -> DecoderConfig:
    return read_decoder(fields, family="qwen2", qkv_bias=True, windows=_windows(fields))


def read_qwen3(fields: Fields) -> DecoderConfig:
    return read_decoder(fields, family="qwen3", head_dim=128, windows=_windows(fields), **_of_heads(fields))


def read_qwen2_moe(fields: Fields) -> DecoderConfig:
    experts = _experts(fields, shared_size=fields.integer("shared_expert_intermediate_size"))
    return read_decoder(
        fields, family="qwen2_moe", qkv_bias=fields.boolean("qkv_bias", True), windows=_windows(fields), experts=experts
    )


def read_qwen3_moe(fields: Fields) -> DecoderConfig:
    experts, windows = _experts(fields), _windows(fields)
    return read_decoder(fields, family="qwen3_moe", windows=windows, experts=experts, **_of_heads(fields))


def _of_heads(fields: Fields) -> dict[str, Any]:
    is_biased = fields.boolean("attention_bias", False)
    return {"qk_norm": True, "qkv_bias": is_biased, "o_bias": is_biased}


def _windows(fields: Fields) -> tuple[int | None, ...]:
    """Read windows that are switched on: of `layer_types`, or of the layers from `max_window_layers` on."""
    num_layers = fields.integer("num_hidden_layers")
    if not fields.boolean("use_sliding_window", False):
        return (None,) * num_layers
    windows = read_windows(fields.with_defaults(sliding_window=4096), num_layers)
    if fields.raw.get("layer_types") is not None:
        return windows
    first = fields.integer("max_window_layers", 28, least=0)
    return tuple(window if layer >= first else None for layer, window in enumerate(windows))


def _experts(fields: Fields, shared_size: int | None = None) -> ExpertsConfig:
    """Read experts, which each `decoder_sparse_step`-th layer has unless `mlp_only_layers` names it."""
    step, listed = fields.integer("decoder_sparse_step", 1), fields.raw.get("mlp_only_layers") or []
    if not isinstance(listed, list) or not all(isinstance(layer, int) for layer in listed):
        raise fields.error("mlp_only_layers", "must be a list of layers")
    layers = range(fields.integer("num_hidden_layers"))
    return ExpertsConfig(
        num_experts=fields.integer("num_local_experts" if "num_local_experts" in fields else "num_experts"),
        num_chosen=fields.integer("num_experts_per_tok"),
        intermediate_size=fields.integer("moe_intermediate_size"),
        is_normalized=fields.boolean("norm_topk_prob", False),
        shared_size=shared_size,
        dense_layers=tuple(layer for layer in layers if layer in listed or (layer + 1) % step),
    )


QWEN_2 = Family(read=read_qwen2)
QWEN_3 = Family(read=read_qwen3)
QWEN_2_MOE = Family(read=read_qwen2_moe)
QWEN_3_MOE = Family(read=read_qwen3_moe)
