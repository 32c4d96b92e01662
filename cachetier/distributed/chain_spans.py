"""Which nodes to ask for the chunks of a chain that are not on this one: runs of chunks, as few as will do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from mneme.cachetier.distributed.place_table import Place
from mneme.cachetier.store import ChainQuery

_MAX_SPANS = 8  # each is a call to a node


class Span(NamedTuple):
    """The chunks [first, first + num_chunks) of a chain, at one node."""

    node: str
    first: int
    num_chunks: int

    @property
    def end(self) -> int:
        return self.first + self.num_chunks


def spans_of(places: Sequence[tuple[Place, ...]], first: int, own_node: str) -> tuple[Span, ...]:
    """Spans without a gap from `first` on; `places[i]` are those of chunk first + i.

    A node that has a chunk is asked for the next too if it has that. Otherwise the own node is preferred to others,
    host memory to disk, then the node that has more of the chain.
    """
    spans: list[Span] = []
    for offset, choices in enumerate(places):
        nodes = {place.node for place in choices}
        if spans and spans[-1].node in nodes:
            spans[-1] = spans[-1]._replace(num_chunks=spans[-1].num_chunks + 1)
            continue
        if not choices or len(spans) == _MAX_SPANS:
            break
        best = max(choices, key=lambda place: _preference(place, places, offset, own_node))
        spans.append(Span(best.node, first + offset, 1))
    return tuple(spans)


def query_of(query: ChainQuery, span: Span, *, is_last: bool) -> ChainQuery:
    """What to ask the node of a span; behind the last one it may find a chunk that is usable in part."""
    if is_last:
        return replace(query, first=span.first)
    end = span.end
    return replace(
        query, first=span.first, keys=query.keys[:end], token_ids=query.token_ids[: end * query.chunk_tokens]
    )


def _preference(
    place: Place, places: Sequence[tuple[Place, ...]], offset: int, own_node: str
) -> tuple[bool, bool, int, str]:
    length = 0
    for choices in places[offset:]:
        if place.node not in {choice.node for choice in choices}:
            break
        length += 1
    return place.node == own_node, place.tier == "host", length, place.node
