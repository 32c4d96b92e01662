"""Rewrites a JSON schema so that llguidance holds answers to all it says, or refuses it by keyword and place.

llguidance reads numbers as 64-bit floats, refuses keywords that say nothing, and knows no negation. So each schema
that it compiles, of an answer or of a tool's arguments, comes from `rewritten`: only keywords that bind, references
into `$defs` alone, and no `oneOf`, `not`, `if` and `dependencies`. What it allows is valid under the given schema, and
what is valid is allowed, but for numbers past 2^53: an upper bound is rounded down to a float there, a lower one up.

`referencing` is imported when the first schema is rewritten: engines without grammars run where it is not installed.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import re
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any, NoReturn

from mneme.primitives import Rounded

Schema = Any  # a mapping or a boolean

_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
_ALL = frozenset(_TYPES)
_FORMATS = ("date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid")  # llguidance's
_OTHER_FORMATS = {  # of JSON schema; all others bind nobody (2020-12, 7.2.3)
    *("idn-email", "idn-hostname", "uri-reference", "uri-template", "iri", "iri-reference"),
    *("json-pointer", "relative-json-pointer", "regex"),
}
# Keywords whose value is a schema, several, or several by name.
_ONE = ("items", "additionalProperties", "not", "if", "then", "else")
_SEVERAL = ("allOf", "anyOf", "oneOf", "prefixItems")
_NAMED = ("properties", "patternProperties")
_NO_SCHEMA = (AttributeError, LookupError, TypeError, ValueError)  # what `referencing` raises for it
_IN_PLACE = ("$ref", "allOf", "anyOf", "oneOf", "if", "dependentSchemas", "dependencies")
_UNEVALUATED = {"unevaluatedProperties": "additionalProperties", "unevaluatedItems": "items"}
_UNSUPPORTED = ("contains", "$dynamicRef", "$recursiveRef")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
_SIDES = ((1, _BOUNDS[:2]), (-1, _BOUNDS[2:]))  # an upper bound is the lower one of the negative number
_OPPOSITE = dict(zip(_BOUNDS, ("exclusiveMaximum", "maximum", "exclusiveMinimum", "minimum"), strict=True))
_MAX_COUNT = 10**8  # no answer is so long
_FLOAT_EXACT, _MAX_BOUND = 2**53, 9.2e18  # llguidance writes integers below 2^63
# A client's schema is rewritten in no process of its own: what takes longer than in proportion to its size is bounded.
_MAX_COMPARED = 50_000  # schemas and values: 0.3 s
_MAX_CLASHING = 400  # branches that are each written beside another
_MAX_PASSES = 32  # over all definitions
_MAX_TOKENS = 64  # of a pattern, to say how many names match it
_MAX_DEPTH = 12  # of references and branches that are looked into to compare or negate schemas

_TOKEN = re.compile(r"\\.|\[\^?(?:\\.|[^\]\\])*\]|[()|*+?{^$.]|[^\\]", re.DOTALL)  # of a pattern
_ONLY_OF_CLASS = re.compile(r"\^?\[((?!\^)(?:\\.|[^\]\\])+)\]\*\$")
_ALTERNATIVES = re.compile(r"\^(?:\((?:\?:)?([\w\s/:@|-]*)\)|([\w\s/:@-]*))\$", re.ASCII)  # of literals
_LOOK_AROUND = re.compile(r"\(\?<?[=!]")  # among tokens of one character
# Patterns of zod 4 with look-around that is not at the beginning alone, and the same without it.
_SECONDS = r"\d+([.,]\d+)?S"
_TIME = rf"T(\d+H(\d+M)?({_SECONDS})?|\d+M({_SECONDS})?|{_SECONDS})"
_SAID_OTHERWISE = {
    r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$": (
        rf"^P(\d+W|(\d+Y(\d+M)?(\d+D)?|\d+M(\d+D)?|\d+D)({_TIME})?|{_TIME})$"
    ),
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$": (
        r"^([A-Za-z0-9_'+\-]+\.)*[A-Za-z0-9_'+\-]*[A-Za-z0-9_+\-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
    ),
}
_MATCHES_ALL = ("", "^", "$", ".*", "^.*", ".*$")


def rewritten(schema: Schema) -> Schema:
    """Return what llguidance is to compile; raises `ValueError` for what it cannot hold, and `RecursionError`."""
    return schema if isinstance(schema, bool) else _Rewriter(schema).rewritten()


def parts(value: Any) -> Iterator[Any]:
    """Walk a value and all that is in it."""
    left = [value]
    while left:
        part = left.pop()
        yield part
        left.extend(part.values() if isinstance(part, Mapping) else part if isinstance(part, list | tuple) else ())


def _refuse(place: str, why: str) -> NoReturn:
    """`place`: a JSON pointer that ends with the keyword."""
    raise ValueError(f'is not supported: "{place.rpartition("/")[2]}" at {place[:200]}: {why}')


class _Rewriter:
    """Rewrites one schema: keyword by keyword, then what needs a look at other schemas, then what no answer can end."""

    def __init__(self, schema: Schema) -> None:
        from referencing import Registry
        from referencing.jsonschema import DRAFT202012, specification_with

        given = schema if isinstance(schema, Mapping) else {}
        self._dialect = specification_with(str(given.get("$schema")), default=DRAFT202012)
        uris = [each.rstrip("#") for each in (given.get("$id"), given.get("id")) if isinstance(each, str)] or [""]
        resource = self._dialect.create_resource(schema)
        registry = Registry().with_resources((uri, resource) for uri in uris)
        with contextlib.suppress(*_NO_SCHEMA):  # what is wrong is named where it is met
            registry = registry.crawl()
        resolver = registry.resolver(uris[0])
        self._def_by_name: dict[str, Schema] = {}
        self._name_by_id: dict[int, str] = {}  # of what was given, which stays as long as this
        self._pending = deque[tuple[str, Schema, Any, str]]()
        self._num_compared = 0
        self._multiples: set[tuple[int, int]] = set()  # as digits, and how many of them are behind the point
        self._root = self._named(schema, resolver, "#")

    def rewritten(self) -> Schema:
        place_by_name = {}
        while self._pending:
            name, schema, resolver, place = self._pending.popleft()
            place_by_name[name] = place
            self._def_by_name[name] = self._plain(schema, resolver, place)
        for name, place in place_by_name.items():
            self._def_by_name[name] = self._positive(self._def_by_name[name], place)
        _check_patterns(self._def_by_name.values())
        endless = self._endless()
        defs = {name: self._finite(schema, endless) for name, schema in self._def_by_name.items()}
        root = self._root["$ref"]
        is_used = any(isinstance(part, Mapping) and part.get("$ref") == root for part in parts(defs))
        own = self._root if is_used else defs.pop(_name(root))
        if own is False or (is_used and defs[_name(root)] is False):
            raise ValueError("is not supported: no answer can be valid, or none of finite length")
        return {**own, "$defs": defs} if defs and isinstance(own, dict) else own

    # -- keyword by keyword

    def _named(self, schema: Schema, resolver: Any, place: str) -> dict[str, str]:
        """Return a reference to a schema, which is rewritten later."""
        name = self._name_by_id.get(id(schema))
        if name is None:
            base = re.sub(r"[^\w-]+", "", place.rpartition("/")[2], flags=re.ASCII) or "schema"
            name = self._name_by_id[id(schema)] = f"{base}_{len(self._name_by_id)}"
            self._pending.append((name, schema, resolver, place))
        return {"$ref": f"#/$defs/{name}"}

    def _plain(self, schema: Schema, resolver: Any, place: str) -> Schema:
        """Keep what binds, in its order: names of properties come in the order in which they are met."""
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping):
            raise ValueError(f"is not supported: {place[:200]} must be a JSON schema")
        if place != "#" and isinstance(self._dialect.id_of(schema), str):
            resolver = resolver.in_subresource(self._dialect.create_resource(schema))
        out: dict[str, Any] = {}
        more: list[Schema] = []  # what holds besides
        for key, part in schema.items():
            at = f"{place}/{key}"

            def plain(part: Schema, *names: object, at: str = at) -> Schema:
                return self._plain(part, resolver, "/".join([at, *map(str, names)]))

            if key == "$ref":
                target, its_resolver = self._looked_up(part, resolver, at)
                out[key] = self._named(target, its_resolver, str(part))["$ref"]
            elif key == "type":
                out[key] = _checked_types(part, at)
            elif key in ("const", "enum"):
                if key == "enum" and not isinstance(part, list | tuple):
                    _refuse(at, "must be a list")
                if any(not _is_exact(each) for each in parts(part)):
                    _refuse(at, "has a number that is not exact as a 64-bit float below 2^63")
                out[key] = part
            elif key in ("items", "prefixItems") and isinstance(part, list | tuple):
                out["prefixItems"] = [plain(each, i) for i, each in enumerate(part)]
            elif key == "additionalItems":
                if isinstance(schema.get("items"), list | tuple):
                    out["items"] = plain(part)
            elif key in _SEVERAL:
                if not isinstance(part, list | tuple) or not part:
                    _refuse(at, "must be a list of schemas")
                out[key] = [plain(each, i) for i, each in enumerate(part)]
            elif key in _NAMED:
                if key != "properties" and any(len(_patterns(each, at)) > 1 for each in _checked_mapping(part, at)):
                    _refuse(at, "look-around cannot be held to")
                out[key] = {name: plain(each, name) for name, each in _checked_mapping(part, at).items()}
            elif key in _ONE:
                if (found := plain(part)) not in (True, {}) or key in ("if", "not"):
                    out[key] = found
            elif key in _UNEVALUATED:
                said, found = _UNEVALUATED[key], plain(part)
                if found not in (True, {}) and not isinstance(schema.get(said), Mapping | bool):
                    if any(each in schema for each in _IN_PLACE):
                        _refuse(at, "an answer cannot be held to it beside schemas of the same value")
                    out[said] = found
            elif key == "required":
                if not isinstance(part, list | tuple) or not all(isinstance(each, str) for each in part):
                    _refuse(at, "must be a list of names")
                out[key] = list(dict.fromkeys(part))
            elif key in _COUNTS:
                count = _checked_count(part, at)
                if count if key.startswith("min") else count < _MAX_COUNT:
                    out[key] = count
            elif key == "pattern":
                out[key], *others = _patterns(part, at)
                more += [{key: each} for each in others]
            elif key == "format":
                if part in _FORMATS:
                    out[key] = part
                elif isinstance(part, str) and part in _OTHER_FORMATS and "string" in str(schema.get("type", "string")):
                    _refuse(at, f"an answer cannot be held to {part}")
            elif key == "multipleOf":
                out[key] = self._multiple(part, schema, at)
            elif key == "propertyNames":
                more += self._of_names(part, resolver, at)
            elif key in ("dependencies", "dependentRequired", "dependentSchemas"):
                for name, each in _checked_mapping(part, at).items():
                    needed = plain({"required": each} if isinstance(each, list | tuple) else each, name)
                    more.append({"anyOf": [{"properties": {name: False}}, needed]})
            elif key == "uniqueItems":
                if part and schema.get("maxItems", 2) not in (0, 1):
                    _refuse(at, "an answer cannot be held to it")
            elif key in _UNSUPPORTED and (schema.get("minContains"), schema.get("maxContains")) != (0, None):
                _refuse(at, "an answer cannot be held to it")
        out |= _given_bounds(schema, place)
        _kept_bounds(out, place)  # what is denied is not rounded
        _without_literal_patterns(out)
        if more:
            out["allOf"] = [*out.get("allOf", ()), *more]
        return {key: part for key, part in out.items() if part not in ({}, []) or key in ("const", "enum", *_ONE)}

    def _looked_up(self, reference: Any, resolver: Any, place: str) -> tuple[Schema, Any]:
        from referencing.exceptions import Unresolvable

        try:
            found = resolver.lookup(reference)
        except (Unresolvable, *_NO_SCHEMA):
            _refuse(place, f"must name a schema within this one, not {str(reference)[:80]!r}")
        return found.contents, found.resolver

    def _multiple(self, value: Any, schema: Schema, place: str) -> int | float:
        """Return a number whose multiples llguidance reads as these."""
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            _refuse(place, "must be a number greater than 0")
        if not _is_exact(value):
            _refuse(place, "has more digits than a 64-bit float holds")
        of = Fraction(repr(value))
        if _is_integral(schema):
            of = Fraction(of.numerator)
        written = of.numerator if of.denominator == 1 else value
        scaled, num_digits = float(written), 0  # as llguidance reads it
        while scaled % 1:
            scaled, num_digits = scaled * 10, num_digits + 1
        if scaled >= 2**32 or Fraction(int(scaled), 10**num_digits) != of:
            _refuse(place, "has too many digits")
        self._multiples.add((int(scaled), num_digits))
        most = max(num_digits for _, num_digits in self._multiples)
        together = [each * 10 ** (most - num_digits) for each, num_digits in self._multiples]
        if len(together) > 1 and math.lcm(*together) * max(together) >= 2**32:  # llguidance joins them in 32 bits
            _refuse(place, "has too many digits together with others")
        return written

    def _of_names(self, part: Schema, resolver: Any, place: str) -> list[Schema]:
        """Say what names an object may have by its properties."""
        for _ in range(_MAX_DEPTH):
            if isinstance(part, Mapping) and "$ref" in part:
                part, resolver = self._looked_up(part["$ref"], resolver, place)
        names = self._plain(part, resolver, place)
        if isinstance(names, dict) and "string" in names.get("type", "string"):
            names.pop("type", None)
        if names in (True, {}):
            return []
        keys = [] if names is False else [*names]
        if keys in (["const"], ["enum"]):
            allowed = names["enum"] if keys == ["enum"] else [names["const"]]
            return [{"properties": dict.fromkeys((each for each in allowed if isinstance(each, str)), True), **_CLOSED}]
        if {*keys} <= {"minLength", "maxLength"} and keys:
            names = {"pattern": rf"^[\s\S]{{{names.get('minLength', 0)},{names.get('maxLength', '')}}}$"}
        if names is not False and [*names] != ["pattern"]:
            _refuse(place, "may have an enum, a pattern or lengths")
        return [_CLOSED if names is False else {"patternProperties": {names["pattern"]: True}, **_CLOSED}]

    # -- beside other schemas

    def _positive(
        self, schema: Schema, place: str, types: frozenset[str] = _ALL, required: frozenset[str] = frozenset()
    ) -> Schema:
        """Say the same without `if`, `not` and `oneOf`, of a value of these types that has these names."""
        if isinstance(schema, bool):
            return schema
        types, required = types & _types(schema), required.union(schema.get("required", ()))

        def positive(part: Schema, at: str) -> Schema:
            of_same = (types, required) if at.partition("/")[0] in _IN_PLACE else ()
            return self._positive(part, f"{place}/{at}", *of_same)

        out = _mapped(schema, positive)
        condition, then, other = out.pop("if", True), out.pop("then", True), out.pop("else", True)
        if "if" in schema and (then, other) != (True, True):
            denied = self._denied(condition, types, f"{place}/if")
            _add(out, {"anyOf": [{"allOf": [condition, then]}, {"allOf": [denied, other]}]})
        if "not" in out:
            _add(out, self._denied(out.pop("not"), types, f"{place}/not"))
        if "oneOf" in out:
            branches = self._exclusive(out.pop("oneOf"), types, required, f"{place}/oneOf")
            _add(out, {"anyOf": branches})
        return out

    def _denied(self, schema: Schema, types: frozenset[str], place: str) -> Schema:
        denied = self._negated(schema, types)
        if denied is None:
            _refuse(place, "an answer cannot be held to the opposite")
        return denied

    def _exclusive(
        self, branches: list[Schema], types: frozenset[str], required: frozenset[str], place: str
    ) -> list[Schema]:
        """Return branches of which no two hold together."""
        clashing: dict[int, list[int]] = {i: [] for i in range(len(branches))}
        for i, one in enumerate(branches):
            for j in range(i):
                if not self._are_disjoint(one, branches[j], types, required):
                    clashing[i].append(j)
                    clashing[j].append(i)
            if self._num_compared > _MAX_COMPARED or sum(map(len, clashing.values())) > _MAX_CLASHING:
                _refuse(place, "has too many branches to compare")
        exclusive = []
        for i, branch in enumerate(branches):
            own = types if isinstance(branch, bool) else types & _types(branch)
            denied = [self._negated(branches[j], own) for j in clashing[i]]
            if None in denied:
                pair = sorted((i, clashing[i][denied.index(None)]))
                _refuse(place, f"an answer may be valid under its branches {pair[0]} and {pair[1]}")
            exclusive.append({"allOf": [branch, *denied]} if denied else branch)
        return exclusive

    def _are_disjoint(
        self, one: Schema, other: Schema, types: frozenset[str], required: frozenset[str], depth: int = 0
    ) -> bool:
        """Return whether it is certain that no value of these types and with these names is valid under both."""
        if isinstance(one, bool) or isinstance(other, bool):
            return one is False or other is False
        self._num_compared += 1 + len(one.get("enum", ())) + len(other.get("enum", ()))
        if depth > _MAX_DEPTH or self._num_compared > _MAX_COMPARED:
            return False
        types = types & _types(one) & _types(other)
        required = required.union(one.get("required", ()), other.get("required", ()))
        for schema, beside in ((one, other), (other, one)):

            def is_apart(part: Schema, beside: Schema = beside) -> bool:
                return self._are_disjoint(part, beside, types, required, depth + 1)

            if "$ref" in schema and is_apart(self._def_by_name[_name(schema["$ref"])]):
                return True
            if any(map(is_apart, schema.get("allOf", ()))):
                return True
            if any(key in schema and all(map(is_apart, schema[key])) for key in ("anyOf", "oneOf")):
                return True
        values, others = _values(one), _values(other)
        if not types or (values is not None and others is not None and not values & others):
            return True
        if types <= {"integer", "number"}:
            return _is_below(one, other) or _is_below(other, one)
        return types == {"object"} and any(
            self._are_disjoint(_property(one, name), _property(other, name), _ALL, frozenset(), depth + 1)
            for name in required
        )

    def _negated(self, schema: Schema, types: frozenset[str], depth: int = 0) -> Schema | None:
        """Return what values of these types must be where they are not this; None: it cannot be said."""
        self._num_compared += 1
        if isinstance(schema, bool):
            return not schema
        if depth > _MAX_DEPTH or self._num_compared > _MAX_COMPARED:
            return None
        branches = [self._negated_keyword(key, part, types, depth + 1) for key, part in schema.items()]
        if None in branches:
            return None
        branches = [each for each in branches if each is not False]
        return branches[0] if len(branches) == 1 else {"anyOf": branches} if branches else False

    def _negated_keyword(self, key: str, part: Any, types: frozenset[str], depth: int) -> Schema | None:
        if key == "type":
            left = types - _types({key: part})
            if "number" in left and "integer" not in left:
                return None  # numbers with a fraction
            return {"type": sorted(left - ({"integer"} if "number" in left else set()))} if left else False
        if key in ("const", "enum"):
            return _other_than(part if key == "enum" else [part], types)
        if key == "$ref":
            return self._negated(self._def_by_name[_name(part)], types, depth)
        if key in ("allOf", "anyOf"):
            denied = [self._negated(each, types, depth) for each in part]
            return None if None in denied else {"anyOf" if key == "allOf" else "allOf": denied}
        if key == "required":
            return {"anyOf": [{"type": "object", "properties": {name: False}} for name in part]}
        if key == "properties":
            by_name = {name: self._negated(each, _ALL, depth) for name, each in part.items()}
            if None in by_name.values():
                return None
            of_each = [{"properties": {name: each}, "required": [name]} for name, each in by_name.items()]
            return {"type": "object", "anyOf": of_each}
        if key in _BOUNDS:
            return {"type": "number", _OPPOSITE[key]: part}
        if key in ("minLength", "minItems"):
            return {"type": "string" if key == "minLength" else "array", key.replace("min", "max"): part - 1}
        if key in ("maxLength", "maxItems"):
            return {"type": "string" if key == "maxLength" else "array", key.replace("max", "min"): part + 1}
        return None

    # -- what no answer can end

    def _endless(self) -> set[str]:
        """Return the definitions under which all values go on without end."""
        endless, names = set(self._def_by_name), list(self._def_by_name)
        for _ in range(_MAX_PASSES):
            names, before = names[::-1], len(endless)
            for name in names:
                if name in endless and self._ends(self._def_by_name[name], endless):
                    endless.remove(name)
            if len(endless) == before:
                return endless
        raise ValueError('is not supported: "$ref" leads to too many others')

    def _ends(self, schema: Schema, endless: Collection[str]) -> bool:
        """Return whether a value of finite length may be valid; nothing is under definitions that are `endless`."""
        if isinstance(schema, bool):
            return schema
        if "$ref" in schema and _name(schema["$ref"]) in endless:
            return False
        if not all(self._ends(each, endless) for each in schema.get("allOf", ())):
            return False
        if "anyOf" in schema and not any(self._ends(each, endless) for each in schema["anyOf"]):
            return False
        types = _types(schema)
        if types - {"object", "array"} or not {"const", "enum"}.isdisjoint(schema):
            return True
        if "object" in types and all(
            self._ends(_property(schema, name), endless) for name in schema.get("required", ())
        ):
            return True
        items = [*schema.get("prefixItems", ()), schema.get("items", True)][: schema.get("minItems", 0)]
        return "array" in types and all(self._ends(each, endless) for each in items)

    def _finite(self, schema: Schema, endless: Collection[str]) -> Schema:
        """Leave out what leads to no end, so that no answer begins it."""
        if not self._ends(schema, endless):
            return False
        if isinstance(schema, bool):
            return schema
        out = _mapped(schema, lambda part, _: self._finite(part, endless))
        return {key: part for key, part in out.items() if key not in _BOUNDS} | _kept_bounds(out, "#")


_CLOSED = {"additionalProperties": False}


def _name(reference: str) -> str:
    return reference.rpartition("/")[2]


def _mapped(schema: Mapping[str, Any], change: Callable[[Schema, str], Schema]) -> dict[str, Any]:
    """Change each schema within, which is given with its place."""
    out = dict(schema)
    for key, part in schema.items():
        if key in _NAMED:
            out[key] = {name: change(each, f"{key}/{name}") for name, each in part.items()}
        elif key in _SEVERAL:
            out[key] = [change(each, f"{key}/{i}") for i, each in enumerate(part)]
        elif key in _ONE:
            out[key] = change(part, key)
    return out


def _within(schema: Schema) -> Iterator[Mapping[str, Any]]:
    """Walk a schema and those in it."""
    if not isinstance(schema, bool):
        yield schema
        within: list[Schema] = []
        _mapped(schema, lambda part, _: within.append(part))
        for each in within:
            yield from _within(each)


def _add(schema: dict[str, Any], part: Schema) -> None:
    schema["allOf"] = [*schema.get("allOf", ()), part]


def _types(schema: Mapping[str, Any]) -> frozenset[str]:
    """Return the types of valid values; "number" has "integer" beside it."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    given = schema.get("type", _TYPES) if values is None else [_type(each) for each in values]
    types = {given} if isinstance(given, str) else set(given)
    return frozenset(types | {"integer"} if "number" in types else types)


