"""The table of the papers' figures has its form, and docs/papers show it; `.ci/papers` writes them."""

from __future__ import annotations

import json
import runpy
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = runpy.run_path(str(ROOT / ".ci/papers"))
ROWS = SCRIPT["rows"]()
FIELDS = {
    "row": str, "paper": str, "section": str, "paper_figure": str, "ours": str, "command": str | None,
    "machine": str | None, "device": str | None, "is_full": bool, "is_served": bool, "note": str,
}  # fmt: skip
NUM_BY_PAPER = {"relay-attention": 9, "chunk-attention": 4, "pensieve": 7, "cache-blend": 13, "attention-store": 16}


def test_every_row_has_each_field() -> None:
    for row in ROWS:
        assert row.keys() == FIELDS.keys(), row["row"]
        wrong = {name for name, kind in FIELDS.items() if not isinstance(row[name], kind)}
        assert not wrong, f"{row['row']}: {wrong}"
        assert "|" not in "".join(str(value) for value in row.values())  # it stands in a table of Markdown


def test_all_rows_of_the_evaluations_are_there_once() -> None:
    assert Counter(row["paper"] for row in ROWS) == NUM_BY_PAPER
    assert len({row["row"] for row in ROWS}) == sum(NUM_BY_PAPER.values()) == 49


def test_what_was_measured_says_how_and_what_was_not_claims_nothing() -> None:
    for row in ROWS:
        is_measured = row["ours"] != SCRIPT["NOT_MEASURED"]
        told = [row[name] is not None for name in ("command", "machine", "device")]
        assert all(told) if is_measured else not any((*told, row["is_full"], row["is_served"])), row["row"]


def test_the_file_is_as_the_driver_writes_it() -> None:
    assert SCRIPT["TABLE"].read_text() == json.dumps(ROWS, indent=1, ensure_ascii=False) + "\n"


def test_the_papers_pages_end_in_their_tables() -> None:
    outdated = [path.name for path in SCRIPT["pages"]() if path.read_text() != SCRIPT["page"](path)]
    assert not outdated, "run .ci/papers"
