"""OPT: learned positions, which are added to embeddings, LayerNorm and an MLP without gates.

Its KV holds for the positions at which it was computed: sessions, prefixes and tiers work, moving KV is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mneme.replicas.model.decoder_config import DecoderConfig, read_decoder
from mneme.replicas.model.families.family import Family
from mneme.replicas.model.fields import Fields

if TYPE_CHECKING:
    from mneme.replicas.model.parts import Layer, Norm
    from mneme.replicas.model.tensors import Tensors


def read(fields: Fields) -> DecoderConfig:
    if not fields.boolean("do_layer_norm_before", True):
        raise fields.error("do_layer_norm_before", "a norm behind the block (OPT-350m) is not supported")
    if fields.integer("word_embed_proj_dim", fields.integer("hidden_size")) != fields.integer("hidden_size"):
        raise fields.error("word_embed_proj_dim", "must be hidden_size")
    is_biased = fields.boolean("enable_bias", True)
    return read_decoder(
        fields,
        family="opt",
        intermediate_size=fields.integer("ffn_dim"),
        activation="activation_function",
        activations={"relu": "relu", "gelu": "gelu"},
        norm_eps=1e-5,
        rope=None,
        num_kv_heads=fields.integer("num_attention_heads"),
        qkv_bias=is_biased,
        o_bias=is_biased,
        mlp_bias=is_biased,
        tied=True,
    )


def layer(tensors: Tensors, _config: DecoderConfig, _index: int) -> Layer:
    return tensors.layer(
        attention_norm=tensors.layer_norm("self_attn_layer_norm"),
        attention=tensors.under("self_attn.").attention(o="out_proj"),
        mlp_norm=tensors.layer_norm("final_layer_norm"),
        mlp=tensors.plain_mlp(up="fc1", down="fc2"),
    )


def norm(tensors: Tensors, _config: DecoderConfig) -> Norm:
    return tensors.layer_norm("decoder.final_layer_norm")


FAMILY = Family(
    read=read,
    layer=layer,
    norm=norm,
    embedding="decoder.embed_tokens.weight",
    layers="decoder.layers.",
    positions="decoder.embed_positions.weight",
    prefixes=("model.", ""),
)
