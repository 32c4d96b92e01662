"""docs/config.md says what the dataclasses do; `.venv/bin/python .ci/options` writes it."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_of_options_is_that_of_the_dataclasses() -> None:
    script = runpy.run_path(str(ROOT / ".ci" / "options"))
    assert script["page"]() == (ROOT / "docs" / "config.md").read_text()
