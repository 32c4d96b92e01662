"""k8s/rayservice*.yaml: no unknown field anywhere, an application that builds, and pods that fit it."""

from __future__ import annotations

import copy
import importlib.metadata
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from pydantic import BaseModel

import mneme.cluster.run
from mneme.cluster.config import ClusterConfig
from mneme.cluster.serve.gpus import place_engines
from mneme.config import parse
from mneme.errors import ConfigError
from tests.docker.dockerfile import DOCKERFILE
from tests.k8s.rayservice_schema import RAY_SERVICE

FOLDER = Path(__file__).parents[2] / "k8s"
RESOURCES = ("cpu", "memory", "nvidia.com/gpu")
QUANTITIES = {"Mi": 2**20, "Gi": 2**30}


@pytest.fixture(params=["rayservice.yaml", "rayservice-gpu.yaml"])
def manifest(request: pytest.FixtureRequest) -> dict[str, Any]:
    return load(request.param)


def load(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((FOLDER / name).read_text())
    return loaded


@pytest.fixture
def serve_config(manifest: dict[str, Any]) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(manifest["spec"]["serveConfigV2"])
    return loaded


def containers(manifest: dict[str, Any]) -> list[tuple[Mapping[str, Any], dict[str, Any]]]:
    """(rayStartParams, pod spec) of every group."""
    cluster = manifest["spec"]["rayClusterConfig"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    return [(group["rayStartParams"], group["template"]["spec"]) for group in groups]


def unknown_keys(model: type[BaseModel], given: Mapping[str, Any]) -> list[str]:
    """Ray's own validation accepts unknown keys; this does not."""
    return [key for key in given if key not in model.model_fields]


def test_the_schema_accepts_it(manifest: dict[str, Any]) -> None:
    jsonschema.Draft202012Validator(RAY_SERVICE).validate(manifest)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "rayClusterConfig", "workerGroupSpecs", 0, "minReplica"), 1),
        (("spec", "rayClusterConfig", "headGroupSpec", "rayStartParams", "num-cpus"), 0),
        (("spec", "serveConfigV3"), "x"),
        (("spec", "rayClusterConfig", "workerGroupSpecs", 0, "template", "spec", "containers", 0, "ports", 0), {}),
        (("spec", "rayClusterConfig", "authOptions", "mode"), "tokens"),
    ],
)
def test_the_schema_refuses_a_typo(manifest: dict[str, Any], path: tuple[str | int, ...], value: object) -> None:
    broken: Any = copy.deepcopy(manifest)
    node = broken
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(RAY_SERVICE).validate(broken)


def test_the_serve_config_has_only_known_keys(serve_config: dict[str, Any]) -> None:
    from ray.serve.schema import HTTPOptionsSchema, ServeApplicationSchema, ServeDeploySchema

    ServeDeploySchema.model_validate(serve_config)
    assert unknown_keys(ServeDeploySchema, serve_config) == []
    assert unknown_keys(HTTPOptionsSchema, serve_config["http_options"]) == []
    (application,) = serve_config["applications"]
    assert unknown_keys(ServeApplicationSchema, application) == []


def test_the_application_builds_from_its_arguments(serve_config: dict[str, Any]) -> None:
    from mneme.cluster import app

    (application,) = serve_config["applications"]
    module, _, name = application["import_path"].partition(":")
    assert (module, getattr(app, name)) == (app.__name__, app.build)
    bound = app.build(application["args"])
    assert bound._bound_deployment.name == app.INGRESS_DEPLOYMENT
    with pytest.raises(ConfigError, match="unknown key"):
        app.build({**application["args"], "replica": 2})


def test_the_configuration_survives_the_way_to_a_replica(serve_config: dict[str, Any]) -> None:
    config = parse(ClusterConfig, serve_config["applications"][0]["args"])
    assert parse(ClusterConfig, yaml.safe_load(yaml.safe_dump(config.as_mapping()))) == config


def test_the_version_is_the_one_that_is_tested(manifest: dict[str, Any]) -> None:
    assert manifest["spec"]["rayClusterConfig"]["rayVersion"] == importlib.metadata.version("ray")


def test_every_pod_is_confined_and_has_haproxy(manifest: dict[str, Any]) -> None:
    for _, pod in containers(manifest):
        assert pod["securityContext"]["runAsNonRoot"] is True
        for container in pod["containers"]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]
            assert {"name": "RAY_SERVE_ENABLE_HA_PROXY", "value": "1"} in container["env"]
            assert {"name": "serve", "containerPort": 8000} in container["ports"]
            assert container["readinessProbe"]
            assert container["livenessProbe"]


