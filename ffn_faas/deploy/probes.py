"""Probes with kubelet's meaning: initial delay, period, timeout, thresholds; a startup probe holds the others back."""

from __future__ import annotations

import http.client
import subprocess
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from typing import Any

Check = Callable[[float], bool]


class Probe:
    """One probe of one started container. ``tick`` never blocks: the check runs on ``executor``.

    ``succeeded`` and ``failed`` say whether the threshold of successes or failures in a row was reached last.
    """

    def __init__(self, spec: Mapping[str, Any], check: Check, executor: Executor, now: float) -> None:
        self.succeeded = self.failed = False
        self._check, self._executor = check, executor
        self._period = float(spec.get("periodSeconds", 10))
        self._timeout = float(spec.get("timeoutSeconds", 1))
        self._wanted = {True: spec.get("successThreshold", 1), False: spec.get("failureThreshold", 3)}
        self._due = now + float(spec.get("initialDelaySeconds", 0))
        self._last: bool | None = None
        self._in_a_row = 0
        self._running: Future[bool] | None = None

    def tick(self, now: float) -> None:
        """Take a result that came, start a check that is due."""
        if self._running is not None and self._running.done():
            self._took(self._running.result())
            self._running = None
        if self._running is None and now >= self._due:
            self._due = now + self._period
            self._running = self._executor.submit(self._check, self._timeout)

    def _took(self, result: bool) -> None:
        self._in_a_row = self._in_a_row + 1 if result is self._last else 1
        self._last = result
        if self._in_a_row >= self._wanted[result]:
            self.succeeded, self.failed = result, not result


def check(spec: Mapping[str, Any], address: str, ports: Mapping[str, int], environment: Mapping[str, str]) -> Check:
    """What a probe of ``spec`` asks: an HTTP GET on the pod's ``address``, or a command's exit code."""
    if "exec" in spec:
        return lambda timeout_s: run(spec["exec"]["command"], environment, timeout_s)
    asked = spec["httpGet"]
    port = asked["port"] if isinstance(asked["port"], int) else ports[asked["port"]]

    def get(timeout_s: float) -> bool:
        connection = http.client.HTTPConnection(asked.get("host", address), port, timeout=timeout_s)
        try:
            connection.request("GET", asked.get("path", "/"))
            return 200 <= connection.getresponse().status < 400
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    return get


def run(words: list[str], environment: Mapping[str, str], timeout_s: float) -> bool:
    """Run a command of an ``exec`` probe or hook to its end; whether it ended with 0 in time."""
    try:
        ended = subprocess.run(
            words, env=dict(environment), timeout=timeout_s, check=False, stdin=subprocess.DEVNULL, capture_output=True
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return ended.returncode == 0
