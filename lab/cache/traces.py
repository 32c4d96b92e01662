"""Request traces: what came when, and which blocks of the prompts were equal. Readers are strict: a trace that is read
wrongly gives figures that are wrong.

Mooncake's format (FAST 2025): one JSON object a line, `timestamp` in ms, `input_length` and `output_length` in tokens,
`hash_ids`: one id per block of the prompt, the last one may be short. An id stands for the prefix up to its block.
Azure's format (AzureLLMInferenceTrace): CSV of `TIMESTAMP,ContextTokens,GeneratedTokens`; it does not say what
is shared, so nothing is.

Load tools play traces whose later requests wait for answers, as Dynamo and aiperf extend Mooncake's format: lines of
one `session_id` come one after the other, `delay` is ms after what a line waits for ended, `wait_for` names the
`request_id`s of earlier lines. `timestamp` may be missing where a line waits, `hash_ids` where it adds to its session's
history.
"""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

from mneme.errors import ConfigError, shown

MAX_TOKENS = 10_000_000  # of one request
_MAX_LINE_BYTES = 4_000_000
_MAX_NUMBER = 2**63
_MAX_MS = 1e12  # 31 years
Asked = TypeVar("Asked")
_AZURE_HEADER = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]


class TraceRequest(NamedTuple):
    arrival_s: float  # from the first request on, never falling
    block_ids: list[int]
    input_tokens: int
    output_tokens: int
    block_tokens: int


class PacedRequest(NamedTuple):
    """A request that is due `delay_s` after what it waits for ended, and not before `at_s`."""

    at_s: float | None  # from the trace's smallest timestamp on; None: the line has none
    block_ids: list[int] | None  # None: `input_tokens` are new ones behind the session's history
    input_tokens: int
    output_tokens: int
    block_tokens: int
    session_id: str | None = None
    request_id: str | None = None
    delay_s: float = 0.0
    wait_for: tuple[str, ...] = ()  # request ids of earlier lines


def read_trace(path: Path, block_tokens: int) -> list[TraceRequest]:
    """Read a trace: `.jsonl` is Mooncake's format, `.csv` Azure's. Raises `ConfigError`: file, line and rule."""
    return _read(path, block_tokens, {".jsonl": _read_mooncake, ".csv": _read_azure})


def read_paced_trace(path: Path, block_tokens: int) -> list[PacedRequest]:
    """Read a trace to be played: as `read_trace`, and lines that wait for others. Raises `ConfigError`."""
    requests = _read(path, block_tokens, {".jsonl": _read_paced, ".csv": _read_azure_paced})
    first_s = min((asked.at_s for asked in requests if asked.at_s is not None), default=0.0)
    return [asked if asked.at_s is None else asked._replace(at_s=asked.at_s - first_s) for asked in requests]


def _read(path: Path, block_tokens: int, readers: Mapping[str, Callable[[Path, int], Iterator[Asked]]]) -> list[Asked]:
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise ConfigError(f"{path}: a trace's name ends in {' or '.join(readers)}")
    try:
        requests = list(reader(path, block_tokens))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    if not requests:
        raise ConfigError(f"{path}: has no requests")
    return requests


def most_used_within(trace: Sequence[TraceRequest], span_s: float) -> int:
    """The most distinct blocks that are used within so long: a cache of them that keeps what was used for that time
    finds all that it ever can (AttentionStore 4.3.5: CCpUT)."""
    num_by_block: Counter[int] = Counter()
    most, oldest = 0, 0
    for request in trace:
        num_by_block.update(request.block_ids)
        while trace[oldest].arrival_s < request.arrival_s - span_s:
            for block_id in trace[oldest].block_ids:
                num_by_block[block_id] -= 1
                if not num_by_block[block_id]:
                    del num_by_block[block_id]
            oldest += 1
        most = max(most, len(num_by_block))
    return most


