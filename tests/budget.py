"""How many examples property tests try: few in `make check`, more in `make test`, many in `make test-all`."""

from __future__ import annotations

import os

_SHARES = {"small": 0.2, "default": 1.0, "large": 10.0}
SHARE = _SHARES[os.environ.get("MNEME_TEST_BUDGET", "default")]


def examples(number: int) -> int:
    """Return how many of `make test`'s examples this run tries."""
    return max(round(number * SHARE), 1)
