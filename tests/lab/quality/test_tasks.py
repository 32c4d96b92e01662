"""Tasks from files and generated ones, and the words that a bad line is refused with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mneme.errors import ConfigError
from mneme.lab.quality.tasks import Case, read_task

GOOD = {"question": "Who?", "passages": ["It was Ann."], "answers": ["Ann"]}


def written(folder: Path, *lines: Any) -> str:
    path = folder / "task.jsonl"
    path.write_bytes(b"\n".join(each if isinstance(each, bytes) else json.dumps(each).encode() for each in lines))
    return str(path)


def test_dumps_of_several_layouts_say_the_same(tmp_path: Path) -> None:
    passages = ({"text": "It was Ann. She won.", "title": "Ann"}, {"text": "It was cold."})
    musique = {
        "id": 7,
        "question": "Who?",
        "paragraphs": [{"idx": 0, "title": "Ann", "paragraph_text": "It was Ann. She won."}, "It was cold."],
        "answer": "Ann",
        "answer_aliases": ["Anna"],
    }
    hotpot = {
        "question": "Who?",
        "context": [["Ann", ["It was Ann.", "She won."]], ["", "It was cold."]],
        "answer": "Ann",
    }
    ours = {"question": "Who?", "passages": passages, "answers": ["Ann", "Anna"]}
    task = read_task(written(tmp_path, musique, b"", hotpot, ours, ours), 3)
    expected = Case("Who?", passages, ("Ann", "Anna"))
    assert task.cases_by_layout == {"task": [expected, expected._replace(answers=("Ann",)), expected]}
    parts = task.parts(expected)
    assert [part["text"] for part in parts if part["type"] == "document"] == ["It was Ann. She won.", "It was cold."]
    assert parts[-1]["text"].endswith("Question: Who?\nAnswer:")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"{", "Expecting"),
        (b"\xff", "utf-8"),
        (b"[" * 100_000, "recursion"),
        ([GOOD], "object"),
        (GOOD | {"question": " "}, "question"),
        (GOOD | {"passages": []}, "passages"),
        (GOOD | {"passages": ["a", ""]}, r"passages\[1\]"),
        (GOOD | {"passages": [{"title": "a"}]}, r"passages\[0\]"),
        (GOOD | {"passages": ["a"] * 1025}, "1024"),
        (GOOD | {"answers": []}, "answers"),
        (GOOD | {"answers": ["a", 1]}, "answers"),
        ({"question": "Who?", "passages": ["a"]}, "answers"),
    ],
)
def test_a_bad_line_is_refused_by_its_number(line: Any, said: str, tmp_path: Path) -> None:
    path = written(tmp_path, GOOD, b"", line)
    with pytest.raises(ConfigError, match=f"(?s)task.jsonl:3: .*{said}"):
        read_task(path, 10)


def test_a_file_without_cases_or_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no line"):
        read_task(written(tmp_path), 10)
    with pytest.raises(ConfigError, match="cannot read"):
        read_task(str(tmp_path / "none.jsonl"), 10)
    with pytest.raises(ConfigError, match="cannot read"):
        read_task(str(tmp_path), 10)


def test_generated_cases_have_the_layouts_asked_for_and_are_the_same_each_time() -> None:
    task = read_task("coreference:4x3,2x5", 5)
    assert {layout: len(cases) for layout, cases in task.cases_by_layout.items()} == {"4x3": 5, "2x5": 5}
    assert all(len(case.passages) == 4 for case in task.cases_by_layout["4x3"])
    assert all(len(case.answers[0].split()) == 3 for case in task.cases_by_layout["2x5"])
    assert task == read_task("coreference:4x3,2x5", 5)
    assert list(read_task("coreference", 1).cases_by_layout) == ["4x8", "8x4", "16x2"]
