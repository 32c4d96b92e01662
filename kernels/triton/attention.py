"""The segment primitive as one Triton kernel: every piece of a step's work, shared or private, in one launch.

Before it, once per step, `key_position_kernel` writes where keys were rotated; behind it `merge_kernel` merges the
partial results of rows that several tiles worked on, for any number of parts (RelayAttention 3.3).

A program takes tiles (`mneme.kernels.triton.tiles`), each for one KV head: up to BLOCK_M query rows, counted as entries
of a piece times query heads per KV head, over a range of the piece's pages. It goes through the piece's runs with one
online softmax, so a row leaves one partial result per tile and not one per segment. Entering a run it rotates the
*original* queries to `position - delta`, in float32, and rounds once; keys are read as they lie, as two halves of the
head, because the halves are what rotation pairs: two products of half the depth need no swapped copy of anything.

Tiles come in two heights, chosen by how many rows the tile has: NARROW_M for private decodes, which are bound by
memory and leave most of a product empty, and WIDE_M for shared segments and prefills. Steps that have none of these
launch a kernel without the wide half, of which a multiprocessor may hold more programs. Where `wide_kernel` takes
the wide tiles the two launches run beside each other: most of a short step's time is what programs begin with.

Rows of int8 end with the float32 that they are multiplied with (`mneme.kernels.arguments.quantized`). Scores are
multiplied with keys' scales and weights with values', one number for a key; tiles are widened, which is exact, and
never multiplied out. A row is no multiple of 16 bytes, so it is read in pieces of 4 bytes, each with its own address.

Bytes: K and V of each tile's visible pages once (2 * head_dim elements per key and KV head; of int8 2 * (head_dim + 4)
bytes), 5 per key for positions and ids, the queries once per run, the results once. Flops: 4 * BLOCK_M * head_dim per
key; of int8 another 2 * BLOCK_M, and 2 * head_dim conversions.

Numbers that are not finite in keys or values that a row does not see never reach it. The fast pass reads V as it lies;
only when a result has a NaN does a second, careful pass take over, which reads broken values as 0 and gives NaN to the
rows that see one.
"""

# Arguments of kernels are tensors, pointers or numbers; Triton has no types for them.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl
from mneme.kernels.page_table import KV_SCALE_BYTES
from mneme.kernels.triton import pack as triton_pack
from mneme.kernels.triton import tiles as triton_tiles

