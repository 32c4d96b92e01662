"""What a quality report allows, and that a damaged one, or another model's, allows nothing: `auto` computes in full."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mneme import LLM, SamplingParams
from mneme.errors import ConfigError
from mneme.replicas.blend.gate import (
    MIN_CASES,
    NO_REPORT,
    Measured,
    QualityReport,
    described_reports,
    measured_on,
    read_gate,
    report_path,
)
from mneme.replicas.documents import Selector
from mneme.replicas.engine.build import model_fingerprint
from mneme.replicas.model.directory import load_model_config, model_directory

pytestmark = pytest.mark.engine

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
        exact_match_full=0.9,
        kl=0.1,
        top1=0.9,
    )


def report(*rows: Measured) -> QualityReport:
    return QualityReport(model=MODEL, task="a task", rows=rows)


def test_the_smallest_ratio_counts_that_is_good_in_all_that_was_measured() -> None:
    """And every larger one, in every layout, by words and by exact matches, of a task that the model can do."""
    measured = report(
        row("query", 0.05, 0.9), row("query", 0.1, 0.88), row("query", 0.15, 0.89), row("query", 0.3, 0.9),
        row("first-k", 0.5, 0.5), row("hkvd", 0.05, 0.95),
    )  # fmt: skip
    assert measured.allowed() == {"query": 0.15, "hkvd": 0.05}
    assert measured.allowed(tolerance=0.02) == {"query": 0.05, "hkvd": 0.05}
    rows = [row("query", ratio, 0.9) for ratio in (0.1, 0.2, 0.3)]
    other = [replace(rows[1], layout="16x2"), replace(rows[2], layout="16x2")]
    assert report(*rows, *other).allowed() == {"query": 0.2}
    failed = replace(rows[2], score=0.1, exact_match=0.1, score_full=0.1, exact_match_full=0.1)
    for nothing in (
        report(),
        report(*rows, *other, row("query", 0.3, 0.5, layout="4x8")),
        report(replace(rows[2], exact_match=0.88)),
        report(failed),
        report(rows[2], replace(failed, layout="16x2")),
        report(row("query", 0.3, 0.9, num_cases=MIN_CASES - 1)),
    ):
        assert nothing.allowed() == {}


def test_a_report_is_found_by_weights_dtype_and_rope(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    assert read_gate((tmp_path, kept), lambda: pytest.fail("nothing is there to be compared with")) == NO_REPORT
    written = report(row("query", 0.3, 0.9))
    path = written.write(tmp_path)
    assert QualityReport.read(path) == written
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
    assert read_gate((tmp_path, kept), lambda: MODEL).allowed == {"query": 0.3}
    for name in MODEL:
        found = read_gate((tmp_path, kept), lambda changed=MODEL | {name: "ef" * 32}: changed)  # type: ignore[misc]
        assert found.allowed == {}
        assert "other weights" in found.why
        assert not found.has_report
    path.rename(report_path(tmp_path, MODEL | {"dtype": "bfloat16"}))
    assert read_gate((tmp_path, kept), lambda: MODEL | {"dtype": "bfloat16"}).allowed == {}


def test_the_models_own_report_counts_more_than_one_in_the_cache_folder(tmp_path: Path) -> None:
    """A damaged one counts for nothing, so that another is made; one of other models says nothing of this."""
    beside, kept = tmp_path / "model", tmp_path / "kept"
    for folder in (beside, kept):
        folder.mkdir()
    replace(report(), model=MODEL | {"weights": "ef" * 32}).write(kept)
    assert read_gate((beside, kept), lambda: MODEL) == NO_REPORT
    stopped = replace(report(), task="it was stopped after 5 s of processor time")
    stopped.write(kept)
    found = read_gate((beside, kept), lambda: MODEL)
    assert (found.has_report, found.described()) == (True, f"quality was not measured: {stopped.task}")
    report(row("query", 0.3, 0.9)).write(kept)
    assert read_gate((beside, kept), lambda: MODEL).described() == "the quality report allows query from 0.3"
    path = report(row("hkvd", 0.5, 0.1)).write(beside)
    assert read_gate((beside, kept), lambda: MODEL).described() == "the quality report allows nothing"
    assert described_reports((beside, kept), MODEL["weights"]) == ["float32: the quality report allows nothing"]
    path.write_bytes(b"{")
    assert read_gate((beside, kept), lambda: MODEL).allowed == {"query": 0.3}
    path.rename(report_path(kept, MODEL))
    found = read_gate((beside, kept), lambda: MODEL)
    assert (found.has_report, found.why) == (False, "the quality report cannot be read")
    assert "not a quality report" in described_reports((beside, kept), MODEL["weights"])[0]


def changed(**fields: object) -> bytes:
    good = json.loads(json.dumps({"format": 1, "model": MODEL, "task": "t", "rows": []}))
    return json.dumps(good | fields).encode()


GOOD_ROW = {
    "layout": "8x4", "selector": "query", "ratio": 0.1, "num_cases": 400, "score": 1, "score_full": 1, "exact_match": 1,
    "exact_match_full": 1, "kl": 0, "top1": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"\xff\xfe", b"[" * 200_000, b"[]", b" " * (5 << 20)),
        *(changed(format=2), changed(model={"weights": 1}), changed(rows={}), changed(rows=[1])),
        *(
            changed(rows=[GOOD_ROW | field])
            for field in (
                {"score": float("nan")}, {"ratio": 2}, {"ratio": True}, {"kl": float("inf")}, {"selector": "best"},
                {"num_cases": 0}, {"num_cases": 1.5}, {"score": "1"}, {"more": 1},
            )
        ),
    ],
)  # fmt: skip
def test_a_damaged_report_is_refused_with_its_name(content: bytes, tmp_path: Path) -> None:
    path = report_path(tmp_path, MODEL)
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=path.name):
        QualityReport.read(path)


PARTS = [
    {"type": "document", "id": str(index), "text": f" Now {name}. She likes {food}. She plays chess."}
    for index, (name, food) in enumerate((("Alice", "tea"), ("Emma", "milk"), ("Nora", "rice")))
]
PROMPT: Any = {"prompt": [*PARTS, {"type": "text", "text": "\nQuestion: What does Emma like?\nAnswer:"}]}


def tiny_model() -> dict[str, str]:
    folder = model_directory("mneme-tiny")
    return measured_on(model_fingerprint(folder, load_model_config(folder), torch.float32))


def told(folder: Path, *blends: dict[str, Any], dtype: str = "float32") -> list[dict[str, Any]]:
    """`kv_details.blend` of one prompt under several options, each the first to ask for it but not for its documents.

    folder  of reports, which lie beside the model's files there
    """
    for file in model_directory("mneme-tiny").iterdir():
        if not (folder / file.name).exists() and not file.name.startswith("blend-"):
            (folder / file.name).symlink_to(file)
    found = []
    for blend in blends:
        with LLM(str(folder), device="cpu", dtype=dtype, config={"num_pages": 32}) as llm:
            for part in PARTS:
                llm.generate({"prompt": [part]}, SamplingParams(max_tokens=1), blend={"min_tokens": 1, **blend})
            (output,) = llm.generate(PROMPT, SamplingParams(max_tokens=1), blend={"min_tokens": 1, **blend})
            found.append(output.metrics.blend.as_json())
    return found


def test_auto_reuses_what_the_report_allows_and_says_so(tmp_path: Path) -> None:
    replace(report(row("query", 0.3, 0.9)), model=tiny_model()).write(tmp_path)
    auto, less, more = told(
        tmp_path, {}, {"mode": "selective", "ratio": 0.1}, {"mode": "selective", "selector": "query", "ratio": 0.5}
    )
    assert (auto["mode"], auto["selector"], auto["ratio"], auto["measured"]) == ("selective", "query", 0.3, True)
    share = auto["recomputed"] / (auto["reused"] + auto["recomputed"])
    assert 0 < auto["recomputed_share"] == pytest.approx(share, abs=1e-4)
    assert auto["why"] == "the quality report allows it"
    assert auto["reused"] > 0
    assert (less["why"], less["measured"]) == ("the request asks for it", False)
    assert more["measured"]
    (other,) = told(tmp_path, {}, dtype="bfloat16")
    assert other["mode"] == "off"
    assert "another dtype" in other["why"]


def test_a_damaged_report_is_one_warning_and_no_reuse(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = report_path(tmp_path, tiny_model())
    (empty,) = told(tmp_path, {})
    assert empty["why"] == NO_REPORT.why
    path.write_bytes(b"{")
    with caplog.at_level(logging.WARNING):
        (blend,) = told(tmp_path, {})
    assert (blend["mode"], blend["why"]) == ("off", "the quality report cannot be read")
    assert [str(path) in record.getMessage() for record in caplog.records] == [True]


def test_what_was_reused_in_the_mean_over_the_layers_counts_as_found() -> None:
    """The first pass of `hkvd` begins with nearly all tokens, of which all but a few leave it behind two layers."""
    turned: Any = {"prompt": [*reversed(PARTS), *PROMPT["prompt"][len(PARTS) :]]}
    options = {"mode": "selective", "selector": "hkvd", "ratio": 0.3, "min_tokens": 1}
    with LLM(device="cpu", dtype="float32", config={"num_pages": 32}) as llm:
        first, again = (llm.generate(each, SamplingParams(max_tokens=1), blend=options)[0] for each in (PROMPT, turned))
    assert first.metrics.blend.reused > 0  # it was computed for this request: reused, and not found
    assert first.metrics.cached_tokens <= 2  # a document begins with what is before it, too
    blend = again.metrics.blend
    assert blend.reused > blend.recomputed > 0
    assert 0 <= again.metrics.cached_tokens - blend.reused - blend.token_counts()["exact"] <= 1  # what is before them