def _type(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return "null" if value is None else "boolean"
    if isinstance(value, int | float):
        return "integer" if value == int(value) else "number"
    return "string" if isinstance(value, str) else "object" if isinstance(value, Mapping) else "array"


def _values(schema: Mapping[str, Any]) -> set[str] | None:
    """Return all valid values, as JSON; None: they are not given one by one."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return None if values is None else {_comparable(each) for each in values}


def _comparable(value: Any) -> str:
    return json.dumps(json.loads(json.dumps(value), parse_float=lambda text: _whole(float(text))), sort_keys=True)


def _whole(value: float) -> int | float:
    return int(value) if value == int(value) else value


def _property(schema: Mapping[str, Any], name: str) -> Schema:
    """Return what a property must be as far as this says by name."""
    if name in schema.get("properties", ()):
        return schema["properties"][name]
    return True if "patternProperties" in schema else schema.get("additionalProperties", True)


def _is_below(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether all numbers of one are less than those of the other."""
    highest = min(one.get("maximum", math.inf), one.get("exclusiveMaximum", math.inf))
    lowest = max(other.get("minimum", -math.inf), other.get("exclusiveMinimum", -math.inf))
    is_open = one.get("exclusiveMaximum") == highest or other.get("exclusiveMinimum") == lowest
    return bool(highest < lowest or (highest == lowest and is_open))


def _other_than(values: list[Any], types: frozenset[str]) -> Schema | None:
    """Return the schema of all other values of these types; None where it cannot be said."""
    by_type: dict[str, list[Any]] = {}
    for value in values:
        if (of := _type(value)) in types:
            by_type.setdefault("number" if of == "integer" else of, []).append(value)
    if "object" in by_type or "array" in by_type or any(not _is_plain(each) for each in by_type.get("string", ())):
        return None
    numeric = "number" if "number" in types else "integer"
    branches: list[Schema] = [{"type": each} for each in sorted(types - {"integer", *by_type})]
    if "number" not in by_type and numeric == "integer" and "integer" in types:
        branches.append({"type": "integer"})
    if len(set(by_type.get("boolean", ()))) == 1:
        branches.append({"const": not by_type["boolean"][0]})
    numbers = sorted(set(by_type.get("number", ())))
    for low, high in zip([None, *numbers], [*numbers, None], strict=True) if numbers else ():
        low_bound = {} if low is None else {"exclusiveMinimum": low}
        branches.append({"type": numeric, **low_bound, **({} if high is None else {"exclusiveMaximum": high})})
    if "string" in by_type:
        branches.append({"type": "string", "pattern": f"^{_texts_but(set(by_type['string']))}$"})
    return {"anyOf": branches} if branches else False


def _is_plain(text: str) -> bool:
    return text.isprintable() and len(text) <= 64


def _texts_but(texts: set[str]) -> str:
    """Write a pattern of all texts but these."""
    heads = sorted({text[0] for text in texts if text})
    escaped = ["\\" + head if head in r"\.+*?()|[]{}^$#&-~/" else head for head in heads]
    branches = [] if "" in texts else [""]
    branches.append(f"[^{''.join(escaped)}][\\s\\S]*" if heads else r"[\s\S]+")
    for head, as_written in zip(heads, escaped, strict=True):
        branches.append(as_written + _texts_but({text[1:] for text in texts if text[:1] == head}))
    return f"(?:{'|'.join(branches)})"


def _checked_types(part: Any, place: str) -> str | list[str]:
    given = [part] if isinstance(part, str) else part
    if not isinstance(given, list | tuple) or not given or any(each not in _TYPES for each in given):
        _refuse(place, f"must be of {', '.join(_TYPES)}")
    return given[0] if len(given) == 1 else list(dict.fromkeys(given))


def _checked_mapping(part: Any, place: str) -> Mapping[str, Any]:
    if not isinstance(part, Mapping):
        _refuse(place, "must be an object")
    return part


def _checked_count(part: Any, place: str) -> int:
    if isinstance(part, bool) or not isinstance(part, int | float) or part < 0 or part % 1:
        _refuse(place, "must be a whole number, 0 or more")
    return int(part)


def _is_integral(schema: Mapping[str, Any]) -> bool:
    types = schema.get("type")
    return types == "integer" or (isinstance(types, list | tuple) and "integer" in types and "number" not in types)


def _is_exact(value: Any) -> bool:
    """Return whether llguidance writes a number, if it is one, with the digits that were given."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return True
    if isinstance(value, Rounded) or not abs(value) < 2**63:
        return False
    written = value if isinstance(value, int) else Decimal(repr(value))
    return abs(value) <= _FLOAT_EXACT or int(float(value)) == written


def _given_bounds(schema: Mapping[str, Any], place: str) -> dict[str, int | float]:
    out: dict[str, int | float] = {}
    for key in _BOUNDS:
        value, inclusive = schema.get(key), key.replace("exclusiveM", "m")
        if isinstance(value, bool) and key != inclusive:  # of draft 4
            if value and inclusive in out:
                out[key] = out.pop(inclusive)
        elif key in schema:
            if isinstance(value, bool | Rounded) or not isinstance(value, int | float) or abs(value) == math.inf:
                _refuse(f"{place}/{key}", "must be a number, of no more digits than a 64-bit float holds")
            out[key] = value
    return out


def _kept_bounds(schema: Mapping[str, Any], place: str) -> dict[str, int | float]:
    """Return the bounds of a number as llguidance keeps to them, or refuse them."""
    is_integral, sides = _is_integral(schema), []
    for sign, keys in _SIDES:
        given = [(sign * schema[key], i) for i, key in enumerate(keys) if key in schema]
        value, is_open = max(given, default=(None, 0))
        said = keys[is_open]
        if value is not None and is_open and is_integral:
            value, is_open = math.floor(value) + 1, 0
        sides.append((value, is_open, said))
    kept: dict[str, int | float] = {}
    for (sign, keys), (value, is_open, said), (other, *_) in zip(_SIDES, sides, reversed(sides), strict=True):
        if value is None and other is not None and other >= 10**17:
            value = -int(_MAX_BOUND)  # without a bound llguidance refuses it
        if value is None:
            continue
        if abs(value) >= _FLOAT_EXACT:
            inner = _toward_zero(value)
            if is_open and inner == value:
                inner = _toward_zero(math.nextafter(inner, 0))
            if inner != value and (value > 0 or (other is not None and other >= _FLOAT_EXACT)):
                _refuse(f"{place}/{said}", "must be exact as a 64-bit float below 2^63")
            value, is_open = inner, 0
        elif is_open and other is not None and 0 <= value == math.floor(value) < -other < value + 1:
            # llguidance takes this whole number for one that is greater than itself
            value, is_open = math.nextafter(value, math.inf) if value else -other * 2**-52, 0
        kept[keys[is_open]] = sign * value + 0
    return kept


def _toward_zero(value: float) -> int:
    """Return the next number whose digits a 64-bit float holds."""
    found = float(min(abs(value), int(_MAX_BOUND)))
    while found > abs(value) or int(found) != Decimal(repr(found)):
        found = math.nextafter(found, 0)
    return int(found) if value > 0 else -int(found)


def _patterns(pattern: Any, place: str) -> list[str]:
    """Write a pattern as several that all match: a look-ahead at its beginning is one of its own."""
    if not isinstance(pattern, str):
        _refuse(place, "must be text")
    others: list[str] = []
    tokens: list[str] = _TOKEN.findall(_SAID_OTHERWISE.get(pattern, pattern))
    while tokens[:3] == ["^", "(", "?"] and tokens[3:4] in (["="], ["!"]) and not _is_choice(tokens):
        depths = _depths(tokens)
        end = depths.index(0, 1) if 0 in depths[1:] else len(tokens)
        inner = "".join(tokens[4:end])
        of_class = _ONLY_OF_CLASS.fullmatch(inner)
        if tokens[3] == "!" and of_class is None:
            break
        others.append(f"[^{of_class[1]}]" if of_class and tokens[3] == "!" else f"^(?:{inner})")
        tokens = ["^", *tokens[end + 1 :]]
    found = ["".join(tokens), *others]
    if any(
        _LOOK_AROUND.search("".join("." if len(token) > 1 else token for token in _TOKEN.findall(each)))
        for each in found
    ):
        _refuse(place, "look-around can be held to only as look-ahead at the beginning")
    return found


def _depths(tokens: list[str]) -> list[int]:
    """Return in how many groups of a pattern each token ends."""
    return list(itertools.accumulate((token == "(") - (token == ")") for token in tokens))


def _is_choice(tokens: list[str]) -> bool:
    """Return whether a pattern is several, one or another of which matches."""
    return any(token == "|" and depth == 0 for token, depth in zip(tokens, _depths(tokens), strict=True))


def _without_literal_patterns(schema: dict[str, Any]) -> None:
    """Say by `properties` and `additionalProperties` what patterns say of certain names, or of all."""
    schema_by_pattern, properties = schema.get("patternProperties", {}), dict(schema.get("properties", {}))
    for pattern, part in list(schema_by_pattern.items()):
        found = _ALTERNATIVES.fullmatch(pattern)
        if pattern in _MATCHES_ALL and len(schema_by_pattern) == 1:
            names = [*properties]
            schema["additionalProperties"] = part
        elif found is not None:
            names = (found[2] if found[1] is None else found[1]).split("|")
        else:
            continue
        for name in names:
            properties[name] = {"allOf": [properties[name], part]} if name in properties else part
        del schema_by_pattern[pattern]
    if properties:
        schema["properties"] = properties


def _check_patterns(schemas: Iterable[Schema]) -> None:
    """Refuse patterns of names that may all be properties: llguidance would wait for another without end."""
    objects = [each for schema in schemas for each in _within(schema)]
    names = {name for each in objects for key in ("properties", "required") for name in each.get(key, ())}
    for pattern in {pattern for each in objects for pattern in each.get("patternProperties", ())}:
        if _least_names(pattern) <= len(names):
            raise ValueError(f'is not supported: "patternProperties" of the few names that match {pattern[:80]!r}')


def _least_names(pattern: str) -> float:
    """Return how many names match a pattern, or fewer."""
    tokens = _TOKEN.findall(pattern)
    is_whole = tokens[:1] == ["^"] and tokens[-1:] == ["$"] and not _is_choice(tokens)
    if not is_whole or not {"*", "+"}.isdisjoint(tokens) or re.search(r"\{\d+,\}", pattern):
        return math.inf
    num_names = 1
    for i, (token, depth) in enumerate(zip(tokens[:_MAX_TOKENS], _depths(tokens), strict=False)):
        if len(token) > 1 or token == ".":
            with contextlib.suppress(re.error):  # of Rust's own
                num_fitting = sum(bool(re.match(token, chr(i))) for i in range(128))
                is_needed = depth == 0 and tokens[i + 1] != "?" and tokens[i + 1 : i + 3] != ["{", "0"]
                num_names = num_names * num_fitting if is_needed else max(num_names, num_fitting)
    return num_names