# Positions of a step's sections in the header of its packed work, and the sizes of records.
_NUM_TILES = tl.constexpr(int(triton_pack.Header.num_tiles))
_NUM_APART = tl.constexpr(int(triton_pack.Header.num_apart))
_NUM_TAKEN = tl.constexpr(int(triton_pack.Header.num_taken))
_IS_PREFILL = tl.constexpr(int(triton_pack.Header.is_prefill))
_POSITION = tl.constexpr(int(triton_pack.Header.position))
_NUM_PARTS = tl.constexpr(int(triton_pack.Header.num_parts))
_TILE = tl.constexpr(int(triton_pack.Header.tile))
_RUN = tl.constexpr(int(triton_pack.Header.run))
_ROW = tl.constexpr(int(triton_pack.Header.row))
_DELTA = tl.constexpr(int(triton_pack.Header.delta))
_MASK_NUMBER = tl.constexpr(int(triton_pack.Header.mask_number))
_PAGE_ID = tl.constexpr(int(triton_pack.Header.page_id))
_PAGE_MASK = tl.constexpr(int(triton_pack.Header.page_mask))
_MASK = tl.constexpr(int(triton_pack.Header.mask))
_ONE = tl.constexpr(int(triton_pack.Header.one))
_NUM_MERGED = tl.constexpr(int(triton_pack.Header.num_merged))
_MERGED_ROW = tl.constexpr(int(triton_pack.Header.merged_row))
_PART_BEGIN = tl.constexpr(int(triton_pack.Header.part_begin))
_PART = tl.constexpr(int(triton_pack.Header.part))
_TILE_WORDS = tl.constexpr(triton_tiles.TILE_WORDS)
_RUN_WORDS = tl.constexpr(triton_pack.RUN_WORDS)
_FREE = tl.constexpr(2**30)
_TRIM_KEYS = tl.constexpr(1024)  # positions looked at together, for which pages a tile can see
_CAREFUL_N = tl.constexpr(16)  # keys of a block in the second pass, which is rare and must not cost registers
_NOWHERE = tl.constexpr(-(2**31) + 1)  # effective position of rows that do not exist: before every key
_SCALE_BYTES = tl.constexpr(KV_SCALE_BYTES)
# Four int8 as bfloat16. A number's lower 7 bits are made the mantissa of 128; then 128 is subtracted, or 256 of those
# whose highest bit is set. All of that is exact.
_FOUR_AS_BFLOAT16 = tl.constexpr("""{
.reg .b32 one, pair, low, high;
mov.b32 one, 0x3f803f80;
prmt.b32 pair, $2, 0, 0x4140;
lop3.b32 low, pair, 0x007f007f, 0x43004300, 0xea;
lop3.b32 high, pair, 0x00800080, 0xc300c300, 0xea;
fma.rn.bf16x2 $0, low, one, high;
prmt.b32 pair, $2, 0, 0x4342;
lop3.b32 low, pair, 0x007f007f, 0x43004300, 0xea;
lop3.b32 high, pair, 0x00800080, 0xc300c300, 0xea;
fma.rn.bf16x2 $1, low, one, high;
}""")
_LN_2 = tl.constexpr(0.6931471805599453)
_LOG2_E = tl.constexpr(1.4426950408889634)


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
    sin = tl.load(table[:, None] + half + frequency[None, :], mask=turns, other=0.0)
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
    table = rope_table + turn * ROTARY_DIM  # rows of cos, sin
    if ROTARY_DIM == 0 or ROTARY_DIM == HEAD_DIM:
        in_low = seen[:, None] & (column < HALF)[None, :]
        in_high = seen[:, None] & (column < HEAD_DIM - HALF)[None, :]
        low = tl.load(q_row[:, None] + column[None, :], mask=in_low, other=0.0).to(tl.float32)
        high = tl.load(q_row[:, None] + HALF + column[None, :], mask=in_high, other=0.0).to(tl.float32)
        if ROTARY_DIM > 0:
            cos = tl.load(table[:, None] + column[None, :], mask=in_low, other=0.0)
            sin = tl.load(table[:, None] + HALF + column[None, :], mask=in_low, other=0.0)
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


@triton.jit
def _section(work, number: tl.constexpr):
    """Return where a section of the packed work begins."""
    return work + tl.load(work + number)


@triton.jit
def _product(a, b, total, PRECISION: tl.constexpr, INTERPRET: tl.constexpr):
    """total + a @ b in float32. The interpreter multiplies the bits of bfloat16 numbers, so it gets float32."""
    if INTERPRET:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc=total, input_precision=PRECISION)


@triton.jit
def _widened(numbers, kind: tl.constexpr, IS_PURE: tl.constexpr, INTERPRET: tl.constexpr):
    """int8 as numbers of a type that products take; the interpreter's take any.

    bfloat16 is made in the registers into which numbers were loaded, as assembly that is not "pure" is not moved. Else
    bytes come into the product's layout first, one by one: 1,058 instructions for 32 keys of 128 dimensions on sm_90,
    where this takes 907, and of bfloat16 371 do. Only where products are tcgen05's nothing in their loop may be impure.
    """
    if not INTERPRET:
        if kind == tl.bfloat16:
            numbers = tl.inline_asm_elementwise(
                _FOUR_AS_BFLOAT16, "=r,=r,r", [numbers], dtype=tl.bfloat16, is_pure=IS_PURE, pack=4
            )
        else:
            numbers = numbers.to(kind)
    return numbers


@triton.jit
def _mended(v):
    """Values with 0 for what is not finite, and which keys have any such [BLOCK_N]; or scales of keys [BLOCK_N]."""
    wide = v.to(tl.float32)  # the interpreter compares the bits of bfloat16 numbers
    is_broken = (wide != wide) | (tl.abs(wide) == float("inf"))
    mended, broken = tl.where(is_broken, 0.0, wide).to(v.dtype), is_broken.to(tl.int32)
    if len(v.shape) > 1:
        broken = tl.max(broken, 1)
    return mended, broken


