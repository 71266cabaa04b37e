"""Loopback addresses instead of a cluster's network and DNS: each pod has one of its own. Pure but for the choice."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from ffn_faas.deploy.kustomize import Manifest
from ffn_faas.deploy.pods import PodSpec


def assign(pods: Sequence[PodSpec], network: str | None = None) -> dict[str, str]:
    """Pod name -> an address of its own in 127.0.0.0/8; a random /24 of it unless ``network`` ("127.7.7") is given."""
    if network is None:
        network = f"127.{random.randrange(2, 250)}.{random.randrange(2, 250)}"  # noqa: S311 - no secret
    return {pod.name: f"{network}.{number}" for number, pod in enumerate(pods, start=1)}


def resolve(manifests: Sequence[Manifest], pods: Sequence[PodSpec], addresses: Mapping[str, str]) -> dict[str, str]:
    """Every name that a pod could look up -> the address of the (first) pod behind it."""
    table: dict[str, str] = {}
    for pod in pods:
        if pod.address_name:
            table[pod.address_name] = addresses[pod.name]
    for manifest in manifests:
        if manifest["kind"] != "Service":
            continue
        selector = manifest["spec"].get("selector", {})
        behind = [pod for pod in pods if selector.items() <= pod.labels.items()]
        if behind:
            name, address = manifest["metadata"]["name"], addresses[behind[0].name]
            namespace = manifest["metadata"].get("namespace", "default")
            table |= {name: address, f"{name}.{namespace}": address, f"{name}.{namespace}.svc": address}
    return table
