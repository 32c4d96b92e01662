"""Chats about real text: the same for all servers."""

from __future__ import annotations

from bench_real_chat import SYSTEM, Texts


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
