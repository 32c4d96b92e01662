"""Any traffic over any pool: each request computes what it would alone, and everything is given back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.budget import examples
from tests.replicas.connector.test_cached_traffic import Play, arrivals
from tests.replicas.schedule.test_engine_policy import POLICIES

pools = st.builds(
    SimpleNamespace,
    num_pages=st.integers(10, 24),
    page_size=st.sampled_from([4, 8]),
    num_host_pages=st.sampled_from([0, 0, 3, 12, 40]),
    window=st.sampled_from([None, None, 3, 9]),
    max_context=st.just(10_000),
    sharing=st.booleans(),
    max_batch_tokens=st.integers(16, 40),
    max_running=st.integers(1, 8),
    eviction=st.sampled_from(POLICIES),
    edge=st.none(),  # no cache tier
    read_buffer_bytes=st.just(0),
    step_chunks=st.none(),
    runs_ahead=st.booleans(),
    seed=st.integers(0, 2**16),
    fault_share=st.sampled_from([0.0, 0.0, 0.1]),
)


@pytest.mark.at_length
@settings(max_examples=examples(150, at_length=400))
@given(st.lists(arrivals, min_size=1, max_size=12), pools)
def test_any_traffic_computes_what_each_request_alone_would(traffic: list[Any], pool: Any) -> None:
    Play(traffic, pool).run()
