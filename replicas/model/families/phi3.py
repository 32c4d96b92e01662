"""Phi-3, 3.5 and 4: Llama's layer, of which queries, keys and values are one matrix, and gates and ups another.

Models that were stretched by longrope serve the length of their pretraining: beyond it their frequencies change with
a text's length, and a cached key would be at none of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mneme.replicas.model.decoder_config import DecoderConfig, read_decoder, read_windows
from mneme.replicas.model.families.family import Family, pre_norm_layer
from mneme.replicas.model.fields import Fields

if TYPE_CHECKING:
    from mneme.replicas.model.parts import Layer
    from mneme.replicas.model.tensors import Tensors


def read(fields: Fields) -> DecoderConfig:
    max_context = fields.integer("max_position_embeddings")
    if fields.inner("rope_scaling").raw or fields.inner("rope_parameters").raw.get("rope_type") in ("longrope", "su"):
        max_context = min(max_context, fields.integer("original_max_position_embeddings", max_context))
    windows = read_windows(fields, fields.integer("num_hidden_layers"))
    norm_eps = fields.number("rms_norm_eps", 1e-5)
    return read_decoder(fields, family="phi3", max_context=max_context, norm_eps=norm_eps, windows=windows)


def layer(tensors: Tensors, config: DecoderConfig, _index: int) -> Layer:
    attention = tensors.under("self_attn.").attention(qkv=("qkv_proj",))
    return pre_norm_layer(tensors, attention, tensors.under("mlp.").gated_mlp(gate_up=("gate_up_proj",)))


FAMILY = Family(read=read, layer=layer)