def test_haproxy_is_started_without_its_unguarded_ports(manifest: dict[str, Any], serve_config: dict[str, Any]) -> None:
    """By the script that does it for `mneme serve`; the image has it, and what it starts, where the pods look."""
    http = parse(ClusterConfig, serve_config["applications"][0]["args"]).http
    for _, pod in containers(manifest):
        environment = {entry["name"]: entry["value"] for entry in pod["containers"][0]["env"]}
        assert environment["MNEME_CONNECTIONS_PER_ADDRESS"] == str(http.max_connections_per_address)
        linked = {f"/usr/local/bin/{name}" for name in re.findall(r'"\$bin/(\S+)"', DOCKERFILE.read_text())}
        assert linked == {environment["RAY_SERVE_HAPROXY_BINARY_PATH"], environment["MNEME_HAPROXY"]}
    assert os.access(Path(mneme.cluster.run.__path__[0]) / "haproxy.sh", os.X_OK)


def test_the_head_and_the_workers_differ_in_nothing_that_replicas_see(manifest: dict[str, Any]) -> None:
    environments = [
        {entry["name"]: entry["value"] for entry in pod["containers"][0]["env"]} for _, pod in containers(manifest)
    ]
    assert all(environment == environments[0] for environment in environments)


def test_the_object_store_fits_its_shared_memory(manifest: dict[str, Any]) -> None:
    for ray_start_params, pod in containers(manifest):
        (shm,) = [volume for volume in pod["volumes"] if volume["emptyDir"].get("medium") == "Memory"]
        size = shm["emptyDir"]["sizeLimit"]
        assert int(ray_start_params["object-store-memory"]) < int(size[:-2]) * QUANTITIES[size[-2:]]
        assert {"name": shm["name"], "mountPath": "/dev/shm"} in pod["containers"][0]["volumeMounts"]


def test_replicas_and_ingresses_fit_the_workers_and_not_the_head(
    manifest: dict[str, Any], serve_config: dict[str, Any]
) -> None:
    config = parse(ClusterConfig, serve_config["applications"][0]["args"])
    (head, _), (_, worker) = containers(manifest)
    assert head["num-cpus"] == "0"
    assert config.cpus_per_replica > 0
    assert config.ingress.cpus > 0
    group = manifest["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]
    cpus = group["replicas"] * int(worker["containers"][0]["resources"]["limits"]["cpu"])
    assert config.autoscale is not None  # at the head nothing says how many GPUs will join
    needed = config.autoscale.min * config.cpus_per_replica + config.ingress.replicas * config.ingress.cpus
    assert needed <= cpus
    assert config.autoscale.max <= group["maxReplicas"]


def test_each_replica_of_the_gpu_manifest_has_a_gpu_that_its_pod_asks_for() -> None:
    manifest = load("rayservice-gpu.yaml")
    (application,) = yaml.safe_load(manifest["spec"]["serveConfigV2"])["applications"]
    placement = place_engines(parse(ClusterConfig, application["args"]), num_gpus=0, may_grow=True)
    assert (placement.device, placement.gpus_per_replica) == ("cuda", 1)
    (_, head), (_, worker) = containers(manifest)
    assert "nvidia.com/gpu" not in head["containers"][0]["resources"]["limits"]
    gpus = int(worker["containers"][0]["resources"]["limits"]["nvidia.com/gpu"])
    assert gpus * manifest["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["replicas"] == placement.replicas


def test_the_gpu_manifest_differs_from_the_other_in_what_gpus_need_alone() -> None:
    plain, gpu = load("rayservice.yaml"), load("rayservice-gpu.yaml")
    differences = {".".join(map(str, path)) for path in changed((), plain, gpu)}
    group = "spec.rayClusterConfig.workerGroupSpecs.0"
    container = f"{group}.template.spec.containers.0"
    assert differences == {
        "spec.serveConfigV2",
        "spec.rayClusterConfig.headGroupSpec.template.spec.containers.0.image",
        f"{group}.rayStartParams.object-store-memory",
        f"{group}.template.spec.tolerations",
        f"{group}.template.spec.volumes.0.emptyDir.sizeLimit",
        f"{container}.image",
        *(f"{container}.resources.{kind}.{what}" for kind in ("requests", "limits") for what in RESOURCES),
    }
    arguments = [yaml.safe_load(each["spec"]["serveConfigV2"])["applications"][0].pop("args") for each in (plain, gpu)]
    assert {".".join(map(str, path)) for path in changed((), *arguments)} == {
        "gpus_per_replica", "engine.device", "engine.num_threads"
    }  # fmt: skip


def changed(path: tuple[str | int, ...], one: Any, other: Any) -> list[tuple[str | int, ...]]:
    """Where two trees differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        keys = one.keys() | other.keys()
        return [found for key in keys for found in changed((*path, key), one.get(key), other.get(key))]
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return [found for i in range(len(one)) for found in changed((*path, i), one[i], other[i])]
    return [] if one == other else [path]
