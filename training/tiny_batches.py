"""Batches for the tiny model: token rows with a loss weight for each token.

Four streams: `repeat` (random tokens twice, often of few kinds, so that what follows depends on more than one
token; without this skill the pronoun task stays at its guessing plateau), `px` (coreference cases with
questions), `lm` (windows of documents), `chat`.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from tiny_chats import Message, make_chat
from tiny_tokenizer import BOS, IM_END, IM_START, PAD
from tiny_words import words
from tokenizers import Tokenizer
from torch import Tensor

from mneme.lab.quality.coreference import Case, Fact, make_case

VALUE_WEIGHT = 4.0
"""Of the answer's one decisive token, against 1 for the words around it."""
REVERSED_UNTIL = 0.3
"""Progress from which no question asks for the name any more: they open the way and then hold it up."""
NUM_SPECIAL = 4


class Row(NamedTuple):
    """Token ids and, for each, the weight of predicting it."""

    ids: list[int]
    weights: list[float]


class Batch(NamedTuple):
    ids: Tensor
    """int64 [rows, tokens], padded at the right"""
    weights: Tensor
    """float32 [rows, tokens], 0 where nothing is learned"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """One kind of rows in a training step, and its share in the step's loss."""

    kind: str
    num_tokens: int
    """in the batch, padding included"""
    row_tokens: int
    """at most, in one row"""
    share: float = 1.0


class RowSource:
    """Draws rows of every kind from one generator."""

    def __init__(self, tokenizer: Tokenizer, lm_tokens: np.ndarray, seed: int) -> None:
        """lm_tokens  uint16 [tokens]  all training documents, each behind a BOS."""
        self._tokenizer, self._lm_tokens = tokenizer, lm_tokens
        self._rng = random.Random(seed)
        self._ids_of = lru_cache(maxsize=100_000)(lambda text: tokenizer.encode(text, add_special_tokens=False).ids)
        self._bos = tokenizer.token_to_id(BOS)
        self._pad = tokenizer.token_to_id(PAD)
        self._word_ids = [self._ids_of(f" {word}")[0] for word in words()]
        self._all_ids = range(NUM_SPECIAL, tokenizer.get_vocab_size())
        self._makers: dict[str, Callable[[int, float], Row]] = {
            "repeat": self._repeat,
            "px": self._px,
            "lm": self._lm,
            "chat": self._chats,
        }

    def batch(self, stream: Stream, progress: float) -> Batch:
        """One batch of a stream; `progress` 0..1 sets the difficulty: longer cases, more tokens to copy."""
        rows = self._fill(stream, progress)
        row_tokens = max(len(row.ids) for row in rows)
        ids = torch.full((len(rows), row_tokens), self._pad)
        weights = torch.zeros(len(rows), row_tokens)
        for index, row in enumerate(rows):
            ids[index, : len(row.ids)] = torch.tensor(row.ids)
            weights[index, : len(row.ids)] = torch.tensor(row.weights)
        return Batch(ids, weights)

    def _fill(self, stream: Stream, progress: float) -> list[Row]:
        """Rows until the batch has its tokens; short rows come in greater number."""
        rows: list[Row] = []
        longest = 0
        while (len(rows) + 1) * longest <= stream.num_tokens:
            row = self._makers[stream.kind](stream.row_tokens, progress)
            rows.append(Row(row.ids[: stream.row_tokens], row.weights[: stream.row_tokens]))
            longest = max(longest, len(rows[-1].ids))
        return rows

    def row_of(self, pieces: list[tuple[str, float]]) -> Row:
        """A row from texts with a weight each; pieces must end where the pre-tokenizer splits anyway."""
        row = Row([self._bos], [0.0])
        for text, weight in pieces:
            ids = self._ids_of(text)
            row.ids.extend(ids)
            row.weights.extend([weight] * len(ids))
        return row

    def _repeat(self, num_tokens: int, progress: float) -> Row:
        rng = self._rng
        size = rng.randint(8, 24 + round(progress * 72))
        pool = self._all_ids if rng.random() < progress else self._word_ids
        if rng.random() < 0.6:
            pool = rng.sample(pool, rng.randint(5, 16))
        once = rng.choices(pool, k=size)
        return Row([self._bos, *once, *once], [0.0] * (size + 2) + [1.0] * (size - 1))

    def _lm(self, num_tokens: int, progress: float) -> Row:
        start = self._rng.randrange(len(self._lm_tokens) - num_tokens)
        window = self._lm_tokens[start : start + num_tokens].tolist()
        return Row(window, [0.0 if token == self._bos else 1.0 for token in window])

    def _px(self, num_tokens: int, progress: float) -> Row:
        return self.row_of(self._case_pieces(num_tokens, progress))

    def _case_pieces(self, num_tokens: int, progress: float) -> list[tuple[str, float]]:
        rng = self._rng
        case = make_case(
            rng,
            num_chunks=rng.randint(2, 2 + round(14 * progress)),
            num_sentences=rng.randint(3, 4 + round(2 * progress)),
            scene_share=rng.choice([0.0, 0.0, 0.3 * progress]),
        )
        return [(sentence, 0.0) for sentence in sentences(case)] + question_pieces(rng, case, progress)

    def _chats(self, num_tokens: int, progress: float) -> Row:
        """Conversations one after another, each behind a BOS, until the row is full."""
        row = Row([], [])
        while len(row.ids) < num_tokens:
            chat = self.row_of(chat_pieces(make_chat(self._rng)))
            row.ids.extend(chat.ids)
            row.weights.extend(chat.weights)
        return row


