"""A decoder described by data: what `replicas/model/families` read from a Hugging Face `config.json`.

What families differ in is a field here; what no family needs is refused when it is read, with the field's name. This
module and the families import no torch: a door reads a model's limits without it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mneme.errors import CheckpointError, shown
from mneme.replicas.model.fields import Fields
from mneme.replicas.truncation import Immovable

MAX_HEAD_DIM = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary frequencies that are fixed, so a key rotated at one position serves any other.

    `inv_freq` has rotary_dim / 2 entries, radians per position; `attention_factor` scales cos and sin.
    """

    inv_freq: tuple[float, ...]
    attention_factor: float = 1.0

    @property
    def rotary_dim(self) -> int:
        return 2 * len(self.inv_freq)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """MLPs of which a router chooses some for each token."""

    num_experts: int
    num_chosen: int
    intermediate_size: int  # of one
    is_normalized: bool  # weights of the chosen ones sum to 1; else they are shares of all
    shared_size: int | None = None  # inner size of an expert that every token has
    dense_layers: tuple[int, ...] = ()  # that have a plain MLP


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Shape and switches of a decoder. A field with a default is part of a model's fingerprint where it differs."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool  # RMSNorm over each query and key head, before rotation
    tied_embeddings: bool
    windows: tuple[int | None, ...]  # per layer: sliding window in tokens
    max_context: int  # tokens
    rope: RopeConfig | None  # None: positions are learned, and added to embeddings
    eos_token_ids: tuple[int, ...]
    dtype: str  # what the checkpoint says its weights are
    local_rope: RopeConfig | None = None  # of the layers that have a window, where it is another
    softmax_scale: float | None = None  # None: head_dim ** -0.5
    soft_cap: float | None = None  # of scores
    logit_cap: float | None = None
    has_sinks: bool = False  # a learned logit per head takes part in each softmax, without a value
    activation: str = "silu"
    embedding_scale: float = 1.0
    is_parallel: bool = False  # attention and MLP read the same hidden states
    has_mlp_norm: bool = True  # where it is parallel: the MLP has a norm of its own
    experts: ExpertsConfig | None = None

    @property
    def q_size(self) -> int:
        return self.num_q_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def scale(self) -> float:
        """Return the factor of q . k."""
        return self.head_dim**-0.5 if self.softmax_scale is None else self.softmax_scale

    @property
    def is_windowed(self) -> bool:
        """Return whether a row does not see all on some layer."""
        return any(window is not None for window in self.windows)

    @property
    def window(self) -> int | None:
        """Tokens that a row sees on any layer, itself too; None if a layer sees all."""
        windows = [window for window in self.windows if window is not None]
        return max(windows) if len(windows) == self.num_layers else None

    @property
    def immovable(self) -> Immovable | None:
        """Return why KV serves the positions alone at which it was computed; None: it serves any."""
        return "learned_positions" if self.rope is None else "sliding_window" if self.is_windowed else None

    def rope_of(self, layer: int) -> RopeConfig | None:
        """Return how a layer rotates queries and keys."""
        return self.rope if self.local_rope is None or self.windows[layer] is None else self.local_rope


