"""Readers that refuse what they would read wrongly, and made traces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mneme.errors import ConfigError
from mneme.lab.cache.synthetic import SyntheticShape, make_trace, parse_shape
from mneme.lab.cache.traces import TraceRequest, most_used_within, read_trace
from tests.lab.trace_cases import random_trace

ROW = {"timestamp": 500, "input_length": 9, "output_length": 3, "hash_ids": [7, 8, 9]}


def write_rows(folder: Path, *rows: Any) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_mooncake_rows_are_read(tmp_path: Path) -> None:
    later = {"timestamp": 2500, "input_length": 5, "output_length": 0, "hash_ids": [7, 11], "more": "ignored"}
    assert read_trace(write_rows(tmp_path, ROW, later), 4) == [
        TraceRequest(0.0, [7, 8, 9], 9, 3, 4),
        TraceRequest(2.0, [7, 11], 5, 0, 4),
    ]


@pytest.mark.parametrize(
    ("row", "rule"),
    [
        ("{", "is no JSON"),
        ("[" * 100_000, "is no JSON"),
        ("[1]", "must be a JSON object"),
        ({**ROW, "timestamp": True}, "timestamp: must be ms from 0"),
        ({**ROW, "timestamp": float("nan")}, "timestamp: must be ms from 0"),
        ({**ROW, "timestamp": None}, "timestamp: is missing"),
        ({**ROW, "input_length": 0}, "input_length: must be a whole number from 1"),
        ({**ROW, "hash_ids": [7, 8]}, "2 blocks are not 9 tokens in blocks of 4"),
        ({**ROW, "hash_ids": [7, 8, "9"]}, "hash_ids: must be a whole number"),
        ({**ROW, "hash_ids": [7, 9, 8]}, "9 comes behind another prefix than before"),
        ({key: ROW[key] for key in ROW if key != "input_length"}, r"must have .* \(has no input_length\)"),
    ],
)
def test_a_bad_row_is_refused_with_its_line(tmp_path: Path, row: Any, rule: str) -> None:
    with pytest.raises(ConfigError, match=f"trace.jsonl:2: .*{rule}"):
        read_trace(write_rows(tmp_path, ROW, row), 4)


def test_files_that_are_no_traces_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\xfe")
    (tmp_path / "folder.csv").mkdir()
    (tmp_path / "other.txt").write_text("")
    rules = {
        "empty.jsonl": "has no requests", "bytes.jsonl": "bytes.jsonl:1: is not text", "folder.csv": "cannot be read",
        "missing.csv": "cannot be read", "other.txt": "ends in .jsonl, .json, .csv",
    }  # fmt: skip
    for name, rule in rules.items():
        with pytest.raises(ConfigError, match=rule):
            read_trace(tmp_path / name, 4)


def test_azure_rows_are_read_and_share_nothing(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:17:03.9799600,9,10\r\n2023-11-16 18:18:04.0,4,0\r\n",
        newline="",
    )
    first, second = read_trace(path, 4)
    assert first == TraceRequest(0.0, [0, 1, 2], 9, 10, 4)
    assert second.arrival_s == pytest.approx(60.02004, abs=1e-5)
    assert second[1:] == ([3], 4, 0, 4)


def test_made_traces_are_sessions_that_go_on() -> None:
    shape = SyntheticShape(num_sessions=60, tokens_in=200, system_tokens=256, num_system_prompts=2)
    trace = make_trace(shape, 64)
    assert trace == make_trace(shape, 64)
    assert trace != make_trace(SyntheticShape(num_sessions=60, tokens_in=200, seed=1), 64)
    assert [asked.arrival_s for asked in trace] == sorted(asked.arrival_s for asked in trace)
    parents: dict[int, int | None] = {}
    for asked in trace:
        assert len(asked.block_ids) == -(-asked.input_tokens // 64)
        for parent, block_id in zip([None, *asked.block_ids], asked.block_ids, strict=False):
            assert parents.setdefault(block_id, parent) == parent
    assert len({tuple(asked.block_ids[:4]) for asked in trace}) == 2
    assert len(parents) < sum(len(asked.block_ids) for asked in trace) / 2


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("synthetic:sessions=3", "unknown 'sessions'"),
        ("synthetic:num_sessions=many", "num_sessions: must be a number"),
        ("synthetic:num_sessions=0", "num_sessions: must be from"),
        ("synthetic:num_sessions=" + "9" * 400, "num_sessions: must be from"),
        ("synthetic:max_tokens=100000000", "max_tokens: must be from 1e-09 to 1e\\+07"),
        ("synthetic:think_s=nan", "think_s: must be from"),
        ("synthetic:num_sessions=1000000", "1000000 requests in all"),
        ("synthetic:num_turns=0.5", "num_turns: at least 1"),
    ],
)
def test_a_bad_shape_is_refused(text: str, rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        parse_shape(text)


@pytest.mark.parametrize("span_s", [0.0, 30.0, 1e9])
def test_most_used_within_is_that_of_every_span(span_s: float) -> None:
    trace = random_trace(4)
    spans = (
        {block for asked in trace if 0 <= last.arrival_s - asked.arrival_s <= span_s for block in asked.block_ids}
        for last in trace
    )
    assert most_used_within(trace, span_s) == max(map(len, spans))
    assert most_used_within([], span_s) == 0
