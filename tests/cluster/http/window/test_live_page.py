"""The live page in a browser, over a real server with a fake engine."""

from __future__ import annotations

import gc
import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from mneme.cluster.config import HttpConfig
from mneme.router.chooser import RouteMs, RouteTokens
from tests.cluster.api_fixtures import CHAT, Server, serving

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
KEY = "secret-a"
ARGS = ["--no-sandbox", "--host-resolver-rules=MAP mneme.test 127.0.0.1"]

NEEDS_CHROMIUM = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on PATH")
pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("browser"), NEEDS_CHROMIUM]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as api:
        browser = api.chromium.launch(executable_path=CHROMIUM, args=ARGS)
        yield browser
        browser.close()


@contextmanager
def watched(config: HttpConfig | None = None) -> Iterator[Server]:
    """A server for a browser, which keeps connections open: those that the server's end leaves are no test's fault."""
    with serving(config=config) as server:
        yield server
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture
def server() -> Iterator[Server]:
    with watched() as server:
        yield server


def opened(browser: Any, url: str, said: list[str], **options: Any) -> Any:
    """A page; `said` gathers what its console says, and what it asks of other hosts."""
    page = browser.new_page(**options)
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: None if request.url.startswith((url, "data:")) else said.append(request.url))
    page.goto(f"{url}/ui")
    return page


def test_requests_appear_as_they_end_and_are_explained(browser: Any, server: Server) -> None:
    said: list[str] = []
    page = opened(browser, server.url, said)
    page.wait_for_selector("text=tiny: ready, 2 ready")
    assert page.locator("#requests tbody tr").count() == 0
    ended = httpx.post(f"{server.url}/v1/chat/completions", json=CHAT).headers["x-request-id"]
    row = page.locator("#requests tbody tr")
    row.wait_for()
    assert row.locator("td").all_inner_texts()[:5] == [ended[:12], *row.locator("td").all_inner_texts()[1:5]]
    row.locator("button").click()
    page.wait_for_selector(f"#explained >> text=Request {ended}")
    assert page.locator("#explained .bar").count() > 0
    page.wait_for_selector(f"#events >> text=request {ended[:12]}: stop")
    assert page.locator("#tiers > div").first.text_content() == "a, device: 0 tokens of 16,000 tokens"
    assert page.locator("#replicas tbody tr").count() == 2
    assert said == []
    page.close()


def test_an_explained_request_has_its_tokens_over_time_and_what_the_router_expected(
    browser: Any, server: Server
) -> None:
    tokens = dict.fromkeys(RouteTokens.__annotations__, 0)
    ms = dict.fromkeys(RouteMs.__annotations__, 1.0)
    candidates = [
        {"replica": name, "tokens": tokens, "ms": {**ms, "ttft": ttft}} for name, ttft in (("b", 7), ("a", 9))
    ]
    route = {"request_id": "r", "reason": "score", "replica": "b", "candidates": candidates}

    def change() -> None:
        server.engine.routes = lambda salt, http_id: [route]  # type: ignore[method-assign, list-item]

    server.call(change)
    said: list[str] = []
    page = opened(browser, server.url, said)
    page.wait_for_selector("text=tiny: ready")
    made = httpx.post(f"{server.url}/v1/chat/completions", json=CHAT)
    (entry,) = server.call(lambda: server.engine.explanations.of("", made.headers["x-request-id"]))
    entry["suspended_at"].append(2)
    entry["resumed_at"] = 1
    page.locator("#requests tbody tr button").click()
    page.wait_for_selector("#explained .ticks")
    number = made.json()["usage"]["completion_tokens"]
    words = page.inner_text("#explained")
    assert f"The first answer over time: {number} tokens in " in words
    assert "went on at replica b after token 1; gave way to earlier requests after token 2." in words
    assert page.locator("#explained .marks span").count() == 2
    pieces = page.locator("#explained .ticks i").evaluate_all("all => all.map((each) => each.title)")
    assert sum(bool(re.match(r"tokens \d+ to \d+: ", each)) for each in pieces) > 1  # many came together
    assert "first token predicted after 7.0 ms\n" in words
    assert "first token came after " in words
    for name, ttft in (("b", 7), ("a", 9)):
        assert f"{name}: first token predicted after {ttft}.0 ms, price " in words
        assert page.locator("#explained div", has_text=f"{name}: first token predicted").locator("+ .bar").count() == 1
    assert said == []
    page.close()


def test_tiers_are_a_flow_whose_arrows_are_what_moved(browser: Any, server: Server) -> None:
    said: list[str] = []
    page = opened(browser, server.url, said)
    flow = page.locator("#flow svg")
    flow.wait_for()
    at_rest = "device: 0 kB of 8 kB (0%); host memory: none; disk: none; other nodes: none"
    assert at_rest in flow.get_attribute("aria-label")
    server.call(lambda: server.engine.tokens.update(host=4_000_000, disk=2_000_000))
    page.wait_for_function(
        "() => /to device (?!0 kB)/.test(document.querySelector('#flow svg').getAttribute('aria-label'))"
    )
    wide = flow.locator("line").evaluate_all("all => all.map((each) => Number(each.getAttribute('stroke-width')))")
    # Of what was loaded a third is from the disk: to the host, to the device, to the disk, from it, from other nodes.
    assert [round(each, 2) for each in wide] == [1, 12, 1, 5.33, 1]
    assert page.locator("#figures", has_text="prefill saved").count() == 1
    assert said == []
    page.close()


