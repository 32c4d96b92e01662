"""Merging the partial results of rows that several tiles worked on, for any number of parts (RelayAttention 3.3)."""

# Arguments of kernels are tensors, pointers or numbers; Triton has no types for them.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from mneme.kernels import triton_pack

_NUM_MERGED = tl.constexpr(int(triton_pack.Header.num_merged))
_MERGED_ROW = tl.constexpr(int(triton_pack.Header.merged_row))
_PART_BEGIN = tl.constexpr(int(triton_pack.Header.part_begin))
_PART = tl.constexpr(int(triton_pack.Header.part))
_LN_2 = tl.constexpr(0.6931471805599453)
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def merge_kernel(
    out, lse, partial_out, partial_lse, work,
    NUM_KV_HEADS: tl.constexpr, GROUPS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """Program `i * NUM_KV_HEADS + kv_head` writes the i-th merged row; a row without parts gets 0 and -inf.

    Shapes as in `attention_kernel`. Bytes: 4 * (head_dim + 1) per part and head read, the row written. Flops: about
    2 * head_dim per part and head.
    """
    program = tl.program_id(0)
    number, kv_head = program // NUM_KV_HEADS, program % NUM_KV_HEADS
    if number < tl.load(work + _NUM_MERGED):
        row = tl.load(work + tl.load(work + _MERGED_ROW) + number).to(tl.int64)
        bounds = work + tl.load(work + _PART_BEGIN) + number
        parts = work + tl.load(work + _PART)
        group = tl.arange(0, BLOCK_GROUPS)
        dim = tl.arange(0, BLOCK_DIM)
        present = group < GROUPS
        inside = present[:, None] & (dim < HEAD_DIM)[None, :]
        head = kv_head * GROUPS + group
        top = tl.full([BLOCK_GROUPS], -float("inf"), tl.float32)
        total = tl.zeros([BLOCK_GROUPS], tl.float32)
        sums = tl.zeros([BLOCK_GROUPS, BLOCK_DIM], tl.float32)
        for part in range(tl.load(bounds), tl.load(bounds + 1)):
            at = tl.load(parts + part).to(tl.int64) * (NUM_KV_HEADS * GROUPS) + head
            part_lse = tl.load(partial_lse + at, mask=present, other=-float("inf")) * _LOG2_E
            part_out = tl.load(partial_out + at[:, None] * HEAD_DIM + dim[None, :], mask=inside, other=0.0)
            new_top = tl.maximum(top, part_lse, propagate_nan=tl.PropagateNan.ALL)
            shift = tl.where(new_top == -float("inf"), 0.0, new_top)  # -inf - -inf is no number
            weight = tl.exp2(part_lse - shift)
            fade = tl.exp2(top - shift)
            total = total * fade + weight
            sums = sums * fade[:, None] + part_out * weight[:, None]
            top = new_top
        divisor = tl.where(total == 0.0, 1.0, total)
        logsum = tl.where(total == 0.0, -float("inf"), (top + tl.log2(divisor)) * _LN_2)
        target = row * (NUM_KV_HEADS * GROUPS) + head
        merged = (sums / divisor[:, None]).to(out.dtype.element_ty)
        tl.store(out + target[:, None] * HEAD_DIM + dim[None, :], merged, mask=inside)
        tl.store(lse + target, logsum, mask=present)
