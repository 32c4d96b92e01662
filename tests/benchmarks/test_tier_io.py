"""What the benchmark of the tier's edges goes by: rounds in turns, shares of a base, files that nothing is left of."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench_tier_io import Arm, Samples, measured, table
from cache_engines import cached_share, make_cold

from mneme.errors import MnemeError


def test_arms_take_turns_and_the_first_round_does_not_count() -> None:
    called: list[str] = []
    arms = [
        Arm("edge", name, lambda index, name=name: called.append(f"{name}{index}"), before=lambda: called.append("-"))
        for name in "ab"
    ]
    found = measured(arms, 2, 2)
    assert "".join(called) == "-b0b1-a0a1" + "-a0a1-b0b1" + "-b0b1-a0a1"
    assert {name: [len(chunks) for chunks in samples.rounds] for name, samples in found.items()} == {
        "a": [2, 2],
        "b": [2, 2],
    }


def test_a_share_is_the_median_of_the_rounds_ratios() -> None:
    base = Samples(Arm("edge", "base", print), [[1.0, 1.0], [4.0, 4.0], [1.0, 1.0]])
    arm = Samples(Arm("edge", "arm", print, "base"), [[2.0, 2.0], [5.0, 5.0], [1.0, 3.0]])
    rows = table({"base": base, "arm": arm}, "shape", 10**9)
    assert [(row["GB/s"], row["share"]) for row in rows] == [(1.0, None), (0.5, 0.5)]
    assert (rows[1]["chunk ms"], rows[1]["p99 ms"]) == (2500.0, 5000.0)


def test_a_cold_file_is_not_in_memory_and_a_read_one_is(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 20))
    try:
        make_cold([path])
    except MnemeError as error:
        pytest.skip(f"the folder is on no disk: {error}")
    assert cached_share(path) == 0
    assert len(path.read_bytes()) == 1 << 20
    assert cached_share(path) == 1
