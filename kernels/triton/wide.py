"""Wide tiles as a kernel of its own, for GPUs that bring blocks to shared memory by themselves (TMA, from sm_90 on).

What bounds `attention_kernel` where many rows read the same keys is not products but the L2 cache: a tile of 64 rows
multiplies 64 times per byte that it reads, which at 5.2 TB/s is 330 TFLOP/s of an H100's 800. Here a tile has 128 rows
(`configs.wide_config_of`), whose sums fill the registers of two programs on each multiprocessor, so everything else is
kept out of registers: keys and values come as whole pages through tensor descriptors, a page is a block, and heads are
whole. A run's positions are looked at once: pages that every row sees entirely, nearly all, are not compared again.

Tiles, their work, what is computed and what is left for `merge_kernel` are those of `attention_kernel`, which takes
the narrow tiles of the same step.

Bytes: as there. Flops: 4 * BLOCK_M * head_dim per key.
"""

# Arguments of kernels are tensors, pointers or numbers; Triton has no types for them.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl
from mneme.kernels.triton.attention import (
    _DELTA,
    _FREE,
    _LN_2,
    _LOG2_E,
    _MASK,
    _MASK_NUMBER,
    _NOWHERE,
    _NUM_APART,
    _NUM_PARTS,
    _NUM_TILES,
    _PAGE_ID,
    _POSITION,
    _ROW,
    _RUN,
    _RUN_WORDS,
    _TILE,
    _TILE_WORDS,
    _masked_scores,
    _mended,
    _product,
    _section,
    _tanh,
    rotated_queries,
)

_SCANNED_KEYS = tl.constexpr(2048)  # positions looked at together


