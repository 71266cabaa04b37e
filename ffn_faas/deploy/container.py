"""One container as a process: started, probed, stopped with its grace period. Never blocks."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

from ffn_faas import env
from ffn_faas.demo.processes import Child, Children
from ffn_faas.deploy.probes import Check, Probe, check, run

KINDS = ("startupProbe", "livenessProbe", "readinessProbe")


class Container:
    """A running container. ``fault`` says why it has to be restarted, by its probes."""

    def __init__(
        self,
        spec: Mapping[str, Any],
        command: list[str],
        variables: Mapping[str, str],
        address: str,
        log: Path,
        children: Children,
        executor: Executor,
    ) -> None:
        self.name: str = spec["name"]
        self.ready = False
        self.fault: str | None = None
        self.spec, self._children, self._executor = spec, children, executor
        self._environment = env.container_environment(**variables)
        ports = {port["name"]: port["containerPort"] for port in spec.get("ports", [])}
        self._checks: dict[str, Check] = {
            kind: check(spec[kind], address, ports, self._environment) for kind in KINDS if kind in spec
        }
        self.child: Child = children.start(self.name, command, self._environment, log)
        self._probes: dict[str, Probe] = {}
        self._started = False
        self._hook: Future[Any] | None = None
        self._signalled = False
        self._deadline: float | None = None

    @property
    def stopping(self) -> bool:
        """Whether it was told to stop."""
        return self._deadline is not None

    def tick(self, now: float) -> int | None:
        """Probe and, when stopping, go on with that; the exit code once it has ended, and nothing of it is left."""
        code = self.child.exit_code()
        if code is not None:
            self._end()
            return code
        if self.stopping:
            self._go_on_stopping(now)
        else:
            self._probe(now)
        return None

    def stop(self, now: float, grace_s: float, hook: bool = True) -> None:
        """preStop, SIGTERM, and SIGKILL at the end of the grace period, which holds both."""
        if self.stopping:
            return
        self.ready = False
        self._deadline = now + grace_s
        pre_stop = self.spec.get("lifecycle", {}).get("preStop") if hook else None
        if pre_stop:
            self._hook = self._executor.submit(self._run_hook, pre_stop, grace_s)

    def _run_hook(self, pre_stop: Mapping[str, Any], grace_s: float) -> None:
        if "sleep" in pre_stop:
            time.sleep(min(pre_stop["sleep"]["seconds"], grace_s))
        else:
            run(pre_stop["exec"]["command"], self._environment, grace_s)

    def _go_on_stopping(self, now: float) -> None:
        if self._deadline is not None and now >= self._deadline:
            self.child.kill()
        elif not self._signalled and (self._hook is None or self._hook.done()):
            self._signalled = True
            self.child.signal(signal.SIGTERM)

    def _probe(self, now: float) -> None:
        if not self._started:
            startup = self._start_probe("startupProbe", now)
            if startup is not None:
                startup.tick(now)
                self.fault = "startup probe" if startup.failed else None
            self._started = startup is None or startup.succeeded
            return
        liveness, readiness = self._start_probe("livenessProbe", now), self._start_probe("readinessProbe", now)
        if liveness is not None:
            liveness.tick(now)
            self.fault = "liveness probe" if liveness.failed else None
        if readiness is not None:
            readiness.tick(now)
        self.ready = readiness is None or readiness.succeeded

    def _start_probe(self, kind: str, now: float) -> Probe | None:
        if kind in self._checks and kind not in self._probes:
            self._probes[kind] = Probe(self.spec[kind], self._checks[kind], self._executor, now)
        return self._probes.get(kind)

    def _end(self) -> None:
        self.ready = False
        self._children.forget(self.child)
