"""streams.py reads an answer to its end, and says what is wrong with one that has none."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import httpx
import pytest
from streams import BadStream, stream

DONE = "data: [DONE]\n\n"


def client(status: int, text: str) -> httpx.Client:
    return httpx.Client(
        base_url="http://server", transport=httpx.MockTransport(lambda _: httpx.Response(status, text=text))
    )


def event(**values: object) -> str:
    return f"data: {json.dumps({'id': 'c-1', 'choices': [], **values})}\n\n"


def piece(text: str | None, reason: str | None = None) -> str:
    return event(choices=[{"delta": {"role": "assistant", "content": text}, "finish_reason": reason}])


def test_a_chat_has_its_text_its_id_its_usage_and_a_first_token_behind_the_opening() -> None:
    answer = (
        piece("") + ": a comment\n\n" + piece("Hel") + piece("lo", "length") + event(usage={"prompt_tokens": 3}) + DONE
    )
    seen: list[int] = []
    heard = stream(client(200, answer), "/v1/chat/completions", {}, seen.append)
    assert (heard.text, heard.completion, heard.usage) == ("Hello", "c-1", {"prompt_tokens": 3})
    assert seen == [0, 1, 2]


def test_a_first_token_is_behind_the_opening() -> None:
    def events() -> Iterator[bytes]:
        yield piece("").encode()
        time.sleep(0.05)
        yield piece("Hello", "length").encode()
        yield DONE.encode()

    transport = httpx.MockTransport(lambda _: httpx.Response(200, content=events()))
    heard = stream(httpx.Client(base_url="http://server", transport=transport), "/v1/chat/completions", {})
    assert heard.first_s >= 0.05
    assert heard.pause_s >= 0.05


def test_a_completion_has_texts_in_the_place_of_messages() -> None:
    answer = event(choices=[{"text": "a", "finish_reason": None}]) + event(
        choices=[{"text": "", "finish_reason": "stop"}]
    )
    assert stream(client(200, answer + DONE), "/v1/completions", {}).text == "a"


@pytest.mark.parametrize(
    ("status", "answer", "problem"),
    [
        (503, '{"error": "no replica"}', "HTTP 503: .*no replica"),
        (200, piece("Hel") + event(error={"message": "the engine failed"}) + DONE, "the engine failed"),
        (200, piece("Hel"), "ended early"),
        (200, "", "ended early"),
    ],
)
def test_an_answer_that_is_not_whole_is_named(status: int, answer: str, problem: str) -> None:
    with pytest.raises(BadStream, match=problem):
        stream(client(status, answer), "/v1/chat/completions", {})
