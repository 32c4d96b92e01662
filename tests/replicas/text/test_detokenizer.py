from __future__ import annotations

import random
from bisect import bisect_right

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mneme.replicas.text.detokenizer import TextStream
from mneme.replicas.text.tokenizer import Tokenizer
from tests.budget import examples
from tests.replicas.tiny_tokenizer import IM_END, IM_START, byte_level_backend, sentencepiece_backend, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
SENTENCEPIECE = Tokenizer(sentencepiece_backend())
TEXTS = st.text(st.characters(exclude_categories=("Cs",)), max_size=80)
SPLITTABLE = st.text("aSTOPEND世🙂 \n", max_size=60)
STOPS = st.lists(st.text("STOPEND世🙂a ", min_size=1, max_size=5), min_size=1, max_size=4)


def stream_all(stream: TextStream, ids: list[int]) -> list[str]:
    return [*(stream.push([token_id]) for token_id in ids), stream.finish()]


@settings(max_examples=examples(300))
@given(TEXTS)
def test_pieces_of_any_text_make_up_the_text(text: str) -> None:
    pieces = stream_all(TextStream(TOKENIZER), TOKENIZER.encode(text, add_special_tokens=False))
    assert "".join(pieces) == text
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)


@settings(max_examples=examples(300))
@given(
    st.lists(st.integers(3, TOKENIZER.vocab_size - 1), max_size=120)
    | st.lists(st.sampled_from([*range(3, 259), 100, 100, 200, 200]), min_size=30, max_size=200)  # no characters
)
def test_any_ids_give_what_decoding_them_at_once_gives(ids: list[int]) -> None:
    whole = TOKENIZER.decode(ids, skip_special_tokens=True)
    assert "".join(stream_all(TextStream(TOKENIZER), ids)) == whole


@settings(max_examples=examples(300))
@given(st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=120), STOPS)
def test_whole_tokens_are_those_whose_text_lies_before_the_stop_string(ids: list[int], stops: list[str]) -> None:
    stream = TextStream(TOKENIZER, stops)
    stream_all(stream, ids)
    sizes = [len(TOKENIZER.decode(ids[:end], skip_special_tokens=True)) for end in range(len(ids) + 1)]
    assert stream.num_whole_tokens == bisect_right(sizes, len(stream.text)) - 1


@settings(max_examples=examples(300))
@given(st.text(st.sampled_from("the fox ab.c 世界🙂éß"), max_size=80))
def test_byte_fallback_and_word_start_markers(text: str) -> None:
    ids = SENTENCEPIECE.encode(text, add_special_tokens=False)
    whole = SENTENCEPIECE.decode(ids, skip_special_tokens=True)
    assert "".join(stream_all(TextStream(SENTENCEPIECE), ids)) == whole


@settings(max_examples=examples(500))
@given(SPLITTABLE, STOPS)
def test_text_ends_before_the_first_stop_string(text: str, stops: list[str]) -> None:
    stream = TextStream(TOKENIZER, stops)
    pieces = stream_all(stream, TOKENIZER.encode(text, add_special_tokens=False))
    # A character at a time: the first stop string that is complete ends the text.
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    assert stream.stopped == bool(ends)
    assert not any(stop in stream.text for stop in stops)
    assert text.startswith(stream.text)
    assert "".join(pieces) == stream.text
    if not ends:
        assert stream.text == text
    else:
        assert any(text.startswith(stop, len(stream.text)) for stop in stops)


@pytest.mark.parametrize("stops", [["ps", "um"], ["um", "ps"]])
def test_of_two_stop_strings_in_one_token_the_one_that_comes_first_ends_the_text(stops: list[str]) -> None:
    (jumps,) = TOKENIZER.encode(" jumps", add_special_tokens=False)
    stream = TextStream(TOKENIZER, stops)
    assert (stream.push([jumps]), stream.stop_string, stream.finish()) == (" j", "um", "")


@settings(max_examples=examples(200))
@given(SPLITTABLE, STOPS, st.randoms(use_true_random=False))
def test_the_text_does_not_depend_on_how_ids_are_grouped(text: str, stops: list[str], rng: random.Random) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    one_by_one, grouped = TextStream(TOKENIZER, stops), TextStream(TOKENIZER, stops)
    stream_all(one_by_one, ids)
    while ids:
        size = rng.randint(1, len(ids))
        grouped.push(ids[:size])
        ids = ids[size:]
    grouped.finish()
    assert (grouped.text, grouped.stopped) == (one_by_one.text, one_by_one.stopped)


def test_a_possible_beginning_of_a_stop_string_is_held_back_and_nothing_comes_after_one() -> None:
    encode, stream = TOKENIZER.encode_continuation, TextStream(TOKENIZER, ["STOP"])
    assert stream.push(encode("abcST")) == "abc"
    assert stream.push(encode("Xd")) == "STXd"
    assert stream.push(encode("abSTOPcd")) == "ab"
    assert stream.stopped
    assert stream.push(encode("more")) == stream.finish() == ""
    stream = TextStream(TOKENIZER, ["STOP"])
    stream.push(encode("S"))
    assert stream.finish() == "S"


def test_stop_strings_within_the_first_min_tokens_do_not_count() -> None:
    ids = [TOKENIZER.encode(letter, add_special_tokens=False)[0] for letter in "xyxy"]
    stream = TextStream(TOKENIZER, ["xy"], min_tokens=2)
    assert [stream.push([token_id]) for token_id in ids] == ["x", "y", "", ""]
    assert stream.stopped


@pytest.mark.parametrize(("skip", "text"), [(True, "ab"), (False, "<|im_start|>a<|im_end|>b")])
def test_special_tokens_are_shown_only_when_asked(skip: bool, text: str) -> None:
    a, b = (TOKENIZER.encode(letter, add_special_tokens=False)[0] for letter in "ab")
    stream = TextStream(TOKENIZER, skip_special_tokens=skip)
    assert "".join(stream_all(stream, [IM_START, a, IM_END, b])) == text


def test_an_incomplete_character_appears_only_at_the_end() -> None:
    ids = TOKENIZER.encode("\u20ad", add_special_tokens=False)
    assert len(ids) > 1
    stream = TextStream(TOKENIZER)
    assert stream.push(ids[:-1]) == ""
    assert stream.finish() == "\ufffd"


def test_work_per_token_is_bounded() -> None:
    decoded: list[int] = []

    class Counting(Tokenizer):
        def decode(self, ids, *, skip_special_tokens):  # type: ignore[no-untyped-def]
            decoded.append(len(ids))
            return super().decode(ids, skip_special_tokens=skip_special_tokens)

    stream = TextStream(Counting(byte_level_backend()))
    stream.push([200] * 5000)
    assert max(decoded) <= 32
    assert sum(decoded) <= 5000 * 32


@pytest.mark.parametrize("text", ["世" * 200, "🙂" * 100 + "the", "ab世" * 50])
def test_long_runs_of_byte_tokens_come_character_by_character(text: str) -> None:
    ids = SENTENCEPIECE.encode(text, add_special_tokens=False)
    pieces = stream_all(TextStream(SENTENCEPIECE), ids)
    assert "".join(pieces) == text
    assert max(map(len, pieces)) <= 3
