"""Measures of a tiny model: the coreference task under two ways of encoding, document loss, chat answers."""

import random
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from tiny_chats import SKILLS, Message, messages_of
from tiny_model import TinyLlama
from tiny_tokenizer import BOS, IM_END, render
from tokenizers import Tokenizer
from torch import Tensor

from mneme.lab.quality.coreference import Case, Fact


class Encoded(NamedTuple):
    """A case and its question as tokens."""

    ids: Tensor
    """int64 [tokens]"""
    block: Tensor
    """int64 [tokens]  0: BOS, 1..: chunk, -1: question"""
    answer: int


def encode_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


def encode_case(tokenizer: Tokenizer, case: Case, fact: Fact) -> Encoded:
    """BOS, every chunk tokenized on its own, the question."""
    parts = [[tokenizer.token_to_id(BOS)], *(encode_ids(tokenizer, chunk) for chunk in case.chunks)]
    blocks = [number for number, part in enumerate(parts) for _ in part]
    question = encode_ids(tokenizer, fact.question)
    ids = [token for part in parts for token in part] + question
    return Encoded(
        torch.tensor(ids), torch.tensor(blocks + [-1] * len(question)), encode_ids(tokenizer, fact.answer)[0]
    )


def reuse_mask(block: Tensor) -> Tensor:
    """bool [tokens, tokens]: causal; a context token sees its own chunk only, the question sees all."""
    causal = torch.ones(len(block), len(block), dtype=torch.bool).tril()
    same = block[:, None] == block[None, :]
    return causal & (same | (block == -1)[:, None])


@torch.inference_mode()
def coreference_accuracy(
    model: TinyLlama, tokenizer: Tokenizer, cases: Iterable[tuple[Case, Fact]], *, reuse: bool
) -> float:
    """Share of questions whose answer token is the most likely one; `reuse` encodes chunks independently."""
    hits = []
    for case, fact in cases:
        ids, block, answer = encode_case(tokenizer, case, fact)
        hidden = model.hidden(ids[None], reuse_mask(block) if reuse else None)
        hits.append(model.logits(hidden[0, -1]).argmax().item() == answer)
    return sum(hits) / len(hits)


@torch.inference_mode()
def document_nats(
    model: TinyLlama, tokenizer: Tokenizer, texts: Iterable[str], *, window: int, max_tokens: int
) -> tuple[float, int, int]:
    """Summed nats, predicted tokens and UTF-8 bytes over windows that start at a document's beginning."""
    nats, num_tokens, num_bytes = 0.0, 0, 0
    for text in texts:
        if num_tokens >= max_tokens:
            break
        ids = torch.tensor(tokenizer.encode(text).ids[:window])
        logits = model.logits(model.hidden(ids[None, :-1])[0])
        nats += F.cross_entropy(logits, ids[1:], reduction="sum").item()
        num_tokens += len(ids) - 1
        num_bytes += len(tokenizer.decode(ids[1:].tolist(), skip_special_tokens=False).encode())
    return nats, num_tokens, num_bytes


@torch.inference_mode()
def answer_of(model: TinyLlama, tokenizer: Tokenizer, messages: list[Message], *, limit: int = 64) -> str:
    """Greedy answer; with its <|im_end|> if one came within `limit` tokens."""
    ids = encode_ids(tokenizer, render(messages, generate=True))
    start = len(ids)
    while len(ids) - start < limit and ids[-1] != tokenizer.token_to_id(IM_END):
        hidden = model.hidden(torch.tensor(ids)[None])
        ids.append(int(model.logits(hidden[0, -1]).argmax()))
    return tokenizer.decode(ids[start:], skip_special_tokens=False)


def chat_accuracy(model: TinyLlama, tokenizer: Tokenizer, *, seed: int, num_chats: int) -> dict[str, dict[str, float]]:
    """By skill: share of conversations whose last answer is exact, <|im_end|> included, and of the best guess.

    The guess is the most frequent answer of the same conversations, given to all of them.
    """
    figures_by_skill = {}
    for skill, make in SKILLS.items():
        rng = random.Random(f"{seed}/{skill}")
        chats = [messages_of(make(rng)) for _ in range(num_chats)]
        wanted = [chat[-1]["content"] for chat in chats]
        hits = [
            answer_of(model, tokenizer, chat[:-1]) == answer + IM_END
            for chat, answer in zip(chats, wanted, strict=True)
        ]
        figures_by_skill[skill] = {
            "exact": sum(hits) / num_chats,
            "guess": Counter(wanted).most_common(1)[0][1] / num_chats,
        }
    return figures_by_skill


def unigram_perplexity(tokenizer: Tokenizer, known: Iterable[str], asked: Iterable[str]) -> float:
    """Measure a reader who knows how often each token occurs in `known`, and no more (add-one smoothing)."""
    counts = torch.ones(tokenizer.get_vocab_size(), dtype=torch.float64)
    for text in known:
        counts += torch.bincount(torch.tensor(encode_ids(tokenizer, text)), minlength=len(counts))
    ids = torch.tensor([token for text in asked for token in encode_ids(tokenizer, text)])
    return (-(counts / counts.sum()).log()[ids].mean()).exp().item()
