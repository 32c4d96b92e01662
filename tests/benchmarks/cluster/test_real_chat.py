"""Chats about real text: the same for all servers, and what is said of their answers."""

from __future__ import annotations

import torch
from bench_real_chat import SYSTEM, Texts, lacks_of


class Characters:
    """A tokenizer that has a token for each character."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ord(character) for character in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


def test_all_servers_get_a_rounds_passages_and_every_round_has_its_own() -> None:
    texts = Texts(Characters())
    first, again, other = (texts.sessions(3, 2, 64, seed) for seed in (1, 1, 2))
    assert first == again
    said = [turn.pieces[0].text() for sessions in (first, other) for each in sessions for turn in each.turns]
    assert len(set(said)) == len(said) == 12
    assert {each.system.text() for each in (*first, *other) if each.system is not None} == {SYSTEM}


def test_a_token_lacks_what_the_best_one_has_more_and_judging_ends_with_the_answer() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [0.0, 1.0, 1.5], [3.0, 1.0, 0.0], [0.0, 1.0, 9.0]])
    assert lacks_of(logits, [1, 1, 1, 2], end=0) == [0.0, 0.5]
    assert lacks_of(logits, [2, 2, 0, 0], end=7) == [1.0, 0.0, 0.0, 9.0]
