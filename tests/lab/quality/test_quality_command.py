"""`mneme quality` as a command: its table, its report, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from mneme.cluster.cli.main import main
from mneme.replicas.blend.gate import QualityReport

QUICK = ["quality", "mneme-tiny", "--task", "coreference:4x3", "--cases", "2", "--dtype", "float32", "--device", "cpu"]


def test_a_run_writes_the_report_that_it_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "made" / "here"
    assert main([*QUICK, "--selectors", "none,first-k", "--ratios", "0.2,0.4", "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    (path,) = out.iterdir()
    assert str(path) in shown
    assert "nothing is allowed: a report needs 100 cases" in shown
    rows = QualityReport.read(path).rows
    assert [(row.selector, row.ratio) for row in rows] == [("none", 0), ("first-k", 0.2), ("first-k", 0.4)]
    assert all(f"{row.selector:14} {row.ratio:5g} {row.score:6.3f}" in shown for row in rows)


def test_a_report_is_not_replaced_by_one_that_says_less(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = [*QUICK, "--selectors", "first-k", "--ratios", "0.2", "--out", str(tmp_path)]
    assert main(options) == 0
    (path,) = tmp_path.iterdir()
    for narrower in (["--cases", "1"], ["--task", "coreference:3x3"]):
        assert main([*options, *narrower]) == 2
        assert "--force replaces it" in capsys.readouterr().err
    assert QualityReport.read(path).rows[0].num_cases == 2
    assert main([*options, "--cases", "1", "--force"]) == 0
    assert QualityReport.read(path).rows[0].num_cases == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--selectors", "best"], "selectors: must be of"),
        (["--ratios", "0.1,2"], "ratios: must be numbers from 0 to 1"),
        (["--cases", "0"], "cases: must be from 1"),
        (["--task", "coreference:1x1"], "documents x length"),
        (["--out", __file__], "is no folder and cannot be made"),
        (["--device", "abacus"], "engine.device"),
    ],
)
def test_what_cannot_be_measured_is_refused(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QUICK, *options]) == 2
    assert said in capsys.readouterr().err
