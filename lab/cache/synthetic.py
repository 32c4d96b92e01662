"""Made traces: sessions that begin with one of a few system prompts, ask, think, and ask again with all of it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, fields

from mneme.errors import ConfigError, shown
from mneme.lab.cache.traces import MAX_TOKENS, TraceRequest

PREFIX = "synthetic"
_MAX_REQUESTS = 1_000_000
_LARGEST = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticShape:
    """Means of exponential draws, but for `num_turns`, which is geometric. ShareGPT's lengths (Pensieve 6.1)."""

    num_sessions: int = 1000
    sessions_per_s: float = 1.0
    num_turns: float = 7.58
    tokens_in: float = 31.26
    tokens_out: float = 180.44
    think_s: float = 60.0
    max_tokens: int = 32_768  # of a prompt: a session ends before, and a first one is cut
    num_system_prompts: int = 4
    system_tokens: int = 1024
    seed: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            smallest = 0 if field.name in ("seed", "system_tokens", "think_s") else 1e-9
            largest = MAX_TOKENS if "tokens" in field.name else _LARGEST
            if isinstance(value, float) and field.type == "int" and not value.is_integer():
                raise ConfigError(f"{field.name}: must be a whole number (got {shown(value)})")
            if not smallest <= value <= largest:
                raise ConfigError(f"{field.name}: must be from {smallest:g} to {largest:g} (got {shown(value)})")
        if self.num_turns < 1 or self.num_sessions * self.num_turns > _MAX_REQUESTS:
            raise ConfigError(
                f"num_turns: at least 1, and {_MAX_REQUESTS} requests in all (got {shown(self.num_turns)})"
            )


def parse_shape(text: str) -> SyntheticShape:
    """`synthetic`, or `synthetic:KEY=VALUE,...`. Raises `ConfigError`."""
    types = {field.name: int if field.type == "int" else float for field in fields(SyntheticShape)}
    given: dict[str, float] = {}
    for part in text.removeprefix(PREFIX).removeprefix(":").split(","):
        name, _, value = part.partition("=")
        if not part:
            continue
        if name not in types:
            raise ConfigError(f"trace: unknown {shown(name)}; there are {', '.join(types)}")
        try:
            given[name] = types[name](value)
        except ValueError as error:
            raise ConfigError(f"{name}: must be a number (got {shown(value)})") from error
    return SyntheticShape(**given)  # type: ignore[arg-type]


def made_trace(name: str, block_tokens: int) -> list[TraceRequest] | None:
    """Return the trace that `synthetic[:KEY=VALUE,...]` says; None for the name of a file. Raises `ConfigError`."""
    is_made = name == PREFIX or name.startswith(PREFIX + ":")
    return make_trace(parse_shape(name), block_tokens) if is_made else None


def make_trace(shape: SyntheticShape, block_tokens: int) -> list[TraceRequest]:
    """Poisson arrivals of sessions; the same for the same shape. A short last block is never shared."""
    rng = random.Random(shape.seed)
    ids = _Ids(block_tokens)
    requests: list[TraceRequest] = []
    begins_s = 0.0
    for session in range(shape.num_sessions):
        begins_s += rng.expovariate(shape.sessions_per_s)
        requests.extend(_session(shape, rng, ids, session, begins_s))
    requests.sort(key=lambda request: request.arrival_s)
    first_s = requests[0].arrival_s
    return [request._replace(arrival_s=request.arrival_s - first_s) for request in requests]


class _Ids:
    """Ids of blocks by what they begin with and where they are: a system prompt or a session."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._id_by_block: dict[tuple[str, int, int], int] = {}

    def of(self, prompt: int, system_tokens: int, session: int, num_tokens: int) -> list[int]:
        num_full, short = divmod(num_tokens, self.block_tokens)
        num_shared, known = min(system_tokens // self.block_tokens, num_full), self._id_by_block
        blocks = [("prompt", prompt, place) for place in range(num_shared)]
        blocks += [("session", session, place) for place in range(num_shared, num_full)]
        ids = [known.setdefault(block, len(known) + 1) for block in blocks]
        return [*ids, known.setdefault(("short", len(known), 0), len(known) + 1)] if short else ids


def _session(
    shape: SyntheticShape, rng: random.Random, ids: _Ids, session: int, begins_s: float
) -> Iterator[TraceRequest]:
    prompt = min(int(rng.expovariate(1.0)), shape.num_system_prompts - 1)
    now_s, num_tokens, is_first = begins_s, shape.system_tokens, True
    while is_first or rng.random() < 1 - 1 / shape.num_turns:
        num_tokens += 1 + int(rng.expovariate(1 / shape.tokens_in))
        if num_tokens > shape.max_tokens and not is_first:
            return
        num_tokens = min(num_tokens, shape.max_tokens)
        num_output = 1 + int(rng.expovariate(1 / shape.tokens_out))
        blocks = ids.of(prompt, shape.system_tokens, session, num_tokens)
        yield TraceRequest(now_s, blocks, num_tokens, num_output, ids.block_tokens)
        num_tokens += num_output
        now_s += rng.expovariate(1 / shape.think_s) if shape.think_s else 0.0
        is_first = False
