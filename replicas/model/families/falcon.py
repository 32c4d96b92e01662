"""Falcon 7B (one head of keys and values) and 40B (groups): attention and MLP read the same hidden states."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mneme.replicas.model.decoder_config import DecoderConfig, read_decoder
from mneme.replicas.model.families.family import Family
from mneme.replicas.model.fields import Fields

if TYPE_CHECKING:
    from mneme.replicas.model.parts import Layer, Norm
    from mneme.replicas.model.tensors import Tensors


def read(fields: Fields) -> DecoderConfig:
    fields.refuse("alibi", "ALiBi is not supported")
    num_heads, hidden_size = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    is_grouped = fields.boolean("new_decoder_architecture", False)
    if not is_grouped and not fields.boolean("parallel_attn", True):
        raise fields.error("parallel_attn", "must be true")
    if not is_grouped and not fields.boolean("multi_query", True):
        raise fields.error("multi_query", "must be true")
    is_biased = fields.boolean("bias", False)
    num_kv_heads = fields.integer("num_kv_heads", num_heads) if is_grouped else 1
    num_norms = fields.integer("num_ln_in_parallel_attn", 2 if is_grouped else 1)
    return read_decoder(
        fields,
        family="falcon",
        num_kv_heads=num_kv_heads,
        intermediate_size=fields.integer("ffn_hidden_size", 4 * hidden_size),
        activation="activation",
        activations={"gelu": "gelu"},
        norm_eps=fields.number("layer_norm_epsilon", 1e-5),
        max_context=fields.integer("max_position_embeddings", 2048),
        qkv_bias=is_biased,
        o_bias=is_biased,
        mlp_bias=is_biased,
        is_parallel=True,
        has_mlp_norm=is_grouped and num_norms == 2,
        tied=True,
    )


def layer(tensors: Tensors, config: DecoderConfig, _index: int) -> Layer:
    """Build a layer; the matrix of queries, keys and values has them group by group."""
    return tensors.layer(
        attention_norm=tensors.layer_norm("ln_attn" if config.has_mlp_norm else "input_layernorm"),
        attention=tensors.under("self_attention.").attention(qkv=("query_key_value",), o="dense", by_group=True),
        mlp_norm=tensors.layer_norm("ln_mlp") if config.has_mlp_norm else None,
        mlp=tensors.under("mlp.").plain_mlp(up="dense_h_to_4h", down="dense_4h_to_h"),
    )


def norm(tensors: Tensors, _config: DecoderConfig) -> Norm:
    return tensors.layer_norm("ln_f")


FAMILY = Family(
    read=read,
    layer=layer,
    norm=norm,
    embedding="word_embeddings.weight",
    layers="h.",
    prefixes=("transformer.", ""),
)
