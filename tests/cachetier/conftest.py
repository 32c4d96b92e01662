"""Fixtures of the disk tier's tests."""

from __future__ import annotations

import pytest

from mneme.cachetier import disk_names

NUM_FOLDERS = 4


@pytest.fixture
def few_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or most of the time would go into making, listing and removing 256 of them."""
    monkeypatch.setattr(disk_names, "NUM_FOLDERS", NUM_FOLDERS)