def test_ten_thousand_runs_are_drawn_each_by_itself_or_with_its_neighbours(browser: Any, server: Server) -> None:
    number, base = 10_000, dict.fromkeys(("start", "host", "running", "sessions", "below"), 0)
    base |= {"tokens": 16, "device": 16, "uses": 1, "idle_s": 1}
    runs: list[dict[str, Any]] = [{**base, "parent": (index - 1) // 4, "kind": "prompt"} for index in range(number)]
    for run in reversed(runs):
        run["below"] += run["tokens"]
        if run["parent"] >= 0:
            runs[run["parent"]]["below"] += run["below"]
    chain = [{**runs[0], "parent": index - 1, "below": 16 * (30 - index)} for index in range(30)]
    asked: list[str] = []

    def answer(route: Any) -> None:
        asked.append(route.request.url)
        trees = [
            {"replica": name, "texts": [], "runs": each, "num_runs": len(each), "num_tokens": 16 * len(each)}
            for name, each in (("a", runs), ("b", chain))
        ]
        route.fulfill(json={"object": "kv.tree", "replicas": trees})

    said: list[str] = []
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.route("**/v1/kv/tree*", answer)
    page.goto(f"{server.url}/ui")

    def drawn() -> list[int]:
        page.wait_for_function("() => document.querySelector('#tree-size').textContent.includes('drawn')")
        said_of = re.findall(r"([\d,]+) (?:drawn one|too narrow|below the last)", page.inner_text("#tree-size"))
        return [int(each.replace(",", "")) for each in said_of]

    alone, together = drawn()
    colours = "(all) => new Set(new Uint32Array(all.data.buffer)).size"
    pixels = "document.querySelector('#tree').getContext('2d').getImageData(0, 0, 1000, 200)"
    assert page.evaluate(f"({colours})({pixels})") > 2
    assert alone + together == number
    assert alone > 341  # five whole levels
    assert "max_runs=10000" in asked[0]
    page.click("#tree", position={"x": 5, "y": 30})  # the first child: a quarter of all that follows
    assert sum(drawn()) == max(run["below"] for run in runs if run["parent"] == 0) // 16
    page.select_option("#tree-replica", "b")
    page.wait_for_function("() => document.querySelector('#tree-size').textContent.includes('30 runs')")
    assert drawn() == [24, 6]
    assert page.evaluate("performance.getEntriesByName('forest').length") == 1
    assert said == []
    page.close()


def test_a_chat_is_a_session_whose_answers_say_what_was_found(browser: Any, server: Server) -> None:
    said: list[str] = []
    page = opened(browser, server.url, said)
    page.wait_for_selector("text=tiny: ready")
    for number, text in enumerate(("the fox", "<b>and</b> then")):
        page.fill("#chat-text", text)
        page.keyboard.press("Enter")
        page.locator("#chat small button").nth(number).wait_for()
    assert "you: <b>and</b> then" in page.inner_text("#chat")
    assert page.locator("#chat .bar").count() == 2  # where the prompt of each answer was found
    assert page.locator("#chat b", has_text="and").count() == 0  # text, not markup
    assert [request.append for request in server.engine.requests] == [False, True]
    assert len({request.session_id for request in server.engine.requests}) == 1
    page.locator("#chat small button").last.click()
    page.wait_for_selector("#explained h2")
    page.click("#chat-new")
    assert page.inner_text("#chat") == ""
    assert said == []
    page.close()


def test_forks_and_responses_stand_below_what_they_go_on_from(browser: Any, server: Server) -> None:
    with httpx.Client(base_url=f"{server.url}/v1", timeout=30) as client:

        def respond(before: str | None) -> str:
            body = {"model": "tiny", "input": "the fox", "previous_response_id": before}
            made: str = client.post("/responses", json=body).raise_for_status().json()["id"]
            return made

        first = respond(None)
        second = respond(first)
        branches = [respond(second), respond(second)]
        client.post("/chat/completions", json={**CHAT, "session": {"id": "chat"}}).raise_for_status()
        for name, origin in (("fork", "chat"), ("chat-2", "fork")):
            client.post(f"/sessions/{origin}/fork", json={"session_id": name}).raise_for_status()
        client.delete("/sessions/chat").raise_for_status()
        client.post("/sessions/chat-2/fork", json={"session_id": "chat"}).raise_for_status()  # an ancestor of itself
    said: list[str] = []
    page = opened(browser, server.url, said)
    page.wait_for_selector("text=tiny: ready")
    names = page.locator("#sessions tbody td:first-child span")
    page.wait_for_function("() => document.querySelectorAll('#sessions tbody tr').length === 7")
    shown = [name.strip() for name in names.all_inner_texts()]
    at = shown.index(first)
    assert shown[at : at + 4] == [first, f"\u2193 {second}", *(f"\u21b3 {each}" for each in reversed(branches))]
    assert sorted(name.split(" ")[-1] for name in shown[:at]) == ["chat", "chat-2", "fork"]
    indents = [name.evaluate("each => parseFloat(each.style.paddingLeft)") for name in names.all()[at : at + 4]]
    assert indents == [0, 0, 1.2, 1.2]
    assert page.locator("#sessions .bar").count() == 7
    httpx.delete(f"{server.url}/v1/responses/{first}").raise_for_status()
    page.wait_for_selector(f"#sessions >> text=\u2026 {second}")
    assert said == []
    page.close()


def test_a_chat_goes_on_in_a_fork(browser: Any, server: Server) -> None:
    said: list[str] = []
    page = opened(browser, server.url, said)
    page.wait_for_selector("text=tiny: ready")
    assert page.is_disabled("#chat-fork")
    page.fill("#chat-text", "the fox")
    page.keyboard.press("Enter")
    page.locator("#chat small button").wait_for()
    page.click("#chat-fork")
    page.wait_for_selector("text=another session with the same past")
    page.fill("#chat-text", "the dog")
    page.keyboard.press("Enter")
    page.locator("#chat small button").nth(1).wait_for()
    assert [request.append for request in server.engine.requests] == [False, True]
    first, second = (request.session_id for request in server.engine.requests)
    forked = httpx.get(f"{server.url}/v1/sessions/{str(second).partition(':')[2]}").json()["forked_from"]
    assert (first != second, forked) == (True, str(first).partition(":")[2])
    assert said == []
    page.close()


def test_documents_are_asked_about_twice_side_by_side(browser: Any, server: Server) -> None:
    said: list[str] = []
    page = opened(browser, server.url, said)
    page.wait_for_selector("text=tiny: ready")
    page.locator("#chat-form summary").click()
    page.fill("#chat-documents", "the fox\n---\nthe dog\nand more\n-----\n")
    page.check("#chat-beside")
    page.fill("#chat-text", "who?")
    page.click("#chat-form button:text('Send')")
    page.locator("#chat .columns small button").nth(1).wait_for()
    assert [request.blend.mode for request in server.engine.requests] == ["selective", "off"]
    assert [len(request.documents) for request in server.engine.requests] == [2, 2]
    assert [request.session_id for request in server.engine.requests] == [None, None]
    assert said == []
    page.close()


def test_a_key_is_asked_for_and_used(browser: Any) -> None:
    with watched(HttpConfig(api_keys=(KEY,))) as server:
        page = opened(browser, server.url, [])
        page.wait_for_selector("#key-form:visible")
        page.fill("#key", KEY)
        page.click("#key-form button")
        page.wait_for_selector("text=tiny: ready")
        assert not page.is_visible("#key-form")
        page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_it_fits_any_window(browser: Any, server: Server, scheme: str, width: int) -> None:
    said: list[str] = []
    page = opened(browser, server.url, said, color_scheme=scheme, viewport={"width": width, "height": 800})
    page.wait_for_selector("text=tiny: ready")
    httpx.post(f"{server.url}/v1/chat/completions", json=CHAT)
    page.wait_for_selector("#requests tbody tr")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert said == []
    page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_axe_finds_nothing(browser: Any, server: Server, scheme: str, width: int) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")

    def violations() -> list[str]:
        found = axe.Axe().run(page).response["violations"]
        return [f"{each['id']}: {node['html']}" for each in found for node in each["nodes"]]

    page = opened(browser, server.url, [], color_scheme=scheme, viewport={"width": width, "height": 800})
    page.wait_for_selector("#flow svg")
    assert violations() == []
    page.locator("details").evaluate_all("all => all.forEach((each) => { each.open = true; })")
    page.fill("#chat-documents", "the fox\n---\nthe dog")
    page.check("#chat-beside")
    page.fill("#chat-text", "who?")
    page.click("#chat-form button:text('Send')")
    page.locator("#chat .columns small button").nth(1).click()
    page.wait_for_selector("#explained .ticks")
    page.wait_for_selector("#events li")
    assert violations() == []
    for path in ("/", "/docs"):
        page.goto(server.url + path)
        page.locator("details").evaluate_all("all => all.slice(0, 3).forEach((each) => { each.open = true; })")
        assert violations() == []
    page.close()
    with watched(HttpConfig(api_keys=(KEY,))) as locked:
        page = opened(browser, locked.url, [], color_scheme=scheme, viewport={"width": width, "height": 800})
        page.wait_for_selector("#key-form:visible")
        assert violations() == []
        page.goto(f"{locked.url}/docs")
        page.wait_for_selector("#key-form:visible")
        assert violations() == []
        page.close()


def test_it_needs_no_tls_to_be_opened_from_another_machine(browser: Any, server: Server) -> None:
    """Browsers take only TLS and this machine's own names for secure, and keep some of their calls from others."""
    said: list[str] = []
    page = browser.new_page()
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(f"http://mneme.test:{server.port}/ui")
    assert not page.evaluate("isSecureContext")
    page.wait_for_selector("text=tiny: ready", timeout=5_000)
    assert said == []
    page.close()
