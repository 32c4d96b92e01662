"""What is kept between starts: ours is found again, anything else is measured anew and written over."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from mneme.cachetier.policy.cost_model import CostFile
from mneme.errors import ConfigError
from mneme.lab.cache.costs import load_costs
from tests.cachetier.cost_cases import make_costs

MODEL = bytes(range(32))


@pytest.fixture
def file(tmp_path: Path) -> CostFile:
    return CostFile(tmp_path / "cache" / "costs", MODEL, "this machine")


def test_costs_are_found_again(file: CostFile, caplog: pytest.LogCaptureFixture) -> None:
    assert file.read() is None
    costs = make_costs()
    costs.learn_step([(100, 0)], 1.0)
    file.write(costs)
    found = file.read()
    assert found is not None
    assert found.prefill_s(500, 100) == pytest.approx(costs.prefill_s(500, 100))
    assert not caplog.records
    assert (file.path.stat().st_mode & 0o777, os.listdir(file.path.parent)) == (0o600, [file.path.name])


def test_models_and_machines_have_files_of_their_own(file: CostFile) -> None:
    file.write(make_costs())
    folder = file.path.parent
    others = [CostFile(folder, MODEL[::-1], "this machine"), CostFile(folder, MODEL, "another")]
    assert [other.read() for other in others] == [None, None]
    assert len({file.path, *(other.path for other in others)}) == 3


def written(file: CostFile, **changes: Any) -> str:
    file.write(make_costs())
    return json.dumps({**json.loads(file.path.read_text()), **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"version": 2},
        {"model": "00"},
        {"machine": "other"},
        {"format": None},
        {"costs": None},
        {"costs": {"prefill": 1}},
        b"",
        b"[" * 100_000,
        b"\xff\xfe",
        b"[1]",
        b'{"costs": 1e999}',
    ],
)
def test_foreign_and_broken_files_are_ignored_with_a_warning(
    file: CostFile, changes: dict[str, Any] | bytes, caplog: pytest.LogCaptureFixture
) -> None:
    file.path.parent.mkdir(parents=True)
    file.path.write_bytes(changes if isinstance(changes, bytes) else written(file, **changes).encode())
    assert file.read() is None
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    file.write(make_costs())
    assert file.read() is not None


def test_files_that_others_may_write_are_not_believed(file: CostFile, tmp_path: Path) -> None:
    file.write(make_costs())
    file.path.chmod(0o622)
    assert file.read() is None
    moved = tmp_path / "elsewhere"
    file.path.chmod(0o600)
    file.path.rename(moved)
    file.path.symlink_to(moved)
    assert file.read() is None
    file.path.unlink()
    os.mkfifo(file.path)
    assert file.read() is None  # and does not wait for a writer


def test_a_folder_that_cannot_be_written_costs_only_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    file = CostFile(tmp_path / "file", MODEL, "this machine")
    file.write(make_costs())
    assert "not kept" in caplog.text
    assert file.read() is None


def test_the_newest_files_of_a_folder_are_kept(tmp_path: Path) -> None:
    files = [CostFile(tmp_path, MODEL, f"machine {number}") for number in range(70)]
    (tmp_path / "weights.json").write_text("{}")
    for number, file in enumerate(files):
        file.write(make_costs())
        os.utime(file.path, (number, number))
    files[0].write(make_costs())  # it is used again
    assert [file.read() is not None for file in files] == [True, *[False] * 6, *[True] * 63]
    assert (tmp_path / "weights.json").exists()


def test_a_simulation_takes_its_costs_from_it(file: CostFile) -> None:
    kept = make_costs(prefill=(0.5, 1e-3, 1e-6), host=(0.0, 0.0, 1 / 2e9), disk=(0.0, 0.0, 1 / 5e8))
    kept.learn_edge("disk", 500_000_000, 1, 3.0)
    file.write(kept)
    costs = load_costs(file.path)
    assert costs.prefill_s(3000, 5000) == pytest.approx(kept.prefill_s(3000, 5000))
    for edge in ("host", "disk"):
        assert costs.edge_s(edge, 14_000_000) == pytest.approx(kept.edge_s(edge, 14_000_000), rel=0.01)
    file.path.write_text('{"host_gb_per_s": 7, "prefill_tokens_per_s": 1000}')
    costs = load_costs(file.path)
    assert costs.edge_s("host", 14_000_000_000) == pytest.approx(2)
    assert costs.prefill_s(3000, 5000) == pytest.approx(3)
    assert load_costs(None).edge_s("disk", 10_000_000_000) == pytest.approx(2)
    for changes in ({"version": 9}, {"costs": {}}):
        file.path.write_text(written(file, **changes))
        with pytest.raises(ConfigError, match="cost model"):
            load_costs(file.path)
