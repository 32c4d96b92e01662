"""Remembers what prompts share at their beginning, so that a new replica can have it before its first request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mneme.primitives import Bounded

_MIN_TOKENS, _MAX_TOKENS = 64, 8192  # prompts belong together if they share so many; of each so many are looked at
MAX_GROUPS = 256  # those that were used last


class _Group(NamedTuple):
    tokens: tuple[int, ...]  # with which all prompts of the group begin
    num_prompts: int


class HotPrefixes:
    """Groups prompts by their first tokens; of each tenant, by its salt."""

    def __init__(self) -> None:
        self._groups = Bounded[tuple[str, tuple[int, ...]], _Group](MAX_GROUPS)

    def add(self, token_ids: Sequence[int], *, salt: str) -> None:
        """A request had this prompt; short ones cost less to compute than to remember."""
        if len(token_ids) < _MIN_TOKENS:
            return
        tokens = tuple(token_ids[:_MAX_TOKENS])
        key = salt, tokens[:_MIN_TOKENS]
        group = self._groups.get(key)
        if group is not None:
            tokens = tokens[: _num_common(tokens, group.tokens)]
        self._groups[key] = _Group(tokens, 1 if group is None else group.num_prompts + 1)

    def hottest(self, count: int) -> list[tuple[str, tuple[int, ...]]]:
        """Return (salt, tokens) of the beginnings that more than one prompt had, most shared tokens first."""
        shared = [(key[0], group) for key, group in self._groups.items() if group.num_prompts > 1]
        shared.sort(key=lambda each: each[1].num_prompts * len(each[1].tokens), reverse=True)
        return [(salt, group.tokens) for salt, group in shared[:count]]


def _num_common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Count the leading tokens that are equal, by halves: slices are compared faster than tokens."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
