"""Benchmarks are scripts beside each other, not a package: their folder goes on the path."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave the tests of benchmarks to `make test-all`: nothing that serves depends on a benchmark."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.slow)
