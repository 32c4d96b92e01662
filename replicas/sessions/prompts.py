"""The ids that a turn runs: as many of its session's exact ids as its text agrees with, then its own.

Policy only: no tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from mneme.replicas.request import GenerationRequest
from mneme.replicas.sessions.token_log import Mark, TokenLog

_MAX_SEAMS = 3  # marks tried from the end: each costs tokenizing the text behind it


class SessionPrompts:
    """Matches text with token logs; changes none."""

    def __init__(
        self,
        encode: Callable[[str], list[int]],
        end_token_ids: Collection[int] = (),
        decode: Callable[[list[int]], str] | None = None,
    ) -> None:
        """`decode` gives the text of ids, special tokens included; without it nothing is known behind the last mark."""
        self._encode = encode
        self._decode = decode
        self._end_token_ids = frozenset(end_token_ids)

    def ids(self, log: TokenLog, request: GenerationRequest, num_base: int) -> tuple[list[int], int]:
        """The ids to run, and how many of the log's marks they begin with; appended ids follow its first `num_base`."""
        given = request.prompt_token_ids
        own = list(given[: len(given) - request.output_offset])
        resumed = list(given[len(own) :])  # output so far, of a request that was moved here
        if request.append:
            ids = [*log.ids[:num_base], *self._continuation(log, request, own, num_base)]
            return [*ids, *resumed], log.marks_up_to(num_base)
        ids, num_marks = self._matched(log, request.prompt_text, own)
        return [*ids, *resumed], num_marks

    def _matched(self, log: TokenLog, text: str | None, own: list[int]) -> tuple[list[int], int]:
        """The log's ids up to the last mark that the text agrees with and can go on from, or the request's own."""
        if text is None:
            return own, 0
        marks = log.matching_marks(text)
        num_known = len(marks)
        marks += self._end(log, text, marks)
        for num_marks in range(len(marks), max(len(marks) - _MAX_SEAMS, 0), -1):
            num_chars, num_ids = marks[num_marks - 1]
            rest = self._encode(text[num_chars:]) if num_chars < len(text) else []
            # Behind the whole log the stored ids always stand. Elsewhere the text goes on otherwise than it did, maybe
            # in the middle of a word: then only where its own tokens have a seam too.
            if num_ids == len(log.ids) or own[len(own) - len(rest) :] == rest:
                return [*log.ids[:num_ids], *rest], min(num_marks, num_known)
        return own, 0

    def _end(self, log: TokenLog, text: str, marks: list[Mark]) -> list[Mark]:
        """The end of the log, if the text agrees up to there with what was appended behind the last mark."""
        num_chars, num_ids = marks[-1] if marks else Mark(0, 0)
        if self._decode is None or num_ids == len(log.ids) or len(marks) < log.num_marks:
            return []
        appended = self._decode(log.ids[num_ids:].tolist())
        return [Mark(num_chars + len(appended), len(log.ids))] if text.startswith(appended, num_chars) else []

    def _continuation(self, log: TokenLog, request: GenerationRequest, own: list[int], num_base: int) -> list[int]:
        """Ids of what is appended: without what it begins with to close an answer and the log has already."""
        text = request.prompt_text
        if text is None:
            return own
        closing = self._encode(text[: request.num_closing_chars]) if request.num_closing_chars else []
        rest = text[request.num_closing_chars :]
        return closing[self._num_closed(log.ids[:num_base].tolist(), closing) :] + (self._encode(rest) if rest else [])

    def _num_closed(self, ids: list[int], closing: list[int]) -> int:
        """How many of the ids that close an answer it has itself: up to the model's end of turn, or what it wrote."""
        if ids[-1] in self._end_token_ids and ids[-1] in closing:
            return closing.index(ids[-1]) + 1
        return next((n for n in range(len(closing), 0, -1) if ids[-n:] == closing[:n]), 0)
