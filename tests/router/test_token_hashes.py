"""Block hashes are chains, keyed, and the same in every process."""

from __future__ import annotations

import os
import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from mneme.router.token_hashes import block_hashes, text_hash

TOKENS = st.integers(0, 160).map(lambda size: list(range(size))) | st.lists(st.integers(0, 2**31 - 1), max_size=160)


@given(TOKENS, TOKENS, TOKENS)
def test_equal_hashes_mean_an_equal_prefix(common: list[int], left: list[int], right: list[int]) -> None:
    a, b = common + left, common + right
    shared = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    hashes_a, hashes_b = block_hashes(a), block_hashes(b)
    equal = [x == y for x, y in zip(hashes_a, hashes_b, strict=False)]
    assert equal == [i < shared // 64 for i in range(len(equal))]


def test_a_tail_that_fills_no_block_has_no_hash() -> None:
    assert len(block_hashes(list(range(64 * 3 + 63)))) == 3
    assert block_hashes([]) == []


def test_salts_separate_tenants() -> None:
    tokens = list(range(64))
    salts = ["", "a", "b", "x" * 100, "x" * 101, "\ud800"]
    assert len({block_hashes(tokens, salt=salt)[0] for salt in salts}) == len(salts)


def test_hashes_do_not_depend_on_the_process() -> None:
    code = "from mneme.router.token_hashes import *; print(block_hashes(list(range(200)), salt='s'), text_hash('k'))"
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("0", "1")
    }
    assert outputs == {f"{block_hashes(list(range(200)), salt='s')} {text_hash('k')}"}
