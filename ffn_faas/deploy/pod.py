"""One pod: init containers in order, then its containers; restarts in place, or fails with its group."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

from ffn_faas.demo.processes import Children, describe_exit
from ffn_faas.deploy.container import Container
from ffn_faas.deploy.environment import Sources, command, environment
from ffn_faas.deploy.pods import PodSpec

Note = Callable[[str, str], None]
BACKOFF_S, LONGEST_BACKOFF_S = 10.0, 300.0


def backoff_s(restarts: int) -> float:
    """Kubelet's delay before the ``restarts``th start after the first one."""
    return 0.0 if restarts <= 1 else min(BACKOFF_S * 2 ** (restarts - 2), LONGEST_BACKOFF_S)


class Pod:
    """``note(pod, what)`` hears of every change. ``failed``: it lost a container."""

    def __init__(
        self,
        spec: PodSpec,
        sources: Sources,
        table: Mapping[str, str],
        address: str,
        logs: Path,
        children: Children,
        executor: Executor,
        note: Note,
    ) -> None:
        self.spec, self.address = spec, address
        self.ready = self.failed = self.gone = self.stopping = False
        self.first_ready: float | None = None
        self._sources, self._table, self._logs = sources, table, logs
        self._children, self._executor = children, executor
        self._hear = note
        self._init = list(spec.spec.get("initContainers", []))
        self._running: dict[str, Container] = {}
        self._restarts: dict[str, int] = {}
        self._starts: dict[str, int] = {}
        self._due: list[tuple[float, Mapping[str, Any]]] = [] if self._init else self._all_due(0.0)

    @property
    def grace_s(self) -> float:
        return float(self.spec.spec.get("terminationGracePeriodSeconds", 30))

    def tick(self, now: float) -> None:
        """Go on by what can be done without waiting."""
        if not self.stopping:
            self._start_due(now)
        for container in list(self._running.values()):
            code = container.tick(now)
            if code is not None:
                del self._running[container.name]
                self._ended(container, code, now)
            elif container.fault and not container.stopping:
                self._note(f"{container.name}: {container.fault} failed")
                container.stop(now, self.grace_s)
        self._publish_ready(now)
        self.gone = self.stopping and not self._running

    def stop(self, now: float) -> None:
        """Terminate all containers at once; ``gone`` follows."""
        if not self.stopping:
            self.stopping = True
            self._note("terminating")
            for container in self._running.values():
                container.stop(now, self.grace_s)

    def kill(self) -> None:
        """End every process of this pod by SIGKILL, as a lost node or the kernel's memory killer would."""
        for container in self._running.values():
            container.child.kill()

    def _note(self, what: str) -> None:
        self._hear(self.spec.name, what)

    def _all_due(self, now: float) -> list[tuple[float, Mapping[str, Any]]]:
        return [(now, container) for container in self.spec.spec["containers"]]

    def _start_due(self, now: float) -> None:
        if self._init and not self._running and not self._due:
            self._due = [(now, self._init[0])]
        for due, container in list(self._due):
            if now >= due:
                self._due.remove((due, container))
                self._start(container)

    def _start(self, spec: Mapping[str, Any]) -> None:
        name = spec["name"]
        number = self._starts[name] = self._starts.get(name, -1) + 1
        variables = environment(spec, self.spec, self._sources, self.address)
        variables = {key: self._table.get(value, value) for key, value in variables.items()}
        words = command(spec, variables)
        log = self._logs / f"{self.spec.name}.{name}.{number}.log"
        while log.exists():
            number += 1
            log = self._logs / f"{self.spec.name}.{name}.{number}.log"
        self._running[name] = Container(spec, words, variables, self.address, log, self._children, self._executor)
        self._note(f"{name} started")

    def _ended(self, container: Container, code: int, now: float) -> None:
        self._note(f"{container.name} ended with {describe_exit(code)}")
        if self.stopping:
            return
        if code != 0 and (cause := container.child.cause()):
            self._note(f"{container.name} said: {cause}")
        if self._init and container.name == self._init[0]["name"] and code == 0:
            del self._init[0]
            self._due = [] if self._init else self._all_due(now)
            return
        self.failed = True
        if self.spec.group is None:
            restarts = self._restarts[container.name] = self._restarts.get(container.name, 0) + 1
            self._due.append((now + backoff_s(restarts), container.spec))

    def _publish_ready(self, now: float) -> None:
        containers = len(self.spec.spec["containers"])
        ready = not self._init and len(self._running) == containers and all(c.ready for c in self._running.values())
        if ready != self.ready:
            self.ready = ready
            self.first_ready = self.first_ready or now
            self._note("Ready" if ready else "not Ready")
