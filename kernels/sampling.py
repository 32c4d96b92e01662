"""Drawing tokens by a kernel, where the device has one."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from mneme.kernels.triton.modules import triton_module


def draw_tokens(
    logits: Tensor,
    *,
    temperature: Sequence[float],
    top_k: Sequence[int],
    top_p: Sequence[float],
    min_p: Sequence[float],
    uniform: Sequence[float],
) -> list[int | None] | None:
    """A token of each row, None of rows whose best logit is not finite; None altogether without a kernel.

    logits   float32 [rows, vocab]
    uniform  in [0, 1): where the cumulative distribution is inverted

    See `mneme.kernels.triton.sampling.pack_params` for the others. Waits for the device.
    """
    kernels = triton_module("sampling")
    if kernels is None:
        return None
    params = kernels.pack_params(temperature, top_k, top_p, min_p, uniform)
    tokens: list[int] = kernels.draw(logits, params).tolist()
    return [token_id if token_id >= 0 else None for token_id in tokens]
