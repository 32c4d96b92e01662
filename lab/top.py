"""`mneme top`: what a running server does, in a terminal. The same figures as the page at /ui.

It looks again when the stream of events says that something happened, and else at intervals.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import httpx
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from mneme.lab.chat import ChatFailed, add_server_arguments, auth_headers, base_url, first_model

_SOURCES = ("device", "host", "disk", "peer", "recomputed", "dropped")
_LEAST_S = 0.5  # between two looks, and two tries to listen
_COLOURS = ("blue", "yellow", "magenta", "cyan", "red", "bright_black")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_server_arguments(parser)
    parser.set_defaults(run=run_top)
    parser.add_argument("--every", type=float, default=2.0, metavar="S", help="seconds between two looks (default 2)")
    parser.add_argument("--once", action="store_true", help="look once, and end")
    parser.add_argument("--json", action="store_true", help="a line of JSON for each look, and no table")


def run_top(args: argparse.Namespace, clock: Callable[[], float] = time.monotonic) -> int:
    """Returns the exit status; Ctrl-C ends it."""
    try:
        if not 0.1 <= args.every <= 3600:
            raise ChatFailed(f"--every: must be from 0.1 to 3600 (got {args.every:g})")
        with httpx.Client(base_url=base_url(args.url), headers=auth_headers(args), timeout=10) as http:
            first_model(http)  # says what is wrong where nobody answers
            _watch(http, args, clock)
    except httpx.InvalidURL as error:
        sys.stderr.write(f"mneme top: --url {args.url}: {error}\n")
        return 1
    except ChatFailed as error:
        sys.stderr.write(f"mneme top: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 0
    return 0


def _watch(http: httpx.Client, args: argparse.Namespace, clock: Callable[[], float]) -> None:
    console, before = Console(), None
    is_live = not (args.json or args.once)
    events = _Events(http)
    if is_live:
        threading.Thread(target=events.listen, daemon=True).start()
    with Live(console=console, auto_refresh=False, screen=False) if is_live else _Printed(console) as shown:
        while True:
            events.has_come.clear()
            try:
                look = _look(http, clock(), with_sessions=args.json)
            except ChatFailed as error:
                if not is_live or before is None:
                    raise
                shown.update(Text(f"{error}; asking again"), refresh=True)
                time.sleep(args.every)
                continue
            if args.json:
                print(json.dumps(look), flush=True)
            else:
                shown.update(Group(_drawn(look, before), *map(Text, tuple(events.lines))), refresh=True)
            if args.once:
                return
            before = look
            time.sleep(min(args.every, _LEAST_S))
            events.has_come.wait(max(args.every - _LEAST_S, 0.0))


class _Events:
    """The last of a server's events but for requests, which have a table of their own."""

    def __init__(self, http: httpx.Client) -> None:
        self._http = http
        self.lines = deque[str](maxlen=8)
        self.has_come = threading.Event()

    def listen(self) -> None:
        """Read until the client is closed: a stream ends after five minutes, and with its server."""
        while not self._http.is_closed:
            try:
                with self._http.stream("GET", "/v1/events", timeout=httpx.Timeout(10, read=None)) as response:
                    for line in response.iter_lines() if response.is_success else ():
                        if line.startswith("data: "):
                            self._take(json.loads(line.removeprefix("data: ")))
            except (httpx.HTTPError, httpx.StreamError, ValueError, KeyError):
                pass  # the next look says what is wrong
            except RuntimeError:
                return  # closed by now
            time.sleep(_LEAST_S)

    def _take(self, event: dict[str, Any]) -> None:
        if event["type"] != "request.ended":
            about = ", ".join(f"{name} {value}" for name, value in event["data"].items() if value not in (None, "", 0))
            self.lines.append(f"{time.strftime('%H:%M:%S', time.localtime(event['at']))}  {event['type']}  {about}")
        self.has_come.set()


