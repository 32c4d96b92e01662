"""Fixtures of the disk tier's tests, and which tests there are without Ray."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from mneme.cachetier.node import folder
from tests.cachetier.nodes import OPENED

NUM_FOLDERS = 4
# Engines and kernels run without Ray, and their tests too: what needs it is not imported where it is missing.
collect_ignore_glob = [] if importlib.util.find_spec("ray") else ["distributed/*", "test_ray_*.py"]


@pytest.fixture
def few_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or most of the time would go into making, listing and removing 256 of them."""
    monkeypatch.setattr(folder, "NUM_FOLDERS", NUM_FOLDERS)


@pytest.fixture(autouse=True)
def _close_opened() -> Iterator[None]:
    yield
    while OPENED:
        OPENED.pop().close()
