"""docs/config.md and docs/metrics.md say what there is; `.ci/options` and `.ci/metrics` write them."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_of_options_is_that_of_the_dataclasses() -> None:
    script = runpy.run_path(str(ROOT / ".ci/options"))
    assert script["page"]() == script["PAGE"].read_text()


def test_the_page_of_metrics_is_written_from_a_page_of_metrics() -> None:
    script = runpy.run_path(str(ROOT / ".ci/metrics"))
    assert script["table"]() == script["PAGE"].read_text()
