"""Which nodes are asked for which chunks of a chain."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mneme.cachetier.distributed.chain_spans import Span, query_of, spans_of
from mneme.cachetier.distributed.place_table import Place
from mneme.cachetier.store import ChainQuery
from tests.cachetier.chunks import CHUNK_TOKENS, FINGERPRINT, LINEAGE

HOST_A, HOST_B, DISK_C = Place("a", "host", 1), Place("b", "host", 1), Place("c", "disk", 1)

places_drawn = st.lists(st.lists(st.sampled_from([HOST_A, HOST_B, DISK_C]), unique=True).map(tuple), max_size=12)


def test_a_node_is_asked_for_as_much_as_it_has() -> None:
    assert spans_of([(HOST_A,), (HOST_A, HOST_B), (HOST_B,)], 4, "own") == (Span("a", 4, 2), Span("b", 6, 1))


def test_memory_goes_before_disk_and_more_of_the_chain_before_less() -> None:
    assert spans_of([(DISK_C, HOST_A)], 0, "own") == (Span("a", 0, 1),)
    assert spans_of([(HOST_A, HOST_B), (HOST_B,)], 0, "own") == (Span("b", 0, 2),)


def test_the_own_node_goes_before_others() -> None:
    assert spans_of([(HOST_A, DISK_C)], 0, "c") == (Span("c", 0, 1),)


@given(places_drawn, st.integers(0, 5))
def test_spans_have_no_gap_and_each_chunk_is_at_its_node(places: list[tuple[Place, ...]], first: int) -> None:
    spans = spans_of(places, first, "own")
    asked = [(span.node, index) for span in spans for index in range(span.first, span.end)]
    assert [index for _, index in asked] == list(range(first, first + len(asked)))
    for node, index in asked:
        assert node in {place.node for place in places[index - first]}
    until_gap = next((i for i, choices in enumerate(places) if not choices), len(places))
    assert len(asked) == until_gap or len(spans) == 8


def test_only_the_last_node_is_asked_for_what_is_behind() -> None:
    ids = list(range(1, 3 * CHUNK_TOKENS + 4))
    query = ChainQuery.of(LINEAGE, FINGERPRINT.digest, ids, CHUNK_TOKENS, request_id="r")
    inner = query_of(query, Span("a", 1, 1), is_last=False)
    assert (inner.first, inner.keys, len(inner.token_ids)) == (1, query.keys[:2], 2 * CHUNK_TOKENS)
    last = query_of(query, Span("a", 1, 1), is_last=True)
    assert (last.first, last.keys, len(last.token_ids)) == (1, query.keys, len(ids))
