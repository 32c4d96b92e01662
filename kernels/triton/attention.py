"""The segment primitive as one Triton kernel: every piece of a step's work, shared or private, in one launch.

A program takes one tile (`mneme.kernels.triton.tiles`) for one KV head: up to BLOCK_M query rows, counted as entries
of a piece times query heads per KV head, over a range of the piece's pages. It goes through the piece's runs with one
online softmax, so a row leaves one partial result per tile and not one per segment. Entering a run it rotates the
*original* queries to `position - delta`, in float32, and rounds once; keys are read as they lie, as two halves of the
head, because the halves are what rotation pairs: two products of half the depth need no swapped copy of anything.

Tiles come in two heights, chosen by how many rows the tile has: NARROW_M for private decodes, which are bound by
memory and leave most of a product empty, and WIDE_M for shared segments and prefills.

Bytes: K and V of each tile's visible pages once (2 * head_dim elements per key and KV head), 5 per key for positions
and ids, the queries once per run, the results once. Flops: 4 * BLOCK_M * head_dim per key.

Numbers that are not finite in keys or values that a row does not see never reach it. The fast pass reads V as it lies;
only when a result has a NaN does a second, careful pass take over, which reads broken values as 0 and gives NaN to the
rows that see one.
"""

# Arguments of kernels are tensors, pointers or numbers; Triton has no types for them.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl
from mneme.kernels.triton import pack as triton_pack
from mneme.kernels.triton import tiles as triton_tiles
from mneme.kernels.triton.queries import rotated_queries, visible_pages

# Positions of a step's sections in the header of its packed work, and the sizes of records.
_NUM_TILES = tl.constexpr(int(triton_pack.Header.num_tiles))
_POSITION = tl.constexpr(int(triton_pack.Header.position))
_NUM_PARTS = tl.constexpr(int(triton_pack.Header.num_parts))
_TILE = tl.constexpr(int(triton_pack.Header.tile))
_RUN = tl.constexpr(int(triton_pack.Header.run))
_ROW = tl.constexpr(int(triton_pack.Header.row))
_DELTA = tl.constexpr(int(triton_pack.Header.delta))
_MASK_NUMBER = tl.constexpr(int(triton_pack.Header.mask_number))
_PAGE_ID = tl.constexpr(int(triton_pack.Header.page_id))
_MASK = tl.constexpr(int(triton_pack.Header.mask))
_TILE_WORDS = tl.constexpr(triton_tiles.TILE_WORDS)
_RUN_WORDS = tl.constexpr(triton_pack.RUN_WORDS)
_FREE = tl.constexpr(2**30)
_CAREFUL_N = tl.constexpr(16)  # keys of a block in the second pass, which is rare and must not cost registers
_NOWHERE = tl.constexpr(-(2**31) + 1)  # effective position of rows that do not exist: before every key
_LN_2 = tl.constexpr(0.6931471805599453)
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _section(work, number: tl.constexpr):
    """Where a section of the packed work begins."""
    return work + tl.load(work + number)


@triton.jit
def _product(a, b, total, PRECISION: tl.constexpr, INTERPRET: tl.constexpr):
    """total + a @ b in float32. The interpreter multiplies the bits of bfloat16 numbers, so it gets float32."""
    if INTERPRET:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc=total, input_precision=PRECISION)


@triton.jit
def _mended(v):
    """Values with 0 for what is not finite, and which keys have any such [BLOCK_N]."""
    wide = v.to(tl.float32)  # the interpreter compares the bits of bfloat16 numbers
    is_broken = (wide != wide) | (tl.abs(wide) == float("inf"))
    return tl.where(is_broken, 0.0, wide).to(v.dtype), tl.max(is_broken.to(tl.int32), 1)


@triton.jit
def _tanh(x):
    """Within 1e-7, without a power that overflows."""
    return 1.0 - 2.0 / (1.0 + tl.exp2(tl.minimum(tl.maximum(x, -12.0), 12.0) * (2.0 * _LOG2_E)))


