"""OpenAI's own SDK, strict, against a cluster: its tour of sdk_tours.py."""

from __future__ import annotations

import pytest

from tests.e2e.agents import sdk_tours

pytestmark = pytest.mark.e2e


@pytest.mark.slow
def test_the_openai_sdk_finds_all_that_it_asks_for(server: str) -> None:
    sdk_tours.openai_tour(server)
