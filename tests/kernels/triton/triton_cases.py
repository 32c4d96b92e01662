"""Every kernel under every configuration that serving or tuning launches, for `triton_compile`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any, get_args

import torch

from mneme.kernels.triton import sampling as triton_sampling
from mneme.kernels.triton.attention import attention_kernel, key_position_kernel, merge_kernel
from mneme.kernels.triton.backend import MERGE_WARPS, launch_constants, merge_constants
from mneme.kernels.triton.configs import (
    HEAD_DIMS,
    WIDE,
    WIDE_CANDIDATES,
    Config,
    Kind,
    WideConfig,
    candidates,
    config_of,
    has_tcgen05,
)
from mneme.kernels.triton.kv import write_constants, write_kv_kernel
from mneme.kernels.triton.ops import add_rms_norm_kernel, gated_kernel, num_warps_of, rms_norm_kernel, rows_per_tile
from mneme.kernels.triton.sampling import best_kernel, draw_kernel, gather_kernel, weigh_kernel
from mneme.kernels.triton.wide import wide_kernel
from tests.kernels.triton.triton_compile import ARCHITECTURES, STACK_BYTES, Case

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_ELEMENTS = ("bf16", "fp16", "fp32")
_POINTERS = {name: f"*{name}" for name in (*_ELEMENTS, "i8")}


def attention_case(
    config: Config,
    *,
    dtype: str = "bf16",
    kv: str | None = None,
    architecture: int = 90,
    head_dim: int = 128,
    page_size: int = 32,
    **switches: Any,
) -> Case:
    """One launch; `kv`: of keys and values, if they are not `dtype`; `switches` are constexprs that differ from plain
    full-rotary heads in groups of four."""
    element, kept = _POINTERS[dtype], _POINTERS[kv or dtype]
    constexprs: dict[str, Any] = {
        "NUM_KV_HEADS": 8, "GROUPS": 4, "HAS_WINDOW": False, "HAS_CAP": False, "INTERPRET": False,
        "HAS_TCGEN05": has_tcgen05(architecture),
        **launch_constants(config, head_dim, head_dim, page_size, _DTYPES[dtype]),
    }  # fmt: skip
    signature = {
        "q": element, "k_pages": kept, "v_pages": kept, "key_position": "*i32", "rope_table": "*fp32",
        "out": element, "lse": "*fp32", "partial_out": "*fp32", "partial_lse": "*fp32",
        "work": "*i32", "num_pages": "i32", "stride_q": "i32", "num_rope_positions": "i32", "window": "i32",
        "q_scale": "fp32", "cap": "fp32",
    }  # fmt: skip
    sizes = "x".join(map(str, config))
    return Case(
        name=f"attention-{dtype}{'' if kv is None else f'-{kv}'}-d{head_dim}-p{page_size}-{sizes}"
        + "".join(f"-{key}={v}" for key, v in switches.items()),
        kernel=attention_kernel,
        signature=signature,
        constexprs=constexprs | switches,
        options={"num_warps": config.num_warps, "num_stages": config.num_stages},
        tensor_cores=None if dtype == "fp32" else "wgmma" if config.wide_m >= 64 else "mma",
        aligned=("stride_q",),
    )


def wide_case(
    wide: WideConfig, *, dtype: str = "bf16", head_dim: int = 128, page_size: int = 64, **switches: Any
) -> Case:
    """One launch of wide tiles; spills in its loops are counted in reports of what was chosen with them."""
    element = _POINTERS[dtype]
    plain = attention_case(config_of(head_dim=head_dim, element_bytes=2, num_groups=4, kind="narrow"), dtype=dtype)
    descriptors = {
        "k_pages": f"tensordesc<{dtype}[{page_size}, {head_dim // 2}]>",
        "v_pages": f"tensordesc<{dtype}[{page_size}, {head_dim}]>",
    }
    constexprs = {
        "NUM_KV_HEADS": 8, "GROUPS": 4, "HAS_WINDOW": False, "HAS_CAP": False, "INTERPRET": False,
        **launch_constants(wide, head_dim, head_dim, page_size, _DTYPES[dtype]),
    }  # fmt: skip
    options = {"num_warps": wide.num_warps, "num_stages": wide.num_stages}
    return Case(
        name=f"wide-{dtype}-d{head_dim}-p{page_size}-{'x'.join(map(str, wide))}"
        + "".join(f"-{key}={v}" for key, v in switches.items()),
        kernel=wide_kernel,
        signature=plain.signature | descriptors | {"q": element, "out": element},
        constexprs=constexprs | switches,
        options=options | ({} if wide.max_registers is None else {"maxnreg": wide.max_registers}),
        tensor_cores="wgmma",
        aligned=("stride_q",),
        architectures=(90,),
        most_loop_spills=_WIDE_LOOP_SPILLS,
        most_stack_bytes=1280,
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


_INT8_LOOP_SPILLS = 32  # of 1,500 instructions: pieces of 4 bytes have more addresses
# In all loops together: most of them in the second, careful pass, which hardly ever runs.
_WIDE_LOOP_SPILLS = 256


def _wide_cases() -> Iterator[Case]:
    """What serving launches on sm_90, other types and switches once, and on sm_100 so that it is known to compile."""
    for dtype, head_dim in product(("bf16", "fp16"), (64, 128)):
        is_sample = (dtype, head_dim) == ("bf16", 128)
        architectures = (90, 100) if is_sample else (90,)
        yield wide_case(WIDE, dtype=dtype, head_dim=head_dim)._replace(architectures=architectures, is_sample=is_sample)
    for switches in ({"HAS_WINDOW": True}, {"HAS_CAP": True}, {"ROTARY_DIM": 32}, {"GROUPS": 7}):
        yield wide_case(WIDE, **switches)
    for wide in WIDE_CANDIDATES[1:]:
        yield wide_case(wide)


def _attention_cases() -> Iterator[Case]:
    """What serving launches: the rule's configuration for every head dimension and kind of step, other types where
    registers differ, and every switch and page size once."""
    for architecture, head_dim, kind in product(ARCHITECTURES, HEAD_DIMS, get_args(Kind)):
        is_usual = architecture in (80, 90)  # the others: bfloat16 alone, and not in `make test`
        is_sample = (is_usual and head_dim == 128) or (head_dim, kind, architecture) == (80, "mixed", 90)
        for dtype, element_bytes in (("bf16", 2), ("fp16", 2), ("fp32", 4)):
            if dtype == "bf16" or (is_usual and head_dim in (64, 128, 256)):
                sizes = {"head_dim": head_dim, "element_bytes": element_bytes, "num_groups": 4}
                config = config_of(**sizes, kind=kind, architecture=architecture)
                case = attention_case(config, dtype=dtype, head_dim=head_dim, architecture=architecture)
                yield case._replace(architectures=(architecture,), is_sample=is_sample and dtype == "bf16")
    for architecture, head_dim, kind in product(ARCHITECTURES, HEAD_DIMS, get_args(Kind)):
        for dtype, element_bytes in (("bf16", 2), ("fp16", 2), ("fp32", 4)):
            if dtype == "bf16" or (head_dim == 128 and architecture == 90):
                sizes = {"head_dim": head_dim, "element_bytes": element_bytes, "num_groups": 4}
                config = config_of(**sizes, kind=kind, architecture=architecture)
                case = attention_case(config, dtype=dtype, kv="i8", head_dim=head_dim, architecture=architecture)
                is_sample = (dtype, head_dim, architecture) == ("bf16", 128, 90)
                yield case._replace(
                    architectures=(architecture,), is_sample=is_sample, most_loop_spills=_INT8_LOOP_SPILLS,
                    most_stack_bytes=2048 if dtype == "fp32" else STACK_BYTES,
                )  # fmt: skip
    rules = [config_of(head_dim=128, element_bytes=2, num_groups=4, kind=kind) for kind in get_args(Kind)]
    for rule, page_size in product(rules, (16, 64)):
        yield attention_case(rule, page_size=page_size)._replace(architectures=(90,))
    for switches in (
        {"HAS_WINDOW": True},
        {"HAS_CAP": True},
        {"ROTARY_DIM": 32},
        {"ROTARY_DIM": 0},
        {"GROUPS": 1, "NUM_KV_HEADS": 32},
        {"GROUPS": 7},
    ):
        for rule in rules:
            yield attention_case(rule, **switches)._replace(architectures=(90,))


def _tuning_cases() -> Iterator[Case]:
    """Every candidate that a GPU would be tuned with, for the two commonest head dimensions, beside the rule's."""
    for head_dim, kind in product((64, 128), get_args(Kind)):
        _, *others = candidates(head_dim=head_dim, element_bytes=2, num_groups=4, kind=kind)
        for config in others:
            yield attention_case(config, head_dim=head_dim)._replace(architectures=(90,))


