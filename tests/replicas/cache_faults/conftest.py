"""What the tests of faults share: one small model, the files that it left, and few folders for them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mneme.cachetier import disk_names
from mneme.replicas.model import Decoder
from tests.replicas.saved_turn import NextTurn, Saved, save_turn
from tests.replicas.tiered_engine import load_decoder


@pytest.fixture(autouse=True, scope="package")
def few_folders() -> Iterator[None]:
    """Or most of the time would go into making, listing and removing 256 of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk_names, "NUM_FOLDERS", 4)
        yield


@pytest.fixture(scope="package")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return load_decoder("llama-3", tmp_path_factory.mktemp("llama-3"))


@pytest.fixture(scope="package")
def saved(decoder: Decoder, few_folders: None, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return save_turn(decoder, tmp_path_factory.mktemp("saved"))


@pytest.fixture
def next_turn(decoder: Decoder, saved: Saved, tmp_path: Path) -> NextTurn:
    return NextTurn(decoder, saved, tmp_path)
