"""What a truncated session goes on seeing of its old path (AttentionStore 3.4). Policy only: no tensors."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from mneme.replicas.forest.nodes import Kept, Path, Resident, Root
from mneme.replicas.forest.paths import Spans, needed_tokens

_WORD_BITS = 64


def kept_by(path: Path, ranges: Spans) -> tuple[Kept, ...]:
    """References to what the path has at the positions of `ranges` (in order, apart), moved together from 0 on.

    Each range has one delta; it is lowered once more where what the path has was moved before.
    """
    kept: list[Kept] = []
    references = references_of(path)
    num_kept = 0
    for start, end in ranges:
        shift = num_kept - start
        for node, first, last, delta, top in references:
            low, high = max(first + delta, start), min(last + delta, end)
            if low < high:
                kept.append(Kept(node, low - delta, high - delta, delta + shift, top))
        num_kept += end - start
    return tuple(kept)


def kept_roots(root: Root) -> set[Root]:
    """The roots of earlier truncations under which what this one keeps was computed."""
    return {kept.root for kept in root.kept if kept.root.is_own}


def has_tokens(root: Root, ids: Sequence[int]) -> bool:
    """Whether what a root keeps is still what `ids` begin with: a node that lost its KV may have got other tokens."""
    for kept in root.kept:
        node, position = kept.node, kept.start + kept.delta
        expected = array("i", ids[position : position + kept.end - kept.start])
        if node.tokens[kept.start - node.start : kept.end - node.start] != expected:
            return False
    return True


def kept_resident(kept: Kept) -> Resident:
    """Of the tokens that were kept, those with KV."""
    ends = [min(kept.node.start + filled, kept.end) for filled in kept.node.filled]
    device, host = (max(end - kept.start, 0) for end in ends)
    return Resident(device, max(host - device, 0))


def mask_of(kept: Kept, page_size: int) -> int:
    """The slots of a page that are seen, and no others: somebody else may go on behind them."""
    mask = ((1 << (kept.end - kept.start)) - 1) << (kept.start % page_size)
    return mask - (1 << _WORD_BITS) if mask >> (_WORD_BITS - 1) else mask


def references_of(path: Path) -> list[Kept]:
    """What the path has of each of its nodes, in order; its own tokens stand where they were rotated."""
    own = [
        Kept(node, node.start, node.start + needed_tokens(path, index), 0, path.root)
        for index, node in enumerate(path.nodes)
        if index >= len(path.root.kept)
    ]
    return [*path.root.kept, *own]
