from __future__ import annotations

from array import array
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mneme.errors import ReplicaUnavailable, SessionNotFound
from mneme.replicas.documents import DocumentSpan
from mneme.replicas.request import GenerationRequest, SamplingParams
from mneme.replicas.sessions.sessions import Sessions
from mneme.replicas.sessions.token_log import ClientText, FinishedTurn, VisibleTokens
from tests.replicas.fake_runner import Clock


def begin(sessions: Sessions, request: GenerationRequest) -> list[int] | None:
    prompt = sessions.begin(request)
    return None if prompt is None else prompt.ids


def encode(text: str) -> list[int]:
    return [ord(character) for character in text]


def make(ttl_s: float = 10, max_sessions: int = 3, max_tokens: int = 10**6, **more: Any) -> tuple[Sessions, Clock]:
    clock = Clock()
    options = {"encode": encode, "ttl_s": ttl_s, "max_sessions": max_sessions, "max_tokens": max_tokens, **more}
    return Sessions(clock=clock, **options), clock


def turn(name: str, session: str | None, text: str | None = "ab", index: int = 0, **more: Any) -> GenerationRequest:
    return GenerationRequest(
        request_id=f"{name}.{index}", prompt_token_ids=tuple(encode(text or "ab")), sampling=SamplingParams(),
        session_id=session, prompt_text=text, choice_index=index, **more,
    )  # fmt: skip


def answer(sessions: Sessions, request: GenerationRequest, output_ids: list[int], text: str) -> None:
    ids = begin(sessions, request)
    assert ids is not None
    assert end(sessions, request, ids, output_ids, text) == []


def end(
    sessions: Sessions, request: GenerationRequest, ids: list[int], output_ids: list[int], text: str
) -> list[GenerationRequest]:
    return sessions.end(request, FinishedTurn(ids + output_ids, len(ids), 0, ClientText(text, len(output_ids))))


def test_stored_ids_are_used_where_the_stored_text_begins_the_new_one() -> None:
    sessions, _ = make()
    answer(sessions, turn("1", "s"), [1000, 1001], "cd")  # ids that encoding "cd" would not give
    assert begin(sessions, turn("2", "s", "abcdef")) == [97, 98, 1000, 1001, *encode("ef")]


def test_a_moved_request_keeps_the_output_it_brought() -> None:
    sessions, _ = make()
    answer(sessions, turn("1", "s"), [1000], "c")
    moved = turn("2", "s", "abcd")
    moved = GenerationRequest(
        request_id="2.0", prompt_token_ids=(*moved.prompt_token_ids, 7, 8), sampling=SamplingParams(),
        session_id="s", prompt_text="abcd", output_offset=2,
    )  # fmt: skip
    assert begin(sessions, moved) == [97, 98, 1000, ord("d"), 7, 8]


def test_tenants_have_their_own_sessions() -> None:
    sessions, _ = make()
    answer(sessions, turn("1", "s", salt="one"), [1000], "c")
    assert begin(sessions, turn("2", "s", "abc", salt="two")) == encode("abc")


def test_turns_wait_in_order_and_choices_go_together() -> None:
    sessions, _ = make()
    first = turn("1", "s")
    assert begin(sessions, first) is not None
    later = [turn("2", "s", index=0), turn("2", "s", index=1), turn("3", "s")]
    assert [begin(sessions, request) for request in later] == [None, None, None]
    assert len(sessions.queued) == 3
    assert sessions.end(first, None) == later[:2]
    assert [begin(sessions, request) is not None for request in later[:2]] == [True, True]
    assert sessions.end(later[0], None) == []
    assert sessions.end(later[1], None) == [later[2]]


def test_the_first_choice_is_the_one_that_is_kept() -> None:
    sessions, _ = make()
    choices = [turn("1", "s", index=i) for i in range(2)]
    for choice in choices:
        begin(sessions, choice)
    end(sessions, choices[1], [97, 98], [1], "Z")
    end(sessions, choices[0], [97, 98], [2], "Y")
    assert begin(sessions, turn("2", "s", "abY")) == [97, 98, 2]


def test_surplus_sessions_go_but_never_one_that_is_answering() -> None:
    sessions, _ = make(max_sessions=3)
    busy = turn("busy", "busy")
    begin(sessions, busy)
    for name in "abc":
        answer(sessions, turn(name, name), [1], "c")
    sessions.expire()
    assert len(sessions) == 3
    assert begin(sessions, turn("a2", "a", "abc")) == encode("abc")  # the oldest went
    assert begin(sessions, turn("c2", "c", "abc")) == [97, 98, 1]
    sessions.expire()
    assert end(sessions, busy, [97, 98], [1], "c") == []


