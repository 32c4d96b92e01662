"""What the tests of faults share: one small model, the files that it left, and few folders for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from mneme.cachetier.node import folder
from mneme.replicas.model.decoder import Decoder
from tests.replicas.cache_faults.saved_turn import NextTurn, Saved, save_turn

NUM_FOLDERS = 4  # or most of the time would go into making, listing and removing 256 of them


@pytest.fixture(autouse=True)
def few_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "NUM_FOLDERS", NUM_FOLDERS)


@pytest.fixture(scope="session")
def saved(decoder: Decoder, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folder, "NUM_FOLDERS", NUM_FOLDERS)
        return save_turn(decoder, tmp_path_factory.mktemp("saved"))


@pytest.fixture
def next_turn(decoder: Decoder, saved: Saved, tmp_path: Path) -> NextTurn:
    return NextTurn(decoder, saved, tmp_path)