class _Checks:
    """Holds what one file's lines must hold, one after the other."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._first_s: float | None = None
        self._last_s = 0.0
        self._parent_by_id: dict[int, int | None] = {}
        self.line = 0

    def fail(self, rule: str) -> NoReturn:
        raise ConfigError(f"{self._path}:{self.line}: {rule}")

    def whole(self, name: str, value: object, smallest: int, largest: int) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not smallest <= value <= largest:
            self.fail(f"{name}: must be a whole number from {smallest} to {largest} (got {shown(value)})")
        return value

    def ms(self, name: str, value: object) -> float:
        """Seconds of a number of ms."""
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= _MAX_MS:
            self.fail(f"{name}: must be ms from 0 to {_MAX_MS:g} (got {shown(value)})")
        return value / 1e3

    def arrival_s(self, when_s: float) -> float:
        if self._first_s is None:
            self._first_s = when_s
        elif when_s < self._last_s:
            self.fail("is earlier than the request before it")
        self._last_s = when_s
        return when_s - self._first_s

    def chain(self, ids: list[int]) -> None:
        """An id stands for its prefix: it always comes behind the same id, so never twice in a request."""
        parent = None
        for block_id in ids:
            if self._parent_by_id.setdefault(block_id, parent) != parent:
                self.fail(f"hash_ids: {block_id} comes behind another prefix than before")
            parent = block_id


def _read_mooncake(path: Path, block_tokens: int) -> Iterator[TraceRequest]:
    checks = _Checks(path)
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    for line in _lines(checks, path):
        row = _json_object(checks, line, names)
        timestamp_ms = checks.whole("timestamp", row["timestamp"], 0, _MAX_NUMBER)
        num_input, num_output = _lengths(checks, row)
        ids = _block_ids(checks, row, num_input, block_tokens)
        yield TraceRequest(checks.arrival_s(timestamp_ms / 1e3), ids, num_input, num_output, block_tokens)


def _read_paced(path: Path, block_tokens: int) -> Iterator[PacedRequest]:
    checks, request_ids, session_ids = _Checks(path), set[str](), set[str]()
    for line in _lines(checks, path):
        row = _json_object(checks, line, ("input_length", "output_length"))
        num_input, num_output = _lengths(checks, row)
        session_id, request_id = (_name(checks, row, name) for name in ("session_id", "request_id"))
        wait_for = row.get("wait_for") or []
        if isinstance(wait_for, list):
            wait_for = [str(each) if isinstance(each, int) else each for each in wait_for]  # as the ids themselves
        if not isinstance(wait_for, list) or not all(
            isinstance(each, str) and each in request_ids for each in wait_for
        ):
            checks.fail(f"wait_for: must be a list of request_ids of earlier lines (got {shown(wait_for)})")
        if request_id in request_ids:
            checks.fail(f"request_id: {shown(request_id)} is an earlier line's")
        waits = bool(wait_for) or session_id in session_ids
        if not waits and row.get("timestamp") is None:
            checks.fail("timestamp: is missing, and the line waits for no other")
        yield PacedRequest(
            at_s=None if row.get("timestamp") is None else checks.ms("timestamp", row["timestamp"]),
            block_ids=None if row.get("hash_ids") is None else _block_ids(checks, row, num_input, block_tokens),
            input_tokens=num_input, output_tokens=num_output, block_tokens=block_tokens, session_id=session_id,
            request_id=request_id, delay_s=checks.ms("delay", row.get("delay") or 0) if waits else 0.0,
            wait_for=tuple(wait_for),
        )  # fmt: skip
        request_ids |= {request_id} if request_id is not None else set()
        session_ids |= {session_id} if session_id is not None else set()


def _read_azure_paced(path: Path, block_tokens: int) -> Iterator[PacedRequest]:
    return (PacedRequest(*asked) for asked in _read_azure(path, block_tokens))


def _lines(checks: _Checks, path: Path) -> Iterator[str]:
    """Lines that are not blank. They are decoded one by one, so that what is not UTF-8 is found in its line."""
    with path.open("rb") as lines:
        while line := lines.readline(_MAX_LINE_BYTES + 1):
            checks.line += 1
            if len(line) > _MAX_LINE_BYTES:
                checks.fail(f"has over {_MAX_LINE_BYTES} bytes")
            try:
                text = line.decode()
            except UnicodeDecodeError:
                checks.fail("is not text in UTF-8")
            if text.strip():
                yield text


def _lengths(checks: _Checks, row: Mapping[str, Any]) -> tuple[int, int]:
    num_input = checks.whole("input_length", row["input_length"], 1, MAX_TOKENS)
    return num_input, checks.whole("output_length", row["output_length"], 0, MAX_TOKENS)


def _block_ids(checks: _Checks, row: Mapping[str, Any], num_input: int, block_tokens: int) -> list[int]:
    ids = row["hash_ids"]
    if not isinstance(ids, list):
        checks.fail(f"hash_ids: must be a list (got {shown(ids)})")
    if len(ids) != -(-num_input // block_tokens):
        checks.fail(f"hash_ids: {len(ids)} blocks are not {num_input} tokens in blocks of {block_tokens}")
    ids = [checks.whole("hash_ids", block_id, 0, _MAX_NUMBER) for block_id in ids]
    checks.chain(ids)
    return ids


def _name(checks: _Checks, row: Mapping[str, Any], name: str) -> str | None:
    value = row.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, str | int) or not str(value):
        checks.fail(f"{name}: must be a text or a whole number (got {shown(value)})")
    return str(value)


def _json_object(checks: _Checks, line: str, names: Sequence[str]) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        checks.fail(f"is no JSON: {shown(str(error))}")
    if not isinstance(row, dict) or any(name not in row for name in names):
        checks.fail(f"must be a JSON object with {', '.join(names)}")
    return row


def _read_azure(path: Path, block_tokens: int) -> Iterator[TraceRequest]:
    checks = _Checks(path)
    next_id = 0
    rows = csv.reader(_lines(checks, path), strict=True)
    try:
        if next(rows, _AZURE_HEADER) != _AZURE_HEADER:
            checks.fail(f"must be {','.join(_AZURE_HEADER)}")
        for row in rows:
            request = _azure_request(checks, row, next_id, block_tokens)
            next_id += len(request.block_ids)
            yield request
    except csv.Error as error:
        checks.fail(f"is no CSV: {error}")


def _azure_request(checks: _Checks, row: list[str], next_id: int, block_tokens: int) -> TraceRequest:
    if len(row) != len(_AZURE_HEADER):
        checks.fail(f"must have {len(_AZURE_HEADER)} fields (got {len(row)})")
    try:
        when = datetime.fromisoformat(row[0])
        counts = [int(field) for field in row[1:]]
    except ValueError as error:
        checks.fail(f"is no time and two counts: {shown(str(error))}")
    when_s = (when.replace(tzinfo=None) - datetime(1970, 1, 1)).total_seconds()
    num_input = checks.whole("ContextTokens", counts[0], 1, MAX_TOKENS)
    num_output = checks.whole("GeneratedTokens", counts[1], 0, MAX_TOKENS)
    ids = list(range(next_id, next_id - (-num_input // block_tokens)))
    return TraceRequest(checks.arrival_s(when_s), ids, num_input, num_output, block_tokens)
