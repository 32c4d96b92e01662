"""The input of a custom tool's call: the same text, however the call was written and cut."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mneme.cluster.wire.responses import RawInput, flat_name
from tests.budget import examples


def told(arguments: str, sizes: list[int]) -> str:
    raw, said = RawInput(), ""
    while arguments:
        size = sizes.pop() if sizes else len(arguments)
        said, arguments = said + raw.push(arguments[:size]), arguments[size:]
    return said + raw.end()


@given(st.text(), st.booleans(), st.lists(st.integers(1, 5)))
@settings(max_examples=examples(200), deadline=None)
def test_the_text_does_not_depend_on_how_it_was_cut(text: str, is_ascii: bool, sizes: list[int]) -> None:
    assert told(json.dumps({"input": text}, ensure_ascii=is_ascii), sizes) == text


@given(st.text(alphabet='\\"u{}:d83input ', max_size=30), st.lists(st.integers(1, 4)))
@settings(max_examples=examples(200), deadline=None)
def test_what_is_no_json_is_the_same_whole_and_cut(inside: str, sizes: list[int]) -> None:
    for arguments in (inside, f'{{"input": "{inside}"}}'):
        whole = told(arguments, [])
        assert told(arguments, sizes) == whole
        whole.encode()  # no half of a character


@pytest.mark.parametrize(
    ("arguments", "text"), [('{"inp', ""), ('{"input": "a\\n\\', "a\n"), ('{"input": "a\\u00', "a"), ("", "")]
)
def test_of_a_call_that_was_cut_off_what_is_whole_is_told(arguments: str, text: str) -> None:
    assert told(arguments, [1] * len(arguments)) == text


def test_names_that_are_cut_stay_apart() -> None:
    names = [flat_name("n" * 80 + end, "read") for end in "ab"]
    assert len(set(names)) == 2
    assert all(len(name) == 64 for name in names)
    assert flat_name("a b/ü", "read") == "a_b____read"
