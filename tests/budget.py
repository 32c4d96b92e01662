"""How many examples property tests try: few in `make check`, more in `make test`, many in `make test-all`."""

from __future__ import annotations

import os

_BUDGET = os.environ.get("MNEME_TEST_BUDGET", "default")
assert _BUDGET in ("small", "default", "large"), f"MNEME_TEST_BUDGET: {_BUDGET}"


def examples(number: int, *, at_length: int | None = None) -> int:
    """Return how many examples this run tries: `number` in `make test`, a fifth of that in `make check`.

    at_length   in `make test-all`; None: three times as many as in `make test`
    """
    numbers = {"small": max(number // 5, 1), "default": number, "large": at_length or 3 * number}
    return numbers[_BUDGET]
