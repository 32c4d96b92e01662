"""The benchmark of inter-token latency on a grid so small that it takes a second."""

from __future__ import annotations

import bench_itl
import pytest


@pytest.fixture(scope="module")
def model() -> bench_itl.Model:
    return bench_itl.Model(0)


def test_a_gap_for_each_step_of_the_prompt(model: bench_itl.Model) -> None:
    grid = bench_itl.Grid((64,), 192, 3)
    chunked, whole = (bench_itl.press(model, chunk, grid) for chunk in (64, 192))
    assert (len(chunked.quiet), len(chunked.pressed), len(whole.pressed)) == (3, 3, 1)
    assert chunked.ttft == sum(chunked.pressed)
    part = bench_itl.pressure_part(model, grid, 1)
    assert [row["chunk"] for row in part.rows] == [64, "whole prompt"]
    assert [check.name for check in part.checks if check.value is not None] == ["itl_p99_over_a_chunk_64"]


def test_the_short_prompt_is_told_before_the_long_one(model: bench_itl.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_itl, "LONG", 512)
    chunked, whole = bench_itl.behind_part(model, bench_itl.Grid((128,), 192, 3), 1).rows
    assert chunked["behind"] < chunked["long"]
    assert whole["behind"] == whole["long"]