_INTEGERS = (
    "num_rows", "heads", "width", "stride_token", "stride_head", "stride_hidden", "stride_delta", "stride_row",
    "num_heads", "num_slots", "num_positions", "stride_k_token", "stride_k_head", "stride_v_token", "stride_v_head",
    "vocab", "num_chunks",
)  # fmt: skip
_DRAW_POINTERS = {
    "logits_ptr": "*fp32", "params_ptr": "*fp64", "best_ptr": "*fp32", "best_id_ptr": "*i32", "weight_ptr": "*i64",
    "pivot_count_ptr": "*i32", "pivot_weight_ptr": "*i64", "candidate_ptr": "*fp32", "candidate_id_ptr": "*i32",
    "token_ptr": "*i32", "slots_ptr": "*i64", "positions_ptr": "*i64", "table_ptr": "*fp32",
}  # fmt: skip


def case(
    name: str, kernel: Any, num_warps: int, element: str = "fp32", sample: bool = False, **constexprs: Any
) -> Case:
    """Arguments get their types by their names; pointers that are not listed above hold elements."""
    signature = {}
    for argument in kernel.arg_names:
        if argument in constexprs:
            continue
        if argument in _INTEGERS:
            signature[argument] = "i32"
        elif argument == "eps":
            signature[argument] = "fp32"
        else:
            signature[argument] = _DRAW_POINTERS.get(argument, f"*{element}")
    return Case(
        name=name, kernel=kernel, signature=signature, constexprs=constexprs, options={"num_warps": num_warps},
        is_sample=sample,
    )  # fmt: skip


