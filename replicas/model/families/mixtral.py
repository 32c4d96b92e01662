"""Mixtral: Mistral's layer with experts in place of the MLP, two of them for each token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mneme.replicas.model.decoder_config import DecoderConfig, ExpertsConfig, read_decoder, read_windows
from mneme.replicas.model.families.family import Family, pre_norm_layer
from mneme.replicas.model.fields import Fields

if TYPE_CHECKING:
    from mneme.replicas.model.parts import Layer
    from mneme.replicas.model.tensors import Tensors


def read(fields: Fields) -> DecoderConfig:
    experts = ExpertsConfig(
        num_experts=fields.integer("num_local_experts"),
        num_chosen=fields.integer("num_experts_per_tok"),
        intermediate_size=fields.integer("intermediate_size"),
        is_normalized=True,
    )
    windows = read_windows(fields, fields.integer("num_hidden_layers"))
    return read_decoder(
        fields,
        family="mixtral",
        theta=1e6,
        norm_eps=fields.number("rms_norm_eps", 1e-5),
        windows=windows,
        experts=experts,
    )


def layer(tensors: Tensors, _config: DecoderConfig, _index: int) -> Layer:
    experts = tensors.under("block_sparse_moe.").experts(gate="w1", up="w3", down="w2")
    return pre_norm_layer(tensors, tensors.under("self_attn.").attention(), experts)


FAMILY = Family(read=read, layer=layer)
