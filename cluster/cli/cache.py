"""`mneme cache verify|stats`: a disk tier's folder, offline. No Ray, no engine.

All but the removing of files works beside a running cluster, without its lock: what it writes or evicts meanwhile is
seen or not. Exit status: 0, 1 if a file is bad or could not be removed, 2 for what the user must change.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from rich import filesize

from mneme.cachetier.chunk.keys import KEY_BYTES, LineageKind
from mneme.cachetier.names import TENANT_BYTES, Miss
from mneme.cachetier.node.folder import Kind
from mneme.cachetier.node.index import MODEL_BYTES
from mneme.cachetier.node.offline import ChunkFilter, FolderView, SeenFile, Totals, Verifier, chunks
from mneme.errors import ConfigError, shown

_MAX_NAMED_FAULTS = 1000  # in the line of JSON; each has a line of its own too
_MAX_AGE_S = 1e12
_UNHARMED = (Miss.BUSY, Miss.NOT_OURS)  # never removed: it may be sound, or is no file of ours

Clock = Callable[[], float]


def add_cache_arguments(parser: argparse.ArgumentParser) -> None:
    whats = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    verify = _command(whats, "verify", "read every file and compare all checksums; status 1 if one is bad")
    verify.add_argument("--delete", action="store_true", help="remove what is bad; needs a folder that is not in use")
    _command(whats, "stats", "sums by lineage, tenant, model and age")


def cache(args: argparse.Namespace, wall_clock: Clock = time.time, clock: Clock = time.perf_counter) -> int:
    """Run one of the commands. Raises `ConfigError`."""
    view, chosen, now_s = FolderView(args.folder), _filter(args), wall_clock()
    if args.what == "verify":
        return _verify(view, chosen, now_s, clock, args)
    return _stats(view, chosen, now_s, args)


def _command(whats: Any, name: str, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = whats.add_parser(name, help=text, description=text)
    parser.add_argument("--folder", required=True, help="the configuration's cache.disk.folder")
    parser.add_argument("--json", action="store_true", help="the last line is JSON")
    parser.add_argument("--key", metavar="HEX", help="chunks whose key begins so")
    parser.add_argument("--tenant", metavar="HEX", help=f"of one tenant: {2 * TENANT_BYTES} digits, as listed")
    parser.add_argument("--model", metavar="HEX", help=f"of one model: {2 * MODEL_BYTES} digits, as listed")
    parser.add_argument("--lineage", choices=[kind.name.lower() for kind in LineageKind])
    parser.add_argument("--older-than", type=float, metavar="S", help="not used for so many seconds")
    parser.add_argument("--newer-than", type=float, metavar="S", help="used within so many seconds")
    return parser


def _filter(args: argparse.Namespace) -> ChunkFilter:
    for option in ("older_than", "newer_than"):
        value = getattr(args, option)
        if value is not None and not 0 <= value <= _MAX_AGE_S:
            raise ConfigError(f"{option.replace('_', '-')}: must be from 0 to {_MAX_AGE_S:g} seconds (got {value})")
    if args.key is not None and not re.fullmatch(rf"[0-9a-f]{{1,{2 * KEY_BYTES}}}", args.key):
        raise ConfigError(f"key: must be 1 to {2 * KEY_BYTES} hexadecimal digits (got {shown(args.key)})")
    return ChunkFilter(
        key=args.key,
        tenant=_hex("tenant", args.tenant, TENANT_BYTES),
        model=_hex("model", args.model, MODEL_BYTES),
        kind=None if args.lineage is None else LineageKind[args.lineage.upper()],
        min_age_s=args.older_than,
        max_age_s=args.newer_than,
    )


def _hex(option: str, text: str | None, num_bytes: int) -> bytes | None:
    if text is None:
        return None
    if not re.fullmatch(rf"[0-9a-f]{{{2 * num_bytes}}}", text):
        raise ConfigError(f"{option}: must be {2 * num_bytes} hexadecimal digits (got {shown(text)})")
    return bytes.fromhex(text)


def _verify(view: FolderView, chosen: ChunkFilter, now_s: float, clock: Clock, args: argparse.Namespace) -> int:
    started_s, verifier = clock(), Verifier(view)
    bad: list[dict[str, str]] = []
    num_removed = num_bad = 0
    with view.locked() if args.delete else contextlib.nullcontext():
        for seen, miss in _faults(view, verifier, chosen, now_s):
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


def _faults(view: FolderView, verifier: Verifier, chosen: ChunkFilter, now_s: float) -> Iterator[tuple[SeenFile, Miss]]:
    for seen in view.scan():
        if seen.kind in (Kind.CHUNK, Kind.TORN, Kind.NOT_OURS) and chosen.accepts(seen, now_s):
            miss = verifier.check(seen)
            if miss is not None:
                yield seen, miss


def _stats(view: FolderView, chosen: ChunkFilter, now_s: float, args: argparse.Namespace) -> int:
    totals, others = Totals(view), Counter[str]()
    for seen in chunks(view, chosen, now_s, others):
        totals.add(seen, now_s)
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
