"""What of a path the device lacks: pages that the host has, and holes (Pensieve 4.3, Fig. 6).

A row needs the KV of every token that it can see. Holes are filled in order, as rows of the same batch, before any
later row of the path; what lies behind a hole stays as it is. Under a sliding window a row sees `window` tokens: what
no row from the first one to be computed on can see stays away, and a hole that is filled needs what its own first row
sees.

A hole counts as filled when its rows are scheduled, so paths that share one fill it once: the later one goes on where
the earlier one stopped, in the same step or the next.

Policy only: no tensors.
"""

from __future__ import annotations

from mneme.replicas.forest.nodes import DEVICE, HOST, Path

Runs = list[tuple[int, int, int]]  # (page id, first offset, number of tokens)
Spans = list[tuple[int, int]]  # positions [start, end), in order


def note_gaps(path: Path, first: int) -> None:
    """Look at the path's nodes from index `first` on, to which tokens were added."""
    known = set(path.gaps)
    path.gaps += [i for i in range(first, len(path.nodes)) if i not in known and not _is_whole(path, i)]


def visible_gaps(path: Path, num_ids: int, window: int | None) -> list[int]:
    """The gaps that must be closed before the path's next rows, in order; forgets those that others closed."""
    path.gaps = [i for i in path.gaps if not _is_whole(path, i)]
    if window is None or path.root.kept:
        return path.gaps
    reach = min(path.num_tokens, num_ids - 1) - window + 1
    seen = []
    for index in reversed(path.gaps):
        node = path.nodes[index]
        if node.start + needed_tokens(path, index) <= reach:
            continue
        seen.append(index)
        if num_missing(path, index):
            reach = min(reach, node.start + max(node.filled) - window + 1)
    return seen[::-1]


def needed_tokens(path: Path, index: int) -> int:
    """How many of a node's tokens, from its first on, must have KV for the path."""
    node, kept = path.nodes[index], path.root.kept
    if index < len(kept):
        return kept[index].end - node.start
    end = path.nodes[index + 1].start if index + 1 < len(path.nodes) else path.num_tokens
    return end - node.start


def num_missing(path: Path, index: int) -> int:
    """How many of them no tier has."""
    return max(needed_tokens(path, index) - max(path.nodes[index].filled), 0)


def is_lost(path: Path) -> bool:
    """Whether tokens that the root keeps have no KV any more; their own lineage is not the path's to compute."""
    return any(num_missing(path, index) for index in path.gaps if index < len(path.root.kept))


def fill(path: Path, gaps: list[int], page_size: int, budget: int) -> tuple[Spans, Runs]:
    """Take rows for the holes of these gaps, whose pages are there, up to the budget; they count as computed."""
    spans: Spans = []
    runs: Runs = []
    for index in gaps:
        node = path.nodes[index]
        start = node.start + node.filled[DEVICE]
        end = min(node.start + needed_tokens(path, index), start + budget)
        if start >= end:
            continue
        page_id = node.pages[DEVICE]
        assert page_id is not None
        node.filled[DEVICE] = end - node.start
        runs.append((page_id, start % page_size, end - start))
        if spans and spans[-1][1] == start:
            spans[-1] = (spans[-1][0], end)
        else:
            spans.append((start, end))
        budget -= end - start
    return spans, runs


def loaded_span(path: Path, index: int) -> tuple[int, int]:
    """Which of the path's positions a page that comes back from the host holds."""
    node, kept = path.nodes[index], path.root.kept
    start, delta = (kept[index].start, kept[index].delta) if index < len(kept) else (node.start, 0)
    return start + delta, node.start + min(node.filled[HOST], needed_tokens(path, index)) + delta


def _is_whole(path: Path, index: int) -> bool:
    """Whether the device has all the path needs of a node, where the path knows it."""
    node = path.nodes[index]
    has_all = node.filled[DEVICE] >= needed_tokens(path, index)
    return has_all and path.page_ids[index] == node.pages[DEVICE]
