"""Answers that match a grammar: schemas, regexes, choices and Lark grammars on the embedded model, drawn at random."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pickle
import re
import signal
import string
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from mneme import LLM, Grammar, SamplingParams
from mneme.errors import InvalidRequest, Overloaded
from mneme.replicas.request import MAX_GRAMMAR_BYTES, GenerationRequest, TokenEvent
from mneme.replicas.text.grammar import GrammarChecker
from mneme.replicas.text.matcher import Grammars
from mneme.replicas.text.tool_calls import Dialect

pytestmark = pytest.mark.engine

VALIDATOR = jsonschema.Draft202012Validator
STRING, INTEGER = {"type": "string", "maxLength": 12}, {"type": "integer", "minimum": -50, "maximum": 50}
POINT = {"type": "object", "properties": {"x": INTEGER, "y": INTEGER}, "required": ["x", "y"]}
CLOSED = {"additionalProperties": False}
TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"v": INTEGER, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
            "required": ["v"],
            **CLOSED,
        }
    },
    "$ref": "#/$defs/node",
}


# Strings that have each letter: whether there is one takes time that doubles with each.
ALL_LETTERS: dict[str, Any] = {
    "allOf": [{"type": "string", "pattern": f".*{letter}.*"} for letter in string.ascii_lowercase]
}


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), **CLOSED}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("mneme-tiny", dtype="float32")


@pytest.fixture(scope="module")
def grammars(llm: LLM) -> Grammars:
    return Grammars(llm.tokenizer)


@pytest.fixture(scope="module")
def checker(llm: LLM) -> GrammarChecker:
    return GrammarChecker(llm.tokenizer)


def _answers(llm: LLM, grammar: Grammar, **how: Any) -> list[tuple[str, str]]:
    params = SamplingParams(grammar=grammar, **{"max_tokens": 120, "seed": 7, **how})
    return [(each.text, each.finish_reason) for each in llm.generate("Say: ", params)[0].outputs]


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        *((Grammar("regex", each), each) for each in ("[a-c]{3,5}", "a{40}", "(a|b)*c", "é{1,3}☃", "")),
        (Grammar("choice", ['a"b\n', "é☃", "\\", "/x/i"]), r'a"b\n|é☃|\\|/x/i'),
        (Grammar("grammar", 'start: "(" start ")" | "x"'), r"\(*x\)*"),
    ],
)
def test_answers_match_their_grammar_as_a_whole(llm: LLM, grammar: Grammar, pattern: str) -> None:
    answers = _answers(llm, grammar, n=4)
    assert any(reason == "stop" for _, reason in answers)
    assert all(re.fullmatch(pattern, text) for text, reason in answers if reason == "stop")


def test_a_stop_string_ends_an_answer_inside_its_grammar(llm: LLM) -> None:
    assert _answers(llm, Grammar("regex", "abcdef"), stop=["cd"]) == [("ab", "stop")]


@pytest.mark.parametrize(
    "others",
    [
        {"temperature": 0},
        {"top_k": 5, "top_p": 0.9},
        {"min_p": 0.2, "repetition_penalty": 2.0, "presence_penalty": 2.0},
        {"min_tokens": 100, "ignore_eos": True},
        {"logit_bias": {5: 100.0}},
        {"logprobs": 3},
    ],
)
def test_a_grammar_holds_under_all_other_options(llm: LLM, others: dict[str, Any]) -> None:
    for text, reason in _answers(llm, Grammar("regex", "[0-9]{3}"), n=3, **others):
        assert reason == "stop"
        assert re.fullmatch("[0-9]{3}", text)


def test_min_tokens_put_off_an_end_that_is_not_forced(llm: LLM) -> None:
    params = SamplingParams(grammar=Grammar("regex", "x*"), min_tokens=10, max_tokens=40, seed=1)
    assert len(llm.generate("x", params)[0].outputs[0].token_ids) > 10


def test_logprobs_are_those_of_the_model_before_the_mask(llm: LLM) -> None:
    def first(**grammar: Any) -> Any:
        params = SamplingParams(max_tokens=1, logprobs=3, seed=0, **grammar)
        logprobs = llm.generate("The server", params)[0].outputs[0].logprobs
        return logprobs[0]

    masked, free = first(grammar=Grammar("regex", "☃")), first()
    assert [token_id for token_id, _ in masked.top] == [token_id for token_id, _ in free.top]
    assert masked.logprob < free.top[2][1]


def _run(llm: LLM, requests: Sequence[GenerationRequest]) -> dict[str, list[TokenEvent]]:
    events: dict[str, list[TokenEvent]] = {request.request_id: [] for request in requests}
    for request in requests:
        llm.engine.submit(request)
    while llm.engine.has_work:
        for event in llm.engine.step():
            events[event.request_id].append(event)
    return events


def _ids(events: Sequence[TokenEvent]) -> tuple[int, ...]:
    return tuple(token_id for event in events for token_id in event.token_ids)


def _request(name: str, llm: LLM, **params: Any) -> GenerationRequest:
    ids = tuple(llm.tokenizer.encode("Hello"))
    return GenerationRequest(
        request_id=name, prompt_token_ids=ids, sampling=SamplingParams(**{"max_tokens": 24, "seed": 5, **params})
    )


def test_a_moved_request_goes_on_where_its_grammar_was(llm: LLM) -> None:
    whole = _request("whole", llm, grammar=Grammar("regex", "([a-z]+,){6}"))
    events = _run(llm, [whole])["whole"]
    ids = _ids(events)
    for cut in (1, len(ids) // 2, len(ids) - 1):
        moved = replace(
            whole,
            request_id=f"moved-{cut}",
            prompt_token_ids=whole.prompt_token_ids + ids[:cut],
            output_offset=cut,
            sampling=replace(whole.sampling, max_tokens=24 - cut),
        )
        rest = _run(llm, [pickle.loads(pickle.dumps(moved))])[moved.request_id]
        assert ids[:cut] + _ids(rest) == ids
        assert rest[-1].finish_reason == events[-1].finish_reason


def test_an_aborted_request_leaves_nothing_and_one_that_breaks_ends_alone(llm: LLM) -> None:
    llm.engine.submit(_request("aborted", llm, grammar=Grammar("regex", "[a-z]{100}")))
    llm.engine.step()
    llm.engine.abort("aborted")
    assert llm.engine.pop_events()[-1].finish_reason == "abort"

    broken, sound = _request("broken", llm, grammar=Grammar("regex", "[a-z]{9}")), _request("sound", llm)
    for request in (broken, sound):
        llm.engine.submit(request)
    sequence = next(each for each in llm.engine.scheduler.waiting if each.request.request_id == "broken")
    matcher = sequence.drawing.matcher
    matcher.push(llm.tokenizer.encode("9", add_special_tokens=False)[-1])  # not allowed here
    ends = {}
    while llm.engine.has_work:
        ends |= {event.request_id: event for event in llm.engine.step() if event.finish_reason}
    assert ends["broken"].finish_reason == "error"
    assert "the grammar could not be followed" in str(ends["broken"].refusal)
    assert ends["sound"].finish_reason in ("stop", "length")
    assert ends["sound"].error is None


@pytest.mark.parametrize(
    ("kind", "text", "named"),
    [
        ("json_schema", {"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}, "uniqueItems"),
        ("json_schema", "{", "is not JSON"),
        ("regex", "a(?=b)", "look-around"),
        ("regex", "(a", "unclosed group"),
        ("grammar", "start: foo", "foo"),
    ],
)
def test_what_is_not_supported_is_named(
    grammars: Grammars, checker: GrammarChecker, kind: Any, text: Any, named: str
) -> None:
    for checked in (grammars, checker):
        with pytest.raises(InvalidRequest, match=re.escape(named)) as caught:
            checked.check(Grammar(kind, text, "my.field"))
        assert caught.value.field == "my.field"
        with pytest.raises(InvalidRequest, match=re.escape(named)):  # remembered
            checked.check(Grammar(kind, text))


@pytest.mark.parametrize(
    ("kind", "text", "rule"),
    [
        ("xml", "", "must be one of"),
        ("regex", "a" * (MAX_GRAMMAR_BYTES + 1), "bytes"),
        ("json_schema", {f"k{i}": {"type": "string"} for i in range(250_000)}, "bytes"),
        ("json_schema", [], "must be text"),
        ("json_schema", {"const": float("nan")}, "must be JSON"),
        ("regex", "\ud800", "surrogate"),
        ("choice", [], "choices"),
        ("choice", [1], "list of strings"),
        ("choice", "[", "list of strings"),
    ],
)
def test_grammars_that_are_none_are_refused(kind: Any, text: Any, rule: str) -> None:
    with pytest.raises(InvalidRequest, match=rule):
        Grammar(kind, text)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", "((a|b|ab)*c){1,3000}x(.*y){50}"),
        ("regex", "((((a{1,99}){1,99}){1,99}){1,99}){1,99}"),
        ("grammar", "start: " + "(" * 30_000 + '"a"' + ")" * 30_000),
        ("grammar", 'start: start start | "x" | start start start'),
        ("json_schema", {"type": "object", "properties": {f"k{i}": {"type": "string"} for i in range(4000)}}),
        ("json_schema", {"type": "array", "minItems": 10**9, "items": {"type": "array", "minItems": 10**9}}),
        ("json_schema", ALL_LETTERS),
        ("grammar", f"start: T\nT: ~({' | '.join(f'/.*{letter}.{{9}}/' for letter in string.ascii_lowercase)})"),
        ("json_schema", {"type": "integer", "multipleOf": 999983}),
        ("json_schema", {"allOf": [{"type": "integer", "multipleOf": each} for each in (7, 11, 13, 17, 19, 23)]}),
    ],
)
def test_grammar_bombs_are_refused_or_cheap(
    llm: LLM, grammars: Grammars, checker: GrammarChecker, kind: Any, text: Any
) -> None:
    before_s = time.thread_time()
    try:
        checker.check(Grammar(kind, text))
        matchers = [grammars.matcher(Grammar(kind, text), []) for _ in range(16)]
        for token_id in llm.tokenizer.encode("xabab" * 20, add_special_tokens=False):
            for matcher in matchers:
                matcher.mask(())
                if matcher.error is None:
                    matcher.push(token_id)
    except InvalidRequest:
        pass
    # At most 2 s to compile, and 16 rows of 0.25 s and 1 ms a token; of this thread alone, not of a busy machine.
    assert time.thread_time() - before_s < 10


@pytest.mark.parametrize("text", [ALL_LETTERS, {"type": "integer", "multipleOf": 50021}], ids=["time", "memory"])
def test_a_grammar_that_takes_too_much_to_compile_is_refused_by_its_name(checker: GrammarChecker, text: Any) -> None:
    for grammar in (Grammar("json_schema", text, "my.field"), Grammar("json_schema", text)):  # then remembered
        with pytest.raises(InvalidRequest, match="too complex: it takes more than 2 s or 16 MB to compile") as caught:
            checker.check(grammar)
        assert caught.value.field == grammar.field
        assert checker.knows(grammar)


def test_grammars_of_others_are_compiled_beside_one_that_never_ends(checker: GrammarChecker) -> None:
    bomb = Grammar("json_schema", ALL_LETTERS | {"description": "another"})
    others = [Grammar("regex", f"[a-z]{{{i + 1}}}") for i in range(8)]
    with ThreadPoolExecutor(4) as threads:
        refused = threads.submit(checker.check, bomb)
        for other in [threads.submit(checker.check, each) for each in others]:
            other.result(60)
        assert isinstance(refused.exception(60), InvalidRequest)


def test_grammars_are_compiled_again_after_their_process_was_killed(llm: LLM) -> None:
    others, checker = set(_children(os.getpid(), "grammar_worker")), GrammarChecker(llm.tokenizer)
    checker.check(Grammar("regex", "before"))
    (worker,) = set(_children(os.getpid(), "grammar_worker")) - others
    os.kill(worker, signal.SIGKILL)  # while it waits
    os.waitid(os.P_PID, worker, os.WEXITED | os.WNOWAIT)  # so that it is not asked while it ends
    checker.check(Grammar("regex", "behind"))
    (worker,) = set(_children(os.getpid(), "grammar_worker")) - others

    bomb = Grammar("json_schema", ALL_LETTERS | {"description": "one more"})
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(checker.check, bomb)
        while not _children(worker):
            assert not asked.done()
        os.kill(worker, signal.SIGKILL)  # while it compiles, or has just begun to
        assert isinstance(asked.exception(60), Overloaded)
    assert not checker.knows(bomb)
    checker.check(Grammar("regex", "beyond"))


def _children(parent: int, name: str = "") -> list[int]:
    """Ids of a process's children whose command has this in it; those that have ended and wait for it are none."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            state, its_parent = (path / "stat").read_text().rpartition(")")[2].split()[:2]
            if int(its_parent) == parent and state != "Z" and name in (path / "cmdline").read_text():
                found.append(int(path.name))
    return found


