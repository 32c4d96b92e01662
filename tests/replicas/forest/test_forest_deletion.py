"""What deletion takes out of the prefix forest, and what it leaves to others."""

from __future__ import annotations

from array import array

from hypothesis import given, settings
from hypothesis import strategies as st

from mneme.cachetier.names import PUBLIC_SALT, tenant_of
from mneme.replicas.engine.engine import Engine
from mneme.replicas.forest.tree import Resident, common_prefix
from mneme.replicas.request import SamplingParams
from tests.budget import examples
from tests.replicas.schedule.test_engine_policy import make_engine, make_request, run

ONE = SamplingParams(temperature=0, max_tokens=1)


def filled(prompts: list[list[int]], salt: str = "", **options: int) -> Engine:
    engine = make_engine(256, **options)
    for index, prompt in enumerate(prompts):
        engine.submit(make_request(f"r{index}", prompt, ONE, salt=salt))
    run(engine)
    return engine


def found(engine: Engine, ids: list[int], salt: str = "") -> int:
    return sum(engine.forest.resident(salt, ids))


def test_what_runs_or_is_pinned_stays() -> None:
    engine = make_engine()
    engine.submit(make_request("r", [1] * 9, SamplingParams(temperature=0, max_tokens=6)))
    engine.step()
    engine.forest.drop_prefix("", [1] * 3)
    engine.forest.drop_salts(lambda _salt: True)
    run(engine)
    assert found(engine, [1] * 9) == 9
    engine.forest.drop_prefix("", [1] * 3)
    assert found(engine, [1] * 9) == 0
    engine.forest.check()


PROMPT = st.lists(st.integers(0, 1), min_size=1, max_size=14)


@given(
    st.lists(st.tuples(st.sampled_from(["a", "a:1", "b", ":1", PUBLIC_SALT]), PROMPT), max_size=10),
    PROMPT,
    st.integers(16, 40),
)
@settings(max_examples=examples(100))
def test_tenants_find_their_own_and_what_is_public(
    said: list[tuple[str, list[int]]], ids: list[int], pages: int
) -> None:
    engine = make_engine(pages, page_size=2)
    for index, (salt, prompt) in enumerate(said):
        engine.submit(make_request(f"r{index}", prompt, ONE, salt=salt))
        if index % 3:
            run(engine)
    run(engine)

    def most(*salts: str) -> int:
        prompts = [array("i", prompt) for salt, prompt in said if salt in salts]
        return max((common_prefix(prompt, 0, ids, 0, len(ids)) for prompt in prompts), default=0)

    for salt in ("a", "a:1", "b", "c", ":1"):
        assert found(engine, ids, salt) <= most(salt, PUBLIC_SALT)
    before = {salt: found(engine, ids, salt) for salt in ("b", ":1", PUBLIC_SALT)}
    engine.forest.drop_salts(lambda salt: tenant_of(salt) == "a")
    engine.forest.check()
    assert {salt: found(engine, ids, salt) for salt in before} == before
    assert max(found(engine, ids, "a"), found(engine, ids, "a:1")) <= most(PUBLIC_SALT)


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=14), min_size=1, max_size=6), st.data())
@settings(max_examples=examples(80))
def test_after_a_deletion_nothing_beyond_what_others_share_is_found(
    prompts: list[list[int]], data: st.DataObject
) -> None:
    engine = filled(prompts)
    whole = [list(prompt) for prompt in prompts]
    before = [engine.forest.resident("", prompt) for prompt in whole]
    gone = data.draw(st.sampled_from(whole))[: data.draw(st.integers(1, 14))]
    engine.forest.drop_prefix("", gone)
    engine.forest.check()
    for prompt, had in zip(whole, before, strict=True):
        has = engine.forest.resident("", prompt)
        if prompt[: len(gone)] != gone and gone[: len(prompt)] != prompt:
            assert has == had  # neither begins with the other
        assert has <= had
    others = [prompt for prompt in whole if prompt[: len(gone)] != gone]
    if not others:
        assert engine.forest.resident("", gone) == Resident(0, 0)
        assert engine.forest.device.num_cached == 0
