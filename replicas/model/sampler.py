"""Turns logits into tokens: penalties, biases, truncation and the draw, each row on its own.

Order as in vLLM: log-probabilities are read first, from what the model said; then grammars' masks, `logit_bias` and
tokens barred by `min_tokens`; repetition, presence and frequency penalties; temperature; min-p; top-k; top-p of what is
left; a draw.

The draw inverts the cumulative distribution at a number that is a function of (seed, choice, output position)
computed on the host, so it neither depends on the batch nor on the device.

On a GPU nothing here waits: what is drawn stays on the device, where the next step may read it (`Draws.tokens`), and
comes to the host beside that step (`Draws.wait`).
"""

from __future__ import annotations

import hashlib
import itertools
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from mneme.kernels.ops import draw_tokens, draw_whole, mask_logits
from mneme.kernels.torch.ops import invert
from mneme.kernels.upload import download, upload
from mneme.replicas.model.draws import GREEDY, Sampled, SampleRow
from mneme.replicas.request import GREEDY_BELOW, Logprobs, PromptLogprobs, Weighing

_MASK_64 = (1 << 64) - 1
_NUM_CANDIDATES = 256
_new_sampled: Callable[[Iterable[Any]], Sampled] = partial(tuple.__new__, Sampled)


_Asking = tuple[int, SampleRow]  # a row that asks for more than the best token, and its number
# A row's number, tokens, and a value for all or for each of them.
_Edit = tuple[int, Sequence[int] | npt.NDArray[np.int64], npt.ArrayLike]


class _Edits(NamedTuple):
    at: torch.Tensor  # int64, places in all logits
    value: torch.Tensor  # float32, parallel


