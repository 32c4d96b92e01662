"""The first passes of a draw on CUDA: each chunk's best token, its weight, and the candidates of rows that truncate.

See `mneme.kernels.triton.sampling`. Programs of all three kernels: (rows, chunks of the vocabulary).
"""

from __future__ import annotations

import triton
import triton.language as tl

NUM_PIVOTS = tl.constexpr(16)
_PIVOT_STEP = tl.constexpr(-31 / 256)
_MAX_FLOAT = tl.constexpr(3.4028234663852886e38)

# Columns of `params`, float64 [rows, 5].
TEMPERATURE = tl.constexpr(0)  # 0: greedy
TOP_K = tl.constexpr(1)  # 0 or less: no limit
TOP_P = tl.constexpr(2)
MIN_P = tl.constexpr(3)
UNIFORM = tl.constexpr(4)
NUM_PARAMS = tl.constexpr(5)


@triton.jit
def param(params_ptr: tl.tensor, row: tl.tensor, column: tl.constexpr) -> tl.tensor:
    return tl.load(params_ptr + row * NUM_PARAMS + column)


@triton.jit
def is_truncated(params_ptr: tl.tensor, row: tl.tensor) -> tl.tensor:
    top_k, top_p = param(params_ptr, row, TOP_K), param(params_ptr, row, TOP_P)
    return (top_k > 0) | (top_p < 1.0) | (param(params_ptr, row, MIN_P) > 0.0)


