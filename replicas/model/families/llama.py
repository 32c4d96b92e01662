"""Llama 1 to 3 and what shares its layout (Yi, Vicuna, SmolLM2), Mistral and Ministral."""

from __future__ import annotations

from mneme.replicas.model.decoder_config import DecoderConfig, read_decoder, read_windows
from mneme.replicas.model.families.family import Family
from mneme.replicas.model.fields import Fields


def read_llama(fields: Fields) -> DecoderConfig:
    is_biased = fields.boolean("attention_bias", False)
    mlp_bias = fields.boolean("mlp_bias", False)
    return read_decoder(fields, family="llama", qkv_bias=is_biased, o_bias=is_biased, mlp_bias=mlp_bias)


def read_mistral(fields: Fields) -> DecoderConfig:
    """Every layer has the window, or those that `layer_types` names; a file without one means 4,096 tokens."""
    windows = read_windows(fields.with_defaults(sliding_window=4096), fields.integer("num_hidden_layers"))
    return read_decoder(fields, family="mistral", windows=windows)


LLAMA = Family(read=read_llama)
MISTRAL = Family(read=read_mistral)
