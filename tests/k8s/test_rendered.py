"""k8s/kustomize: no unknown field anywhere, an application that builds, pods that fit it, selectors that find them."""

from __future__ import annotations

import importlib.metadata
import os
import re
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

import mneme.cluster.run
from mneme.cachetier.config import SESSION_LOG_BYTES
from mneme.cluster.config import ClusterConfig
from mneme.cluster.serve.gpus import place_models
from mneme.config import parse
from mneme.errors import ConfigError
from tests.docker.dockerfile import DOCKERFILE
from tests.k8s.renders import (
    NAMES,
    Manifest,
    arguments,
    check,
    container,
    environment,
    of_kind,
    pods,
    ray_service,
    rendered,
    serve_config,
)

QUANTITIES = {"Mi": 2**20, "Gi": 2**30}
# What `mneme serve` sets and pods do not: files and ports of one machine, and what makes an idle machine quiet.
OF_ONE_MACHINE = re.compile(
    r"RAY_SERVE_(HAPROXY_(CONFIG_FILE_LOC|\w*SOCKET_PATH|SERVER_STATE_\w+)|FALLBACK_\w+|DIRECT_INGRESS_M\w+_HTTP_PORT"
    r"|METRICS_EXPORT_INTERVAL_MS|CONTROL_LOOP_INTERVAL_S"
    r"|MAX_PER_REPLICA_RETRY_COUNT|LOG_TO_STDERR)"  # a cluster tries again; its logs are its pods'
)
OTHERWISE = {  # paths of the image; pods need time to learn of a stop
    "RAY_SERVE_HAPROXY_BINARY_PATH", "MNEME_HAPROXY", "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S"
}  # fmt: skip


@pytest.fixture(params=NAMES)
def manifests(request: pytest.FixtureRequest) -> list[Manifest]:
    return rendered(request.param)


@pytest.fixture
def config(manifests: list[Manifest]) -> ClusterConfig:
    return parse(ClusterConfig, arguments(manifests))


def unknown_keys(model: type[BaseModel], given: Mapping[str, Any]) -> list[str]:
    """Ray's own validation accepts unknown keys; this does not."""
    return [key for key in given if key not in model.model_fields]


def test_the_schemas_accept_it(manifests: list[Manifest]) -> None:
    for manifest in manifests:
        check(manifest)


def test_the_serve_config_has_only_known_keys(manifests: list[Manifest]) -> None:
    from ray.serve.schema import HTTPOptionsSchema, ServeApplicationSchema, ServeDeploySchema

    loaded = serve_config(manifests)
    ServeDeploySchema.model_validate(loaded)
    assert unknown_keys(ServeDeploySchema, loaded) == []
    assert unknown_keys(HTTPOptionsSchema, loaded["http_options"]) == []
    (application,) = loaded["applications"]
    assert unknown_keys(ServeApplicationSchema, application) == []


def test_the_application_builds_from_its_arguments() -> None:
    from mneme.cluster import app
    from tests.cluster.serve.deployments import bound

    (application,) = serve_config(rendered("cpu"))["applications"]
    module, _, name = application["import_path"].partition(":")
    assert (module, getattr(app, name)) == (app.__name__, app.build)
    assert bound(app.build(application["args"])).name == app.INGRESS_DEPLOYMENT
    with pytest.raises(ConfigError, match="unknown key"):
        app.build({**application["args"], "replica": 2})


def test_the_version_is_the_one_that_is_tested(manifests: list[Manifest]) -> None:
    assert ray_service(manifests)["spec"]["rayClusterConfig"]["rayVersion"] == importlib.metadata.version("ray")


def test_every_pod_is_confined(manifests: list[Manifest]) -> None:
    autoscaler = ray_service(manifests)["spec"]["rayClusterConfig"].get("autoscalerOptions")
    assert autoscaler is None or autoscaler["securityContext"]["allowPrivilegeEscalation"] is False
    for pod in pods(manifests).values():
        assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
        for each in (*pod["spec"]["containers"], *pod["spec"].get("initContainers", [])):
            assert each["securityContext"]["allowPrivilegeEscalation"] is False
            assert each["securityContext"]["capabilities"]["drop"] == ["ALL"]
            # One gives a folder of the node to user 1000, and may do nothing else.
            if each["securityContext"].get("runAsUser") == 0:
                assert (each["name"], each["securityContext"]["capabilities"]["add"]) == ("own-kv", ["CHOWN"])
                assert each["command"] == ["chown", "1000:1000", "/kv"]


def test_every_pod_has_what_mneme_serve_sets(manifests: list[Manifest], config: ClusterConfig, tmp_path: Path) -> None:
    from mneme.cluster.run.environment import cluster_environment

    serves = cluster_environment(config, "", tmp_path)
    for pod in pods(manifests).values():
        has = environment(pod)
        assert {name: has[name] for name in has.keys() & serves.keys() - OTHERWISE} == {
            name: serves[name] for name in has.keys() & serves.keys() - OTHERWISE
        }
        missing = serves.keys() - has.keys()
        assert {
            name for name in missing if name.startswith("RAY_SERVE_") and not OF_ONE_MACHINE.fullmatch(name)
        } == set()
        assert "serve" in {port["name"] for port in container(pod)["ports"]}


