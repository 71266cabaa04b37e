"""The overlays as they come out, and ways into them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ffn_faas.deploy import kustomize
from ffn_faas.deploy.environment import Sources, command, environment
from ffn_faas.deploy.pods import PodSpec, pods

ROOT = Path(__file__).parents[2] / "deploy"
OVERLAYS = sorted(path.name for path in (ROOT / "overlays").iterdir())


class Overlay:
    def __init__(self, name: str) -> None:
        self.name = name
        self.manifests = kustomize.render(ROOT / "overlays" / name)
        self.pods = pods(self.manifests)

    def kind(self, kind: str, name: str | None = None) -> dict[str, Any]:
        found = [m for m in self.manifests if m["kind"] == kind and name in (None, m["metadata"]["name"])]
        assert len(found) == 1, f"{len(found)} x {kind} {name or ''}"
        return found[0]

    def side(self, app: str) -> list[PodSpec]:
        found = [pod for pod in self.pods if pod.labels["app"] == app]
        assert found
        return found

    def container(self, app: str, name: str | None = None) -> dict[str, Any]:
        spec = self.side(app)[0].spec
        every = [*spec.get("initContainers", []), *spec["containers"]]
        return next(container for container in every if container["name"] == (name or app))

    def started(
        self, pod: PodSpec, container: dict[str, Any], address: str = "10.1.2.3"
    ) -> tuple[list[str], dict[str, str]]:
        """(command line, variables) as kubelet would start it."""
        variables = environment(container, pod, Sources(self.manifests), address)
        return command(container, variables), variables


def all_containers(overlay: Overlay) -> Iterator[tuple[PodSpec, dict[str, Any]]]:
    for pod in overlay.pods:
        for container in [*pod.spec.get("initContainers", []), *pod.spec["containers"]]:
            yield pod, container
