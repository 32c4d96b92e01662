"""What a family says of itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mneme.replicas.model.decoder_config import DecoderConfig
from mneme.replicas.model.fields import Fields

if TYPE_CHECKING:
    from mneme.replicas.model.parts import Attention, Layer, Mlp, Norm
    from mneme.replicas.model.tensors import Tensors


def plain_layer(tensors: Tensors, config: DecoderConfig, index: int) -> Layer:
    """Build a layer of Llama's names: norms before attention and before an MLP, or before experts."""
    experts, mlp = config.experts, tensors.under("mlp.")
    is_sparse = experts is not None and index not in experts.dense_layers
    attention = tensors.under("self_attn.").attention()
    return pre_norm_layer(tensors, attention, mlp.experts() if is_sparse else mlp.gated_mlp())


def pre_norm_layer(tensors: Tensors, attention: Attention, mlp: Mlp) -> Layer:
    """Build a layer of Llama's norms around these parts."""
    return tensors.layer(
        attention_norm=tensors.rms_norm("input_layernorm"),
        attention=attention,
        mlp_norm=tensors.rms_norm("post_attention_layernorm"),
        mlp=mlp,
    )


def plain_norm(tensors: Tensors, _config: DecoderConfig) -> Norm:
    return tensors.rms_norm("model.norm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Reads one kind of model.

    read       the decoder that a config.json describes
    layer      builds a layer of the tensors under its prefix
    norm       builds what stands behind the last layer, of all tensors
    embedding, layers, head, positions   names: of the embedding, before a layer's number, of the head where it is not
               the embedding, and of learned positions where there are any
    prefixes   what may stand before all names; the first under which there is an embedding counts
    ignored    beginnings of names that have no part in text
    """

    read: Callable[[Fields], DecoderConfig]
    layer: Callable[[Tensors, DecoderConfig, int], Layer] = plain_layer
    norm: Callable[[Tensors, DecoderConfig], Norm] = plain_norm
    embedding: str = "model.embed_tokens.weight"
    layers: str = "model.layers."
    head: str = "lm_head.weight"
    positions: str | None = None
    prefixes: tuple[str, ...] = ("",)
    ignored: tuple[str, ...] = ()
