"""OpenAI's own SDK, strict, against a cluster: its tour of benchmarks/clients/sdks.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[3] / "benchmarks" / "clients"))
import sdks

pytestmark = pytest.mark.e2e


@pytest.mark.slow
def test_the_openai_sdk_finds_all_that_it_asks_for(server: str) -> None:
    sdks.openai_tour(server)
