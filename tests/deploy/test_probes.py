"""A probe's thresholds over time, told with a clock of the test's own."""

from __future__ import annotations

import http.server
import sys
import threading
from concurrent.futures import Executor, Future
from typing import Any

import pytest

from ffn_faas.deploy.probes import Probe, check


class AtOnce(Executor):
    """Runs what it is given before it returns."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


def outcomes(spec: dict, results: list[bool]) -> tuple[list[float], list[tuple[float, str]]]:
    """(times of the checks, what turned out when), ticking every second of one minute."""
    asked: list[float] = []
    seen: list[tuple[float, str]] = []
    now = 0.0

    def answer(timeout_s: float) -> bool:
        assert timeout_s == spec.get("timeoutSeconds", 1)
        asked.append(now)
        return results[min(len(asked), len(results)) - 1]

    probe = Probe(spec, answer, AtOnce(), 0.0)
    for second in range(60):
        now = float(second)
        probe.tick(now)
        state = "succeeded" if probe.succeeded else "failed" if probe.failed else ""
        if state and (not seen or seen[-1][1] != state):
            seen.append((now, state))
    return asked, seen


def test_defaults_are_those_of_kubernetes() -> None:
    asked, seen = outcomes({}, [False])
    assert asked == [0.0, 10.0, 20.0, 30.0, 40.0, 50.0]
    assert seen == [(21.0, "failed")], "three failures, ten seconds apart"


def test_delay_period_and_thresholds_are_kept() -> None:
    spec = {
        "initialDelaySeconds": 7,
        "periodSeconds": 5,
        "successThreshold": 2,
        "failureThreshold": 2,
        "timeoutSeconds": 4,
    }
    asked, seen = outcomes(spec, [True, False, True, True, False, False, True])
    assert asked[:4] == [7.0, 12.0, 17.0, 22.0]
    assert seen == [(23.0, "succeeded"), (33.0, "failed"), (43.0, "succeeded")]


def test_http_probe_takes_200_to_399_for_success() -> None:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(int(self.path[1:]))
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.9.8.7", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        results = {}
        for status in (200, 204, 302, 404, 503):
            spec = {"httpGet": {"path": f"/{status}", "port": "named"}}
            results[status] = check(spec, "127.9.8.7", {"named": server.server_port}, {})(10)
        server.shutdown()
        thread.join()
    assert results == {200: True, 204: True, 302: True, 404: False, 503: False}
    assert check({"httpGet": {"port": server.server_port}}, "127.9.8.7", {}, {})(1) is False, "nobody listens"


@pytest.mark.parametrize(
    ("program", "expected"), [("", True), ("raise SystemExit(1)", False), ("import time; time.sleep(60)", False)]
)
def test_exec_probe_wants_exit_code_0_in_time(program: str, expected: bool) -> None:
    timeout_s = 0.5 if "sleep" in program else 30
    assert check({"exec": {"command": [sys.executable, "-c", program]}}, "", {}, {})(timeout_s) is expected
