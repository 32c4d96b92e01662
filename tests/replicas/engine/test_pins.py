"""Prompts that are computed before traffic and pinned, and what requests that were taken before keep; no tensors."""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mneme.cachetier.names import PUBLIC_SALT, tenant_id
from mneme.cachetier.pin_book import PinName
from mneme.config import parse
from mneme.errors import (
    ConfigError,
    ContextLengthExceeded,
    InvalidRequest,
    MnemeError,
    Overloaded,
    PinRefused,
    SessionNotFound,
)
from mneme.replicas.config import EngineConfig
from mneme.replicas.engine.build import warm_before_traffic
from mneme.replicas.engine.engine import Engine
from mneme.replicas.request import PinnedPrefix, SamplingParams, TokenEvent
from mneme.replicas.text.prompts import conversation_prefix
from tests.budget import examples
from tests.replicas.fake_runner import Clock, FakeRunner, continuation
from tests.replicas.schedule.test_engine_policy import GREEDY, make_engine, make_request, run, tokens_of, usage_of
from tests.replicas.tiered_engine import lose_range
from tests.replicas.tiny_tokenizer import tiny_tokenizer

pytestmark = pytest.mark.engine

TOKENIZER = tiny_tokenizer()


def warm(engine: Engine, pin_id: str, ids: list[int], *, tenant: bytes = b"t", salt: str = "", **more: Any) -> Any:
    engine.pins.warm(PinName(tenant, pin_id), salt, tuple(ids), **more)
    run(engine)
    return engine.pins.describe(PinName(tenant, pin_id))