def test_old_sessions_go_also_when_they_are_asked_for() -> None:
    sessions, clock = make(ttl_s=10)
    answer(sessions, turn("1", "s"), [1000], "c")
    clock.now_s = 10
    second = turn("2", "s", "abc")
    assert begin(sessions, second) == [97, 98, 1000]
    end(sessions, second, [97, 98, 1000], [], "")
    clock.now_s = 21
    assert begin(sessions, turn("3", "s", "abc")) == encode("abc")


def test_token_logs_are_bounded_together() -> None:
    sessions, _ = make(max_sessions=100, max_tokens=10)
    for name in "abcd":
        answer(sessions, turn(name, name), [1], "c")  # three tokens each
    sessions.expire()
    assert len(sessions) == 3


def test_a_session_that_cannot_be_encoded_is_not_locked() -> None:
    sessions, _ = make(encode=lambda text: [ord(letter) // (letter != "d") for letter in text])
    answer(sessions, turn("1", "s"), [1], "c")
    with pytest.raises(ZeroDivisionError):
        begin(sessions, turn("2", "s", "abcd"))
    assert begin(sessions, turn("3", "s", "abc")) == [97, 98, 1]


def conversation(sessions: Sessions, num_turns: int) -> str:
    """Turns whose answers have ids that their text alone would not give; returns the text."""
    text = ""
    for index in range(num_turns):
        text += f"<question {index}>"
        answer(sessions, turn(f"{index}", "s", text), [1000 + index], f"<answer {index}>")
        text += f"<answer {index}>"
    return text


def log_of(sessions: Sessions) -> list[int]:
    log = sessions.get(("", "s"))
    return log.ids.tolist()


def test_an_edited_message_keeps_all_before_it() -> None:
    sessions, _ = make()
    text = conversation(sessions, 3)
    stored = log_of(sessions)
    edited = text.replace("<question 2>", "<question 2, but another>")
    kept = stored[: stored.index(1001) + 1]  # to the end of the second answer, exact
    assert begin(sessions, turn("next", "s", edited + "more")) == kept + encode(
        edited.partition("<answer 1>")[2] + "more"
    )


def test_after_an_edit_the_log_is_what_was_said_last() -> None:
    sessions, _ = make()
    text = conversation(sessions, 2)
    edited = turn("edit", "s", text.replace("<answer 1>", "<other>") + "?")
    answer(sessions, edited, [2000], "!")
    assert log_of(sessions)[-1] == 2000
    assert 1001 not in log_of(sessions)
    next_turn = turn("next", "s", f"{edited.prompt_text}!?")
    assert begin(sessions, next_turn) == [*log_of(sessions), ord("?")]
    sessions.end(next_turn, None)
    old = turn("old", "s", text)  # what the first client still has: matched up to where both agree
    assert begin(sessions, old) == log_of(sessions)[: log_of(sessions).index(1000) + 1] + encode(
        text.partition("<answer 0>")[2]
    )


def test_a_word_is_not_cut_where_an_old_prompt_ended_in_it() -> None:
    """A tokenizer of whole words: where a prompt ended in the middle of one, its own tokens have no seam."""
    vocabulary = {"br": 1, "oom": 2, "broom": 3, "er": 4}
    sessions, _ = make(encode=lambda text: [vocabulary[text]])
    first = replace(turn("1", "s", "br"), prompt_token_ids=(1,))
    answer(sessions, first, [7], "own")
    broom = replace(turn("2", "s", "broom"), prompt_token_ids=(3,))
    assert begin(sessions, broom) == [3]
    sessions.end(broom, None)
    assert begin(sessions, replace(turn("3", "s", "browner"), prompt_token_ids=(5,))) == [1, 7, 4]  # an answer stands


@given(st.lists(st.text("ab", min_size=1, max_size=3), min_size=1, max_size=8), st.text("ab", max_size=12))
def test_whatever_a_client_sends_its_own_text_is_what_runs(said: list[str], sent: str) -> None:
    """Ids decode to exactly the text that was sent: nothing stale, nothing lost."""
    text_by_id: dict[int, str] = {}
    sessions, _ = make()
    text = ""
    for index, each in enumerate(said):
        text += each
        text_by_id[1000 + index] = each + "!"
        answer(sessions, turn(f"{index}", "s", text), [1000 + index], text_by_id[1000 + index])
        text += text_by_id[1000 + index]
    for asked in (sent, text, text + sent, text[: len(sent)] + sent, text[:-1] + sent):
        request = turn("next", "s", asked or "a")
        ids = begin(sessions, request)
        assert "".join(text_by_id.get(i, chr(i)) for i in ids) == (asked or "a")
        sessions.end(request, None)


def appended(name: str, text: str | None = "new", num_closing: int = 0, **more: Any) -> GenerationRequest:
    return replace(turn(name, "s", text, **more), append=True, num_closing_chars=num_closing)


def test_an_answer_is_closed_once() -> None:
    sessions, _ = make()
    answer(sessions, turn("1", "s", "ab"), encode("c;"), "c;")
    closed = appended("2", ";\nnew", num_closing=2)
    assert begin(sessions, closed) == encode("abc;\nnew")
    sessions.end(closed, None)
    answer(sessions, turn("3", "s", "ab"), encode("c"), "c")
    assert begin(sessions, appended("4", ";\nnew", num_closing=2)) == encode("abc;\nnew")


def test_an_answer_that_the_model_ended_is_not_ended_again() -> None:
    """Some templates put a space before the end of a turn; the model ends it without."""
    sessions, _ = make(end_token_ids={ord(";")})
    answer(sessions, turn("1", "s", "ab"), encode("c;"), "c;")
    assert begin(sessions, appended("2", " ;\nnew", num_closing=3)) == encode("abc;\nnew")


def decode(ids: list[int]) -> str:
    return "".join({3000: "<unseen>"}.get(i, chr(i)) for i in ids)


@pytest.mark.parametrize("num_whole", [0, 1, 5])
def test_a_client_that_appended_and_then_sends_all_of_it_is_known(num_whole: int) -> None:
    """The ids behind the last mark say what was appended, as they would have to be for the same text."""
    sessions, _ = make(decode=decode)
    answer(sessions, turn("0", "s", None), encode("c"), "c")  # ids only: no mark
    text = conversation(sessions, num_whole) if num_whole else "abc"
    for name in ("first", "second"):
        answer(sessions, appended(name), [3000], "<unseen>")
        text += "new<unseen>"
    stored = log_of(sessions)
    again = turn("again", "s", text + "more")
    answer(sessions, again, [3000], "<unseen>")
    assert log_of(sessions) == [*stored, *encode("more"), 3000]
    assert begin(sessions, turn("last", "s", text + "more<unseen>!")) == [*log_of(sessions), ord("!")]


@pytest.mark.parametrize("change", [("new", "old"), ("<unseen>", "<un"), ("answer 0", "answer 1")])
def test_what_was_appended_and_is_told_otherwise_is_not_taken(change: tuple[str, str]) -> None:
    sessions, _ = make(decode=decode)
    text = conversation(sessions, 1)
    num_marked = len(log_of(sessions))
    answer(sessions, appended("2"), [3000], "<unseen>")
    told = (text + "new<unseen>").replace(*change) + "more"
    ids = begin(sessions, turn("3", "s", told))
    assert ids is not None
    if told.startswith(text):
        assert ids == log_of(sessions)[:num_marked] + encode(told.removeprefix(text))
    else:
        assert ids == log_of(sessions)[: len("<question 0>")] + encode(told.removeprefix("<question 0>"))


def test_nothing_to_append_to_is_an_error_and_leaves_nothing() -> None:
    sessions, _ = make()
    with pytest.raises(SessionNotFound):
        begin(sessions, appended("1"))
    with pytest.raises(SessionNotFound):
        begin(sessions, replace(appended("1"), session_id=None))
    assert len(sessions) == 0


def test_an_appended_turn_that_is_sent_again_is_appended_once() -> None:
    sessions, _ = make()
    conversation(sessions, 1)
    stored = log_of(sessions)
    first = appended("2")
    ids = begin(sessions, first)
    assert ids is not None
    end(sessions, first, ids, [3000, 3001], "xy")  # its replica's stream broke; two tokens had come
    again = replace(appended("2~1"), prompt_token_ids=(*first.prompt_token_ids, 3000, 3001), output_offset=2)
    assert begin(sessions, again) == [*stored, *encode("new"), 3000, 3001]
    sessions.end(again, None)


def test_an_appended_turn_goes_on_behind_a_copy_that_has_not_seen_it_begin_if_nothing_is_missing() -> None:
    """Its node went before its log was copied: the length of its prompt says whether all turns before it are there."""
    sessions, _ = make()
    conversation(sessions, 1)
    stored = log_of(sessions)
    new = appended("9~1")
    resumed = replace(new, prompt_token_ids=(*new.prompt_token_ids, 3000, 3001), output_offset=2)
    for num_prompt in (None, len(stored) + len(encode("new")) + 1):
        with pytest.raises(ReplicaUnavailable):
            begin(sessions, replace(resumed, num_prompt=num_prompt))
    assert log_of(sessions) == stored
    whole = replace(resumed, num_prompt=len(stored) + len(encode("new")))
    assert begin(sessions, whole) == [*stored, *encode("new"), 3000, 3001]


def test_a_session_may_have_a_shorter_life_of_its_own() -> None:
    sessions, clock = make(ttl_s=100, max_sessions=100)
    answer(sessions, replace(turn("1", "s"), session_ttl_s=5.0), [1], "c")
    answer(sessions, replace(turn("2", "long"), session_ttl_s=1e9), [1], "c")
    clock.now_s = 4
    answer(sessions, turn("3", "s", "abc"), [1], "c")
    clock.now_s = 9
    assert sessions.get(("", "s")) is not None
    clock.now_s = 9.5
    assert sessions.get(("", "s")) is None
    clock.now_s = 101
    assert sessions.get(("", "long")) is None
    assert (len(sessions), sessions.num_tokens) == (0, 0)


def test_a_session_in_which_nothing_was_said_yet_can_be_forked_later() -> None:
    sessions, _ = make()
    request = turn("1", "s")
    ids = begin(sessions, request)
    with pytest.raises(ReplicaUnavailable, match="nothing was said in the session yet"):
        sessions.fork(("", "s"), ("", "f"), None)
    assert len(sessions) == 1
    end(sessions, request, ids, [1000], "c")
    sessions.fork(("", "s"), ("", "f"), None)
    assert begin(sessions, turn("2", "f", "abc?")) == [97, 98, 1000, ord("?")]


def with_documents(name: str, parts: list[str], **more: Any) -> GenerationRequest:
    """A turn of these parts, of which every second is a document; ids of documents are their characters' and 500."""
    ids: list[int] = []
    spans, num_chars = [], 0
    for index, part in enumerate(parts):
        start = len(ids)
        ids += [500 * (index % 2) + ord(character) for character in part]
        if index % 2:
            spans.append(DocumentSpan(start, len(ids), part, num_chars, num_chars + len(part)))
        num_chars += len(part)
    request = turn(name, "s", "".join(parts), **more)
    return replace(request, prompt_token_ids=tuple(ids), documents=tuple(spans))


def test_a_turn_finds_its_history_with_documents_and_keeps_the_tokens_of_new_ones() -> None:
    sessions, _ = make()
    first = with_documents("1", ["ab", "DOC", "c"])
    prompt = sessions.begin(first)
    assert prompt.documents == first.documents
    end(sessions, first, prompt.ids, [1000], "xyz")
    second = with_documents("2", ["ab", "DOC", "cxyzq", "NEW", "r"])
    prompt = sessions.begin(second)
    new = encode("q") + [500 + token_id for token_id in encode("NEW")]
    assert prompt.ids == [*first.prompt_token_ids, 1000, *new, *encode("r")]
    (span,) = prompt.documents
    assert (span.start, span.end, span.name) == (8, 11, "NEW")


def test_a_document_that_a_mark_lies_in_is_not_cut() -> None:
    sessions, _ = make()
    answer(sessions, turn("1", "s", "ab"), [1000], "cd")
    request = with_documents("2", ["a", "bcdef", "g"])
    prompt = sessions.begin(request)
    assert (tuple(prompt.ids), prompt.documents) == (request.prompt_token_ids, request.documents)


def test_appended_documents_keep_their_tokens() -> None:
    sessions, _ = make(end_token_ids=[1000])
    answer(sessions, turn("1", "s", "ab"), [7, 1000], "c")
    request = replace(with_documents("2", [";\nq", "NEW", "r"]), append=True, num_closing_chars=2)
    prompt = sessions.begin(request)
    assert prompt.ids == [97, 98, 7, 1000, *encode(";\nq"), *(500 + i for i in encode("NEW")), ord("r")]
    assert [(span.start, span.end) for span in prompt.documents] == [(7, 10)]


def test_documents_of_a_turn_behind_a_truncation_stand_in_what_it_sees() -> None:
    sessions, _ = make()
    first = turn("1", "s", "abcdef")
    ids = begin(sessions, first)
    assert ids is not None
    seen = VisibleTokens(array("i", [101, 102, 1000]), None)
    sessions.end(first, FinishedTurn([*ids, 1000], len(ids), 0, ClientText("x", 1), seen))
    prompt = sessions.begin(with_documents("2", ["abcdefxq", "NEW", "r"]))
    assert prompt.context == [101, 102, 1000, ord("q"), *(500 + i for i in encode("NEW")), ord("r")]
    assert [(span.start, span.end) for span in prompt.documents] == [(4, 7)]
