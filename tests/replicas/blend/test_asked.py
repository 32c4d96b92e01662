"""What is asked again under `auto` is an exact prefix from then on: engines against the fake runner."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mneme.replicas.blend.asked import AskedBeginnings
from mneme.replicas.blend.gate import Gate
from mneme.replicas.config import EngineConfig
from mneme.replicas.documents import ASKED_AGAIN, EXACT, FIRST_ASKED, BlendOptions, BlendUsage
from mneme.replicas.engine.engine import Engine
from mneme.replicas.engine.stats import engine_stats
from mneme.replicas.queries import DeleteSequencePages, DeleteSession
from mneme.replicas.request import GenerationRequest, PromptUsage
from tests.budget import examples
from tests.replicas.asked import answer
from tests.replicas.blend.test_blended_traffic import blended, usage_of
from tests.replicas.fake_runner import FakeRunner, continuation
from tests.replicas.schedule.test_engine_policy import run, tokens_of

AUTO = BlendOptions(min_tokens=2)
ANY = BlendOptions(min_tokens=2, order="any")
GATE = Gate({"first-k": 0.5}, "", (0.5,))
SYSTEM, QUESTION = (0, 1), (2, 2, 3)
A, B, C = [1, 2, 3, 4, 0, 1, 2, 3, 3], [4, 4, 2, 0, 1, 1], [3, 1, 4, 1, 0, 2, 4]
SECOND = ("", "public:second")
_NAMES = itertools.count()


def make_engine(gate: Gate = GATE, **options: Any) -> Engine:
    config = EngineConfig(**{"max_batch_tokens": 64, "max_running": 8, **options})
    runner = FakeRunner(400, 4)
    return Engine(runner, None, config, clock=itertools.count().__next__, gate=gate)  # type: ignore[arg-type]


def asks(
    engine: Engine, parts: Sequence[Any], blend: BlendOptions = AUTO, **more: Any
) -> tuple[PromptUsage, BlendUsage]:
    request = blended(f"r{next(_NAMES)}", list(parts), blend, 1, **more)
    engine.submit(request)
    events = run(engine)
    usage = usage_of(events)
    ids = list(request.in_order(usage.blend.order).prompt_token_ids)
    assert tokens_of(events, request.request_id) == continuation(ids, 1, 5)
    return usage, usage.blend


def know(engine: Engine, *documents: list[int]) -> None:
    """Let documents have been asked for, each as the beginning of a prompt: their own KV is there."""
    for document in documents:
        assert asks(engine, [document, QUESTION])[1].declined == "first_asked"


def test_what_nobody_asked_for_before_is_computed_with_its_text_and_by_itself_behind_the_answer() -> None:
    engine, plain = make_engine(), make_engine()
    usage, told = asks(engine, [SYSTEM, A, B, QUESTION])
    assert (usage.cached_tokens, told.declined) == (0, "first_asked")
    assert {(each.outcome, each.why) for each in told.documents} == {("computed", FIRST_ASKED.why)}
    again = asks(engine, [SYSTEM, A, B, QUESTION])[0].cached_tokens
    asks(plain, [SYSTEM, A, B, QUESTION], BlendOptions(mode="off"))
    assert again == asks(plain, [SYSTEM, A, B, QUESTION], BlendOptions(mode="off"))[0].cached_tokens
    told = asks(engine, [(3,), B, C, A, QUESTION])[1]
    assert [each.outcome for each in told.documents] == ["blended", "computed", "blended"]


def test_what_nobody_asked_for_before_is_not_computed_by_itself_while_somebody_waits() -> None:
    engine = make_engine(max_running=1)
    engine.submit(blended("first", [SYSTEM, A, QUESTION], AUTO, 1))
    engine.submit(blended("second", [SYSTEM, B, QUESTION], AUTO, 1))
    run(engine)
    assert [sum(engine.forest.resident("", ids)) for ids in (A, B)] == [0, len(B)]
    assert asks(engine, [(3,), A, QUESTION])[1].mode == "selective"  # it was asked for before, and is computed first


def test_what_was_computed_once_is_reused_and_an_exact_prefix_from_then_on() -> None:
    engine, plain = make_engine(), make_engine()
    parts = [SYSTEM, A, B, QUESTION]
    asks(engine, [B, (4, 4), A, QUESTION])
    num_reused = len(A) // 2 + len(B) // 2  # the ratio is a half
    assert asks(engine, [(3,), A, C, B, QUESTION])[0].cached_tokens >= num_reused
    cached = [asks(engine, parts)[0].cached_tokens for _ in range(4)]
    assert cached[0] == num_reused
    in_full = [asks(plain, parts, BlendOptions(mode="off"))[0].cached_tokens for _ in range(4)]
    assert cached[1:] == in_full[1:] == [len(SYSTEM) + len(A) + len(B) + len(QUESTION) - 1] * 3
    told = [asks(engine, [SYSTEM, B, A, C])[1].mode for _ in range(3)]
    assert told == ["selective", "off", "off"]


def test_what_is_asked_again_is_computed_exactly_where_its_documents_are_gone() -> None:
    engine, parts = make_engine(), [SYSTEM, A, B, QUESTION]
    asks(engine, parts)
    engine.forest.clear()
    usage, told = asks(engine, parts)
    assert (usage.cached_tokens, told.declined) == (0, "asked_again")
    assert {(each.outcome, each.why) for each in told.documents} == {("computed", ASKED_AGAIN.why)}
    assert asks(engine, parts)[1].declined == "exact"


@pytest.mark.parametrize("query", [DeleteSequencePages("", (), SECOND), DeleteSession(SECOND)])
@pytest.mark.parametrize("deleted", ["while it answers", "while it is copied", "when all is done"])
def test_a_sessions_deletion_takes_its_exact_beginning_along(query: Any, deleted: str) -> None:
    engine, parts = make_engine(max_batch_tokens=16), [SYSTEM, A, B, QUESTION]
    know(engine, A, B)
    second = blended("second", parts, AUTO, 2, session_id=SECOND[1])
    engine.submit(second)
    if deleted == "while it is copied":
        while "second" in engine.in_flight:
            engine.step()
        assert engine.has_work
    elif deleted == "when all is done":
        run(engine)
    answer(engine, query)
    run(engine)
    found = sum(engine.forest.resident("", second.prompt_token_ids))
    assert found <= 4  # the page of its first tokens, which documents are on


def test_who_asks_while_the_beginning_is_computed_follows() -> None:
    engine, parts = make_engine(max_batch_tokens=16), [SYSTEM, A, B, QUESTION]
    know(engine, A, B)
    engine.submit(blended("first", parts, AUTO, 1))
    while not any(event.finish_reason for event in engine.step()):
        pass
    assert engine.has_work  # some steps of it
    usage, told = asks(engine, parts)
    assert (usage.cached_tokens, told.mode) == (usage.prompt_tokens - 1, "off")


def test_usage_says_why() -> None:
    engine = make_engine()
    know(engine, A, B)
    told = [asks(engine, [SYSTEM, A, B, question])[1] for question in (QUESTION, (4,), (3, 3))]
    assert [each.declined for each in told] == [None, "exact", "exact"]
    assert told[2].why == EXACT.why
    assert {(each.outcome, each.exact) for each in told[2].documents} == {("exact", len(A)), ("exact", len(B))}
    assert engine_stats(engine)["blend"]["declined"] == {"exact": 2, "first_asked": 2}


@pytest.mark.parametrize("is_gone", [False, True])
def test_only_the_beginning_that_is_asked_again_is_computed_exactly(is_gone: bool) -> None:
    engine, between = make_engine(), (4, 4, 4)
    know(engine, A, B, C)
    asks(engine, [SYSTEM, A, between, B, QUESTION])
    if is_gone:
        engine.forest.clear()
    _, told = asks(engine, [SYSTEM, A, between, C, QUESTION])
    blended_why = "blended", "its KV is reused behind other text"
    first = ("computed", ASKED_AGAIN.why) if is_gone else ("exact", EXACT.why)
    assert [(each.outcome, each.why) for each in told.documents] == [first, blended_why]
    usage, told = asks(engine, [SYSTEM, A, between, [0, 0, 0, 1, 2], QUESTION])  # the text between is found too
    assert told.documents[0].exact == len(A)
    assert usage.cached_tokens >= len(SYSTEM) + len(A) + len(between)


def test_what_the_request_names_and_another_tenant_asks_is_as_ever() -> None:
    engine, parts = make_engine(), [SYSTEM, A, B, QUESTION]
    named = BlendOptions(mode="selective", selector="first-k", ratio=0.5, min_tokens=2)
    assert [asks(engine, parts, named)[1].mode for _ in range(3)] == ["selective"] * 3
    assert asks(engine, parts, salt="other")[1].declined == "first_asked"
    not_allowed = make_engine(Gate())
    assert [asks(not_allowed, parts)[1].declined for _ in range(2)] == ["not_allowed"] * 2


def test_choices_of_one_turn_and_a_turn_that_is_sent_again_are_not_another() -> None:
    engine = make_engine()
    know(engine, A, B)
    requests = [blended(f"turn.{index}", [SYSTEM, A, B], AUTO, 1, choice_index=index) for index in range(3)]
    requests.append(blended("turn~1.0", [SYSTEM, A, B], AUTO, 1))
    for request in requests:
        engine.submit(request)
    modes = {event.usage.blend.mode for event in run(engine) if event.usage is not None and event.usage.blend}
    assert modes == {"selective"}


def test_documents_whose_order_is_free_take_the_one_they_were_asked_in() -> None:
    engine, parts = make_engine(), ([A, B, C], [C, A, B], [B, C, A], [B, C, [0, 0, 1]])
    know(engine, A, B, C)
    told = [asks(engine, [SYSTEM, *documents, QUESTION], ANY)[1] for documents in parts]
    assert [each.declined for each in told] == [None, "exact", "exact", None]
    assert [each.order for each in told] == [(0, 1, 2), (1, 2, 0), (2, 0, 1), (0, 1, 2)]


def test_memory_is_bounded_and_keeps_what_was_asked_last() -> None:
    asked = AskedBeginnings(max_items=8)

    def note(name: int, turn: int) -> int:
        request = blended("r", [(name,), [name] * 3], AUTO)
        return asked.record("", request.prompt_token_ids, request.documents, turn)

    assert [note(1, 1), note(2, 2), note(1, 3)] == [0, 0, 4]
    for turn in range(4, 7):
        assert note(turn, turn) == 0
    assert [note(1, 7), note(2, 8)] == [4, 0]


def borders(request: GenerationRequest, end: int = 1 << 30) -> list[int]:
    """Where its documents begin and end, as far as that is not behind `end`."""
    return [border for span in request.documents for border in span[:2] if border <= end]


PARTS = st.lists(st.sampled_from([A, B, C, (3,), (4, 0)]), min_size=1, max_size=4)


@pytest.mark.at_length
@settings(max_examples=examples(30, at_length=100))
@given(traffic=st.lists(st.tuples(PARTS, st.sampled_from([(), (2,), (3, 3)])), min_size=3, max_size=9))
def test_what_two_prompts_began_with_is_found_by_the_third(traffic: list[tuple[list[Any], tuple[int, ...]]]) -> None:
    """Up to a border of a document, with which the common text ends; the prompt's last token is computed always."""
    engine, earlier = make_engine(), list[GenerationRequest]()
    for parts, question in traffic:
        request = blended("r", [SYSTEM, *parts, (4,), question], AUTO)
        if not request.documents:
            continue
        usage, _ = asks(engine, [SYSTEM, *parts, (4,), question])
        for border in borders(request):
            alike = [each for each in earlier if borders(each, border) == borders(request, border)]
            if sum(each.prompt_token_ids[:border] == request.prompt_token_ids[:border] for each in alike) >= 2:
                assert usage.cached_tokens >= border
        earlier.append(request)


@pytest.mark.parametrize("parts", [[SYSTEM, A, B, QUESTION], [SYSTEM, A, A, QUESTION]])
def test_a_conversation_that_is_sent_again_whole_finds_its_documents(parts: list[Any]) -> None:
    """A client without sessions: each turn's prompt begins with the one before."""
    engine, said = make_engine(), list[int]()
    know(engine, A, B)
    for turn in range(4):
        usage, told = asks(engine, [*parts, tuple(said), QUESTION] if said else parts)
        said += [3, turn, 1]
        assert (told.mode == "off") == (turn > 0)
        if turn > 0:
            assert usage.cached_tokens >= usage.prompt_tokens - len(QUESTION) - 3
