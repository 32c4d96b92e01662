"""Turns, medians and checks, with clocks and arms made up."""

from __future__ import annotations

import pytest
import torch
from attention.bench import Bench
from attention.machine import Ceilings
from attention.timing import Arm, interleaved
from harness import at_least, at_most, closing_checks

CPU = torch.device("cpu")


class Clock:
    """Time passes only when an arm works."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.calls: list[str] = []

    def __call__(self) -> float:
        return self.now_s

    def arm(self, name: str, ms: list[float], num_layers: int = 1) -> Arm:
        times = iter(ms)

        def call(layer: int) -> None:
            self.calls.append(f"{name}{layer}")
            self.now_s += next(times) / 1e3

        return Arm(name, call, num_layers)


def test_arms_take_turns_and_the_first_round_does_not_count() -> None:
    clock = Clock()
    arms = [clock.arm("a", [100, 1, 2, 3]), clock.arm("b", [100, 4, 6, 9])]
    times = interleaved(arms, CPU, budget_s=0.0, now_s=clock)
    assert clock.calls == ["a0", "b0", "b0", "a0", "a0", "b0", "b0", "a0"]
    assert times.samples == {"a": pytest.approx([1, 2, 3]), "b": pytest.approx([4, 6, 9])}
    assert times.ms("a") == pytest.approx(2)
    assert times.ratio("b", "a") == pytest.approx(3)  # the median of 4, 3 and 3


def test_checks() -> None:
    assert at_least("n", 3.0, 3.0).ok is True
    assert at_least("n", 2.99, 3.0).ok is False
    assert at_least("n", 0.99, 1.0, noise=0.02).ok is True
    assert at_least("n", 0.97, 1.0, noise=0.02).ok is False
    assert at_most("n", 1.11, 1.1).ok is False
    assert at_most("n", float("nan"), 1.1).ok is False
    assert at_most("n", None, 1.1).ok is None


def test_closing_checks_are_met_or_missed_and_the_rest_is_named() -> None:
    found = closing_checks([at_least("faster", 3.00004, 3.0), at_most("gpu", None, 1.1, "of it")])
    met = {"name": "faster", "value": 3.0, "unit": "x", "target": ">=3", "ok": True}
    assert found == {"checks": [met], "not_measured": ["gpu"]}


def test_a_peer_that_fails_is_left_out_and_noted() -> None:
    from attention.arms import ours
    from attention.scenes import Heads, prefix_scene

    ceilings = Ceilings(1e9, {torch.float32: 1e9}, 1 << 20)
    bench = Bench(device=CPU, quick=True, ceilings=ceilings, point_s=0.0)
    scene = prefix_scene(2, 32, 32, heads=Heads(2, 1, 16), dtype=torch.float32, device=CPU)

    def broken() -> Arm | None:
        raise RuntimeError("no such kernel")

    def wrong() -> Arm | None:
        return Arm("wrong", lambda _layer: torch.zeros_like(scene.q))

    times = bench.time(scene, [ours(scene)], [broken, wrong, lambda: None])
    assert list(times.samples) == ["auto"]
    assert [note.split(":")[1] for note in bench.notes] == [" RuntimeError", " AssertionError"]
