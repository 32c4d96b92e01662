"""A decoder described by data, read from a Hugging Face `config.json`.

Llama 2/3 and what shares its layout (Yi, Vicuna), Mistral, Qwen2 and Qwen3. What a family leaves open is a field
here; what no supported family needs is refused when it is loaded, with the field's name.
"""

from __future__ import annotations

import importlib.resources
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mneme.errors import CheckpointError, shown

EMBEDDED_MODEL = "mneme-tiny"
_MAX_DIMENSION = 2**24
_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


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
class DecoderConfig:
    """Shape and switches of a pre-norm decoder with rotary attention and a gated MLP."""

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
    qk_norm: bool  # RMSNorm over each query and key head, before rotation (Qwen3)
    tied_embeddings: bool
    windows: tuple[int | None, ...]  # per layer: sliding window in tokens
    max_context: int  # tokens
    rope: RopeConfig
    eos_token_ids: tuple[int, ...]
    dtype: str  # what the checkpoint says its weights are

    @property
    def q_size(self) -> int:
        return self.num_q_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def is_windowed(self) -> bool:
        """Return whether a row does not see all on some layer."""
        return any(window is not None for window in self.windows)

    @property
    def window(self) -> int | None:
        """Tokens that a row sees on any layer, itself too; None if a layer sees all."""
        windows = [window for window in self.windows if window is not None]
        return max(windows) if len(windows) == self.num_layers else None


def model_directory(model: str) -> Path:
    """The directory of a model: the embedded one by its name, any other by its path."""
    if model == EMBEDDED_MODEL:
        return Path(str(importlib.resources.files("mneme.replicas") / "mneme_tiny"))
    path = Path(model).expanduser()
    if not path.is_dir():
        rule = f"no such model directory (the embedded model is {EMBEDDED_MODEL!r})"
        if re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", model):  # the form of a name on the Hugging Face hub
            name = model.partition("/")[2]
            rule += f"; models are not downloaded: `hf download {model} --local-dir {name}`, then give {name!r}"
        raise CheckpointError(f"{model}: {rule}")
    return path


def load_model_config(model_dir: Path) -> DecoderConfig:
    """Read `config.json`; raises `CheckpointError` that names the file or the field."""
    path = model_dir / "config.json"
    try:
        raw = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file; {model_dir} is not a Hugging Face model directory") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not readable as JSON ({type(error).__name__})") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path}: must hold a JSON object")
    return parse_model_config(raw, str(path))


