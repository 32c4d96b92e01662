"""What bench_truncation.py reads: held-out text of the running Python, and questions whose answers are kept.

mneme-tiny was trained on the documentation and docstrings of the standard library, but for the documents that a hash of
their names holds out (training/tiny_corpus.py); nothing is downloaded.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Tokenizer

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "replicas" / "mneme_tiny"
sys.path.insert(0, str(ROOT / "training"))

from tiny_checks import encode_ids  # noqa: E402
from tiny_coreference import px_cases  # noqa: E402
from tiny_corpus import library_documents  # noqa: E402

NUM_CHUNKS, NUM_SENTENCES = 8, 4  # of a case: the card's main layout, 0.995 with full attention


class Question(NamedTuple):
    """A session in token ids."""

    history: list[int]  # a text, then the case
    asked: list[int]
    answer: int


def load_tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


def held_out_ids(tokenizer: Tokenizer) -> list[int]:
    """All held-out documents in order, each behind a BOS, as in training."""
    documents = (document for document in library_documents() if document.held_out)
    return [token_id for document in documents for token_id in tokenizer.encode(document.text).ids]


def streams(ids: list[int], num_tokens: int) -> torch.Tensor:
    """Whole streams of so many tokens; int64 [streams, num_tokens]."""
    count = len(ids) // num_tokens
    return torch.tensor(ids[: count * num_tokens]).view(count, num_tokens)


def questions(tokenizer: Tokenizer, text: list[int], num_cases: int, num_history: int, seed: int) -> list[Question]:
    """Each history is held-out text that the case at its end makes `num_history` tokens long."""
    rng = random.Random(seed)
    found = []
    cases = px_cases(seed, num_cases=num_cases, num_chunks=NUM_CHUNKS, num_sentences=NUM_SENTENCES)
    for case, fact in cases:
        told = [token_id for chunk in case.chunks for token_id in encode_ids(tokenizer, chunk)]
        num_before = num_history - len(told) - 1
        start = rng.randrange(len(text) - num_before)
        history = [text[0], *text[start : start + num_before], *told]
        found.append(Question(history, encode_ids(tokenizer, fact.question), encode_ids(tokenizer, fact.answer)[0]))
    return found
