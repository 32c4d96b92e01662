"""Edges within a process: a chunk's layers and a device's pages on a CPU, and a host tier in plain memory."""

from __future__ import annotations

import numpy as np
import torch
from tier_io.chunks import Arm, Chain, copy_checked

from mneme.kernels.native.kv import IntArray, gather_chunk, scatter_chunk

PAGE_SIZE = 16


class Pages:
    """A pool in which the chunks' pages lie in a random order."""

    def __init__(self, chain: Chain, seed: int) -> None:
        shape = chain.shape
        num_each = shape.num_tokens // PAGE_SIZE
        pool = (2, shape.num_layers, shape.num_kv_heads, shape.num_chunks * num_each, PAGE_SIZE, shape.head_dim)
        self._k_pages, self._v_pages = torch.zeros(pool, dtype=torch.bfloat16).unbind(0)
        self._chain, self._copies = chain, np.zeros_like(chain.payload)
        order = np.random.default_rng(seed).permutation(shape.num_chunks * num_each).reshape(-1, num_each)
        self._runs = [_runs(page_ids) for page_ids in order]

    def scatter(self, index: int) -> None:
        for layer, payload in enumerate(self._chain.payload[index]):
            pages = self._k_pages[layer], self._v_pages[layer]
            scatter_chunk(payload, self._chain.shape.num_tokens, self._runs[index], *pages)

    def gather(self, index: int) -> None:
        for layer, copy in enumerate(self._copies[index]):
            pages = self._k_pages[layer], self._v_pages[layer]
            gather_chunk(*pages, self._runs[index], self._chain.shape.num_tokens, copy)

    def copy(self, index: int) -> None:
        for payload, copy in zip(self._chain.payload[index], self._copies[index], strict=True):
            np.copyto(copy, payload)

    def is_whole(self) -> bool:
        """Whether what was scattered and gathered again is what it was."""
        return bool(np.array_equal(self._copies, self._chain.payload))


def page_arms(pages: Pages) -> list[Arm]:
    return [
        Arm("device<->host", "raw copy", pages.copy),
        Arm("host->device", "scatter", pages.scatter, "raw copy"),
        Arm("device->host", "gather", pages.gather, "raw copy"),
    ]


class PlainHost:
    """A host tier without a store: what a chunk costs beyond its bytes."""

    def __init__(self, chain: Chain) -> None:
        self._chain, self._kept = chain, np.zeros_like(chain.payload)
        self.buffer = np.zeros_like(chain.payload[0])

    def copy(self, index: int) -> None:
        np.copyto(self.buffer, self._chain.payload[index])

    def copy_checked(self, index: int) -> None:
        copy_checked(self._chain.payload[index], self.buffer, self._chain.chunks[index].header.checksums)

    def put(self, index: int) -> None:
        for payload, kept in zip(self._chain.payload[index], self._kept[index], strict=True):
            np.copyto(kept, payload)
        self._chain.make(index, self._chain.chunks[index].header.parent, self._kept[index])


def host_arms(host: PlainHost) -> list[Arm]:
    return [
        Arm("host", "copy", host.copy),
        Arm("host", "copy+checksum", host.copy_checked, "copy"),
        Arm("host put", "make chunk", host.put, "copy"),
    ]


def _runs(page_ids: IntArray) -> IntArray:
    count = np.full_like(page_ids, PAGE_SIZE)
    return np.stack([page_ids, np.zeros_like(page_ids), count, np.arange(len(page_ids)) * PAGE_SIZE], axis=1)
