"""Cost models for tests, and a clock that only moves when it is told to."""

from __future__ import annotations

from mneme.cachetier.policy.cost_model import Calibration, CostModel, Terms

PREFILL: Terms = (5e-3, 1e-4, 1e-8)  # 10,000 tokens per second, 5 ms for each step
DECODE: Terms = (3e-3, 1e-3, 2e-8)
TOKEN_BYTES = 4096


class PlayedClock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def make_costs(clock: PlayedClock | None = None, *, prefill: Terms = PREFILL, **edges: Terms) -> CostModel:
    """`edges`: host, disk, ...; the defaults for those that are not given."""
    calibration = Calibration(
        prefill=prefill,
        decode=DECODE,
        edges=edges,  # type: ignore[arg-type]
        step_rows=2048,
        kv_bytes_per_token=TOKEN_BYTES,
    )
    return CostModel(calibration, clock or PlayedClock())
