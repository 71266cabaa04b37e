"""A container's environment and command line, put together as kubelet does it. Pure."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Mapping
from typing import Any

from ffn_faas.deploy.kustomize import Manifest
from ffn_faas.deploy.pods import PodSpec
from ffn_faas.errors import UsageError

_REFERENCE = re.compile(r"\$\$|\$\(([A-Za-z_][A-Za-z0-9_.-]*)\)")
_LABEL = re.compile(r"metadata\.labels\['(.+)'\]")


class Sources:
    """ConfigMaps and Secrets by name."""

    def __init__(self, manifests: Iterable[Manifest]) -> None:
        self.config_maps: dict[str, dict[str, str]] = {}
        self.secrets: dict[str, dict[str, str]] = {}
        for manifest in manifests:
            name = manifest["metadata"]["name"]
            if manifest["kind"] == "ConfigMap":
                self.config_maps[name] = dict(manifest.get("data", {}))
            elif manifest["kind"] == "Secret":
                encoded = manifest.get("data", {})
                plain = {key: base64.b64decode(value).decode() for key, value in encoded.items()}
                self.secrets[name] = {**plain, **manifest.get("stringData", {})}


def expand(text: str, variables: Mapping[str, str]) -> str:
    """``$(NAME)`` becomes its value, an unknown one stays as it is, ``$$`` is one dollar sign."""

    def value(match: re.Match[str]) -> str:
        return "$" if match[0] == "$$" else variables.get(match[1], match[0])

    return _REFERENCE.sub(value, text)


def environment(container: Mapping[str, Any], pod: PodSpec, sources: Sources, address: str) -> dict[str, str]:
    """What the manifest adds to the image's environment; ``address`` is the pod's. UsageError if a part is missing."""
    variables = dict(pod.variables)
    for source in container.get("envFrom", []):
        kind = "configMapRef" if "configMapRef" in source else "secretRef"
        known = sources.config_maps if kind == "configMapRef" else sources.secrets
        variables.update(_named(known, source[kind]["name"], container))
    for entry in container.get("env", []):
        if "value" in entry:
            variables[entry["name"]] = expand(entry["value"], variables)
        else:
            variables[entry["name"]] = _value_from(entry["valueFrom"], container, pod, sources, address)
    return variables


def command(container: Mapping[str, Any], variables: Mapping[str, str]) -> list[str]:
    """The command line; the entrypoint of the images only adds an init process before it."""
    words = [*container.get("command", []), *container.get("args", [])]
    if not words:
        raise UsageError(f"container {container['name']} has neither command nor args")
    return [expand(word, variables) for word in words]


def _value_from(
    source: Mapping[str, Any], container: Mapping[str, Any], pod: PodSpec, sources: Sources, address: str
) -> str:
    for kind, known in (("configMapKeyRef", sources.config_maps), ("secretKeyRef", sources.secrets)):
        if kind in source:
            values = _named(known, source[kind]["name"], container)
            if source[kind]["key"] not in values:
                raise UsageError(f"container {container['name']}: {source[kind]['name']} has no {source[kind]['key']}")
            return values[source[kind]["key"]]
    path = source.get("fieldRef", {}).get("fieldPath", "")
    if label := _LABEL.fullmatch(path):
        return pod.labels.get(label[1], "")
    fields = {
        "status.podIP": address,
        "metadata.name": pod.name,
        "metadata.namespace": pod.namespace,
    }
    if path not in fields:
        raise UsageError(f"container {container['name']}: {dict(source)} is not known here")
    return fields[path]


def _named(known: Mapping[str, dict[str, str]], name: str, container: Mapping[str, Any]) -> dict[str, str]:
    if name not in known:
        raise UsageError(f"container {container['name']} names {name}, which is not among the manifests")
    return known[name]
