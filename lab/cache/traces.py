"""Request traces: what came when, and which blocks of the prompts were equal. Readers are strict: a trace that is read
wrongly gives figures that are wrong.

`.jsonl` has a record a line, `.csv` one a row, `.json` a list of them, or one. Their fields say which layout it is:

Mooncake  (FAST 2025) `timestamp` in ms, `input_length` and `output_length` in tokens, `hash_ids`: one id per block of
          the prompt, the last one may be short. An id stands for the prefix up to its block. In what Dynamo and aiperf
          add, lines of one `session_id` come one after the other, `delay` is ms after what a line waits for ended,
          `wait_for` names the `request_id`s of earlier lines. `timestamp` may be missing where a line waits, `hash_ids`
          where it adds to its session's history.
Bailian   as Mooncake, but `timestamp` is in s, `chat_id` and `parent_chat_id` name sessions, and an id stands for its
          block alone, of 16 tokens.
Azure     `TIMESTAMP,ContextTokens,GeneratedTokens`; it does not say what is shared, so nothing is.
BurstGPT  `Timestamp` in s, `Request tokens`, `Response tokens` (0: it failed, and is left out), perhaps `Session ID`.
          A prompt of a session that is longer than its last prompt and answer goes on from them; another is a new one.
ShareGPT  `conversations` of `from` and `value`, or `messages` of `role` and `content`, as vLLM's multi-turn benchmark
          has them. They have no times; four bytes are counted as a token. An answer to nothing is left out.
Weka      `requests` of an agent's session (`t` in s, `in` and `out` in tokens, `hash_ids`) and of its subagents. When
          sessions began it does not say: one does each second.
"""

from __future__ import annotations

import csv
import itertools
import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from mneme.errors import ConfigError, shown
from mneme.lab.options import Option

MAX_TOKENS = 10_000_000  # of one request
BLOCK_TOKENS = 512  # where neither the layout nor the user says otherwise
_BLOCK_HELP = "of a hash_id, and of a block (default 512; Bailian's 16, Weka's 64)"
BLOCK_OPTION = Option("--block-tokens", "N", _BLOCK_HELP, int, None, (1, MAX_TOKENS))
_MAX_LINE_BYTES = 64_000_000
_MAX_NUMBER = 2**63
_MAX_S = 1e12  # so many years that it is no time
_BYTES_PER_TOKEN = 4  # of text without a tokenizer
_SESSION_S, _THINK_S = 1.0, 60.0  # between sessions, and turns, of traces without times: as of made ones
_ANSWERS = frozenset({"assistant", "gpt", "chatgpt", "bing", "bard"})
_BETWEEN = re.compile(r"[\s,]*")
_log = logging.getLogger(__name__)


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


def read_trace(path: Path, block_tokens: int | None = None) -> list[TraceRequest]:
    """Read a trace as requests in the order of their times. Raises `ConfigError`: file, line and rule."""
    requests = (
        TraceRequest(each.at_s or 0.0, each.block_ids or [], each.input_tokens, each.output_tokens, each.block_tokens)
        for each in filled(read_paced_trace(path, block_tokens))
    )
    return sorted(requests, key=lambda asked: asked.arrival_s)


def read_paced_trace(path: Path, block_tokens: int | None = None) -> list[PacedRequest]:
    """Read a trace to be played. `block_tokens` are those of a hash id, if not the layout's. Raises `ConfigError`."""
    records = _RECORDS.get(path.suffix.lower())
    if records is None:
        raise ConfigError(f"{path}: a trace's name ends in {', '.join(_RECORDS)}")
    reader = _Reader(path, block_tokens)
    try:
        requests = [asked for record in records(reader) for asked in reader.requests(record)]
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    if reader.num_failed:
        total = len(requests) + reader.num_failed
        _log.warning("%s: %d of %d requests had failed (no response) and are left out", path, reader.num_failed, total)
    if not requests:
        raise ConfigError(f"{path}: has no requests")
    first_s = min((asked.at_s for asked in requests if asked.at_s is not None), default=0.0)
    return [asked if asked.at_s is None else asked._replace(at_s=asked.at_s - first_s) for asked in requests]


