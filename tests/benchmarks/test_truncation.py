"""papers/truncation.py measures what it says: two ways to the same perplexity, and a naive arm that is only naive."""

from __future__ import annotations

import pytest
import torch
from papers.truncation import (
    NUM_BEFORE,
    DenseDecoder,
    engine_thoughts,
    held_out_ids,
    load_decoder,
    load_tokenizer,
    streams,
)

from mneme.replicas.model.decoder import Decoder
from mneme.replicas.model.directory import model_directory
from mneme.replicas.truncation import Truncation

WINDOW, MODEL = 96, model_directory("mneme-tiny")


@pytest.fixture(scope="module")
def texts() -> torch.Tensor:
    return streams(held_out_ids(load_tokenizer(MODEL))[: 4 * 256], 256)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    torch.set_num_threads(1)
    return load_decoder(MODEL)


@pytest.fixture(scope="module")
def dense() -> DenseDecoder:
    found = load_decoder(MODEL, DenseDecoder)
    assert isinstance(found, DenseDecoder)
    return found


@pytest.mark.parametrize("truncation", [Truncation(), Truncation(ratio=0.25, keep_first=4)])
def test_the_engine_and_dense_attention_agree(
    decoder: Decoder, dense: DenseDecoder, texts: torch.Tensor, truncation: Truncation
) -> None:
    ours = torch.tensor(engine_thoughts(decoder, texts, WINDOW - NUM_BEFORE, WINDOW, truncation))[..., 0]
    dense.begin(len(texts), WINDOW, truncation, "afresh")
    theirs = torch.tensor(dense.read(texts, WINDOW - NUM_BEFORE))[..., 0]
    assert ours.shape == (4, 256 - WINDOW + NUM_BEFORE)
    assert (ours - theirs).abs().max() <= 1e-3
    dense.begin(len(texts), WINDOW, truncation, "naive")
    naive = torch.tensor(dense.read(texts, WINDOW - NUM_BEFORE))[..., 0]
    assert (naive - theirs)[:, : NUM_BEFORE + 1].abs().max() <= 1e-3  # until the overflow it is no other
    assert (naive - theirs)[:, NUM_BEFORE + 1 :].abs().max() > 0.1


def test_recompute_reads_the_text_that_is_left(decoder: Decoder, dense: DenseDecoder, texts: torch.Tensor) -> None:
    ours = torch.tensor(engine_thoughts(decoder, texts, WINDOW - NUM_BEFORE, WINDOW, Truncation(strategy="recompute")))[
        ..., 0
    ]
    dense.begin(len(texts), WINDOW, Truncation(), "afresh")
    left = texts[:, WINDOW // 2 : WINDOW + 2]  # the first token behind the overflow is drawn from these
    theirs = torch.tensor(dense.read(left, left.shape[1] - 1))[..., 0]
    assert (ours[:, NUM_BEFORE + 1] - theirs[:, 0]).abs().max() <= 1e-3
