"""docs/config.md, metrics.md and cli.md say what there is; `.ci/options`, `metrics` and `commands` write them."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("cluster", "router", "replicas", "kernels", "cachetier", "lab")
# For processes that a server starts; RAY_USE_TLS is Ray's own.
SET_BY_US = {"MNEME_CLUSTER", "MNEME_HAPROXY", "MNEME_CONNECTIONS_PER_ADDRESS", "RAY_USE_TLS"}


def test_the_page_of_options_is_that_of_the_dataclasses() -> None:
    script = runpy.run_path(str(ROOT / ".ci/options"))
    assert script["page"]() == script["PAGE"].read_text()


def test_the_page_of_metrics_is_written_from_a_page_of_metrics() -> None:
    script = runpy.run_path(str(ROOT / ".ci/metrics"))
    assert script["table"]() == script["PAGE"].read_text()


def test_the_page_of_commands_is_that_of_the_parsers_and_names_what_is_read_from_the_environment() -> None:
    script = runpy.run_path(str(ROOT / ".ci/commands"))
    text = script["PAGE"].read_text()
    assert script["page"]() == text
    sources = "\n".join(path.read_text() for room in ROOMS for path in (ROOT / room).rglob("*.py"))
    read = {*re.findall(r'environ(?:\.get\(|\[)"(\w+)"', sources), *re.findall(r"\bMNEME_[A-Z_]+\b", sources)}
    assert len(read) > 8
    assert {name for name in read - SET_BY_US if f"`{name}`" not in text} == set()
