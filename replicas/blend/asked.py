"""Remembers with which documents prompts began, so that what is asked again is computed exactly.

KV that is reused behind other text is one request's, and the next one computes its share again. An exact prefix serves
all who come later. So a beginning that comes a second time is computed as such: when that request has ended, or, if its
documents' own KV is gone, as its own prompt. (`mneme-tiny`, equal requests over two documents: without this
memory each finds 357 of 466 tokens; with it all but the last from the third on.)

Policy only: no tensors.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from hashlib import blake2b

from mneme.primitives import Bounded
from mneme.replicas.documents import DocumentSpan
from mneme.replicas.report import first_digest, next_digest

_MAX_BEGINNINGS = 1 << 16  # of about 150 bytes; a prompt has two for each document


class AskedBeginnings:
    """Knows by digest where documents of recent prompts began and ended, and which turn asked for that first."""

    def __init__(self, max_items: int = _MAX_BEGINNINGS) -> None:
        self._first_turns: Bounded[bytes, int] = Bounded(max_items)

    def is_new(self, salt: str, ids: Sequence[int], turn: int) -> bool:
        """Note a document by itself; returns whether no other turn asked for it before."""
        digest = next_digest(first_digest(salt), _digest(ids))
        first = self._first_turns.get(digest, turn)
        self._first_turns[digest] = first
        return first == turn

    def record(self, salt: str, ids: Sequence[int], spans: Sequence[DocumentSpan], turn: int) -> int:
        """Note a prompt; returns how many of its tokens another turn's prompt began with, up to a border of a document.

        turn  alike for all choices of a turn, which are computed alike
        """
        num_again, start, digest = 0, 0, first_digest(salt)
        for end in (border for span in spans for border in (span.start, span.end)):
            digest, start = next_digest(digest, _digest(ids[start:end])), end
            first = self._first_turns.get(digest, turn)
            self._first_turns[digest] = first
            if first != turn:
                num_again = end
        return num_again

    def go_on(
        self,
        salt: str,
        ids: Sequence[int],
        spans: Sequence[DocumentSpan],
        order: list[int],
        num_kept: int,
        *,
        max_places: int,
        may_move: Callable[[DocumentSpan], bool],
    ) -> None:
        """Let documents follow the first `num_kept` ones of an order as they did in a prompt, inside their messages."""
        digest, start = first_digest(salt), 0
        documents = [_digest(ids[span.start : span.end]) for span in spans]
        for place, span in enumerate(spans[:max_places]):
            digest, start = next_digest(digest, _digest(ids[start : span.start])), span.end
            for at in range(place, place + 1 if place < num_kept else len(order)):
                behind = next_digest(digest, documents[order[at]])
                other = spans[order[at]]
                can_stand = other.group == span.group and (at == place or may_move(other))
                if can_stand and behind in self._first_turns:
                    break
            else:
                return
            digest = behind
            order.insert(place, order.pop(at))


def _digest(ids: Sequence[int]) -> bytes:
    return blake2b(array("i", ids), digest_size=8).digest()