@pytest.mark.parametrize(
    "text",
    [
        "start: /a+/ start",
        'start: "zq" x | "b"\nx: /a+/ x',
        'start: /a+/ start\n%llguidance {"no_forcing": false}',
        "start: %lark { start: /a+/ start\n }",
    ],
)
def test_a_lark_grammar_that_never_ends_takes_no_longer_for_a_token(llm: LLM, text: str) -> None:
    params = SamplingParams(grammar=Grammar("grammar", text), max_tokens=40, n=4, seed=1)
    for answer in llm.generate("x", params)[0].outputs:
        assert re.fullmatch("a+|zqa*|z|b", answer.text)


def test_a_grammar_whose_tokens_take_long_ends_its_request_once_it_has_spent_its_time(llm: LLM) -> None:
    # Its choices share that time, down to 0.2 ms a token for each.
    for took_s, num_choices, is_refused in (
        *((0.0004, 1, False), (0.02, 1, True)),
        *((0.0004, 2, True), (0.0002, 2, False)),
        *((0.0002, 20, True), (0.00008, 20, False), (0.00008, 128, False)),
    ):
        ticks = itertools.count()
        slow = Grammars(llm.tokenizer, clock=lambda ticks=ticks, took_s=took_s: next(ticks) * took_s)  # type: ignore[misc]
        matcher = slow.matcher(Grammar("regex", "x*"), [], num_choices)
        for token_id in llm.tokenizer.encode("xx" * 400, add_special_tokens=False):
            matcher.mask(())
            matcher.push(token_id)
        assert ("too complex" in str(matcher.error)) == is_refused


