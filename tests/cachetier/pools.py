"""Small device pools, and what a dictionary of pages says they hold."""

from __future__ import annotations

from dataclasses import dataclass

import torch

NUM_LAYERS = 3


@dataclass(frozen=True)
class Pool:
    """Pages of random numbers."""

    k_pages: torch.Tensor
    v_pages: torch.Tensor

    def page(self, page_id: int) -> torch.Tensor:
        """A copy of all layers, K and V."""
        return torch.stack([self.k_pages[:, :, page_id], self.v_pages[:, :, page_id]]).clone()

    def write(self, page_id: int, page: torch.Tensor) -> None:
        self.k_pages[:, :, page_id], self.v_pages[:, :, page_id] = page[0], page[1]


def make_pool(num_pages: int = 12, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Pool:
    shape = (NUM_LAYERS, 2, num_pages, 4, 6)
    generator = torch.Generator().manual_seed(num_pages)
    return Pool(*(_numbers(shape, generator, dtype).to(device) for _ in range(2)))


def random_page(seed: int, like: Pool) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return _numbers(like.page(0).shape, generator, like.k_pages.dtype).to(like.k_pages.device)


def _numbers(shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
    scale = 30 if dtype is torch.int8 else 1  # of numbers from -127 to 127
    return (torch.randn(shape, generator=generator) * scale).to(dtype)


def wait_all(load: object) -> None:
    for layer in range(NUM_LAYERS):
        load.wait_layer(layer)  # type: ignore[attr-defined]
