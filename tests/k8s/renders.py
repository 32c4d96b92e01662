"""Rendered manifests in k8s/kustomize, and what `.ci/chart` does."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import jsonschema
import yaml

ROOT = Path(__file__).parents[2]
CHART: dict[str, Any] = runpy.run_path(str(ROOT / ".ci" / "chart"))
NAMES = ("cpu", "gpu", "gpu-nodes")
Manifest = dict[str, Any]

_SCHEMAS = [json.loads(path.read_text()) for path in (Path(__file__).parent / "schemas").glob("*.json")]
_SCHEMA_BY_KIND = {schema["properties"]["kind"]["const"]: schema for schema in _SCHEMAS}


def parsed(text: str) -> list[Manifest]:
    return [each for each in yaml.safe_load_all(text) if each]


def rendered(name: str) -> list[Manifest]:
    return parsed((ROOT / "k8s" / "kustomize" / name / "mneme.yaml").read_text())


def of_kind(manifests: list[Manifest], kind: str) -> list[Manifest]:
    return [each for each in manifests if each["kind"] == kind]


def ray_service(manifests: list[Manifest]) -> Manifest:
    (found,) = of_kind(manifests, "RayService")
    return found


def pods(manifests: list[Manifest]) -> dict[str, Manifest]:
    """Return the pod templates of the head and the workers, by their component."""
    cluster = ray_service(manifests)["spec"]["rayClusterConfig"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    return {
        group["template"]["metadata"]["labels"]["app.kubernetes.io/component"]: group["template"] for group in groups
    }


def container(pod: Manifest) -> Manifest:
    found: Manifest
    (found,) = pod["spec"]["containers"]
    return found


def environment(pod: Manifest) -> dict[str, str]:
    return {entry["name"]: entry["value"] for entry in container(pod)["env"]}


def serve_config(manifests: list[Manifest]) -> Manifest:
    loaded: Manifest = yaml.safe_load(ray_service(manifests)["spec"]["serveConfigV2"])
    return loaded


def arguments(manifests: list[Manifest]) -> Manifest:
    """Return what the application is built from."""
    (application,) = serve_config(manifests)["applications"]
    found: Manifest = application["args"]
    return found


def check(manifest: Manifest) -> None:
    """Raise `jsonschema.ValidationError` unless the manifest is one of its kind, without an unknown field."""
    jsonschema.Draft202012Validator(_SCHEMA_BY_KIND[manifest["kind"]]).validate(manifest)
