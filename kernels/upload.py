"""Moves small arrays between the host and a device without waiting for the device.

A copy from or to ordinary memory makes CUDA wait for all that was launched before, unseen: a step that is launched
ahead of another would wait for it. Pinned memory comes from torch's cache, which gives it to nobody else before its
copy is done. On a CPU what is returned is the array itself.
"""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor


def upload(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Return an array on a device, for work of the current stream."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def upload_into(target: Tensor, array: npt.NDArray[Any]) -> None:
    """Write an array into a tensor of its shape and dtype, by work of the current stream."""
    source = torch.from_numpy(array)
    target.copy_(source.pin_memory() if target.is_cuda else source, non_blocking=True)


def download(tensor: Tensor) -> Tensor:
    """Return host memory that holds a tensor as soon as the current stream has come so far."""
    if not tensor.is_cuda:
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