class _Printed:
    """Stands for a live display: prints once what it is given."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def __enter__(self) -> _Printed:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def update(self, drawn: RenderableType, *, refresh: bool) -> None:
        self._console.print(drawn)


def _look(http: httpx.Client, at_s: float, *, with_sessions: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"at_s": at_s}
    for name, path in (
        *(("cluster", "/v1/cluster"), ("tiers", "/v1/kv/tiers"), ("requests", "/v1/requests?last=10")),
        *((("sessions", "/v1/sessions?limit=5"),) if with_sessions else ()),
    ):
        try:
            response = http.get(path)
            found[name] = response.raise_for_status().json()
        except (httpx.HTTPError, ValueError) as error:
            raise ChatFailed(f"{http.base_url}{path.lstrip('/')}: {error}") from error
    return found


def _drawn(look: dict[str, Any], before: dict[str, Any] | None) -> RenderableType:
    replicas = look["cluster"]["replicas"]
    states = ", ".join(f"{each['model']} {each['state']} ({each['ready']} ready)" for each in look["cluster"]["models"])
    prompt, cached = (sum(each[name] for each in replicas) for name in ("prompt_tokens", "cached_tokens"))
    head = Text(f"{states}   {_rate(look, before)}   found {cached:,} of {prompt:,} prompt tokens")
    return Group(head, _sources(look["tiers"]["prompt_tokens"]), _replicas(replicas), _tiers(look), _requests(look))


def _rate(look: dict[str, Any], before: dict[str, Any] | None) -> str:
    def generated(one: dict[str, Any]) -> int:
        return sum(each["generated_tokens"] for each in one["cluster"]["replicas"])

    if before is None or look["at_s"] <= before["at_s"]:
        return f"{generated(look):,} tokens generated"
    return f"{max(generated(look) - generated(before), 0) / (look['at_s'] - before['at_s']):,.0f} tokens/s"


def _sources(tokens: dict[str, int]) -> Text:
    """Where the KV of all prompts came from, as a bar."""
    whole, bar = sum(tokens.get(name, 0) for name in _SOURCES), Text()
    for name, colour in zip(_SOURCES, _COLOURS, strict=True):
        if count := tokens.get(name, 0):
            bar.append("█" * max(1, round(40 * count / whole)), colour)
    for name, colour in zip(_SOURCES, _COLOURS, strict=True):
        if count := tokens.get(name, 0):
            bar.append(f"  {name} {count:,}", colour)
    return bar


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name in columns:
        table.add_column(name.lstrip(">"), justify="right" if name.startswith(">") else "left", no_wrap=True)
    return table


def _replicas(replicas: list[dict[str, Any]]) -> Table:
    table = _table("replicas", "replica", "device", ">running", ">waiting", ">backlog", ">KV in use", ">found")
    for each in replicas:
        backlog = "" if each["backlog_s"] is None else f"{each['backlog_s'] * 1e3:,.0f} ms"
        found = f"{each['cached_tokens'] / max(each['prompt_tokens'], 1):.0%}"
        busy = (f"{each['running']}", f"{each['waiting']}", backlog, f"{each['kv_usage']:.0%}")
        table.add_row(each["replica"], each["device"] or "", *busy, found)
    return table


def _tiers(look: dict[str, Any]) -> Table:
    table = _table("tiers", "where", "tier", ">in use", ">cached", ">total")
    for each in look["tiers"]["tiers"]:
        scale, unit = (2**20, " MiB") if each["unit"] == "bytes" else (1, "")
        sizes = (each[name] for name in ("in_use", "cached", "total"))
        shown = ("no bound" if size is None else f"{size / scale:,.0f}{unit}" for size in sizes)
        table.add_row(each.get("replica") or each["node"], each["tier"], *shown)
    return table


def _requests(look: dict[str, Any]) -> Table:
    table = _table(
        "last requests", "id", "outcome", ">prompt", ">found", ">output", ">first token", ">total", "replica"
    )
    for each in look["requests"]["data"]:
        kv = each["kv_details"]
        found = 1 - (kv["recomputed"] + kv["dropped"]) / max(each["prompt_tokens"], 1)
        first = "" if each["first_token_ms"] is None else f"{each['first_token_ms']:,.0f} ms"
        sizes = (f"{each['prompt_tokens']:,}", f"{found:.0%}", f"{each['completion_tokens']:,}")
        table.add_row(
            each["id"][:12], each["outcome"], *sizes, first, f"{each['total_ms']:,.0f} ms", each["replica"] or ""
        )
    return table
