"""`mneme bench serve | autoscale`: load on a running server, what its users would see, and how its replicas follow."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import shlex
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.live import Live
from rich.table import Table

from mneme.errors import ConfigError, shown
from mneme.lab.bench import autoscale
from mneme.lab.bench.client import ChatClient, connect
from mneme.lab.bench.html_report import html_report
from mneme.lab.bench.measure import PERCENTS, SLO_NAMES, Answer, parse_slo, spread_ms, summarize
from mneme.lab.bench.traffic import SessionPlayer
from mneme.lab.bench.workloads import SHAPES, Session, Shape, arrive, content, make_sessions, sessions_of_trace, think
from mneme.lab.cache.traces import BLOCK_OPTION, MAX_TOKENS, has_times, read_paced_trace
from mneme.lab.chat import ChatFailed, add_server_arguments, auth_headers, base_url, first_model
from mneme.lab.options import Option, add_options, check_options

TRACE = "trace:"
_REPLICAS = re.compile(r'^mneme_replicas\{state="(ready|wanted)"\} (\S+)', re.MULTILINE)
_RECENT = 500  # answers of which the live table has percentiles
_TERMINAL_S, _LINE_S = 0.5, 5.0  # between two looks at the progress
_SERVED = (
    Option("--workload", "NAME", f"{', '.join(SHAPES)} or trace:FILE (default: sessions)", default="sessions"),
    Option("--think-time", "S", "mean seconds before a user's next turn (default 0)", float, 0.0, (0, 1e6)),
    Option("--num-requests", "N", "in all (default 100; of a trace: every line)", int, None, (1, 1_000_000)),
    Option("--documents", None, "rag: document parts, or text for any server", str, "parts", None, ("parts", "text")),
)
_PACE = (
    Option("--rate", "R", "requests per second, arriving by Poisson", float, None, (1e-6, 1e6)),
    Option("--concurrency", "N", "users, each with one request at a time (default 8)", int, None, (1, 100_000)),
)
_SCALED = (
    Option(
        "--load", "NAME",
        f"{', '.join(autoscale.PROFILES)}, or {TRACE}FILE: the busiest part of a trace (default: step)", default="step",
    ),
    Option("--rate", "R", "requests per second at rest (default 1)", float, 1.0, (1e-6, 1e6)),
    Option("--peak", "R", "requests per second at most (default 8)", float, 8.0, (1e-6, 1e6)),
    Option("--seconds", "S", "of arrivals (default 180)", float, 180.0, (1, 1e6)),
    Option("--think-time", "S", "mean seconds before a user's next turn (default 2)", float, 2.0, (0, 1e6)),
    Option("--window", "S", "before and after a change of replicas (default 15)", float, 15.0, (0.1, 1e6)),
)  # fmt: skip
_RUN = (
    Option("--seed", "N", "of texts and times; the same: the same texts", int, 0),
    Option("--slo", "NAME=MS,...", f"bounds for goodput, of {', '.join(SLO_NAMES)}"),
    Option("--timeout", "S", "of one answer (default 600)", float, 600.0, (1e-3, 1e6)),
    Option("--out", "FILE.json", "all figures, and each request's", Path),
    Option("--report", "FILE.html", "figures and plots in one file", Path),
    Option("--against", "FILE.json", "an earlier run's --out: figures and plots beside its", Path),
)
_OF_TRACES = (
    BLOCK_OPTION,
    Option("--words-per-token", "X", "of made texts (default 0.75)", float, 0.75, (1e-3, 10)),
)
_LENGTHS = {  # of a shape's fields, in whose place options stand: the smallest, the largest, and what they say
    "turns": (1, 10_000, "of each session"),
    "words": (1, MAX_TOKENS, "that each turn adds"),
    "prefix_words": (0, MAX_TOKENS, "of the system message"),
    "prefixes": (1, 1_000_000, "different system messages"),
    "documents": (0, 1000, "of each turn"),
    "pool": (1, 100_000, "different documents"),
    "document_words": (1, MAX_TOKENS, "of each document"),
    "max_tokens": (1, MAX_TOKENS, "of each answer"),
}


def _lengths(names: Iterable[str], workloads: Sequence[str]) -> Iterator[Option]:
    """Yield an option for each of a shape's fields, such as --turns, with the default of each workload in its help."""
    for name in names:
        least, most, text = _LENGTHS[name]
        values = [getattr(SHAPES[workload], name) for workload in workloads]
        told = [f"{workload} {value}" for workload, value in zip(workloads, values, strict=True)]
        option = f"--{_option(name).replace('_', '-')}"
        yield Option(option, "N", f"{text} ({', '.join(told) if told[1:] else values[0]})", int, None, (least, most))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    whats = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    serve = whats.add_parser(
        "serve",
        help="latencies, goodput and cached share of a server under load",
        description="Load any OpenAI-compatible server. docs/operations.md says more.",
    )
    lengths = (*_lengths(_LENGTHS, [*SHAPES]),)
    serve.set_defaults(run=bench, options=(*_SERVED, *_PACE, *_RUN, *lengths, *_OF_TRACES))
    add_server_arguments(serve)
    add_options(serve, _SERVED)
    add_options(serve.add_mutually_exclusive_group(), _PACE)
    _add_run_arguments(serve)
    add_options(serve.add_argument_group("lengths, in place of the workload's"), lengths)
    add_options(serve.add_argument_group("traces"), _OF_TRACES)
    scaled = whats.add_parser(
        "autoscale",
        help="replicas, latencies and hit rate of a server that scales while load rises and falls",
        description="Load that rises and falls on a Mneme server with autoscaling.",
    )
    lengths = (*_lengths(("turns", "words", "prefix_words", "prefixes", "max_tokens"), ["sessions"]),)
    scaled.set_defaults(documents="text", run=bench_autoscale, options=(*_SCALED, *_RUN, *lengths))
    add_server_arguments(scaled)
    add_options(scaled, _SCALED)
    _add_run_arguments(scaled)
    add_options(scaled, lengths)


