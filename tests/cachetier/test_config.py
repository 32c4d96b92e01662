"""What the tier's sizes mean for a model is said where it is next to nothing."""

from __future__ import annotations

import logging

import pytest

from mneme.cachetier.chunk.fingerprint import ChunkLayout
from mneme.cachetier.config import warn_of_few_chunks

pytestmark = pytest.mark.policy

EIGHT_B = ChunkLayout(num_layers=32, num_kv_heads=8, head_dim=128, dtype="bfloat16")  # 128 KiB a token


@pytest.mark.parametrize(("num_bytes", "told"), [(192 << 20, "has room for 6 chunks"), (4 << 30, None), (0, None)])
def test_a_tier_with_room_for_few_chunks_is_said(
    num_bytes: int, told: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    assert EIGHT_B.chunk_bytes == 32 << 20
    with caplog.at_level(logging.WARNING):
        warn_of_few_chunks("cache.host_bytes", num_bytes, EIGHT_B.chunk_bytes)
    assert [told in record.getMessage() for record in caplog.records if told] == [True] * (told is not None)
    assert bool(caplog.records) == (told is not None)
