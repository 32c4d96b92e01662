"""Drawing tokens on CUDA for a whole batch, without sorting the vocabulary.

A token's weight is its probability over that of the most likely one, as an integer: `floor(exp(s - top) * unit)`, with
s = logit / temperature. Sums of integers do not depend on their order, so a draw is the same whatever the grid, and
cumulative weights of different passes fit together exactly.

What top-k, top-p and min-p keep is a prefix of the tokens ordered by (s descending, id ascending), and the draw inverts
the cumulative weight over that same order. Each of them asks one question: at which token does a cumulative count or
weight pass a target? The answer is found by bisection over s, among candidates: the tokens above the highest of
16 fixed thresholds above which everything asked for must lie. A row without truncation is inverted in the
order of the vocabulary: first its chunk, then the token.

Four launches at most: best of each chunk; weight of each chunk and of its part above each threshold; candidates, in the
order of their ids; the draw. Per row of V logits: 12 V bytes, two thirds of them from cache, and about 100 V flops.
"""

# Arguments of kernels are tensors, pointers or numbers; Triton has no types for them.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

import triton
import triton.language as tl
from mneme.kernels.upload import upload

CHUNK = 4096  # logits of one program
CAPACITY = 8192  # candidates of a row that are gathered; a row with more is searched where it is
SEARCH_BLOCK = 1024
NUM_WARPS = 8
_UNIT_BITS = 44  # a token 2^-44 times as likely as the best is never drawn
_SUM_BITS = 62  # of all weights of a row

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
def param(params_ptr, row, column: tl.constexpr):
    return tl.load(params_ptr + row * NUM_PARAMS + column)


@triton.jit
def is_truncated(params_ptr, row):
    top_k, top_p = param(params_ptr, row, TOP_K), param(params_ptr, row, TOP_P)
    return (top_k > 0) | (top_p < 1.0) | (param(params_ptr, row, MIN_P) > 0.0)


@triton.jit
def scaled_of(logits, temperature):
    """Rounded as IEEE 754 says, so that the same logits tie here and on the host."""
    return tl.minimum(tl.div_rn(logits, temperature), _MAX_FLOAT)


@triton.jit
def weight_of(below_top, UNIT: tl.constexpr):
    return (tl.exp(below_top) * UNIT).to(tl.int64)


@triton.jit
def pivot_of(number):
    """The thresholds of s - top: they begin close and end at -31, below which every weight is 0. Exact in float32."""
    return (number + 1) * (number + 1) * _PIVOT_STEP


@triton.jit
def best_of(best_ptr, row, num_chunks, CHUNKS: tl.constexpr):
    """A row's largest logit; infinite where a logit is NaN or infinite, or all are -inf."""
    chunks = tl.arange(0, CHUNKS)
    best = tl.load(best_ptr + row * num_chunks + chunks, mask=chunks < num_chunks, other=-float("inf"))
    return tl.max(best, axis=0)