@triton.jit
def _pages_by_sight(key_position, begin, end, effective, seen, window, PAGE_SIZE: tl.constexpr,
                    HAS_WINDOW: tl.constexpr):  # fmt: skip
    """[begin, end) cut to the pages that hold a key which some row may see, and of these a range of pages that every
    row sees entirely: between the last key that is too far back for a row and the first that is hidden otherwise."""
    latest, earliest = tl.max(effective, 0), tl.min(tl.where(seen, effective, _FREE), 0)
    end_key = end * PAGE_SIZE
    first, last, clear_begin, clear_end = end_key, begin * PAGE_SIZE - 1, begin * PAGE_SIZE - 1, end_key
    for start in tl.range(begin * PAGE_SIZE, end_key, _SCANNED_KEYS, num_stages=1):
        key = start + tl.arange(0, _SCANNED_KEYS)
        position = tl.load(key_position + key, mask=key < end_key, other=_FREE)
        visible = position <= latest
        if HAS_WINDOW:
            visible = visible & (position > earliest - window)
            is_back = (position <= latest - window) & (key < end_key)
            clear_begin = tl.maximum(clear_begin, tl.max(tl.where(is_back, key, -1), 0))
        first = tl.minimum(first, tl.min(tl.where(visible, key, end_key), 0))
        last = tl.maximum(last, tl.max(tl.where(visible, key, -1), 0))
        clear_end = tl.minimum(clear_end, tl.min(tl.where(position > earliest, key, end_key), 0))
    first, last = first // PAGE_SIZE, last // PAGE_SIZE + 1
    clear_begin = tl.minimum(tl.maximum(first, (clear_begin + PAGE_SIZE) // PAGE_SIZE), last)
    return first, last, clear_begin, tl.maximum(tl.minimum(clear_end // PAGE_SIZE, last), clear_begin)


@triton.jit
def _rows(work, tile, kv_head, GROUPS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Which lanes of a tile are rows, and the query row and head of each [BLOCK_M]."""
    lane = tl.arange(0, BLOCK_M)
    row_seen = lane // GROUPS < tl.load(tile + 1)
    row = tl.load(_section(work, _ROW) + tl.load(tile) + lane // GROUPS, mask=row_seen, other=0)
    return row_seen, row, kv_head * GROUPS + lane % GROUPS


@triton.jit
def _effective(work, tile, run, row_seen, row, GROUPS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Where the rows of a tile stand for the keys of a run [BLOCK_M]."""
    entry = tl.load(run + 2) + tl.load(tile + 2) + tl.arange(0, BLOCK_M) // GROUPS
    delta = tl.load(_section(work, _DELTA) + entry, mask=row_seen, other=0)
    position = tl.load(_section(work, _POSITION) + row, mask=row_seen, other=0)
    return tl.where(row_seen, position - delta, _NOWHERE)


@triton.jit
def _attend_page(
    low, high, keys, values, key_position, page_id, base, page, run, effective, row_words, cap, window,
    top, total, sums,
    PAGE_SIZE: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr,
    PRECISION: tl.constexpr, INTERPRET: tl.constexpr, COMPARED: tl.constexpr, CAREFUL: tl.constexpr,
):  # fmt: skip
    """Go on with the online softmax by the keys of one page; COMPARED where some row may not see one of them."""
    line = (base + tl.load(page_id + page)) * PAGE_SIZE
    scores = tl.zeros([low.shape[0], PAGE_SIZE], tl.float32)
    scores = _product(low, keys.load([line, 0]).T, scores, PRECISION, INTERPRET)
    scores = _product(high, keys.load([line, low.shape[1]]).T, scores, PRECISION, INTERPRET)
    if HAS_CAP:
        scores = cap * _LOG2_E * _tanh(scores)
    if COMPARED:
        seen_from = tl.load(key_position + page * PAGE_SIZE + tl.arange(0, PAGE_SIZE))
        visible = seen_from[None, :] <= effective[:, None]
        if HAS_WINDOW:
            visible = visible & (seen_from[None, :] > effective[:, None] - window)
        scores = tl.where(visible, scores, -float("inf"))
        if tl.load(run + 4) != 0:
            first_key = (page - tl.load(run)) * PAGE_SIZE
            scores = _masked_scores(scores, row_words, first_key, PAGE_SIZE, PAGE_SIZE)
    new_top = tl.maximum(top, tl.max(scores, 1))
    shift = new_top
    if COMPARED:
        shift = tl.where(new_top == -float("inf"), 0.0, new_top)  # -inf - -inf is no number
    weights = tl.exp2(scores - shift[:, None])
    fade = tl.exp2(top - shift)
    total = total * fade + tl.sum(weights, 1)
    sums = sums * fade[:, None]
    v = values.load([line, 0])
    if CAREFUL:
        v, broken = _mended(v)
        is_broken = (broken != 0)[None, :] & (scores != -float("inf"))
        sums += tl.where(tl.max(is_broken.to(tl.int32), 1) != 0, float("nan"), 0.0)[:, None]
    return new_top, total, _product(weights.to(v.dtype), v, sums, PRECISION, INTERPRET)


@triton.jit
def _attend_runs(
    q, keys, values, key_position, rope_table, work, tile, kv_head, num_pages, stride_q,
    q_scale, cap, window, num_rope_positions,
    GROUPS: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, STAGES: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr, PRECISION: tl.constexpr, INTERPRET: tl.constexpr, CAREFUL: tl.constexpr,
):  # fmt: skip
    """Online softmax over a tile's runs: the sum of values [BLOCK_M, HEAD_DIM], the top score (as a power of 2) and the
    sum of weights [BLOCK_M]."""
    half: tl.constexpr = HEAD_DIM // 2
    first_run, end_run, base = tl.load(tile + 3), tl.load(tile + 4), kv_head * num_pages
    page_id = _section(work, _PAGE_ID)
    top = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    for run_number in tl.range(first_run, end_run, num_stages=1):
        run = _section(work, _RUN) + run_number * _RUN_WORDS
        begin = tl.load(run)
        begin, end = tl.where(run_number == first_run, tl.load(tile + 5), begin), tl.load(run + 1)
        end = tl.where(run_number == end_run - 1, tl.minimum(end, tl.load(tile + 6)), end)
        row_seen, row, head = _rows(work, tile, kv_head, GROUPS, BLOCK_M)
        effective = _effective(work, tile, run, row_seen, row, GROUPS, BLOCK_M)
        begin, end, clear_begin, clear_end = _pages_by_sight(
            key_position, begin, end, effective, row_seen, window, PAGE_SIZE, HAS_WINDOW
        )
        if CAREFUL or tl.load(run + 4) != 0:
            clear_end = clear_begin
        low, high = rotated_queries(
            q + row.to(tl.int64) * stride_q + head * HEAD_DIM, rope_table, row_seen, effective, q_scale,
            num_rope_positions, HEAD_DIM, half, half, ROTARY_DIM,
        )  # fmt: skip
        if not CAREFUL:
            for page in tl.range(clear_begin, clear_end, num_stages=STAGES):
                top, total, sums = _attend_page(
                    low, high, keys, values, key_position, page_id, base, page, run, effective, row, cap, window,
                    top, total, sums, PAGE_SIZE, HAS_WINDOW, HAS_CAP, PRECISION, INTERPRET, False, False,
                )  # fmt: skip
        # What is known of the rows is looked up again where it is needed: kept, it would cost the loop above registers.
        row_seen, row, head = _rows(work, tile, kv_head, GROUPS, BLOCK_M)
        effective = _effective(work, tile, run, row_seen, row, GROUPS, BLOCK_M)
        entry = tl.load(run + 2) + tl.load(tile + 2) + tl.arange(0, BLOCK_M) // GROUPS
        mask_number = tl.load(_section(work, _MASK_NUMBER) + entry, mask=row_seen, other=0)
        row_words = _section(work, _MASK) + tl.load(run + 3) + mask_number * tl.load(run + 4)
        num_clear = clear_end - clear_begin
        for page in tl.range(begin, end - num_clear, num_stages=1 if CAREFUL else STAGES + 1):
            page += tl.where(page < clear_begin, 0, num_clear)
            top, total, sums = _attend_page(
                low, high, keys, values, key_position, page_id, base, page, run, effective, row_words, cap,
                window, top, total, sums, PAGE_SIZE, HAS_WINDOW, HAS_CAP, PRECISION, INTERPRET, True,
                CAREFUL,
            )  # fmt: skip
    return sums, top, total


@triton.jit(do_not_specialize=["num_pages", "num_rope_positions", "window"])
def wide_kernel(
    q, k_pages, v_pages, key_position, rope_table, out, lse, partial_out, partial_lse, work,
    num_pages, stride_q, num_rope_positions, window, q_scale, cap,
    NUM_KV_HEADS: tl.constexpr, GROUPS: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, STAGES: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr, PRECISION: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Programs take the tiles that stand apart, each for one KV head; any number of programs will do.

    k_pages, v_pages   descriptors of [NUM_KV_HEADS * num_pages * PAGE_SIZE, HEAD_DIM], in blocks of a page

    The others as in `attention_kernel`.
    """
    first, end = tl.load(work + _NUM_TILES), tl.load(work + _NUM_APART) * NUM_KV_HEADS
    column = tl.arange(0, HEAD_DIM)
    num_q_heads: tl.constexpr = NUM_KV_HEADS * GROUPS
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    for start in tl.range(0, end, num_programs, num_stages=1):
        # Every second time from the other side, so that who had a long tile gets a short one.
        number = start + tl.where(start // num_programs % 2 == 0, program, num_programs - 1 - program)
        if number < end:
            tile = _section(work, _TILE) + (first + number // NUM_KV_HEADS) * _TILE_WORDS
            kv_head = number % NUM_KV_HEADS
            sums, top, total = _attend_runs(
                q, k_pages, v_pages, key_position, rope_table, work, tile, kv_head, num_pages, stride_q,
                q_scale, cap, window, num_rope_positions, GROUPS, HEAD_DIM, ROTARY_DIM, PAGE_SIZE, BLOCK_M, STAGES,
                HAS_WINDOW, HAS_CAP, PRECISION, INTERPRET, False,
            )  # fmt: skip
            if tl.max(tl.max((sums != sums).to(tl.int32), 1), 0) > 0:
                sums, top, total = _attend_runs(
                    q, k_pages, v_pages, key_position, rope_table, work, tile, kv_head, num_pages,
                    stride_q, q_scale, cap, window, num_rope_positions, GROUPS, HEAD_DIM, ROTARY_DIM, PAGE_SIZE,
                    BLOCK_M, STAGES, HAS_WINDOW, HAS_CAP, PRECISION, INTERPRET, True,
                )  # fmt: skip
            row_seen, row, head = _rows(work, tile, kv_head, GROUPS, BLOCK_M)
            divisor = tl.where(total == 0.0, 1.0, total)
            logsum = tl.where(total == 0.0, -float("inf"), (top + tl.log2(divisor)) * _LN_2)
            parts = tl.load(_section(work, _NUM_PARTS) + row, mask=row_seen, other=0)
            is_final, is_partial = row_seen & (parts == 1), row_seen & (parts > 1)
            target = row.to(tl.int64) * num_q_heads + head
            slot = (tl.load(tile + 7) + tl.arange(0, BLOCK_M) // GROUPS).to(tl.int64) * num_q_heads + head
            tl.store(lse + target, logsum, mask=is_final)
            tl.store(partial_lse + slot, logsum, mask=is_partial)
            result = sums / divisor[:, None]
            at = target[:, None] * HEAD_DIM + column[None, :]
            tl.store(out + at, result.to(out.dtype.element_ty), mask=is_final[:, None])
            tl.store(partial_out + slot[:, None] * HEAD_DIM + column[None, :], result, mask=is_partial[:, None])
