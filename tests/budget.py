"""How much property tests and fault loops try: little in `make check`, more in `make test`, much in `make test-all`."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest

_BUDGET = os.environ.get("MNEME_TEST_BUDGET", "default")
assert _BUDGET in ("small", "default", "large", "faults"), f"MNEME_TEST_BUDGET: {_BUDGET}"


def examples(number: int, *, at_length: int | None = None) -> int:
    """Return how many examples this run tries: `number` in `make test`, a fifth of that in `make check`.

    at_length   in `make test-all`, and ten times as many in `make faults`, which run tests marked so; None: `number`
    """
    most = number if at_length is None else at_length
    numbers = {"small": max(number // 5, 1), "default": number, "large": most, "faults": 10 * most}
    return numbers[_BUDGET]


def rarer(cases: Iterable[Any]) -> list[Any]:
    """Return parameters of a test that `make test-all` tries, beside those of `make test`."""
    return [pytest.param(*(each if isinstance(each, tuple) else (each,)), marks=pytest.mark.slow) for each in cases]
