"""MuSiQue as CacheBlend's authors sample it: 150 questions, six passages of at most 512 tokens in a prompt.

Their file (`inputs/musique_s.json` of YaoJiayi/CacheBlend, CC-BY-4.0) is no part of the tree: MNEME_MUSIQUE names it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from mneme.lab.quality.tasks import Case

FILE = os.environ.get("MNEME_MUSIQUE")
NUM_PASSAGES, NUM_TOKENS = 6, 512


def cases_of(tokenizer: Any, first: int, count: int) -> list[Case]:
    """Cases from the file's `first` on; passages with an answer in them are among the six."""
    assert FILE is not None
    cases = []
    for asked in json.loads(Path(FILE).read_text())[first : first + count]:
        texts = [each["text"] for each in asked["ctxs"]]
        telling = [text for text in texts if any(answer.lower() in text.lower() for answer in asked["answers"])]
        chosen = [text for text in texts if text in {*telling[:NUM_PASSAGES]}]
        chosen += [text for text in texts if text not in chosen][: NUM_PASSAGES - len(chosen)]
        passages = tuple({"text": _cut(tokenizer, text)} for text in texts if text in chosen)
        cases.append(Case(asked["question"], passages, tuple(asked["answers"])))
    return cases


def _cut(tokenizer: Any, text: str) -> str:
    """The beginning of a text, of so many tokens."""
    ids = tokenizer.encode(text)
    return text if len(ids) <= NUM_TOKENS else str(tokenizer.decode(ids[:NUM_TOKENS], skip_special_tokens=True))
