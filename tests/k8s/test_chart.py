"""k8s/chart: what is written from it is up to date, and values that would not work are refused, and why."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from typing import Any

import jsonschema
import pytest
import yaml

from mneme.cluster.config import ClusterConfig
from mneme.config import parse
from tests.k8s.renders import CHART, NAMES, ROOT, arguments, check, of_kind, parsed, pods, ray_service, rendered

FOLDER = ROOT / "k8s" / "chart"
VALUES: dict[str, Any] = yaml.safe_load((FOLDER / "values.yaml").read_text())
needs_helm = pytest.mark.skipif(CHART["tool"]("helm") is None, reason="no helm; `make chart-tools` gets one")
needs_kubectl = pytest.mark.skipif(CHART["tool"]("kubectl") is None, reason="no kubectl; `make chart-tools` gets one")


def test_the_schema_and_the_page_are_those_of_the_values_and_the_configuration() -> None:
    assert CHART["schema_text"]() == (FOLDER / "values.schema.json").read_text()
    assert CHART["page"]() == (ROOT / "docs" / "kubernetes.md").read_text()


def test_the_schema_takes_every_option_but_those_of_the_pods() -> None:
    schema = json.loads((FOLDER / "values.schema.json").read_text())
    jsonschema.Draft7Validator.check_schema(schema)
    folder = {"folder": "/kv", "capacity_bytes": 1}
    every = json.loads(json.dumps(parse(ClusterConfig, {"replicas": 1, "cache": {"disk": folder}}).as_mapping()))
    for dotted in CHART["PODS"]:
        *parents, key = dotted.split(".")
        node = every
        for each in parents:
            node = node[each]
        del node[key]
    jsonschema.Draft7Validator(schema["properties"]["config"]).validate(every)


def test_what_the_pods_heed_has_the_products_default() -> None:
    """Or a value left out would be another one here than elsewhere."""
    product = ClusterConfig().as_mapping()
    for path, keys in CHART["READ"].items():
        for key in keys:
            ours, theirs = (node[path] if path else node for node in (VALUES["config"], product))
            if not isinstance(ours[key], Mapping) and (path, key) != ("ingress", "cpus"):
                assert ours[key] == theirs[key], key


@needs_helm
@pytest.mark.parametrize("name", NAMES)
def test_the_rendered_manifests_are_the_charts(name: str) -> None:
    assert parsed(CHART["render"](*CHART["files"]()[name])) == rendered(name)


@needs_helm
def test_helm_finds_no_fault() -> None:
    for values in CHART["files"]().values():
        done = subprocess.run(
            [CHART["tool"]("helm"), "lint", "--strict", str(FOLDER), *values], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout


@needs_kubectl
@pytest.mark.parametrize("name", NAMES)
def test_kustomize_builds_them(name: str) -> None:
    command = [CHART["tool"]("kubectl"), "kustomize", str(ROOT / "k8s" / "kustomize" / name)]
    built = parsed(subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout)
    assert sorted(map(json.dumps, map(_sorted, built))) == sorted(map(json.dumps, map(_sorted, rendered(name))))


def _sorted(node: Any) -> Any:
    if isinstance(node, Mapping):
        return {key: _sorted(node[key]) for key in sorted(node)}
    return [_sorted(each) for each in node] if isinstance(node, list) else node


def values_of(*assignments: str, file: str = "cpu") -> list[str]:
    return [*CHART["files"]()[file], *(word for each in assignments for word in ("--set-json", each))]


@needs_helm
@pytest.mark.parametrize(
    ("values", "said"),
    [
        (values_of('worker.replicas=2'), "additional properties 'replicas' not allowed"),
        (values_of('config.replica=2'), "additional properties 'replica' not allowed"),
        (values_of('config.engine.kv_bytes=2'), "additional properties 'kv_bytes' not allowed"),
        (values_of('config.port=9000'), "additional properties 'port' not allowed"),
        (values_of('config.http.api_keys=["secret"]'), "additional properties 'api_keys' not allowed"),
        (values_of('config.cache.disk.folder="/mnt"'), "additional properties 'folder' not allowed"),
        (values_of('config.engine.eviction="newest"'), "/config/engine/eviction"),
        (values_of('config.http=null'), "missing property 'http'"),
        (values_of('kv.type="nfs"'), "/kv/type"),
        (values_of('worker.terminationGracePeriodSeconds=120'), "terminationGracePeriodSeconds: must be at least"),
        (values_of('config.ingress.drain_s=7200'), "terminationGracePeriodSeconds: must be at least"),
        (values_of('kv.type="claim"', 'kv.claim="kv"'), "kv.type: claim is one folder, and 4 pods would be on it"),
        (values_of('upgradeStrategy="NewCluster"', file="gpu-nodes"), "an old and a new pod would be on one folder"),
        (values_of('kv.claim=""', file="gpu"), "kv.claim: must name"),
        (values_of('model.download="a/b"', file="gpu"), "model: claim and download exclude each other"),
        (values_of('config.model="Qwen/Qwen3-4B"', file="gpu"), "config.model: must be below /models"),
        (values_of('config.engine.device="cuda"', 'config.gpus_per_replica=1'), "limits must have nvidia.com/gpu"),
        (values_of('config.replicas=2'), "config.replicas: set config.autoscale to null beside it"),
        (values_of('config.autoscale=null'), "config: replicas or autoscale must say how many"),
        (values_of('config.autoscale.min=5', 'config.autoscale.max=2'), "autoscale.max: must be at least min, 5"),
        (values_of('config.cpus_per_replica=0'), "config.cpus_per_replica: must be over 0"),
        (values_of('config.ingress.cpus=0'), "config.ingress.cpus: must be over 0"),
        (values_of('config.models=[{"model": "b", "replicas": 1}]'), "config.models[0].cpus_per_replica: must be"),
        (values_of('redis.passwordSecret="redis"'), "redis.address: must be given"),
        (values_of('redis.address="redis"'), "/redis/address"),
        (values_of('httpRoute.enabled=true'), "httpRoute.parentRefs: must name a Gateway"),
    ],
    ids=lambda value: " ".join(value[1:]) if isinstance(value, list) else "",
)  # fmt: skip
def test_values_that_would_not_work_are_refused(values: list[str], said: str) -> None:
    with pytest.raises(subprocess.CalledProcessError) as refused:
        CHART["render"](*values)
    assert said in refused.value.stderr


@needs_helm
@pytest.mark.parametrize(
    "values",
    [
        values_of('config.autoscale=null', 'config.replicas=3'),
        values_of('config.cache=null'),
        values_of('config.cache.disk=null'),
        values_of('config.models=[{"model": "b", "replicas": 3, "cpus_per_replica": 1}]'),
        values_of('kv.type="ephemeral"', 'kv.storageClass="fast"'),
        values_of('upgradeStrategy="NewCluster"'),
        values_of('podDisruptionBudget.enabled=false', 'networkPolicy.enabled=false'),
        values_of('env=[{"name": "A", "value": "b"}]', 'podAnnotations={"a": "b"}', 'imagePullSecrets=[{"name": "a"}]'),
        values_of('head.nodeSelector={"a": "b"}', 'head.tolerations=[{"operator": "Exists"}]'),
        values_of('worker.nodeSelector={"a": "b"}', 'worker.priorityClassName="a"', 'worker.runtimeClassName="nvidia"'),
        values_of('config.ingress.drain_s=0.5'),
    ],
    ids=lambda value: " ".join(value[1:]),
)  # fmt: skip
def test_other_values_are_rendered(values: list[str]) -> None:
    manifests = parsed(CHART["render"](*values))
    for manifest in manifests:
        check(manifest)
    parse(ClusterConfig, arguments(manifests))
    volumes = {each["name"] for each in pods(manifests)["worker"]["spec"]["volumes"]}
    mounts = {each["name"] for each in pods(manifests)["worker"]["spec"]["containers"][0]["volumeMounts"]}
    assert mounts == volumes


@needs_helm
def test_pods_follow_the_replicas_of_all_models() -> None:
    more = 'config.models=[{"model": "b", "cpus_per_replica": 1, "autoscale": {"min": 0, "max": 3}}]'
    manifests = parsed(CHART["render"](*values_of(more, "worker.enginesPerPod=2")))
    (group,) = ray_service(manifests)["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert (group["minReplicas"], group["maxReplicas"]) == (1, 4)  # of 2 and 7 engines


@needs_helm
def test_dashboards_and_alerts_are_the_files() -> None:
    docs = "https://wiki.example.com/mneme"
    options = ("dashboards.enabled=true", "prometheusRule.enabled=true", f'prometheusRule.docs="{docs}"')
    manifests = parsed(CHART["render"](*values_of(*options)))
    (dashboards,) = of_kind(manifests, "ConfigMap")
    assert dashboards["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert dashboards["data"] == {path.name: path.read_text() for path in (FOLDER / "files/dashboards").iterdir()}
    (rules,) = of_kind(manifests, "PrometheusRule")
    check(rules)
    alerts = (FOLDER / "files/alerts.yaml").read_text()
    assert rules["spec"] == yaml.safe_load(alerts.replace("runbook_url: docs/", f"runbook_url: {docs}/"))


@needs_helm
def test_a_release_of_another_name_has_names_of_its_own() -> None:
    with pytest.raises(subprocess.CalledProcessError) as refused:
        CHART["render"](name="mneme-" + "x" * 42)
    assert "KubeRay takes names of at most 47" in refused.value.stderr
    manifests = parsed(CHART["render"](name="chat"))
    assert {each["metadata"]["name"].removesuffix("-head").removesuffix("-worker") for each in manifests} == {
        "chat-mneme"
    }
    (policy,) = of_kind(manifests, "NetworkPolicy")
    assert policy["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/instance"] == "chat"
