"""What a tile's query rows need once per run: their rotation, and which of the run's pages they can see."""

# Arguments of kernels are tensors, pointers or numbers; Triton has no types for them.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl
from mneme.kernels.triton import pack as triton_pack

_PAGE_ID = tl.constexpr(int(triton_pack.Header.page_id))
_PAGE_MASK = tl.constexpr(int(triton_pack.Header.page_mask))
_TRIM_KEYS = tl.constexpr(1024)  # looked at together


@triton.jit
def _turned_part(q_row, table, seen, FIRST: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr,
                 ROTARY_DIM: tl.constexpr):  # fmt: skip
    """Columns [FIRST, FIRST + COUNT) of rotated queries, float32 [BLOCK_M, BLOCK], where not all columns rotate."""
    column = FIRST + tl.arange(0, BLOCK)
    present = seen[:, None] & (column < FIRST + COUNT)[None, :]
    own = tl.load(q_row[:, None] + column[None, :], mask=present, other=0.0).to(tl.float32)
    half: tl.constexpr = ROTARY_DIM // 2
    is_low = column < half
    turns = present & (column < ROTARY_DIM)[None, :]
    partner = tl.where(is_low, column + half, column - half)
    other = tl.load(q_row[:, None] + partner[None, :], mask=turns, other=0.0).to(tl.float32)
    frequency = tl.where(is_low, column, column - half)
    cos = tl.load(table[:, None] + frequency[None, :], mask=turns, other=1.0)
    sin = tl.load(table[:, None] + 2 * half + frequency[None, :], mask=turns, other=0.0)
    return own * cos + tl.where(is_low, -1.0, 1.0)[None, :] * other * sin


@triton.jit
def rotated_queries(
    q_row, rope_table, seen, effective, q_scale, num_rope_positions,
    HEAD_DIM: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, ROTARY_DIM: tl.constexpr,
):  # fmt: skip
    """Both halves of the queries [BLOCK_M, BLOCK_HALF], rotated to `effective`, times `q_scale`, rounded once.

    q_row  pointers [BLOCK_M]. Effective positions outside the table belong to rows that see nothing; they are clamped.
    """
    column = tl.arange(0, BLOCK_HALF)
    turn = tl.minimum(tl.maximum(effective, 0), num_rope_positions - 1).to(tl.int64)
    table = rope_table + turn * (3 * (ROTARY_DIM // 2))  # rows of cos, -sin, sin
    if ROTARY_DIM == 0 or ROTARY_DIM == HEAD_DIM:
        in_low = seen[:, None] & (column < HALF)[None, :]
        in_high = seen[:, None] & (column < HEAD_DIM - HALF)[None, :]
        low = tl.load(q_row[:, None] + column[None, :], mask=in_low, other=0.0).to(tl.float32)
        high = tl.load(q_row[:, None] + HALF + column[None, :], mask=in_high, other=0.0).to(tl.float32)
        if ROTARY_DIM > 0:
            cos = tl.load(table[:, None] + column[None, :], mask=in_low, other=0.0)
            sin = tl.load(table[:, None] + 2 * HALF + column[None, :], mask=in_low, other=0.0)
            unturned = low
            low = low * cos - high * sin
            high = high * cos + unturned * sin
    else:
        low = _turned_part(q_row, table, seen, 0, HALF, BLOCK_HALF, ROTARY_DIM)
        high = _turned_part(q_row, table, seen, HALF, HEAD_DIM - HALF, BLOCK_HALF, ROTARY_DIM)
    kind = q_row.dtype.element_ty
    return (low * q_scale).to(kind), (high * q_scale).to(kind)


@triton.jit
def visible_pages(key_position, begin, end, effective, seen, window, PAGE_SIZE: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """[begin, end) cut to the first and the last page that hold a key which some row may see."""
    latest = tl.max(effective, 0)
    earliest = tl.min(tl.where(seen, effective, 2**30), 0)
    end_key = end * PAGE_SIZE
    first, last = end_key, begin * PAGE_SIZE - 1
    for start in tl.range(begin * PAGE_SIZE, end_key, _TRIM_KEYS, num_stages=1):
        key = start + tl.arange(0, _TRIM_KEYS)
        position = tl.load(key_position + key, mask=key < end_key, other=2**30)
        visible = position <= latest
        if HAS_WINDOW:
            visible = visible & (position > earliest - window)
        first = tl.minimum(first, tl.min(tl.where(visible, key, end_key), 0))
        last = tl.maximum(last, tl.max(tl.where(visible, key, -1), 0))
    return first // PAGE_SIZE, last // PAGE_SIZE + 1


@triton.jit(do_not_specialize=["num_listed"])
def key_position_kernel(key_position, slot_position, work, num_listed, PAGE_SIZE: tl.constexpr, PAGES: tl.constexpr):
    """Where each key of each listed page was rotated, in the order of the list; FREE where no row may see it.

    Once per step, for all layers: a layer then reads positions as it reads anything contiguous, without page ids and
    masks. Bytes: 8 per key and 12 per page.
    """
    page = tl.program_id(0) * PAGES + tl.arange(0, PAGES)
    listed = page < num_listed
    page_id = tl.load(work + tl.load(work + _PAGE_ID) + page, mask=listed, other=0)
    offset = tl.arange(0, PAGE_SIZE)
    slot = page_id.to(tl.int64)[:, None] * PAGE_SIZE + offset[None, :]
    word = tl.load(work + _PAGE_MASK) + 2 * page[:, None] + (offset // 32)[None, :]
    bits = tl.load(work + word, mask=listed[:, None], other=0)
    shown = ((bits >> (offset % 32)[None, :]) & 1) != 0
    position = tl.load(slot_position + slot, mask=shown, other=0)
    at = page[:, None] * PAGE_SIZE + offset[None, :]
    tl.store(key_position + at, tl.where(shown, position, 2**30), mask=listed[:, None])