def has_times(requests: Iterable[PacedRequest]) -> bool:
    """Return whether a trace says when its requests came; conversations alone do not."""
    return any(asked.at_s is not None for asked in requests)


def filled(requests: Sequence[PacedRequest]) -> list[PacedRequest]:
    """Return the requests with all blocks of their prompts, and with the times before which they cannot come."""
    think_s = 0.0
    if not has_times(requests):
        think_s = _THINK_S
        _log.warning("the trace has no times: a session begins each second, and its user thinks for %g s", think_s)
    starts_s = itertools.count(0.0, _SESSION_S)
    fresh = itertools.count(1 + max((block_id for asked in requests for block_id in asked.block_ids or ()), default=-1))
    last_by_session: dict[str | None, PacedRequest] = {}
    asked_by_id: dict[str, PacedRequest] = {}
    full = []
    for asked in requests:
        before = None if asked.session_id is None else last_by_session.get(asked.session_id)
        waits = [asked_by_id[name] for name in asked.wait_for] + ([] if before is None else [before])
        delay_s = (asked.delay_s or think_s) if waits else asked.delay_s
        at_s = asked.at_s if waits or asked.at_s is not None else next(starts_s)
        at_s = max(at_s or 0.0, *((each.at_s or 0.0) + delay_s for each in waits), 0.0)
        ids, num_input = asked.block_ids, asked.input_tokens
        if ids is None:
            num_input += 0 if before is None else before.input_tokens + before.output_tokens
            kept = [] if before is None else (before.block_ids or [])[: before.input_tokens // asked.block_tokens]
            ids = [*kept, *itertools.islice(fresh, -(-num_input // asked.block_tokens) - len(kept))]
        asked = asked._replace(at_s=at_s, block_ids=ids, input_tokens=num_input, delay_s=delay_s)
        last_by_session[asked.session_id] = asked
        if asked.request_id is not None:
            asked_by_id[asked.request_id] = asked
        full.append(asked)
    return full


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


class _Reader:
    """Reads one file's records, one after the other: a method finds them, and one for each layout reads them."""

    def __init__(self, path: Path, block_tokens: int | None) -> None:
        self._path = path
        self._block_tokens = block_tokens
        self._layout: Layout | None = None
        self._request_ids: set[str] = set()
        self._session_ids: set[str] = set()
        self._parent_by_id: dict[int, int | None] = {}
        self._prefixes: dict[tuple[Hashable, Hashable], int] = {}
        self._session_by_chat: dict[str | None, str] = {}
        self._length_by_session: dict[str, tuple[str, int]] = {}
        self.line = 0
        self.num_failed = 0

    @property
    def block_tokens(self) -> int:
        assert self._layout is not None, "recognised by its first record"
        return self._block_tokens or self._layout.block_tokens

    def fail(self, rule: str) -> NoReturn:
        raise ConfigError(f"{self._path}:{self.line}: {rule}")

    def recognise(self, names: Iterable[str]) -> Layout:
        """Find the layout by a record's fields, once for the file."""
        if self._layout is None:
            known = set(names)
            self._layout = next((each for each in LAYOUTS if known.issuperset(each.fields)), None)
            if self._layout is None:
                layouts = "; ".join(f"{each.name}'s {', '.join(each.fields)}" for each in LAYOUTS)
                self.fail(f"has the fields of no trace that is known: {layouts}")
        return self._layout

    def requests(self, record: object) -> Iterator[PacedRequest]:
        if not isinstance(record, dict):
            self.fail(f"must be a JSON object (got {shown(record)})")
        layout = self.recognise(record)
        if missing := [name for name in layout.fields if name not in record]:
            self.fail(f"must have {', '.join(layout.fields)} (has no {', '.join(missing)})")
        return layout.read(self, record)

    # Where the records are.

    def lines(self) -> Iterator[str]:
        """Lines that are not blank. They are decoded one by one, so that what is not UTF-8 is found in its line."""
        with self._path.open("rb") as lines:
            while line := lines.readline(_MAX_LINE_BYTES + 1):
                self.line += 1
                if len(line) > _MAX_LINE_BYTES:
                    self.fail(f"has over {_MAX_LINE_BYTES} bytes")
                try:
                    text = line.decode()
                except UnicodeDecodeError:
                    self.fail("is not text in UTF-8")
                if text.strip():
                    yield text

    def json_lines(self) -> Iterator[object]:
        for line in self.lines():
            try:
                yield json.loads(line)
            except (ValueError, RecursionError) as error:
                self.fail(f"is no JSON: {shown(str(error))}")

    def json_items(self) -> Iterator[object]:
        try:
            text = self._path.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError:
            self.fail("is not text in UTF-8")
        begin = len(text) - len(text.lstrip())
        is_list = text.startswith("[", begin)
        at, counted, self.line = begin + is_list, 0, 1
        decoder = json.JSONDecoder()
        while True:
            between = _BETWEEN.match(text, at)
            at = len(text) if between is None else between.end()
            self.line += text.count("\n", counted, at)
            counted = at
            if text.startswith("]", at) if is_list else at == len(text):
                return
            try:
                record, at = decoder.raw_decode(text, at)
            except json.JSONDecodeError as error:
                self.line = error.lineno
                self.fail(f"is no JSON: {error.msg}")
            except (ValueError, RecursionError) as error:
                self.fail(f"is no JSON: {shown(str(error))}")
            yield record

    def rows(self) -> Iterator[object]:
        rows = csv.reader(self.lines(), strict=True)
        try:
            header = [name.strip("\ufeff ") for name in next(rows, [])]
            if header:
                self.recognise(header)
            for row in rows:
                if len(row) != len(header):
                    self.fail(f"must have {len(header)} fields (got {len(row)})")
                yield dict(zip(header, row, strict=True))
        except csv.Error as error:
            self.fail(f"is no CSV: {error}")

    # What a record of each layout says.

    def mooncake(self, row: Mapping[str, Any]) -> Iterator[PacedRequest]:
        num_input, num_output = self._lengths(row, "input_length", "output_length")
        session_id, request_id = (self._name(row, name) for name in ("session_id", "request_id"))
        wait_for = row.get("wait_for") or []
        if isinstance(wait_for, list):
            wait_for = [str(each) if isinstance(each, int) else each for each in wait_for]  # as the ids themselves
        if not isinstance(wait_for, list) or not all(
            isinstance(each, str) and each in self._request_ids for each in wait_for
        ):
            self.fail(f"wait_for: must be a list of request_ids of earlier lines (got {shown(wait_for)})")
        if request_id in self._request_ids:
            self.fail(f"request_id: {shown(request_id)} is an earlier line's")
        waits = bool(wait_for) or session_id in self._session_ids
        if not waits and row.get("timestamp") is None:
            self.fail("timestamp: is missing, and the line waits for no other")
        ids = None
        if row.get("hash_ids") is not None:
            ids = self._hash_ids(row, num_input)
            self._chain(ids)
        delay_s = self._number("delay", row.get("delay") or 0, "ms") / 1e3 if waits else 0.0
        yield PacedRequest(
            at_s=None if row.get("timestamp") is None else self._number("timestamp", row["timestamp"], "ms") / 1e3,
            block_ids=ids, input_tokens=num_input, output_tokens=num_output, block_tokens=self.block_tokens,
            session_id=session_id, request_id=request_id, delay_s=delay_s, wait_for=tuple(wait_for),
        )  # fmt: skip
        self._request_ids |= {request_id} if request_id is not None else set()
        self._session_ids |= {session_id} if session_id is not None else set()

    def bailian(self, row: Mapping[str, Any]) -> Iterator[PacedRequest]:
        num_input, num_output = self._lengths(row, "input_length", "output_length")
        chat = self._name(row, "chat_id") or self.fail("chat_id: must be given")
        session: str | None = self._session_by_chat.get(self._name(row, "parent_chat_id"), chat)
        self._session_by_chat[chat] = session or chat
        ids, num_new = None, num_input
        if row.get("hash_ids") is None:
            session, num_new = self._goes_on(session, num_input, num_output)
        else:
            ids = self._prefix_ids(self._hash_ids(row, num_input), num_input)
        at_s = self._number("timestamp", row["timestamp"], "s")
        yield PacedRequest(at_s, ids, num_new, num_output, self.block_tokens, session)

    def azure(self, row: Mapping[str, str]) -> Iterator[PacedRequest]:
        text = row["TIMESTAMP"]
        try:
            when = datetime.fromisoformat(text)
        except ValueError:
            self.fail(f"TIMESTAMP: is no time (got {shown(text)})")
        at_s = (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()
        counts = {name: self._parsed(name, row[name], int) for name in ("ContextTokens", "GeneratedTokens")}
        yield PacedRequest(at_s, None, *self._lengths(counts, *counts), self.block_tokens)

    def burst_gpt(self, row: Mapping[str, str]) -> Iterator[PacedRequest]:
        counts = {name: self._parsed(name, row[name], int) for name in ("Request tokens", "Response tokens")}
        if counts["Response tokens"] == 0:
            self.num_failed += 1
            return
        at_s = self._number("Timestamp", self._parsed("Timestamp", row["Timestamp"], float), "s")
        num_input, num_output = self._lengths(counts, *counts)
        session, num_new = self._goes_on(row.get("Session ID") or None, num_input, num_output)
        yield PacedRequest(at_s, None, num_new, num_output, self.block_tokens, session)

    def texts(self, row: Mapping[str, Any]) -> Iterator[PacedRequest]:
        name = "messages" if "messages" in row else "conversations"
        messages, num_new = row[name], 0
        self._session_ids.add(session := str(len(self._session_ids)))
        if not isinstance(messages, list):
            self.fail(f"{name}: must be a list (got {shown(messages)})")
        for place, message in enumerate(messages):
            role = (message.get("role") or message.get("from")) if isinstance(message, dict) else None
            if not isinstance(role, str):
                self.fail(f"{name}[{place}]: must be an object with a role, or from (got {shown(message)})")
            said = [message[part] for part in ("content", "value", "tool_calls") if message.get(part)]
            texts = (part if isinstance(part, str) else json.dumps(part) for part in said)
            num_bytes = sum(len(text.encode(errors="replace")) for text in texts)
            num_tokens = min(-(-num_bytes // _BYTES_PER_TOKEN), MAX_TOKENS)
            if role not in _ANSWERS:
                num_new += num_tokens
            elif num_new:
                yield PacedRequest(None, None, num_new, num_tokens, self.block_tokens, session)
                num_new = 0

    def weka(self, row: Mapping[str, Any]) -> Iterator[PacedRequest]:
        size = self._whole("block_size", row.get("block_size", self.block_tokens), 1, MAX_TOKENS)
        self._block_tokens = self._block_tokens or size
        if size != self._block_tokens:
            self.fail(f"block_size: must be {self._block_tokens}, as the first or --block-tokens says (got {size})")
        number = len(self._session_ids)
        self._session_ids.add(session := str(number))
        scope = session if row.get("hash_id_scope", "local") == "local" else None
        yield from self._calls(row, session, scope, number * _SESSION_S)

    def _calls(
        self, row: Mapping[str, Any], session: str, scope: str | None, begin_s: float, spawn_s: float = 0.0
    ) -> Iterator[PacedRequest]:
        """Yield an agent's requests and its subagents', whose times are its own, or begin at `spawn_s`."""
        calls = row.get("requests")
        if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
            self.fail(f"requests: must be a list of objects (got {shown(calls)})")
        first_s = self._number("t", calls[0].get("t"), "s") if calls else 0.0
        begin_s -= spawn_s if first_s >= spawn_s else 0.0
        for place, call in enumerate(calls):
            at_s = begin_s + self._number("t", call.get("t"), "s")
            if call.get("type") == "subagent":
                yield from self._calls(call, f"{session}/{place}", scope, at_s, at_s - begin_s)
                continue
            num_input, num_output = self._lengths(call, "in", "out")
            ids = self._prefix_ids(self._list("hash_ids", call.get("hash_ids") or []), num_input, scope)
            yield PacedRequest(at_s, ids, num_input, num_output, self.block_tokens, session)

    # What a field must be.

    def _lengths(self, row: Mapping[str, Any], of_prompt: str, of_answer: str) -> tuple[int, int]:
        num_input = self._whole(of_prompt, row.get(of_prompt), 1, MAX_TOKENS)
        return num_input, self._whole(of_answer, row.get(of_answer), 0, MAX_TOKENS)

    def _whole(self, name: str, value: object, smallest: int, largest: int) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not smallest <= value <= largest:
            self.fail(f"{name}: must be a whole number from {smallest} to {largest} (got {shown(value)})")
        return value

    def _number(self, name: str, value: object, unit: str) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= _MAX_S:
            self.fail(f"{name}: must be {unit} from 0 to {_MAX_S:g} (got {shown(value)})")
        return value

    def _parsed(self, name: str, text: str, kind: Callable[[str], float]) -> float:
        try:
            return kind(text)
        except ValueError:
            self.fail(f"{name}: must be {'a whole number' if kind is int else 'a number'} (got {shown(text)})")

    def _name(self, row: Mapping[str, Any], name: str) -> str | None:
        value = row.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, str | int) or not str(value):
            self.fail(f"{name}: must be a text or a whole number (got {shown(value)})")
        return str(value)

    def _list(self, name: str, value: object) -> list[int]:
        if not isinstance(value, list):
            self.fail(f"{name}: must be a list (got {shown(value)})")
        return [self._whole(name, each, 0, _MAX_NUMBER) for each in value]

    def _hash_ids(self, row: Mapping[str, Any], num_input: int) -> list[int]:
        ids = self._list("hash_ids", row["hash_ids"])
        if len(ids) != -(-num_input // self.block_tokens):
            blocks = f"{num_input} tokens in blocks of {self.block_tokens}"
            self.fail(f"hash_ids: {len(ids)} blocks are not {blocks} (--block-tokens)")
        return ids

    def _chain(self, ids: Iterable[int]) -> None:
        """An id stands for its prefix: it always comes behind the same id, so never twice in a request."""
        parent = None
        for block_id in ids:
            if self._parent_by_id.setdefault(block_id, parent) != parent:
                self.fail(f"hash_ids: {block_id} comes behind another prefix than before")
            parent = block_id

    def _prefix_ids(self, hashes: Sequence[int], num_input: int, scope: str | None = None) -> list[int]:
        """Return an id for each prefix of hashes of blocks; blocks of the prompt without one are nobody else's."""
        ids: list[int] = []
        for place in range(-(-num_input // self.block_tokens)):
            block = hashes[place] if place < len(hashes) else object()
            prefix = ids[-1] if ids else scope
            ids.append(self._prefixes.setdefault((prefix, block), len(self._prefixes)))
        return ids

    def _goes_on(self, session: str | None, num_input: int, num_output: int) -> tuple[str | None, int]:
        """Return the session of a whole prompt without hashes, and how many of its tokens are new to it."""
        if session is None:
            return None, num_input
        name, length = self._length_by_session.get(session, (session, 0))
        if num_input <= length:
            name, length = f"{session} from line {self.line}", 0
        self._length_by_session[session] = name, num_input + num_output
        return name, num_input - length


class Layout(NamedTuple):
    """A kind of trace, known by `fields` that each of its records has."""

    name: str
    fields: tuple[str, ...]
    read: Callable[[_Reader, Any], Iterator[PacedRequest]]
    block_tokens: int = BLOCK_TOKENS


LAYOUTS = (
    Layout("Bailian", ("chat_id", "timestamp", "input_length", "output_length"), _Reader.bailian, 16),
    Layout("Mooncake", ("input_length", "output_length"), _Reader.mooncake),
    Layout("Azure", ("TIMESTAMP", "ContextTokens", "GeneratedTokens"), _Reader.azure),
    Layout("BurstGPT", ("Timestamp", "Request tokens", "Response tokens"), _Reader.burst_gpt),
    Layout("ShareGPT", ("conversations",), _Reader.texts),
    Layout("vLLM multi-turn", ("messages",), _Reader.texts),
    Layout("Weka", ("requests",), _Reader.weka, 64),
)
_RECORDS: dict[str, Callable[[_Reader], Iterator[object]]] = {
    ".jsonl": _Reader.json_lines, ".json": _Reader.json_items, ".csv": _Reader.rows,
}  # fmt: skip
