"""How far cached keys and values are from those of a full prefill: what CacheBlend selects tokens by (section 4.3)."""

from __future__ import annotations

import torch
from torch import Tensor

from mneme.kernels.kv_write import check_rows
from mneme.kernels.native import kv as native_kv
from mneme.kernels.rope import RopeTable


def kv_deviation(
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    positions: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    rope: RopeTable | None,
) -> Tensor:
    """Return float32 [T, 2]: squared distances of new keys and values from those in their slots, over heads and dims.

    k, v              [T, num_kv_heads, head_dim]  un-rotated
    slots             int [T]  page_id * page_size + offset; a slot may be read for several rows
    positions         int [T]  where the slot's key is rotated; distances of keys are the same in every frame
    k_pages, v_pages  [num_kv_heads, num_pages, page_size, head_dim]  one layer's pool, only read

    New keys are rotated in float32 and not rounded: a distance of 0 is a key that would be stored bit by bit in
    float32, and one within its rounding in bfloat16. Raises ValueError as `write_kv` does.
    """
    check_rows(k, v, slots, positions, k_pages, rope)
    if native_kv.can_write(k, v, k_pages, v_pages):
        return native_kv.kv_deviation(k, v, slots, positions, k_pages, v_pages, rope)
    index = slots.to(torch.int64)
    fresh_k = k.float() if rope is None else rope.rotate(k, positions)
    distances = [
        (fresh - pages.view(pages.shape[0], -1, pages.shape[3])[:, index].transpose(0, 1)).square().sum((1, 2))
        for fresh, pages in ((fresh_k, k_pages), (v.float(), v_pages))
    ]
    return torch.stack(distances, 1)
