"""What a quality report allows, and that a damaged one, or another model's, allows nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mneme.errors import ConfigError
from mneme.replicas.documents import Selector
from mneme.replicas.fuse.report import MIN_CASES, Measured, QualityReport, report_path

MODEL = {"weights": "ab" * 32, "dtype": "float32", "rope": "cd" * 32}


def row(selector: Selector, ratio: float, score: float, layout: str = "8x4", num_cases: int = 400) -> Measured:
    return Measured(
        layout=layout,
        selector=selector,
        ratio=ratio,
        num_cases=num_cases,
        score=score,
        score_full=0.9,
        exact_match=score,
        kl=0.1,
        top1=0.9,
    )


def report(*rows: Measured) -> QualityReport:
    return QualityReport(model=MODEL, task="a task", rows=rows)


def test_the_smallest_ratio_counts_from_which_on_every_larger_one_is_good() -> None:
    measured = report(
        row("query", 0.05, 0.9), row("query", 0.1, 0.88), row("query", 0.15, 0.89), row("query", 0.3, 0.9),
        row("first-k", 0.5, 0.5), row("hkvd", 0.05, 0.95),
    )  # fmt: skip
    assert measured.allowed() == {"query": 0.15, "hkvd": 0.05}
    assert measured.allowed(tolerance=0.02) == {"query": 0.05, "hkvd": 0.05}


def test_every_layout_must_be_good_and_measured() -> None:
    rows = [row("query", ratio, 0.9) for ratio in (0.1, 0.2, 0.3)]
    other = [replace(rows[1], layout="16x2"), replace(rows[2], layout="16x2")]
    assert report(*rows, *other).allowed() == {"query": 0.2}
    assert report(*rows, *other, row("query", 0.3, 0.5, layout="4x8")).allowed() == {}


def test_few_cases_allow_nothing() -> None:
    assert report(row("query", 0.3, 0.9, num_cases=MIN_CASES - 1)).allowed() == {}
    assert report().allowed() == {}


def test_a_report_is_found_by_weights_dtype_and_rope(tmp_path: Path) -> None:
    written = report(row("query", 0.3, 0.9))
    path = written.write(tmp_path)
    assert QualityReport.read(tmp_path, MODEL) == written
    for name in MODEL:
        assert QualityReport.read(tmp_path, MODEL | {name: "ef" * 32}) is None
    path.rename(report_path(tmp_path, MODEL | {"dtype": "bfloat16"}))
    with pytest.raises(ConfigError, match="another model"):
        QualityReport.read(tmp_path, MODEL | {"dtype": "bfloat16"})


def changed(**fields: object) -> bytes:
    good = json.loads(json.dumps({"format": 1, "model": MODEL, "task": "t", "rows": []}))
    return json.dumps(good | fields).encode()


GOOD_ROW = {
    "layout": "8x4", "selector": "query", "ratio": 0.1, "num_cases": 400, "score": 1, "score_full": 1, "exact_match": 1,
    "kl": 0, "top1": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"[" * 200_000,
        b"[]",
        b" " * (5 << 20),
        changed(format=2),
        changed(model=[]),
        changed(model={"weights": 1}),
        changed(rows={}),
        changed(rows=[1]),
        changed(rows=[{"layout": "8x4"}]),
        *(
            changed(rows=[GOOD_ROW | field])
            for field in (
                {"score": float("nan")}, {"ratio": 2}, {"ratio": True}, {"kl": float("inf")}, {"selector": "best"},
                {"num_cases": 0}, {"num_cases": 1.5}, {"score": "1"}, {"more": 1}, {"selector": []},
            )
        ),
    ],
)  # fmt: skip
def test_a_damaged_report_is_refused_with_its_name(content: bytes, tmp_path: Path) -> None:
    path = report_path(tmp_path, MODEL)
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=path.name):
        QualityReport.read(tmp_path, MODEL)


def test_a_whole_row_is_read(tmp_path: Path) -> None:
    report_path(tmp_path, MODEL).write_bytes(changed(rows=[GOOD_ROW]))
    found = QualityReport.read(tmp_path, MODEL)
    assert found is not None
    assert found.allowed() == {"query": 0.1}
