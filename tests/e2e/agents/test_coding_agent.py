"""A coding agent's session in both wire formats: all but what is new is found, wherever it runs."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.e2e.agents import coding_agent as recorded

pytestmark = [pytest.mark.e2e, pytest.mark.slow]  # test_agent_dialects.py has an agent over a kill in `make test`


def test_nearly_all_of_every_prompt_is_found(tmp_path: Path) -> None:
    found = recorded.run(tmp_path)
    assert found["marks_are_pins"]
    for name in ("chat", "anthropic"):
        shares, sizes = found[name]["shares"], found[name]["num_prompt_tokens"]
        assert len(shares) == recorded.NUM_TURNS
        assert recorded.least_share(shares) >= recorded.TARGET, (name, shares)
        assert all(50 < after - before < 1000 for before, after in itertools.pairwise(sizes))
        assert found[name]["with_a_tool_more"] < recorded.TARGET  # else tools may as well grow in their list
