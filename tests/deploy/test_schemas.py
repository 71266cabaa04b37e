"""Rendered manifests against the published schemas, unknown fields refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest

from .rendered import OVERLAYS, Overlay

VERSION = "1.36"
LWS_SCHEMA = json.loads((Path(__file__).parent / "schemas" / "leaderworkerset-v1.json").read_text())


def validate(manifest: dict[str, Any]) -> None:
    """Raise jsonschema.ValidationError for what the API server would not take."""
    if manifest["kind"] != "LeaderWorkerSet":
        kubernetes_validate.validate(manifest, VERSION, strict=True)
        return
    jsonschema.validate(manifest, LWS_SCHEMA)
    for template in ("leaderTemplate", "workerTemplate"):
        if template in manifest["spec"]["leaderWorkerTemplate"]:
            pod = manifest["spec"]["leaderWorkerTemplate"][template]
            carrier = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "pod"}, "template": pod}
            kubernetes_validate.validate(carrier, VERSION, strict=True)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_manifest_validates(overlay: str) -> None:
    manifests = Overlay(overlay).manifests
    for manifest in manifests:
        validate(manifest)
    assert {m["kind"] for m in manifests} >= {
        "Namespace", "ConfigMap", "Secret", "Service", "NetworkPolicy", "PodDisruptionBudget", "Deployment",
    }  # fmt: skip


@pytest.mark.parametrize(
    "path",
    [
        ("LeaderWorkerSet", "spec", "leaderWorkerTemplate", "restartPolicyy"),
        ("LeaderWorkerSet", "spec", "leaderWorkerTemplate", "workerTemplate", "spec", "hostIpc"),
        ("Deployment", "spec", "template", "spec", "terminationGrace"),
        ("Service", "spec", "publishNotReady"),
    ],
)
def test_a_misspelt_field_is_found(path: tuple[str, ...]) -> None:
    kind, *parents, last = path
    manifests = [m for m in Overlay("cpu").manifests if m["kind"] == kind]
    manifest = copy.deepcopy(manifests[0])
    validate(manifest)
    place = manifest
    for part in parents:
        place = place[part]
    place[last] = "x"
    with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
        validate(manifest)


def test_a_restart_policy_that_does_not_exist_is_found() -> None:
    manifest = copy.deepcopy(Overlay("cpu").kind("LeaderWorkerSet"))
    manifest["spec"]["leaderWorkerTemplate"]["restartPolicy"] = "Always"
    with pytest.raises(jsonschema.ValidationError, match="Always"):
        validate(manifest)
