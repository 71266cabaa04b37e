"""From workloads to pods, as their controllers would make them: names, labels, variables. Pure."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ffn_faas.deploy.kustomize import Manifest
from ffn_faas.errors import UsageError

LWS = "leaderworkerset.sigs.k8s.io"
PASSIVE = {
    "Namespace", "ConfigMap", "Secret", "Service", "NetworkPolicy", "PodDisruptionBudget", "ResourceClaim",
    "PersistentVolumeClaim",
}  # fmt: skip


@dataclass(frozen=True)
class PodSpec:
    """One pod to run. ``group`` is what is recreated together; None: containers restart in place."""

    name: str
    namespace: str
    labels: dict[str, str]
    spec: dict[str, Any]
    group: str | None = None
    variables: dict[str, str] = field(default_factory=dict)
    """What the controller adds to the environment of every container."""
    address_name: str = ""
    """The name that other pods reach this one by, besides services."""


def pods(manifests: Sequence[Manifest]) -> list[PodSpec]:
    """All pods of all workloads. Raises UsageError for a kind that is not known here."""
    made: list[PodSpec] = []
    for manifest in manifests:
        if manifest["kind"] in MAKERS:
            made += MAKERS[manifest["kind"]](manifest)
        elif manifest["kind"] not in PASSIVE:
            raise UsageError(f"kind {manifest['kind']} is not known here")
    return made


def _names(manifest: Manifest) -> tuple[str, str]:
    return manifest["metadata"]["name"], manifest["metadata"].get("namespace", "default")


def _leader_worker_set(manifest: Manifest) -> Iterator[PodSpec]:
    name, namespace = _names(manifest)
    template = manifest["spec"]["leaderWorkerTemplate"]
    size = template.get("size", 1)
    for group in range(manifest["spec"].get("replicas", 1)):
        leader = f"{name}-{group}"
        for index in range(size):
            pod = template["workerTemplate"] if index else template.get("leaderTemplate", template["workerTemplate"])
            own = leader if index == 0 else f"{leader}-{index}"
            labels = {
                f"{LWS}/name": name, f"{LWS}/group-index": str(group), f"{LWS}/worker-index": str(index),
            }  # fmt: skip
            restart = template.get("restartPolicy", "RecreateGroupOnPodRestart")
            yield PodSpec(
                name=own,
                namespace=namespace,
                labels={**pod.get("metadata", {}).get("labels", {}), **labels},
                spec=copy.deepcopy(pod["spec"]),
                group=leader if restart == "RecreateGroupOnPodRestart" else None,
                variables={
                    "LWS_LEADER_ADDRESS": f"{leader}.{name}.{namespace}",
                    "LWS_GROUP_SIZE": str(size),
                    "LWS_WORKER_INDEX": str(index),
                },
                address_name=f"{own}.{name}.{namespace}",
            )


def _stateful_set(manifest: Manifest) -> Iterator[PodSpec]:
    name, namespace = _names(manifest)
    for index in range(manifest["spec"].get("replicas", 1)):
        pod = f"{name}-{index}"
        labels = {"apps.kubernetes.io/pod-index": str(index)}
        template = manifest["spec"]["template"]
        yield PodSpec(
            pod,
            namespace,
            {**template["metadata"]["labels"], **labels},
            copy.deepcopy(template["spec"]),
            address_name=f"{pod}.{manifest['spec']['serviceName']}",
        )


def _deployment(manifest: Manifest) -> Iterator[PodSpec]:
    name, namespace = _names(manifest)
    template = manifest["spec"]["template"]
    for index in range(manifest["spec"].get("replicas", 1)):
        yield PodSpec(f"{name}-{index}", namespace, template["metadata"]["labels"], copy.deepcopy(template["spec"]))


MAKERS = {"LeaderWorkerSet": _leader_worker_set, "StatefulSet": _stateful_set, "Deployment": _deployment}
