"""Rotary position embedding: tables whose frequencies never change with the length, and the rotation itself.

Style: half-split. Dimension i turns with dimension i + rotary_dim / 2; dimensions from rotary_dim on stay as
they are. `<R(m) q, R(n) k> = <R(m - d) q, R(n - d) k>` holds for such tables only, so variants whose
frequencies depend on the length (dynamic NTK, LongRoPE) must be refused by the caller that reads the model's
configuration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

# A query's rotation reaches twice the context once a session was truncated (DESIGN.md section 2).
_POSITIONS_PER_CONTEXT = 2


@dataclass(frozen=True, slots=True, eq=False)
class RopeTable:
    """cos and sin of every position in [0, 2 * max_position), computed in float64 and kept in float32.

    cos, sin    float32 [2 * max_position, rotary_dim / 2]  both times the attention factor (YaRN)
    """

    cos: Tensor = field(repr=False)
    sin: Tensor = field(repr=False)
    max_position: int

    @property
    def rotary_dim(self) -> int:
        """How many leading dimensions of a head are rotated."""
        return 2 * self.cos.shape[1]

    @property
    def num_positions(self) -> int:
        """Positions in [0, num_positions) can be rotated to."""
        return self.cos.shape[0]

    @classmethod
    def from_theta(cls, theta: float, rotary_dim: int, max_position: int) -> RopeTable:
        """Plain RoPE: frequency i is `theta ** (-2 i / rotary_dim)`."""
        if theta <= 0:
            raise ValueError(f"theta: must be positive (got {theta})")
        if rotary_dim < 2 or rotary_dim % 2:
            raise ValueError(f"rotary_dim: must be even and at least 2 (got {rotary_dim})")
        exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim
        return cls.from_inv_freq(theta**-exponents, max_position)

    @classmethod
    def from_inv_freq(
        cls, inv_freq: Tensor | Sequence[float], max_position: int, attention_factor: float = 1.0
    ) -> RopeTable:
        """Any fixed frequencies (linear, llama3, YaRN); queries and keys each carry `attention_factor` once.

        inv_freq    float [rotary_dim / 2]  radians per position
        """
        if max_position < 1:
            raise ValueError(f"max_position: must be at least 1 (got {max_position})")
        frequencies = torch.as_tensor(inv_freq).to(dtype=torch.float64, device="cpu")
        if frequencies.ndim != 1 or not len(frequencies):
            raise ValueError(f"inv_freq: must be a non-empty vector (got shape {tuple(frequencies.shape)})")
        positions = torch.arange(_POSITIONS_PER_CONTEXT * max_position, dtype=torch.float64)
        angles = torch.outer(positions, frequencies)
        cos, sin = angles.cos() * attention_factor, angles.sin() * attention_factor
        return cls(cos.float(), sin.float(), max_position)

    def to(self, device: torch.device | str) -> RopeTable:
        """The same table on another device."""
        return RopeTable(self.cos.to(device), self.sin.to(device), self.max_position)

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate row t of `x` to `positions[t]`; float32, for the caller to round once.

        x           float [T, num_heads, head_dim]
        positions   int [T]  each in [0, num_positions)
        """
        rows = positions.to(self.cos.device, torch.int64)
        cos, sin = self.cos.index_select(0, rows), self.sin.index_select(0, rows)
        return rotate(x.float(), cos.unsqueeze(1), sin.unsqueeze(1))


def rotate(x: Tensor, cos: Tensor, sin: Tensor, tail_scale: float = 1.0) -> Tensor:
    """Half-split rotation; dimensions behind the rotated ones are only scaled. The result is contiguous.

    x           float32 [..., head_dim]
    cos, sin    float32 [..., rotary_dim / 2]  broadcastable against x
    """
    half = cos.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if 2 * half < x.shape[-1]:
        torch.mul(x[..., 2 * half :], tail_scale, out=out[..., 2 * half :])
    pairs = (*x.shape[:-1], 2, half)
    source = x[..., : 2 * half].view(pairs)
    turned = out[..., : 2 * half].view(pairs)
    torch.mul(source, cos.unsqueeze(-2), out=turned)
    turned[..., 0, :].addcmul_(source[..., 1, :], sin, value=-1)
    turned[..., 1, :].addcmul_(source[..., 0, :], sin)
    return out
