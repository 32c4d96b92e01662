"""A decode's short way to the next slot of its own page does what the long way does."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from mneme.replicas.forest.forest import PrefixForest
from mneme.replicas.forest.page_store import OutOfPages
from mneme.replicas.forest.paths import Path
from mneme.replicas.forest.tree import Page
from tests.budget import examples

PAGE_SIZE = 4


class Traffic:
    """Sequences over one forest; the random choices are the caller's."""

    def __init__(self, *, is_short: bool, num_pages: int, sharing: bool, window: int | None) -> None:
        self.forest = PrefixForest(
            num_pages, PAGE_SIZE, sharing=sharing, num_host_pages=8, window=window, clock=lambda: 0.0
        )
        self.changed = self.forest.report_changes()
        self.is_short = is_short
        self.num_short = 0
        self.running: list[tuple[Path, list[int]]] = []

    def begin(self, ids: list[int]) -> Any:
        path = self.forest.open_path("", ids)
        self.running.append((path, ids))
        return self.advance(path, ids, len(ids))

    def decode(self, index: int, token: int) -> Any:
        path, ids = self.running[index]
        ids.append(token)
        return self.advance(path, ids, 1)

    def advance(self, path: Path, ids: list[int], budget: int) -> Any:
        if self.is_short and budget == 1 and (path.write_next(ids) or path.begin_next(ids)):
            self.num_short += 1
            run = path.page_ids[-1], (path.num_tokens - 1) % PAGE_SIZE, 1
            return [(path.num_tokens - 1, path.num_tokens)], [run], [0]
        path.extend(ids, len(ids))
        try:
            rows = path.take_rows(ids, budget)
        except OutOfPages:
            return "out of pages"
        return rows.spans, rows.runs, rows.shifts

    def truncate(self, index: int) -> bool:
        path, ids = self.running[index]
        spans = [(0, 2), (path.num_tokens - 3, path.num_tokens)]
        if path.num_tokens < 8 or path.num_tokens < len(ids) or path.gaps:
            return False
        shorter = self.forest.truncate(path, spans)
        if shorter is not None:
            self.running[index] = shorter, ids[:2] + ids[-3:]
        return shorter is not None

    def release(self, index: int) -> None:
        path, _ = self.running.pop(index)
        self.forest.release(path)

    def state(self) -> Any:
        forest = self.forest
        moves = forest.store.drain_moves()
        paths = [path for path, _ in self.running]

        def page_state(page: Page) -> Any:
            writer = None if page.writer is None else paths.index(page.writer)
            below = [(key, page_state(child)) for key, child in page.children.items()]
            changed = page in self.changed
            return page.start, page.tokens.tolist(), page.ids, page.filled, page.refs, writer, changed, below

        roots = [page_state(root) for root in (*forest.roots.values(), *(path.root for path in paths))]
        seen = [(path.num_tokens, path.gaps, path.page_ids, path.masks, path.num_changes) for path in paths]
        return roots, seen, forest.device.free, forest.device.num_in_use, moves[:3]


@given(seed=st.integers(0, 2**32), sharing=st.sampled_from([True, True, True, False]))
@settings(max_examples=examples(60))
def test_the_short_way_and_the_long_way_leave_the_same_forest(seed: int, sharing: bool) -> None:
    """Among twins, forks, copies on the host, truncated sequences and tokens that are not known yet."""
    rng = random.Random(seed)
    window = rng.choice([None, None, 6])
    both = [Traffic(is_short=s, num_pages=12, sharing=sharing, window=window) for s in (True, False)]
    for unknown in range(-2, -80, -1):
        running = both[0].running
        index = rng.randrange(len(running)) if running else 0
        action = rng.choice(["begin", "fork", "truncate", "release", *["decode"] * 16])
        if not running or (action == "begin" and len(running) < 4):
            ids = [rng.randrange(2) for _ in range(rng.randrange(1, 11))]
            results = [each.begin(list(ids)) for each in both]
        elif action == "fork" and len(running) < 4:
            results = [each.begin(list(each.running[index][1])) for each in both]
        elif action == "truncate" and sharing and window is None:
            results = [each.truncate(index) for each in both]
        elif action == "release" or len(running[index][1]) > 30:
            results = [each.release(index) for each in both]
        else:
            token = rng.choice([0, 1, unknown])
            results = [each.decode(index, token) for each in both]
        assert results[0] == results[1]
        if results[0] == "out of pages":
            for each in both:
                each.release(index if action == "decode" else -1)
        states = [each.state() for each in both]
        assert states[0] == states[1]
        for each in both if sharing else ():
            each.forest.check()
    assert both[0].num_short > 0
