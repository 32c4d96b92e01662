"""Reads and makes tasks: questions about passages, and the answers that count as right.

A file has one JSON object a line, as dumps of MuSiQue, 2WikiMQA and HotpotQA have them or are easily brought to:

    {"question": "...", "passages": [{"title": "...", "text": "..."}, "..."], "answers": ["..."]}

`paragraphs` and `context` are other names of `passages`, `answer` (a text) and `answer_aliases` of `answers`; a passage
may be a text, a mapping (`paragraph_text` for `text`), or HotpotQA's pair of a title and sentences. Other fields are
ignored.
"""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from mneme.errors import ConfigError, shown
from mneme.lab.quality.coreference import px_cases
from mneme.lab.quality.retrieval import hidden_codes
from mneme.replicas.documents import MAX_DOCUMENTS

GENERATED = {"coreference": "4x8,8x4,16x2", "retrieval": "4x60,8x30"}  # the layouts that each has if none are said
SEED = 1234
_MAX_DOCUMENTS, _MAX_LENGTH = 64, 500  # of a layout
_PASSAGES = ("passages", "paragraphs", "context")
_INSTRUCTION = "Answer the question from these passages, with a few words and nothing else.\n\n"


class Case(NamedTuple):
    """A question about passages."""

    question: str
    passages: tuple[Mapping[str, str], ...]  # {"text", "title"?}
    answers: tuple[str, ...]


class Task(NamedTuple):
    """Cases of one kind."""

    name: str  # what a report calls it
    cases_by_layout: Mapping[str, Sequence[Case]]
    is_chat: bool = True  # asked through the chat template, if the model has one
    instruction: str = _INSTRUCTION  # what stands before the passages
    between: str = "\n\n"  # passages
    question: str = "\n\nQuestion: {}\nAnswer:"  # stands behind them
    end: str = "\n"  # of an answer that is no chat

    def parts(self, case: Case) -> list[dict[str, str]]:
        """Return the parts of a prompt."""
        parts = [{"type": "text", "text": self.instruction}] if self.instruction else []
        for passage in case.passages:
            parts += [{"type": "document", **passage}, {"type": "text", "text": self.between}]
        return [*parts[:-1], {"type": "text", "text": self.question.format(case.question)}]


def read_task(given: str, num_cases: int) -> Task:
    """Return the task of a file, or one that is made: `coreference[:4x8,8x4,16x2]` (documents x sentences) or
    `retrieval[:4x60,8x30]` (documents x words).

    num_cases  at most, of each layout

    Raises `ConfigError`, which names the file's line.
    """
    kind, _, layouts = given.partition(":")
    if kind in GENERATED and not Path(given).exists():
        return _generated(kind, layouts or GENERATED[kind], num_cases)
    path = Path(given)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"task: cannot read {given}: {error.strerror}") from None
    cases = []
    for number, line in enumerate(content.split(b"\n"), 1):
        if line.strip():
            try:
                cases.append(_case(line))
            except (ConfigError, ValueError, RecursionError) as error:
                raise ConfigError(f"{given}:{number}: {error}") from None
    if not cases:
        raise ConfigError(f"{given}: has no line")
    name = f"{path.name}, sha256 {sha256(content).hexdigest()}, {min(num_cases, len(cases))} cases"
    return Task(name, {path.stem: cases[:num_cases]})


def _generated(kind: str, layouts: str, num_cases: int) -> Task:
    make = _coreference if kind == "coreference" else _retrieval
    by_layout = {}
    for layout in layouts.split(","):
        found = re.fullmatch(r"(\d{1,2})x(\d{1,3})", layout)
        num_documents, length = map(int, found.groups()) if found else (0, 0)
        if not (2 <= num_documents <= _MAX_DOCUMENTS and 1 <= length <= _MAX_LENGTH):
            rule = f"must be documents x length, such as {GENERATED[kind]}; 2 to {_MAX_DOCUMENTS} documents"
            raise ConfigError(f"task: {rule} (got {shown(layout)})")
        by_layout[layout] = make(num_cases, num_documents, length)
    name = f"{kind}:{layouts}, {num_cases} cases each, seed {SEED}"
    if kind == "coreference":
        return Task(name, by_layout, is_chat=False, instruction="", between="", question="{}\nAnswer:")
    name += f", text of Python {platform.python_version()}"
    return Task(name, by_layout, is_chat=False, instruction="", question="\n\n{}", end=".")


def _coreference(num_cases: int, num_documents: int, num_sentences: int) -> list[Case]:
    """Return what mneme-tiny was trained for; answers are whole sentences, so several tokens count."""
    return [
        Case(
            fact.question.rpartition("\nAnswer:")[0],
            tuple({"text": chunk} for chunk in case.chunks),
            (f"{fact.name} {fact.verb}{fact.answer}",),
        )
        for case, fact in px_cases(SEED, num_cases=num_cases, num_chunks=num_documents, num_sentences=num_sentences)
    ]


def _retrieval(num_cases: int, num_documents: int, num_words: int) -> list[Case]:
    """Return sentences to go on with, as a model that was not taught to chat can, too."""
    drawn = hidden_codes(SEED, num_cases=num_cases, num_passages=num_documents, num_words=num_words)
    return [
        Case(f"The code of the {case.place} is", tuple({"text": each} for each in case.passages), (case.code,))
        for case in drawn
    ]


def _case(line: bytes) -> Case:
    fields = json.loads(line)
    if not isinstance(fields, Mapping):
        raise ConfigError("must be a JSON object")
    question = fields.get("question")
    if not isinstance(question, str) or not question.strip():
        raise ConfigError(f"question: must be a text (got {shown(question)})")
    name = next((name for name in _PASSAGES if name in fields), _PASSAGES[0])
    passages = fields.get(name)
    if not isinstance(passages, list) or not 1 <= len(passages) <= MAX_DOCUMENTS:
        raise ConfigError(f"{name}: must be a list of 1 to {MAX_DOCUMENTS} passages (got {shown(passages)})")
    answers = fields.get("answers", [fields.get("answer"), *_listed(fields.get("answer_aliases"))])
    if not isinstance(answers, list) or not answers or not all(isinstance(each, str) and each for each in answers):
        raise ConfigError(f"answers: must be a list of texts that are not empty (got {shown(answers)})")
    return Case(question, tuple(_passage(each, f"{name}[{i}]") for i, each in enumerate(passages)), tuple(answers))


def _listed(given: Any) -> list[Any]:
    return given if isinstance(given, list) else []


def _passage(given: Any, where: str) -> Mapping[str, str]:
    if isinstance(given, str):
        given = {"text": given}
    elif isinstance(given, list) and len(given) == 2:
        given = {"title": given[0], "text": " ".join(map(str, _listed(given[1]))) or given[1]}
    if isinstance(given, Mapping):
        text, title = given.get("text", given.get("paragraph_text")), given.get("title") or ""
        if isinstance(text, str) and text.strip() and isinstance(title, str):
            return {"text": text, "title": title} if title else {"text": text}
    raise ConfigError(f'{where}: must be a text, or {{"text": ..., "title"?: ...}} (got {shown(given)})')