@triton.jit
def scaled_of(logits: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    """Rounded as IEEE 754 says, so that the same logits tie here and on the host."""
    return tl.minimum(tl.div_rn(logits, temperature), _MAX_FLOAT)


@triton.jit
def weight_of(below_top: tl.tensor, UNIT: tl.constexpr) -> tl.tensor:
    return (tl.exp(below_top) * UNIT).to(tl.int64)


@triton.jit
def pivot_of(number: tl.tensor) -> tl.tensor:
    """The thresholds of s - top: they begin close and end at -31, below which every weight is 0. Exact in float32."""
    return (number + 1) * (number + 1) * _PIVOT_STEP


@triton.jit
def best_of(best_ptr: tl.tensor, row: tl.tensor, num_chunks: tl.tensor, CHUNKS: tl.constexpr) -> tl.tensor:
    """A row's largest logit; infinite where a logit is NaN or infinite, or all are -inf."""
    chunks = tl.arange(0, CHUNKS)
    best = tl.load(best_ptr + row * num_chunks + chunks, mask=chunks < num_chunks, other=-float("inf"))
    return tl.max(best, axis=0)


@triton.jit
def best_kernel(
    logits_ptr: tl.tensor,
    best_ptr: tl.tensor,
    best_id_ptr: tl.tensor,
    vocab: tl.tensor,
    stride_row: tl.tensor,
    CHUNK: tl.constexpr,
) -> None:
    """Each chunk's largest logit and the lowest id that has it."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits_ptr + row * stride_row + ids, mask=ids < vocab, other=-float("inf"))
    x = tl.where(x != x, float("inf"), x)
    best, index = tl.max(x, axis=0, return_indices=True)
    at = row * tl.num_programs(1) + chunk
    tl.store(best_ptr + at, best)
    tl.store(best_id_ptr + at, chunk * CHUNK + index)


@triton.jit
def weigh_kernel(
    logits_ptr: tl.tensor,
    params_ptr: tl.tensor,
    best_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    pivot_count_ptr: tl.tensor,
    pivot_weight_ptr: tl.tensor,
    vocab: tl.tensor,
    stride_row: tl.tensor,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    UNIT: tl.constexpr,
) -> None:
    """Each chunk's weight and, of rows that truncate, count and weight of its tokens above each pivot."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = param(params_ptr, row, TEMPERATURE).to(tl.float32)
    best = best_of(best_ptr, row, tl.num_programs(1), CHUNKS)
    if (temperature > 0.0) & (tl.abs(best) < float("inf")):
        ids = chunk * CHUNK + tl.arange(0, CHUNK)
        x = tl.load(logits_ptr + row * stride_row + ids, mask=ids < vocab, other=-float("inf"))
        below_top = scaled_of(x, temperature) - scaled_of(best, temperature)
        weight = weight_of(below_top, UNIT)
        at = row * tl.num_programs(1) + chunk
        tl.store(weight_ptr + at, tl.sum(weight, axis=0))
        if is_truncated(params_ptr, row):
            for pivot in tl.static_range(NUM_PIVOTS):
                above = below_top >= pivot_of(pivot)
                tl.store(pivot_count_ptr + at * NUM_PIVOTS + pivot, tl.sum(above.to(tl.int32), axis=0))
                tl.store(pivot_weight_ptr + at * NUM_PIVOTS + pivot, tl.sum(tl.where(above, weight, 0), axis=0))


@triton.jit
def top_p_target_of(top_p: tl.tensor, total: tl.tensor) -> tl.tensor:
    """The token whose span of cumulative weight holds this is the last that top-p keeps."""
    target = tl.ceil(top_p * total.to(tl.float64)).to(tl.int64) - 1
    return tl.minimum(tl.maximum(target, 0), total - 1)


@triton.jit
def chosen_pivot(
    params_ptr: tl.tensor,
    row: tl.tensor,
    weight_ptr: tl.tensor,
    pivot_count_ptr: tl.tensor,
    pivot_weight_ptr: tl.tensor,
    num_chunks: tl.tensor,
    CHUNKS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """The highest pivot above which all is found: its number, the count and weight above it, and the row's weight.

    What one of top-k and min-p drops, the other cannot keep, so either bounds the candidates; top-p, a share of what
    they leave, does so only alone.
    """
    top_k = param(params_ptr, row, TOP_K).to(tl.int64)
    top_p, min_p = param(params_ptr, row, TOP_P), param(params_ptr, row, MIN_P).to(tl.float32)
    chunks, pivots = tl.arange(0, CHUNKS), tl.arange(0, NUM_PIVOTS)
    inside = chunks < num_chunks
    total = tl.sum(tl.load(weight_ptr + row * num_chunks + chunks, mask=inside, other=0), axis=0)
    at = (row * num_chunks + chunks)[:, None] * NUM_PIVOTS + pivots[None, :]
    counts = tl.sum(tl.load(pivot_count_ptr + at, mask=inside[:, None], other=0), axis=0)
    weights = tl.sum(tl.load(pivot_weight_ptr + at, mask=inside[:, None], other=0), axis=0)
    target = tl.where((top_k <= 0) & (min_p <= 0.0), top_p_target_of(top_p, total), total)  # total is never passed
    enough = ((top_k > 0) & (counts >= top_k)) | (weights > target) | (tl.exp(pivot_of(pivots)) * 1.000001 <= min_p)
    chosen = tl.min(tl.where(enough, pivots, NUM_PIVOTS - 1), axis=0)
    is_chosen = pivots == chosen
    return chosen, tl.sum(tl.where(is_chosen, counts, 0)), tl.sum(tl.where(is_chosen, weights, 0)), total


@triton.jit
def gather_kernel(
    logits_ptr: tl.tensor,
    params_ptr: tl.tensor,
    best_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    pivot_count_ptr: tl.tensor,
    pivot_weight_ptr: tl.tensor,
    candidate_ptr: tl.tensor,
    candidate_id_ptr: tl.tensor,
    vocab: tl.tensor,
    stride_row: tl.tensor,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    CAPACITY: tl.constexpr,
) -> None:
    """Candidates of rows that truncate, one behind the other in the order of their ids; none if over CAPACITY."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_chunks = tl.num_programs(1)
    temperature = param(params_ptr, row, TEMPERATURE).to(tl.float32)
    best = best_of(best_ptr, row, num_chunks, CHUNKS)
    if (temperature > 0.0) & (tl.abs(best) < float("inf")) & is_truncated(params_ptr, row):
        chosen, count, _, _ = chosen_pivot(
            params_ptr, row, weight_ptr, pivot_count_ptr, pivot_weight_ptr, num_chunks, CHUNKS
        )
        if count <= CAPACITY:
            chunks = tl.arange(0, CHUNKS)
            at = (row * num_chunks + chunks) * NUM_PIVOTS + chosen
            start = tl.sum(tl.load(pivot_count_ptr + at, mask=chunks < chunk, other=0), axis=0)
            ids = chunk * CHUNK + tl.arange(0, CHUNK)
            x = tl.load(logits_ptr + row * stride_row + ids, mask=ids < vocab, other=-float("inf"))
            below_top = scaled_of(x, temperature) - scaled_of(best, temperature)
            above = below_top >= pivot_of(chosen)
            to = row * CAPACITY + start + tl.cumsum(above.to(tl.int32), axis=0) - 1
            tl.store(candidate_ptr + to, x, mask=above)
            tl.store(candidate_id_ptr + to, ids, mask=above)
