"""The part of KubeRay's RayService CRD (ray.io/v1) and of Kubernetes' pod template that the manifest uses, strict.

Field names and types are those of `ray-operator/apis/ray/v1/*_types.go` and `core/v1`; what is not listed here is
refused, so that a typo cannot pass as an unknown field would with the API server's pruning.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

STRING: Schema = {"type": "string", "minLength": 1}
BOOLEAN: Schema = {"type": "boolean"}
COUNT: Schema = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}
QUANTITY: Schema = {"type": "string", "pattern": r"^\d+(\.\d+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?$"}
STRINGS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}


def strict(required: str = "", **properties: Schema) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": required.split(),
        "additionalProperties": False,
    }


def listed(item: Schema) -> Schema:
    return {"type": "array", "items": item, "minItems": 1}


METADATA = strict(name=STRING, namespace=STRING, labels=STRINGS, annotations=STRINGS)
RESOURCES = strict(requests={"type": "object", "additionalProperties": QUANTITY}, limits={"$ref": "#/$defs/quantities"})
PROBE = strict(
    httpGet=strict("path port", path={"type": "string", "pattern": "^/"}, port=PORT),
    initialDelaySeconds=COUNT,
    periodSeconds=COUNT,
    timeoutSeconds=COUNT,
    failureThreshold=COUNT,
    successThreshold=COUNT,
)
CONTAINER = strict(
    "name image",
    name=STRING,
    image=STRING,
    imagePullPolicy={"enum": ["Always", "IfNotPresent", "Never"]},
    ports=listed(
        strict("containerPort", name={"type": "string", "maxLength": 15}, containerPort=PORT, protocol=STRING)
    ),
    env=listed(strict("name value", name=STRING, value={"type": "string"})),
    resources=RESOURCES,
    lifecycle=strict("", preStop=strict("exec", exec=strict("command", command=listed(STRING)))),
    readinessProbe=PROBE,
    livenessProbe=PROBE,
    startupProbe=PROBE,
    securityContext=strict(
        allowPrivilegeEscalation=BOOLEAN,
        readOnlyRootFilesystem=BOOLEAN,
        capabilities=strict(drop=listed(STRING), add=listed(STRING)),
    ),
    volumeMounts=listed(strict("name mountPath", name=STRING, mountPath=STRING, readOnly=BOOLEAN)),
)
POD = strict(
    "containers",
    containers=listed(CONTAINER),
    terminationGracePeriodSeconds=COUNT,
    securityContext=strict(
        runAsNonRoot=BOOLEAN,
        runAsUser=COUNT,
        runAsGroup=COUNT,
        fsGroup=COUNT,
        seccompProfile=strict("type", type={"enum": ["RuntimeDefault", "Localhost", "Unconfined"]}),
    ),
    tolerations=listed(
        strict(
            key=STRING,
            operator={"enum": ["Exists", "Equal"]},
            value={"type": "string"},
            effect={"enum": ["NoSchedule", "PreferNoSchedule", "NoExecute"]},
        )
    ),
    topologySpreadConstraints=listed(
        strict(
            "maxSkew topologyKey whenUnsatisfiable",
            maxSkew={"type": "integer", "minimum": 1},
            topologyKey=STRING,
            whenUnsatisfiable={"enum": ["DoNotSchedule", "ScheduleAnyway"]},
            labelSelector=strict(matchLabels=STRINGS),
        )
    ),
    volumes=listed(strict("name", name=STRING, emptyDir=strict(medium={"enum": ["", "Memory"]}, sizeLimit=QUANTITY))),
)
TEMPLATE = strict("spec", metadata=METADATA, spec=POD)
WORKER_GROUP = strict(
    "groupName rayStartParams template minReplicas maxReplicas",
    groupName=STRING,
    replicas=COUNT,
    minReplicas=COUNT,
    maxReplicas=COUNT,
    numOfHosts=COUNT,
    rayStartParams=STRINGS,
    template=TEMPLATE,
)
RAY_CLUSTER = strict(
    "headGroupSpec",
    rayVersion=STRING,
    enableInTreeAutoscaling=BOOLEAN,
    autoscalerOptions=strict("", version={"enum": ["v1", "v2"]}, idleTimeoutSeconds=COUNT),
    authOptions=strict("mode", mode={"enum": ["token", "disabled"]}),
    headGroupSpec=strict(
        "rayStartParams template",
        serviceType={"enum": ["ClusterIP", "NodePort", "LoadBalancer"]},
        rayStartParams=STRINGS,
        template=TEMPLATE,
    ),
    workerGroupSpecs=listed(WORKER_GROUP),
)
RAY_SERVICE: Schema = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "$defs": {"quantities": {"type": "object", "additionalProperties": QUANTITY}},
    **strict(
        "apiVersion kind metadata spec",
        apiVersion={"const": "ray.io/v1"},
        kind={"const": "RayService"},
        metadata=METADATA,
        spec=strict(
            "serveConfigV2 rayClusterConfig",
            serveConfigV2=STRING,
            rayClusterConfig=RAY_CLUSTER,
            upgradeStrategy=strict(type={"enum": ["NewCluster", "NewClusterWithIncrementalUpgrade", "None"]}),
            rayClusterDeletionDelaySeconds=COUNT,
            excludeHeadPodFromServeSvc=BOOLEAN,
        ),
    ),
}
