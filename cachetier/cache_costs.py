"""What a simulated cache costs: seconds to a first token from measured rates, money per hour from a price table."""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from mneme.cachetier.cost_file import costs_in
from mneme.cachetier.cost_model import CostModel
from mneme.errors import ConfigError, shown

GB = 1e9
_MAX_TABLE_BYTES = 65_536
_PROMPT_TOKENS, _CHUNK_TOKENS = 2048, 256
_LARGEST = 1e15  # of any rate or price: far above what there is, so that no figure overflows


class FirstToken(NamedTuple):
    ttft_s: float
    compute_s: float
    loaded: tuple[int, ...]  # blocks by tier: a beginning of what was found, the rest is computed again


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Of one replica and the tiers under it. The defaults: LLaMA-65B on four A100s, 2,048 tokens in 360 ms, their
    5 GB from the host in 192 ms, disks of 5 GB/s (AttentionStore 2.4)."""

    prefill_tokens_per_s: float = 5_700.0
    host_gb_per_s: float = 26.0
    disk_gb_per_s: float = 5.0
    kv_bytes_per_token: float = 2_621_440.0  # 80 layers, K and V, 8,192 values of two bytes

    def __post_init__(self) -> None:
        _check_positive(self)

    def first_token(self, input_tokens: int, block_tokens: int, found: Sequence[int]) -> FirstToken:
        """`found`: blocks by tier, device first. The head of them is loaded while the rest is computed, so many as give
        the soonest first token; at a tie, more. One token is always computed."""
        total = sum(found)

        def load_s(num_blocks: int) -> float:
            return self._load_s(_head(found, num_blocks), block_tokens)

        def compute_s(num_blocks: int) -> float:
            return max(input_tokens - num_blocks * block_tokens, 1) / self.prefill_tokens_per_s

        # Loading takes longer with each block, computing less long: the best is beside where they cross.
        crossing = bisect_left(range(total), True, key=lambda count: load_s(count) > compute_s(count))
        best = min((crossing, max(crossing - 1, 0)), key=lambda count: max(load_s(count), compute_s(count)))
        return FirstToken(max(load_s(best), compute_s(best)), compute_s(best), tuple(_head(found, best)))

    def load_blocks(self, seconds: float, block_tokens: int) -> float:
        """How many a disk gives in so long."""
        return seconds * self.disk_gb_per_s * GB / self.block_bytes(block_tokens)

    def _load_s(self, blocks: Sequence[int], block_tokens: int) -> float:
        block_gb = self.block_bytes(block_tokens) / GB
        rates = (math.inf, self.host_gb_per_s, self.disk_gb_per_s)
        return sum(count * block_gb / rate for count, rate in zip(blocks, rates, strict=False))

    def block_bytes(self, block_tokens: int) -> float:
        return self.kv_bytes_per_token * block_tokens


def _head(found: Sequence[int], num_blocks: int) -> list[int]:
    """The first blocks of all that were found, by tier: those nearer to the head are in faster tiers."""
    head = []
    for count in found:
        head.append(min(count, num_blocks))
        num_blocks -= head[-1]
    return head


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Dollars per hour. The defaults are AttentionStore's (4.2): four A100s at $5, memory on demand, SSD."""

    device_per_hour: float = 20.0  # of one replica
    host_gb_per_hour: float = 0.0088
    disk_gb_per_hour: float = 0.000082

    def __post_init__(self) -> None:
        _check_positive(self)

    def hourly(self, num_devices: float, host_gb: float, disk_gb: float) -> float:
        """`num_devices` that are busy on average: device hours per hour."""
        return num_devices * self.device_per_hour + host_gb * self.host_gb_per_hour + disk_gb * self.disk_gb_per_hour


Table = TypeVar("Table", Rates, Prices)


def rates_of(costs: CostModel) -> Rates:
    """What an engine has measured, for a prompt of 2,048 tokens."""
    num_bytes = _PROMPT_TOKENS * costs.calibration.kv_bytes_per_token
    num_chunks = _PROMPT_TOKENS // _CHUNK_TOKENS
    return Rates(
        prefill_tokens_per_s=_PROMPT_TOKENS / costs.prefill_s(_PROMPT_TOKENS, 0),
        host_gb_per_s=num_bytes / costs.edge_s("host", num_bytes, num_chunks) / GB,
        disk_gb_per_s=num_bytes / costs.edge_s("disk", num_bytes, num_chunks) / GB,
        kv_bytes_per_token=costs.calibration.kv_bytes_per_token,
    )


def load_rates(path: Path | None) -> Rates:
    """From a JSON object with some of the fields, or from the file in which an engine keeps its cost model."""
    costs = None if path is None else costs_in(_read(path))
    return load_table(Rates, path) if costs is None else rates_of(costs)


def load_table(kind: type[Table], path: Path | None) -> Table:
    """From a JSON object with some of the fields; None gives the defaults. Raises `ConfigError`."""
    if path is None:
        return kind()
    given = _read(path)
    known = [field.name for field in fields(kind)]
    if not isinstance(given, dict):
        raise ConfigError(f"{path}: must be one JSON object with some of {', '.join(known)}")
    if unknown := set(given) - set(known):
        raise ConfigError(f"{path}: unknown {shown(min(unknown))}; there are {', '.join(known)}")
    return kind(**given)


def _read(path: Path) -> Any:
    try:
        if path.stat().st_size > _MAX_TABLE_BYTES:
            raise ConfigError(f"{path}: must be at most {_MAX_TABLE_BYTES} bytes")
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: no readable JSON: {error}") from error


def _check_positive(table: Rates | Prices) -> None:
    for name, value in asdict(table).items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= _LARGEST:
            raise ConfigError(f"{name}: must be a number over 0 and at most {_LARGEST:g} (got {shown(value)})")