def sentences(case: Case) -> list[str]:
    """The case's sentences, each with its leading space; chunk boundaries are not to be seen."""
    return [f" {sentence.rstrip('.')}." for chunk in case.chunks for sentence in chunk[1:].split(". ")]


def question_pieces(rng: random.Random, case: Case, progress: float) -> list[tuple[str, float]]:
    """Up to eight short questions or four long ones, all of one form, mostly about pronoun facts; while cases are
    easy, some ask for the name."""
    pronoun = [fact for fact in case.facts if fact.kind != "explicit"]
    explicit = case.of_kind("explicit")
    pool = rng.sample(pronoun, min(6, len(pronoun))) + rng.sample(explicit, min(2, len(explicit)))
    rng.shuffle(pool)
    reversed_share = 0.35 * max(0.0, 1 - progress / REVERSED_UNTIL)
    write = _reversed if rng.random() < reversed_share else rng.choice([_statement, _question])
    return [piece for fact in pool[: 4 if write is _question else 8] for piece in write(fact)]


def _statement(fact: Fact) -> list[tuple[str, float]]:
    return [("\nSo", 0.0), (f" {fact.name} {fact.verb}", 0.0), (fact.answer, VALUE_WEIGHT), (".", 0.0)]


def _reversed(fact: Fact) -> list[tuple[str, float]]:
    """From value to name: one look-up less than the other way round, so it is learned first."""
    asked = [("\nWho", 0.0), (f" {fact.verb}", 0.0), (fact.answer, 0.0), ("?", 0.0)]
    return [*asked, (f" {fact.name}", VALUE_WEIGHT), (".", 0.0)]


def _question(fact: Fact) -> list[tuple[str, float]]:
    asked, answered = fact.question.split("\nAnswer:")
    return [(f"{asked}\nAnswer:", 0.0), (answered, 1.0), (fact.answer, VALUE_WEIGHT), (".", 1.0)]


def chat_pieces(messages: list[Message]) -> list[tuple[str, float]]:
    """The chat template's text in pieces, with weight on what the assistant says."""
    pieces = []
    for message in messages:
        weight = 1.0 if message["role"] == "assistant" else 0.0
        pieces.append((f"{IM_START}{message['role']}\n", 0.0))
        pieces += [(message["content"], weight), (IM_END, weight), ("\n", 0.0)]
    return pieces


def document_tokens(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    """uint16 [tokens]: all texts in order, each behind a BOS."""
    encodings = tokenizer.encode_batch(texts)
    return np.concatenate([np.array(encoding.ids, dtype=np.uint16) for encoding in encodings])
