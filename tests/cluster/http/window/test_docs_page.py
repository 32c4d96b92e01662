"""The page /docs in a browser, over a real server with a fake engine."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from mneme.cluster.config import HttpConfig
from tests.cluster.api_fixtures import Server
from tests.cluster.http.window.test_live_page import CHROMIUM, KEY, NEEDS_CHROMIUM, watched

playwright = pytest.importorskip("playwright.sync_api")

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("browser"), NEEDS_CHROMIUM]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as api:
        browser = api.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def server() -> Iterator[Server]:
    with watched() as server:
        yield server


class Opened:
    """The page; `said` gathers what its console says, and what it asks of other hosts."""

    def __init__(self, browser: Any, url: str, **options: Any) -> None:
        self.said: list[str] = []
        self.page = browser.new_page(**options)
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: request.url.startswith((url, "data:")) or self.said.append(request.url))
        self.page.goto(f"{url}/docs")

    def operation(self, asked: str) -> Any:
        """Open what is said of an operation; returns its form."""
        method, path = asked.split(" ")
        form = self.page.locator(f'form[data-method="{method}"][data-path="{path}"]')
        self.page.locator("details", has=form).locator("summary").click()
        return form


def answered(form: Any, status: str) -> str:
    """What a form's request was answered with, when all of it is there."""
    form.locator("output", has_text=status).filter(has_not_text="...").wait_for()
    text: str = form.locator(".answer").inner_text()
    return text


def test_an_example_is_sent_as_it_stands_and_the_curl_line_does_the_same(browser: Any, server: Server) -> None:
    opened = Opened(browser, server.url)
    form = opened.operation("POST /v1/chat/completions")
    form.locator("button", has_text="Send").click()
    assert '"object": "chat.completion"' in answered(form, "200 OK")
    line = form.locator(".curl").inner_text()
    if shutil.which("curl") is not None:
        done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=60, check=True)
        assert '"object": "chat.completion"' in done.stdout.replace('":"', '": "')
    session = opened.operation("GET /v1/sessions/{session_id}")
    assert session.locator("input").first.input_value() == "demo"
    session.locator("input").first.press("Enter")
    assert '"object": "session"' in answered(session, "200 OK")
    assert opened.said == []
    opened.page.close()


def test_a_stream_is_shown_as_it_comes_and_may_be_stopped(browser: Any, server: Server) -> None:
    opened = Opened(browser, server.url)
    form = opened.operation("POST /v1/completions")
    form.locator("textarea").fill('{"prompt": "the \'fox\'", "stream": true}')
    assert "'\\''fox'\\''" in form.locator(".curl").inner_text()
    form.locator("textarea").press("Control+Enter")
    assert answered(form, "200 OK").endswith("data: [DONE]\n\n")
    events = opened.operation("GET /v1/events")
    events.locator("button", has_text="Send").click()
    events.locator(".answer", has_text="replica.state").wait_for()
    events.locator("button", has_text="Stop").click()
    events.locator("output", has_text="stopped").wait_for()
    assert not events.locator(".stop").is_visible()
    assert opened.said == []
    opened.page.close()


def test_a_key_is_asked_for_and_used_and_the_live_page_has_it_too(browser: Any) -> None:
    with watched(HttpConfig(api_keys=(KEY,))) as server:
        opened = Opened(browser, server.url)
        form = opened.operation("GET /v1/models")
        assert "Bearer $KEY" in form.locator(".curl").inner_text()
        form.locator("button", has_text="Send").click()
        answered(form, "401 Unauthorized")
        assert opened.page.evaluate("document.activeElement.id") == "key"
        opened.page.keyboard.type(KEY)
        form.locator("button", has_text="Send").click()
        assert '"id": "tiny"' in answered(form, "200 OK")
        assert opened.page.evaluate('sessionStorage.getItem("mneme-key")') == KEY
        opened.page.close()


def test_a_link_to_a_type_opens_it(browser: Any, server: Server) -> None:
    opened = Opened(browser, server.url)
    opened.operation("POST /v1/chat/completions")
    assert not opened.page.locator("#SessionOptions").is_visible()
    opened.page.locator("a[href='#SessionOptions']:visible").first.click()
    opened.page.locator("#SessionOptions", has_text="Whether messages or prompt are only what is new").wait_for()
    assert opened.said == []
    opened.page.close()


@pytest.mark.parametrize("width", [360, 1280])
def test_it_fits_any_window(browser: Any, server: Server, width: int) -> None:
    opened = Opened(browser, server.url, viewport={"width": width, "height": 800})
    opened.page.evaluate("for (const each of document.querySelectorAll('details')) each.open = true")
    assert opened.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert opened.said == []
    opened.page.close()
