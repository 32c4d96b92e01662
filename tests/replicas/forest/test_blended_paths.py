"""Paths that see documents computed apart: the fake runner checks that every row sees each position once."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from mneme.replicas.forest.forest import PrefixForest
from mneme.replicas.forest.paths import DocumentUse, Path
from mneme.replicas.sequence import Sequence, StepRows
from tests.budget import examples
from tests.replicas.fake_runner import FakeRunner
from tests.replicas.schedule.test_engine_policy import make_request

tokens = st.lists(st.integers(0, 4), max_size=6)
blends = st.tuples(
    st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=14), min_size=1, max_size=3),  # documents
    st.lists(st.tuples(tokens, st.integers(0, 2)), min_size=1, max_size=5),  # text, and the document behind it
    st.lists(st.integers(0, 4), min_size=1, max_size=6),  # the question
    st.lists(st.integers(0, 4), max_size=1),  # what documents are computed behind
    st.integers(0, 20),  # tokens of the prompt that are known, exactly
    st.sets(st.integers(0, 90)),  # positions that are computed anew
    st.sampled_from([4, 8]),
    st.integers(1, 30),  # rows of a step
    st.booleans(),  # whether the documents went to the host
)


@settings(max_examples=examples(300))
@given(blends)
def test_every_row_sees_each_position_once(case: tuple[Any, ...]) -> None:
    documents, parts, question, sink, num_exact, chosen, page_size, num_rows, is_away = case
    forest = PrefixForest(100, page_size, first_page=1, num_host_pages=100 * is_away)
    runner = FakeRunner(100, page_size, num_host_pages=100 * is_away)
    ids: list[int] = []
    spans: list[tuple[int, int]] = []
    for text, index in parts:
        document = documents[index % len(documents)]
        ids += text
        spans.append((len(ids), len(ids) + len(document)))
        ids += document
    end = len(ids)
    ids += question
    for prompt in (*([*sink, *ids[start:stop]] for start, stop in spans), ids[: min(num_exact, end - 1)]):
        if prompt:
            path = forest.open_path("")
            path.extend(prompt, len(prompt))
            compute(forest, runner, path, prompt, num_rows)
            forest.release(path)
    if is_away:
        while forest.device.num_cached:
            forest.store.evict()
        runner.prepare([], forest.store.drain_moves())

    exact = forest.open_path("")
    exact.extend(ids, end - 1)
    uses = []
    for start, stop in spans:
        if start >= exact.num_tokens:
            path = forest.open_path("")
            path.extend([*sink, *ids[start:stop]], len(sink) + stop - start)
            uses.append(DocumentUse(path, start, stop, start - len(sink)))
    reused = {position for use in uses for position in range(use.start, use.end)} - chosen
    private = [position for position in range(exact.num_tokens, end) if position not in reused]
    path = forest.blend(exact, uses, private, ids, end)
    for other in (exact, *(use.path for use in uses)):
        forest.release(other)
    forest.check()
    assert compute(forest, runner, path, ids, num_rows) == len(private) + len(question)

    root = path.root
    forest.release(path)
    stranger = forest.open_path("")
    num_known = stranger.extend(ids, len(ids))
    is_document = any([*sink, *ids[start:stop]][: len(ids)] == ids for start, stop in spans)  # then it is known as that
    assert num_known < len(ids) or is_document
    forest.release(stranger)
    again = forest.open_path("", [*ids, 1], root)
    again.extend(ids, len(ids))
    assert compute(forest, runner, again, [*ids, 1], num_rows) == 1
    forest.release(again)
    forest.abandon(root)
    forest.check()
    assert not forest.kept_roots
    assert not any(page.keepers for known in forest.roots.values() for page in known.below_it())


def test_a_blend_whose_private_tokens_are_gone_is_lost() -> None:
    forest, runner = PrefixForest(20, 4, first_page=1), FakeRunner(20, 4)
    document, ids = [1, 2, 3, 4, 0, 1], [4, 4, 1, 2, 3, 4, 0, 1, 2]
    path = forest.open_path("")
    compute(forest, runner, path, document, 16)
    exact = forest.open_path("")
    blended = forest.blend(exact, [DocumentUse(path, 2, 8, 2)], [0, 1, 3], ids, 8)
    root = blended.root
    forest.release(exact)
    compute(forest, runner, blended, ids, 16)
    forest.release(blended)
    private = next(kept.page for kept in root.kept if kept.root is root)
    forest.store.drop(private, forest.device)
    forest.check()
    anew = forest.open_path("", ids, root)
    assert not anew.root.is_own
    forest.release(anew)
    forest.abandon(root)
    forest.release(path)
    forest.check()
    assert forest.device.num_cached == 2  # the document


def compute(forest: PrefixForest, runner: FakeRunner, path: Path, ids: list[int], num_rows: int) -> int:
    """Compute what a path lacks, step by step; returns the number of rows."""
    sequence = Sequence(
        request=make_request("r", ids), ids=list(ids), num_prompt=len(ids), max_tokens=1, arrival=0, path=path
    )
    before = runner.num_rows
    while path.num_pending(ids):
        rows = path.take_rows(ids, num_rows)
        part = StepRows(sequence, rows.spans, rows.runs, rows.shifts)
        runner.forward(runner.prepare([part], forest.store.drain_moves()))
        forest.check()
    return runner.num_rows - before