def fill(engine: Engine) -> None:
    """Traffic that takes every page that it can get."""
    for index in range(6):
        engine.submit(make_request(f"fill{index}", [index % 5, index // 5, *[0] * 20], salt="other"))
    run(engine)


def test_a_warm_prompt_outlives_traffic_and_is_found_to_the_token() -> None:
    engine = make_engine(num_pages=16, page_size=4)
    described = warm(engine, "p", [1, 2] * 5)
    assert described.pin["num_tokens"] == 10
    assert (described.pin["pinned"], described.warming, described.error) == (True, False, None)
    assert engine.capacity == 13 * 4
    with pytest.raises(ContextLengthExceeded, match="must fit 52 tokens"):
        engine.submit(make_request("over", [2] * 50))
    fill(engine)
    engine.submit(make_request("r", [1, 2] * 5 + [3]))
    events = run(engine)
    assert usage_of(events, "r") == (11, 10)
    assert tokens_of(events, "r") == continuation([1, 2] * 5 + [3], 4, 5)
    engine.submit(make_request("stranger", [1, 2] * 5, salt="other"))
    assert usage_of(run(engine), "stranger")[1] == 0
    assert engine.pins.unpin(PinName(b"t", "p"))
    assert not engine.pins.unpin(PinName(b"t", "p"))
    assert (engine.forest.device.num_in_use, engine.capacity) == (0, 16 * 4)


def test_several_prompts_at_once_share_what_they_have_in_common() -> None:
    engine = make_engine(num_pages=32, page_size=4, max_batch_tokens=64)
    runner: FakeRunner = engine.runner  # type: ignore[assignment]
    for index in range(3):
        engine.pins.warm(PinName(b"t", str(index)), "", (*[1] * 16, index, 2))
    run(engine)
    assert [pin.pin["pinned"] for pin in engine.pins.of_tenant(b"t")] == [True] * 3
    assert runner.num_rows == 18 + 2 + 2
    assert engine.forest.stats()["pages"]["pinned"] == 4 + 3


def test_a_pin_ends_at_its_time() -> None:
    clock = Clock()
    engine = make_engine(num_pages=16, page_size=4, clock=clock)
    assert warm(engine, "p", [1] * 8, ttl_s=60).pin["expires_in_s"] == 60
    clock.now_s = 59.0
    assert engine.pins.of_tenant(b"t")[0].pin["expires_in_s"] == 1
    clock.now_s = 60.0
    assert engine.pins.of_tenant(b"t") == []
    assert engine.forest.device.num_in_use == 0


def test_a_pin_that_is_let_go_while_it_is_computed_leaves_nothing() -> None:
    engine = make_engine(num_pages=16, page_size=4, max_batch_tokens=16)
    engine.pins.warm(PinName(b"t", "p"), "", (1,) * 24)
    engine.step()
    assert engine.pins.of_tenant(b"t")[0].warming
    assert engine.pins.unpin(PinName(b"t", "p"))
    run(engine)
    assert engine.forest.device.num_in_use == 0
    assert engine.in_flight == {}


def test_what_would_take_too_much_is_refused_with_figures_and_before_it_is_computed() -> None:
    engine = make_engine(num_pages=16, page_size=4)
    with pytest.raises(PinRefused, match="pinning 9 pages more would leave 7 unpinned; at least 8 must be"):
        warm(engine, "p", [1] * 36)
    assert engine.num_steps == 0
    warm(engine, "p", [1] * 32)
    warm(engine, "again", [1] * 30)  # pinned already: costs nothing
    with pytest.raises(PinRefused, match="pinning 1 pages more would leave 7"):
        warm(engine, "q", [2])
    with pytest.raises(ContextLengthExceeded, match="must fit 32 tokens"):
        warm(engine, "long", [2] * 40, keeps=False)
    with pytest.raises(InvalidRequest, match="from 0 to 4"):
        warm(engine, "no token", [7], keeps=False)
    assert len(engine.pins.of_tenant(b"t")) == 2
    engine = make_engine(num_pages=16, page_size=4)
    engine.submit(make_request("long", [2] * 20, SamplingParams(temperature=0, max_tokens=36)))
    with pytest.raises(PinRefused, match="would leave 13 unpinned; at least 14"):
        warm(engine, "p", [1] * 12)
    assert len(tokens_of(run(engine), "long")) == 36


def test_room_that_is_taken_while_a_prompt_is_computed_refuses_the_pin(caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine(num_pages=16, page_size=4, clock=Clock())
    engine.pins.warm(PinName(b"t", "p"), "", (1,) * 12)
    engine.submit(make_request("long", [2] * 20, SamplingParams(temperature=0, max_tokens=40)))
    events = run(engine)
    described = engine.pins.describe(PinName(b"t", "p"))
    assert isinstance(described.error, PinRefused)
    assert "not pinned" in caplog.text
    assert engine.pins.of_tenant(b"t") == []
    assert len(tokens_of(events, "long")) == 40


def test_a_tenant_has_so_many_pins_and_sees_its_own_alone() -> None:
    engine = make_engine(num_pages=64, page_size=4)
    engine.pins.max_pins = 2
    for name in ("a", "b"):
        warm(engine, name, [1, 2, 3], salt=name)  # another salt is no other quota
    with pytest.raises(InvalidRequest, match="may have 2 pins"):
        warm(engine, "c", [1, 2, 3])
    with pytest.raises(InvalidRequest, match="of this name exists"):
        warm(engine, "a", [1], keeps=False)
    warm(engine, "c", [1, 2, 3], tenant=b"u")
    assert [pin.pin["id"] for pin in engine.pins.of_tenant(b"t")] == ["a", "b"]
    assert not engine.pins.unpin(PinName(b"u", "a"))
    assert engine.pins.describe(PinName(b"u", "a")) is None
    engine.pins.unpin(PinName(b"t", "a"))
    warm(engine, "d", [1, 2, 3])


def test_what_is_only_computed_is_not_pinned() -> None:
    clock = Clock()
    engine = make_engine(num_pages=16, page_size=4, clock=clock)
    described = warm(engine, "p", [1] * 8, keeps=False)
    assert (described.pin["pinned"], described.warming, described.error) == (False, False, None)
    assert engine.pins.of_tenant(b"t") == []
    assert engine.forest.device.num_in_use == 0
    engine.submit(make_request("r", [1] * 8))
    assert usage_of(run(engine), "r") == (8, 7)
    clock.now_s = 100.0
    assert engine.pins.describe(PinName(b"t", "p")) is None


def test_a_full_queue_is_overloaded_and_leaves_nothing() -> None:
    engine = make_engine(max_waiting=1)
    engine.submit(make_request("r", [1]))
    with pytest.raises(Overloaded):
        engine.pins.warm(PinName(b"t", "p"), "", (1, 2))
    assert engine.pins.of_tenant(b"t") == []


def test_a_failed_step_takes_pins_and_they_are_warmed_again(caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine(num_pages=16, page_size=4)
    warm(engine, "p", [1] * 10)
    engine.submit(make_request("r", [2] * 4))
    engine.pins.warm(PinName(b"t", "half"), "", (3,) * 18)  # of two steps
    engine.step()
    failed = engine.fail_all("the device is gone")
    assert ("r", "error") in [(event.request_id, event.finish_reason) for event in failed]
    (pin,) = engine.pins.of_tenant(b"t")
    assert (pin.warming, pin.pin["pinned"]) == (True, False)
    half = engine.pins.describe(PinName(b"t", "half"))
    assert isinstance(half.error, MnemeError)
    assert "not pinned" in caplog.text
    run(engine)
    assert engine.pins.of_tenant(b"t")[0].pin["pinned"]
    fill(engine)
    engine.submit(make_request("again", [1] * 10))
    assert usage_of(run(engine), "again") == (10, 9)


def test_configured_prompts_are_computed_once_for_all_tenants_and_stay() -> None:
    runner = FakeRunner(200, 4, vocab_size=400)
    engine = Engine(runner, None, EngineConfig(max_waiting=2))  # type: ignore[arg-type]
    warm_before_traffic(engine, TOKENIZER, ["be brief", "the quick brown fox", "a"])
    ids = TOKENIZER.encode_rendered("<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nthe fox<|im_end|>\n")
    system = [{"role": "system", "content": "be brief"}]
    prefix = conversation_prefix(TOKENIZER.render_chat, TOKENIZER.encode_rendered, system)
    assert ids[: len(prefix)] == prefix
    pins = engine.pins.of_tenant(tenant_id(PUBLIC_SALT))
    assert [(pin.pin["pinned"], pin.pin["public"]) for pin in pins] == [(True, True)] * 3
    with pytest.raises(InvalidRequest, match="part of the configuration"):
        engine.pins.unpin(PinName(tenant_id(PUBLIC_SALT), pins[0].pin["id"]))
    for salt in ("one", "two", ""):
        before = runner.num_rows
        engine.submit(make_request(salt, ids, GREEDY, salt=salt))
        assert usage_of(run(engine), salt) == (len(ids), len(prefix))
        assert runner.num_rows - before == len(ids) - len(prefix) + (GREEDY.max_tokens or 0) - 1
        engine.forest.check()
    engine.pins.warm(PinName(tenant_id("one"), "own"), "one", (5, 6))


def test_configured_prompts_that_do_not_fit_are_named() -> None:
    engine = Engine(FakeRunner(8, 4, vocab_size=400), None, EngineConfig())  # type: ignore[arg-type]
    prompts = ["a b", "the quick brown fox " * 20]
    with pytest.raises(ConfigError, match=r"engine\.warm_prompts\[1\]: pin: pinning \d+ pages more would leave"):
        warm_before_traffic(engine, tiny_tokenizer(None), prompts)


def test_without_a_chat_template_configured_prompts_are_how_prompts_begin() -> None:
    tokenizer, engine = tiny_tokenizer(None), Engine(FakeRunner(64, 4, vocab_size=400), None, EngineConfig())  # type: ignore[arg-type]
    warm_before_traffic(engine, tokenizer, ["the quick brown fox"])
    ids = tokenizer.encode("the quick brown fox", add_special_tokens=True)
    assert engine.forest.resident("one", ids).device == len(ids)


@pytest.mark.parametrize("given", [{"system": "a"}, "", 5])
def test_configured_prompts_are_checked(given: Any) -> None:
    with pytest.raises(ConfigError, match="warm_prompts"):
        parse(EngineConfig, {"warm_prompts": [given]}, "engine")
    assert parse(EngineConfig, {"warm_prompts": ["a"]}).warm_prompts == ("a",)


@pytest.mark.parametrize("lost", [[], [0, 2]])
def test_a_prompt_that_is_on_the_host_or_in_part_lost_is_pinned_on_the_device(lost: list[int]) -> None:
    ids = [1, 2] * 10
    engine = push_out(ids, FakeRunner(16, 4, num_host_pages=40), lost)
    assert warm(engine, "p", ids).pin["pinned"]
    assert engine.forest.resident("", ids).device == len(ids)
    fill(engine)
    assert engine.forest.resident("", ids).device == len(ids)
    engine.pins.unpin(PinName(b"t", "p"))
    assert engine.forest.device.num_in_use == 0


def test_under_a_window_what_comes_behind_a_pinned_prompt_finds_all_that_it_sees() -> None:
    ids = [1, 2] * 10
    runner = FakeRunner(16, 4, num_host_pages=40, window=3)
    engine = push_out(ids, runner, [0, 2])
    assert warm(engine, "p", ids).pin["pinned"]
    fill(engine)
    num_rows, num_loaded = runner.num_rows, runner.num_loaded
    engine.submit(make_request("behind", [*ids, 3], SamplingParams(temperature=0, max_tokens=1)))
    assert tokens_of(run(engine), "behind") == continuation([*ids, 3], 1, 5)
    assert (runner.num_rows - num_rows, runner.num_loaded - num_loaded) == (1, 0)
    engine.submit(make_request("in the middle", [*ids[:9], 3], SamplingParams(temperature=0, max_tokens=1)))
    assert tokens_of(run(engine), "in the middle") == continuation([*ids[:9], 3], 1, 5)
    engine.pins.unpin(PinName(b"t", "p"))
    assert engine.forest.device.num_in_use == 0


def push_out(ids: list[int], runner: FakeRunner, lost: list[int]) -> Engine:
    """An engine that has computed a prompt, has it on the host alone, and there not these of its pages."""
    engine = make_engine(runner=runner)
    engine.submit(make_request("before", ids, SamplingParams(temperature=0, max_tokens=1)))
    run(engine)
    engine.submit(make_request("all", [0] * 60))
    run(engine)
    assert engine.forest.resident("", ids) == (0, len(ids))
    for page in lost:
        lose_range(engine, ids, 4 * page, 4 * page + 1, "dropped")
    return engine


def test_a_request_without_a_limit_ends_sooner_where_a_pin_takes_the_room() -> None:
    engine = make_engine(num_pages=10, page_size=4)
    engine.submit(make_request("warm", [1] * 12, SamplingParams(temperature=0, max_tokens=1)))
    run(engine)
    engine.submit(make_request("endless", [2] * 8, SamplingParams(temperature=0, max_tokens=None)))
    for _ in range(3):
        engine.step()
    engine.pins.pin_prefix("", [1] * 12)
    assert len(tokens_of(run(engine), "endless")) <= 28 - 8
    engine = make_engine(num_pages=10, page_size=4)
    engine.submit(make_request("warm", [1] * 12, SamplingParams(temperature=0, max_tokens=1)))
    run(engine)
    engine.submit(make_request("endless", [2] * 8, SamplingParams(temperature=0, max_tokens=None, min_tokens=24)))
    with pytest.raises(PinRefused, match="would leave 7 unpinned; at least 8"):  # it was promised 24
        engine.pins.pin_prefix("", [1] * 12)


turns = st.lists(
    st.tuples(
        st.integers(0, 6),  # the step at which it arrives
        st.integers(1, 24),  # prompt tokens
        st.one_of(st.none(), st.integers(1, 16)),  # max_tokens
        st.sampled_from([None, "s", "s", "t"]),  # session
        st.booleans(),  # appended
    ),
    min_size=1,
    max_size=10,
)


@pytest.mark.at_length
@settings(max_examples=examples(100, at_length=250))
@given(turns, st.integers(10, 14), st.lists(st.tuples(st.integers(1, 20), st.integers(1, 24)), min_size=1, max_size=4))
def test_no_pin_ends_or_refuses_what_was_taken_before_it(
    traffic: list[Any], num_pages: int, pinning: list[tuple[int, int]]
) -> None:
    """`pinning`: at which step, and how many tokens; what a session may come to is counted here too."""
    engine = make_engine(num_pages, 4)
    longest: dict[str | None, int] = {}
    taken: dict[str, int | None] = {}
    events: list[TokenEvent] = []
    for step in itertools.count():
        for index, (arrival, num_prompt, max_tokens, session, append) in enumerate(traffic):
            appends = append and session is not None
            needed = num_prompt + (max_tokens or 1) + (longest.get(session, 0) if appends else 0)
            if arrival != step or needed > engine.capacity:
                continue
            params = SamplingParams(temperature=0, max_tokens=max_tokens)
            ids = [index % 2] * num_prompt
            with contextlib.suppress(SessionNotFound):
                engine.submit(make_request(f"r{index}.0", ids, params, session_id=session, append=appends))
                taken[f"r{index}.0"] = max_tokens
                longest[session] = max(longest.get(session, 0), needed if max_tokens else engine.capacity)
        for start, length in pinning:
            if start == step:
                with contextlib.suppress(PinRefused):
                    engine.pins.pin_prefix("", [start % 2] * length)
        events += engine.step()
        if step > 40 and not engine.has_work:
            break
        assert step < 4_000, "some request never ends"
    for name, max_tokens in taken.items():
        assert [event.finish_reason for event in events if event.request_id == name][-1] == "length", name
        assert len(tokens_of(events, name)) == (max_tokens or len(tokens_of(events, name))) >= 1


def keeping(name: str, ids: list[int], *kept: tuple[int, float], **more: Any) -> Any:
    return replace(make_request(name, ids, **more), pinned=tuple(PinnedPrefix(*each) for each in kept))


def marks(engine: Engine) -> list[int]:
    return sorted(pin.pin["num_tokens"] for pin in engine.pins.of_tenant(tenant_id("")))


def test_what_a_request_keeps_of_its_prompt_outlives_traffic_for_its_time() -> None:
    clock = Clock()
    engine = make_engine(num_pages=32, page_size=4, clock=clock)
    engine.submit(keeping("a", [1, 2] * 6, (8, 60.0)))
    run(engine)
    assert marks(engine) == [8]
    fill(engine)
    engine.submit(keeping("b", [1, 2] * 6))
    assert usage_of(run(engine), "b") == (12, 8)
    clock.now_s = 59.0
    engine.submit(keeping("again", [1, 2] * 6, (8, 60.0)))  # the same for longer
    run(engine)
    clock.now_s = 100.0
    assert marks(engine) == [8]
    clock.now_s = 120.0
    assert marks(engine) == []
    assert engine.forest.device.num_in_use == 0


def test_a_mark_that_goes_on_from_another_takes_its_place_unless_that_stays_longer() -> None:
    engine = make_engine(num_pages=64, page_size=4)
    for end in (8, 10, 12):
        engine.submit(keeping(f"r{end}", [1] * end, (4, 3600.0), (end, 60.0)))
        run(engine)
    assert marks(engine) == [4, 12]


def test_marks_make_room_for_each_other_and_never_refuse_a_request() -> None:
    engine = make_engine(num_pages=32, page_size=4)
    engine.pins.max_pins = 3
    warm(engine, "own", [4, 3] * 2, tenant=tenant_id(""))
    for index in range(5):
        engine.submit(keeping(f"r{index}", [index] * 6, (4, 60.0 + index)))
        assert tokens_of(run(engine), f"r{index}") == continuation([index] * 6, 4, 5)
    assert marks(engine) == [4, 4, 4]
    assert engine.pins.unpin(PinName(tenant_id(""), "own"))
    engine.submit(keeping("large", [3] * 90, (90, 60.0)))  # more than pins may have
    assert tokens_of(run(engine), "large") == continuation([3] * 90, 4, 5)
    assert 90 not in marks(engine)
