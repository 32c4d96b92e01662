"""A code in one of several passages of real text, which a small model finds; nothing is downloaded.

The text is that of Python's language reference, as `pydoc` has it in every installation (`pydoc_data.topics`).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pydoc_data import topics
from typing import NamedTuple

_ADJECTIVES = (
    "red",
    "quiet",
    "northern",
    "early",
    "hollow",
    "silver",
    "distant",
    "narrow",
    "golden",
    "wooden",
    "frozen",
)
_NOUNS = (
    "harbor",
    "museum",
    "library",
    "station",
    "bridge",
    "garden",
    "market",
    "theater",
    "school",
    "tower",
    "castle",
)
PLACES = [f"{adjective} {noun}" for adjective in _ADJECTIVES for noun in _NOUNS]


class Hidden(NamedTuple):
    """Passages that each say the code of one place, and the place that is asked for."""

    passages: tuple[str, ...]
    place: str
    code: str


def hidden_codes(seed: int, *, num_cases: int, num_passages: int, num_words: int) -> Iterator[Hidden]:
    """Draw cases; passages of `num_words` words and a sentence, of at most `len(PLACES)` in a case."""
    drawn, text = random.Random(seed), list(_passages(num_words))
    for _ in range(num_cases):
        places = drawn.sample(PLACES, num_passages)
        codes = [str(drawn.randrange(1000, 10_000)) for _ in places]
        passages = tuple(
            _with(drawn.randrange(num_words), f"The code of the {place} is {code}.", words)
            for place, code, words in zip(places, codes, drawn.sample(text, num_passages), strict=True)
        )
        asked = drawn.randrange(num_passages)
        yield Hidden(passages, places[asked], codes[asked])


def _passages(num_words: int) -> Iterator[list[str]]:
    for name in sorted(topics.topics):
        words = topics.topics[name].split()
        for start in range(0, len(words) - num_words, num_words):
            yield words[start : start + num_words]


def _with(place: int, sentence: str, words: list[str]) -> str:
    return " ".join([*words[:place], sentence, *words[place:]])
