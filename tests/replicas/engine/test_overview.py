"""The prefix forest as people see it: runs whose tokens add up, whatever was computed, evicted and pinned."""

from __future__ import annotations

import random

import pytest

from mneme.cachetier.names import PUBLIC_SALT
from mneme.replicas.engine import overview
from mneme.replicas.engine.engine import Engine
from mneme.replicas.engine.overview import TreeWalk
from mneme.replicas.queries import GetTree, Tree
from mneme.replicas.request import SamplingParams
from tests.replicas.asked import answer
from tests.replicas.fake_runner import FakeRunner
from tests.replicas.schedule.test_engine_policy import make_engine, make_request, run

pytestmark = pytest.mark.policy


def tree_of(engine: Engine, salt: str | None = "", **asked: int) -> Tree:
    query = GetTree(salt, **{"depth": 1000, "min_tokens": 0, "max_runs": 10_000, **asked})
    found: Tree = answer(engine, query)
    return found


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


def test_who_uses_a_run_is_counted() -> None:
    engine = engine_of(64)
    engine.submit(make_request("a", [1, 2, 3, 4, 5], session_id="s"))
    engine.step()
    assert {run["running"] for run in tree_of(engine)["runs"]} == {1}
    run(engine)
    shown = tree_of(engine)["runs"]
    assert {each["running"] for each in shown} == {0}
    assert sum(each["sessions"] for each in shown) == 1
    assert shown[0]["first_ids"][:5] == [1, 2, 3, 4, 5]
    assert shown[0]["idle_s"] > 0


def test_what_another_tenant_has_behind_public_pages_is_not_shown() -> None:
    engine = engine_of(64)
    public, secret = list(range(1, 9)), [50, 51, 52, 53, 54, 55]
    one_token = SamplingParams(temperature=0, max_tokens=1, seed=0)
    engine.submit(make_request("public", public, one_token, salt=PUBLIC_SALT))
    run(engine)
    engine.submit(make_request("b", [*public, *secret], one_token, salt="b", session_id="s"))
    run(engine)
    shown = tree_of(engine, "a")
    assert (shown["num_tokens"], sum(each["sessions"] for each in shown["runs"])) == (len(public), 0)
    assert [each["first_ids"] for each in shown["runs"]] == [public]
    own = tree_of(engine, "b")["runs"]
    assert [each["first_ids"] for each in own] == [public, secret]
    assert [each["parent"] for each in own] == [-1, 0]


def test_of_runs_of_one_size_as_many_are_listed_as_were_asked_for() -> None:
    engine = engine_of(64)
    for number in range(8):
        engine.submit(make_request(str(number), [10 + number] * 4))
    run(engine)
    assert [tree_of(engine, max_runs=count)["num_runs"] for count in (1, 5)] == [8, 8]
    assert [len(tree_of(engine, max_runs=count)["runs"]) for count in (1, 5)] == [1, 5]


def test_a_large_forest_is_walked_in_parts_between_which_the_engine_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is dropped meanwhile, and what comes, leaves every run whole. Parts are small: a large forest takes long."""
    monkeypatch.setattr(overview, "_MAX_PAGES", 1_000)
    engine = make_engine(runner=FakeRunner(320, 4, vocab_size=64), max_batch_tokens=256)
    one_token = SamplingParams(temperature=0, max_tokens=1, seed=0)
    for number in range(300):
        ids = [number % 60, number // 60, 1, 2]
        engine.submit(make_request(str(number), ids, one_token, salt="b" if number % 60 == 0 else ""))
    run(engine)
    assert tree_of(engine, max_runs=50)["num_runs"] < tree_of(engine)["num_runs"] == 295
    walk, num_parts = TreeWalk(GetTree("", 1000, 0, 10_000)), 1
    while walk.go_on(engine):
        num_parts += 1
        for number in range(40):  # takes the pages of others
            engine.submit(make_request(f"{num_parts}.{number}", [61, num_parts, number, 3], one_token))
        run(engine)
    tree = walk.tree()
    assert num_parts > 2
    assert all(each["parent"] < index for index, each in enumerate(tree["runs"]))
    assert tree["num_tokens"] == sum(each["tokens"] for each in tree["runs"])
    assert all(len(each["first_ids"]) == each["tokens"] for each in tree["runs"])
    assert all(each["first_ids"][0] % 60 for each in tree["runs"])  # none of "b"
