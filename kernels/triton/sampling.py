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

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

import triton
from mneme.kernels.triton.draw import draw_kernel
from mneme.kernels.triton.weigh import (
    MIN_P,
    NUM_PARAMS,
    NUM_PIVOTS,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    UNIFORM,
    best_kernel,
    gather_kernel,
    weigh_kernel,
)

CHUNK = 4096  # logits of one program
CAPACITY = 8192  # candidates of a row that are gathered; a row with more is searched where it is
SEARCH_BLOCK = 1024
NUM_WARPS = 8
_UNIT_BITS = 44  # a token 2^-44 times as likely as the best is never drawn
_SUM_BITS = 62  # of all weights of a row


def pack_params(
    temperature: npt.ArrayLike,
    top_k: npt.ArrayLike,
    top_p: npt.ArrayLike,
    min_p: npt.ArrayLike,
    uniform: npt.ArrayLike,
) -> npt.NDArray[np.float64]:
    """float64 [rows, 5]: what `draw` needs to know of each row.

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
    """A token for each row: int32 [rows]; -1 where the best logit is not finite or a logit is NaN.

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
    on_device = torch.from_numpy(params).to(logits.device, non_blocking=True)
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
