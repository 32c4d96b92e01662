"""Gemma 2 and 3, text alone: norms before and behind each block, of weights 1 + w, and embeddings scaled.

Gemma 2 caps scores and logits; Gemma 3 has norms of heads and rotates otherwise on layers that have a window.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from mneme.replicas.model.decoder_config import DecoderConfig, read_decoder, read_rope, read_windows
from mneme.replicas.model.families.family import Family
from mneme.replicas.model.fields import Fields

if TYPE_CHECKING:
    from mneme.replicas.model.parts import Layer, Norm
    from mneme.replicas.model.tensors import Tensors

_ACTIVATIONS = {"gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}


def read_gemma2(fields: Fields) -> DecoderConfig:
    caps = {
        "soft_cap": fields.optional("attn_logit_softcapping", 50.0),
        "logit_cap": fields.optional("final_logit_softcapping", 30.0),
    }
    return _read(fields, "gemma2", every=2, window=4096, **caps)


def read_gemma3(fields: Fields) -> DecoderConfig:
    """Read rotations by kind of layer: transformers 5 has both under `rope_parameters`."""
    if fields.raw.get("use_bidirectional_attention"):
        raise fields.error("use_bidirectional_attention", "is not supported")
    head_dim, max_context = fields.integer("head_dim", 256), fields.integer("max_position_embeddings", 131_072)
    named = fields.inner("rope_parameters")
    by_kind = [named.inner(kind).raw if kind in named else {} for kind in ("full_attention", "sliding_attention")]
    if "full_attention" not in named and "sliding_attention" not in named:
        local = {"rope_theta": fields.positive("rope_local_base_freq", 10_000.0)}
        by_kind = [{**fields.inner("rope_scaling").raw, "rope_theta": fields.positive("rope_theta", 1e6)}, local]
    full, sliding = (
        read_rope(fields.with_values(rope_parameters=kind, rope_scaling=None), head_dim, max_context, theta)
        for kind, theta in zip(by_kind, (1e6, 10_000.0), strict=True)
    )
    caps = {
        "soft_cap": fields.optional("attn_logit_softcapping"),
        "logit_cap": fields.optional("final_logit_softcapping"),
    }
    every = fields.integer("sliding_window_pattern", 6)
    own = {"rope": full, "local_rope": sliding, "qk_norm": True, "max_context": max_context, **caps}
    return _read(fields, "gemma3", every=every, window=4096, **own)


def read_gemma3_with_vision(fields: Fields) -> DecoderConfig:
    return read_gemma3(fields.inner("text_config"))


def _read(fields: Fields, family: str, *, every: int, window: int, **own: Any) -> DecoderConfig:
    fields = fields.with_defaults(sliding_window=window)
    is_biased = fields.boolean("attention_bias", False)
    hidden_size = fields.integer("hidden_size", 2304)
    return read_decoder(
        fields,
        family=family,
        head_dim=256,
        activation="hidden_activation",
        activations=_ACTIVATIONS,
        tied=True,
        windows=read_windows(fields, fields.integer("num_hidden_layers", 26), every),
        softmax_scale=fields.positive("query_pre_attn_scalar", 256) ** -0.5,
        embedding_scale=math.sqrt(hidden_size),
        qkv_bias=is_biased,
        o_bias=is_biased,
        **own,
    )


def layer(tensors: Tensors, config: DecoderConfig, _index: int) -> Layer:
    return tensors.layer(
        attention_norm=tensors.rms_norm("input_layernorm", is_unit=True),
        attention=tensors.under("self_attn.").attention(has_unit_norms=True),
        behind_attention=tensors.rms_norm("post_attention_layernorm", is_unit=True),
        mlp_norm=tensors.rms_norm("pre_feedforward_layernorm", is_unit=True),
        mlp=tensors.under("mlp.").gated_mlp(),
        behind_mlp=tensors.rms_norm("post_feedforward_layernorm", is_unit=True),
    )


def norm(tensors: Tensors, _config: DecoderConfig) -> Norm:
    return tensors.rms_norm("model.norm", is_unit=True)


GEMMA_2 = Family(read=read_gemma2, layer=layer, norm=norm)
GEMMA_3 = Family(read=read_gemma3, layer=layer, norm=norm)
GEMMA_3_WITH_VISION = Family(
    read=read_gemma3_with_vision,
    layer=layer,
    norm=norm,
    prefixes=("", "language_model."),
    ignored=("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."),
)
