from __future__ import annotations

import argparse
import io
import itertools
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx
import pytest

from mneme.lab import chat as terminal_chat
from mneme.lab.chat import Conversation, add_arguments, run_chat
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
    assert set(figures) == {"ttft_s", "tokens_per_s", "prompt_tokens", "cached_tokens", "completion_tokens"}
    (request,) = server.engine.requests
    assert "system\nBe brief." in (request.prompt_text or "")
    assert "user\nthe\nfox<" in (request.prompt_text or "")


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
    assert shown.count("prompt tokens cached]") == 3
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


def test_ctrl_c_stops_only_the_answer(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    type_lines(monkeypatch, "a")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Conversation, "ask", interrupt)
    assert run_chat(parsed("--url", server.url)) == 0
    assert "[stopped" in capsys.readouterr().out


def test_one_ctrl_c_clears_the_line_and_two_leave(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    typed = iter([KeyboardInterrupt, "a", KeyboardInterrupt, KeyboardInterrupt, "never"])

    def read(prompt: str) -> str:
        line = next(typed)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("sys.stdin", Terminal())
    monkeypatch.setattr(terminal_chat, "input", read, raising=False)
    assert run_chat(parsed("--url", server.url)) == 0
    assert len(server.engine.requests) == 1
    assert next(typed) == "never"


@pytest.mark.parametrize("form", ["{url}/v1", "{url}/v1/", "{url}/", "{host}", "{host}/v1"])
def test_a_url_may_be_what_other_clients_are_given(
    form: str, server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello"))
    assert run_chat(parsed("--url", form.format(url=server.url, host=server.url.removeprefix("http://")))) == 0
    assert SENTENCE in capsys.readouterr().out


def test_an_address_of_something_else_is_named(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello"))
    assert run_chat(parsed("--url", f"{server.url}/elsewhere")) == 1
    shown = capsys.readouterr().err
    assert f"{server.url}/elsewhere/v1/models: " in shown
    assert shown.count("\n") == 1


@pytest.mark.parametrize(
    ("status", "page", "told"),
    [
        (200, "<html>\n<p>Welcome", "the answer is no list of models"),
        (200, '{"data": []}', "the answer is no list of models"),
        (404, "<html>\n<p>Not found", "status 404: <html> <p>Not found"),
    ],
)
def test_a_web_server_that_is_no_api_is_one_line(
    status: int, page: str, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Web(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(page.encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    monkeypatch.setattr("sys.stdin", io.StringIO("hello"))
    with HTTPServer(("127.0.0.1", 0), Web) as web:
        answering = threading.Thread(target=web.handle_request)
        answering.start()
        assert run_chat(parsed("--url", f"http://127.0.0.1:{web.server_port}")) == 1
        answering.join()
    shown = capsys.readouterr().err
    assert told in shown
    assert shown.count("\n") == 1


@pytest.mark.parametrize("gap_s", [0.0, 0.001, 0.1])
def test_a_rate_is_told_only_of_tokens_that_came_over_some_time(server: Server, gap_s: float) -> None:
    ticks = itertools.count()
    pieces: list[str] = []
    with httpx.Client(base_url=server.url) as http:
        conversation = Conversation(http, "tiny", clock=lambda: next(ticks) * gap_s)
        figures = conversation.ask("hello", pieces.append)
    assert min(figures.completion_tokens, len(pieces)) >= 8
    if gap_s < 0.1:
        assert figures.tokens_per_s is None
        assert ", - tokens/s," in str(figures)
    else:
        assert figures.tokens_per_s == pytest.approx((figures.completion_tokens - 1) / (len(pieces) - 1) / gap_s)


@pytest.mark.parametrize("arguments", [("--url", "http://127.0.0.1:1"), ("--url", "not a url")])
def test_no_server_is_one_line_and_status_1(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello"))
    assert run_chat(parsed(*arguments)) == 1
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    assert arguments[1].replace(" ", "%20") in shown


def test_a_failure_in_mid_answer_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello"))
    with serving(fail_after=3) as server:
        assert run_chat(parsed("--url", server.url)) == 1
    assert "failed on purpose" in capsys.readouterr().err


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_a_pipe_that_is_no_text_is_one_line_and_status_1(
    errors: str, server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    piped = io.TextIOWrapper(io.BytesIO(b"the \xff fox"), encoding="utf-8", errors=errors)
    monkeypatch.setattr("sys.stdin", piped)
    assert run_chat(parsed("--url", server.url)) == 1
    assert capsys.readouterr().err == "mneme chat: standard input is not valid UTF-8\n"
    assert server.engine.requests == []


@pytest.mark.parametrize("key", ["key-1\nkey-2", "key-1\r\nX-Evil: 1", "schlüssel", " key-1", "key-1\n"])
def test_a_key_that_no_header_can_carry_is_named(
    key: str, server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello"))
    assert run_chat(parsed("--url", server.url, "--api-key", key)) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("mneme chat: --api-key: must be")
    assert shown.count("\n") == 1
    assert key.strip() not in shown


def test_a_reader_that_has_enough_ends_it_quietly(server: Server) -> None:
    command = [sys.executable, "-m", "mneme.cluster.cli.main", "chat", "--url", server.url]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as chat:
        assert chat.stdin is not None
        assert chat.stdout is not None
        assert chat.stderr is not None
        chat.stdout.close()
        chat.stdin.write(b"hello")
        chat.stdin.close()
        assert chat.stderr.read() == b""
        assert chat.wait(60) == 141
    server.wait_idle()