def read_decoder(
    fields: Fields,
    *,
    head_dim: int | None = None,
    activation: str = "hidden_act",
    activations: Mapping[str, str] | None = None,
    theta: float = 10_000.0,
    tied: bool = False,
    **own: Any,
) -> DecoderConfig:
    """Read what most families share, by the names that they share; `own` are fields that the family has read.

    head_dim     where the file does not say it; None: by the heads
    activation   the field's name; `activations` are its values and what they are called here, the default first
    theta        of plain RoPE, where the file does not say it
    tied         whether the head is the embedding, where the file does not say it
    """

    def read(name: str, value: Callable[[], Any]) -> None:
        if name not in own:
            own[name] = value()

    num_layers, num_q_heads = fields.integer("num_hidden_layers"), fields.integer("num_attention_heads")
    known = {"silu": "silu"} if activations is None else activations
    read("vocab_size", lambda: fields.integer("vocab_size"))
    read("hidden_size", lambda: fields.integer("hidden_size"))
    read("intermediate_size", lambda: fields.integer("intermediate_size"))
    read("num_kv_heads", lambda: fields.integer("num_key_value_heads", num_q_heads))
    read("head_dim", lambda: fields.integer("head_dim", head_dim or max(own["hidden_size"] // num_q_heads, 1)))
    read("norm_eps", lambda: fields.number("rms_norm_eps", 1e-6))
    read("max_context", lambda: fields.integer("max_position_embeddings"))
    read("windows", lambda: (None,) * num_layers)
    read("rope", lambda: read_rope(fields, own["head_dim"], own["max_context"], theta))
    read("activation", lambda: known[fields.one_of(activation, tuple(known), next(iter(known)))])
    read("tied_embeddings", lambda: fields.boolean("tie_word_embeddings", tied))
    if num_q_heads % own["num_kv_heads"]:
        raise fields.error("num_key_value_heads", f"must divide num_attention_heads, {num_q_heads}")
    if own["head_dim"] % 2 or own["head_dim"] > MAX_HEAD_DIM:
        rule = f"head_dim must be even and at most {MAX_HEAD_DIM} (got {own['head_dim']})"
        raise CheckpointError(f"{fields.where}: {rule}")
    switches = dict.fromkeys(("qkv_bias", "o_bias", "mlp_bias", "qk_norm"), False)
    shared = {"num_layers": num_layers, "num_q_heads": num_q_heads, "eos_token_ids": _eos_token_ids(fields)}
    dtype = str(fields.raw.get("dtype") or fields.raw.get("torch_dtype") or "float32")
    return DecoderConfig(**{**switches, **shared, "dtype": dtype, **own})


def read_windows(fields: Fields, num_layers: int, every: int | None = None) -> tuple[int | None, ...]:
    """Read each layer's window: of those that `layer_types` names, else of all but each `every`-th; None: of all."""
    if fields.raw.get("sliding_window") is None:
        return (None,) * num_layers
    window, kinds = fields.integer("sliding_window"), fields.raw.get("layer_types")
    if kinds is None:
        return tuple(None if every and (layer + 1) % every == 0 else window for layer in range(num_layers))
    is_list = isinstance(kinds, list) and len(kinds) == num_layers
    if not is_list or not all(kind in ("full_attention", "sliding_attention") for kind in kinds):
        raise fields.error("layer_types", "must name full_attention or sliding_attention for each layer")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _eos_token_ids(fields: Fields) -> tuple[int, ...]:
    value = fields.raw.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise fields.error("eos_token_id", "must be a token id or a list of them")
    return tuple(ids)


def read_rope(fields: Fields, head_dim: int, max_context: int, theta: float = 10_000.0) -> RopeConfig:
    """Read `rope_parameters` (transformers 5), and `rope_theta` and `rope_scaling` (before), which counts if it is set.

    Frequencies that change with a text's length have no place here: dynamic ones are refused, and longrope serves up
    to the length of its short factors. Sources: linear, arXiv 2306.15595; YaRN, arXiv 2309.00071; llama3, the Llama 3.1
    model card's reference code; longrope, arXiv 2402.13753.
    """
    new, old = (fields.inner(name).raw for name in ("rope_parameters", "rope_scaling"))
    for name, scaling in (("rope_parameters", new), ("rope_scaling", old)):
        if any(isinstance(value, Mapping) for value in scaling.values()):
            raise fields.error(name, "must be the same for all layers")
    kinds = (each.get(name) for each in (old, new) for name in ("rope_type", "type"))
    fields = Fields({**fields.raw, **new, **old}, fields.where)
    rotary_dim = int(head_dim * fields.positive("partial_rotary_factor", 1.0))
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise fields.error("partial_rotary_factor", "must leave an even rotary dimension")
    theta = _within(fields, "rope_theta", theta, least=1.0)
    kind = next(filter(None, kinds), "default")
    plain = [theta ** (-2.0 * i / rotary_dim) for i in range(rotary_dim // 2)]
    if kind == "default":
        return RopeConfig(inv_freq=tuple(plain))
    if kind == "linear":
        factor = _within(fields, "factor")
        return RopeConfig(inv_freq=tuple(f / factor for f in plain))
    if kind == "llama3":
        return RopeConfig(inv_freq=tuple(_llama3(plain, fields, max_context)))
    if kind == "yarn":
        return _yarn(plain, rotary_dim, theta, fields, max_context)
    if kind in ("longrope", "su"):
        return _longrope(plain, fields, max_context)
    raise CheckpointError(
        f"{fields.where}: rope_type: must be one of default, linear, llama3, yarn, longrope (got {shown(kind)})"
    )


def _within(fields: Fields, name: str, default: float | None = None, *, least: float = 1e-3) -> float:
    """Read a number that rotations can be computed with, over `least`."""
    value = fields.positive(name, default)
    if not least < value < 1e9:
        raise fields.error(name, f"must be over {least:g} and under 1e9")
    return value


def _longrope(plain: list[float], fields: Fields, max_context: int) -> RopeConfig:
    """Divide each frequency by its short factor, which holds up to the length of pretraining."""
    original = fields.integer("original_max_position_embeddings")
    if max_context > original:
        raise fields.error("original_max_position_embeddings", f"longrope serves up to it, not {max_context} tokens")
    factors = fields.raw.get("short_factor")
    if not isinstance(factors, list) or len(factors) != len(plain):
        raise fields.error("short_factor", f"must have {len(plain)} factors")
    if not all(isinstance(factor, int | float) and 0 < factor < math.inf for factor in factors):
        raise fields.error("short_factor", "must be positive numbers")
    stretch = fields.integer("max_position_embeddings") / original
    factor = 1.0 if stretch <= 1 else math.sqrt(1 + math.log(stretch) / math.log(original))
    inv_freq = tuple(frequency / factor for frequency, factor in zip(plain, factors, strict=True))
    return RopeConfig(inv_freq=inv_freq, attention_factor=fields.positive("attention_factor", factor))


def _llama3(plain: list[float], fields: Fields, max_context: int) -> list[float]:
    """Divide long wavelengths by `factor`, keep short ones, with a linear ramp between."""
    factor = _within(fields, "factor")
    low, high = fields.positive("low_freq_factor"), fields.positive("high_freq_factor")
    original = fields.positive("original_max_position_embeddings", max_context)

    def scaled(frequency: float) -> float:
        wavelength = 2 * math.pi / frequency
        if wavelength < original / high:
            return frequency
        if wavelength > original / low:
            return frequency / factor
        kept = (original / wavelength - low) / (high - low)
        return (1 - kept) * frequency / factor + kept * frequency

    return [scaled(frequency) for frequency in plain]


def _yarn(plain: list[float], rotary_dim: int, theta: float, fields: Fields, max_context: int) -> RopeConfig:
    """Interpolate slow dimensions, keep fast ones, with a ramp between; scale cos and sin by the attention factor."""
    original = fields.positive("original_max_position_embeddings", max_context)
    factor = _within(fields, "factor")

    def dimension_of(rotations: float) -> float:
        return rotary_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = dimension_of(_within(fields, "beta_fast", 32.0))
    high = dimension_of(_within(fields, "beta_slow", 1.0))
    if fields.boolean("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    width = high - low or 0.001

    def scaled(index: int, frequency: float) -> float:
        interpolated = min(max((index - low) / width, 0.0), 1.0)
        return interpolated * frequency / factor + (1 - interpolated) * frequency

    inv_freq = tuple(scaled(i, f) for i, f in enumerate(plain))
    return RopeConfig(inv_freq=inv_freq, attention_factor=_yarn_attention_factor(fields, factor))


def _yarn_attention_factor(fields: Fields, factor: float) -> float:
    def mscale(scale: float, weight: float) -> float:
        return 1.0 if scale <= 1 else 0.1 * weight * math.log(scale) + 1.0

    if fields.raw.get("attention_factor") is not None:
        return fields.positive("attention_factor")
    if None not in (fields.raw.get("mscale"), fields.raw.get("mscale_all_dim")):
        return mscale(factor, fields.positive("mscale")) / mscale(factor, fields.positive("mscale_all_dim"))
    return mscale(factor, 1.0)