@triton.jit
def _scales(rows, slot, inside, HEAD_DIM: tl.constexpr):
    """What the int8 rows of some slots are multiplied with, float32 [BLOCK_N]."""
    behind = rows + slot * (HEAD_DIM + _SCALE_BYTES) + HEAD_DIM
    return tl.load(behind.to(tl.pointer_type(tl.float32)), mask=inside, other=0.0)


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
    q_row, row_seen, position, entry, keys, values, key_position, rope_table, work, tile,
    q_scale, cap, window, num_rope_positions,
    HEAD_DIM: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, ROTARY_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr, IS_WIDE: tl.constexpr, PRECISION: tl.constexpr,
    INTERPRET: tl.constexpr, STAGES: tl.constexpr, IS_PURE: tl.constexpr, CAREFUL: tl.constexpr,
):  # fmt: skip
    """Online softmax over a tile's runs: both halves of the sum of values [BLOCK_M, BLOCK_HALF], the top score (as a
    power of 2) and the sum of weights [BLOCK_M]."""
    runs, page_id, mask = _section(work, _RUN), _section(work, _PAGE_ID), _section(work, _MASK)
    deltas, mask_numbers = _section(work, _DELTA), _section(work, _MASK_NUMBER)
    first_run, end_run = tl.load(tile + 3), tl.load(tile + 4)
    column = tl.arange(0, BLOCK_HALF)
    in_low, in_high = (column < HALF)[None, :], (column < HEAD_DIM - HALF)[None, :]
    kind = q_row.dtype.element_ty
    is_scaled: tl.constexpr = keys.dtype.element_ty == tl.int8
    row_size: tl.constexpr = HEAD_DIM + _SCALE_BYTES if is_scaled else HEAD_DIM
    # float16 has no room for a weight times a small scale.
    weight_kind = tl.bfloat16 if is_scaled and kind == tl.float16 else kind
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
        trims = HAS_WINDOW
        if IS_WIDE and not HAS_WINDOW:
            trims = tl.load(work + _IS_PREFILL) != 0
        if trims:
            begin, end = visible_pages(key_position, begin, end, effective, row_seen, window, PAGE_SIZE, HAS_WINDOW)
        # A block's page ids are loaded one block ahead, so that its keys and values are not a load behind a load.
        end_key = end * PAGE_SIZE
        key = begin * PAGE_SIZE + tl.arange(0, BLOCK_N)
        page = tl.load(page_id + key // PAGE_SIZE, mask=key < end_key, other=0)
        for start in tl.range(begin * PAGE_SIZE, end_key, BLOCK_N, num_stages=STAGES):
            key = start + tl.arange(0, BLOCK_N)
            inside = key < end_key
            slot = page.to(tl.int64) * PAGE_SIZE + key % PAGE_SIZE
            at = slot[:, None] * row_size + column[None, :]
            k_low = tl.load(keys + at, mask=inside[:, None] & in_low, other=0.0)
            k_high = tl.load(keys + HALF + at, mask=inside[:, None] & in_high, other=0.0)
            v_low = tl.load(values + at, mask=inside[:, None] & in_low, other=0.0)
            v_high = tl.load(values + HALF + at, mask=inside[:, None] & in_high, other=0.0)
            if is_scaled:
                k_scale, v_scale = _scales(keys, slot, inside, HEAD_DIM), _scales(values, slot, inside, HEAD_DIM)
                k_low = _widened(k_low, kind, IS_PURE, INTERPRET)
                k_high = _widened(k_high, kind, IS_PURE, INTERPRET)
            seen_from = tl.load(key_position + key, mask=inside, other=_FREE)
            page = tl.load(page_id + (key + BLOCK_N) // PAGE_SIZE, mask=key + BLOCK_N < end_key, other=0)
            scores = _product(low, tl.trans(k_low), tl.zeros([BLOCK_M, BLOCK_N], tl.float32), PRECISION, INTERPRET)
            scores = _product(high, tl.trans(k_high), scores, PRECISION, INTERPRET)
            if is_scaled:
                scores = scores * k_scale[None, :]
            if HAS_CAP:
                scores = cap * _LOG2_E * _tanh(scores)
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
                if is_scaled:
                    v_scale, broken = _mended(v_scale)
                else:
                    v_low, broken = _mended(v_low)
                    v_high, broken_high = _mended(v_high)
                    broken = tl.maximum(broken, broken_high)
                is_broken = (broken != 0)[None, :] & (scores != -float("inf"))
                poison = tl.where(tl.max(is_broken.to(tl.int32), 1) != 0, float("nan"), 0.0)
                sum_low, sum_high = sum_low + poison[:, None], sum_high + poison[:, None]
            if is_scaled:
                weights = weights * v_scale[None, :]
                v_low = _widened(v_low, weight_kind, IS_PURE, INTERPRET)
                v_high = _widened(v_high, weight_kind, IS_PURE, INTERPRET)
            weights = weights.to(weight_kind)
            sum_low = _product(weights, v_low, sum_low, PRECISION, INTERPRET)
            sum_high = _product(weights, v_high, sum_high, PRECISION, INTERPRET)
    return sum_low, sum_high, top, total


@triton.jit
def _attend_tile(
    q, keys, values, key_position, rope_table, out, lse, partial_out, partial_lse, work, tile, kv_head,
    stride_q, q_scale, cap, window, num_rope_positions,
    NUM_KV_HEADS: tl.constexpr, GROUPS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr, ROTARY_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr,
    IS_WIDE: tl.constexpr, PRECISION: tl.constexpr, INTERPRET: tl.constexpr, STAGES: tl.constexpr,
    IS_PURE: tl.constexpr,
):  # fmt: skip
    """One tile for one KV head: rows that have no other part are final, the others leave a partial result."""
    lane = tl.arange(0, BLOCK_M)
    index = lane // GROUPS
    row_seen = index < tl.load(tile + 1)
    row = tl.load(_section(work, _ROW) + tl.load(tile) + index, mask=row_seen, other=0)
    position = tl.load(_section(work, _POSITION) + row, mask=row_seen, other=0)
    entry = tl.load(tile + 2) + index
    head = kv_head * GROUPS + lane % GROUPS
    num_q_heads: tl.constexpr = NUM_KV_HEADS * GROUPS
    target = row.to(tl.int64) * num_q_heads + head
    q_row = q + row.to(tl.int64) * stride_q + head * HEAD_DIM
    sum_low, sum_high, top, total = _attend_runs(
        q_row, row_seen, position, entry, keys, values, key_position, rope_table, work, tile,
        q_scale, cap, window, num_rope_positions, HEAD_DIM, HALF, BLOCK_HALF, ROTARY_DIM, PAGE_SIZE, BLOCK_M, BLOCK_N,
        HAS_WINDOW, HAS_CAP, IS_WIDE, PRECISION, INTERPRET, STAGES, IS_PURE, False,
    )  # fmt: skip
    is_broken = (sum_low != sum_low) | (sum_high != sum_high)
    if tl.max(tl.max(is_broken.to(tl.int32), 1), 0) > 0:
        sum_low, sum_high, top, total = _attend_runs(
            q_row, row_seen, position, entry, keys, values, key_position, rope_table, work, tile,
            q_scale, cap, window, num_rope_positions, HEAD_DIM, HALF, BLOCK_HALF, ROTARY_DIM, PAGE_SIZE, BLOCK_M,
            _CAREFUL_N, HAS_WINDOW, HAS_CAP, IS_WIDE, PRECISION, INTERPRET, 1, IS_PURE, True,
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


@triton.jit
def _taken(work, end):
    """Count what was taken before by programs that had done one, and take one; `end` are all that there are to do.

    Who is the last, as each that is done is followed by one call, leaves the count at 0 for the next launch.
    """
    taken = tl.atomic_add(work + _NUM_TAKEN, 1, sem="relaxed")
    if taken == end - 1:
        tl.store(work + _NUM_TAKEN, 0)
    return taken


@triton.jit(do_not_specialize=["num_pages", "num_rope_positions", "window"])
def attention_kernel(
    q, k_pages, v_pages, key_position, rope_table, out, lse, partial_out, partial_lse, work,
    num_pages, stride_q, num_rope_positions, window, q_scale, cap,
    NUM_KV_HEADS: tl.constexpr, GROUPS: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr, BLOCK_HALF: tl.constexpr, NARROW_M: tl.constexpr, WIDE_M: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr, PRECISION: tl.constexpr, INTERPRET: tl.constexpr, HAS_TCGEN05: tl.constexpr,
):  # fmt: skip
    """Programs take tiles, one for one KV head, until none is left; how many there are stands in the work.

    So a launch does not depend on the work. Each begins with the tile of its own number; who is done with one takes the
    next that nobody has, as a device deals out programs: long tiles, which are first, are not followed by long ones.

    q                       [T, num_q_heads, HEAD_DIM], rows `stride_q` elements apart
    k_pages, v_pages        [NUM_KV_HEADS, num_pages, PAGE_SIZE, HEAD_DIM] like q, or int8 [.., HEAD_DIM + 4]
    key_position            int32, of every key of every listed page; see `key_position_kernel`
    rope_table              float32 [num_rope_positions, 2, ROTARY_DIM / 2]; not read where ROTARY_DIM is 0
    out, lse                as q, contiguous, and float32 [T, num_q_heads]: rows with one part
    partial_out, _lse       float32 [num_slots, num_q_heads, HEAD_DIM], [num_slots, num_q_heads]: rows with more
    work                    int32, see `mneme.kernels.triton.pack`
    WIDE_M                  0 where the work has no wide tile
    HAS_TCGEN05             whether products of wide tiles are tcgen05's, beside which nothing may be impure
    q_scale                 makes scores powers of 2; with a cap, makes them multiples of it
    """
    half: tl.constexpr = (HEAD_DIM + 1) // 2
    row_size: tl.constexpr = HEAD_DIM + _SCALE_BYTES if k_pages.dtype.element_ty == tl.int8 else HEAD_DIM
    number, num_programs = tl.program_id(0), tl.num_programs(0)
    end = tl.load(work + _NUM_TILES) * NUM_KV_HEADS
    while number < end:
        # Once. What a tile's work has in common with the next one's would be kept in registers, which it needs itself.
        for _ in tl.range(0, tl.load(work + _ONE), num_stages=1, disable_licm=True):
            tile = _section(work, _TILE) + number // NUM_KV_HEADS * _TILE_WORDS
            kv_head = number % NUM_KV_HEADS
            pool = kv_head.to(tl.int64) * num_pages * (PAGE_SIZE * row_size)
            keys, values = k_pages + pool, v_pages + pool
            is_narrow = tl.load(tile + 1) * GROUPS <= NARROW_M
            if WIDE_M > 0:  # noqa: SIM102  # known when it is compiled
                if not is_narrow:
                    _attend_tile(
                        q, keys, values, key_position, rope_table, out, lse, partial_out, partial_lse,
                        work, tile, kv_head, stride_q, q_scale, cap, window, num_rope_positions, NUM_KV_HEADS, GROUPS,
                        HEAD_DIM, half, BLOCK_HALF, ROTARY_DIM, PAGE_SIZE, WIDE_M, BLOCK_N, HAS_WINDOW,
                        HAS_CAP, True, PRECISION, INTERPRET, STAGES, HAS_TCGEN05,
                    )  # fmt: skip
            if is_narrow:
                _attend_tile(
                    q, keys, values, key_position, rope_table, out, lse, partial_out, partial_lse, work,
                    tile, kv_head, stride_q, q_scale, cap, window, num_rope_positions, NUM_KV_HEADS, GROUPS, HEAD_DIM,
                    half, BLOCK_HALF, ROTARY_DIM, PAGE_SIZE, NARROW_M, BLOCK_N, HAS_WINDOW, HAS_CAP, False,
                    PRECISION, INTERPRET, STAGES, False,
                )  # fmt: skip
        number = end
        if end > num_programs:
            number = _taken(work, end) + num_programs


@triton.jit(do_not_specialize=["num_listed"])
def key_position_kernel(key_position, slot_position, work, num_listed, PAGE_SIZE: tl.constexpr, PAGES: tl.constexpr):
    """Return where each key of each listed page was rotated, in the order of the list; FREE where no row may see it.

    Once per step, for all layers: a layer then reads positions as it reads anything contiguous, without page ids and
    masks. Bytes: 8 per key and 12 per page; no flops.
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


@triton.jit
def merge_kernel(
    out, lse, partial_out, partial_lse, work,
    NUM_Q_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_PARTS: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """Programs write a head of a merged row each, and go on with that which lies as many behind as there are programs.

    BLOCK_PARTS are loaded together, so that a long context that was cut into many ranges is not merged one load behind
    the other. Shapes as in `attention_kernel`. Bytes: 4 * (head_dim + 1) per part and head read, the row written.
    Flops: about 2 * head_dim per part and head.
    """
    end_number = tl.load(work + _NUM_MERGED) * NUM_Q_HEADS
    for item in tl.range(tl.program_id(0), end_number, tl.num_programs(0), num_stages=1):
        number, head = item // NUM_Q_HEADS, item % NUM_Q_HEADS
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
