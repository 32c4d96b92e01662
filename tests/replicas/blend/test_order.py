"""Documents that may change places: what is found then, and that nothing else changes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mneme.errors import InvalidRequest
from mneme.replicas.config import EngineConfig
from mneme.replicas.documents import BESIDE, BlendOptions, BlendUsage, DocumentSpan
from mneme.replicas.engine.engine import Engine
from mneme.replicas.request import GenerationRequest, SamplingParams, TokenEvent
from tests.budget import examples
from tests.replicas.fake_runner import FakeRunner

GREEDY = SamplingParams(temperature=0, max_tokens=3, seed=0)
SYSTEM, QUESTION = "system " * 6, " question?"
A, B, C, D = (name + "".join(chr(97 + i * step % 26) for i in range(39)) for step, name in enumerate("ABCD", 1))
_NAMES = itertools.count()


def make_engine(num_pages: int = 200) -> Engine:
    runner = FakeRunner(num_pages, 16, vocab_size=256)
    return Engine(runner, None, EngineConfig())  # type: ignore[arg-type]


def prompt(documents: Sequence[str], order: str = "any", groups: Sequence[int] = (), **more: Any) -> GenerationRequest:
    """A prompt whose ids are its characters, with "; " between documents."""
    text, spans = SYSTEM, []
    for index, document in enumerate(documents):
        text += "; " if index else ""
        start, end = len(text), len(text) + len(document)
        spans.append(DocumentSpan(start, end, document[0], start, end, groups[index] if groups else 0))
        text += document
    text += QUESTION
    return GenerationRequest(
        request_id=f"r{next(_NAMES)}", prompt_token_ids=tuple(map(ord, text)), sampling=GREEDY, prompt_text=text,
        documents=tuple(spans), blend=BlendOptions(order=order), **more,  # type: ignore[arg-type]
    )  # fmt: skip


def ask(engine: Engine, request: GenerationRequest) -> tuple[list[int], BlendUsage]:
    """Its answer, and how its documents were used."""
    engine.submit(request)
    events: list[TokenEvent] = []
    while engine.has_work:
        events += engine.step()
    engine.forest.check()
    blend = next(event.usage for event in events if event.usage is not None).blend
    assert blend is not None
    return [token_id for event in events for token_id in event.token_ids], blend


def names(blend: BlendUsage) -> str:
    return "".join(each.id for each in blend.documents)


def test_a_given_order_stays() -> None:
    engine = make_engine()
    ask(engine, prompt([A, B]))
    _, blend = ask(engine, prompt([B, A], "given"))
    assert (names(blend), blend.order) == ("BA", (0, 1))
    assert [each.exact for each in blend.documents] == [0, 0]


def test_without_an_order_those_beside_the_messages_may_move_unless_reuse_is_off() -> None:
    for order, groups, mode, found in (
        (None, [BESIDE, BESIDE], "auto", "AB"), (None, [0, 0], "auto", "BA"), (None, [BESIDE, BESIDE], "off", "BA"),
        ("given", [BESIDE, BESIDE], "auto", "BA"), ("any", [0, 0], "off", "AB"),
    ):  # fmt: skip
        engine = make_engine()
        ask(engine, prompt([A, B], "given"))
        request = prompt([B, A], groups=groups)
        request = replace(request, blend=replace(request.blend, order=order, mode=mode))
        assert names(ask(engine, request)[1]) == found, (order, groups, mode)


def test_a_request_without_documents_stays_as_it_is() -> None:
    request = replace(prompt([A]), documents=())
    assert request.in_order(()) is request


def test_what_is_known_comes_first_and_the_rest_as_given() -> None:
    engine = make_engine()
    ask(engine, prompt([A, B]))
    assert names(ask(engine, prompt([D, C, A]))[1]) == "ADC"
    assert names(ask(engine, prompt([C, B, D, A]))[1]) == "ABCD"
    assert names(ask(engine, prompt([D, C]))[1]) == "DC"
    assert names(ask(engine, prompt([D, C, A], salt="another"))[1]) == "DCA"


def test_documents_of_different_messages_do_not_change_places() -> None:
    engine = make_engine()
    ask(engine, prompt([A, B, C, D]))
    assert names(ask(engine, prompt([B, A, D, C], groups=[0, 0, 1, 1]))[1]) == "ABCD"
    assert names(ask(engine, prompt([B, C, A, D], groups=[0, 0, 1, 1]))[1]) == "BCAD"


@given(asked=st.lists(st.permutations("ABCD").flatmap(lambda p: st.integers(1, 4).map(lambda n: p[:n])), max_size=5))
@pytest.mark.at_length
@settings(max_examples=examples(12, at_length=40))
def test_any_traffic_answers_as_the_order_that_it_names_and_finds_no_less(asked: list[list[str]]) -> None:
    """The answers are those of a fresh engine that was asked for this very order. Documents are of one length here:
    a greedy choice of the longest might find less in all.
    """
    engine = make_engine()
    by_name = {"A": A, "B": B, "C": C, "D": D}
    for documents in asked:
        request = prompt([by_name[name] for name in documents])
        num_known = sum(engine.forest.resident(request.salt, request.prompt_token_ids))
        num_found_as_given = sum(max(min(span.end, num_known) - span.start, 0) for span in request.documents)
        tokens, blend = ask(engine, request)
        assert sorted(blend.order) == list(range(len(documents)))
        assert names(blend) == "".join(documents[i] for i in blend.order)
        assert tokens == ask(make_engine(), prompt([by_name[name] for name in names(blend)], "given"))[0]
        assert sum(each.exact for each in blend.documents) >= num_found_as_given


def test_a_request_that_is_moved_keeps_the_order_in_which_it_began() -> None:
    engine = make_engine()
    ask(engine, prompt([A, B]))
    request = prompt([B, A])
    _, blend = ask(engine, request)
    moved = request.in_order(blend.order)
    assert moved.prompt_token_ids == prompt([A, B]).prompt_token_ids
    assert (names(ask(make_engine(), moved)[1]), moved.prompt_text) == ("AB", prompt([A, B]).prompt_text)


@pytest.mark.parametrize("spans", [[(5, 5)], [(5, 4)], [(0, 9), (8, 12)], [(8, 12), (0, 4)], [(-1, 4)], [(0, 999)]])
def test_documents_outside_the_prompt_are_refused(spans: list[tuple[int, int]]) -> None:
    wrong = tuple(DocumentSpan(*span, "d", *span) for span in spans)
    request = GenerationRequest(
        request_id="r", prompt_token_ids=tuple(range(20)), sampling=GREEDY, documents=wrong, prompt_text="a" * 20
    )
    with pytest.raises(InvalidRequest, match="documents"):
        make_engine().submit(request)