@triton.jit
def best_kernel(logits_ptr, best_ptr, best_id_ptr, vocab, stride_row, CHUNK: tl.constexpr):
    """Each chunk's largest logit and the lowest id that has it. Bytes: 4 per logit. Flops: 2."""
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
    logits_ptr, params_ptr, best_ptr, weight_ptr, pivot_count_ptr, pivot_weight_ptr, vocab, stride_row,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Each chunk's weight and, of rows that truncate, count and weight of its tokens above each pivot.

    Bytes: 4 per logit. Flops: about 15 per logit, 65 of rows that truncate.
    """
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
def top_p_target_of(top_p, total):
    """The token whose span of cumulative weight holds this is the last that top-p keeps."""
    target = tl.ceil(top_p * total.to(tl.float64)).to(tl.int64) - 1
    return tl.minimum(tl.maximum(target, 0), total - 1)


@triton.jit
def chosen_pivot(params_ptr, row, weight_ptr, pivot_count_ptr, pivot_weight_ptr, num_chunks, CHUNKS: tl.constexpr):
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
    logits_ptr, params_ptr, best_ptr, weight_ptr, pivot_count_ptr, pivot_weight_ptr, candidate_ptr, candidate_id_ptr,
    vocab, stride_row, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """Candidates of rows that truncate, one behind the other in the order of their ids; none if over CAPACITY.

    Bytes: 4 per logit, 8 per candidate. Flops: about 8 per logit.
    """
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


_MAX_ID = tl.constexpr(2**31 - 1)


@triton.jit
def _load(values_ptr, index, num_values, temperature, top, pivot, UNIT: tl.constexpr):
    """Return which values are candidates, what they are by the temperature, and their weights (0 of others)."""
    x = tl.load(values_ptr + index, mask=index < num_values, other=-float("inf"))
    scaled = scaled_of(x, temperature)
    is_candidate = scaled - top >= pivot
    return is_candidate, scaled, tl.where(is_candidate, weight_of(scaled - top, UNIT), 0)


@triton.jit
def _crossing(
    values_ptr, num_values, temperature, top, pivot, target, BY_WEIGHT: tl.constexpr, UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Return where the cumulative weight (or count) of candidates, in descending order, passes `target`.

    The scaled logit there; count and weight of the candidates above it; the weight of one token that has it.

    Bisection between values that occur: a step moves one end to the next of them, so the number of steps is about the
    logarithm of the number of candidates. Lanes are reduced once per step: between blocks no thread waits for others.
    """
    low, high = top + 1.0625 * pivot - 1e-6 * tl.abs(top), top  # below all candidates, however they were rounded
    while low < high:
        middle = low + 0.5 * (high - low)
        middle = tl.where(middle > low, middle, high)
        passing = tl.zeros((BLOCK,), tl.int64)
        above, below = tl.full((BLOCK,), float("inf"), tl.float32), tl.full((BLOCK,), -float("inf"), tl.float32)
        for start in range(0, num_values, BLOCK):
            is_candidate, scaled, weights = _load(
                values_ptr, start + tl.arange(0, BLOCK), num_values, temperature, top, pivot, UNIT
            )
            is_above = is_candidate & (scaled >= middle)
            amounts = weights if BY_WEIGHT else tl.full((BLOCK,), 1, tl.int64)
            passing += tl.where(is_above, amounts, 0)
            above = tl.minimum(above, tl.where(is_above, scaled, float("inf")))
            is_below = is_candidate & (scaled < middle)
            below = tl.maximum(below, tl.where(is_below, scaled, -float("inf")))
        if tl.sum(passing, axis=0) > target:
            low = tl.min(above, axis=0)
        else:
            high = tl.maximum(tl.max(below, axis=0), low)
    counts, sums, units = tl.zeros((BLOCK,), tl.int64), tl.zeros((BLOCK,), tl.int64), tl.zeros((BLOCK,), tl.int64)
    for start in range(0, num_values, BLOCK):
        is_candidate, scaled, weights = _load(
            values_ptr, start + tl.arange(0, BLOCK), num_values, temperature, top, pivot, UNIT
        )
        is_above = is_candidate & (scaled > low)
        counts += is_above.to(tl.int64)
        sums += tl.where(is_above, weights, 0)
        units = tl.maximum(units, tl.where(is_candidate & (scaled == low), weights, 0))
    return low, tl.sum(counts, axis=0), tl.sum(sums, axis=0), tl.max(units, axis=0)


@triton.jit
def _weight_from(values_ptr, num_values, temperature, top, pivot, min_p, UNIT: tl.constexpr, BLOCK: tl.constexpr):
    """Weight of the candidates that are at least `min_p` times as likely as the best."""
    kept = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, num_values, BLOCK):
        index = start + tl.arange(0, BLOCK)
        is_candidate, scaled, weights = _load(values_ptr, index, num_values, temperature, top, pivot, UNIT)
        kept += tl.where(is_candidate & (tl.exp(scaled - top) >= min_p), weights, 0)
    return tl.sum(kept, axis=0)


@triton.jit
def _nth_of_value(values_ptr, num_values, temperature, top, pivot, value, nth, UNIT: tl.constexpr, BLOCK: tl.constexpr):
    """Index of the nth candidate that has this scaled logit."""
    first = tl.full((BLOCK,), _MAX_ID, tl.int32)
    for start in range(0, num_values, BLOCK):
        index = start + tl.arange(0, BLOCK)
        is_candidate, scaled, _ = _load(values_ptr, index, num_values, temperature, top, pivot, UNIT)
        first = tl.minimum(first, tl.where(is_candidate & (scaled == value), index, _MAX_ID))
    found, num_seen = tl.minimum(tl.min(first, axis=0), num_values - 1), tl.zeros((), tl.int32)
    for start in range(0, tl.where(nth > 0, num_values, 0), BLOCK):  # ties are few and counted block by block
        index = start + tl.arange(0, BLOCK)
        is_candidate, scaled, _ = _load(values_ptr, index, num_values, temperature, top, pivot, UNIT)
        is_tied = (is_candidate & (scaled == value)).to(tl.int32)
        is_found = (is_tied > 0) & (num_seen + tl.cumsum(is_tied, axis=0) - 1 == nth)
        found = tl.maximum(found, tl.max(tl.where(is_found, index, 0), axis=0))
        num_seen += tl.sum(is_tied, axis=0)
    return found


@triton.jit
def _target_of(uniform, total):
    """The share `uniform` of a weight, in [0, total)."""
    return tl.minimum((uniform * total.to(tl.float64)).to(tl.int64), total - 1)


