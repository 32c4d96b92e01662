"""The prefix forest as people see it: runs whose tokens add up, whatever was computed, evicted and pinned."""

from __future__ import annotations

import random

import pytest

from mneme.replicas.engine.engine import Engine
from mneme.replicas.engine.overview import shown_tree
from mneme.replicas.queries import GetTree, Tree
from tests.replicas.fake_runner import FakeRunner
from tests.replicas.schedule.test_engine_policy import make_engine, make_request, run

pytestmark = pytest.mark.policy


def tree_of(engine: Engine, salt: str | None = "", **asked: int) -> Tree:
    query = GetTree(salt, **{"depth": 1000, "min_tokens": 0, "max_runs": 10_000, **asked})
    return shown_tree(engine.forest, engine.clock(), query)


def engine_of(num_pages: int) -> Engine:
    return make_engine(runner=FakeRunner(num_pages, 4, vocab_size=64))


@pytest.mark.parametrize("seed", range(5))
def test_runs_add_up_to_what_the_forest_has(seed: int) -> None:
    draw = random.Random(seed)
    engine = engine_of(40)
    beginnings = [[draw.randrange(50) for _ in range(draw.randrange(1, 20))] for _ in range(4)]
    for number in range(30):
        ids = draw.choice(beginnings) + [draw.randrange(50) for _ in range(draw.randrange(1, 12))]
        engine.submit(make_request(str(number), ids, salt=draw.choice(["", "a", "a:b"])))
        run(engine)
        everything = tree_of(engine, None)
        forest = engine.forest
        pages = [page for root in (*forest.roots.values(), *forest.kept_roots) for page in root.below_it()]
        assert everything["num_tokens"] == sum(len(page.tokens) for page in pages)
        assert sum(run["device"] for run in everything["runs"]) == sum(page.filled[0] for page in pages)
        assert all(run["first_ids"] == [] for run in everything["runs"])
        own, other = tree_of(engine, ""), tree_of(engine, "a")
        assert own["num_tokens"] + other["num_tokens"] == everything["num_tokens"]
        for index, each in enumerate(own["runs"]):
            follow = [run for run in own["runs"] if run["parent"] == index]
            assert each["below"] == each["tokens"] + sum(run["below"] for run in follow)
            assert each["parent"] < index


def test_the_largest_are_listed_with_all_before_them() -> None:
    engine = engine_of(64)
    for number in range(8):
        engine.submit(make_request(str(number), [1, 2, 3, 4, *[10 + number] * (number + 1)]))
    run(engine)
    whole = tree_of(engine)
    few = tree_of(engine, max_runs=4)
    assert len(few["runs"]) <= 4 < whole["num_runs"] == few["num_runs"]
    assert all(run["parent"] in range(-1, len(few["runs"])) for run in few["runs"])
    least = min(run["below"] for run in few["runs"])
    assert sum(run["below"] > least for run in whole["runs"]) < len(few["runs"])
    assert {run["parent"] for run in tree_of(engine, depth=1)["runs"]} == {-1}
    assert all(run["below"] >= 9 for run in tree_of(engine, min_tokens=9)["runs"])