def parse_model_config(raw: Mapping[str, Any], where: str) -> DecoderConfig:
    """`DecoderConfig` of a parsed config.json; `where` begins each error message."""
    fields = _Fields(raw, where)
    family = fields.one_of("model_type", _FAMILIES)
    fields.refuse("auto_map", "code of a model's own is never run")
    fields.refuse("quantization_config", "quantized checkpoints are not supported")
    fields.one_of("hidden_act", ("silu",), "silu")
    hidden_size, num_q_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    num_kv_heads = fields.integer("num_key_value_heads", num_q_heads)
    head_dim = fields.integer("head_dim", 128 if family == "qwen3" else hidden_size // num_q_heads)
    if num_q_heads % num_kv_heads:
        raise CheckpointError(f"{where}: num_attention_heads must be a multiple of num_key_value_heads")
    if head_dim % 2 or head_dim > 256:
        raise CheckpointError(f"{where}: head_dim must be even and at most 256 (got {head_dim})")
    num_layers = fields.integer("num_hidden_layers")
    max_context = fields.integer("max_position_embeddings")
    biased = family in ("llama", "qwen3") and fields.boolean("attention_bias", False)
    return DecoderConfig(
        family=family,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        qkv_bias=family == "qwen2" or biased,
        o_bias=biased,
        mlp_bias=family == "llama" and fields.boolean("mlp_bias", False),
        qk_norm=family == "qwen3",
        tied_embeddings=fields.boolean("tie_word_embeddings", False),
        windows=_windows(fields, family, num_layers),
        max_context=max_context,
        rope=_parse_rope(raw, head_dim, max_context, where),
        eos_token_ids=_eos_token_ids(raw, where),
        dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
    )


class _Fields:
    """Typed reads from the raw mapping, each with an error that names the field."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self.raw = raw
        self._where = where

    def error(self, name: str, rule: str) -> CheckpointError:
        return CheckpointError(f"{self._where}: {name}: {rule} (got {shown(self.raw.get(name))})")

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.raw.get(name)
        if value is None and default is not None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MAX_DIMENSION:
            raise self.error(name, f"must be an integer from 1 to {_MAX_DIMENSION}")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.raw.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1:
            raise self.error(name, "must be a number between 0 and 1")
        return float(value)

    def positive(self, name: str, default: float | None = None) -> float:
        value = self.raw.get(name)
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e12:
            raise self.error(name, "must be a positive number")
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        value = self.raw.get(name, default)
        if not isinstance(value, bool):
            raise self.error(name, "must be true or false")
        return value

    def one_of(self, name: str, choices: tuple[str, ...], default: str | None = None) -> str:
        value = self.raw.get(name, default)
        if value not in choices:
            raise self.error(name, f"must be one of {', '.join(choices)}")
        return str(value)

    def refuse(self, name: str, why: str) -> None:
        if self.raw.get(name):
            raise self.error(name, why)


def _windows(fields: _Fields, family: str, num_layers: int) -> tuple[int | None, ...]:
    """Mistral: one window for every layer. Qwen: on `layer_types`, or on layers from `max_window_layers`."""
    raw = fields.raw
    always = family == "mistral"
    if family == "llama" or not (always or fields.boolean("use_sliding_window", False)):
        return (None,) * num_layers
    if "sliding_window" in raw and raw["sliding_window"] is None:
        return (None,) * num_layers
    window = fields.integer("sliding_window", 4096)
    layer_types = raw.get("layer_types")
    if layer_types is not None:
        if len(layer_types) != num_layers or not set(layer_types) <= {"full_attention", "sliding_attention"}:
            raise fields.error("layer_types", "must name full_attention or sliding_attention for each layer")
        return tuple(window if kind == "sliding_attention" else None for kind in layer_types)
    first = 0 if always else fields.integer("max_window_layers", 28)
    return tuple(window if layer >= first else None for layer in range(num_layers))


def _eos_token_ids(raw: Mapping[str, Any], where: str) -> tuple[int, ...]:
    value = raw.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise CheckpointError(f"{where}: eos_token_id: must be a token id or a list of them (got {shown(value)})")
    return tuple(ids)


def _parse_rope(raw: Mapping[str, Any], head_dim: int, max_context: int, where: str) -> RopeConfig:
    """Read `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before).

    Types whose frequencies change with the length (dynamic, longrope) are refused. Sources: linear, arXiv 2306.15595;
    YaRN, arXiv 2309.00071; llama3, the Llama 3.1 model card's reference code.
    """
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping):
        raise CheckpointError(f"{where}: rope_scaling: must be an object (got {shown(scaling)})")
    fields = _Fields({**raw, **scaling}, where)
    rotary_dim = int(head_dim * fields.positive("partial_rotary_factor", 1.0))
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise CheckpointError(f"{where}: partial_rotary_factor: must leave an even rotary dimension")
    theta = fields.positive("rope_theta", 10_000.0)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    plain = [theta ** (-2.0 * i / rotary_dim) for i in range(rotary_dim // 2)]
    if kind == "default":
        return RopeConfig(inv_freq=tuple(plain))
    if kind == "linear":
        factor = fields.positive("factor")
        return RopeConfig(inv_freq=tuple(f / factor for f in plain))
    if kind == "llama3":
        return RopeConfig(inv_freq=tuple(_llama3(plain, fields, max_context)))
    if kind == "yarn":
        return _yarn(plain, rotary_dim, theta, fields, max_context)
    raise CheckpointError(
        f"{where}: rope_scaling.rope_type: must be one of default, linear, llama3, yarn (got {shown(kind)})"
    )


def _llama3(plain: list[float], fields: _Fields, max_context: int) -> list[float]:
    """Divide long wavelengths by `factor`, keep short ones, with a linear ramp between."""
    factor = fields.positive("factor")
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


def _yarn(plain: list[float], rotary_dim: int, theta: float, fields: _Fields, max_context: int) -> RopeConfig:
    """Interpolate slow dimensions, keep fast ones, with a ramp between; scale cos and sin by the attention factor."""
    original = fields.positive("original_max_position_embeddings", max_context)
    factor = fields.positive("factor")

    def dimension_of(rotations: float) -> float:
        return rotary_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = dimension_of(fields.positive("beta_fast", 32.0))
    high = dimension_of(fields.positive("beta_slow", 1.0))
    if fields.boolean("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    width = high - low or 0.001

    def scaled(index: int, frequency: float) -> float:
        interpolated = min(max((index - low) / width, 0.0), 1.0)
        return interpolated * frequency / factor + (1 - interpolated) * frequency

    inv_freq = tuple(scaled(i, f) for i, f in enumerate(plain))
    return RopeConfig(inv_freq=inv_freq, attention_factor=_yarn_attention_factor(fields, factor))


def _yarn_attention_factor(fields: _Fields, factor: float) -> float:
    def mscale(scale: float, weight: float) -> float:
        return 1.0 if scale <= 1 else 0.1 * weight * math.log(scale) + 1.0

    if fields.raw.get("attention_factor") is not None:
        return fields.positive("attention_factor")
    if None not in (fields.raw.get("mscale"), fields.raw.get("mscale_all_dim")):
        return mscale(factor, fields.positive("mscale")) / mscale(factor, fields.positive("mscale_all_dim"))
    return mscale(factor, 1.0)
