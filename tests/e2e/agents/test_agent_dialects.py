"""Two coding agents as they speak now: every answer is a 200, and all but what is new is found, wherever it runs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[3] / "benchmarks" / "clients"))
import agent_dialects as recorded

pytestmark = pytest.mark.e2e


def test_nearly_all_of_every_prompt_is_found(tmp_path: Path) -> None:
    found = recorded.run(tmp_path)
    assert found.keys() == {"claude-code", "codex"}
    for name, shares in found.items():
        assert len(shares) == recorded.NUM_TURNS
        assert shares.count(None) == 2  # the first, and where the history was compacted
        assert recorded.least_share(shares) >= recorded.TARGET, (name, shares)
