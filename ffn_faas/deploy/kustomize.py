"""The part of kustomize that the overlays under deploy/ use, so that they can be rendered where kustomize is not.

``resources`` (files and directories), ``namespace``, ``images`` and JSON 6902 ``patches`` by target; anything else is
refused by name. Rendered by kustomize itself they come out the same.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import yaml

from ffn_faas.errors import UsageError

Manifest = dict[str, Any]
FIELDS = {"apiVersion", "kind", "namespace", "resources", "images", "patches"}
CLUSTER_WIDE = {"Namespace"}


def render(directory: Path) -> list[Manifest]:
    """The manifests of a kustomization directory. Raises UsageError naming what is missing or not understood."""
    path = directory / "kustomization.yaml"
    if not path.is_file():
        raise UsageError(f"{directory} holds no kustomization.yaml")
    content = _load(path)[0]
    if unknown := set(content) - FIELDS:
        raise UsageError(f"{path}: {', '.join(sorted(unknown))} not understood", remedy="render it with kustomize")
    manifests: list[Manifest] = []
    for entry in content["resources"]:
        resource = directory / entry
        manifests += render(resource) if resource.is_dir() else _load(resource)
    for patch in content.get("patches", []):
        _patch(manifests, patch, path)
    for manifest in manifests:
        _set_images(manifest, content.get("images", []))
        if "namespace" in content:
            key = "name" if manifest["kind"] in CLUSTER_WIDE else "namespace"
            manifest["metadata"][key] = content["namespace"]
    return manifests


def load(path: Path) -> list[Manifest]:
    """Manifests that are rendered already."""
    return _load(path)


def _load(path: Path) -> list[Manifest]:
    try:
        return [document for document in yaml.safe_load_all(path.read_text()) if document]
    except (OSError, yaml.YAMLError) as error:
        raise UsageError(f"{path}: {error}") from None


def _patch(manifests: list[Manifest], patch: Manifest, path: Path) -> None:
    kind, name = patch["target"]["kind"], patch["target"].get("name")
    matching = [m for m in manifests if m["kind"] == kind and name in (None, m["metadata"]["name"])]
    if not matching:
        raise UsageError(f"{path}: no {kind} {name or ''} to patch")
    for manifest in matching:
        for operation in yaml.safe_load(patch["patch"]):
            try:
                _apply(manifest, operation)
            except (KeyError, IndexError, TypeError, ValueError):
                raise UsageError(f"{path}: {operation['op']} {operation['path']} does not fit {kind}") from None


def _apply(manifest: Manifest, operation: Manifest) -> None:
    *parents, last = [part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:]]
    place: Any = manifest
    for part in parents:
        place = place[int(part)] if isinstance(place, list) else place[part]
    op, value = operation["op"], copy.deepcopy(operation.get("value"))
    if op not in ("add", "replace", "remove"):
        raise ValueError(op)
    key: Any = last
    if isinstance(place, list):
        key = len(place) if last == "-" else int(last)
        if op == "add":
            place.insert(key, value)
            return
    if op != "add":
        place[key]
    if op == "remove":
        del place[key]
    else:
        place[key] = value


def _set_images(node: Any, images: list[Manifest]) -> None:
    if isinstance(node, list):
        for item in node:
            _set_images(item, images)
    elif isinstance(node, dict):
        for image in images:
            if node.get("image") == image["name"]:
                node["image"] = f"{image.get('newName', image['name'])}:{image['newTag']}"
                break
        for value in node.values():
            _set_images(value, images)
