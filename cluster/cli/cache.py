"""`mneme cache ls|verify|gc|stats`: a disk tier's folder, offline. No Ray, no engine.

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

from mneme.cachetier.chunk.keys import KEY_BYTES, OWNER_BYTES, LineageKind
from mneme.cachetier.chunk.misses import Miss
from mneme.cachetier.node.disk_folder import Kind
from mneme.cachetier.node.disk_names import MODEL_BYTES
from mneme.cachetier.node.folder_reports import (
    ChunkFilter,
    Totals,
    Verifier,
    age_beyond,
    age_of,
    chunks,
    collect,
    listing,
)
from mneme.cachetier.node.folder_view import FolderView, SeenFile
from mneme.errors import ConfigError, shown

MAX_LISTED = 100_000
_MAX_NAMED_FAULTS = 1000  # in the line of JSON; each has a line of its own too
_MAX_AGE_S = 1e12
_MAX_BYTES = 2**62
_UNHARMED = (Miss.BUSY, Miss.NOT_OURS)  # never removed: it may be sound, or is no file of ours

Clock = Callable[[], float]


def add_cache_arguments(parser: argparse.ArgumentParser) -> None:
    whats = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    ls = _command(whats, "ls", "chunks, most recently used first")
    _add_filters(ls)
    ls.add_argument("--limit", type=int, default=50, help=f"how many are listed, at most {MAX_LISTED} (default 50)")
    ls.add_argument("--sort", choices=("used", "size"), default="used", help="most recently used or largest first")

    verify = _command(whats, "verify", "read every file and compare all checksums; status 1 if one is bad")
    _add_filters(verify)
    verify.add_argument("--delete", action="store_true", help="remove what is bad; needs a folder that is not in use")

    gc = _command(whats, "gc", "remove what is chosen, and what a crash left; needs a folder that is not in use")
    _add_filters(gc)
    gc.add_argument("--all", action="store_true", help="all chunks")
    gc.add_argument("--keep-bytes", type=int, metavar="N", help="least recently used first, until so many are left")
    gc.add_argument("--dry-run", action="store_true", help="only say what would go; works on a folder in use")

    stats = _command(whats, "stats", "sums by lineage, tenant, model and age")
    _add_filters(stats)


def cache(args: argparse.Namespace, wall_clock: Clock = time.time, clock: Clock = time.perf_counter) -> int:
    """Run one of the commands. Raises `ConfigError`."""
    view, chosen, now_s = FolderView(args.folder), _filter(args), wall_clock()
    match args.what:
        case "ls":
            return _ls(view, chosen, now_s, args)
        case "verify":
            return _verify(view, chosen, now_s, clock, args)
        case "gc":
            return _gc(view, chosen, now_s, args)
        case _:
            return _stats(view, chosen, now_s, args)


def _command(whats: Any, name: str, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = whats.add_parser(name, help=text, description=text)
    parser.add_argument("--folder", required=True, help="the configuration's cache.disk.folder")
    parser.add_argument("--json", action="store_true", help="the last line is JSON")
    return parser


def _add_filters(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--key", metavar="HEX", help="chunks whose key begins so")
    parser.add_argument("--tenant", metavar="HEX", help=f"of one tenant: {2 * OWNER_BYTES} digits, as listed")
    parser.add_argument("--model", metavar="HEX", help=f"of one model: {2 * MODEL_BYTES} digits, as listed")
    parser.add_argument("--lineage", choices=[kind.name.lower() for kind in LineageKind])
    parser.add_argument("--older-than", type=float, metavar="S", help="not used for so many seconds")
    parser.add_argument("--newer-than", type=float, metavar="S", help="used within so many seconds")


def _filter(args: argparse.Namespace) -> ChunkFilter:
    for option in ("older_than", "newer_than"):
        value = getattr(args, option)
        if value is not None and not 0 <= value <= _MAX_AGE_S:
            raise ConfigError(f"{option.replace('_', '-')}: must be from 0 to {_MAX_AGE_S:g} seconds (got {value})")
    if args.key is not None and not re.fullmatch(rf"[0-9a-f]{{1,{2 * KEY_BYTES}}}", args.key):
        raise ConfigError(f"key: must be 1 to {2 * KEY_BYTES} hexadecimal digits (got {shown(args.key)})")
    return ChunkFilter(
        key=args.key,
        owner=_hex("tenant", args.tenant, OWNER_BYTES),
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


def _ls(view: FolderView, chosen: ChunkFilter, now_s: float, args: argparse.Namespace) -> int:
    if not 1 <= args.limit <= MAX_LISTED:
        raise ConfigError(f"limit: must be from 1 to {MAX_LISTED} (got {args.limit})")
    others: Counter[str] = Counter()
    found, total = listing(chunks(view, chosen, now_s, others), args.limit, largest=args.sort == "size")
    rows = [_row(seen, now_s) for seen in found]
    if args.json:
        return _print_json({"chunks": rows, "total": total.shown(), "other_files": dict(others)})
    print(f"{'key':32} {'parent':32} {'lineage':8} {'tokens':>6} {'bytes':>12} {'age':>8} {'tenant':16} {'model':16}")
    for row in rows:
        names = f"{row['key']} {row['parent']} {row['lineage']:8} {row['tokens']:6} {row['bytes']:12}"
        print(f"{names} {_age_text(row['age_s']):>8} {row['tenant']} {row['model']}")
    print(f"{len(rows)} of {total.num_chunks} chunks, {total.num_tokens} tokens, {total.num_bytes} bytes")
    return _print_others(others)


def _row(seen: SeenFile, now_s: float) -> dict[str, Any]:
    name = seen.name
    assert name is not None
    return {
        "key": name.key.hex(),
        "parent": name.parent.hex(),
        "lineage": name.kind.name.lower(),
        "tokens": name.num_tokens,
        "bytes": name.num_bytes,
        "age_s": round(age_of(seen, now_s), 3),
        "tenant": name.owner.hex(),
        "model": name.model.hex(),
    }


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
        _print_json(summary)
    else:
        rate = "" if took_s <= 0 else f", {verifier.checked.num_bytes / took_s / 1e6:.0f} MB/s"
        print(f"{verifier.checked.num_chunks} sound chunks, {num_bad} bad, {num_removed} removed{rate}")
    return 1 if num_bad else 0


def _faults(view: FolderView, verifier: Verifier, chosen: ChunkFilter, now_s: float) -> Iterator[tuple[SeenFile, Miss]]:
    for seen in view.scan():
        if seen.kind in (Kind.CHUNK, Kind.TORN, Kind.NOT_OURS) and chosen.takes(seen, now_s):
            miss = verifier.check(seen)
            if miss is not None:
                yield seen, miss


def _gc(view: FolderView, chosen: ChunkFilter, now_s: float, args: argparse.Namespace) -> int:
    has_filter = chosen != ChunkFilter()
    if args.all and (has_filter or args.keep_bytes is not None):
        raise ConfigError("all: cannot be given with something that chooses")
    if args.keep_bytes is not None and (has_filter or not 0 <= args.keep_bytes <= _MAX_BYTES):
        raise ConfigError(f"keep-bytes: must be from 0 to 2^62, and stand alone (got {args.keep_bytes})")
    with contextlib.nullcontext() if args.dry_run else view.locked():
        picked: ChunkFilter | None = chosen if has_filter or args.all else None
        if args.keep_bytes is not None:
            oldest_s = age_beyond(chunks(view, chosen, now_s), args.keep_bytes, now_s)
            picked = None if oldest_s is None else ChunkFilter(min_age_s=oldest_s)
        done = collect(view, picked, now_s, dry_run=args.dry_run)
    summary = {
        **done.removed.shown(),
        "leftovers": done.num_leftovers,
        "failed": done.num_failed,
        "dry_run": args.dry_run,
    }
    if args.json:
        _print_json(summary)
    else:
        verb = "would go" if args.dry_run else "removed"
        chunk_text = f"{done.removed.num_chunks} chunks of {done.removed.num_bytes} bytes"
        print(f"{chunk_text} and {done.num_leftovers} files that a crash left {verb}, {done.num_failed} failed")
    return 1 if done.num_failed else 0


def _stats(view: FolderView, chosen: ChunkFilter, now_s: float, args: argparse.Namespace) -> int:
    totals, others = Totals(view), Counter[str]()
    for seen in chunks(view, chosen, now_s, others):
        totals.add(seen, now_s)
    summary = {**totals.shown(), "other_files": dict(others)}
    if args.json:
        return _print_json(summary)
    print(f"{summary['chunks']:,} chunks, {summary['tokens']:,} tokens, {filesize.decimal(summary['bytes'])}")
    print(f"{filesize.decimal(summary['disk_bytes'])} on the disk; {summary['tail_chunks']:,} of the chunks are tails")
    for group in ("lineages", "tenants", "models"):
        for name, figures in sorted(summary[group].items(), key=lambda item: -item[1]["bytes"]):
            print(f"{group[:-1]:8} {name:18} {figures['chunks']:9,} chunks {filesize.decimal(figures['bytes']):>10}")
    print("used within " + ", ".join(f"{name}: {count}" for name, count in summary["ages"].items()))
    return _print_others(others)


def _print_others(others: Counter[str]) -> int:
    if others:
        print("other files: " + ", ".join(f"{kind} {count}" for kind, count in sorted(others.items())))
    return 0


def _print_json(summary: dict[str, Any]) -> int:
    print(json.dumps(summary))
    return 0


def _age_text(age_s: float) -> str:
    for bound_s, unit_s, unit in ((120.0, 1.0, "s"), (7200.0, 60.0, "m"), (172_800.0, 3600.0, "h")):
        if age_s < bound_s:
            return f"{age_s / unit_s:.0f}{unit}"
    return f"{age_s / 86400.0:.0f}d"