def _add_run_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, _RUN)
    parser.add_argument("--session-header", action="store_true", help="send X-Session-ID, which Mneme's sessions go by")
    parser.add_argument("--ignore-eos", action="store_true", help="answers of max_tokens; not every server takes it")
    parser.add_argument("--json", action="store_true", help="one line of JSON, and no table")


def bench(args: argparse.Namespace) -> int:
    """Play the workload and say what came of it. Returns 1 if nothing was answered. Raises `ConfigError`."""
    _check(args)
    sessions, is_timed = sessions_to_play(args)
    num_users = None if is_timed or args.rate is not None else args.concurrency or 8
    told = ("workload", "rate", "think_time", "seed", "session_header")
    about = {**{name: getattr(args, name) for name in told}, "concurrency": num_users}
    return _run(args, sessions, num_users, about)


def bench_autoscale(args: argparse.Namespace) -> int:
    """As `bench`, with load that rises and falls, and a look at the server's replicas every second."""
    _check(args)
    if args.load.startswith(TRACE):
        trace = read_paced_trace(Path(args.load.removeprefix(TRACE)))
        times_s = sorted(asked.at_s for asked in trace if asked.at_s is not None)
        if not times_s:
            raise ConfigError(f"load: {args.load} has no timestamps")
        profile = autoscale.bursts(times_s, args.peak, args.seconds)
    elif args.load in autoscale.PROFILES:
        profile = autoscale.made_profile(args.load, args.rate, args.peak, args.seconds)
    else:
        known = ", ".join(autoscale.PROFILES)
        raise ConfigError(f"load: must be {known} or {TRACE}FILE (got {shown(args.load)})")
    shape = _shape(args, "sessions")
    sessions = make_sessions("sessions", shape, autoscale.num_requests(profile), args.seed)
    sessions = autoscale.arrive_by(profile, sessions, args.think_time, args.seed)
    told = ("load", "rate", "peak", "seconds", "think_time", "window", "seed", "session_header")
    return _run(args, sessions, None, {name: getattr(args, name) for name in told}, profile)


