"""bench_truncation.py measures what it says: two ways to the same perplexity, and a naive arm that is only naive."""

from __future__ import annotations

import math

import pytest
import torch
from bench_truncation import (
    NUM_BEFORE,
    NUM_SPARE,
    Arm,
    DenseDecoder,
    Heard,
    Thought,
    compared,
    held_out_ids,
    load_decoder,
    load_tokenizer,
    mean_nats,
    questions,
    spent,
    streams,
)

from mneme.replicas.model.config import model_directory
from mneme.replicas.model.decoder import Decoder
from mneme.replicas.request import PromptUsage
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


def nats_of(thoughts: list[list[Thought]]) -> torch.Tensor:
    return torch.tensor([[thought.nats for thought in own] for own in thoughts])


def engine_nats(decoder: Decoder, texts: torch.Tensor, window: int, truncation: Truncation) -> torch.Tensor:
    num_prompt = WINDOW - NUM_BEFORE
    prompts = {str(index): text[:num_prompt].tolist() for index, text in enumerate(texts)}
    rest = {str(index): text[num_prompt:].tolist() for index, text in enumerate(texts)}
    heard = Arm(decoder, window, truncation, len(texts)).turns(prompts, rest)
    return nats_of([each.thoughts for each in heard])


@pytest.mark.parametrize("truncation", [Truncation(), Truncation(ratio=0.25, keep_first=4)])
def test_the_engine_and_dense_attention_agree(
    decoder: Decoder, dense: DenseDecoder, texts: torch.Tensor, truncation: Truncation
) -> None:
    ours = engine_nats(decoder, texts, WINDOW, truncation)
    dense.begin(len(texts), WINDOW, truncation, "afresh")
    theirs = nats_of(dense.read(texts, WINDOW - NUM_BEFORE))
    assert ours.shape == (4, 256 - WINDOW + NUM_BEFORE)
    assert (ours - theirs).abs().max() <= 1e-3
    dense.begin(len(texts), WINDOW, truncation, "naive")
    naive = nats_of(dense.read(texts, WINDOW - NUM_BEFORE))
    assert (naive - theirs)[:, : NUM_BEFORE + 1].abs().max() <= 1e-3  # until the overflow it is no other
    assert (naive - theirs)[:, NUM_BEFORE + 1 :].abs().max() > 0.1


def test_recompute_reads_the_text_that_is_left(decoder: Decoder, dense: DenseDecoder, texts: torch.Tensor) -> None:
    ours = engine_nats(decoder, texts, WINDOW, Truncation(strategy="recompute"))
    dense.begin(len(texts), WINDOW, Truncation(), "afresh")
    left = texts[:, WINDOW // 2 : WINDOW + 2]  # the first token behind the overflow is drawn from these
    theirs = nats_of(dense.read(left, left.shape[1] - 1))
    assert (ours[:, NUM_BEFORE + 1] - theirs[:, 0]).abs().max() <= 1e-3


def test_a_story_ends_its_history_and_its_answer_is_one_token() -> None:
    tokenizer = load_tokenizer(MODEL)
    text = held_out_ids(tokenizer)
    for asked in questions(tokenizer, text, 10, WINDOW * 2 - NUM_SPARE, seed=3):
        assert len(asked.history) == WINDOW * 2 - NUM_SPARE
        assert len(asked.asked) > NUM_SPARE
        assert tokenizer.decode([asked.answer]) in tokenizer.decode(asked.history[-(WINDOW + 32) :])


def test_ratios_are_of_the_same_texts() -> None:
    found = compared([2.0, 4.0], [1.0, 3.0])
    assert found["perplexity"] == pytest.approx(math.exp(3.0))
    assert found["over TT"] == pytest.approx(math.e)
    assert found["se"] == 0.0
    thoughts = [Thought(100.0, 0)] * (NUM_BEFORE + 1) + [Thought(1.0, 0), Thought(3.0, 0)]
    assert mean_nats(thoughts, WINDOW) == 2.0


def test_turns_that_truncate_are_told_from_others() -> None:
    def heard(ttft_s: float, cached: int, truncated: int) -> Heard:
        return Heard([], PromptUsage(163, cached, truncated_tokens=truncated), ttft_s)

    row = spent([heard(9.0, 0, 0), heard(0.002, 100, 0), heard(0.004, 0, 50), heard(0.002, 50, 50)])
    expected = {"turns": 3, "truncations": 1, "hit rate": 0.5, "ttft ms": 2.0, "truncating ms": 4.0}
    assert row == pytest.approx(expected)
