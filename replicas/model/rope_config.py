"""Rotary frequencies of a checkpoint: types default, linear, llama3 and yarn.

Their frequencies are fixed, so a key rotated at one position serves any other (DESIGN: deltas). Types whose
frequencies change with the length (dynamic, longrope) are refused.

Sources: linear, arXiv 2306.15595; YaRN, arXiv 2309.00071; llama3, the Llama 3.1 model card's reference code.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mneme.errors import CheckpointError, shown


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """`inv_freq` has rotary_dim / 2 entries, radians per position; `attention_factor` scales cos and sin."""

    inv_freq: tuple[float, ...]
    attention_factor: float = 1.0

    @property
    def rotary_dim(self) -> int:
        return 2 * len(self.inv_freq)


def parse_rope(raw: Mapping[str, Any], head_dim: int, max_context: int, where: str) -> RopeConfig:
    """From `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping):
        raise CheckpointError(f"{where}: rope_scaling: must be an object (got {shown(scaling)})")
    reader = _Reader(scaling, raw, where)
    rotary_dim = int(head_dim * reader.number("partial_rotary_factor", 1.0))
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise CheckpointError(f"{where}: partial_rotary_factor: must leave an even rotary dimension")
    theta = reader.number("rope_theta", 10_000.0)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    plain = [theta ** (-2.0 * i / rotary_dim) for i in range(rotary_dim // 2)]
    if kind == "default":
        return RopeConfig(inv_freq=tuple(plain))
    if kind == "linear":
        factor = reader.number("factor")
        return RopeConfig(inv_freq=tuple(f / factor for f in plain))
    if kind == "llama3":
        return RopeConfig(inv_freq=tuple(_llama3(plain, reader, max_context)))
    if kind == "yarn":
        return _yarn(plain, rotary_dim, theta, reader, max_context)
    raise CheckpointError(
        f"{where}: rope_scaling.rope_type: must be one of default, linear, llama3, yarn (got {shown(kind)})"
    )


class _Reader:
    """Numbers from the scaling mapping, falling back to the configuration's top level."""

    def __init__(self, scaling: Mapping[str, Any], raw: Mapping[str, Any], where: str) -> None:
        self._scaling, self._raw, self._where = scaling, raw, where

    def number(self, name: str, default: float | None = None) -> float:
        value = self._scaling.get(name, self._raw.get(name))
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e12:
            raise CheckpointError(f"{self._where}: rope {name}: must be a positive number (got {shown(value)})")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        return bool(self._scaling.get(name, default))

    def has(self, name: str) -> bool:
        return self._scaling.get(name) is not None


def _llama3(plain: list[float], reader: _Reader, max_context: int) -> list[float]:
    """Long wavelengths divided by `factor`, short ones kept, a linear ramp between."""
    factor = reader.number("factor")
    low, high = reader.number("low_freq_factor"), reader.number("high_freq_factor")
    original = reader.number("original_max_position_embeddings", max_context)

    def scaled(frequency: float) -> float:
        wavelength = 2 * math.pi / frequency
        if wavelength < original / high:
            return frequency
        if wavelength > original / low:
            return frequency / factor
        kept = (original / wavelength - low) / (high - low)
        return (1 - kept) * frequency / factor + kept * frequency

    return [scaled(frequency) for frequency in plain]


def _yarn(plain: list[float], rotary_dim: int, theta: float, reader: _Reader, max_context: int) -> RopeConfig:
    """Interpolate slow dimensions, keep fast ones, a ramp between; cos and sin scaled by the attention factor."""
    original = reader.number("original_max_position_embeddings", max_context)
    factor = reader.number("factor")

    def dimension_of(rotations: float) -> float:
        return rotary_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = dimension_of(reader.number("beta_fast", 32.0))
    high = dimension_of(reader.number("beta_slow", 1.0))
    if reader.flag("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    width = high - low or 0.001

    def scaled(index: int, frequency: float) -> float:
        interpolated = min(max((index - low) / width, 0.0), 1.0)
        return interpolated * frequency / factor + (1 - interpolated) * frequency

    inv_freq = tuple(scaled(i, f) for i, f in enumerate(plain))
    return RopeConfig(inv_freq=inv_freq, attention_factor=_yarn_attention_factor(reader, factor))


def _yarn_attention_factor(reader: _Reader, factor: float) -> float:
    def mscale(scale: float, weight: float) -> float:
        return 1.0 if scale <= 1 else 0.1 * weight * math.log(scale) + 1.0

    if reader.has("attention_factor"):
        return reader.number("attention_factor")
    if reader.has("mscale") and reader.has("mscale_all_dim"):
        return mscale(factor, reader.number("mscale")) / mscale(factor, reader.number("mscale_all_dim"))
    return mscale(factor, 1.0)
