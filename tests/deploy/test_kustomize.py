"""The overlays are plain kustomize: kustomize itself renders them to the same manifests."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from ffn_faas.deploy import kustomize
from ffn_faas.errors import UsageError

from .rendered import OVERLAYS, ROOT

BASE = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: one}\ndata: {key: value}\n"


def _written(directory: Path, kustomization: str) -> Path:
    (directory / "base.yaml").write_text(BASE)
    (directory / "kustomization.yaml").write_text("resources: [base.yaml]\n" + kustomization)
    return directory


def _ordered(manifests: list[dict]) -> list[dict]:
    return sorted(manifests, key=lambda m: (m["kind"], m["metadata"]["name"]))


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_kustomize_itself_renders_the_same(overlay: str) -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl, which holds kustomize, is not here")
    directory = ROOT / "overlays" / overlay
    theirs = subprocess.run(["kubectl", "kustomize", directory], check=True, capture_output=True, timeout=60).stdout
    assert _ordered(list(yaml.safe_load_all(theirs))) == _ordered(kustomize.render(directory))


def test_a_patch_changes_what_it_targets(tmp_path: Path) -> None:
    patch = "patches: [{target: {kind: ConfigMap}, patch: '[{op: add, path: /data/a~1b, value: x}]'}]\nnamespace: ns\n"
    (manifest,) = kustomize.render(_written(tmp_path, patch))
    assert manifest["data"] == {"key": "value", "a/b": "x"}
    assert manifest["metadata"]["namespace"] == "ns"


def test_a_patch_without_a_target_is_refused(tmp_path: Path) -> None:
    patch = "patches: [{target: {kind: Secret}, patch: '[{op: remove, path: /data}]'}]\n"
    with pytest.raises(UsageError, match="no Secret"):
        kustomize.render(_written(tmp_path, patch))


def test_replacing_what_is_not_there_is_refused(tmp_path: Path) -> None:
    patch = "patches: [{target: {kind: ConfigMap}, patch: '[{op: replace, path: /data/other, value: x}]'}]\n"
    with pytest.raises(UsageError, match="/data/other does not fit"):
        kustomize.render(_written(tmp_path, patch))


def test_what_is_not_understood_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="namePrefix"):
        kustomize.render(_written(tmp_path, "namePrefix: a-\n"))


def test_a_directory_without_kustomization_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"kustomization\.yaml"):
        kustomize.render(tmp_path)
