"""Runs rendered manifests on this machine without a cluster: pods as processes, same commands, environment and probes.

    python -m ffn_faas.deploy.local deploy/overlays/local --set MODEL=/path/to/checkpoint

What stands in for a cluster: each pod has a loopback address of its own, and a variable that holds the name of a pod or
service holds that address instead (arguments refer to variables). Left out: images, volumes, resource limits, users,
network policies.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from ffn_faas.demo.processes import Children
from ffn_faas.deploy import kustomize, names, pods
from ffn_faas.deploy.environment import Sources
from ffn_faas.deploy.kustomize import Manifest
from ffn_faas.deploy.pod import BACKOFF_S, Pod, backoff_s
from ffn_faas.errors import FfnError, UsageError

if TYPE_CHECKING:
    from typing_extensions import Self

TICK_S = 0.05


class Cluster:
    """Pods and the controllers' part: a group of which a pod failed is terminated whole and made anew.

    Use as a context; call ``tick`` (from the thread that made it) until done. ``note(pod, what)`` hears of all changes.
    """

    def __init__(self, manifests: Sequence[Manifest], logs: Path, note: Callable[[str, str], None]) -> None:
        self._specs = pods.pods(manifests)
        if not self._specs:
            raise UsageError("no workload among the manifests")
        self._sources, self._logs, self._note = Sources(manifests), logs, note
        self.addresses = names.assign(self._specs)
        self._table = names.resolve(manifests, self._specs, self.addresses)
        self._children = Children()
        self._executor = ThreadPoolExecutor(4 * len(self._specs))
        self.pods: dict[str, Pod] = {}
        self._failures: dict[str, int] = {}
        self._due: dict[str, float] = {}

    def __enter__(self) -> Self:
        self._children.__enter__()
        for spec in self._specs:
            self._create(spec)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._children.__exit__(*exc_info)
        self._executor.shutdown()

    def tick(self) -> None:
        """Let every pod go on, recreate groups; never blocks for long."""
        now = time.monotonic()
        for pod in list(self.pods.values()):
            pod.tick(now)
        for group in {pod.spec.group for pod in self.pods.values() if pod.failed and pod.spec.group}:
            members = [pod for pod in self.pods.values() if pod.spec.group == group]
            for pod in members:
                pod.stop(now)
            if not all(pod.gone for pod in members):
                continue
            if group not in self._due:
                self._due[group] = now + self._delay(group, members, now)
            if now >= self._due[group]:
                del self._due[group]
                self._note(group, "group recreated")
                for pod in members:
                    self._create(pod.spec)

    def _delay(self, group: str, members: Sequence[Pod], now: float) -> float:
        """Seconds before a failed group is made anew: the longer, the more often in a row it hardly came up."""
        came_up = all(pod.first_ready is not None and now - pod.first_ready > BACKOFF_S for pod in members)
        failures = self._failures[group] = 1 if came_up else self._failures.get(group, 0) + 1
        return backoff_s(failures)

    def kill(self) -> None:
        """End every process of every pod by SIGKILL; ``stop`` then returns at once."""
        for pod in self.pods.values():
            pod.kill()

    def stop(self, hurry: threading.Event | None = None) -> None:
        """Terminate all pods, each with its grace period, and wait for the end; ``hurry`` ends that by ``kill``."""
        for pod in self.pods.values():
            pod.stop(time.monotonic())
        while not all(pod.gone for pod in self.pods.values()):
            if hurry is not None and hurry.is_set():
                self.kill()
            for pod in self.pods.values():
                pod.tick(time.monotonic())
            time.sleep(TICK_S)

    def _create(self, spec: pods.PodSpec) -> None:
        self.pods[spec.name] = Pod(
            spec, self._sources, self._table, self.addresses[spec.name], self._logs, self._children, self._executor,
            self._note,
        )  # fmt: skip


def set_values(manifests: Sequence[Manifest], assignments: Sequence[str]) -> None:
    """``KEY=VALUE`` into every ConfigMap that has KEY. Raises UsageError where none has."""
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        maps = [m["data"] for m in manifests if m["kind"] == "ConfigMap" and key in m.get("data", {})]
        if not equals or not maps:
            raise UsageError(f"--set {assignment}: no ConfigMap has {key}")
        for data in maps:
            data[key] = value


def run_until_signalled(manifests: Sequence[Manifest], logs: Path | None) -> None:
    """Run all pods until SIGTERM or SIGINT, then terminate them; one JSON object per change on stdout.

    A second signal cuts the grace periods short. The handlers stay: a third one must not leave anything half done.
    """
    stop, hurry = threading.Event(), threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: (hurry if stop.is_set() else stop).set())
    logs = logs or Path(tempfile.mkdtemp(prefix="ffn_faas-pods-"))
    logs.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()

    def note(pod: str, what: str) -> None:
        print(json.dumps({"s": round(time.monotonic() - begin, 2), "pod": pod, "event": what}), flush=True)

    with Cluster(manifests, logs, note) as cluster:
        print(json.dumps({"logs": str(logs), "addresses": cluster.addresses}), flush=True)
        while not stop.wait(TICK_S):
            cluster.tick()
        cluster.stop(hurry)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m ffn_faas.deploy.local", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("manifests", type=Path, help="kustomization directory, or a file of rendered manifests")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a value of the ConfigMaps")
    parser.add_argument("--logs", type=Path, help="directory for the containers' output (default: a temporary one)")
    args = parser.parse_args(argv)
    try:
        manifests = kustomize.render(args.manifests) if args.manifests.is_dir() else kustomize.load(args.manifests)
        set_values(manifests, args.set)
        run_until_signalled(manifests, args.logs)
    except FfnError as error:
        print(f"ffn_faas: error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
