"""The decoder's row-wise kernels, the KV write and the draw, for `triton_compile`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mneme.kernels.triton import sampling as triton_sampling
from mneme.kernels.triton.draw import draw_kernel
from mneme.kernels.triton.kv import write_constants, write_kv_kernel
from mneme.kernels.triton.ops import add_rms_norm_kernel, gated_kernel, num_warps_of, rms_norm_kernel, rows_per_tile
from mneme.kernels.triton.weigh import best_kernel, gather_kernel, weigh_kernel
from tests.kernels.triton_compile import Case

_TYPES = ("bf16", "fp16", "fp32")
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
    for element in _TYPES:
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
    for element in _TYPES:
        for head_dim, rotary_dim in ((64, 64), (80, 32), (96, 96), (128, 128), (256, 64), (64, 0)):
            constants = write_constants(8, head_dim, rotary_dim // 2)
            yield case(
                f"write-kv-{element}-d{head_dim}-r{rotary_dim}", write_kv_kernel,
                num_warps_of(constants["HEADS"] * constants["DIM_BLOCK"]), element,
                sample=element == "bf16" and head_dim in (80, 128), **constants,
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


CASES = [*_row_cases(), *_write_cases(), *_draw_cases()]
