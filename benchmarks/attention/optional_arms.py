"""Arms that need CUDA and may be missing or fail: FlashInfer's decode and cascade, `enable_gqa`."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from attention.scenes import Scene, contiguous_layers, rotated_q
from attention.timing import Arm
from torch import Tensor

_WORKSPACE_BYTES = 256 << 20
_TENSOR_CORES_FROM_GROUP = 4  # FlashInfer's decode on CUDA cores is the slower one from here


def flashinfer() -> Any | None:
    """The module, if it is there with a device to run on."""
    if not torch.cuda.is_available():
        return None
    try:
        return importlib.import_module("flashinfer")
    except Exception:  # a broken installation of somebody else's package is as good as none
        return None


def flashinfer_decode(scene: Scene) -> Arm | None:
    """One row per sequence over paged KV in FlashInfer's own layout, planned outside of the timing."""
    module = flashinfer()
    if module is None or scene.rows_per_sequence != 1 or scene.q.dtype == torch.float32:
        return None
    use_tensor_cores = scene.heads.group >= _TENSOR_CORES_FROM_GROUP
    wrapper = module.BatchDecodeWithPagedKVCacheWrapper(_workspace(scene), "HND", use_tensor_cores=use_tensor_cores)
    tables = [table.page_ids for table in scene.tables]
    indptr, ids, last = _csr(tables, scene)
    wrapper.plan(indptr, ids, last, *_sizes(scene), q_data_type=scene.q.dtype, kv_data_type=scene.q.dtype)
    return _paged_arm("flashinfer_decode", wrapper, scene)


def flashinfer_cascade(scene: Scene, num_shared_pages: int) -> Arm | None:
    """Two levels: the first pages, the same of all sequences, and the rest of each."""
    module = flashinfer()
    if module is None or scene.rows_per_sequence != 1 or scene.q.dtype == torch.float32:
        return None
    wrapper = module.MultiLevelCascadeAttentionWrapper(2, _workspace(scene), "HND")
    batch = len(scene.tables)
    levels = [
        _csr([scene.tables[0].page_ids[:num_shared_pages]], scene),
        _csr([table.page_ids[num_shared_pages:] for table in scene.tables], scene),
    ]
    queries = [torch.tensor([0, batch], dtype=torch.int32), torch.arange(batch + 1, dtype=torch.int32)]
    wrapper.plan(
        [tensor.to(scene.q.device) for tensor in queries], *(list(tensors) for tensors in zip(*levels, strict=True)),
        *_sizes(scene), q_data_type=scene.q.dtype, kv_data_type=scene.q.dtype,
    )  # fmt: skip
    return _paged_arm("flashinfer_cascade", wrapper, scene)


def contiguous_by_head(scene: Scene, cache_bytes: int = 0, *, is_dry: bool = False) -> Arm | None:
    """SDPA over contiguous KV with rows of a head kept apart, which lets torch choose its flash kernels.

    On CUDA only: a CPU has none of them; in a dry run anywhere.
    """
    if scene.q.device.type != "cuda" and not is_dry:
        return None
    from torch.nn.attention.bias import causal_lower_right

    heads, rows, length = scene.heads, scene.rows_per_sequence, scene.lengths[0]
    layers = contiguous_layers(scene, cache_bytes)
    q = rotated_q(scene).view(-1, rows, heads.q, heads.dim).transpose(1, 2).contiguous()
    mask = None if rows == 1 else causal_lower_right(rows, length)

    def call(layer: int) -> Tensor:
        return F.scaled_dot_product_attention(q, *layers[layer], attn_mask=mask, enable_gqa=heads.group > 1)

    def unpack(out: Tensor) -> Tensor:
        return out.transpose(1, 2).reshape(-1, heads.q, heads.dim)

    return Arm("contiguous/by_head", call, len(layers), unpack)


def _paged_arm(name: str, wrapper: Any, scene: Scene) -> Arm:
    q = rotated_q(scene)
    layers = [tuple(pages.transpose(0, 1).contiguous() for pages in layer) for layer in scene.layers]
    return Arm(name, lambda layer: wrapper.run(q, layers[layer]), len(layers))


def _sizes(scene: Scene) -> tuple[int, int, int, int]:
    return scene.heads.q, scene.heads.kv, scene.heads.dim, scene.page_size


def _csr(tables: list[np.ndarray[Any, Any]], scene: Scene) -> tuple[Tensor, Tensor, Tensor]:
    """Begin of each table, all page ids, and the tokens of each last page, which is full."""
    begins = np.concatenate(([0], np.cumsum([len(ids) for ids in tables])))
    arrays = (begins, np.concatenate(tables), np.full(len(tables), scene.page_size))
    indptr, ids, last = (torch.from_numpy(array.astype(np.int32)).to(scene.q.device) for array in arrays)
    return indptr, ids, last


def _workspace(scene: Scene) -> Tensor:
    return torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=scene.q.device)