def _row_cases() -> Iterator[Case]:
    for element in _ELEMENTS:
        for block in (128, 4096, 8192):
            rows, is_sample = rows_per_tile(block), element == "bf16" and block == 4096
            yield case(
                f"rms-norm-{element}-{block}", rms_norm_kernel, num_warps_of(rows * block), element,
                sample=is_sample, ROWS=rows, BLOCK=block,
            )  # fmt: skip
            yield case(
                f"add-rms-norm-{element}-{block}", add_rms_norm_kernel, num_warps_of(block), element,
                sample=is_sample, BLOCK=block,
            )  # fmt: skip
        for activation in range(3):
            yield case(
                f"gated-{element}-{activation}", gated_kernel, 4, element,
                sample=element == "bf16" and activation == 0, ACTIVATION=activation, BLOCK=1024,
            )  # fmt: skip


def _write_cases() -> Iterator[Case]:
    for element in _ELEMENTS:
        for head_dim, rotary_dim in ((64, 64), (80, 32), (96, 96), (128, 128), (256, 64), (64, 0)):
            constants = write_constants(8, head_dim, rotary_dim // 2)
            written = case(
                f"write-kv-{element}-d{head_dim}-r{rotary_dim}", write_kv_kernel,
                num_warps_of(constants["HEADS"] * constants["DIM_BLOCK"]), element,
                sample=element == "bf16" and head_dim in (80, 128), **constants, INTERPRET=False,
            )  # fmt: skip
            written = written._replace(options=written.options | {"enable_fp_fusion": False})
            yield written
            pools = dict.fromkeys(("k_pages_ptr", "v_pages_ptr"), "*i8")
            yield written._replace(
                name=written.name.replace(element, f"{element}-i8"), signature=written.signature | pools,
                architectures=ARCHITECTURES if element == "bf16" else written.architectures,
            )  # fmt: skip


def _draw_cases() -> Iterator[Case]:
    for chunks in (2, 64):
        constants = {
            "CHUNK": triton_sampling.CHUNK, "CHUNKS": chunks, "CAPACITY": triton_sampling.CAPACITY,
            "UNIT": float(1 << 44), "BLOCK": triton_sampling.SEARCH_BLOCK,
        }  # fmt: skip
        for kernel in (best_kernel, weigh_kernel, gather_kernel, draw_kernel):
            wanted = {name: value for name, value in constants.items() if name in kernel.arg_names}
            yield case(
                f"draw-{kernel.__name__}-{chunks}", kernel, triton_sampling.NUM_WARPS, sample=chunks > 2, **wanted
            )


CASES = [
    *_attention_cases(),
    *_tuning_cases(),
    *_wide_cases(),
    *(merge_case(dtype, head_dim) for dtype in _ELEMENTS for head_dim in (64, 80, 256)),
    *(_key_position_case(page_size) for page_size in (16, 32, 64)),
    *_row_cases(),
    *_write_cases(),
    *_draw_cases(),
]
