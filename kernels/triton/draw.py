"""The last pass of a draw on CUDA: one program finds each row's token.

See `mneme.kernels.triton.sampling`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from mneme.kernels.triton.weigh import (
    MIN_P,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    UNIFORM,
    best_of,
    chosen_pivot,
    is_truncated,
    param,
    pivot_of,
    scaled_of,
    top_p_target_of,
    weight_of,
)

_MAX_ID = tl.constexpr(2**31 - 1)


@triton.jit
def _load(
    values_ptr: tl.tensor,
    index: tl.tensor,
    num_values: tl.tensor,
    temperature: tl.tensor,
    top: tl.tensor,
    pivot: tl.tensor,
    UNIT: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Which of these values are candidates, what they are by the temperature, and their weights (0 of others)."""
    x = tl.load(values_ptr + index, mask=index < num_values, other=-float("inf"))
    scaled = scaled_of(x, temperature)
    is_candidate = scaled - top >= pivot
    return is_candidate, scaled, tl.where(is_candidate, weight_of(scaled - top, UNIT), 0)


@triton.jit
def _crossing(
    values_ptr: tl.tensor,
    num_values: tl.tensor,
    temperature: tl.tensor,
    top: tl.tensor,
    pivot: tl.tensor,
    target: tl.tensor,
    BY_WEIGHT: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Where the cumulative weight (or count) of candidates, in descending order, passes `target`.

    The scaled logit there; count and weight of the candidates above it; the weight of one token that has it.

    Bisection between values that occur: a step moves one end to the next of them, so the number of steps is about the
    logarithm of the number of candidates.
    """
    low, high = top + 1.0625 * pivot - 1e-6 * tl.abs(top), top  # below all candidates, however they were rounded
    while low < high:
        middle = low + 0.5 * (high - low)
        middle = tl.where(middle > low, middle, high)
        passed = tl.zeros((), tl.int64)
        next_above, next_below = tl.full((), float("inf"), tl.float32), tl.full((), -float("inf"), tl.float32)
        for start in range(0, num_values, BLOCK):
            is_candidate, scaled, weights = _load(
                values_ptr, start + tl.arange(0, BLOCK), num_values, temperature, top, pivot, UNIT
            )
            is_above = is_candidate & (scaled >= middle)
            amounts = weights if BY_WEIGHT else tl.full((BLOCK,), 1, tl.int64)
            passed += tl.sum(tl.where(is_above, amounts, 0), axis=0)
            next_above = tl.minimum(next_above, tl.min(tl.where(is_above, scaled, float("inf")), axis=0))
            is_below = is_candidate & (scaled < middle)
            next_below = tl.maximum(next_below, tl.max(tl.where(is_below, scaled, -float("inf")), axis=0))
        if passed > target:
            low = next_above
        else:
            high = tl.maximum(next_below, low)
    count, weight, unit = tl.zeros((), tl.int64), tl.zeros((), tl.int64), tl.zeros((), tl.int64)
    for start in range(0, num_values, BLOCK):
        is_candidate, scaled, weights = _load(
            values_ptr, start + tl.arange(0, BLOCK), num_values, temperature, top, pivot, UNIT
        )
        is_above = is_candidate & (scaled > low)
        count += tl.sum(is_above.to(tl.int64), axis=0)
        weight += tl.sum(tl.where(is_above, weights, 0), axis=0)
        unit = tl.maximum(unit, tl.max(tl.where(is_candidate & (scaled == low), weights, 0), axis=0))
    return low, count, weight, unit


@triton.jit
def _weight_from(
    values_ptr: tl.tensor,
    num_values: tl.tensor,
    temperature: tl.tensor,
    top: tl.tensor,
    pivot: tl.tensor,
    min_p: tl.tensor,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Weight of the candidates that are at least `min_p` times as likely as the best."""
    total = tl.zeros((), tl.int64)
    for start in range(0, num_values, BLOCK):
        index = start + tl.arange(0, BLOCK)
        is_candidate, scaled, weights = _load(values_ptr, index, num_values, temperature, top, pivot, UNIT)
        is_kept = is_candidate & (tl.exp(scaled - top) >= min_p)
        total += tl.sum(tl.where(is_kept, weights, 0), axis=0)
    return total


@triton.jit
def _nth_of_value(
    values_ptr: tl.tensor,
    num_values: tl.tensor,
    temperature: tl.tensor,
    top: tl.tensor,
    pivot: tl.tensor,
    value: tl.tensor,
    nth: tl.tensor,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Index of the nth candidate that has this scaled logit."""
    found, num_seen = tl.zeros((), tl.int32), tl.zeros((), tl.int32)
    for start in range(0, num_values, BLOCK):
        index = start + tl.arange(0, BLOCK)
        is_candidate, scaled, _ = _load(values_ptr, index, num_values, temperature, top, pivot, UNIT)
        is_tied = (is_candidate & (scaled == value)).to(tl.int32)
        is_found = (is_tied > 0) & (num_seen + tl.cumsum(is_tied, axis=0) - 1 == nth)
        found = tl.maximum(found, tl.max(tl.where(is_found, index, 0), axis=0))
        num_seen += tl.sum(is_tied, axis=0)
    return found


@triton.jit
def _target_of(uniform: tl.tensor, total: tl.tensor) -> tl.tensor:
    """The share `uniform` of a weight, in [0, total)."""
    return tl.minimum((uniform * total.to(tl.float64)).to(tl.int64), total - 1)


@triton.jit
def _draw_truncated(
    values_ptr: tl.tensor,
    num_values: tl.tensor,
    params_ptr: tl.tensor,
    row: tl.tensor,
    top: tl.tensor,
    pivot: tl.tensor,
    num_candidates: tl.tensor,
    candidate_weight: tl.tensor,
    row_weight: tl.tensor,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
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
    logits_ptr: tl.tensor,
    params_ptr: tl.tensor,
    row: tl.tensor,
    top: tl.tensor,
    weight_ptr: tl.tensor,
    num_chunks: tl.tensor,
    vocab: tl.tensor,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    UNIT: tl.constexpr,
) -> tl.tensor:
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
    logits_ptr: tl.tensor,
    params_ptr: tl.tensor,
    best_ptr: tl.tensor,
    best_id_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    pivot_count_ptr: tl.tensor,
    pivot_weight_ptr: tl.tensor,
    candidate_ptr: tl.tensor,
    candidate_id_ptr: tl.tensor,
    token_ptr: tl.tensor,
    vocab: tl.tensor,
    stride_row: tl.tensor,
    num_chunks: tl.tensor,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    CAPACITY: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program per row; -1 where the best logit is not finite."""
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
                        UNIT, BLOCK,
                    )  # fmt: skip
            else:
                token = _draw_whole(
                    logits_ptr + row * stride_row, params_ptr, row, top, weight_ptr, num_chunks, vocab,
                    CHUNK, CHUNKS, UNIT,
                )  # fmt: skip
    tl.store(token_ptr + row, token)