def uniform(seed: int, choice_index: int, position: int) -> float:
    """A number in [0, 1), uniform over its three counters."""
    counters = struct.pack("<QQQ", seed & _MASK_64, choice_index, position)
    digest = hashlib.blake2b(counters, digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / (1 << 53)


@dataclass(slots=True, kw_only=True)
class _RowLogprobs:
    """Holds what the model said of rows that want log-probabilities, on its way to the host."""

    rows: list[int]
    num_top: list[int]  # wanted by each
    own: torch.Tensor  # float32 [rows, 1], of the token that was drawn
    top: torch.Tensor  # float32 [rows, most], the largest first
    top_ids: torch.Tensor  # int64 [rows, most]


class TensorDraws:
    """`Draws` of a device: on CUDA they come to the host beside what is launched behind them."""

    def __init__(self, tokens: torch.Tensor, told: _RowLogprobs | None) -> None:
        """
        tokens  int32 [rows], on the logits' device; -1 where nothing could be drawn
        """
        self.tokens = tokens
        self._told = told
        self._token_ids = download(tokens)
        self._arrived: torch.cuda.Event | None = None
        if tokens.is_cuda:  # who waits sleeps: other threads have better use for the processor
            self._arrived = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._arrived.record(torch.cuda.current_stream(tokens.device))

    def __len__(self) -> int:
        return len(self.tokens)

    def wait(self) -> list[Sampled]:
        """Return what was drawn, in the order of the rows, once it is on the host."""
        if self._arrived is not None:
            self._arrived.synchronize()
        token_ids = self._token_ids.tolist()
        # Without the constructor of named tuples, which is Python.
        sampled = list(map(_new_sampled, zip(token_ids, itertools.repeat(None), strict=False)))
        if min(token_ids, default=0) < 0:
            both = zip(token_ids, sampled, strict=True)
            sampled = [Sampled(None, None) if token_id < 0 else each for token_id, each in both]
        told = self._told
        if told is not None:
            values = zip(told.num_top, told.own[:, 0].tolist(), told.top_ids.tolist(), told.top.tolist(), strict=True)
            for index, (most, own, ids, best) in zip(told.rows, values, strict=True):
                token_id = sampled[index].token_id
                if token_id is not None:
                    logprobs = Logprobs(token_id, own, tuple(zip(ids[:most], best, strict=False)))
                    sampled[index] = Sampled(token_id, logprobs)
        return sampled


@torch.inference_mode()
def sample(logits: torch.Tensor, rows: Sequence[SampleRow]) -> TensorDraws:
    """Draw one token per row. On a GPU this launches the draws and waits for nothing.

    logits  float32 [num_rows, vocab_size]; changed in place
    """
    asking = [each for each in enumerate(rows) if each[1] is not GREEDY]
    told = [index for index, row in asking if row.params.logprobs is not None]
    at = upload(np.array(told, np.int64), logits.device) if told else None
    raw = None if at is None else logits[at]
    _edit_logits(logits, asking)
    tokens = _draw_by_kernel(logits, rows) if logits.is_cuda else None
    if tokens is None:
        tokens = upload(np.array(_draw(logits, asking), np.int32), logits.device)
    if raw is None or at is None:
        return TensorDraws(tokens, None)
    return TensorDraws(
        tokens, _row_logprobs(raw, tokens[at], told, [rows[index].params.logprobs or 0 for index in told])
    )


def _edit_logits(logits: torch.Tensor, asking: Sequence[_Asking]) -> None:
    """Apply masks, biases, barred tokens, repetition penalty, presence and frequency penalty to a batch, in this order.

    A few operations on all logits, however many rows ask for one.

    logits  float32 [num_rows, vocab_size], contiguous; changed in place
    """
    _mask_logits(logits, asking)
    if not any(row.params.logit_bias or row.barred_ids or row.seen or row.drawn for _, row in asking):
        return
    flat = logits.view(-1)
    biases = ((i, list(row.params.logit_bias), list(row.params.logit_bias.values())) for i, row in asking)
    if edits := _on_device(logits, biases):
        flat[edits.at] += edits.value
    if edits := _on_device(logits, ((i, row.barred_ids, -np.inf) for i, row in asking)):
        flat[edits.at] = edits.value
    seen = ((i, row.seen.ids, row.params.weighing.repetition_penalty) for i, row in asking if row.seen is not None)
    if edits := _on_device(logits, seen):
        values = flat[edits.at]
        flat[edits.at] = torch.where(values > 0, values / edits.value, values * edits.value)
    drawn = ((i, row.drawn.ids, _lowered_by(row)) for i, row in asking if row.drawn is not None)
    if edits := _on_device(logits, drawn):
        flat[edits.at] -= edits.value


def _mask_logits(logits: torch.Tensor, asking: Sequence[_Asking]) -> None:
    """Set the logits of what rows' masks leave out to -inf."""
    masks = {index: row.mask for index, row in asking if row.mask is not None}
    if not masks:
        return
    free = np.full_like(next(iter(masks.values())), -1)
    bits = np.concatenate([masks.get(index, free) for index in range(len(logits))]).reshape(len(logits), -1)
    mask_logits(logits, upload(bits, logits.device))


def _lowered_by(row: SampleRow) -> npt.NDArray[np.float64]:
    """Return the penalties of the tokens of `row.drawn`, parallel to them."""
    assert row.drawn is not None
    lowered = row.params.frequency_penalty * row.drawn.counts + row.params.presence_penalty
    return lowered.astype(np.float64)


def _on_device(logits: torch.Tensor, edits: Iterable[_Edit]) -> _Edits | None:
    """Gather all edits of one kind; None if there are none."""
    ids, values = [], []
    for row, tokens, value in edits:
        if len(tokens):
            ids.append(np.asarray(tokens, np.int64) + row * logits.shape[1])
            values.append(np.broadcast_to(np.asarray(value, np.float32), len(tokens)))
    if not ids:
        return None
    return _Edits(upload(np.concatenate(ids), logits.device), upload(np.concatenate(values), logits.device))


def _draw_by_kernel(logits: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor | None:
    """Draw as `_draw` does, up to rounding: int32 [rows]; None if the logits' device has no kernel for it."""
    weighings = [row.params.weighing for row in rows]
    temperatures = _temperatures(rows)
    return draw_tokens(
        logits,
        temperature=temperatures,
        top_k=[each.top_k for each in weighings],
        top_p=[each.top_p for each in weighings],
        min_p=[each.min_p for each in weighings],
        uniform=_numbers(rows, temperatures),
    )


def _draw(logits: torch.Tensor, asking: Sequence[_Asking]) -> list[int]:
    """Draw a token of each row; -1 where the best logit is not finite: a NaN, or everything is barred."""
    temperatures, numbers = [0.0] * len(logits), [0.0] * len(logits)
    row_by_index = {}  # of those that do not draw from the whole vocabulary
    for index, row in asking:
        if row.params.weighing.temperature < GREEDY_BELOW:
            continue
        if _is_truncated(row.params.weighing):
            row_by_index[index] = row
        else:
            temperatures[index] = row.params.weighing.temperature
            numbers[index] = uniform(row.seed, row.choice_index, row.position)
    token_ids = draw_whole(logits, temperatures, numbers)
    cut = [index for index in row_by_index if token_ids[index] >= 0]
    if cut:  # each row by its own parameters, not the others'
        for index, token_id in zip(cut, _draw_truncated(logits[cut], [row_by_index[i] for i in cut]), strict=True):
            token_ids[index] = token_id
    return token_ids


def _temperatures(rows: Sequence[SampleRow]) -> list[float]:
    """0 is greedy."""
    temperatures = (row.params.weighing.temperature for row in rows)
    return [temperature if temperature >= GREEDY_BELOW else 0.0 for temperature in temperatures]


def _draw_truncated(logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[int]:
    """Draw from the most likely tokens that min-p, top-k and top-p leave; logits float32 [num_rows, vocab_size].

    Few tokens are left as a rule, so the best `_NUM_CANDIDATES` are looked at first; rows where that may not be all of
    them take the whole vocabulary, which has to be sorted.
    """
    scaled = logits / _column([row.params.weighing.temperature for row in rows], logits)
    token_ids, is_exact = _draw_among(scaled, rows, min(_NUM_CANDIDATES, scaled.shape[-1]))
    rest = [index for index, exact in enumerate(is_exact) if not exact]
    if rest:
        redrawn, _ = _draw_among(scaled[rest], [rows[index] for index in rest], scaled.shape[-1])
        for index, token_id in zip(rest, redrawn, strict=True):
            token_ids[index] = token_id
    return token_ids


def _draw_among(scaled: torch.Tensor, rows: Sequence[SampleRow], count: int) -> tuple[list[int], list[bool]]:
    """Draw from each row's `count` best tokens; also says whether no others could have been drawn."""
    values, order = _best_first(scaled, count)
    probs = (values - scaled.logsumexp(dim=-1, keepdim=True)).exp_()
    weighings = [row.params.weighing for row in rows]
    top_k = _column([each.top_k if each.top_k > 0 else scaled.shape[-1] for each in weighings], scaled)
    min_p = _column([each.min_p for each in weighings], scaled)
    kept = (torch.arange(count, device=scaled.device) < top_k) & (probs >= min_p * probs[:, :1])
    kept_probs = probs * kept
    is_whole = _column([each.top_k <= 0 and each.min_p == 0.0 for each in weighings], scaled) > 0
    weights = kept_probs / kept_probs.sum(dim=-1, keepdim=True).where(~is_whole, 1.0)
    weights *= weights.cumsum(dim=-1) - weights < _column([each.top_p for each in weighings], scaled)
    numbers = [uniform(row.seed, row.choice_index, row.position) for row in rows]
    token_ids: list[int] = order.gather(-1, invert(weights, numbers)[:, None])[:, 0].tolist()
    if count == scaled.shape[-1]:
        return token_ids, [True] * len(rows)
    # All that is left must stand before the candidates' end, and not be as likely as the last of them: among equals
    # the order of the vocabulary decides, and candidates are some of them.
    last = values.where(weights > 0, torch.inf).amin(dim=-1)
    is_exact = (weights[:, -1] == 0) & (is_whole[:, 0] | ~kept[:, -1]) & (last > values[:, -1])
    return token_ids, is_exact.tolist()


def _best_first(scaled: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sort the `count` largest logits of each row and their tokens, equal ones in the order of the vocabulary."""
    if count == scaled.shape[-1]:
        return scaled.sort(dim=-1, descending=True, stable=True)
    order = scaled.topk(count, sorted=False).indices.sort(dim=-1).values
    values, rank = scaled.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    return values, order.gather(-1, rank)


def _numbers(rows: Sequence[SampleRow], temperatures: Sequence[float]) -> list[float]:
    """Return where each row's distribution is inverted; a greedy row needs no number."""
    return [
        uniform(row.seed, row.choice_index, row.position) if temperature else 0.0
        for row, temperature in zip(rows, temperatures, strict=True)
    ]


def _is_truncated(weighing: Weighing) -> bool:
    return weighing.top_k > 0 or weighing.top_p < 1.0 or weighing.min_p > 0.0


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, device=like.device)[:, None]


def _row_logprobs(raw: torch.Tensor, tokens: torch.Tensor, told: list[int], num_top: list[int]) -> _RowLogprobs:
    """Send for what the model said of some rows before anything was edited.

    raw     float32 [rows, vocab_size]
    tokens  int32 [rows], what was drawn of them
    told    their indices in the step
    num_top  how many of the most likely tokens each wants
    """
    logprobs = raw.log_softmax(dim=-1)
    top, top_ids = logprobs.topk(max(num_top))
    own = logprobs.gather(-1, tokens.clamp(min=0).long()[:, None])
    return _RowLogprobs(rows=told, num_top=num_top, own=download(own), top=download(top), top_ids=download(top_ids))


@torch.inference_mode()
def prompt_logprobs(logits: torch.Tensor, token_ids: Sequence[int], num_top: int) -> PromptLogprobs:
    """Return what the model says of given tokens.

    logits  float32 [rows, vocab_size]; of each row, the distribution of its token
    """
    logprobs = logits.log_softmax(dim=-1)
    own = logprobs.gather(-1, torch.tensor(token_ids, device=logits.device)[:, None])
    ranks = (logprobs > own).sum(dim=-1) + 1
    top, top_ids = logprobs.topk(num_top)
    return PromptLogprobs(
        np.array(token_ids, np.int32),
        own[:, 0].cpu().numpy(),
        ranks.int().cpu().numpy(),
        top_ids.int().cpu().numpy(),
        top.cpu().numpy(),
    )
