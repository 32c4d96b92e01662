"""What a simulation is told of costs: a cost model, measured or from a table of rates, and a table of prices."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from mneme.cachetier.policy.cost_model import Calibration, CostModel, costs_in
from mneme.config import parse
from mneme.errors import ConfigError, shown

GB = 1e9
_MAX_TABLE_BYTES = 65_536
_WHOLE_PROMPT = 1 << 40  # rows in a step
_LARGEST = 1e15  # of any rate or price: far above what there is, so that no figure overflows


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Holds the speeds of one replica and of the tiers under it.

    The defaults: LLaMA-65B on four A100s, 2,048 tokens in 360 ms, their 5 GB from the host in 192 ms, disks of 5 GB/s
    (AttentionStore 2.4). A decode step reads 130 GB of weights and its KV at 70% of four times 2,039 GB/s.
    """

    prefill_tokens_per_s: float = 5_700.0
    decode_step_s: float = 0.023  # of any batch; what it reads of KV comes on top
    device_gb_per_s: float = 5_700.0
    host_gb_per_s: float = 26.0
    disk_gb_per_s: float = 5.0
    kv_bytes_per_token: float = 2_621_440.0  # 80 layers, K and V, 8,192 values of two bytes

    def __post_init__(self) -> None:
        _check_positive(self)

    def cost_model(self) -> CostModel:
        """Nothing has a latency, and a prompt is one step."""
        calibration = Calibration(
            prefill=(0.0, 1 / self.prefill_tokens_per_s, 0.0),
            decode=(self.decode_step_s, 0.0, self.kv_bytes_per_token / self.device_gb_per_s / GB),
            edges={"host": (0.0, 0.0, 1 / self.host_gb_per_s / GB), "disk": (0.0, 0.0, 1 / self.disk_gb_per_s / GB)},
            step_rows=_WHOLE_PROMPT,
            kv_bytes_per_token=max(round(self.kv_bytes_per_token), 1),
        )
        return CostModel(calibration, stands_still)


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


def stands_still() -> float:
    """A clock: what was learned of an edge stays as it is."""
    return 0.0


def load_costs(path: Path | None, given: Mapping[str, float] | None = None) -> CostModel:
    """Read `Rates` from a JSON object with some of the fields, or from the file of an engine's cost model.

    `given` fields of `Rates` go before the object's. Raises `ConfigError`.
    """
    measured = None if path is None else costs_in(_read(path), stands_still)
    if measured is None:
        return replace(load_table(Rates, path), **(given or {})).cost_model()
    if given:
        raise ConfigError(f"{', '.join(given)}: cannot be given beside {path}, which is measured of one model")
    return measured


def load_table(kind: type[Table], path: Path | None) -> Table:
    """Read a table from a JSON object with some of the fields; None gives the defaults. Raises `ConfigError`."""
    return kind() if path is None else parse(kind, _read(path), str(path))


def _read(path: Path) -> Any:
    try:
        if path.stat().st_size > _MAX_TABLE_BYTES:
            raise ConfigError(f"{path}: must be at most {_MAX_TABLE_BYTES} bytes")
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: no readable JSON: {error}") from error


def _check_positive(table: Rates | Prices) -> None:
    for name, value in asdict(table).items():
        if not 0 < value <= _LARGEST:
            raise ConfigError(f"{name}: must be a number over 0 and at most {_LARGEST:g} (got {shown(value)})")
