"""Where engines are placed, with GPUs that are only counted."""

from __future__ import annotations

from typing import Any

import pynvml
import pytest

from mneme.cluster.app import build_application
from mneme.cluster.config import ClusterConfig
from mneme.cluster.serve.gpus import EnginePlacement, count_gpus, count_machine_gpus, place_engines, place_models
from mneme.config import parse
from mneme.errors import ConfigError
from tests.cluster.serve.deployments import engines_of

pytestmark = pytest.mark.engine

CUDA = {"device": "cuda"}


@pytest.mark.parametrize(
    ("given", "num_gpus", "placement"),
    [
        ({}, 0, (2, "cpu", 0.0)),
        ({}, 8, (8, "cuda", 1.0)),
        ({"replicas": 3}, 8, (3, "cuda", 1.0)),
        ({"gpus_per_replica": 0.3}, 2, (6, "cuda", 0.3)),
        ({"gpus_per_replica": 0}, 8, (2, "cpu", 0.0)),
        ({"engine": {"device": "cpu"}}, 8, (2, "cpu", 0.0)),
        ({"engine": CUDA, "replicas": 2, "gpus_per_replica": 0.5}, 1, (2, "cuda", 0.5)),
    ],
)
def test_each_replica_has_a_gpu_of_its_own_unless_a_share_is_asked_for(
    given: dict[str, Any], num_gpus: int, placement: tuple[int, str, float]
) -> None:
    assert place_engines(parse(ClusterConfig, given), num_gpus) == EnginePlacement(*placement)


@pytest.mark.parametrize(
    ("given", "num_gpus", "message"),
    [
        ({"replicas": 2}, 1, r"replicas: 2 with 1 GPU each do not fit on 1; a smaller gpus_per_replica"),
        ({"gpus_per_replica": 1}, 0, r"engine.device: there is no GPU; .* cpu serves without"),
        ({"engine": CUDA, "gpus_per_replica": 0}, 4, r"gpus_per_replica: an engine on a GPU needs one"),
        ({"engine": {"device": "cpu"}, "gpus_per_replica": 1}, 4, r"gpus_per_replica: engine.device is cpu"),
        ({"engine": {"device": "cuda:1"}}, 4, r"engine.device: Ray chooses each replica's GPU; say cuda"),
        ({"gpus_per_replica": 2}, 4, r"gpus_per_replica: must be from 0 to 1"),
    ],
)
def test_what_cannot_be_placed_is_refused_before_anything_starts(
    given: dict[str, Any], num_gpus: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        place_engines(parse(ClusterConfig, given), num_gpus)


OTHER = {"model": "/models/other"}


@pytest.mark.parametrize(
    ("first", "other", "num_gpus", "placements"),
    [
        ({}, {}, 0, [(2, "cpu", 0.0), (2, "cpu", 0.0)]),
        ({}, {"replicas": 3}, 8, [(5, "cuda", 1.0), (3, "cuda", 1.0)]),
        ({"autoscale": {"min": 2, "max": 4}}, {}, 8, [(2, "cuda", 1.0), (6, "cuda", 1.0)]),
        ({"gpus_per_replica": 0.5}, {"gpus_per_replica": 0.5}, 2, [(2, "cuda", 0.5), (2, "cuda", 0.5)]),
        ({}, {"engine": {"device": "cpu"}}, 8, [(8, "cuda", 1.0), (2, "cpu", 0.0)]),
        ({}, {"gpus_per_replica": 0}, 8, [(8, "cuda", 1.0), (2, "cpu", 0.0)]),
    ],
)
def test_models_share_the_gpus(
    first: dict[str, Any], other: dict[str, Any], num_gpus: int, placements: list[tuple[int, str, float]]
) -> None:
    config = parse(ClusterConfig, {**first, "models": [{**OTHER, **other}]})
    assert place_models(config, num_gpus) == tuple(EnginePlacement(*each) for each in placements)


@pytest.mark.parametrize(("first", "other", "num_gpus"), [({}, {}, 1), ({"replicas": 2}, {"replicas": 2}, 3)])
def test_models_that_do_not_fit_are_never_served_from_the_cpu_instead(
    first: dict[str, Any], other: dict[str, Any], num_gpus: int
) -> None:
    config = parse(ClusterConfig, {**first, "models": [{**OTHER, **other}]})
    with pytest.raises(ConfigError, match=f"models: 2 do not fit on {num_gpus} GPUs"):
        place_models(config, num_gpus)


@pytest.mark.parametrize("gpus", [0.0, 0.5, 1.0])
def test_ray_is_asked_for_each_replicas_part_of_a_gpu(gpus: float) -> None:
    placement = EnginePlacement(4, "cuda" if gpus else "cpu", gpus)
    engines = engines_of(build_application(ClusterConfig(), [placement]))
    assert (engines.num_replicas, engines.ray_actor_options["num_gpus"]) == (4, gpus)


def test_where_nodes_may_join_later_their_gpus_need_not_be_there_yet() -> None:
    config = parse(ClusterConfig, {"engine": CUDA, "replicas": 4})
    assert place_engines(config, 0, may_grow=True) == EnginePlacement(4, "cuda", 1.0)


@pytest.mark.parametrize(
    ("visible", "count"),
    [
        (None, 4),
        ("", 0),
        ("NoDevFiles", 0),
        ("0, 3", 2),
        ("GPU-1a,GPU-2b", 2),
        ("0,1,2,3,4", 4),
        ("0,-1,1", 1),
        ("0,9,1", 1),
        ("MIG-a,MIG-b,MIG-c,MIG-d,MIG-e", 5),
        ("MIG-a,0", 1),
    ],
)
def test_gpus_are_counted_that_processes_may_use(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, count: int
) -> None:
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert (count_gpus(), count_machine_gpus()) == (count, max(count, 4))


@pytest.mark.parametrize("fails", ["nvmlInit", "nvmlDeviceGetCount"])
def test_without_a_driver_that_answers_there_are_none(monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    def lost() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-a")
    for name in ("nvmlInit", "nvmlShutdown", "nvmlDeviceGetCount"):
        monkeypatch.setattr(pynvml, name, lost if name == fails else lambda: None)
    assert (count_gpus(), count_machine_gpus()) == (0, 0)
