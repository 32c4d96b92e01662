"""gpt-oss: experts of a clamped SwiGLU, every other layer with a window, and a sink in each head's softmax.

Its checkpoints keep experts in MXFP4, blocks of 32 numbers of four bits under one power of two (OCP MX 1.0); they are
read to the engine's dtype.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mneme.replicas.model.decoder_config import DecoderConfig, ExpertsConfig, read_decoder, read_rope, read_windows
from mneme.replicas.model.families.family import Family, pre_norm_layer
from mneme.replicas.model.fields import Fields

if TYPE_CHECKING:
    from mneme.replicas.model.parts import Layer
    from mneme.replicas.model.tensors import Tensors

_YARN = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}


def read(fields: Fields) -> DecoderConfig:
    for name, value in (("swiglu_alpha", 1.702), ("swiglu_limit", 7.0)):
        if fields.positive(name, value) != value:
            raise fields.error(name, f"must be {value}")
    experts = ExpertsConfig(
        num_experts=fields.integer("num_local_experts"),
        num_chosen=fields.integer("num_experts_per_tok", 4),
        intermediate_size=fields.integer("intermediate_size"),
        is_normalized=True,
    )
    head_dim, max_context = fields.integer("head_dim", 64), fields.integer("max_position_embeddings", 131_072)
    is_said = fields.raw.get("rope_parameters") or fields.raw.get("rope_scaling")
    rotated = fields if is_said else fields.with_defaults(rope_parameters=_YARN)
    is_biased = fields.boolean("attention_bias", True)
    return read_decoder(
        fields,
        family="gpt_oss",
        head_dim=64,
        max_context=max_context,
        rope=read_rope(rotated, head_dim, max_context, 150_000.0),
        windows=read_windows(fields, fields.integer("num_hidden_layers"), every=2),
        activation="hidden_act",
        activations={"silu": "swiglu_clamped"},
        norm_eps=fields.number("rms_norm_eps", 1e-5),
        qkv_bias=is_biased,
        o_bias=is_biased,
        has_sinks=True,
        experts=experts,
    )


def layer(tensors: Tensors, _config: DecoderConfig, _index: int) -> Layer:
    experts = tensors.under("mlp.").fused_experts()
    return pre_norm_layer(tensors, tensors.under("self_attn.").attention(), experts)


FAMILY = Family(read=read, layer=layer)
