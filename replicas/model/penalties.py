"""Biases and penalties of a whole batch: a few operations on its logits, however many rows ask for them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

if TYPE_CHECKING:
    from mneme.replicas.model.sampler import SampleRow

# A row's number, tokens, and a value for all or for each of them.
_Edit = tuple[int, Sequence[int] | npt.NDArray[np.int64], npt.ArrayLike]


class _Edits(NamedTuple):
    at: torch.Tensor  # int64, places in all logits
    value: torch.Tensor  # float32, parallel


def edit_logits(logits: torch.Tensor, rows: Sequence[SampleRow]) -> None:
    """Biases, barred tokens, repetition penalty, presence and frequency penalty, in this order.

    logits  float32 [num_rows, vocab_size], contiguous; changed in place
    """
    if not any(row.params.logit_bias or row.barred_ids or row.seen or row.drawn for row in rows):
        return
    flat = logits.view(-1)
    biases = ((i, list(row.params.logit_bias), list(row.params.logit_bias.values())) for i, row in enumerate(rows))
    if edits := _on_device(logits, biases):
        flat[edits.at] += edits.value
    if edits := _on_device(logits, ((i, row.barred_ids, -np.inf) for i, row in enumerate(rows))):
        flat[edits.at] = edits.value
    seen = ((i, row.seen.ids, row.params.repetition_penalty) for i, row in enumerate(rows) if row.seen is not None)
    if edits := _on_device(logits, seen):
        values = flat[edits.at]
        flat[edits.at] = torch.where(values > 0, values / edits.value, values * edits.value)
    drawn = ((i, row.drawn.ids, _lowered_by(row)) for i, row in enumerate(rows) if row.drawn is not None)
    if edits := _on_device(logits, drawn):
        flat[edits.at] -= edits.value


def _lowered_by(row: SampleRow) -> npt.NDArray[np.float64]:
    """Parallel to the tokens of `row.drawn`."""
    assert row.drawn is not None
    lowered = row.params.frequency_penalty * row.drawn.counts + row.params.presence_penalty
    return lowered.astype(np.float64)


def _on_device(logits: torch.Tensor, edits: Iterable[_Edit]) -> _Edits | None:
    """All edits of one kind together; None if there are none."""
    ids, values = [], []
    for row, tokens, value in edits:
        if len(tokens):
            ids.append(np.asarray(tokens, np.int64) + row * logits.shape[1])
            values.append(np.broadcast_to(np.asarray(value, np.float32), len(tokens)))
    if not ids:
        return None
    at, value = torch.from_numpy(np.concatenate(ids)), torch.from_numpy(np.concatenate(values))
    return _Edits(at.to(logits.device), value.to(logits.device))