def _run(
    args: argparse.Namespace,
    sessions: list[Session],
    num_users: int | None,
    about: dict[str, Any],
    profile: autoscale.Profile | None = None,
) -> int:
    slo_s = parse_slo(args.slo) if args.slo is not None else {}
    before = None if args.against is None else _read_run(args.against)
    url, model, http = _server(args)
    options = {"model": model, "temperature": 0, **({"ignore_eos": True} if args.ignore_eos else {})}
    asker = ChatClient(http, options, session_header=args.session_header, timeout_s=args.timeout)
    load = SessionPlayer(asker.ask, partial(content, documents=args.documents))
    is_interrupted, seen = False, list[autoscale.Replicas]()
    try:
        asyncio.run(_play(http, load, sessions, num_users, None if profile is None else seen))
    except KeyboardInterrupt:  # what was measured until then is worth having
        is_interrupted = True
    figures = {"url": url, "model": model, **about, "interrupted": is_interrupted}
    figures |= summarize(load.answers, slo_s, load.num_unsent)
    rows: list[tuple[str, ...]] = [*rows_of(figures)]
    plots = list[str]()
    if profile is not None:
        figures |= autoscale.follow(load.answers, seen, args.window)
        rows += _rows_of_events(figures)
        plots = autoscale.plots(load.answers, figures, profile)
    if before is not None:
        rows = _beside(rows, rows_of(before[0]))
    table = "\n".join(f"{name:24}{'  was  '.join(values)}" for name, *values in rows)
    print(json.dumps(figures) if args.json else table, flush=True)
    if args.out is not None:
        _write("out", args.out, json.dumps({**figures, "requests": _requests(load)}) + "\n")
    if args.report is not None:
        title = f"{model}: {args.load if profile else args.workload}"
        made = f"{time.strftime('%Y-%m-%d %H:%M %Z')}, {shlex.join(['mneme', *_without_key(sys.argv[1:])])}"
        runs = {"this run": load.answers} | ({} if before is None else {args.against.name: before[1]})
        _write("report", args.report, html_report(title, rows, runs, plots, about=made))
    return 130 if is_interrupted else int(not figures["num_ok"])


def _without_key(argv: Sequence[str]) -> list[str]:
    """The command line without the secret in it."""
    kept = [each.partition("=")[0] if each.startswith("--api-key=") else each for each in argv]
    return [each for index, each in enumerate(kept) if not index or kept[index - 1] != "--api-key"]


def _read_run(path: Path) -> tuple[dict[str, Any], list[Answer]]:
    """Read what `--out` wrote: its figures and answers. Raises `ConfigError`."""
    try:
        figures = json.loads(path.read_text(encoding="utf-8"))
        answers = [Answer(**row) for row in figures["requests"]]
        rows_of(figures)
    except OSError as error:
        raise ConfigError(f"against: {path} cannot be read: {error.strerror or error}") from error
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"against: {path} is not what --out of `mneme bench` writes") from error
    return figures, answers


