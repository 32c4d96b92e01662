"""Merging the partial results of rows that several tiles worked on, for any number of parts (RelayAttention 3.3)."""

# Arguments of kernels are tensors, pointers or numbers; Triton has no types for them.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl
from mneme.kernels.triton import pack as triton_pack

_NUM_MERGED = tl.constexpr(int(triton_pack.Header.num_merged))
_MERGED_ROW = tl.constexpr(int(triton_pack.Header.merged_row))
_PART_BEGIN = tl.constexpr(int(triton_pack.Header.part_begin))
_PART = tl.constexpr(int(triton_pack.Header.part))
_LN_2 = tl.constexpr(0.6931471805599453)
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def merge_kernel(
    out, lse, partial_out, partial_lse, work,
    NUM_Q_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_PARTS: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """Program `i * NUM_Q_HEADS + head` writes the i-th merged row; a row without parts gets 0 and -inf.

    BLOCK_PARTS are loaded together, so that a long context that was cut into many ranges is not merged one load behind
    the other. Shapes as in `attention_kernel`. Bytes: 4 * (head_dim + 1) per part and head read, the row written.
    Flops: about 2 * head_dim per part and head.
    """
    program = tl.program_id(0)
    number, head = program // NUM_Q_HEADS, program % NUM_Q_HEADS
    if number < tl.load(work + _NUM_MERGED):
        row = tl.load(work + tl.load(work + _MERGED_ROW) + number).to(tl.int64)
        bounds = work + tl.load(work + _PART_BEGIN) + number
        parts = work + tl.load(work + _PART)
        end = tl.load(bounds + 1)
        dim = tl.arange(0, BLOCK_DIM)
        top = -float("inf")
        total = 0.0
        sums = tl.zeros([BLOCK_DIM], tl.float32)
        for start in range(tl.load(bounds), end, BLOCK_PARTS):
            part = start + tl.arange(0, BLOCK_PARTS)
            at = tl.load(parts + part, mask=part < end, other=0).to(tl.int64) * NUM_Q_HEADS + head
            inside = (part < end)[:, None] & (dim < HEAD_DIM)[None, :]
            part_lse = tl.load(partial_lse + at, mask=part < end, other=-float("inf")) * _LOG2_E
            part_out = tl.load(partial_out + at[:, None] * HEAD_DIM + dim[None, :], mask=inside, other=0.0)
            new_top = tl.maximum(top, tl.max(part_lse, 0))
            shift = tl.where(new_top == -float("inf"), 0.0, new_top)  # -inf - -inf is no number
            weight = tl.exp2(part_lse - shift)
            fade = tl.exp2(top - shift)
            total = total * fade + tl.sum(weight, 0)
            sums = sums * fade + tl.sum(part_out * weight[:, None], 0)
            top = new_top
        divisor = tl.where(total == 0.0, 1.0, total)
        target = row * NUM_Q_HEADS + head
        tl.store(out + target * HEAD_DIM + dim, (sums / divisor).to(out.dtype.element_ty), mask=dim < HEAD_DIM)
        tl.store(lse + target, tl.where(total == 0.0, -float("inf"), (top + tl.log2(divisor)) * _LN_2))
