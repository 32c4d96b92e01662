"""What a replica reports, what Serve's controller makes of it, and whom it stops."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve._private import deployment_scheduler
from ray.serve._private.common import DeploymentID, ReplicaID, TimeStampedValue
from ray.serve.config import AutoscalingConfig

from mneme.cluster.app import build_application
from mneme.cluster.config import ClusterConfig
from mneme.cluster.serve import autoscaling, ray_private
from mneme.cluster.serve.autoscaling import AutoscalingPolicy, LoadMeter, serve_options
from mneme.cluster.serve.gpus import place_engines
from mneme.config import parse
from mneme.errors import ConfigError
from mneme.router.autoscaler import AutoscaleConfig, ReplicaLoad
from tests.cluster.serve.deployments import engines_of

pytestmark = pytest.mark.engine

ENGINE = DeploymentID(name="engine", app_name="mneme")
CPU = {"device": "cpu"}


def replica(name: str) -> ReplicaID:
    return ReplicaID(unique_id=name, deployment_id=ENGINE)


def stats(computed: int = 0, alone: int = 0, token_s: float = 0.001, running: int = 0) -> dict[str, Any]:
    return {
        "load": {"backlog_s": 0.5, "step_s": 0.01, "constant_s": 0.004, "prefill_token_s": token_s},
        "tokens": {"computed": computed, "alone": alone},
        "pages": {"in_use": 60, "pinned": 10, "total": 100},
        "requests": {"running": running, "waiting": 1},
    }


def test_a_replica_reports_the_share_of_time_that_it_computes_prompts_and_what_its_own_kv_saves() -> None:
    now_s = 0.0
    meter = LoadMeter(lambda: now_s)
    first = meter.read(stats(computed=10**6))
    assert (first.prefill_share, first.saved_share) == (0.0, 0.0)
    for second in range(1, 601):
        now_s = float(second)
        load = meter.read(stats(computed=10**6 + 500 * second, alone=250 * second, running=3))
    assert load.prefill_share == pytest.approx(0.5, rel=0.01)
    assert load.saved_share == pytest.approx(0.25, rel=0.05)
    assert (load.backlog_s, load.step_s, load.constant_s) == (0.5, 0.01, 0.004)
    assert (load.kv_share, load.num_requests) == (0.5, 4)
    now_s += 1.0
    assert meter.read(stats(computed=0, token_s=math.nan)).prefill_share == load.prefill_share


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    noted: list[int] = []
    monkeypatch.setattr(autoscaling, "write_wanted", lambda _, wanted: noted.append(wanted))
    monkeypatch.setattr(autoscaling, "stop_first", lambda *_: None)
    return noted


def context(at_s: float, said: dict[str, ReplicaLoad], names: str = "ab", target: int = 2) -> Any:
    series: dict[str, dict[ReplicaID, list[TimeStampedValue]]] = {}
    for name, load in said.items():
        for metric, value in asdict(load).items():
            series.setdefault(metric, {})[replica(name)] = [
                TimeStampedValue(at_s - 1, 0.0),
                TimeStampedValue(at_s, value),
            ]
    return SimpleNamespace(
        target_num_replicas=target,
        running_replicas=[replica(name) for name in names],
        raw_metrics=series,
        current_time=at_s,
    )


def test_the_policy_goes_by_the_latest_report_of_each_replica(noted: list[int]) -> None:
    policy = AutoscalingPolicy(deployment="engine", min=1, max=4, upscale_delay_s=0, downscale_delay_s=0)
    busy = {"a": ReplicaLoad(backlog_s=1.5), "b": ReplicaLoad(backlog_s=1.5)}
    assert policy(context(1.0, busy)) == (3, {})
    assert policy(context(2.0, {"a": ReplicaLoad(), "b": ReplicaLoad()})) == (1, {})
    assert noted == [3, 1]


def test_old_reports_are_silence(noted: list[int]) -> None:
    policy = AutoscalingPolicy(deployment="engine", min=1, max=4, upscale_delay_s=0, downscale_delay_s=0)
    policy(context(1.0, {"a": ReplicaLoad(prefill_share=0.8), "b": ReplicaLoad(prefill_share=0.8)}))
    for second in range(100):
        seen = context(1.0, {"a": ReplicaLoad(), "b": ReplicaLoad()})
        seen.current_time = 1.0 + second
        assert policy(seen) == (2 if second > 30 else 3, {})


@pytest.mark.parametrize("broken", [{"raw_metrics": {"backlog_s": 7}}, {"running_replicas": None}])
def test_a_policy_that_fails_changes_nothing(
    noted: list[int], broken: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    policy = AutoscalingPolicy(deployment="engine", min=1, max=4, upscale_delay_s=0)
    seen = context(1.0, {"a": ReplicaLoad(backlog_s=9.0)})
    vars(seen).update(broken)
    assert policy(seen) == (2, {})
    assert "autoscaling failed" in caplog.text


class Scheduler:
    """In the place of Serve's: the newest go first."""

    def __init__(self, running: Sequence[str], starting: Sequence[str] = ()) -> None:
        self._running_replicas = {ENGINE: {replica(name): "node" for name in running}}
        self._starting = [replica(name) for name in starting]

    def _get_replicas_to_stop(
        self, deployment_id: DeploymentID, max_num_to_stop: int, **options: Any
    ) -> set[ReplicaID]:
        newest = reversed(list(self._running_replicas[deployment_id]))
        return set([*self._starting, *newest][:max_num_to_stop])