def _beside(rows: Sequence[Sequence[str]], before: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
    """Put an earlier run's texts behind those of the same name."""
    was = {name: value for name, value, *_ in before}
    return [(name, value, was.get(name, "-")) for name, value, *_ in rows]


def _check(args: argparse.Namespace) -> None:
    workload = getattr(args, "workload", "sessions")
    is_trace = workload.startswith(TRACE)
    if not is_trace and workload not in SHAPES:
        raise ConfigError(f"workload: must be {', '.join(SHAPES)} or {TRACE}FILE (got {shown(workload)})")
    check_options(args, args.options)
    if is_trace:
        _refuse(args, map(_option, _LENGTHS))
    for name, path in (("out", args.out), ("report", args.report)):  # before the load, not behind hours of it
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            raise ConfigError(f"{name}: {path} is no file in a folder that exists")


def _refuse(args: argparse.Namespace, names: Iterable[str]) -> None:
    """Raise `ConfigError` for the first of these that is given beside a trace which says it."""
    for name in names:
        if getattr(args, name):
            raise ConfigError(f"{name.replace('_', '-')}: a trace has its own")


def _option(name: str) -> str:
    """The attribute of an option in place of a shape's field: `--documents` says how they are sent."""
    return "num_documents" if name == "documents" else name


def sessions_to_play(args: argparse.Namespace) -> tuple[list[Session], bool]:
    """Return what is asked, and whether each turn has its time already."""
    if args.workload.startswith(TRACE):
        requests = read_paced_trace(Path(args.workload.removeprefix(TRACE)), args.block_tokens)[: args.num_requests]
        sessions = sessions_of_trace(requests, args.words_per_token, args.seed)
        if has_times(requests):
            _refuse(args, ("rate", "concurrency", "think_time"))
            return sessions, True
    else:
        shape = _shape(args, args.workload)
        sessions = make_sessions(args.workload, shape, args.num_requests or 100, args.seed)
    if args.rate is not None:
        return arrive(sessions, args.rate, args.think_time, args.seed), False
    rng = random.Random(f"{args.seed} thoughts")
    return [think(session, args.think_time, rng) for session in sessions], False


def _shape(args: argparse.Namespace, workload: str) -> Shape:
    given = {name: getattr(args, _option(name), None) for name in _LENGTHS}
    shape = SHAPES[workload]._replace(**{name: value for name, value in given.items() if value is not None})
    if shape.documents > shape.pool:
        raise ConfigError(f"num-documents: must be at most --pool, {shape.pool} (got {shape.documents})")
    return shape


def _server(args: argparse.Namespace) -> tuple[str, str, httpx.AsyncClient]:
    """Return the server's root, the model to ask for, and a client that connects when it is first used."""
    try:
        url, headers, model = base_url(args.url), auth_headers(args), args.model
        if model is None:
            with httpx.Client(base_url=url, headers=headers, timeout=10) as http:
                model = first_model(http)
        return url, model, connect(url, headers, min(args.timeout, 30.0))
    except httpx.InvalidURL as error:
        raise ConfigError(f"url: {error} (got {shown(args.url)})") from None
    except ChatFailed as error:
        raise ConfigError(str(error)) from None


async def _play(
    http: httpx.AsyncClient, load: SessionPlayer, sessions: list[Session], num_users: int | None,
    seen: list[autoscale.Replicas] | None,
) -> None:  # fmt: skip
    """Keep what the server says of its replicas meanwhile in `seen`, if that is given."""
    async with http:
        beside = [asyncio.create_task(_show(load, sum(len(session.turns) for session in sessions)))]
        if seen is not None:
            beside.append(asyncio.create_task(_watch(http, seen)))
        try:
            await load.play(sessions, num_users)
        finally:
            for task in beside:
                task.cancel()
            await asyncio.wait(beside)


async def _watch(http: httpx.AsyncClient, seen: list[autoscale.Replicas]) -> None:
    """Look at the server's metrics every second until this is cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        next_s, counts = loop.time() + 1.0, dict[str, int]()
        try:
            text = (await http.get("/metrics", timeout=10.0)).text
            counts = {state: int(float(count)) for state, count in _REPLICAS.findall(text)}
        except (httpx.HTTPError, ValueError):  # it is asked again; what clients see of it, their figures say
            pass
        seen.append(autoscale.Replicas(loop.time(), counts.get("ready"), counts.get("wanted")))
        await asyncio.sleep(next_s - loop.time())


async def _show(load: SessionPlayer, num_requests: int) -> None:
    """Say on stderr how far the load is until it is cancelled: a table in a terminal, else lines."""
    clock = asyncio.get_running_loop().time
    began_s, is_terminal = clock(), sys.stderr.isatty()
    with Live(console=Console(stderr=True), auto_refresh=False, transient=True) as live:
        while True:
            await asyncio.sleep(_TERMINAL_S if is_terminal else _LINE_S)
            rows = _progress(load, num_requests, clock() - began_s)
            if is_terminal:
                table = Table(*(name for name, _ in rows))
                table.add_row(*(value for _, value in rows))
                live.update(table, refresh=True)
            else:
                line = ", ".join(f"{name} {value}" for name, value in rows)
                print(f"mneme bench: {line}", file=sys.stderr, flush=True)


def _progress(load: SessionPlayer, num_requests: int, elapsed_s: float) -> list[tuple[str, str]]:
    """Rows of the live table; latencies are of the last answers, so that a long run costs no more than a short one."""
    recent = [answer.latencies_s() for answer in load.answers[-_RECENT:] if answer.error is None]
    tokens = sum(answer.output_tokens or 0 for answer in load.answers[-_RECENT:])
    span_s = elapsed_s
    if len(load.answers) > _RECENT:
        span_s = load.answers[-1].ended_s - load.answers[-_RECENT].ended_s
    return [
        ("seconds", f"{elapsed_s:.0f}"),
        ("ended", f"{len(load.answers) + load.num_unsent:,} of {num_requests:,}"),
        ("in flight", str(load.num_running)),
        ("failed", str(load.num_failed + load.num_unsent)),
        ("output tokens/s", f"{tokens / max(span_s, 1e-3):.1f}"),
        ("TTFT ms p50 / p90 / p99", _spread(spread_ms([each["ttft"] for each in recent]))),
        ("E2E ms p50 / p90 / p99", _spread(spread_ms([each["e2e"] for each in recent]))),
    ]


def _spread(spread: dict[str, float] | None) -> str:
    return "-" if spread is None else " / ".join(f"{spread[f'p{percent}']:.1f}" for percent in PERCENTS)


def rows_of(figures: dict[str, Any]) -> list[tuple[str, str]]:
    """Return a run's figures as names and texts, for people."""

    def number(name: str, form: str) -> str:
        return "-" if figures[name] is None else format(figures[name], form)

    ended = f"{'interrupted after' if figures['interrupted'] else 'in'} {figures['duration_s']:.1f} s"
    cached = "not said by the server" if figures["cached_share"] is None else f"{figures['cached_share']:.1%}"
    rows = [
        ("requests", f"{figures['num_ok']:,} answered, {figures['num_failed']:,} failed, {ended}"),
        *((f"  {kind}", f"{count:,}") for kind, count in figures["errors"].items()),
        *((("  the first", figures["first_error"]),) if figures["first_error"] else ()),
        *((("  without usage", f"{figures['num_without_usage']:,}"),) if figures["num_without_usage"] else ()),
        ("requests/s", number("requests_per_s", ",.2f")),
        ("output tokens/s", number("output_tokens_per_s", ",.1f")),
        ("total tokens/s", number("total_tokens_per_s", ",.1f")),
        ("prompt tokens", number("prompt_tokens", ",")),
        ("  of these cached", cached),
        ("output tokens", number("output_tokens", ",")),
        *((f"{name.upper()} ms p50 / p90 / p99", _spread(figures[f"{name}_ms"])) for name in SLO_NAMES),
        ("sent late by ms", _spread(figures["lag_ms"])),
    ]
    if figures["slo_ms"] is not None:
        bounds = ", ".join(f"{name} {bound:g} ms" for name, bound in figures["slo_ms"].items())
        rows.append(("goodput, requests/s", f"{number('goodput_per_s', ',.2f')} within {bounds}"))
    return rows


def _rows_of_events(figures: dict[str, Any]) -> list[tuple[str, str]]:
    """Return a row for each change of the replicas: what clients saw before, and after."""

    def shown_of(part: dict[str, Any]) -> str:
        rate = "-" if part["hit_rate"] is None else f"{part['hit_rate']:.1%}"
        ttft = "-" if part["ttft_ms"] is None else f"{part['ttft_ms']['p50']:.0f}"
        return f"{rate} of history cached, TTFT p50 {ttft} ms, {part['num_failed']} of {part['num_requests']} failed"

    return [
        (f"{event['at_s']:.0f} s: {event['from']} -> {event['to']}",
         f"{shown_of(event['before'])} -> {shown_of(event['after'])}")
        for event in figures["events"]
    ] or [("replicas", "no change was seen")]  # fmt: skip


def _requests(load: SessionPlayer) -> list[dict[str, Any]]:
    """All answers but their texts; times in seconds from the first request on."""
    began_s = min((answer.sent_s for answer in load.answers), default=0.0)
    times = ("due_s", "sent_s", "first_s", "last_s", "ended_s")
    requests = []
    for answer in load.answers:
        row = {each.name: getattr(answer, each.name) for each in fields(answer) if each.name != "text"}
        row |= {name: round(row[name] - began_s, 6) for name in times if row[name] is not None}
        requests.append(row | {"itl_s": [round(gap, 6) for gap in answer.itl_s]})
    return requests


def _write(option: str, path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{option}: {path} cannot be written: {error.strerror or error}") from error
