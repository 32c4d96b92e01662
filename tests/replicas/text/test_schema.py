"""JSON schemas as llguidance has them: what binds nobody is dropped, numbers hold, and the rest is said or refused.

Answers are drawn at random from what a grammar lets follow, without a model.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

import mneme.replicas
from mneme.errors import InvalidRequest
from mneme.primitives import Rounded, place_of_rounded, read_float
from mneme.replicas.request import Grammar
from mneme.replicas.text.matcher import Grammars
from mneme.replicas.text.schema import _SAID_OTHERWISE, rewritten
from mneme.replicas.text.tokenizer import Tokenizer
from mneme.replicas.text.tool_calls import Dialect
from tests.budget import examples

Schema = Any

MODEL = Path(mneme.replicas.__path__[0]) / "mneme_tiny"
TOKENIZER = Tokenizer(tokenizers.Tokenizer.from_file(str(MODEL / "tokenizer.json")), eos_token_ids=(3,))
GRAMMARS = Grammars(TOKENIZER, clock=lambda: 0.0)  # what tokens cost is not what is tried here
TEXTS = [TOKENIZER.token_text(i) for i in range(TOKENIZER.vocab_size)]
IS_BLANK = np.array([not text.strip() for text in TEXTS])
ENDS_A_PART = np.array([text[:1] in tuple('"]}') for text in TEXTS])
MAX_TOKENS = 100


def drawn(schema: Schema, seed: int) -> str | None:
    """Draw an answer; None: it does not end. Blanks and what goes on are rare, so that most end."""
    rng, matcher, token_ids = np.random.default_rng(seed), GRAMMARS.matcher(Grammar("json_schema", schema), []), []
    for _ in range(MAX_TOKENS):
        fits = np.unpackbits(matcher.mask(()).view(np.uint8), bitorder="little")[: TOKENIZER.vocab_size].astype(bool)
        assert matcher.error is None
        assert fits.any()
        ends = fits & ENDS_A_PART
        preferred = ends if ends.any() and rng.random() < 0.4 else fits & ~IS_BLANK
        if fits[list(TOKENIZER.eos_token_ids)].any() and rng.random() < 0.5:
            break
        token_id = int(rng.choice(np.flatnonzero(preferred if preferred.any() else fits)))
        if token_id in TOKENIZER.eos_token_ids:
            break
        token_ids.append(token_id)
        matcher.push(token_id)
        assert matcher.error is None, TOKENIZER.decode(token_ids)
        if matcher.is_over:
            break
    else:
        return None
    return TOKENIZER.decode(token_ids)


def answers(schema: Schema, num: int = 12) -> list[Any]:
    return [json.loads(text) for seed in range(num) if (text := drawn(schema, seed)) is not None]


def takes(schema: Schema, value: Any) -> bool:
    """Return whether a value, as Python writes it, may be the answer."""
    matcher = GRAMMARS.matcher(Grammar("json_schema", schema), [])
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    for token_id in TOKENIZER.encode(text, add_special_tokens=False):
        matcher.push(token_id)
    if matcher.error is not None:
        return False
    end = TOKENIZER.eos_token_ids[0]
    return matcher.is_over or bool(matcher.mask(())[end >> 5] >> (end & 31) & 1)


def refusal(schema: Schema) -> str:
    with pytest.raises(InvalidRequest) as caught:
        GRAMMARS.check(Grammar("json_schema", schema, "my.field"))
    assert caught.value.field == "my.field"
    return str(caught.value)


def wherever(schema: Schema) -> Iterator[Schema]:
    """Put a schema where one may stand."""
    yield schema
    yield {"type": "object", "properties": {"a": schema}, "required": ["a"], "additionalProperties": False}
    yield {"type": "object", "additionalProperties": schema, "maxProperties": 1}
    yield {"type": "array", "items": schema, "minItems": 1, "maxItems": 1}
    yield {"type": "array", "prefixItems": [schema], "minItems": 1, "items": False}
    yield {"anyOf": [schema, {"const": [["other"]]}]}
    yield {"allOf": [schema, True]}
    yield {"$ref": "#/components/x", "components": {"x": schema}}
    yield {"definitions": {"a b/c~": schema}, "$ref": "#/definitions/a%20b~1c~0"}


# -- numbers

BIG = 1234567890123456789


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"const": BIG}, "const"),
        ({"const": [{"id": -BIG}]}, "const"),
        ({"enum": ["a", BIG, 1]}, "enum"),
        ({"const": 1e23}, "const"),
        ({"type": "integer", "minimum": 2**53 + 1, "maximum": 2**53 + 3}, "minimum"),
        ({"exclusiveMinimum": 2**54}, "exclusiveMinimum"),
        ({"type": "integer", "minimum": 2**53, "maximum": 2**53 + 1}, "maximum"),
        ({"maximum": -BIG}, "maximum"),
        ({"type": "integer", "multipleOf": 2**53 + 1}, "multipleOf"),
        ({"multipleOf": 0.07}, "multipleOf"),
        ({"allOf": [{"multipleOf": 30_000}, {"multipleOf": 39_999}]}, "multipleOf"),
        ({"not": {"maximum": 2**63 - 1}}, "exclusiveMinimum"),
        ('{"const": 0.12345678901234567890}', "const"),
        ('{"type": "number", "minimum": 1e400}', "minimum"),
        ('{"multipleOf": 1.00000000000000000001}', "multipleOf"),
    ],
)
def test_a_number_that_cannot_hold_is_refused_by_its_keyword(schema: Schema, keyword: str) -> None:
    given = json.loads(schema, parse_float=read_float) if isinstance(schema, str) else schema
    for around in wherever(given):
        if place_of_rounded(around) is None:  # else the grammar says so
            assert f'"{keyword}" at #' in refusal(around)
    assert f'"{keyword}" at #' in refusal(schema)


@pytest.mark.parametrize("value", [2**53 - 1, 2**53 + 2, -(2**60), 10**18, 1e-7, -0.0, 1e2, 0.1, 5e-324])
def test_numbers_that_hold_are_written_as_they_are(value: float) -> None:
    for schema in ({"const": value}, {"enum": [value]}, {"anyOf": [{"const": value}]}):
        assert answers(schema, 2) == [value, value]


@pytest.mark.parametrize(
    ("bounds", "inside", "outside"),
    [
        ({"minimum": -(2**63), "maximum": 2**63 - 1}, [0, -5, 9 * 10**18, -9 * 10**18], [2**63, -(2**63) - 1]),
        ({"minimum": 0, "maximum": 2**64 - 1}, [0, 9 * 10**18], [-1, 2**64]),
        ({"exclusiveMinimum": -9223372036854776000, "exclusiveMaximum": 9223372036854776000}, [1], [2**63]),
        ({"minimum": -1.7976931348623157e308, "maximum": 1.7976931348623157e308}, [1, -1], []),
        ({"maximum": 10**400, "minimum": -(10**400)}, [1], []),
        ({"allOf": [{"exclusiveMaximum": 10**18}]}, [1, 10**17], [10**18]),
        ({"minimum": 10**17}, [10**17, 10**18 + 1], [10**17 - 1, 5]),
        ({"minimum": 10**18}, [10**18], [10**18 - 128]),
        ({"minimum": 2**53 - 1, "maximum": 2**53 + 2}, [2**53 - 1, 2**53, 2**53 + 1, 2**53 + 2], [2**53 + 3]),
        ({"minimum": 1, "exclusiveMinimum": True}, [2], [1, 0]),  # as draft 4 has it
        ({"maximum": 5, "exclusiveMaximum": False}, [5], [6]),
    ],
)
def test_bounds_past_2_53_hold_to_the_digit(bounds: Any, inside: list[int], outside: list[int]) -> None:
    schema = {"type": "integer", **bounds}
    assert all(takes(schema, value) for value in inside)
    assert not any(takes(schema, value) for value in outside)


@pytest.mark.parametrize(
    ("bounds", "takes_them", "refuses"),
    [
        ({"exclusiveMinimum": 0, "maximum": 0.5}, [0.25, 0.5, 1e-4], [0, 0.75]),
        ({"exclusiveMaximum": 0, "minimum": -0.5}, [-0.25], [0, -0.0, 0.25]),
        ({"exclusiveMinimum": 3, "exclusiveMaximum": 3.5}, [3.25], [3, 3.5]),
    ],
)
def test_a_whole_number_is_not_greater_than_itself(bounds: Any, takes_them: list[float], refuses: list[float]) -> None:
    schema = {"type": "number", **bounds}
    assert [takes(schema, value) for value in takes_them + refuses] == [True] * len(takes_them) + [False] * len(refuses)


def test_multiples_of_a_fraction_that_are_whole_numbers() -> None:
    schema = {"type": "integer", "multipleOf": 0.7, "minimum": 1, "maximum": 20}
    assert [value for value in range(22) if takes(schema, value)] == [7, 14]
    assert "multiple of 7" in refusal(schema | {"maximum": 6})


@given(st.decimals(allow_nan=False, allow_infinity=False).map(str) | st.floats(allow_nan=False).map(repr))
def test_a_float_says_whether_it_has_the_digits_that_were_written(text: str) -> None:
    found = read_float(text)
    assert isinstance(found, Rounded) != (text in ("inf", "-inf") or Decimal(repr(found)) == Decimal(text))


# -- keywords that say nothing

NOTHING = {
    "uniqueItems": False, "propertyNames": {"type": "string", "description": "any"}, "minLength": 0, "minItems": 0.0,
    "minProperties": 0, "maxLength": 10**12, "maxItems": 2**63, "additionalProperties": True, "additionalItems": False,
    "unevaluatedProperties": {}, "unevaluatedItems": True, "patternProperties": {}, "properties": {}, "required": [],
    "items": {}, "dependencies": {}, "dependentRequired": {}, "dependentSchemas": {}, "minContains": 2, "then": False,
    "else": {"const": 1}, "format": "int64", "$comment": "c", "title": "T", "description": "a\u0001",
    "default": {"$ref": "http://example.com/none"}, "examples": [BIG], "readOnly": True, "writeOnly": True,
    "deprecated": True, "contentEncoding": "base64", "contentMediaType": "text/plain", "contentSchema": {"not": {}},
    "nullable": True, "discriminator": {"propertyName": "kind", "mapping": {}}, "x-order": {"$ref": "#/nowhere"},
    "example": {"const": BIG}, "$schema": "https://example.com/a-dialect-of-ours", "$vocabulary": {},
    "markdownDescription": "m", "xml": {},
}  # fmt: skip


@pytest.mark.parametrize("keyword", NOTHING)
def test_a_keyword_that_says_nothing_is_dropped_wherever_it_stands(keyword: str) -> None:
    for value in (NOTHING[keyword], *(("path", "password") if keyword == "format" else ())):
        for plain, said in zip(wherever({"const": "v"}), wherever({"const": "v", keyword: value}), strict=True):
            assert rewritten(said) == rewritten(plain)


def test_a_property_of_a_keyword_s_name_is_none() -> None:
    names = [*NOTHING, "const", "enum", "$ref", "$id", "id", "$defs", "@type", "@id", "@context", "type", "not"]
    schema = {"type": "object", "properties": {name: {"const": name} for name in names}, "required": names}
    assert rewritten(schema) == schema
    literal = {"const": {name: [{"minLength": 0, "$ref": "http://example.com/"}] for name in names}}
    assert rewritten(literal) == literal
    assert answers({"const": {"$ref": "x", "uniqueItems": False}}, 1) == [{"$ref": "x", "uniqueItems": False}]


# -- what is said in another way

CLOSED = {"type": "object", "additionalProperties": False}
OPEN, INTEGER = {"type": "object"}, {"type": "integer"}
DRAFT_7 = "http://json-schema.org/draft-07/schema#"
A, B = {"a": {"const": 1}}, {"b": {"const": 2}}
INTEGERS = {**OPEN, "additionalProperties": INTEGER}
OTHERWISE: list[tuple[Schema, list[Any], list[Any]]] = [  # a schema, values that it takes, and others
    # zod 4, Pydantic, OpenAPI, JSON-LD
    ({**INTEGERS, "propertyNames": {"type": "string"}}, [{}, {"x": 1}], [{"x": "1"}]),
    ({**INTEGERS, "propertyNames": {"enum": ["x", "y"]}}, [{}, {"x": 1}, {"x": 1, "y": 2}], [{"z": 1}, {"x": "1"}]),
    ({**OPEN, "propertyNames": {"pattern": "^x"}, "properties": A, "minProperties": 1}, [{"x": 0}],
     [{"a": 1}, {"y": 1}]),
    ({**OPEN, "propertyNames": {"maxLength": 2}}, [{"xy": 0}], [{"xyz": 0}]),
    ({"$defs": {"Cat": {**CLOSED, "properties": {"kind": {"const": "cat"}, "age": INTEGER}}}, "$ref": "#/$defs/Cat",
      "required": ["kind"], "title": "Cat"}, [{"kind": "cat"}, {"kind": "cat", "age": 3}],
     [{"age": 3}, {"kind": "dog"}]),
    ({**OPEN, "properties": {"@type": {"const": "Person"}, "@id": {"type": "string"}}, "required": ["@type"]},
     [{"@type": "Person", "@id": "x"}], [{"@id": "x"}]),
    ({"$id": "https://example.com/root.json", "enum": [1, 2, 3],
      "$defs": {"a": {"$anchor": "here", "const": 1}, "b": {"$id": "other.json", "$defs": {"c": {"const": 2}}}},
      "anyOf": [{"$ref": "#here"}, {"$ref": "other.json#/$defs/c"}, {"$ref": "root.json#/$defs/a"}]}, [1, 2], [3]),
    # Decimal of Pydantic 2, and passwords
    ({"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}, ["1", "-1.5", "+.5", "007."],
     ["", "-", ".", "+.", "1e5"]),
    ({"type": "string", "pattern": r"^(?=.*\d)(?=.*[a-f])[a-f\d]{3}$"}, ["a1b", "0f0"], ["aaa", "111", "a1"]),
    # patterns of names beside properties
    ({**CLOSED, "patternProperties": {"^a$": INTEGER}, "properties": {"a": {"enum": ["x", 5]}}}, [{}, {"a": 5}],
     [{"a": "x"}]),
    ({**CLOSED, "patternProperties": {"^(a|b)$": {"const": 1}}}, [{"a": 1, "b": 1}], [{"a": 2}, {"c": 1}]),
    ({**OPEN, "patternProperties": {".*": {"const": 1}}, "properties": B}, [{"x": 1}], [{"b": 2}, {"x": 2}]),
    ({**CLOSED, "patternProperties": {"^x-": {"const": 1}}, "properties": A}, [{"a": 1, "x-1": 1}], [{"x-1": 2}]),
    # what holds if something else does
    ({**CLOSED, "properties": A | B, "dependentRequired": {"a": ["b"]}}, [{}, {"b": 2}, {"a": 1, "b": 2}], [{"a": 1}]),
    ({"$schema": DRAFT_7, **CLOSED, "properties": A | B, "dependencies": {"a": {"required": ["b"]}}}, [{"b": 2}],
     [{"a": 1}]),
    ({**CLOSED, "properties": {"k": {"enum": ["card", "cash", "c"]}, "n": {"const": 1}}, "required": ["k"],
      "if": {"properties": {"k": {"const": "card"}}}, "then": {"required": ["n"]},
      "else": {"properties": {"n": False}}},
     [{"k": "card", "n": 1}, {"k": "cash"}, {"k": "c"}], [{"k": "card"}, {"k": "cash", "n": 1}]),
    # oneOf and not
    ({**CLOSED, "properties": A | B, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, [{"a": 1}, {"b": 2}],
     [{}, {"a": 1, "b": 2}]),
    ({"$defs": {"s": {"type": "string"}}, "oneOf": [{"$ref": "#/$defs/s"}, {"type": "null"}]}, ["x", None], [1]),
    ({"oneOf": [{"minimum": 5, "type": "integer"}, {"type": "integer", "exclusiveMaximum": 5}]}, [5, 4], ["x"]),
    ({"oneOf": [{"const": 1}, {"enum": [1.0, 2]}]}, [2], [1]),
    ({"oneOf": [{}, {"type": "string"}, False]}, [1, None], ["x"]),
    ({"oneOf": [{"type": "null"}, True]}, ["x"], [None]),
    ({"oneOf": [{"type": "integer", "minimum": 0}, {"type": "integer", "maximum": 9}]}, [-1, 10], [0, 9]),
    ({"not": {"enum": ["ab", "a", 3, None]}}, ["", "abc", "b", 2, 4, True, [], {}], ["ab", "a", 3, None]),
    ({"type": "string", "not": {"const": "a.b"}}, ["axb", "a.", "a.bc"], ["a.b"]),
    ({**OPEN, "not": {"required": ["a"]}}, [{}, {"b": 1}], [{"a": 1}]),
    ({"not": {"type": ["object", "array", "string"]}}, [None, 1, 1.5, False], ["", [], {}]),
    ({"not": {"minLength": 2}}, ["", "a"], ["ab", 1]),
    ({"items": {"not": {}}, "type": "array"}, [[]], [[1]]),
    # older drafts
    ({"$schema": DRAFT_7, "type": "array", "items": [{"const": 1}], "additionalItems": {"const": 2}}, [[], [1, 2, 2]],
     [[2], [1, 1]]),
    ({"$schema": "http://json-schema.org/draft-04/schema#", "id": "http://example.com/a",
      "definitions": {"n": {"type": "null"}}, "allOf": [{"$ref": "http://example.com/a#/definitions/n"}]}, [None], [1]),
    ({**OPEN, "properties": A, "unevaluatedProperties": False}, [{"a": 1}], [{"a": 1, "b": 1}]),
    ({"type": "array", "prefixItems": [{"const": 1}], "unevaluatedItems": False}, [[1]], [[1, 2]]),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "right", "wrong"), OTHERWISE)
def test_what_llguidance_has_no_words_for_is_said_in_others(schema: Schema, right: list[Any], wrong: list[Any]) -> None:
    validator = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)(schema)
    for values, is_right in ((right, True), (wrong, False)):
        for value in values:
            assert (takes(schema, value), validator.is_valid(value)) == (is_right, is_right), value
    assert all(map(validator.is_valid, answers(schema, 6)))


def test_what_has_no_end_is_left_out() -> None:
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "required": ["next"]}
    schema = {"$defs": {"node": node}, **CLOSED, "properties": {"n": {"$ref": "#/$defs/node"}, **A}}
    assert takes(schema, {"a": 1})
    assert not takes(schema, {"n": {}})
    assert "no answer can be valid" in refusal({"$defs": {"node": node}, "$ref": "#/$defs/node"})
    assert "no answer can be valid" in refusal({"$ref": "#"})
    assert takes({"$defs": {"node": node | {"required": []}}, "$ref": "#/$defs/node"}, {"next": {"next": {}}})


# -- what is refused, by keyword and place


REFUSED: list[tuple[Schema, str]] = [
    ({"type": "array", "uniqueItems": True}, '"uniqueItems" at #/uniqueItems'),
    ({"properties": {"a": {"contains": {"const": 1}}}}, '"contains" at #/properties/a/contains'),
    ({"items": {"not": {"pattern": "a"}}}, '"not" at #/items/not'),
    ({"if": {"pattern": "a"}, "then": {"minLength": 3}}, '"if" at #/if'),
    ({"oneOf": [{"type": "number"}, {"type": "integer"}]},
     '"oneOf" at #/oneOf: an answer may be valid under its branches 0 and 1'),
    ({"allOf": [{"$dynamicRef": "#x"}]}, '"$dynamicRef" at #/allOf/0/$dynamicRef'),
    ({"$ref": "https://example.com/schema"}, "\"$ref\" at #/$ref: must name a schema within this one, not 'https://exam"),
    ({"items": {"format": "regex"}}, '"format" at #/items/format: an answer cannot be held to regex'),
    ({"$ref": "#/$defs/none"}, '"$ref" at #/$ref'),
    ({"$ref": 5}, '"$ref" at #/$ref'),
    ({"pattern": "^a(?=b)"}, '"pattern" at #/pattern: look-around'),
    ({"pattern": "^(?=a)b|c"}, '"pattern" at #/pattern: look-around'),
    ({"patternProperties": {"^(?!a)": {}}}, '"patternProperties" at #/patternProperties'),
    ({"properties": {"k1": {}}, "patternProperties": {"^k[1]$": {}}}, '"patternProperties" of the few names'),
    ({"propertyNames": {"format": "uuid"}}, '"propertyNames" at #/propertyNames'),
    ({"allOf": [{}], "unevaluatedProperties": False}, '"unevaluatedProperties" at #/unevaluatedProperties'),
    ({"type": "text"}, '"type" at #/type: must be of null, boolean'),
    ({"enum": "a"}, '"enum" at #/enum: must be a list'),
    ({"anyOf": []}, '"anyOf" at #/anyOf: must be a list of schemas'),
    ({"properties": []}, '"properties" at #/properties: must be an object'),
    ({"items": 5}, "#/items must be a JSON schema"),
    ({"required": "a"}, '"required" at #/required: must be a list of names'),
    ({"maxItems": "5"}, '"maxItems" at #/maxItems: must be a whole number'),
    ({"minimum": "5"}, '"minimum" at #/minimum: must be a number'),
    ({"multipleOf": 0}, '"multipleOf" at #/multipleOf: must be a number greater than 0'),
    ({"pattern": None}, '"pattern" at #/pattern: must be text'),
    ("[]", "JSON schema"),
    ("{", "is not JSON"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "named"), REFUSED)
def test_what_cannot_be_held_to_is_named_with_its_place(schema: Schema, named: str) -> None:
    assert named in refusal(schema)


def test_a_schema_that_would_take_long_to_rewrite_is_refused() -> None:
    fan = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 40} for i in range(20)} | {"d20": {"type": "null"}}
    branches = [{"required": [f"n{i}"]} for i in range(60)]
    chain = {
        f"d{i}": {"type": "array", "minItems": 1, "items": {"$ref": f"#/$defs/d{i * 7 % 501}"}} for i in range(501)
    }
    for schema in (
        {"$defs": fan, "not": {"$ref": "#/$defs/d0"}},
        {"oneOf": branches},
        {"oneOf": [{"properties": {"k": {"const": f"{i}"}}} for i in range(2500)]},
        {"$defs": chain, "anyOf": [{"$ref": f"#/$defs/{name}"} for name in chain]},
    ):
        assert "is not supported" in refusal(schema)


def test_arguments_of_tools_are_rewritten_as_answers_are() -> None:
    dialect = Dialect(TOKENIZER, "hermes")
    record = {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "integer"}}
    grammar = dialect.call_grammar({"tag": {"properties": {"labels": record}}}, is_forced=True, is_one=True)
    assert grammar is not None
    GRAMMARS.check(grammar)
    for schema, named in (
        ({"properties": {"id": {"const": BIG}}}, '"const" at #/properties/id/const'),
        (record | {"maximum": "1"}, '"maximum"'),
    ):
        with pytest.raises(InvalidRequest, match=named) as caught:
            dialect.call_grammar({"f": {}, "tag": schema}, is_forced=True, is_one=True)
        assert (caught.value.field, caught.value.value) == ("tools", "tag")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.text(max_size=3) | st.sampled_from([*NOTHING]), inner, max_size=2)
    ),
    max_leaves=4,
)


KEYWORDS = "type const enum $ref $id id $anchor allOf oneOf not if pattern minimum exclusiveMaximum".split()  # noqa: SIM905
KEYWORDS += ["multipleOf", "prefixItems", "$defs", "contains", *NOTHING]


@settings(max_examples=examples(250))
@given(st.dictionaries(st.sampled_from(KEYWORDS), JSON, max_size=3))
def test_what_is_no_schema_is_refused_by_name(schema: dict[str, Any]) -> None:
    for around in wherever(schema):
        said = ""
        try:
            rewritten(around)
        except ValueError as error:
            said = str(error)
        assert not said or "is not supported: " in said


# -- what zod 4.6.7 writes of its string formats

EMAIL, DURATION = sorted(_SAID_OTHERWISE, key=len)[::-1]
EMAIL, DURATION = (EMAIL, DURATION) if "@" in EMAIL else (DURATION, EMAIL)


@pytest.mark.parametrize(("pattern", "alphabet"), [(EMAIL, "a0.'-_@.ab@"), (DURATION, "PT1YMDHSW.")])
def test_a_pattern_that_is_said_otherwise_matches_the_same(pattern: str, alphabet: str) -> None:
    """The table is private: no schema shows the pattern that was given."""
    given, said = re.compile(pattern), re.compile(_SAID_OTHERWISE[pattern])
    draw, num_matching = random.Random(1), 0
    head, tail = ("P", "") if pattern == DURATION else ("", "a.ab")
    for _ in range(60_000):
        text = head + "".join(draw.choice(alphabet) for _ in range(draw.randint(0, 7))) + tail
        assert bool(given.match(text)) == bool(said.match(text)), text
        num_matching += bool(given.match(text))
    assert num_matching > 50


@pytest.mark.parametrize("pattern", [EMAIL, DURATION, r"^(?=.{1,253}\.?$)[a-z](?:\.[a-z]+)*\.?$"])
def test_what_zod_writes_of_its_formats_holds(pattern: str) -> None:
    assert "(?=" not in str(rewritten({"type": "string", "pattern": pattern}))


# -- any schema: it is refused before the first token, or every answer is valid and none breaks

NAMES = ("a", "b", "@id", "type", "k1")
NUMBERS = (0, 1, -1, 3, 10, 0.5, -0.5, 1.5, 9.5, 2**53, 2**53 + 1, 2**63 - 1, -(2**63), 1e18, 1e-9, 1e300)
VALUES = (None, True, 0, 1, 1.0, 1.5, -2, "a", "", "abc", "é☃", [], [1], {}, {"a": 1}, 2**53 + 2)
STRINGS = ("^[a-c]{2,3}$", r"^(?=.*[a-b])[a-d]{1,3}$", r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$", r"\d", "^a|b$", "^x?$")
PATTERNS = ("^a$", "^k[0-9]$", "^(a|b)$", "b", "^[a-z]+$", "^@", ".*", "^.*$", "^x-")
BINDING = ("then", "else", "items", "additionalItems", "unevaluatedItems", "$schema")  # beside others
COMMENTS = st.sampled_from([{key: said} for key, said in NOTHING.items() if key not in BINDING])


def _with(head: dict[str, Any], **optional: Any) -> st.SearchStrategy[dict[str, Any]]:
    fixed = {key: each if isinstance(each, st.SearchStrategy) else st.just(each) for key, each in head.items()}
    own = st.fixed_dictionaries(fixed, optional=optional)
    return own | st.tuples(COMMENTS, own).map(lambda pair: pair[0] | pair[1])


BOUND = st.sampled_from(NUMBERS)
SCALARS = st.one_of(
    _with({"type": st.sampled_from(["string", "integer", "number", "boolean", "null", ["string", "null"]])}),
    _with({"const": st.sampled_from(VALUES)}),
    _with({"enum": st.lists(st.sampled_from(VALUES), min_size=1, max_size=4)}),
    _with(
        {"type": st.sampled_from(["integer", "number"])},
        minimum=BOUND,
        maximum=BOUND,
        exclusiveMinimum=BOUND,
        exclusiveMaximum=BOUND,
        multipleOf=st.sampled_from([1, 2, 7, 0.5, 0.25]),
    ),
    _with(
        {"type": "string"}, minLength=st.integers(0, 3), maxLength=st.integers(0, 5), pattern=st.sampled_from(STRINGS)
    ),
)


def _objects(inner: st.SearchStrategy[Any], head: dict[str, Any]) -> st.SearchStrategy[Any]:
    names = st.lists(st.sampled_from(NAMES), max_size=2, unique=True)
    return _with(
        head,
        properties=st.dictionaries(st.sampled_from(NAMES), inner, max_size=3),
        required=names,
        additionalProperties=st.sampled_from([False, False, True, {"type": "integer"}]),
        patternProperties=st.dictionaries(st.sampled_from(PATTERNS), inner, max_size=2),
        propertyNames=st.sampled_from([True, {"enum": ["a", "b"]}, {"pattern": "^[a-z]+$"}, {"maxLength": 2}]),
        dependentRequired=st.dictionaries(st.sampled_from(NAMES), names, max_size=1),
        dependentSchemas=st.dictionaries(st.sampled_from(NAMES), inner, max_size=1),
        maxProperties=st.integers(0, 2),
    )


def _composed(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    several = st.lists(inner, min_size=1, max_size=3)
    return st.one_of(
        _objects(inner, {"type": "object"}),
        _with(
            {"type": "array", "maxItems": st.integers(0, 3)},
            items=inner,
            prefixItems=several,
            minItems=st.integers(0, 2),
        ),
        _with({"anyOf": several}),
        _with({"oneOf": several}),
        _with({"allOf": several}),
        _with({"not": inner}, type=st.sampled_from(["string", "object"])),
        st.tuples(_with({"if": inner, "then": inner}, **{"else": inner}), _objects(inner, {})).map(
            lambda both: both[1] | both[0]
        ),
        st.tuples(
            _objects(inner, {"type": "object"}),
            st.sampled_from(["anyOf", "oneOf"]),
            st.lists(_objects(inner, {}), min_size=1, max_size=2),
        ).map(lambda three: three[0] | {three[1]: three[2]}),
        _with({"$ref": st.sampled_from(["#/$defs/d", "#/$defs/e", "#"])}, description=st.just("d")),
    )


SCHEMAS = st.recursive(SCALARS, _composed, max_leaves=8)


@pytest.mark.at_length
@settings(max_examples=examples(100, at_length=600))
@given(st.tuples(SCHEMAS, SCHEMAS, SCHEMAS).map(lambda three: three[0] | {"$defs": {"d": three[1], "e": three[2]}}))
def test_any_schema_is_refused_or_every_answer_is_valid(schema: dict[str, Any]) -> None:
    try:
        GRAMMARS.check(Grammar("json_schema", schema))
    except InvalidRequest:
        return
    for answer in answers(schema, 3):
        jsonschema.Draft202012Validator(schema).validate(answer)