def test_as_many_properties_as_the_docs_say_are_taken(llm: LLM, grammars: Grammars) -> None:
    for num_properties, required in ((400, False), (2000, True)):
        names = [f"property_{i}" for i in range(num_properties)]
        properties = {name: {"type": "null"} for name in names}
        schema = {"type": "object", "properties": properties, "required": names if required else []}
        matcher = grammars.matcher(Grammar("json_schema", schema), [])
        told = names[:20] if required else names[::20]
        for token_id in llm.tokenizer.encode(json.dumps(dict.fromkeys(told)), add_special_tokens=False)[:-1]:
            matcher.mask(())
            matcher.push(token_id)
        assert matcher.error is None


OPEN = {"properties": {"ab": {"type": "integer"}}, "required": ["ab"], "additionalProperties": {"type": "string"}}


@pytest.mark.parametrize(
    ("schema", "answer"),
    [
        (OPEN, r'{"ab":1,"\u0061b":"x"}'),
        (OPEN | {"x-guidance": {"json_allowed_escapes": "u"}}, r'{"ab":1,"\u0061b":"x"}'),
        (
            {"patternProperties": {"^a": {"type": "integer"}}, "additionalProperties": {"type": "string"}},
            r'{"\u0061b":"x"}',
        ),
        ({"const": "a\u0001b"}, '"ab"'),
        ({"const": [["a\x7fb"]]}, '[["ab"]]'),
        ({"type": "string", "pattern": r"^a\x01b$"}, '"ab"'),
        ({"type": "string", "pattern": "^a[\\v]b$"}, '"ab"'),
        ({"type": "null", "x-guidance": {"item_separator": ";"}}, "nul;"),
        ({"type": "array", "items": INTEGER, "x-guidance": {"item_separator": ";"}}, "[1;1]"),
    ],
)
def test_an_answer_that_its_schema_does_not_allow_cannot_be_given(
    llm: LLM, grammars: Grammars, schema: dict[str, Any], answer: str
) -> None:
    matcher = grammars.matcher(Grammar("json_schema", schema if "const" in schema else {"type": "object"} | schema), [])
    for token_id in llm.tokenizer.encode(answer, add_special_tokens=False):
        matcher.push(token_id)
    assert matcher.error is not None


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"type": "object", "additionalProperties": INTEGER, "minProperties": 2}, "minProperties"),
        ({"allOf": [{"minProperties": 2}, {"additionalProperties": INTEGER}]}, "minProperties"),
        ({"properties": {"a": {"const": "\u0001"}}, "additionalProperties": True}, "control characters"),
        ({"properties": {"a": {"pattern": r"^\x01$"}}, "additionalProperties": True}, "control characters"),
        ({"patternProperties": {r"^\u0001$": INTEGER}}, "control characters"),
    ],
)
def test_what_names_cannot_be_held_to_is_refused(
    llm: LLM, grammars: Grammars, schema: dict[str, Any], named: str
) -> None:
    with pytest.raises(InvalidRequest, match=named):
        grammars.check(Grammar("json_schema", schema))
    dialect = Dialect(llm.tokenizer, "hermes")
    with pytest.raises(InvalidRequest, match=named):
        dialect.call_grammar({"f": schema}, is_forced=True, is_one=True)


