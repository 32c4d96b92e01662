"""Steps are measured with the runner that serves, and nothing of it is left in the engine; kernels once a machine."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mneme.cachetier.config import CacheConfig
from mneme.cachetier.policy.cost_model import Calibration, CostFile, CostModel, fit
from mneme.kernels.native.choice import Choice, CpuKernels, Timing
from mneme.kernels.page_table import FREE_SLOT_POSITION
from mneme.kernels.plan import Plan
from mneme.kernels.share_cost import TRITON
from mneme.replicas.config import EngineConfig
from mneme.replicas.engine import build, choice
from mneme.replicas.engine import calibration as module
from mneme.replicas.engine.build import build_engine
from mneme.replicas.engine.calibration import (
    calibrate,
    features_of,
    machine_of,
    measured_edges,
    measured_share_cost,
    remembered_costs,
)
from mneme.replicas.engine.engine import Engine
from mneme.replicas.engine.reporter import Reporter
from mneme.replicas.engine.stats import engine_stats
from tests.kernels.cases import needs_native
from tests.replicas.tiered_engine import answers, run, submit

pytestmark = pytest.mark.engine

SMALL = EngineConfig(
    device="cpu",
    dtype="float32",
    page_size=16,
    num_pages=64,
    max_batch_tokens=64,
    max_running=32,
    host_cache_bytes=1 << 20,
)


def small_engine(**changes: Any) -> Engine:
    return build_engine("mneme-tiny", replace(SMALL, **changes))


@pytest.fixture(scope="module")
def engine() -> Engine:
    return small_engine()


def settled(engine: Engine) -> dict[str, Any]:
    engine.forest.check()
    return engine_stats(engine)


def test_an_engine_that_serves_learns_costs_without_a_tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MNEME_CACHE_DIR", str(tmp_path))
    assert build_engine("mneme-tiny", SMALL).costs is None  # answers batches
    engine = build_engine("mneme-tiny", SMALL, cache=CacheConfig(enabled=False))
    submit(engine, "a", [5] * 40, 3)
    run(engine)
    counts = {kind: each["count"] for kind, each in engine.costs.accuracy().items()}
    assert counts == {"prefill": 1, "decode": 2}
    assert Reporter(engine, "epoch").snapshot().cost is not None
    engine.close()
    (file,) = tmp_path.glob("costs-*.json")
    assert CostModel.from_mapping(json.loads(file.read_text())["costs"]).calibration == engine.costs.calibration


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_pages": 4, "max_running": 1},
        {"num_pages": 3, "max_batch_tokens": 16, "max_running": 16},
        {"max_context": 24},
        {"prefix_sharing": False, "host_cache_bytes": 0},
    ],
)
def test_whatever_is_measured_the_engine_is_as_it_was(changes: dict[str, Any]) -> None:
    engine, config = small_engine(**changes), replace(SMALL, **changes)
    before, pool = settled(engine), engine.runner.pool
    found = calibrate(engine.runner, config, budget_s=0.1)
    assert settled(engine) == before
    assert len(engine.forest.device.free) == config.num_pages
    assert bool((pool.slot_position == FREE_SLOT_POSITION).all())
    costs = CostModel(found)
    assert costs.prefill_s(10, 0) > 0
    assert costs.decode_s(2, 20) > 0
    assert found.kv_bytes_per_token == 2 * pool.k_pages[:, :, 0, 0, :].numel() * 4
    assert set(found.edges) == {"host"}


def test_an_earlier_start_is_remembered(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = engine.runner
    file = CostFile(tmp_path, bytes(32), machine_of(runner, SMALL))
    first = remembered_costs(runner, SMALL, file, budget_s=0.1)
    measured: list[Calibration] = []

    def counted(*args: Any, **options: Any) -> Calibration:
        measured.append(calibrate(*args, **options))
        return measured[-1]

    monkeypatch.setattr(module, "calibrate", counted)
    again = remembered_costs(runner, SMALL, file, budget_s=0.1)
    assert again.calibration == first.calibration
    assert not measured
    for _ in range(10):  # it turns out that the machine was busy then
        again.learn_step([(50, 0)], again.prefill_s(50, 0) / 20)
    file.write(again)
    assert remembered_costs(runner, SMALL, file, budget_s=0.1).calibration == measured[0]


def test_machines_differ_by_what_steps_depend_on(engine: Engine) -> None:
    runner = engine.runner
    assert machine_of(runner, SMALL) == machine_of(runner, replace(SMALL, max_waiting=7))
    assert machine_of(runner, SMALL) != machine_of(runner, replace(SMALL, max_batch_tokens=128))


H100 = {"key_many": 0.558, "head_many": 0.013, "piece": 3e4, "merge": 47.0}


def played(constants: dict[str, float], blur: float = 0.0) -> Callable[[Plan, Callable[[], None]], float]:
    """A device that takes what the model says, with 8 us for a call, in each of 6 layers."""
    draw = np.random.default_rng(0)

    def time_s(plan: Plan, _run: Callable[[], None]) -> float:
        weights = [0.0, 0.0, *constants.values(), 2.0, 8e6]
        return 6e-12 * float(np.dot(features_of(plan), weights)) * float(draw.lognormal(0, blur))

    return time_s


@pytest.fixture(scope="module")
def gpu_like() -> Engine:
    """An engine whose runner shares by the constants of a GPU."""
    engine = small_engine(num_pages=160)
    engine.runner.share_cost = TRITON
    return engine


def test_constants_of_sharing_are_those_of_the_device(gpu_like: Engine) -> None:
    before = settled(gpu_like)
    for scale in (1.0, 4.0):  # a GPU with a quarter of the bandwidth
        wanted = {name: scale * value for name, value in H100.items()}
        assert measured_share_cost(gpu_like.runner, played(wanted)) == pytest.approx(wanted, rel=0.05)
    assert settled(gpu_like) == before
    assert bool((gpu_like.runner.pool.slot_position == FREE_SLOT_POSITION).all())


def test_times_that_follow_no_model_change_nothing(gpu_like: Engine) -> None:
    assert measured_share_cost(gpu_like.runner, played(H100, blur=1.5)) is None
    assert measured_share_cost(small_engine().runner, played(H100)) is None  # no room


def test_what_is_timed_runs_and_a_failure_leaves_no_slot_visible(gpu_like: Engine) -> None:
    ran: list[int] = []

    def time_s(plan: Plan, run: Callable[[], None]) -> float:
        run()
        ran.append(plan.work.num_pieces)
        if len(ran) == 2:
            raise RuntimeError("no memory")
        return 1.0

    with pytest.raises(RuntimeError, match="no memory"):
        measured_share_cost(gpu_like.runner, time_s)
    assert ran == [3, 2]  # a shared prefix and two own pages, and two sequences
    assert bool((gpu_like.runner.pool.slot_position == FREE_SLOT_POSITION).all())


def test_constants_of_sharing_are_kept_with_the_costs(
    gpu_like: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, found = gpu_like.runner, [H100]
    monkeypatch.setattr(module, "_share_cost_here", lambda _runner: found.pop() if found else None)
    file = CostFile(tmp_path, bytes(32), "a GPU")

    def start() -> Any:
        runner.share_cost = TRITON
        remembered_costs(runner, SMALL, CostFile(tmp_path, bytes(32), "a GPU"), budget_s=0.1)
        return runner.share_cost

    for _ in range(2):  # the second time nothing is measured again
        assert start() == replace(TRITON, **H100)
    content = json.loads(file.path.read_text())
    for broken in ([1], {"key_many": 1.0}, {**H100, "merge": -1.0}, {**H100, "piece": "x"}):
        file.path.write_text(json.dumps({**content, "share_cost": broken}))
        assert start() == TRITON
    found.append(H100)
    file.path.write_text(json.dumps({name: value for name, value in content.items() if name != "share_cost"}))
    start()  # costs of before: the constants are measured and kept beside them
    assert json.loads(file.path.read_text()) == content


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_measures_its_own_constants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MNEME_CACHE_DIR", str(tmp_path))
    config = replace(SMALL, device="cuda", dtype="bfloat16", num_pages=256)
    engine = build_engine("mneme-tiny", config, cache=CacheConfig(enabled=False))
    engine.close()
    (file,) = tmp_path.glob("costs-*.json")
    kept = json.loads(file.read_text())["share_cost"]
    assert kept is not None
    assert engine.runner.share_cost == replace(TRITON, **kept)


def test_edges_that_can_be_measured_are_and_leave_nothing(tmp_path: Path) -> None:
    edges = measured_edges(1 << 16, tmp_path, budget_s=30)
    assert set(edges) == {"host", "disk"}
    for points in edges.values():
        assert sum(fit(points)) > 0
        assert {point.terms[1] for point in points} == {1, 8}
    assert not list(tmp_path.iterdir())
    assert set(measured_edges(1000, None)) == set(measured_edges(1000, tmp_path / "no-such")) == {"host"}


def test_time_for_edges_is_bounded(tmp_path: Path) -> None:
    ticks = iter(range(1000))
    edges = measured_edges(1000, tmp_path, budget_s=5, clock=lambda: float(next(ticks)))
    assert set(edges) == {"host"}
    assert next(ticks) < 20


TIMINGS = [Timing("product", "bfloat16", 64, 2.0, 1.0), Timing("product", "float32", 64, 3.0, 4.0)]


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """An empty cache folder; a number for each time that a machine is measured."""
    times: list[int] = []
    monkeypatch.setenv("MNEME_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(choice, "measured_timings", lambda: times.append(1) or TIMINGS)
    monkeypatch.setattr(choice, "library", lambda: None)
    choice.machine_choice.cache_clear()  # of this process: others are played
    return times


def test_a_machine_is_measured_once(measured: list[int]) -> None:
    for _ in range(2):
        assert choice.machine_choice() == Choice("bfloat16", CpuKernels(product_rows=64), CpuKernels())
        choice.machine_choice.cache_clear()  # another process
    assert measured == [1]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        '{"format": "another"}',
        '{"timings": []}',
        '{"timings": [["product", "bfloat16", 1e400, 1, 1]]}',
        '{"timings": [["product", "int8", 1, 1, 1]]}',
    ],
)
def test_what_cannot_be_used_is_measured_again(content: str, measured: list[int], tmp_path: Path) -> None:
    choice.machine_choice()
    (kept,) = tmp_path.glob("timings-*.json")
    known = json.loads(kept.read_text())
    kept.write_text(content.replace("{", f'{{"format": "{known["format"]}", ', 1) if "timings" in content else content)
    choice.machine_choice.cache_clear()
    choice.machine_choice()
    assert measured == [1, 1]
    assert json.loads(kept.read_text()) == known


def test_both_arms_are_timed_in_both_dtypes_until_the_budget_is_spent() -> None:
    for budget_s, num_found in ((25.0, 2), (38.0, 3), (1e6, 4)):
        ticks = itertools.count()
        tick = partial(next, ticks)
        before = torch.get_num_threads()
        found = choice.measured_timings((1,), (32,), budget_s, clock=tick, wall=tick)
        assert torch.get_num_threads() == before
        dtypes, sizes = ("bfloat16", "float32"), (("product", 1), ("attention", 32))
        wanted = [(work, dtype, rows) for work, rows in sizes for dtype in dtypes]
        assert [each[:3] for each in found] == wanted[:num_found]
        assert {each[3:] for each in found} == {(1.0, 1.0)}


def test_an_engine_gets_who_is_faster_where_it_may_differ(measured: list[int]) -> None:
    cpu = torch.device("cpu")
    assert build.choose_kernels("auto", cpu, torch.float32) == CpuKernels()
    assert build.choose_kernels("invariant", cpu, torch.bfloat16) == CpuKernels()
    assert not measured, "nothing is measured that decides nothing"
    assert build.choose_kernels("auto", cpu, torch.bfloat16) == CpuKernels(product_rows=64)
    assert build.choose_kernels("fastest", cpu, torch.float32) == CpuKernels()
    assert build.choose_kernels("auto", torch.device("cuda"), torch.bfloat16) == CpuKernels()


@needs_native
def test_in_float32_answers_are_the_same_whoever_computes_and_where_a_stream_is_resumed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    by_torch = CpuKernels(product_rows=8, prompt_rows=8)
    monkeypatch.setattr(build, "machine_choice", lambda: Choice("bfloat16", by_torch, by_torch))
    ids, said = [*range(20, 60)], dict[str, list[int]]()
    for use in ("auto", "invariant", "fastest"):
        engine = small_engine(cpu_kernels=use)
        submit(engine, use, ids, 24)
        said |= answers(run(engine))
    assert engine_stats(engine)["kernels"] == "products by torch from 8 rows, prompts by torch from 8 rows"
    submit(engine, "resumed", ids + said["fastest"][:9], 15)
    submit(engine, "beside", ids[5:], 15)
    said |= answers(run(engine))
    assert said["fastest"] == said["invariant"] == said["auto"]
    assert said["resumed"] == said["fastest"][9:]
