"""From logits to tokens: penalties, biases, truncation and the draw, each row on its own.

Order as in vLLM: log-probabilities are read first, from what the model said; then `logit_bias` and tokens barred by
`min_tokens`; repetition, presence and frequency penalties; temperature; min-p; top-k; top-p of what is left; a draw.

The draw inverts the cumulative distribution at a number that is a function of (seed, choice, output position)
computed on the host, so it neither depends on the batch nor on the device.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch

from mneme.replicas.request import Logprobs, SamplingParams

GREEDY_BELOW = 1e-5  # temperatures under this are greedy
_MASK_64 = (1 << 64) - 1


class SampleRow(NamedTuple):
    """What the sampler needs to know of one sequence."""

    params: SamplingParams
    seed: int
    choice_index: int
    position: int  # of the token to draw: 0 is the first output token
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    barred_ids: Sequence[int]  # may not be drawn now


class Sampled(NamedTuple):
    token_id: int | None  # None: the model's logits are not finite, nothing can be drawn
    logprobs: Logprobs | None


def uniform(seed: int, choice_index: int, position: int) -> float:
    """A number in [0, 1), uniform over its three counters."""
    counters = struct.pack("<QQQ", seed & _MASK_64, choice_index, position)
    digest = hashlib.blake2b(counters, digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / (1 << 53)


@torch.inference_mode()
def sample(logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[Sampled]:
    """Draw one token per row.

    logits  float32 [num_rows, vocab_size]; changed in place
    """
    raw = logits.clone() if any(row.params.logprobs is not None for row in rows) else logits
    for index, row in enumerate(rows):
        _apply_biases(logits[index], row)
        _apply_penalties(logits[index], row)
    # A finite best logit: no NaN, not everything barred, and what -inf there is was barred.
    sound = logits.amax(dim=-1).isfinite().tolist()
    token_ids = _draw_all(logits, rows) if all(sound) else _draw_sound(logits, rows, sound)
    return [
        Sampled(token_id, None if token_id is None else _logprobs(raw[index], token_id, row.params.logprobs))
        for index, (row, token_id) in enumerate(zip(rows, token_ids, strict=True))
    ]


def _draw_sound(logits: torch.Tensor, rows: Sequence[SampleRow], sound: list[bool]) -> list[int | None]:
    """`_draw_all` for the rows whose logits are finite, None for the others."""
    kept = [index for index, is_sound in enumerate(sound) if is_sound]
    result: list[int | None] = [None] * len(rows)
    if kept:
        for index, token_id in zip(kept, _draw_all(logits[kept], [rows[i] for i in kept]), strict=True):
            result[index] = token_id
    return result


def _draw_all(logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[int | None]:
    """Each row by the method that its own parameters call for, so that it does not depend on the others."""
    token_ids: list[int | None] = logits.argmax(dim=-1).tolist()
    drawn = [index for index, row in enumerate(rows) if row.params.temperature >= GREEDY_BELOW]
    cut = [index for index in drawn if _is_truncated(rows[index].params)]
    whole = [index for index in drawn if not _is_truncated(rows[index].params)]
    for indices, draw in ((cut, _draw_truncated), (whole, _draw_whole)):
        if indices:
            for index, token_id in zip(indices, draw(logits[indices], [rows[i] for i in indices]), strict=True):
                token_ids[index] = token_id
    return token_ids


def _draw_whole(logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[int]:
    """From the whole distribution, in the order of the vocabulary; logits float32 [num_rows, vocab_size]."""
    index: list[int] = _invert(_scaled(logits, rows).softmax(dim=-1), rows).tolist()
    return index


def _draw_truncated(logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[int]:
    """From the most likely tokens that min-p, top-k and top-p leave; logits float32 [num_rows, vocab_size]."""
    ordered, order = _scaled(logits, rows).sort(dim=-1, descending=True, stable=True)
    probs = ordered.softmax(dim=-1)
    rank = torch.arange(probs.shape[-1], device=logits.device)
    top_k = _column([row.params.top_k if row.params.top_k > 0 else probs.shape[-1] for row in rows], logits)
    probs *= (rank < top_k) & (probs >= _column([row.params.min_p for row in rows], logits) * probs[:, :1])
    probs /= probs.sum(dim=-1, keepdim=True)
    before = probs.cumsum(dim=-1) - probs
    probs *= before < _column([row.params.top_p for row in rows], logits)
    index = _invert(probs, rows)
    token_ids: list[int] = order.gather(-1, index[:, None])[:, 0].tolist()
    return token_ids


def _scaled(logits: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    return logits / _column([row.params.temperature for row in rows], logits)


def _invert(weights: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """int64 [num_rows]: where the cumulative weight passes each row's uniform number; never where a weight is 0.

    weights  float32 [num_rows, n]
    """
    cumulative = weights.double().cumsum(dim=-1)
    draws = [uniform(row.seed, row.choice_index, row.position) for row in rows]
    target = torch.tensor(draws, dtype=torch.float64, device=weights.device)[:, None] * cumulative[:, -1:]
    index = torch.searchsorted(cumulative, target, right=True)[:, 0]
    last = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous())[:, 0]  # where it reaches its end
    return torch.minimum(index, last).clamp_(max=weights.shape[-1] - 1)


def _is_truncated(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, device=like.device)[:, None]


def _apply_penalties(logits: torch.Tensor, row: SampleRow) -> None:
    params = row.params
    if params.repetition_penalty != 1.0:
        seen = _ids_tensor({*row.prompt_ids, *row.output_ids}, logits.device)
        values = logits[seen]
        logits[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if (params.presence_penalty or params.frequency_penalty) and row.output_ids:
        output = torch.tensor(row.output_ids, dtype=torch.int64, device=logits.device)
        counts = torch.bincount(output, minlength=logits.shape[-1])
        logits -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)


def _apply_biases(logits: torch.Tensor, row: SampleRow) -> None:
    if row.params.logit_bias:
        biased = torch.tensor(list(row.params.logit_bias), dtype=torch.int64, device=logits.device)
        logits[biased] += torch.tensor(list(row.params.logit_bias.values()), device=logits.device)
    if row.barred_ids:
        logits[_ids_tensor(row.barred_ids, logits.device)] = -torch.inf


def _ids_tensor(ids: Sequence[int] | set[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(sorted(ids), dtype=torch.int64, device=device)


def _logprobs(logits: torch.Tensor, token_id: int, num_top: int | None) -> Logprobs | None:
    if num_top is None:
        return None
    logprobs = logits.log_softmax(dim=-1)
    values, ids = logprobs.topk(num_top) if num_top else (logprobs[:0], logprobs[:0])
    top = tuple(zip((int(i) for i in ids.tolist()), values.tolist(), strict=True))
    return Logprobs(token_id, float(logprobs[token_id]), top)