def test_names_that_are_required_may_be_counted(grammars: Grammars) -> None:
    grammars.check(Grammar("json_schema", POINT | {"minProperties": 3}))


@pytest.mark.parametrize("is_late", [False, True])
def test_a_schema_holds_in_each_choice_behind_reasoning_up_to_a_stop_string_or_a_limit(llm: LLM, is_late: bool) -> None:
    """`is_late`: the answer begins with text of its own, as reasoning is, and the schema holds from a token on."""
    (opening,) = llm.tokenizer.encode(" the", add_special_tokens=False)
    schema = _object(kind={"enum": ["red", "green"]}, sizes={"type": "array", "items": INTEGER, "maxItems": 2})
    grammar = Grammar("json_schema", schema, after=opening if is_late else None)
    bias = {opening: 5.0} if is_late else {}
    blanks = {i: -100.0 for i in range(llm.tokenizer.vocab_size) if not llm.tokenizer.token_text(i).strip()}
    params = SamplingParams(grammar=grammar, n=8, seed=3, max_tokens=200, logit_bias=bias | blanks)

    def begun(**how: Any) -> list[tuple[str, str]]:
        outputs = llm.generate("Say: ", replace(params, **how))[0].outputs
        ids = [(list(each.token_ids), each.finish_reason) for each in outputs]
        if is_late:
            assert any(token_ids.index(opening) for token_ids, _ in ids if opening in token_ids)
        cut = [
            (each[each.index(opening) + 1 :] if is_late else each, why)
            for each, why in ids
            if not is_late or opening in each
        ]
        return [(llm.tokenizer.decode(each, skip_special_tokens=True), why) for each, why in cut]

    ended = [text for text, why in begun() if why == "stop"]
    assert len(ended) >= 4
    for text in ended:
        VALIDATOR(schema).validate(json.loads(text))
    for text, why in begun(max_tokens=12):
        assert why == "length" or VALIDATOR(schema).is_valid(json.loads(text))
        assert text[:1] in ("", "{")
    stopped = llm.generate("Say: ", replace(params, stop=['"sizes']))[0].outputs
    assert any(each.finish_reason == "stop" and each.text.rstrip().endswith(",") for each in stopped)
    assert all('"sizes' not in each.text for each in stopped)


