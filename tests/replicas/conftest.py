"""The small model that most tests of engines share."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(scope="session")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Llama-3 with random weights, float32."""
    from tests.replicas.tiered_engine import load_decoder  # here: tests of policy import no torch

    return load_decoder("llama-3", tmp_path_factory.mktemp("llama-3"))
