"""Rotary position embedding: tables whose frequencies never change with the length, and the rotation itself.

Style: half-split. Dimension i turns with dimension i + rotary_dim / 2; dimensions from rotary_dim on stay as they
are. `<R(m) q, R(n) k> = <R(m - d) q, R(n - d) k>` holds for such tables only, so variants whose frequencies depend on
the length (dynamic NTK, LongRoPE) must be refused by the caller that reads the model's configuration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

# A query's rotation reaches twice the context once a session was truncated.
_POSITIONS_PER_CONTEXT = 2
_POSITIONS_AT_ONCE = 1 << 16  # computed in float64: a long context's table takes little more memory than it keeps


@dataclass(frozen=True, slots=True, eq=False)
class RopeTable:
    """The rotation to every position in [0, 2 * max_position), computed in float64 and kept in float32.

    table   float32 [2 * max_position, 2, rotary_dim / 2]  cos, sin; each times the attention factor (YaRN);
    contiguous

    Raises ValueError for any other table: compiled code reads it as it lies.
    """

    table: Tensor = field(repr=False)
    max_position: int

    def __post_init__(self) -> None:
        table = self.table
        is_fit = table.dtype is torch.float32 and table.ndim == 3 and table.shape[1] == 2 and table.is_contiguous()
        if not is_fit:
            raise ValueError(
                f"table: must be float32 of shape (num_positions, 2, rotary_dim / 2), contiguous "
                f"(got {table.dtype}, {tuple(table.shape)}, strides {table.stride()})"
            )

    @property
    def rotary_dim(self) -> int:
        """Count the leading dimensions of a head that are rotated."""
        return 2 * self.table.shape[2]

    @property
    def num_positions(self) -> int:
        """Count the positions that can be rotated to, [0, num_positions)."""
        return self.table.shape[0]

    @property
    def cos(self) -> Tensor:
        """Return float32 [2 * max_position, rotary_dim / 2]"""
        return self.table[:, 0]

    @property
    def sin(self) -> Tensor:
        """Return float32 [2 * max_position, rotary_dim / 2]"""
        return self.table[:, 1]

    @classmethod
    def from_theta(cls, theta: float, rotary_dim: int, max_position: int) -> RopeTable:
        """Make the table of plain RoPE: frequency i is `theta ** (-2 i / rotary_dim)`."""
        if theta <= 0:
            raise ValueError(f"theta: must be positive (got {theta})")
        if rotary_dim < 2 or rotary_dim % 2:
            raise ValueError(f"rotary_dim: must be even and at least 2 (got {rotary_dim})")
        exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim
        return cls.from_inv_freq(theta**-exponents, max_position)

    @classmethod
    def from_inv_freq(
        cls,
        inv_freq: Tensor | Sequence[float],
        max_position: int,
        attention_factor: float = 1.0,
        device: torch.device | str = "cpu",
    ) -> RopeTable:
        """Make a table of fixed frequencies (linear, llama3, YaRN); queries and keys each carry the factor once.

        It is computed where it is kept.

        inv_freq    float [rotary_dim / 2]  radians per position
        """
        if max_position < 1:
            raise ValueError(f"max_position: must be at least 1 (got {max_position})")
        frequencies = torch.as_tensor(inv_freq).to(dtype=torch.float64, device=device)
        if frequencies.ndim != 1 or not len(frequencies):
            raise ValueError(f"inv_freq: must be a non-empty vector (got shape {tuple(frequencies.shape)})")
        num_positions = _POSITIONS_PER_CONTEXT * max_position
        table = torch.empty(num_positions, 2, len(frequencies), device=device)
        for start in range(0, num_positions, _POSITIONS_AT_ONCE):
            end = min(start + _POSITIONS_AT_ONCE, num_positions)
            angles = torch.outer(torch.arange(start, end, dtype=torch.float64, device=device), frequencies)
            table[start:end, 0] = angles.cos() * attention_factor
            table[start:end, 1] = angles.sin() * attention_factor
        return cls(table, max_position)

    def to(self, device: torch.device | str) -> RopeTable:
        """Return the same table on another device."""
        return RopeTable(self.table.to(device), self.max_position)

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate row t of `x` to `positions[t]`; float32, for the caller to round once.

        x           float [T, num_heads, head_dim]
        positions   int [T]  each in [0, num_positions)
        """
        x, half = x.float(), self.table.shape[2]
        turns = self.table.index_select(0, positions.to(self.table.device, torch.int64))
        cos, sin = turns.unsqueeze(1).chunk(2, 2)  # [T, 1, 1, half]
        pairs = x[..., : 2 * half].view(*x.shape[:-1], 2, half)
        turned = torch.addcmul(pairs * cos, pairs.flip(-2), torch.cat((-sin, sin), 2)).flatten(-2)
        return turned if 2 * half == x.shape[-1] else torch.cat((turned, x[..., 2 * half :]), -1)
