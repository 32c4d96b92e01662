"""The attention and merge kernels under every configuration, for `triton_compile`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any, get_args

import torch

from mneme.kernels.triton.attention import attention_kernel, key_position_kernel, merge_kernel
from mneme.kernels.triton.backend import MERGE_WARPS, launch_constants, merge_constants
from mneme.kernels.triton.configs import HEAD_DIMS, Config, Phase, candidates, config_of
from tests.kernels.triton_compile import ARCHITECTURES, Case

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_POINTERS = {"bf16": "*bf16", "fp16": "*fp16", "fp32": "*fp32"}


def attention_case(
    config: Config,
    *,
    dtype: str = "bf16",
    head_dim: int = 128,
    page_size: int = 32,
    **switches: Any,
) -> Case:
    """One launch; `switches` are constexprs that differ from the plain full-rotary decode of four groups."""
    element = _POINTERS[dtype]
    constexprs: dict[str, Any] = {
        "NUM_KV_HEADS": 8, "GROUPS": 4, "HAS_WINDOW": False, "HAS_SLOPES": False, "HAS_CAP": False, "TRIM": False,
        "INTERPRET": False, **launch_constants(config, head_dim, head_dim, page_size, _DTYPES[dtype]),
    }  # fmt: skip
    signature = {
        "q": element, "k_pages": element, "v_pages": element, "key_position": "*i32", "rope_table": "*fp32",
        "alibi_slopes": "*fp32", "out": element, "lse": "*fp32", "partial_out": "*fp32", "partial_lse": "*fp32",
        "work": "*i32", "num_pages": "i32", "num_rope_positions": "i32", "window": "i32", "q_scale": "fp32",
        "cap": "fp32",
    }  # fmt: skip
    sizes = "x".join(map(str, config))
    return Case(
        name=f"attention-{dtype}-d{head_dim}-p{page_size}-{sizes}"
        + "".join(f"-{key}={v}" for key, v in switches.items()),
        kernel=attention_kernel,
        signature=signature,
        constexprs=constexprs | switches,
        options={"num_warps": config.num_warps, "num_stages": config.num_stages},
        tensor_cores=None if dtype == "fp32" else "wgmma",
    )


def merge_case(dtype: str, head_dim: int) -> Case:
    """The merge of rows of 32 heads."""
    constexprs = merge_constants(32, head_dim)
    pointers = ("out", "lse", "partial_out", "partial_lse")
    signature = dict.fromkeys(pointers, "*fp32") | {"out": _POINTERS[dtype], "work": "*i32"}
    return Case(f"merge-{dtype}-d{head_dim}", merge_kernel, signature, constexprs, {"num_warps": MERGE_WARPS})


def _key_position_case(page_size: int) -> Case:
    signature = dict.fromkeys(("key_position", "slot_position", "work"), "*i32") | {"num_listed": "i32"}
    constexprs = {"PAGE_SIZE": page_size, "PAGES": 1024 // page_size}
    return Case(f"key-position-p{page_size}", key_position_kernel, signature, constexprs, {"num_warps": 4})


def _attention_cases() -> Iterator[Case]:
    """What serving launches: the rule's configuration for every head dimension and phase, other types where registers
    differ, and every switch and page size once."""
    for architecture, head_dim, phase in product(ARCHITECTURES, HEAD_DIMS, get_args(Phase)):
        is_sample = head_dim == 128 or (head_dim, phase, architecture) == (80, "decode", 90)
        for dtype, element_bytes in (("bf16", 2), ("fp16", 2), ("fp32", 4)):
            if dtype == "bf16" or (phase == "decode" and head_dim in (64, 128, 256)):
                sizes = {"head_dim": head_dim, "element_bytes": element_bytes, "num_groups": 4}
                config = config_of(**sizes, phase=phase, architecture=architecture)
                case = attention_case(config, dtype=dtype, head_dim=head_dim, TRIM=phase == "prefill")
                yield case._replace(architectures=(architecture,), is_sample=is_sample and dtype == "bf16")
    decode = config_of(head_dim=128, element_bytes=2, num_groups=4, phase="decode")
    for page_size in (16, 64):
        yield attention_case(decode, page_size=page_size)._replace(architectures=(90,))
    for switches in (
        {"HAS_WINDOW": True, "TRIM": True},
        {"HAS_CAP": True},
        {"HAS_SLOPES": True},
        {"ROTARY_DIM": 32},
        {"ROTARY_DIM": 0},
        {"GROUPS": 1, "NUM_KV_HEADS": 32},
        {"GROUPS": 7},
    ):
        yield attention_case(decode, **switches)._replace(architectures=(90,))


def _tuning_cases() -> Iterator[Case]:
    """Every candidate that a GPU would be tuned with, for the two commonest head dimensions, beside the rule's."""
    for architecture, head_dim in product(ARCHITECTURES, (64, 128)):
        sizes = {"head_dim": head_dim, "element_bytes": 2, "num_groups": 4, "architecture": architecture}
        rule = [config_of(**sizes, phase=phase) for phase in get_args(Phase)]
        for config in candidates(**sizes):
            if config not in rule:
                yield attention_case(config, head_dim=head_dim)._replace(architectures=(architecture,))


CASES = [
    *_attention_cases(),
    *_tuning_cases(),
    *(merge_case(dtype, head_dim) for dtype in _POINTERS for head_dim in (64, 80, 256)),
    *(_key_position_case(page_size) for page_size in (16, 32, 64)),
]
