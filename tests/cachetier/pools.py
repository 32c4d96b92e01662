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
    scale = 40 if dtype is torch.int8 else 1  # of numbers from -127 to 127
    return Pool(*((torch.randn(shape, generator=generator) * scale).to(device, dtype) for _ in range(2)))


def random_page(seed: int, like: Pool) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(like.page(0).shape, generator=generator).to(like.k_pages.device, like.k_pages.dtype)


def wait_all(load: object) -> None:
    for layer in range(NUM_LAYERS):
        load.wait_layer(layer)  # type: ignore[attr-defined]