@triton.jit
def _masked_scores(scores, row_words, first_key, BLOCK_N: tl.constexpr, PAGE_SIZE: tl.constexpr):
    """Scores of keys that a row's own mask hides become -inf; rows have bits in order of the run's keys."""
    column = tl.arange(0, BLOCK_N)
    for number in tl.static_range((BLOCK_N + 31) // 32):
        at = row_words + first_key // 32 + number
        bits = tl.load(at).to(tl.uint32, bitcast=True)
        if PAGE_SIZE % 32 != 0 or BLOCK_N % 32 != 0:  # blocks begin between words
            shift = (first_key % 32).to(tl.uint32)
            rest = tl.load(at + 1).to(tl.uint32, bitcast=True)
            bits = tl.where(shift == 0, bits, (bits >> shift) | (rest << ((32 - shift) % 32)))
        is_shown = ((bits[:, None] >> (column % 32).to(tl.uint32)[None, :]) & 1) != 0
        scores = tl.where(is_shown | (column // 32 != number)[None, :], scores, -float("inf"))
    return scores


@triton.jit
def _attend_runs(
    q_row, row_seen, position, entry, slope, keys, values, key_position, rope_table, work, tile,
    q_scale, cap, window, num_rope_positions,
    HEAD_DIM: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, ROTARY_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_SLOPES: tl.constexpr, HAS_CAP: tl.constexpr, TRIM: tl.constexpr, PRECISION: tl.constexpr,
    INTERPRET: tl.constexpr, STAGES: tl.constexpr, CAREFUL: tl.constexpr,
):  # fmt: skip
    """Online softmax over a tile's runs: both halves of the sum of values [BLOCK_M, BLOCK_HALF], the top score (as a
    power of 2) and the sum of weights [BLOCK_M]."""
    runs, page_id, mask = _section(work, _RUN), _section(work, _PAGE_ID), _section(work, _MASK)
    deltas, mask_numbers = _section(work, _DELTA), _section(work, _MASK_NUMBER)
    first_run, end_run = tl.load(tile + 3), tl.load(tile + 4)
    column = tl.arange(0, BLOCK_HALF)
    in_low, in_high = (column < HALF)[None, :], (column < HEAD_DIM - HALF)[None, :]
    kind = keys.dtype.element_ty
    low, high = tl.zeros([BLOCK_M, BLOCK_HALF], kind), tl.zeros([BLOCK_M, BLOCK_HALF], kind)
    last_delta = tl.full([BLOCK_M], _FREE, tl.int32)  # no delta is that large
    top = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    sum_low = tl.zeros([BLOCK_M, BLOCK_HALF], tl.float32)
    sum_high = tl.zeros([BLOCK_M, BLOCK_HALF], tl.float32)
    for run_number in tl.range(first_run, end_run, num_stages=1):
        run = runs + run_number * _RUN_WORDS
        run_begin, end, entries, mask_stride = tl.load(run), tl.load(run + 1), tl.load(run + 2), tl.load(run + 4)
        begin = tl.where(run_number == first_run, tl.load(tile + 5), run_begin)
        end = tl.where(run_number == end_run - 1, tl.minimum(end, tl.load(tile + 6)), end)
        delta = tl.load(deltas + entries + entry, mask=row_seen, other=0)
        effective = tl.where(row_seen, position - delta, _NOWHERE)
        mask_number = tl.load(mask_numbers + entries + entry, mask=row_seen, other=0)
        row_words = mask + tl.load(run + 3) + mask_number * mask_stride
        if tl.max((delta != last_delta).to(tl.int32), 0) > 0:
            low, high = rotated_queries(q_row, rope_table, row_seen, effective, q_scale, num_rope_positions,
                                        HEAD_DIM, HALF, BLOCK_HALF, ROTARY_DIM)  # fmt: skip
        last_delta = delta
        if TRIM:
            begin, end = visible_pages(key_position, begin, end, effective, row_seen, window, PAGE_SIZE, HAS_WINDOW)
        # A block's page ids are loaded one block ahead, so that its keys and values are not a load behind a load.
        end_key = end * PAGE_SIZE
        key = begin * PAGE_SIZE + tl.arange(0, BLOCK_N)
        page = tl.load(page_id + key // PAGE_SIZE, mask=key < end_key, other=0)
        for start in tl.range(begin * PAGE_SIZE, end_key, BLOCK_N, num_stages=STAGES):
            key = start + tl.arange(0, BLOCK_N)
            inside = key < end_key
            at = (page.to(tl.int64) * PAGE_SIZE + key % PAGE_SIZE)[:, None] * HEAD_DIM + column[None, :]
            k_low = tl.load(keys + at, mask=inside[:, None] & in_low, other=0.0)
            k_high = tl.load(keys + HALF + at, mask=inside[:, None] & in_high, other=0.0)
            v_low = tl.load(values + at, mask=inside[:, None] & in_low, other=0.0)
            v_high = tl.load(values + HALF + at, mask=inside[:, None] & in_high, other=0.0)
            seen_from = tl.load(key_position + key, mask=inside, other=_FREE)
            page = tl.load(page_id + (key + BLOCK_N) // PAGE_SIZE, mask=key + BLOCK_N < end_key, other=0)
            scores = _product(low, tl.trans(k_low), tl.zeros([BLOCK_M, BLOCK_N], tl.float32), PRECISION, INTERPRET)
            scores = _product(high, tl.trans(k_high), scores, PRECISION, INTERPRET)
            if HAS_CAP:
                scores = cap * _LOG2_E * _tanh(scores)
            if HAS_SLOPES:
                scores += slope[:, None] * (seen_from[None, :] - effective[:, None]).to(tl.float32)
            visible = seen_from[None, :] <= effective[:, None]
            if HAS_WINDOW:
                visible = visible & (seen_from[None, :] > effective[:, None] - window)
            scores = tl.where(visible, scores, -float("inf"))
            if mask_stride != 0:
                scores = _masked_scores(scores, row_words, start - run_begin * PAGE_SIZE, BLOCK_N, PAGE_SIZE)
            new_top = tl.maximum(top, tl.max(scores, 1))
            shift = tl.where(new_top == -float("inf"), 0.0, new_top)  # -inf - -inf is no number
            weights = tl.exp2(scores - shift[:, None])
            fade = tl.exp2(top - shift)
            total = total * fade + tl.sum(weights, 1)
            top = new_top
            sum_low, sum_high = sum_low * fade[:, None], sum_high * fade[:, None]
            if CAREFUL:
                v_low, broken_low = _mended(v_low)
                v_high, broken_high = _mended(v_high)
                is_broken = (tl.maximum(broken_low, broken_high) != 0)[None, :] & (scores != -float("inf"))
                poison = tl.where(tl.max(is_broken.to(tl.int32), 1) != 0, float("nan"), 0.0)
                sum_low, sum_high = sum_low + poison[:, None], sum_high + poison[:, None]
            weights = weights.to(kind)
            sum_low = _product(weights, v_low, sum_low, PRECISION, INTERPRET)
            sum_high = _product(weights, v_high, sum_high, PRECISION, INTERPRET)
    return sum_low, sum_high, top, total


@triton.jit
def _attend_tile(
    q, keys, values, key_position, rope_table, alibi_slopes, out, lse, partial_out, partial_lse, work, tile, kv_head,
    q_scale, cap, window, num_rope_positions,
    NUM_KV_HEADS: tl.constexpr, GROUPS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr, ROTARY_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SLOPES: tl.constexpr, HAS_CAP: tl.constexpr,
    TRIM: tl.constexpr, PRECISION: tl.constexpr, INTERPRET: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One tile for one KV head: rows that have no other part are final, the others leave a partial result."""
    lane = tl.arange(0, BLOCK_M)
    index = lane // GROUPS
    row_seen = index < tl.load(tile + 1)
    row = tl.load(_section(work, _ROW) + tl.load(tile) + index, mask=row_seen, other=0)
    position = tl.load(_section(work, _POSITION) + row, mask=row_seen, other=0)
    entry = tl.load(tile + 2) + index
    head = kv_head * GROUPS + lane % GROUPS
    slope = tl.zeros([BLOCK_M], tl.float32)
    if HAS_SLOPES:
        slope = tl.load(alibi_slopes + head, mask=row_seen, other=0.0) * _LOG2_E
    num_q_heads: tl.constexpr = NUM_KV_HEADS * GROUPS
    target = row.to(tl.int64) * num_q_heads + head
    sum_low, sum_high, top, total = _attend_runs(
        q + target * HEAD_DIM, row_seen, position, entry, slope, keys, values, key_position, rope_table, work, tile,
        q_scale, cap, window, num_rope_positions, HEAD_DIM, HALF, BLOCK_HALF, ROTARY_DIM, PAGE_SIZE, BLOCK_M, BLOCK_N,
        HAS_WINDOW, HAS_SLOPES, HAS_CAP, TRIM, PRECISION, INTERPRET, STAGES, False,
    )  # fmt: skip
    is_broken = (sum_low != sum_low) | (sum_high != sum_high)
    if tl.max(tl.max(is_broken.to(tl.int32), 1), 0) > 0:
        sum_low, sum_high, top, total = _attend_runs(
            q + target * HEAD_DIM, row_seen, position, entry, slope, keys, values, key_position, rope_table, work, tile,
            q_scale, cap, window, num_rope_positions, HEAD_DIM, HALF, BLOCK_HALF, ROTARY_DIM, PAGE_SIZE, BLOCK_M,
            _CAREFUL_N, HAS_WINDOW, HAS_SLOPES, HAS_CAP, TRIM, PRECISION, INTERPRET, 1, True,
        )  # fmt: skip
    divisor = tl.where(total == 0.0, 1.0, total)
    logsum = tl.where(total == 0.0, -float("inf"), (top + tl.log2(divisor)) * _LN_2)
    parts = tl.load(_section(work, _NUM_PARTS) + row, mask=row_seen, other=0)
    is_final, is_partial = row_seen & (parts == 1), row_seen & (parts > 1)
    slot = (tl.load(tile + 7) + index).to(tl.int64) * num_q_heads + head
    tl.store(lse + target, logsum, mask=is_final)
    tl.store(partial_lse + slot, logsum, mask=is_partial)
    column = tl.arange(0, BLOCK_HALF)
    for half in tl.static_range(2):
        result = (sum_high if half else sum_low) / divisor[:, None]
        present = (column < HEAD_DIM - HALF if half else column < HALF)[None, :]
        first = half * HALF + column[None, :]
        tl.store(out + target[:, None] * HEAD_DIM + first, result.to(out.dtype.element_ty),
                 mask=is_final[:, None] & present)  # fmt: skip
        tl.store(partial_out + slot[:, None] * HEAD_DIM + first, result, mask=is_partial[:, None] & present)


@triton.jit(do_not_specialize=["num_pages", "num_rope_positions", "window"])
def attention_kernel(
    q, k_pages, v_pages, key_position, rope_table, alibi_slopes, out, lse, partial_out, partial_lse, work,
    num_pages, num_rope_positions, window, q_scale, cap,
    NUM_KV_HEADS: tl.constexpr, GROUPS: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr, BLOCK_HALF: tl.constexpr, NARROW_M: tl.constexpr, WIDE_M: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SLOPES: tl.constexpr,
    HAS_CAP: tl.constexpr, TRIM: tl.constexpr, PRECISION: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Program `tile * NUM_KV_HEADS + kv_head`; those behind the work's last tile end at once.

    q                       [T, num_q_heads, HEAD_DIM]
    k_pages, v_pages        [NUM_KV_HEADS, num_pages, PAGE_SIZE, HEAD_DIM]
    key_position            int32, of every key of every listed page; see `key_position_kernel`
    rope_table              float32 [num_rope_positions, 3, ROTARY_DIM / 2]; not read where ROTARY_DIM is 0
    alibi_slopes            float32 [num_q_heads]; not read without HAS_SLOPES
    out, lse                like q, and float32 [T, num_q_heads]: rows with one part
    partial_out, _lse       float32 [num_slots, num_q_heads, HEAD_DIM], [num_slots, num_q_heads]: rows with more
    work                    int32, see `mneme.kernels.triton.pack`
    q_scale                 makes scores powers of 2; with a cap, makes them multiples of it
    """
    program = tl.program_id(0)
    tile_number, kv_head = program // NUM_KV_HEADS, program % NUM_KV_HEADS
    half: tl.constexpr = (HEAD_DIM + 1) // 2
    if tile_number < tl.load(work + _NUM_TILES):
        tile = _section(work, _TILE) + tile_number * _TILE_WORDS
        pool = kv_head.to(tl.int64) * num_pages * (PAGE_SIZE * HEAD_DIM)
        keys, values = k_pages + pool, v_pages + pool
        if tl.load(tile + 1) * GROUPS <= NARROW_M:
            _attend_tile(
                q, keys, values, key_position, rope_table, alibi_slopes, out, lse, partial_out, partial_lse, work,
                tile, kv_head, q_scale, cap, window, num_rope_positions, NUM_KV_HEADS, GROUPS, HEAD_DIM, half,
                BLOCK_HALF, ROTARY_DIM, PAGE_SIZE, NARROW_M, BLOCK_N, HAS_WINDOW, HAS_SLOPES, HAS_CAP, TRIM,
                PRECISION, INTERPRET, STAGES,
            )  # fmt: skip
        else:
            _attend_tile(
                q, keys, values, key_position, rope_table, alibi_slopes, out, lse, partial_out, partial_lse, work,
                tile, kv_head, q_scale, cap, window, num_rope_positions, NUM_KV_HEADS, GROUPS, HEAD_DIM, half,
                BLOCK_HALF, ROTARY_DIM, PAGE_SIZE, WIDE_M, BLOCK_N, HAS_WINDOW, HAS_SLOPES, HAS_CAP, TRIM,
                PRECISION, INTERPRET, STAGES,
            )  # fmt: skip