def test_haproxy_is_started_without_its_unguarded_ports(manifests: list[Manifest]) -> None:
    """By the script that does it for `mneme serve`; the image has it, and what it starts, where the pods look."""
    linked = {f"/usr/local/bin/{name}" for name in re.findall(r'"\$bin/(\S+)"', DOCKERFILE.read_text())}
    for pod in pods(manifests).values():
        assert linked == {environment(pod)["RAY_SERVE_HAPROXY_BINARY_PATH"], environment(pod)["MNEME_HAPROXY"]}
    assert os.access(Path(mneme.cluster.run.__path__[0]) / "haproxy.sh", os.X_OK)


def test_the_head_and_the_workers_differ_in_nothing_that_replicas_see(manifests: list[Manifest]) -> None:
    head, worker = pods(manifests).values()
    assert environment(head) == environment(worker)


def test_the_object_store_fits_its_shared_memory(manifests: list[Manifest]) -> None:
    cluster = ray_service(manifests)["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]
        (shm,) = [each for each in pod["spec"]["volumes"] if each.get("emptyDir", {}).get("medium") == "Memory"]
        assert int(group["rayStartParams"]["object-store-memory"]) < int(shm["emptyDir"]["sizeLimit"])
        memory = container(pod)["resources"]["limits"]["memory"]
        assert int(shm["emptyDir"]["sizeLimit"]) < int(memory[:-2]) * QUANTITIES[memory[-2:]]
        assert {"name": shm["name"], "mountPath": "/dev/shm"} in container(pod)["volumeMounts"]


def test_what_lies_on_a_nodes_disk_is_asked_for(manifests: list[Manifest], config: ClusterConfig) -> None:
    for pod in pods(manifests).values():
        volumes = [each["emptyDir"] for each in pod["spec"]["volumes"] if "emptyDir" in each]
        sizes = [int(each["sizeLimit"]) for each in volumes if "sizeLimit" in each and "medium" not in each]
        assert int(container(pod)["resources"]["requests"]["ephemeral-storage"]) > sum(sizes)
    (kv,) = [each for each in pods(manifests)["worker"]["spec"]["volumes"] if each["name"] == "kv"]
    if "emptyDir" in kv:
        assert config.cache.disk is not None
        needed = config.cache.disk.capacity_bytes + SESSION_LOG_BYTES
        assert int(kv["emptyDir"]["sizeLimit"]) > needed


def test_what_the_configuration_names_is_mounted(manifests: list[Manifest], config: ClusterConfig) -> None:
    mounted = {each["mountPath"]: each for each in container(pods(manifests)["worker"])["volumeMounts"]}
    assert config.cache.disk is not None
    assert config.cache.disk.folder in mounted
    for file in filter(None, (config.http.keys_file, config.model if "/" in config.model else None)):
        assert mounted[str(Path(file).parent)]["readOnly"] is True
    if config.http.keys_file:  # the application is built on the head
        assert "/etc/mneme" in {each["mountPath"] for each in container(pods(manifests)["head"])["volumeMounts"]}


def test_no_two_pods_are_on_one_folder(manifests: list[Manifest]) -> None:
    group = ray_service(manifests)["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]
    pod = pods(manifests)["worker"]
    (kv,) = [each for each in pod["spec"]["volumes"] if each["name"] == "kv"]
    if "hostPath" in kv:
        (term,) = pod["spec"]["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        assert term["topologyKey"] == "kubernetes.io/hostname"
        assert term["labelSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    if "persistentVolumeClaim" in kv:
        assert group["maxReplicas"] == 1


def test_replicas_and_ingresses_fit_the_workers_and_not_the_head(
    manifests: list[Manifest], config: ClusterConfig
) -> None:
    cluster = ray_service(manifests)["spec"]["rayClusterConfig"]
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    assert config.cpus_per_replica > 0
    assert config.ingress.cpus > 0
    (group,) = cluster["workerGroupSpecs"]
    limits = container(pods(manifests)["worker"])["resources"]["limits"]
    (placement,) = place_models(config, 0, may_grow=True)
    ingresses = config.ingress.replicas * config.ingress.cpus
    assert placement.replicas * config.cpus_per_replica + ingresses <= group["minReplicas"] * int(limits["cpu"])
    most = placement.replicas if config.autoscale is None else config.autoscale.max
    assert (placement.replicas, most) == (group["minReplicas"], group["maxReplicas"])
    assert cluster["enableInTreeAutoscaling"] is (most > placement.replicas)
    assert int(limits.get("nvidia.com/gpu", 0)) == placement.gpus_per_replica
    head = container(pods(manifests)["head"])["resources"]
    assert "nvidia.com/gpu" not in head["limits"]


def test_a_pod_that_ends_gives_its_streams_their_time(manifests: list[Manifest], config: ClusterConfig) -> None:
    pod = pods(manifests)["worker"]
    grace = pod["spec"]["terminationGracePeriodSeconds"]
    script = container(pod)["lifecycle"]["preStop"]["exec"]["command"][-1]
    (deadline,) = re.findall(r"--deadline-remaining-seconds (\d+)", script)
    # Serve stops an ingress this long before the deadline, whether its successor runs or not.
    assert grace > int(deadline) > config.ingress.drain_s + config.start_timeout_s
    assert int(environment(pod)["RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"]) >= config.ingress.drain_s
    assert ray_service(manifests)["spec"]["rayClusterDeletionDelaySeconds"] >= grace
    for route in of_kind(manifests, "HTTPRoute"):
        (rule,) = route["spec"]["rules"]
        assert {float(each.removesuffix("s")) for each in rule["timeouts"].values()} == {config.ingress.drain_s}


def test_a_pod_that_ends_sees_streams_and_replicas() -> None:
    """By its own function, of a port and an application that nobody else has."""
    script = container(pods(rendered("cpu"))["worker"])["lifecycle"]["preStop"]["exec"]["command"][-1]
    (function,) = re.findall(r"^busy\(\) \{.*?^\}", script, re.MULTILINE | re.DOTALL)
    application = f"mneme-{os.getpid()}"
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]
        function = function.replace("1F40", f"{port:04X}").replace("ServeReplica:mneme", f"ServeReplica:{application}")

        def is_busy(seconds: int = 0, drains: str = "1") -> bool:
            command = ["bash", "-c", f"{function}\nSECONDS={seconds} drains={drains}; busy"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=60)
            assert done.stderr == ""
            return done.returncode == 0

        assert not is_busy()
        with socket.create_connection(("127.0.0.1", port)), door.accept()[0]:
            assert is_busy(3000)
            assert is_busy(drains="")
        for deployment, is_awaited in (("ingress", True), ("engine", False), ("engine-2", False)):
            title = f"ray::ServeReplica:{application}:{deployment}"
            with subprocess.Popen(["bash", "-c", f"exec -a {title} sleep 60"]) as replica:
                while title not in Path(f"/proc/{replica.pid}/cmdline").read_text():
                    os.sched_yield()
                assert is_busy()
                assert is_busy(3000) is is_awaited  # longer than any start takes
                assert not is_busy(drains="")  # nobody ends it
                replica.kill()
        assert not is_busy()


def test_a_slow_start_is_not_the_end_of_a_pod(manifests: list[Manifest], config: ClusterConfig) -> None:
    probe = container(pods(manifests)["worker"])["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= config.start_timeout_s
    for pod in pods(manifests).values():
        assert {"startupProbe", "readinessProbe", "livenessProbe"} <= container(pod).keys()


def test_selectors_find_the_pods_that_they_mean(manifests: list[Manifest]) -> None:
    labels = {component: pod["metadata"]["labels"] for component, pod in pods(manifests).items()}

    def found(selector: Manifest) -> set[str]:
        return {component for component, has in labels.items() if selector["matchLabels"].items() <= has.items()}

    for kind in ("PodDisruptionBudget", "PodMonitor"):
        for each in of_kind(manifests, kind):
            assert found(each["spec"]["selector"]) == {each["metadata"]["name"].rpartition("-")[2]}
    budgets = {each["metadata"]["name"].rpartition("-")[2] for each in of_kind(manifests, "PodDisruptionBudget")}
    outlives = "gcsFaultToleranceOptions" in ray_service(manifests)["spec"]["rayClusterConfig"]
    assert budgets == ({"worker"} if outlives else {"head", "worker"})
    (policy,) = of_kind(manifests, "NetworkPolicy")
    assert found(policy["spec"]["podSelector"]) == {"head", "worker"}
    assert found(policy["spec"]["ingress"][0]["from"][0]["podSelector"]) == {"head", "worker"}


def test_ports_are_those_of_containers(manifests: list[Manifest]) -> None:
    ports = {component: container(pod)["ports"] for component, pod in pods(manifests).items()}
    for monitor in of_kind(manifests, "PodMonitor"):
        component = monitor["metadata"]["name"].rpartition("-")[2]
        asked = {each["port"] for each in monitor["spec"]["podMetricsEndpoints"]}
        assert asked <= {each["name"] for each in ports[component]}
        # /metrics is of the whole cluster: through two doors each figure would count twice.
        assert ("serve" in asked) is (component == "head")
    (policy,) = of_kind(manifests, "NetworkPolicy")
    _own, _operator, clients, *prometheus = policy["spec"]["ingress"]
    assert [each["port"] for each in clients["ports"]] == [8000]
    open_ports = {each["port"] for rule in policy["spec"]["ingress"] for each in rule.get("ports", [])}
    assert open_ports <= {each["containerPort"] for each in ports["head"]}
    assert bool(prometheus) is bool(of_kind(manifests, "PodMonitor"))
    for route in of_kind(manifests, "HTTPRoute"):
        (backend,) = route["spec"]["rules"][0]["backendRefs"]
        # As KubeRay names the service of a RayService.
        assert backend == {"name": f"{ray_service(manifests)['metadata']['name']}-serve-svc", "port": 8000}
