from __future__ import annotations

import argparse
import io
import json
from collections.abc import Iterator
from dataclasses import replace

import pytest

from mneme.lab import chat as terminal_chat
from mneme.lab.chat import add_arguments, run_chat
from tests.cluster.api_fixtures import Server, serving
from tests.cluster.fake_engine_client import SENTENCE


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as running:
        yield running


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(arguments)


def type_lines(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    typed = iter(lines)

    def read(prompt: str) -> str:
        line = next(typed, None)
        if line is None:
            raise EOFError
        return line

    monkeypatch.setattr("sys.stdin", Terminal())
    monkeypatch.setattr(terminal_chat, "input", read, raising=False)


def test_a_pipe_is_one_message(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("the\nfox\n"))
    assert run_chat(parsed("--url", server.url, "--json", "--system", "Be brief.")) == 0
    *shown, last = capsys.readouterr().out.splitlines()
    assert shown[0] == SENTENCE
    assert "tokens/s" in shown[1]
    (figures,) = json.loads(last)["answers"]
    assert set(figures) == {"ttft_s", "tokens_per_s", "prompt_tokens", "cached_tokens", "completion_tokens", "places"}
    (request,) = server.engine.requests
    assert "system\nBe brief." in (request.prompt_text or "")
    assert "user\nthe\nfox<" in (request.prompt_text or "")


def test_figures_say_where_a_prompt_was_found() -> None:
    figures = terminal_chat.AnswerFigures(
        ttft_s=0.0412, tokens_per_s=20.0, prompt_tokens=3646, cached_tokens=3645, completion_tokens=32
    )
    assert str(figures) == "[TTFT 41 ms, 20.0 tokens/s, 3,645 of 3,646 prompt tokens cached]"  # of another server
    figures = replace(figures, places={"device": 0, "host": 1200, "disk": 2445, "peer": 0})
    assert str(figures).endswith("prompt tokens cached: 1,200 in host memory, 2,445 on disk]")


def test_turns_share_a_session_until_reset(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    type_lines(monkeypatch, "a", "b", "/reset", "", "c", "/what", "/exit", "never")
    assert run_chat(parsed("--url", server.url)) == 0
    first, second, third = server.engine.requests
    assert first.session_id == second.session_id != third.session_id
    assert f"assistant\n{SENTENCE}<|im_end|>\n<|im_start|>user\nb" in (second.prompt_text or "")
    assert "user\nb" not in (third.prompt_text or "")
    shown = capsys.readouterr().out
    assert shown.count("prompt tokens cached") == 3
    assert shown.count("[a new conversation]") == 1
    assert shown.count("unknown command /what: /reset begins anew") == 1


def test_a_refused_answer_does_not_end_the_conversation(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    type_lines(monkeypatch, "x" * 3_000_000, "\udcff", "b")
    assert run_chat(parsed("--url", server.url)) == 0
    shown = capsys.readouterr().out
    assert "[messages: a prompt that is truncated" in shown
    assert "[the line is not valid UTF-8]" in shown
    (request,) = server.engine.requests
    assert (request.prompt_text or "").startswith("<|im_start|>user\nb<|im_end|>")


def test_a_failure_in_mid_answer_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello"))
    with serving(fail_after=3) as server:
        assert run_chat(parsed("--url", server.url)) == 1
    assert "failed on purpose" in capsys.readouterr().err