@pytest.mark.parametrize(
    ("running", "starting", "order", "count", "stopped"),
    [
        ("abc", "", "bac", 1, "b"),
        ("abc", "", "bac", 2, "ab"),
        ("abc", "xy", "bac", 1, "x"),
        ("abc", "x", "bac", 2, "xb"),
        ("abc", "", "zyb", 2, "bc"),
        ("abc", "", "", 1, "c"),
    ],
)
def test_whom_the_policy_names_is_stopped_first(
    monkeypatch: pytest.MonkeyPatch, running: str, starting: str, order: str, count: int, stopped: str
) -> None:
    orders: dict[str, Callable[[], Sequence[str]]] = {}
    monkeypatch.setattr(deployment_scheduler, "DeploymentScheduler", type("Played", (Scheduler,), {}))
    monkeypatch.setattr(ray_private, "_STOP_ORDERS", orders)
    ray_private.stop_first("engine", lambda: list(order))
    scheduler = deployment_scheduler.DeploymentScheduler(running, starting)
    found = scheduler._get_replicas_to_stop(ENGINE, count, gang_size=None)
    assert {each.unique_id for each in found} == set(stopped)
    orders.clear()
    assert len(scheduler._get_replicas_to_stop(ENGINE, count)) == count


def test_the_applications_bounds_are_serves() -> None:
    config = parse(ClusterConfig, {"engine": CPU, "autoscale": {"min": 0, "max": 3}})
    placement = place_engines(config, 0)
    assert placement.replicas == 1
    engines = engines_of(build_application(config, [placement]))
    bounds = engines._deployment_config.autoscaling_config
    assert (bounds.min_replicas, bounds.initial_replicas, bounds.max_replicas) == (0, 1, 3)
    assert bounds.policy.get_policy() is AutoscalingPolicy


def test_bounds_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="beside autoscale"):
        parse(ClusterConfig, {"replicas": 2, "autoscale": {"max": 3}})
    with pytest.raises(ConfigError, match=r"autoscale\.min: must be from 0 to 3"):
        parse(ClusterConfig, {"autoscale": {"min": 4, "max": 3}})
    with pytest.raises(ConfigError, match="replicas: 3 with 1 GPU each do not fit on 2"):
        place_engines(parse(ClusterConfig, {"engine": {"device": "cuda"}, "autoscale": {"max": 3}}), 2)


def test_serve_takes_our_options_without_a_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        AutoscalingConfig(**serve_options(AutoscaleConfig(), "engine"))


def test_what_engines_do_not_read_may_change_without_a_restart_of_theirs() -> None:
    """Serve compares what a deployment is bound with, and starts its replicas anew where that differs."""

    def bound(given: dict[str, Any]) -> tuple[Any, ...]:
        config = parse(ClusterConfig, {"engine": CPU, **given})
        args: tuple[Any, ...] = engines_of(build_application(config, [place_engines(config, 0)])).init_args
        return args

    changes = {
        "replicas": 5,
        "autoscale": {"min": 0, "max": 3},
        "http": {"keys_file": "/keys.yaml"},
        "router": {"policy": "random"},
        "ingress": {"replicas": 2},
    }
    for name, change in changes.items():
        assert bound({name: change}) == bound({}), name
    assert bound({"engine": {**CPU, "num_pages": 7}}) != bound({})