def test_blanks_between_the_tokens_of_json_are_bounded(llm: LLM, grammars: Grammars) -> None:
    for num_blanks in (20, 21):
        matcher = grammars.matcher(Grammar("json_object"), [])
        for token_id in llm.tokenizer.encode('{"a":' + "\n" * num_blanks + "1}", add_special_tokens=False):
            matcher.push(token_id)
        assert (matcher.error is None) == (num_blanks == 20)


A, B = ({"properties": {name: STRING}, "required": [name]} for name in "ab")


@pytest.mark.parametrize(
    ("schema", "takes", "refuses"),
    [
        ({"properties": {"k": INTEGER}, "required": ["k"], "anyOf": [A, B]}, '{"k": 1, "a": "x"}', '{"k": 1}'),
        (
            {"$defs": {"a": A}, "$ref": "#/$defs/a", "properties": {"b": STRING}, "required": ["b"]},
            '{"a": "y", "b": "x"}',
            '{"b": "x"}',
        ),
        ({"properties": {"a": STRING}, "required": ["a", "b"]}, '{"a": "x", "b": 1}', '{"a": "x"}'),
        ({"properties": {"properties": POINT}, "required": ["properties"]}, '{"properties": {"x": 1, "y": 2}}', "{}"),
        ({"properties": {"properties": POINT}, "required": []}, "{}", '{"additionalProperties'),
        ({"properties": {"to": POINT}}, '{"to": {"x": 1, "y": 2}}', '{"to": {"x": 1, "y": 2, "z'),
        ({"properties": {"to": {"type": "array", "items": POINT}}}, '{"to": []}', '{"to": [{"x": 1, "y": 2, "z'),
        ({"allOf": [A, B]}, '{"a": "x", "b": "y"}', '{"a": "x"}'),
        ({"$defs": {"a": A}, "$ref": "#/$defs/a"}, '{"a": "x"}', "[1"),
        (TREE, '{"v": 1, "next": {"v": 2}}', '{"v": 1, "next": {}}'),
        (A, '{"a": "x"}', '{"a": "x", '),
        ({}, "{}", '{"'),
    ],
)
def test_arguments_are_closed_only_where_one_schema_says_all_of_an_object(
    llm: LLM, grammars: Grammars, schema: dict[str, Any], takes: str, refuses: str
) -> None:
    grammar = Dialect(llm.tokenizer, "mistral").call_grammar({"f": schema}, is_forced=True, is_one=True)
    assert grammar is not None
    for arguments, is_taken in ((takes, True), (refuses, False)):
        is_whole = arguments.endswith("}")
        matcher = grammars.matcher(grammar, [])
        text = '[TOOL_CALLS] [{"name": "f", "arguments": ' + arguments + "}]" * is_whole
        for token_id in llm.tokenizer.encode(text, add_special_tokens=False):
            if matcher.error is None:
                matcher.push(token_id)
        assert (matcher.error is None) == is_taken


def test_a_matcher_behind_emitted_tokens_knows_whether_it_has_begun(llm: LLM, grammars: Grammars) -> None:
    grammar = Grammar("regex", "[0-9]{3}", after=300)
    digit = llm.tokenizer.encode("7", add_special_tokens=False)
    assert grammars.matcher(grammar, [5, 6]).is_waiting
    begun = grammars.matcher(grammar, [5, 300, *digit])
    assert not begun.is_waiting
    begun.push(digit[0])
    begun.push(digit[0])
    assert begun.is_over
