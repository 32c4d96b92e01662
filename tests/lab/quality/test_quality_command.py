"""`mneme quality` as a command: its table, its report, and what it refuses."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from mneme.cluster.cli.main import main
from mneme.lab.quality.comparison import read_setting, read_text
from mneme.replicas.blend.gate import QualityReport
from mneme.replicas.model.directory import model_directory
from mneme.replicas.text.tokenizer import Tokenizer

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


TEXT = ["quality", "mneme-tiny", "--task", "text:2x60", "--dtype", "float32", "--device", "cpu", "--json"]


def test_settings_are_compared_on_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The reference's perplexity is that of `transformers`; what an option says holds where a setting does not."""
    given = "weights=dense,page_size=16,weights=int8"
    options = [*TEXT, "--weights", "dense", "--settings", given, "--out", str(tmp_path)]
    assert main(options) == 0
    said = json.loads(capsys.readouterr().out)
    (path,) = tmp_path.iterdir()
    assert str(path) == said["report"]
    assert json.loads(path.read_text())["rows"] == said["rows"]
    dense, other_pages, int8 = said["rows"]
    assert all(row["num_tokens"] == _num_scored(60) for row in said["rows"])
    assert dense["perplexity"] == pytest.approx(_perplexity(60), rel=1e-4)
    assert (dense["kl"], dense["top1"]) == (0, 1)
    assert other_pages["perplexity"] == pytest.approx(dense["perplexity"], rel=1e-4)
    assert other_pages["kl"] < 1e-5 < int8["kl"] < 0.1
    assert 0.8 < int8["top1"] <= 1
    assert "int8" in int8["weight_bytes"]
    assert "int8" not in dense["weight_bytes"]


def _num_scored(size: int) -> int:
    return read_text(f"2x{size}", Tokenizer.load(model_directory("mneme-tiny"))).num_scored


def _perplexity(size: int) -> float:
    folder = model_directory("mneme-tiny")
    text = read_text(f"2x{size}", Tokenizer.load(folder))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        losses = [model(torch.tensor([ids]), labels=torch.tensor([ids])).loss.item() for ids in text.windows]
    return math.exp(sum(losses) / len(losses))


def test_a_comparison_is_not_replaced_by_one_that_says_less(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = [*TEXT, "--settings", "weights=dense,weights=dense+page_size=16", "--out", str(tmp_path)]
    assert main(options) == 0
    for narrower in (["--task", "text:1x60"], ["--settings", "weights=dense"]):
        assert main([*options, *narrower]) == 2
        assert "--force replaces it" in capsys.readouterr().err
    assert main([*options, "--settings", "weights=dense", "--force"]) == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--settings", "int8"], "settings: must be engine options"),
        (["--settings", "weights=int3"], "engine.weights"),
        (["--settings", "wieghts=int8"], "engine.wieghts: unknown key"),
        (["--settings", "weights=int8,weights=int8"], "settings: each once"),
        (["--task", "text:1x1"], "windows x tokens"),
        (["--task", "text:9999x999999"], "the text has"),
        (["--ratios", "0.2"], "ratios: says nothing of --task"),
        (["--background", "10"], "background: says nothing of --task"),
        (["--task", "coreference", "--settings", "weights=dense"], "settings: says nothing of --task"),
        (["--task", "text:1x5000"], "must fit 2048 tokens"),
    ],
)
def test_what_cannot_be_compared_is_refused(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TEXT, "--quick", *options]) == 2
    assert said in capsys.readouterr().err


def test_a_setting_alone_is_changed() -> None:
    found = read_setting("weights=int8+page_size=16", {"dtype": "float32"})
    assert (found.weights, found.page_size, found.dtype, found.prefix_sharing) == ("int8", 16, "float32", False)
