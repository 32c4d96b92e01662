"""`mneme cache verify|stats`: a disk tier's folder, offline. No Ray, no engine.

All but the removing of files works beside a running cluster, without its lock: what it writes or evicts meanwhile is
seen or not. Exit status: 0, 1 if a file is bad or could not be removed, 2 for what the user must change.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from rich import filesize

from mneme.cachetier.names import Miss
from mneme.cachetier.node.folder import Kind
from mneme.cachetier.node.offline import FolderView, Totals, Verifier

_MAX_NAMED_FAULTS = 1000  # in the line of JSON; each has a line of its own too
_UNHARMED = (Miss.BUSY, Miss.NOT_OURS)  # never removed: it may be sound, or is no file of ours

Clock = Callable[[], float]


def add_cache_arguments(parser: argparse.ArgumentParser) -> None:
    whats = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    verify = _command(whats, "verify", "read every file and compare all checksums; status 1 if one is bad")
    verify.add_argument("--delete", action="store_true", help="remove what is bad; needs a folder that is not in use")
    _command(whats, "stats", "sums by lineage, tenant, model and age")


def cache(args: argparse.Namespace, wall_clock: Clock = time.time, clock: Clock = time.perf_counter) -> int:
    """Run one of the commands. Raises `ConfigError`."""
    view = FolderView(args.folder)
    return _verify(view, clock, args) if args.what == "verify" else _stats(view, wall_clock(), args)


def _command(whats: Any, name: str, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = whats.add_parser(name, help=text, description=text)
    parser.add_argument("--folder", required=True, help="the configuration's cache.disk.folder")
    parser.add_argument("--json", action="store_true", help="the last line is JSON")
    return parser


def _verify(view: FolderView, clock: Clock, args: argparse.Namespace) -> int:
    started_s, verifier = clock(), Verifier(view)
    bad: list[dict[str, str]] = []
    num_removed = num_bad = 0
    with view.locked() if args.delete else contextlib.nullcontext():
        for seen in view.scan():
            if seen.name is None or (miss := verifier.check(seen)) is None:  # no chunk's name, or sound
                continue
            num_bad += 1
            is_gone = args.delete and miss not in _UNHARMED and view.remove(seen)
            num_removed += is_gone
            bad += [{"file": seen.path, "miss": miss.value}] if len(bad) < _MAX_NAMED_FAULTS else []
            print(f"{miss.value} {seen.path}{' removed' if is_gone else ''}")
    took_s = clock() - started_s
    summary = {
        **verifier.checked.shown(),
        "bad": num_bad,
        "bad_by_miss": dict(verifier.faults),
        "bad_files": bad,
        "removed": num_removed,
        "gone": verifier.num_gone,
        "took_s": round(took_s, 3),
        "bytes_per_s": round(verifier.checked.num_bytes / took_s) if took_s > 0 else None,
    }
    if args.json:
        print(json.dumps(summary))
    else:
        rate = "" if took_s <= 0 else f", {verifier.checked.num_bytes / took_s / 1e6:.0f} MB/s"
        print(f"{verifier.checked.num_chunks} sound chunks, {num_bad} bad, {num_removed} removed{rate}")
    return 1 if num_bad else 0


def _stats(view: FolderView, now_s: float, args: argparse.Namespace) -> int:
    totals, others = Totals(view), Counter[str]()
    for seen in view.scan():
        if seen.kind is Kind.CHUNK:
            totals.add(seen, now_s)
        else:
            others[seen.kind.value] += 1
    summary = {**totals.shown(), "other_files": dict(others)}
    if args.json:
        print(json.dumps(summary))
        return 0
    print(f"{summary['chunks']:,} chunks, {summary['tokens']:,} tokens, {filesize.decimal(summary['bytes'])}")
    print(f"{filesize.decimal(summary['disk_bytes'])} on the disk; {summary['tail_chunks']:,} of the chunks are tails")
    for group in ("lineages", "tenants", "models"):
        for name, figures in sorted(summary[group].items(), key=lambda item: -item[1]["bytes"]):
            print(f"{group[:-1]:8} {name:18} {figures['chunks']:9,} chunks {filesize.decimal(figures['bytes']):>10}")
    print("used within " + ", ".join(f"{name}: {count}" for name, count in summary["ages"].items()))
    if others:
        print("other files: " + ", ".join(f"{kind} {count}" for kind, count in sorted(others.items())))
    return 0