@triton.jit
def _draw_truncated(
    values_ptr, num_values, params_ptr, row, top, pivot, num_candidates, candidate_weight, row_weight,
    UNIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Index of the drawn value."""
    temperature = param(params_ptr, row, TEMPERATURE).to(tl.float32)
    top_k = param(params_ptr, row, TOP_K).to(tl.int64)
    min_p, top_p = param(params_ptr, row, MIN_P).to(tl.float32), param(params_ptr, row, TOP_P)
    kept = row_weight
    if top_k > 0:
        kept = candidate_weight
        if top_k < num_candidates:
            _, count, weight, unit = _crossing(
                values_ptr, num_values, temperature, top, pivot, top_k - 1, False, UNIT, BLOCK
            )
            kept = weight + (top_k - count) * unit
    if min_p > 0.0:
        kept = tl.minimum(kept, _weight_from(values_ptr, num_values, temperature, top, pivot, min_p, UNIT, BLOCK))
    if top_p < 1.0:
        target = top_p_target_of(top_p, kept)
        _, _, weight, unit = _crossing(values_ptr, num_values, temperature, top, pivot, target, True, UNIT, BLOCK)
        kept = weight + ((target - weight) // unit + 1) * unit
    target = _target_of(param(params_ptr, row, UNIFORM), kept)
    value, _, weight, unit = _crossing(values_ptr, num_values, temperature, top, pivot, target, True, UNIT, BLOCK)
    nth = ((target - weight) // unit).to(tl.int32)
    return _nth_of_value(values_ptr, num_values, temperature, top, pivot, value, nth, UNIT, BLOCK)


@triton.jit
def _draw_whole(
    logits_ptr, params_ptr, row, top, weight_ptr, num_chunks, vocab, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
    UNIT: tl.constexpr,
):  # fmt: skip
    """The token at which the cumulative weight, in the order of ids, passes the target."""
    chunks = tl.arange(0, CHUNKS)
    weights = tl.load(weight_ptr + row * num_chunks + chunks, mask=chunks < num_chunks, other=0)
    target = _target_of(param(params_ptr, row, UNIFORM), tl.sum(weights, axis=0))
    passed = tl.cumsum(weights, axis=0) <= target
    chunk = tl.sum(passed.to(tl.int32), axis=0)
    target -= tl.sum(tl.where(passed, weights, 0), axis=0)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits_ptr + ids, mask=ids < vocab, other=-float("inf"))
    weights = weight_of(scaled_of(x, param(params_ptr, row, TEMPERATURE).to(tl.float32)) - top, UNIT)
    return chunk * CHUNK + tl.sum((tl.cumsum(weights, axis=0) <= target).to(tl.int32), axis=0)


@triton.jit
def draw_kernel(
    logits_ptr, params_ptr, best_ptr, best_id_ptr, weight_ptr, pivot_count_ptr, pivot_weight_ptr, candidate_ptr,
    candidate_id_ptr, token_ptr, vocab, stride_row, num_chunks, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
    CAPACITY: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per row; -1 where the best logit is not finite.

    Bytes: 8 to 12 per chunk (136 more of rows that truncate), then one chunk of logits, or 4 per candidate and step of
    a bisection. Flops: about 20 per logit or candidate that is read.
    """
    row = tl.program_id(0).to(tl.int64)
    temperature = param(params_ptr, row, TEMPERATURE).to(tl.float32)
    best = best_of(best_ptr, row, num_chunks, CHUNKS)
    token = tl.full((), -1, tl.int32)
    if tl.abs(best) < float("inf"):
        if temperature <= 0.0:
            chunks = tl.arange(0, CHUNKS)
            inside = chunks < num_chunks
            bests = tl.load(best_ptr + row * num_chunks + chunks, mask=inside, other=-float("inf"))
            best_ids = tl.load(best_id_ptr + row * num_chunks + chunks, mask=inside, other=0)
            token = tl.min(tl.where(inside & (bests == best), best_ids, _MAX_ID), axis=0)
        else:
            top = scaled_of(best, temperature)
            if is_truncated(params_ptr, row):
                chosen, count, weight, total = chosen_pivot(
                    params_ptr, row, weight_ptr, pivot_count_ptr, pivot_weight_ptr, num_chunks, CHUNKS
                )
                pivot = pivot_of(chosen)
                if count <= CAPACITY:
                    index = _draw_truncated(
                        candidate_ptr + row * CAPACITY, count, params_ptr, row, top, pivot, count, weight, total,
                        UNIT, BLOCK,
                    )  # fmt: skip
                    token = tl.load(candidate_id_ptr + row * CAPACITY + index)
                else:  # read the row itself: slower, but any number
                    token = _draw_truncated(
                        logits_ptr + row * stride_row, vocab, params_ptr, row, top, pivot, count, weight, total,
                        UNIT, CHUNK,
                    )  # fmt: skip
            else:
                token = _draw_whole(
                    logits_ptr + row * stride_row, params_ptr, row, top, weight_ptr, num_chunks, vocab,
                    CHUNK, CHUNKS, UNIT,
                )  # fmt: skip
    tl.store(token_ptr + row, token)


def pack_params(
    temperature: npt.ArrayLike,
    top_k: npt.ArrayLike,
    top_p: npt.ArrayLike,
    min_p: npt.ArrayLike,
    uniform: npt.ArrayLike,
) -> npt.NDArray[np.float64]:
    """Pack what `draw` needs to know of each row into float64 [rows, 5].

    temperature  0 is greedy
    top_k        0 or less: no limit
    top_p        in (0, 1]
    min_p        in [0, 1]
    uniform      float64 in [0, 1): where the cumulative distribution is inverted
    """
    packed = np.empty((len(np.asarray(uniform)), NUM_PARAMS.value), np.float64)
    for column, values in ((TEMPERATURE, temperature), (TOP_P, top_p), (MIN_P, min_p)):
        packed[:, column.value] = np.asarray(values, np.float32)  # as on the host, which computes in float32
    packed[:, TOP_K.value] = top_k
    packed[:, UNIFORM.value] = uniform
    return packed


def draw(logits: Tensor, params: npt.NDArray[np.float64]) -> Tensor:
    """Draw a token for each row: int32 [rows]; -1 where the best logit is not finite or a logit is NaN.

    logits  float32 [rows, vocab], rows contiguous
    params  of `pack_params`

    Scratch: 64 KiB a row if any row truncates.
    """
    num_rows, vocab = logits.shape
    assert logits.dtype == torch.float32, "logits are float32"
    assert logits.stride(1) == 1, "rows are contiguous"
    tokens = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    if not num_rows:
        return tokens
    num_chunks = triton.cdiv(vocab, CHUNK)
    unit = float(1 << min(_UNIT_BITS, _SUM_BITS - vocab.bit_length()))
    is_drawn = params[:, TEMPERATURE.value] > 0
    is_cut = (params[:, TOP_K.value] > 0) | (params[:, TOP_P.value] < 1) | (params[:, MIN_P.value] > 0)
    any_cut = bool((is_drawn & is_cut).any())
    on_device = upload(params, logits.device)
    best, best_id, *weights = _chunk_scratch(num_rows, num_chunks, any_cut, logits.device)
    candidates = _candidate_scratch(num_rows, any_cut, logits.device)
    grid, stride = (num_rows, num_chunks), logits.stride(0)
    sizes = {"CHUNK": CHUNK, "num_warps": NUM_WARPS}
    of_rows = {"CHUNKS": triton.next_power_of_2(num_chunks), **sizes}
    with torch.cuda.device(logits.get_device()):
        best_kernel[grid](logits, best, best_id, vocab, stride, **sizes)
        if is_drawn.any():
            weigh_kernel[grid](logits, on_device, best, *weights, vocab, stride, UNIT=unit, **of_rows)
        if any_cut:
            gather_kernel[grid](
                logits, on_device, best, *weights, *candidates, vocab, stride, CAPACITY=CAPACITY, **of_rows
            )
        draw_kernel[(num_rows,)](
            logits, on_device, best, best_id, *weights, *candidates, tokens, vocab, stride, num_chunks,
            CAPACITY=CAPACITY, UNIT=unit, BLOCK=SEARCH_BLOCK, **of_rows,
        )  # fmt: skip
    return tokens


def _chunk_scratch(num_rows: int, num_chunks: int, any_cut: bool, device: torch.device) -> list[Tensor]:
    """Allocate for each chunk: best logit, its id, weight, and per threshold the tokens above it and their weight."""
    chunks = (num_rows, num_chunks)
    pivots = (num_rows, num_chunks if any_cut else 0, NUM_PIVOTS.value)
    return [
        torch.empty(chunks, dtype=torch.float32, device=device),
        torch.empty(chunks, dtype=torch.int32, device=device),
        torch.empty(chunks, dtype=torch.int64, device=device),
        torch.empty(pivots, dtype=torch.int32, device=device),
        torch.empty(pivots, dtype=torch.int64, device=device),
    ]


def _candidate_scratch(num_rows: int, any_cut: bool, device: torch.device) -> list[Tensor]:
    """Allocate, for each row, its candidates' logits and ids."""
    shape = (num_rows, CAPACITY if any_cut else 0)
    return [torch.empty(shape, dtype=dtype, device=device) for dtype in (torch.float32, torch.int32)]
